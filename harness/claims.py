"""What the BlockSearch paper claims, judged claim by claim on measured cells (`icr-bench claims`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from icr_bench.harness import answers, diagnose, metrics, strict
from icr_bench.harness.curve import Curve, comparable, curves
from icr_bench.harness.errors import UsageError, unknown
from icr_bench.harness.folder import Record, row
from icr_bench.harness.tables import github

ROLES = ("base", "position", "offpolicy", "sink", "ssmax", "routing", "ssmax-routing", "dense")
"""What a row can be in its family."""

KEYS = (*ROLES, "trained", "differs", "notes")
"""Keys of a family: the labels of its rows, the documents of a training step, what differs from the paper, and a remark
on any claim."""

METRIC = "hit@1"

SMALL = 0.05
"""A difference in hit@1 below this is none to speak of."""

FEWEST = 6
"""Queries that must be asked before anything is told: the signs of 5 agree by chance in 1 of 16 cases."""

FLAT = 0.25
"""The growth exponent up to which latency counts as nearly flat in N; the paper's own is ln 1.7 / ln 20 = 0.18."""

Verdict = Literal["holds", "does not hold", "cannot be told", "not measured"]


@dataclass(frozen=True)
class Family:
    """Rows that share a backbone, and what sets it apart from the paper's."""

    name: str
    rows: Mapping[str, str]  # role -> label
    trained: int  # documents in a training step, at most
    differs: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)  # claim -> why it came out so


@dataclass(frozen=True)
class Evidence:
    """What was measured of a family on one benchmark."""

    family: Family
    benchmark: str
    seed: int
    curves: Mapping[str, Curve]  # by role
    seen: Mapping[str, Sequence[Record]]  # diagnosed cells by role, in the order of N

    @property
    def name(self) -> str:
        return f"{self.family.name}, {self.benchmark}" + (f", seed {self.seed}" if self.seed else "")

    def shared(self, *roles: str) -> list[int]:
        """All N at which these rows were measured."""
        held = [set(self.curves[role].sizes) if role in self.curves else set[int]() for role in roles]
        return sorted(set.intersection(*held))

    def at(self, role: str, n: int) -> metrics.Floats:
        """The metric of every query."""
        curve = self.curves[role]
        values: metrics.Floats = curve.values[curve.sizes.index(n)]
        return values

    def label(self, role: str) -> str:
        return self.family.rows[role]


@dataclass(frozen=True)
class Judged:
    verdict: Verdict
    told: str


def _interval(values: metrics.Floats) -> diagnose.Interval:
    return metrics.intervals({"it": values})["it"]


def _show(told: Mapping[str, float]) -> str:
    return f"{told['value']:.3f} [{told['low']:.3f}, {told['high']:.3f}]"


def _signed(told: Mapping[str, float]) -> str:
    return f"{told['value']:+.3f} [{told['low']:+.3f}, {told['high']:+.3f}]"


def _difference(evidence: Evidence, one: str, other: str, n: int) -> tuple[diagnose.Interval, str]:
    """Of two rows over the same queries, and in words."""
    a, b = evidence.curves[one], evidence.curves[other]
    if not comparable(a, b):
        raise UsageError(f"{evidence.benchmark}: {a.name} and {b.name} were asked different queries, or of other data")
    left, right = evidence.at(one, n), evidence.at(other, n)
    found = _interval(left - right)
    told = f"N={n:,}: {evidence.label(one)} {left.mean():.3f}, {evidence.label(other)} {right.mean():.3f}, "
    return found, told + f"difference {_signed(found)}"


def _above(found: Mapping[str, float]) -> Verdict:
    """Whether a difference is above 0; one that is surely small is not."""
    if found["low"] > 0:
        return "holds"
    return "does not hold" if found["high"] < 0 or _small(found) else "cannot be told"


def _small(found: Mapping[str, float]) -> bool:
    """Whether a difference is surely none to speak of."""
    return found["low"] > -SMALL and found["high"] < SMALL


