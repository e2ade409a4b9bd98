"""Two runs side by side: paired differences with their uncertainty, and a verdict that an exit code can carry."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np

from icr_bench.benchmarks.base import DataError
from icr_bench.harness import metrics
from icr_bench.harness.answers import Entry
from icr_bench.harness.errors import FAILED, OK, UsageError
from icr_bench.harness.folder import Record
from icr_bench.harness.tables import github, human_bytes, one_line

LEVEL = 0.05
"""Evidence asked of a difference: its p-value after Holm's correction."""

RESAMPLES = 10_000
"""Of the bootstrap; the randomisation test takes more where the family is large, see `randomisation`."""

EXACT = 13
"""Up to as many differences that are not 0, all their signs are tried instead of a sample."""

COSTS = {
    "latency": ("time", "query_p50_s"),
    "index_time": ("time", "index_s"),
    "memory": ("memory", "peak_rss_bytes"),
    "index_bytes": ("memory", "index_bytes"),
}
"""What is compared as a ratio -> where a record holds it."""


@dataclass(frozen=True)
class Tolerance:
    """How much worse is accepted: an amount, or a share of the base's value."""

    amount: float
    relative: bool

    def of(self, base: float) -> float:
        return self.amount * base if self.relative else self.amount

    def __str__(self) -> str:
        return f"{self.amount * 100:g}%" if self.relative else f"{self.amount:g}"


@dataclass
class Difference:
    """A metric of a cell in both runs, over the same queries."""

    metric: str
    base: float
    new: float
    difference: float
    low: float
    high: float
    p: float  # of what the difference is beyond the tolerance, to either side
    holm: float = 1.0  # the same after Holm's correction over all differences
    tolerance: float = 0.0

    @property
    def change(self) -> str:
        """The difference with its interval, as text."""
        return f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    @property
    def worse(self) -> bool:
        return self.difference < -self.tolerance and self.holm < LEVEL

    @property
    def better(self) -> bool:
        return self.difference > self.tolerance and self.holm < LEVEL


@dataclass
class Ratio:
    """A cost of a cell, new over base."""

    name: str
    base: float
    new: float
    most: float | None  # the largest ratio accepted; None where no tolerance names it

    @property
    def ratio(self) -> float:
        return self.new / self.base

    @property
    def worse(self) -> bool:
        return self.most is not None and self.ratio > self.most


Status = Literal["compared", "missing", "failed", "failed in both", "repaired", "new"]


@dataclass
class Pair:
    """A cell of the base with the one it is matched to."""

    benchmark: str
    n: int
    retriever: str
    seed: int
    status: Status
    told: str = ""  # why a cell failed
    options: dict[str, list[Any]] = field(default_factory=dict)  # that differ: base's, new's
    changed: list[str] = field(default_factory=list)  # of data, weights and code
    differences: list[Difference] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)

    @property
    def name(self) -> str:
        seed = f", seed {self.seed}" if self.seed else ""
        return f"{self.benchmark}, N={self.n:,}, {self.retriever}{seed}"

    @property
    def regressions(self) -> list[str]:
        """What is worse, in words; empty where nothing is."""
        if self.status == "missing":
            return ["the cell is missing"]
        if self.status == "failed":
            return [f"the cell failed: {self.told}"]
        found = [
            f"{d.metric} {d.base:.3f} -> {d.new:.3f} ({d.change}, p {_p(d.holm)})" for d in self.differences if d.worse
        ]
        return found + [f"{r.name} x{r.ratio:.2f} (at most x{r.most:.2f})" for r in self.ratios if r.worse]


@dataclass
class Comparison:
    """All cells of both sides."""

    pairs: list[Pair]
    metrics: list[str]
    notes: list[str]

    @property
    def exit_code(self) -> int:
        return FAILED if any(pair.regressions for pair in self.pairs) else OK


def parse_tolerance(text: str) -> tuple[str, Tolerance]:
    """``hit@1=0.01`` (an amount), ``ndcg@10=2%`` or ``latency=50%`` (a share of the base's value).

    Raises:
        UsageError: no such metric or cost, or no number of 0 or more.
    """
    name, _, value = (part.strip() for part in text.partition("="))
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(%?)", value)
    if match is None:
        raise UsageError(
            f"--tolerance {text!r}: expected NAME=NUMBER or NAME=NUMBER%, such as hit@1=0.01 or latency=50%"
        )
    amount, relative = float(match[1]), bool(match[2])
    if name in COSTS:
        if not relative:
            raise UsageError(f"--tolerance {text!r}: {name} is compared as a ratio; give a share, such as {name}=50%")
    else:
        name = metrics.parse_metric(name)
    return name, Tolerance(amount / 100 if relative else amount, relative)


