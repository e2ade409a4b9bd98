"""The curve as an object: positions against closed forms, growth against planted powers, advice on planted cells."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from icr_bench.harness.answers import Entry, Graded
from icr_bench.harness.cli import main
from icr_bench.harness.compare import COSTS
from icr_bench.harness.curve import (
    ABOVE,
    BELOW,
    Curve,
    as_json,
    crossover,
    curves,
    exponent,
    failures,
    falls_below,
    text,
)
from icr_bench.harness.errors import UsageError
from icr_bench.harness.recommend import Wish, advise, exit_code, parse_seconds
from icr_bench.harness.recommend import as_json as advice_json
from icr_bench.harness.recommend import text as advice_text

QUERIES = 200
Record = dict[str, Any]


def record(
    n: int, latency: float = 0.01, memory: int = 10**9, machine: str = "a", retriever: str = "r", seed: int = 0
) -> Record:
    return {
        "benchmark": "b",
        "n": n,
        "retriever": retriever,
        "seed": seed,
        "status": "ok",
        "config": {
            "benchmark": {"name": "b", "resolved": {"relevant": 1}},
            "retriever": {"name": retriever, "resolved": {"k1": 0.9}},
        },
        "fingerprint": {"data": f"{n} of {seed}"},
        "time": {"query_p50_s": latency / 2, "query_p95_s": latency, "queries_per_s": 1 / latency, "index_s": n / 100},
        "memory": {"index_bytes": n * 1000, "peak_rss_bytes": memory, "device_peak_bytes": None},
        "environment": {
            "machine": {"id": machine, "processor": "Fast One", "cores": 1, "threads": 2, "memory_bytes": 10**10}
        },
    }


def curve(shares: dict[int, float], name: str = "r", queries: int = QUERIES, **told: Any) -> Curve:
    """A curve with these means: the first queries are right."""
    values = np.array([[float(i < round(share * queries)) for i in range(queries)] for share in shares.values()])
    names = tuple(f"q{i}" for i in range(queries))
    return Curve("b", name, 0, names, tuple(shares), values, tuple(record(n, **told) for n in shares))


def entry(n: int, right: int, queries: Sequence[str], **told: Any) -> Entry:
    ranked = [[1] if i < right else [0, 1] for i in range(len(queries))]
    return Entry(record(n, **told), Graded(list(queries), ranked, [[1]] * len(queries), 5, 1))


def cells(name: str, rights: dict[int, int]) -> list[Entry]:
    """Finished cells of a retriever with so many queries right at each size."""
    asked = [f"q{i}" for i in range(QUERIES)]
    return [entry(n, right, asked, retriever=name) for n, right in rights.items()]


def test_between_sizes_the_logit_is_linear_in_log_n() -> None:
    found = falls_below(curve({100: 0.8, 10_000: 0.2}), 0.5)  # symmetric, so half-way in log N
    assert found.n == pytest.approx(1_000)
    assert found.low < 1_000 < found.high
    assert not found.extrapolated

    shares = {46: 0.95, 1_000: 0.9, 5_000: 0.6}
    smooth = [math.log((p * QUERIES + 0.5) / ((1 - p) * QUERIES + 0.5)) for p in (0.9, 0.6, 0.75)]
    part = (smooth[0] - smooth[2]) / (smooth[0] - smooth[1])
    assert falls_below(curve(shares), 0.75).n == pytest.approx(1_000 * 5**part)


def test_a_level_that_is_met_exactly_is_not_fallen_below() -> None:
    assert falls_below(curve({100: 0.9, 1_000: 0.9}), 0.9).n == ABOVE


def test_intervals_narrow_with_the_queries_and_hold_the_truth_as_often_as_they_say() -> None:
    few, many = (falls_below(curve({100: 0.8, 10_000: 0.2}, queries=q), 0.5) for q in (50, 800))
    assert math.log(few.high / few.low) > 2 * math.log(many.high / many.low)
    rng, hit = np.random.default_rng(3), 0
    for _ in range(60):
        values = (rng.random((2, QUERIES)) < np.array([[0.8], [0.2]])).astype(float)
        made = Curve("b", "r", 0, tuple(map(str, range(QUERIES))), (100, 10_000), values, (record(100), record(10_000)))
        found = falls_below(made, 0.5)
        hit += found.low <= 1_000 <= found.high
    assert hit >= 51  # of 60; fewer has a probability below 0.2% at 95% coverage


def test_outside_the_measured_range_is_said_and_extrapolated_only_if_asked() -> None:
    high, low = curve({100: 0.99, 1_000: 0.95}), curve({100: 0.4, 1_000: 0.3}, name="low")
    assert (falls_below(high, 0.9).n, falls_below(low, 0.9).n) == (ABOVE, BELOW)
    beyond = falls_below(high, 0.9, extrapolate=True)
    assert 1_000 < beyond.n < 10_000
    assert beyond.extrapolated
    assert falls_below(curve({100: 0.99, 1_000: 0.985}), 0.2, extrapolate=True).n == ABOVE  # a hundred times at most
    assert falls_below(curve({100: 0.9, 1_000: 0.95}), 0.8, extrapolate=True).n == ABOVE  # rising
    entries = [*cells("high", {100: 198, 1_000: 190}), *cells("low", {100: 80, 1_000: 60})]
    shown = text(entries, "hit@1", [0.9])
    assert "not within the measured range: not below up to 1,000" in shown
    assert "not within the measured range: below at 100 already [< 100, < 100]" in shown
    assert "(extrapolated)" not in shown
    assert "(extrapolated)" in text(entries, "hit@1", [0.9], extrapolate=True)
    told = json.loads(as_json(entries, "hit@1", [0.9]))
    assert [one["falls_below"]["0.9"]["n"] for one in told["curves"]] == ["above", "below"]


def test_a_crossover_is_where_the_leader_loses_its_lead() -> None:
    falling, rising = curve({100: 0.8, 10_000: 0.2}, name="falling"), curve({100: 0.2, 10_000: 0.8}, name="rising")
    for one, other in ((falling, rising), (rising, falling)):
        found = crossover(one, other)
        assert found
        assert (found.leader.retriever, found.other.retriever) == ("falling", "rising")
        assert found.until.n == pytest.approx(1_000)
        assert found.until.low == pytest.approx(1_000)  # every resample is as symmetric
    never = crossover(falling, curve({100: 0.5, 10_000: 0.1}, name="third"))
    assert never
    assert never.until.n == ABOVE
    with pytest.raises(UsageError, match="two shared sizes"):
        crossover(falling, curve({50: 0.5, 100: 0.1}))
    with pytest.raises(UsageError, match="same queries"):
        crossover(falling, curve({100: 0.5, 10_000: 0.1}, queries=100))


def test_curves_of_other_seeds_or_data_are_not_paired() -> None:
    asked = [f"q{i}" for i in range(QUERIES)]

    def pair(**changes: Any) -> list[Entry]:
        one = [entry(n, right, asked, retriever="one") for n, right in ((46, 180), (500, 100))]
        other = [entry(n, right, asked, retriever="other", **changes) for n, right in ((46, 100), (500, 180))]
        return one + other

    assert json.loads(as_json(pair(), "hit@1", [0.9]))["crossovers"]
    assert "leads" in text(pair(), "hit@1", [0.9]).partition("seconds per")[0]
    seeds, other = pair(seed=1), pair()
    other[3].record["fingerprint"]["data"] = "others"
    for entries in (seeds, other):
        assert json.loads(as_json(entries, "hit@1", [0.9]))["crossovers"] == []
        assert "leads" not in text(entries, "hit@1", [0.9]).partition("seconds per")[0]
        found = curves(entries, "hit@1")
        with pytest.raises(UsageError, match="same queries, seed and data"):
            crossover(*found)
        (advice,) = advise(found, Wish(500, "hit@1"))
        assert not advice.equals


@pytest.mark.parametrize(("what", "name"), [("benchmark", "relevant"), ("retriever", "k1")])
def test_cells_of_other_options_make_no_curve(what: str, name: str) -> None:
    entries = cells("r", {46: 190, 500: 100})
    entries[1].record["config"][what]["resolved"][name] = 2
    with pytest.raises(UsageError, match=f"different options of the {what}, and make no curve: .*{name}"):
        curves(entries, "hit@1")


@pytest.mark.parametrize("queries", [1, 2, 3, 5])
def test_a_handful_of_queries_is_no_evidence_of_a_lead(queries: int) -> None:
    one, other = (curve({46: share, 500: share}, name, queries) for name, share in (("one", 1.0), ("other", 0.0)))
    assert crossover(one, other) is None
    (found,) = advise([one, other], Wish(500, "hit@1"))
    assert [equal.curve.name for equal in found.equals] == ["other"]


def test_six_queries_that_all_agree_are() -> None:
    one, other = (curve({46: share, 500: share}, name, 6) for name, share in (("one", 1.0), ("other", 0.0)))
    found = crossover(other, one)
    assert found
    assert found.leader is one
    assert not advise([one, other], Wish(500, "hit@1"))[0].equals


def test_who_cannot_be_told_apart_does_not_lead() -> None:
    one = curve({100: 0.8, 10_000: 0.2})
    assert crossover(one, one) is None
    assert crossover(one, curve({100: 0.81, 10_000: 0.2})) is None


def test_a_lead_begins_where_there_is_evidence_for_it() -> None:
    one, other = curve({46: 0.98, 1_000: 0.9, 10_000: 0.3}, "one"), curve({46: 0.985, 1_000: 0.6, 10_000: 0.5}, "other")
    found = crossover(one, other)
    assert found
    assert (found.leader.retriever, found.sizes) == ("one", (1_000, 10_000))
    assert 1_000 < found.until.low < found.until.n < found.until.high < 10_000


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_growth_is_the_power_of_n(power: float) -> None:
    sizes = (46, 1_000, 5_000, 10_000)
    records = tuple(record(n, latency=3e-5 * n**power, memory=int(1e6 * n**power)) for n in sizes)
    made = Curve("b", "r", 0, ("q",), sizes, np.ones((4, 1)), records)
    assert exponent(made, "latency") == pytest.approx(power)
    assert exponent(made, "memory") == pytest.approx(power, abs=1e-4)
    assert exponent(made, "index_bytes") == pytest.approx(1)
    two = Curve("b", "r", 0, ("q",), sizes[:2], np.ones((2, 1)), records[:2])
    assert all(exponent(two, cost) is None for cost in COSTS)


def test_curves_take_finished_cells_in_the_order_of_n() -> None:
    asked = ["q1", "q2", "q3", "q4"]
    (found,) = curves([entry(500, 1, asked), entry(46, 3, asked), failed(9)], "hit@1")
    assert found.sizes == (46, 500)
    assert found.means.tolist() == [0.75, 0.25]
    with pytest.raises(UsageError, match="different queries"):
        curves([entry(500, 1, asked), entry(46, 3, asked[:2])], "hit@1")


def failed(n: int, name: str = "r") -> Entry:
    return Entry(record(n, retriever=name) | {"status": "oom"}, None)


def test_failed_cells_are_told() -> None:
    entries = [*cells("good", {46: 190}), failed(500, "good"), failed(46, "bad")]
    shown = text(entries, "hit@1", [0.9])
    assert "- failed: good at N=500: oom" in shown
    assert "- failed: bad at N=46: oom" in shown
    found = advise(curves(entries, "hit@1"), Wish(500, "hit@1"), failures(entries))
    assert exit_code(found) == 1
    assert "- failed: good at N=500: oom" in advice_text(found)


@pytest.mark.parametrize(
    ("done", "lost", "asked", "kept", "told"),
    [
        ({1_000: 190, 10_000: 180}, 5_000, 5_000, False, "N (its cell at N=5,000 failed: oom)"),
        ({1_000: 190, 10_000: 180}, 5_000, 3_000, False, "N (its cell at N=5,000 failed: oom)"),
        ({1_000: 190}, 10_000, 5_000, False, "N (its cell at N=10,000 failed: oom)"),
        ({1_000: 190, 5_000: 180}, 10_000, 5_000, True, "yes"),
        ({1_000: 190, 5_000: 180}, 500, 1_000, True, "yes"),
        ({1_000: 190}, 500, 5_000, False, "N (measured up to 1,000)"),
    ],
)
def test_where_a_retriever_failed_it_is_not_recommended(
    done: dict[int, int], lost: int, asked: int, kept: bool, told: str
) -> None:
    entries = [*cells("good", done), failed(lost, "good")]
    found = advise(curves(entries, "hit@1"), Wish(asked, "hit@1"), failures(entries))
    assert exit_code(found) == int(not kept)
    assert told in advice_text(found)
    assert json.loads(advice_json(found))[0]["best"] == ({"retriever": "good", "seed": 0} if kept else None)


def test_a_gpus_memory_counts_where_it_is_more() -> None:
    large = curve({5_000: 0.9}, memory=10**9)
    large.records[0]["memory"]["device_peak_bytes"] = 9 * 10**9
    (found,) = advise([large], Wish(5_000, "hit@1", memory=8 * 10**9))
    assert found.best is None
    assert found.candidates[0].memory == 9 * 10**9
    large.records[0]["memory"]["device_peak_bytes"] = 10**8
    assert advise([large], Wish(5_000, "hit@1", memory=8 * 10**9))[0].best


def test_costs_are_told_of_a_thousand_queries_and_of_the_index() -> None:
    shown = text(cells("r", {46: 190, 500: 100}), "hit@1", [0.9])  # a hundred queries a second
    row = next(line for line in shown.splitlines() if line.startswith("| r ") and "500" in line and "kB" in line)
    assert [part.strip() for part in row.strip("|").split("|")] == ["r", "500", "10", "500 kB"]


def test_where_all_failed_nothing_is_recommended() -> None:
    entries = [failed(46)]
    found = advise(curves(entries, "hit@1"), Wish(46, "hit@1"), failures(entries))
    assert exit_code(found) == 1
    assert "**Nothing was measured**" in advice_text(found)
    assert "failed: r at N=46: oom" in advice_text(found)
    assert "failed: r at N=46: oom" in text(entries, "hit@1", [0.9])


def test_costs_of_several_machines_are_not_fitted_together() -> None:
    asked = ["q1", "q2"]
    entries = [entry(n, 1, asked, machine="a" if n < 500 else "b") for n in (46, 100, 500, 1_000)]
    (found,) = curves(entries, "hit@1")
    assert all(exponent(found, cost) is None for cost in COSTS)
    assert "measured on several machines" in text(entries, "hit@1", [0.9])


# Advice


def test_the_best_that_keeps_all_limits_is_recommended() -> None:
    good = curve({1_000: 0.95, 5_000: 0.92}, "good", latency=0.2)
    slow = curve({1_000: 0.99, 5_000: 0.98}, "slow", latency=0.8)
    weak = curve({1_000: 0.90, 5_000: 0.40}, "weak", latency=0.01)
    large = curve({1_000: 0.99, 5_000: 0.99}, "large", memory=10**11)
    rows = [good, slow, weak, large]
    (found,) = advise(rows, Wish(5_000, "hit@1", 0.9, 0.5, 8 * 10**9))
    assert found.best
    assert found.best.curve is good
    assert not found.equals
    assert {one.curve.name: set(one.short) for one in found.candidates} == {
        "good": set(),
        "slow": {"latency"},
        "weak": {"hit@1"},
        "large": {"memory"},
    }
    shown = advice_text([found])
    assert "**good**: hit@1 0.920" in shown
    assert "Fast One, 2 threads" in shown
    assert exit_code([found]) == 0


def test_between_sizes_the_next_larger_one_stands_in() -> None:
    (found,) = advise([curve({1_000: 0.95, 5_000: 0.8})], Wish(3_000, "hit@1", 0.7))
    assert found.best
    assert found.best.n == 5_000
    assert "N=3,000 was not measured for all" in advice_text([found])


def test_nothing_that_fits_is_said_with_what_comes_nearest() -> None:
    near, far = curve({5_000: 0.85}, "near"), curve({5_000: 0.2}, "far")
    (found,) = advise([far, near], Wish(5_000, "hit@1", 0.9))
    shown = advice_text([found])
    assert "**Nothing measured keeps these limits.** Nearest: near" in shown
    assert exit_code([found]) == 1
    (found,) = advise([far, near], Wish(20_000, "hit@1"))  # beyond what was measured
    assert found.best is None
    assert "N (measured up to 5,000)" in advice_text([found])


def test_what_cannot_be_told_from_the_best_is_named_with_what_it_saves() -> None:
    best = curve({5_000: 0.95}, "best", latency=0.3)
    close = curve({5_000: 0.945}, "close", latency=0.003, memory=10**8)
    close.values[0] = np.roll(close.values[0], 1)  # other queries are wrong
    (found,) = advise([best, close], Wish(5_000, "hit@1", 0.9))
    assert [one.curve.name for one in found.equals] == ["close"]
    assert (
        "close cannot be told from it over these queries and is 100 times faster and 10 times smaller"
        in advice_text([found])
    )


@pytest.mark.parametrize(("given", "seconds"), [("0.5s", 0.5), ("200ms", 0.2), ("2", 2.0), (".5 s", 0.5)])
def test_seconds(given: str, seconds: float) -> None:
    assert parse_seconds(given) == pytest.approx(seconds)


# The commands, on a real run

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*map(str, arguments)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curve") / "run"
    rows = ["-r", "bm25", "-r", "bm25:k1=20,b=0,label=worse"]
    assert main(["run", *rows, "-n", "46,100,300", "--queries", "40", "-o", str(folder)]) == 0
    return folder


def test_curve_of_a_run(run: Path, cli: Cli) -> None:
    code, out, _ = cli("curve", run, "--level", "0.9,0.5")
    assert code == 0
    assert "falls below 0.9 at N" in out
    assert "| bm25 " in out
    code, out, _ = cli("curve", run, "--format", "json")
    told = json.loads(out)
    assert [point["n"] for point in told["curves"][0]["points"]] == [46, 100, 300]
    assert {one["retriever"] for one in told["curves"]} == {"bm25", "worse"}
    assert told["crossovers"] == []  # both find everything
    assert told["failed"] == {}


def test_recommendation_from_a_run(run: Path, cli: Cli) -> None:
    code, out, _ = cli("recommend", run, "-n", "300", "--min", "0.9", "--max-latency", "5s", "--max-memory", "8GB")
    assert code == 0
    assert "| yes" in out
    assert "Nothing" not in out
    code, out, _ = cli("recommend", run, "-n", "46", "--min", "1")
    assert code == int("1.000 [" not in out)
    code, out, _ = cli("recommend", run, "-n", "300", "--max-memory", "1MB", "--format", "json")
    assert code == 1
    assert json.loads(out)[0]["best"] is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["curve", "RUN", "--level", "1.5"], "--level '1.5': expected a number between 0 and 1"),
        (["curve", "RUN", "--metric", "hit"], "unknown metric"),
        (["curve", "RUN", "--metric", "hit@50"], "run with -k 50"),
        (["curve", "nowhere"], "no run was found there"),
        (["recommend", "RUN", "-n", "all"], "expected one number of documents"),
        (["recommend", "RUN", "-n", "46,100"], "expected one number of documents"),
        (["recommend", "RUN", "-n", "46", "--max-latency", "soon"], "--max-latency 'soon': expected seconds"),
        (["recommend", "RUN", "-n", "46", "--max-memory", "much"], "--max-memory: 'much' is no number of bytes"),
        (["recommend", "RUN", "-n", "46", "--min", "0"], "--min '0': expected a number between 0 and 1"),
    ],
)
def test_bad_input_is_one_sentence(run: Path, cli: Cli, arguments: list[str], problem: str) -> None:
    code, _, err = cli(*(run if part == "RUN" else part for part in arguments))
    assert code == 2
    assert problem in err
    assert len(err.splitlines()) == 1