def _beats(one: str, other: str) -> Callable[[Evidence], Judged]:
    """The claim that one row is above another, at the largest N at which either still answers."""

    def judge(evidence: Evidence) -> Judged:
        shared = evidence.shared(one, other)
        if not shared:
            return _missing(evidence, one, other)
        for n in reversed(shared):
            if max(_interval(evidence.at(role, n))["low"] for role in (one, other)) > SMALL:
                found, told = _difference(evidence, one, other, n)
                return Judged(_above(found), told)
        return Judged("cannot be told", f"neither is surely above {SMALL} at any N")

    return judge


def _missing(evidence: Evidence, *roles: str) -> Judged:
    absent = [role for role in roles if role not in evidence.curves]
    return Judged("not measured", f"no cells of {', '.join(absent) or 'a common N'}")


def _collapses(evidence: Evidence) -> Judged:
    if "base" not in evidence.curves:
        return _missing(evidence, "base")
    curve, trained = evidence.curves["base"], evidence.family.trained
    near = min(curve.sizes, key=lambda n: abs(math.log(n / trained)))
    far = [n for n in curve.sizes if n >= 10 * trained]
    if not far or near >= far[0]:
        return Judged("not measured", f"no N of {10 * trained:,} or more, ten times the {trained:,} of training")
    start = _interval(evidence.at("base", near))
    if start["low"] <= 2 * SMALL:
        return Judged("cannot be told", f"N={near:,}: {_show(start)}; there is little to lose")
    told = [f"trained with up to {trained:,} documents; N={near:,}: {_show(start)}"]
    for n in far:
        kept = _interval(evidence.at("base", n) - evidence.at("base", near) / 2)
        told.append(f"N={n:,}: {evidence.at('base', n).mean():.3f}, less half of that {_signed(kept)}")
    verdict: Verdict = "holds" if kept["high"] < 0 else "does not hold" if kept["low"] > 0 else "cannot be told"
    return Judged(verdict, "; ".join(told) + " (collapse: less than half is left)")


def _sink(evidence: Evidence) -> Judged:
    shared = evidence.shared("base", "sink")
    if not shared:
        return _missing(evidence, "base", "sink")
    found, told = _difference(evidence, "sink", "base", shared[-1])
    if _small(found) or found["high"] < 0:
        return Judged("holds", told)
    return Judged("does not hold" if found["low"] > SMALL else "cannot be told", told)


def _best(evidence: Evidence) -> Judged:
    if "ssmax-routing" not in evidence.curves:
        return _missing(evidence, "ssmax-routing")
    n = evidence.curves["ssmax-routing"].sizes[-1]
    others = [role for role in ROLES[:-2] if role in evidence.curves and n in evidence.curves[role].sizes]
    if not others:
        return Judged("not measured", f"no other row at N={n:,}")
    found = {role: _difference(evidence, "ssmax-routing", role, n) for role in others}
    closest = min(found, key=lambda role: found[role][0]["value"])
    told = f"against the closest of {len(others)}, {found[closest][1]}"
    if any(difference["high"] < 0 for difference, _ in found.values()):
        return Judged("does not hold", told)
    if all(difference["low"] > 0 for difference, _ in found.values()):
        return Judged("holds", told)
    return Judged("cannot be told", told)


def _above_dense(evidence: Evidence) -> Judged:
    shared = evidence.shared("ssmax-routing", "dense")
    if not shared:
        return _missing(evidence, "ssmax-routing", "dense")
    found = [_difference(evidence, "ssmax-routing", "dense", n) for n in shared]
    told = "; ".join(words for _, words in found)
    if any(difference["high"] < 0 for difference, _ in found):
        return Judged("does not hold", told)
    return Judged("holds" if all(difference["low"] > 0 for difference, _ in found) else "cannot be told", told)


def _flat(evidence: Evidence) -> Judged:
    roles = [role for role in ("routing", "ssmax-routing") if role in evidence.curves]
    if not roles:
        return _missing(evidence, "routing")
    told, growth = [], []
    for role in (*roles, *(["base"] if "base" in evidence.curves else [])):
        records = [r for r in evidence.curves[role].records if r["n"] >= 256 and r["time"]["query_p50_s"]]
        if len(records) < 2:
            continue
        first, last = records[0], records[-1]
        if len({record["environment"]["machine"]["id"] for record in (first, last)}) > 1:
            continue
        ratio = last["time"]["query_p50_s"] / first["time"]["query_p50_s"]
        exponent = math.log(ratio) / math.log(last["n"] / first["n"])
        if role != "base":
            growth.append(exponent)
        told.append(f"{evidence.label(role)}: x{ratio:.2f} from N={first['n']:,} to {last['n']:,}, N^{exponent:.2f}")
    if not growth:
        return Judged("not measured", "no two sizes of 256 documents or more timed on one machine")
    verdict: Verdict = "holds" if max(growth) <= FLAT else "does not hold"
    return Judged(verdict, "; ".join(told) + f" (nearly flat: N^{FLAT} or less; one timed run, no interval)")


