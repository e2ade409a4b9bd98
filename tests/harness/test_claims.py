"""Verdicts on the paper's claims, from curves and diagnoses whose answer is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from icr_bench.harness import claims
from icr_bench.harness.claims import CLAIMS, ROLES, Evidence, Family
from icr_bench.harness.cli import main
from icr_bench.harness.curve import Curve

COUNT = 400
QUERIES = tuple(f"q{number}" for number in range(COUNT))


def family(trained: int = 100, **notes: str) -> Family:
    return Family("toy", {role: role.upper() for role in ROLES}, trained, notes=notes)


def curve(role: str, values: Mapping[int, float], latency: Mapping[int, float] | None = None) -> Curve:
    """One whose first queries are right, as many as the values say."""
    rows = np.array([np.arange(COUNT) < round(share * COUNT) for share in values.values()], float)
    machine = {"machine": {"id": "one"}}
    records = tuple(
        {
            "n": n,
            "time": {"query_p50_s": (latency or {}).get(n)},
            "environment": machine,
            "fingerprint": {"data": f"of {n}"},
        }
        for n in values
    )
    return Curve("b", role.upper(), 0, QUERIES, tuple(values), rows, records)


def judged(claim: str, *, trained: int = 100, seen: Sequence[Any] = (), **of: Curve) -> claims.Judged:
    curves = {role.replace("_", "-"): own for role, own in of.items()}
    return CLAIMS[claim][1](Evidence(family(trained), "b", 0, curves, {"base": seen} if seen else {}))


def told(value: float, half: float = 0.02) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


@pytest.mark.parametrize(
    ("claim", "one", "other"),
    [
        ("random codes", "base", "position"),
        ("on-policy", "base", "offpolicy"),
        ("ssmax", "ssmax", "base"),
        ("routing", "routing", "base"),
    ],
)
@pytest.mark.parametrize(
    ("left", "right", "verdict"),
    [
        (0.8, 0.5, "holds"),
        (0.5, 0.8, "does not hold"),
        (0.8, 0.8, "does not hold"),
        (0.8025, 0.8, "does not hold"),  # one query of 400
    ],
)
def test_one_row_above_another(claim: str, one: str, other: str, left: float, right: float, verdict: str) -> None:
    found = judged(claim, **{one: curve(one, {50: 1.0, 900: left}), other: curve(other, {50: 1.0, 900: right, 999: 1})})
    assert found.verdict == verdict
    assert f"N=900: {one.upper()} {left:.3f}, {other.upper()} {right:.3f}" in found.told
    assert judged(claim, **{one: curve(one, {50: 1.0})}).verdict == "not measured"


def test_rows_that_answer_nothing_any_more_are_compared_where_they_did() -> None:
    """Both are at 0 for the largest N, where no difference is left to see."""
    base, other = (
        curve("base", {500: 0.9, 5000: 0.4, 10_000: 0.0}),
        curve("offpolicy", {500: 0.9, 5000: 0.2, 10_000: 0.0}),
    )
    found = judged("on-policy", base=base, offpolicy=other)
    assert found.verdict == "holds"
    assert "N=5,000" in found.told
    nothing = judged("on-policy", base=curve("base", {9: 0.0}), offpolicy=curve("offpolicy", {9: 0.01}))
    assert nothing.verdict == "cannot be told"


@pytest.mark.parametrize(("count", "verdict"), [(5, "cannot be told"), (6, "holds")])
def test_a_handful_of_queries_tells_nothing(count: int, verdict: str) -> None:
    """Though all agree, and no resample of them differs."""
    curves = {
        role: Curve(
            "b", role.upper(), 0, QUERIES[:count], (900,), np.full((1, count), share), curve(role, {900: 1}).records
        )
        for role, share in (("base", 1.0), ("position", 0.0))
    }
    found = claims.judge("random codes", Evidence(family(), "b", 0, curves, {}))
    assert found.verdict == verdict
    assert (f"{count} queries are too few" in found.told) == (verdict != "holds")


def test_few_queries_cannot_tell() -> None:
    rng = np.random.default_rng(0)
    own = {role: curve(role, {900: 0.5}) for role in ("base", "position")}
    values, records = rng.permutation(own["position"].values[0])[None], own["position"].records
    mixed = Curve("b", "POSITION", 0, QUERIES, (900,), values, records)
    found = judged("random codes", base=own["base"], position=mixed)
    assert found.verdict == "cannot be told"


@pytest.mark.parametrize(
    ("values", "trained", "verdict"),
    [
        ({100: 0.9, 1000: 0.2}, 100, "holds"),
        ({100: 0.9, 1000: 0.8}, 100, "does not hold"),
        ({100: 0.9, 1000: 0.45}, 100, "cannot be told"),
        ({100: 0.9, 999: 0.1}, 100, "not measured"),
        ({50: 0.9, 100: 0.9, 500: 0.2, 2000: 0.1}, 100, "holds"),
        ({100: 0.05, 1000: 0.0}, 100, "cannot be told"),  # little to lose
    ],
)
def test_collapse(values: dict[int, float], trained: int, verdict: str) -> None:
    assert judged("collapse", trained=trained, base=curve("base", values)).verdict == verdict


@pytest.mark.parametrize(("sink", "verdict"), [(0.5, "holds"), (0.4, "holds"), (0.7, "does not hold")])
def test_sink(sink: float, verdict: str) -> None:
    assert judged("sink", base=curve("base", {9: 0.5}), sink=curve("sink", {9: sink})).verdict == verdict


def test_both_together() -> None:
    rows = {"base": curve("base", {9: 0.5}), "ssmax": curve("ssmax", {9: 0.7})}
    for value, verdict in ((0.9, "holds"), (0.6, "does not hold"), (0.7, "cannot be told")):
        assert judged("both", **rows, ssmax_routing=curve("ssmax-routing", {9: value})).verdict == verdict
    for values, verdict in (({5: 0.9, 9: 0.9}, "holds"), ({5: 0.9, 9: 0.1}, "does not hold")):
        both = curve("ssmax-routing", values)
        assert judged("dense", ssmax_routing=both, dense=curve("dense", {5: 0.5, 9: 0.5})).verdict == verdict


def test_latency() -> None:
    base = curve("base", {500: 1, 10_000: 1}, {500: 1.0, 10_000: 20.0})
    for last, verdict in ((1.7, "holds"), (4.0, "does not hold")):
        routed = curve("routing", {100: 1, 500: 1, 10_000: 1}, {100: 0.1, 500: 1.0, 10_000: last})
        found = judged("latency", base=base, routing=routed)
        assert found.verdict == verdict
        assert f"ROUTING: x{last:.2f} from N=500 to 10,000" in found.told
        assert "BASE: x20.00 from N=500 to 10,000, N^1.00" in found.told


def cell(n: int, **values: Any) -> dict[str, Any]:
    chance = {"r_sum": 0.01, "r_any": 0.04, "digit_right": 0.1}
    return {"n": n, "metrics": {"hit@1": told(values.pop("decoded", 0.5))}, "diagnosis": {"chance": chance} | values}


def test_gold_share() -> None:
    def at(n: int, share: float, norm: float) -> dict[str, Any]:
        return cell(n, layers=[4, 5], share=[None, told(share)], norm=[told(1.0), told(norm)])

    for share, norm, verdict in (
        (0.1, 0.7, "holds"),
        (0.85, 0.2, "does not hold"),
        (0.9, 1.0, "cannot be told"),
        (0.3, 0.3, "cannot be told"),
    ):
        assert judged("gold share", seen=[at(50, 0.9, 1.0), at(900, share, norm)]).verdict == verdict
    assert judged("gold share", seen=[at(50, 0.4, 1.0), at(900, 0.1, 1.0)]).verdict == "cannot be told"
    assert judged("gold share", seen=[at(50, 0.9, 1.0)]).verdict == "not measured"


def test_any_head() -> None:
    def at(n: int, some: float, summed: float, decoded: float) -> dict[str, Any]:
        r_any, r_sum = [told(0.0), told(some)], [None, told(summed)]
        return cell(n, layers=[0, 1], r_any=r_any, r_sum=r_sum, decoded=decoded)

    start = (0.98, 0.97, 0.95)
    for first, last, verdict in (
        (start, (0.33, 0.06, 0.19), "holds"),
        (start, (0.1, 0.06, 0.19), "does not hold"),
        (start, (0.2, 0.06, 0.19), "cannot be told"),
        ((0.98, 0.5, 0.9), (0.4, 0.3, 0.1), "cannot be told"),  # ahead, but it fell faster
        (start, (0.05, 0.0, 0.0), "cannot be told"),  # ahead, but as chance is
        ((0.05, 0.01, 0.01), (0.3, 0.0, 0.0), "cannot be told"),  # nothing to begin with
    ):
        assert judged("any head", seen=[at(500, *first), at(5000, *last)]).verdict == verdict, (first, last)


@pytest.mark.parametrize(
    ("ranked", "digits", "verdict"),
    [
        ((0.1, 0.9, 0.2), (0.1, 0.1, 0.9), "holds"),
        ((0.1, 0.9, 0.2), (0.1, 0.9, 0.9), "does not hold"),
        ((0.01, 0.01, 0.01), (0.1, 0.1, 0.9), "cannot be told"),
        ((0.035, 0.03, 0.03), (0.1, 0.1, 0.9), "cannot be told"),
        ((0.1, 0.9, 0.2), (0.1, 0.1, 0.12), "cannot be told"),
    ],
)
def test_bands(ranked: Sequence[float], digits: Sequence[float], verdict: str) -> None:
    one = cell(50, layers=[3, 4, 5], r_sum=[told(x) for x in ranked], digit_right=[told(x) for x in digits])
    assert judged("bands", seen=[one]).verdict == verdict


def test_latencies_of_two_machines_make_no_growth() -> None:
    routed = curve("routing", {500: 1, 10_000: 1}, {500: 1.0, 10_000: 1.0})
    routed.records[1]["environment"] = {"machine": {"id": "another"}}
    assert judged("latency", routing=routed).verdict == "not measured"


def test_other_queries_are_refused() -> None:
    other = Curve("b", "POSITION", 0, QUERIES[::-1], (9,), np.ones((1, COUNT)), ())
    with pytest.raises(claims.UsageError, match="were asked different queries"):
        judged("random codes", base=curve("base", {9: 0.5}), position=other)


def test_other_data_are_refused() -> None:
    other = curve("position", {9: 0.9})
    other.records[0]["fingerprint"]["data"] = "of others"
    with pytest.raises(claims.UsageError, match="or of other data"):
        judged("random codes", base=curve("base", {9: 0.5}), position=other)


TinyModel = Callable[..., Path]


def test_from_records_to_markdown(tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run and a diagnosis, as folders and as committed files, give the same page."""
    model = tiny_model("qwen3", layers=2, seed=5)
    rows = ["-r", f"blocksearch:model={model},label=toy", "-r", f"blocksearch:model={model},codes=position,label=flat"]
    asked = ["-b", "limit:likes=3", "-n", "46,50", "--queries", "8", "--latency-queries", "1"]
    for command, options in (("run", rows), ("diagnose", [*rows[:2], "--heads", "0"])):
        assert main([command, *asked, *options, "-o", str(tmp_path / command)]) == 0
        assert main(["baseline", str(tmp_path / command), "-o", str(tmp_path / f"{command}.json")]) == 0
    pages = []
    for records in ("[run, diagnose]", "[run.json, diagnose.json]"):
        notes = "notes: {on-policy: Nobody trained it.}"
        about = f"families: {{toys: {{base: toy, position: flat, trained: 2, differs: all of it., {notes}}}}}"
        (tmp_path / "claims.yaml").write_text(f"records: {records}\n{about}\n")
        assert main(["claims", str(tmp_path / "claims.yaml"), "-o", str(tmp_path / "claims.md")]) == 0
        pages.append((tmp_path / "claims.md").read_text(encoding="utf-8"))
    assert pages[0] == pages[1]
    page = pages[0]
    assert "What differs from the paper: all of it." in page
    assert "## toys, limit" in page
    assert page.count("\n- **") == len(CLAIMS)
    assert "**not measured**: The on-policy loss adds over teacher forcing (3.4). no cells of offpolicy. Nobody" in page
    assert all(f"### limit: toy, {name}" in page for name in claims.BEYOND)
    capsys.readouterr()
    (tmp_path / "twice.yaml").write_text(f"records: [run, run.json]\n{about}\n")
    assert main(["claims", str(tmp_path / "twice.yaml")]) == 2
    assert "two cells of limit, N=46, toy, seed 0" in capsys.readouterr().err
    assert main(["claims", str(tmp_path / "claims.yaml")]) == 0
    assert capsys.readouterr().out == page.replace(f" -o {tmp_path / 'claims.md'}", "")


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("diagnosis", "r_sum"), None, "diagnosis.r_sum: expected a list, got None"),
        (("diagnosis", "r_any"), [], "diagnosis.r_any: expected a value for each of 6 layers, got 0"),
        (("diagnosis", "layers"), "x", "diagnosis.layers: expected a list, got 'x'"),
        (("diagnosis", "digit"), [0.5] * 6, "diagnosis.digit[0]: expected an object or null, got 0.5"),
        (("diagnosis", "chance"), {"r_sum": "x"}, "diagnosis.chance['r_sum']: expected a number, got 'x'"),
        (("config", "look"), None, "config.look: expected an object, got None"),
        (("queries", "declared"), None, "queries.declared: expected a whole number, got None"),
    ],
)
def test_a_damaged_diagnosis_is_a_data_error(
    path: tuple[str, str], value: object, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads((Path(__file__).parents[2] / "results" / "records" / "tiny-diagnosis.json").read_text())
    told["cells"][1][path[0]][path[1]] = value
    (tmp_path / "damaged.json").write_text(json.dumps(told))
    (tmp_path / "claims.yaml").write_text("records: [damaged.json]\nfamilies: {f: {base: blocksearch, trained: 9}}\n")
    assert main(["claims", str(tmp_path / "claims.yaml")]) == 3
    assert f"damaged.json: no baseline (cell 2 of {len(told['cells'])}: {problem})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "claims.yaml:1: not YAML"),
        ("records: []\nfamilies: {f: {base: x, base: y}}", "claims.yaml:2: not YAML: the key 'base' is given twice"),
        ("[]", "expected a mapping of records"),
        ("records: x\nfamilies: {}", "expected a mapping of records"),
        ("records: []\nfamilies: {f: 1}", "family f: expected a mapping of base, position"),
        ("records: []\nfamilies: {f: {trained: 5, sin: x}}", "unknown key 'sin'; did you mean sink"),
        ("records: []\nfamilies: {f: {base: x}}", "family f: trained must be the documents of a training step"),
        (
            "records: []\nfamilies: {f: {trained: 5, notes: {on policy: x}}}",
            "unknown claim 'on policy'; did you mean on",
        ),
        ("records: []\nfamilies: {f: {trained: true}}", "family f: trained must be the documents of a training step"),
        ("records: []\nfamilies: {f: {trained: 5, notes: }}", "family f: notes must be texts by claim"),
        ("records: []\nfamilies: {f: {trained: 5, notes: [sink]}}", "family f: notes must be texts by claim"),
        ("records: []\nfamilies: {f: {trained: 5}}", "its records hold no cell of its families"),
        ("records: [nowhere]\nfamilies: {f: {trained: 5}}", "nowhere: expected the folder of a run"),
    ],
)
def test_a_file_that_cannot_be_used(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "claims.yaml").write_text(text)
    assert main(["claims", str(tmp_path / "claims.yaml")]) == 2
    assert problem in capsys.readouterr().err