def compare(
    base: Sequence[Entry],
    new: Sequence[Entry],
    chosen: Sequence[str] | None = None,
    tolerances: Mapping[str, Tolerance] | None = None,
    *,
    other_data: bool = False,
) -> Comparison:
    """Match the cells of two runs by name, data, N, seed and row, and compare what they answered to the same queries.

    Args:
        chosen: metrics; None for hit@1 and ndcg@10, or ndcg at the largest cut-off that all cells hold.
        tolerances: by metric or cost; none means 0 for a metric, and that a cost is shown but not judged.
        other_data: compare cells of equal names over the queries that they share where their data differ.

    Raises:
        DataError: cells of equal names are of different data, and ``other_data`` is not set.
        UsageError: a metric that rankings were not kept deep enough for.
    """
    tolerances = dict(tolerances or {})
    wanted = [metrics.parse_metric(one) for one in chosen] if chosen else _usual([*base, *new])
    if idle := sorted(set(tolerances) - set(wanted) - set(COSTS)):
        raise UsageError(f"--tolerance {idle[0]}: the metric is not compared; give --metric {idle[0]} too")
    matched = list(_matched(base, new, other_data))
    tests = len(wanted) * sum(bool(old and old.graded and found and found.graded) for old, found in matched)
    pairs = [_pair(old, found, wanted, tolerances, resamples(tests)) for old, found in matched]
    differences = [d for pair in pairs for d in pair.differences]
    for d, corrected in zip(differences, holm([d.p for d in differences]), strict=True):
        d.holm = corrected
    notes = _notes(matched, len(differences))
    for name in sorted(set(tolerances) & set(COSTS)):
        judged = sum(ratio.name == name for pair in pairs for ratio in pair.ratios)
        if left := sum(bool(pair.differences) for pair in pairs) - judged:
            notes.append(
                f"{name} is not judged in {left} cells: another machine, or nothing measured on one of the sides"
            )
    return Comparison(pairs, wanted, notes)


def resamples(tests: int) -> int:
    """Signs drawn for each of so many tests: enough for the smallest p-value to pass Holm's correction twenty times
    over."""
    return max(RESAMPLES, round(20 * tests / LEVEL))


def randomisation(differences: metrics.Floats, count: int, seed: int = 0) -> float:
    """Two-sided p-value of a paired randomisation test: how often signs drawn at random give a mean at least as far
    from 0.

    Args:
        differences: one a query; those of 0 change nothing.
        count: of the draws. With at most `EXACT` differences other than 0, all their signs are tried instead.
    """
    sizes = np.abs(differences[differences != 0])
    observed = abs(float(differences.sum())) - 1e-9 * float(sizes.sum())  # sums of other orders differ in the last bits
    if len(sizes) <= EXACT:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(sizes)))).reshape(2 ** len(sizes), len(sizes))
        return float(np.mean(np.abs(signs @ sizes) >= observed))
    rng = np.random.default_rng(seed)
    reached = 0
    for begin in range(0, count, 1_000):
        signs = rng.integers(0, 2, (min(1_000, count - begin), len(sizes)), dtype=np.int8) * 2.0 - 1
        reached += int(np.sum(np.abs(signs @ sizes) >= observed))
    return (reached + 1) / (count + 1)


def holm(p: Sequence[float]) -> list[float]:
    """P-values after Holm's step-down correction, in the same order."""
    corrected, least = [0.0] * len(p), 0.0
    for place, number in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        least = max(least, min(1.0, (len(p) - place) * p[number]))
        corrected[number] = least
    return corrected