def _diagnosed(evidence: Evidence) -> Sequence[Record] | None:
    """The base's diagnosed cells, if there are two sizes."""
    records = evidence.seen.get("base", ())
    return records if len(records) > 1 else None


NOT_SEEN = Judged("not measured", "no diagnosis of the base at two sizes")


def _share_falls(evidence: Evidence) -> Judged:
    records = _diagnosed(evidence)
    if records is None:
        return NOT_SEEN
    first, last = records[0]["diagnosis"], records[-1]["diagnosis"]
    layer = diagnose.most_written(first)
    at = first["layers"].index(layer)
    share, norm = ((first[name][at], last[name][at]) for name in ("share", "norm"))
    told = (
        f"layer {layer}, N={records[0]['n']:,} to {records[-1]['n']:,}: share {_show(share[0])} to {_show(share[1])}, "
        f"length {_show(norm[0])} to {_show(norm[1])}"
    )
    if share[0]["low"] <= 0.5:
        return Judged("cannot be told", f"{told}; golds never had surely more than half")
    left_low, left_high = norm[1]["low"] / norm[0]["high"], norm[1]["high"] / norm[0]["low"]
    kept_low, kept_high = share[1]["low"] / share[0]["high"], share[1]["high"] / share[0]["low"]
    if kept_high < 1 and kept_high < left_low:
        return Judged("holds", told)
    if kept_low > 1 or left_high < kept_low:
        return Judged("does not hold", told)
    return Judged("cannot be told", told)


def _any_ahead(evidence: Evidence) -> Judged:
    records = _diagnosed(evidence)
    if records is None:
        return NOT_SEEN
    first, last = records[0], records[-1]
    at = _peak(first["diagnosis"])
    some, summed = (last["diagnosis"][name][at] for name in ("r_any", "r_sum"))
    decoded = last["metrics"][METRIC]
    layer = first["diagnosis"]["layers"][at]
    told = (
        f"layer {layer}, N={first['n']:,}: R_any {_show(first['diagnosis']['r_any'][at])}, R_sum "
        f"{_show(first['diagnosis']['r_sum'][at])}; N={last['n']:,}: R_any {_show(some)}, R_sum {_show(summed)}, "
        f"decoding {_show(decoded)}"
    )
    # What is left above chance of each, at least and at most.
    chances = [{name: one["diagnosis"]["chance"][name] for name in ("r_any", "r_sum")} for one in (first, last)]
    starts = {name: first["diagnosis"][name][at] for name in ("r_any", "r_sum")}
    if min(starts[name]["low"] - chances[0][name] for name in starts) <= 0 or some["low"] <= chances[1]["r_any"]:
        return Judged("cannot be told", f"{told}; not surely above chance ({chances[1]['r_any']:.2g} for R_any)")
    any_left = (some["low"] - chances[1]["r_any"]) / (starts["r_any"]["high"] - chances[0]["r_any"])
    sum_left = (summed["high"] - chances[1]["r_sum"]) / (starts["r_sum"]["low"] - chances[0]["r_sum"])
    if some["low"] > decoded["high"] and any_left > sum_left:
        return Judged("holds", told)
    if some["high"] < max(summed["low"], decoded["low"]):
        return Judged("does not hold", told)
    return Judged("cannot be told", told)


def _peak(found: Mapping[str, Any]) -> int:
    """The place of the layer that ranks golds first most often."""
    shares = [own["value"] if own else -1.0 for own in found["r_sum"]]
    return shares.index(max(shares))


def _bands(evidence: Evidence) -> Judged:
    if not evidence.seen.get("base"):
        return Judged("not measured", "no diagnosis of the base")
    record = evidence.seen["base"][0]
    found, chance = record["diagnosis"], record["diagnosis"]["chance"]
    at, best = _peak(found), max(found["digit_right"], key=lambda own: float(own["value"]))
    peak = found["r_sum"][at]
    if peak["low"] <= 2 * chance["r_sum"] or best["low"] <= chance["digit_right"] + SMALL:
        told = f"N={record['n']:,}: best R_sum {_show(peak)}, best first digit {_show(best)}"
        return Judged("cannot be told", f"{told}; not both are surely above chance")
    ranks = next(i for i, own in enumerate(found["r_sum"]) if own and own["value"] >= peak["value"] / 2)
    half = (chance["digit_right"] + best["value"]) / 2
    names = next(i for i, own in enumerate(found["digit_right"]) if own["value"] >= half)
    told = (
        f"N={record['n']:,}: R_sum reaches half of its highest, {peak['value']:.3f}, in layer "
        f"{found['layers'][ranks]}, and the first digit is half way from chance, {chance['digit_right']:.2f}, to its "
        f"best, {best['value']:.3f}, in layer {found['layers'][names]}"
    )
    return Judged("holds" if ranks < names else "does not hold", told)


CLAIMS: dict[str, tuple[str, Callable[[Evidence], Judged]]] = {
    "random codes": ("Random codes generalise to larger N than codes by position (3.3).", _beats("base", "position")),
    "on-policy": ("The on-policy loss adds over teacher forcing (3.4).", _beats("base", "offpolicy")),
    "collapse": ("Recall collapses beyond about ten times the N of training (3.4).", _collapses),
    "gold share": (
        "Golds' share of the attention output falls (layer 19: .91 to .01) while its length falls far less, 47 to 30 "
        "(4.2).",
        _share_falls,
    ),
    "any head": (
        "R_any falls more slowly than R_sum and stays ahead of decoding (N=5,000: .33, .06 and .19; 4.2).",
        _any_ahead,
    ),
    "bands": ("Layers that retrieve come before layers that decode (4.2).", _bands),
    "sink": ("An additive sink hardly helps (5.2).", _sink),
    "ssmax": ("SSMax holds at large N (5.2).", _beats("ssmax", "base")),
    "routing": ("Routing holds at large N (5.2).", _beats("routing", "base")),
    "both": ("SSMax and routing together are the best row (LIMIT, 5.2).", _best),
    "dense": (
        "Both together are above the dense retriever of the same backbone at every N (LIMIT, 5.2).",
        _above_dense,
    ),
    "latency": ("The latency of a routed query is nearly flat in N (appendix Q).", _flat),
}
"""Key -> the claim with the paper's section, and how it is judged."""


def judge(key: str, evidence: Evidence) -> Judged:
    """The verdict on one claim of `CLAIMS`; a handful of queries tells nothing, whatever its intervals are."""
    judged = CLAIMS[key][1](evidence)
    asked = [curve.values.shape[1] for curve in evidence.curves.values()]
    asked += [record["queries"]["declared"] for records in evidence.seen.values() for record in records]
    if min(asked) < FEWEST and judged.verdict in ("holds", "does not hold"):
        return Judged("cannot be told", f"{judged.told}; {min(asked)} queries are too few")
    return judged


BEYOND = ("decoding and reading attention", "shortlists", "what came of the best code")
"""Tables of a diagnosis that go beyond the paper."""


def load(file: Path) -> tuple[list[Family], list[Path]]:
    """The families of a YAML file, and the runs or baseline files that hold their cells, beside it.

    Raises:
        UsageError: not such a file; named with what was expected.
    """
    try:
        told = strict.parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from None
    expected = "a mapping of records (a list of folders of runs or baseline files) and families (by name)"
    if not isinstance(told, dict) or set(told) != {"records", "families"}:
        raise UsageError(f"{file}: expected {expected}")
    if not isinstance(told["records"], list) or not isinstance(told["families"], dict):
        raise UsageError(f"{file}: expected {expected}")
    families = []
    for name, own in told["families"].items():
        if not isinstance(own, dict):
            raise UsageError(f"{file}: family {name}: expected a mapping of {', '.join(KEYS)}")
        for key in own:
            if key not in KEYS:
                raise UsageError(f"{file}: family {name}: {unknown('key', str(key), KEYS)}")
        if type(own.get("trained")) is not int or own["trained"] < 1:
            raise UsageError(f"{file}: family {name}: trained must be the documents of a training step, 1 or more")
        notes = own.get("notes", {})
        if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
            raise UsageError(f"{file}: family {name}: notes must be texts by claim; the claims are {', '.join(CLAIMS)}")
        for claim in notes:
            if claim not in CLAIMS:
                raise UsageError(f"{file}: family {name}: {unknown('claim', str(claim), list(CLAIMS))}")
        rows = {role: str(own[role]) for role in ROLES if role in own}
        families.append(Family(str(name), rows, own["trained"], str(own.get("differs", "")), notes))
    return families, [file.parent / str(path) for path in told["records"]]