def interval(differences: metrics.Floats, seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the mean."""
    rng = np.random.default_rng(seed)
    values, counts = np.unique(differences, return_counts=True)  # few values: draw how often each occurs
    drawn = rng.multinomial(len(differences), counts / len(differences), size=RESAMPLES) @ values / len(differences)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


Key = tuple[Any, ...]


def _by_name(record: Record) -> Key:
    return record["benchmark"], record["n"], record["seed"], record["retriever"]


def _by_data(record: Record) -> Key:
    return record["fingerprint"]["data"], record["n"], record["seed"], record["retriever"]


def _by_both(record: Record) -> Key:
    return record["benchmark"], *_by_data(record)


def _matched(
    base: Sequence[Entry], new: Sequence[Entry], other_data: bool
) -> Iterator[tuple[Entry | None, Entry | None]]:
    """Cells of the base with those of the other side, then the other side's alone: first those of equal names and
    data, then those of equal data under another name, unless several are (they differ in their benchmarks' options),
    then those of equal names."""
    found: dict[int, Entry] = {}  # by place in the base
    rest, left = list(range(len(base))), list(new)
    for key in (_by_both, _by_data, _by_name):
        ours = _alone([base[place].record for place in rest], key)
        theirs = _alone([entry.record for entry in left], key)
        pairs = {rest[ours[shared]]: left[theirs[shared]] for shared in ours if shared in theirs}
        if key is _by_name and pairs and not other_data:
            place, other = next(iter(pairs.items()))
            benchmark, n, seed, retriever = _by_name(base[place].record)
            raise DataError(
                f"{benchmark}, N={n}, {retriever}, seed {seed}: the two sides were asked of different data "
                f"({base[place].record['fingerprint']['data'][:12]} and {other.record['fingerprint']['data'][:12]}); "
                f"make the base again, or give --other-data to compare over the queries that both have"
            )
        found |= pairs
        rest = [place for place in rest if place not in found]
        taken = {id(entry) for entry in pairs.values()}
        left = [entry for entry in left if id(entry) not in taken]
    for place, old in enumerate(base):
        yield old, found.get(place)
    for entry in left:
        yield None, entry


def _alone(records: Sequence[Record], key: Callable[[Record], Key]) -> dict[Key, int]:
    """The places of records that share their key with no other, by key."""
    keys = [key(record) for record in records]
    counts = Counter(keys)
    return {one: place for place, one in enumerate(keys) if counts[one] == 1}


def _pair(
    old: Entry | None, found: Entry | None, wanted: Sequence[str], tolerances: Mapping[str, Tolerance], count: int
) -> Pair:
    held = old or found
    assert held
    told = held.record
    pair = Pair(told["benchmark"], told["n"], told["retriever"], told["seed"], "compared")
    if old is None or found is None:
        pair.status = "new" if old is None else "missing"
        return pair
    one, other = old.record, found.record
    pair.options = _options(one, other)
    pair.changed = [key for key in ("data", "weights", "code") if one["fingerprint"][key] != other["fingerprint"][key]]
    if found.graded is None:
        pair.status = "failed" if old.graded else "failed in both"
        pair.told = one_line(f"{other['status']}: {other['error']}")
        return pair
    if old.graded is None:
        pair.status = "repaired"
        return pair
    place = {query: number for number, query in enumerate(found.graded.queries)}
    shared = [(number, place[query]) for number, query in enumerate(old.graded.queries) if query in place]
    if not shared:
        raise DataError(f"{pair.name}: the two sides share no query")
    ours, theirs = (list(numbers) for numbers in zip(*shared, strict=True))
    for metric in wanted:
        a, b = old.graded.values(metric)[ours], found.graded.values(metric)[theirs]
        allowed = tolerances[metric].of(float(a.mean())) if metric in tolerances else 0.0
        low, high = interval(b - a)
        change = float((b - a).mean())
        p = randomisation(b - a - math.copysign(allowed, change), count) if abs(change) > allowed else 1.0
        pair.differences.append(
            Difference(metric, float(a.mean()), float(b.mean()), change, low, high, p, tolerance=allowed)
        )
    if _machine(one) == _machine(other):
        for name, (part, key) in COSTS.items():
            before, after = one[part][key], other[part][key]
            if before and after:  # None where it came from a cache
                most = 1 + tolerances[name].amount if name in tolerances else None
                pair.ratios.append(Ratio(name, before, after, most))
    return pair


def _machine(record: Record) -> str:
    return str(record["environment"]["machine"]["id"])


def _options(one: Record, other: Record) -> dict[str, list[Any]]:
    """What the two rows and their benchmarks were given differently, the names among it."""
    left, right = (
        {
            f"{before}{key}": value
            for kind, before in (("retriever", ""), ("benchmark", "benchmark "))
            for key, value in {"name": r["config"][kind]["name"], **r["config"][kind]["resolved"]}.items()
        }
        for r in (one, other)
    )
    keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    return {key: [left.get(key), right.get(key)] for key in keys}


def _usual(entries: Sequence[Entry]) -> list[str]:
    kept = [entry.graded.depth for entry in entries if entry.graded]
    return ["hit@1", f"ndcg@{min([10, *kept])}"]


def _notes(matched: Sequence[tuple[Entry | None, Entry | None]], tests: int) -> list[str]:
    notes = [
        f"difference: new - base over the same queries, [low, high]: 95% percentile bootstrap, {RESAMPLES:,} "
        f"resamples; p: two-sided paired randomisation test beyond the tolerance, {resamples(tests):,} draws (all "
        f"signs where at most {EXACT} queries differ), after Holm's correction over {tests} tests",
        f"worse or better: p below {LEVEL:g}",
    ]
    both = [(old.record, found.record) for old, found in matched if old and found]
    if any(_machine(one) != _machine(other) for one, other in both):
        notes.append("latency and memory are left out: the two sides ran on different machines")
    return notes


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


# Output


def text(comparison: Comparison) -> str:
    """For a terminal and, being Markdown, for a comment on a pull request."""
    parts = []
    regressed = [pair for pair in comparison.pairs if pair.regressions]
    if regressed:
        parts.append(f"**{len(regressed)} of {len(comparison.pairs)} cells are worse.**\n")
        parts += [f"- {one_line(pair.name)}: {one_line('; '.join(pair.regressions))}\n" for pair in regressed]
    else:
        parts.append(f"**No cell is worse** ({len(comparison.pairs)} cells).\n")
    head = ["cell", "metric", "base", "new", "difference", "p", "verdict"]
    body = []
    for pair in comparison.pairs:
        if not pair.differences:
            body.append([pair.name, "", "", "", "", "", pair.status])
        for d in pair.differences:
            verdict = "worse" if d.worse else "better" if d.better else ""
            body.append([pair.name, d.metric, f"{d.base:.3f}", f"{d.new:.3f}", d.change, _p(d.holm), verdict])
    parts.append("\n" + github(head, body))
    if costs := _costs(comparison.pairs):
        parts.append("\n" + costs)
    for pair in comparison.pairs:
        changed = [f"{key}={old} -> {new}" for key, (old, new) in pair.options.items()]
        changed += [f"{what} changed" for what in pair.changed]
        if changed:
            parts.append(f"\n- {one_line(pair.name)}: {one_line(', '.join(changed))}")
    return "".join(parts) + "\n\n" + "".join(f"- {note}\n" for note in comparison.notes)


def _costs(pairs: Sequence[Pair]) -> str:
    shown: dict[str, Any] = {"memory": human_bytes, "index_bytes": human_bytes}
    body = []
    for pair in pairs:
        for r in pair.ratios:
            how = shown.get(r.name, lambda seconds: f"{seconds:.3g} s")
            body.append([pair.name, r.name, how(r.base), how(r.new), f"x{r.ratio:.2f}", "worse" if r.worse else ""])
    return github(["cell", "cost", "base", "new", "ratio", "verdict"], body) if body else ""


def as_json(comparison: Comparison) -> str:
    """Everything, for programs."""
    cells = []
    for pair in comparison.pairs:
        own = asdict(pair) | {"name": pair.name, "regressions": pair.regressions}
        for told, d in zip(own["differences"], pair.differences, strict=True):
            told |= {"worse": d.worse, "better": d.better}
        for told, r in zip(own["ratios"], pair.ratios, strict=True):
            told |= {"ratio": r.ratio, "worse": r.worse}
        cells.append(own)
    whole = {"exit_code": comparison.exit_code, "metrics": comparison.metrics, "cells": cells}
    return json.dumps(whole | {"notes": comparison.notes}, indent=1) + "\n"


def as_junit(comparison: Comparison) -> str:
    """A test case a cell, for what shows test results."""
    pairs = comparison.pairs
    failures = sum(bool(pair.regressions) for pair in pairs)
    suite = ElementTree.Element("testsuite", name="icr-bench compare", tests=str(len(pairs)), failures=str(failures))
    for pair in pairs:
        case = ElementTree.SubElement(suite, "testcase", classname=one_line(pair.benchmark), name=one_line(pair.name))
        if pair.regressions:
            ElementTree.SubElement(case, "failure", message=one_line("; ".join(pair.regressions)))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