def gather(families: Sequence[Family], paths: Sequence[Path]) -> list[Evidence]:
    """What the cells hold of each family, benchmark by benchmark; those of which nothing was measured are left out.

    Raises:
        UsageError: a cell is there twice, or was looked into in several ways.
    """
    entries = [entry for path in paths for entry in answers.read(path)]
    kinds = [("diagnosis" in entry.record, *row(entry.record)) for entry in entries]
    if twice := [kind for kind in kinds if kinds.count(kind) > 1]:
        _, benchmark, n, retriever, seed = twice[0]
        raise UsageError(f"two cells of {benchmark}, N={n:,}, {retriever}, seed {seed}; leave one of the records out")
    measured = {
        (curve.benchmark, curve.seed, curve.retriever): curve
        for curve in curves([entry for entry in entries if "diagnosis" not in entry.record], METRIC)
    }
    looked: dict[tuple[str, int, str], Sequence[Record]] = {}
    for records in diagnose.grouped(entry.record for entry in entries if "diagnosis" in entry.record):
        key = records[0]["benchmark"], records[0]["seed"], records[0]["retriever"]
        if key in looked:
            raise UsageError(f"{key[0]}, {key[2]}: cells were looked into in several ways; leave one of them out")
        looked[key] = records
    found = []
    for family in families:
        role = {label: name for name, label in family.rows.items()}
        for benchmark, seed in dict.fromkeys((key[0], key[1]) for key in [*measured, *looked]):
            own, seen = (
                {role[key[2]]: held for key, held in kind.items() if key[:2] == (benchmark, seed) and key[2] in role}
                for kind in (measured, looked)
            )
            if own or seen:
                found.append(Evidence(family, benchmark, seed, own, seen))  # type: ignore[arg-type]
    return found


def render(found: Sequence[Evidence], command: str) -> str:
    """All verdicts as Markdown, then the tables that go beyond the paper."""
    told = [
        "# The paper's claims, on what was measured here\n",
        f"Made by `{command}`. Paper: BlockSearch, arXiv 2607.01538. {metrics.definition(METRIC)}. Differences are "
        f"paired over queries; [low, high]: {metrics.INTERVAL}; medians: 95% intervals from order statistics. A claim "
        f"that one row is above another is judged at the largest common N at which either is surely above {SMALL}: it "
        "holds where the interval of the difference is above 0, and does not hold where it is below 0 or within "
        f"{SMALL} of it; in between it cannot be told with so many queries.\n",
    ]
    verdicts = [{key: judge(key, evidence) for key in CLAIMS} for evidence in found]
    heads = [evidence.name for evidence in found]
    body = [[claim, *(own[key].verdict for own in verdicts)] for key, (claim, _) in CLAIMS.items()]
    told.append(github(["claim", *heads], body))
    for evidence, own, head in zip(found, verdicts, heads, strict=True):
        told.append(f"## {head}\n")
        if evidence.family.differs:
            told.append(f"What differs from the paper: {evidence.family.differs}\n")
        for key, (claim, _) in CLAIMS.items():
            note = evidence.family.notes.get(key, "")
            told.append(f"- **{own[key].verdict}**: {claim} {own[key].told}." + (f" {note}" if note else ""))
        told.append("")
        tables = [t for records in evidence.seen.values() for t in diagnose.tables(records, command)]
        told += [table.render("md") for table in tables if table.name.endswith(BEYOND)]
    return "\n".join(told).rstrip("\n") + "\n"
