"""Recall against N as one object: where it falls below a level, where two retrievers cross, and how costs grow."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from icr_bench.harness import metrics
from icr_bench.harness.answers import Entry
from icr_bench.harness.compare import COSTS, LEVEL, randomisation
from icr_bench.harness.errors import UsageError
from icr_bench.harness.folder import Record
from icr_bench.harness.tables import github, human_bytes, one_line

RESAMPLES = 2_000

DRAWS = 10_000
"""Signs drawn by a randomisation test."""

FARTHEST = 100
"""How many times the largest measured N an extrapolation may reach."""

ROUNDING = 1e-9
"""Of logits that are equal."""

BELOW, ABOVE = -math.inf, math.inf
"""Positions before the smallest and beyond the largest measured N."""


@dataclass(frozen=True)
class Curve:
    """A metric of one retriever on one benchmark at every measured N, over the same queries."""

    benchmark: str
    retriever: str
    seed: int
    queries: tuple[str, ...]
    sizes: tuple[int, ...]  # ascending
    values: metrics.Floats  # (sizes, queries)
    records: tuple[Record, ...]  # one a size
    failed: Mapping[int, str] = field(default_factory=dict)  # N of the cells that failed -> their status

    @property
    def name(self) -> str:
        return self.retriever + (f" (seed {self.seed})" if self.seed else "")

    @property
    def means(self) -> metrics.Floats:
        """The metric at every size, (sizes,)."""
        means: metrics.Floats = self.values.mean(1)
        return means


@dataclass(frozen=True)
class Position:
    """An N with its 95% interval; infinities are positions outside the measured range."""

    n: float
    low: float
    high: float
    extrapolated: bool = False


def curves(entries: Sequence[Entry], metric: str) -> list[Curve]:
    """The curves of all cells that were finished; several seeds are curves of their own.

    Raises:
        UsageError: the cells of a curve were asked different queries, made from different data or options, or given
            different options, or rankings are not as deep as the metric.
    """
    groups: dict[tuple[str, str, int], list[Entry]] = {}
    failed: dict[tuple[str, str, int], dict[int, str]] = {}
    for entry in entries:
        record = entry.record
        key = record["benchmark"], record["retriever"], record["seed"]
        if entry.graded:
            groups.setdefault(key, []).append(entry)
        else:
            failed.setdefault(key, {})[int(record["n"])] = record["status"]
    found = []
    for (benchmark, retriever, seed), own in groups.items():
        own.sort(key=lambda entry: int(entry.record["n"]))
        graded = [entry.graded for entry in own if entry.graded]
        asked = {tuple(one.queries) for one in graded}
        if len(asked) > 1:
            raise UsageError(f"{benchmark}, {retriever}: the cells were asked different queries, and make no curve")
        for what in ("benchmark", "retriever"):
            made = {_made(entry.record, what) for entry in own}
            if len(made) > 1:
                raise UsageError(
                    f"{benchmark}, {retriever}: the cells were made with different options of the {what}, and make no "
                    f"curve: {' and '.join(sorted(made))}"
                )
        values = np.stack([one.values(metric) for one in graded])
        sizes = tuple(int(entry.record["n"]) for entry in own)
        records = tuple(entry.record for entry in own)
        lost = failed.get((benchmark, retriever, seed), {})
        found.append(Curve(benchmark, retriever, seed, asked.pop(), sizes, values, records, lost))
    return found


def _made(record: Record, what: str) -> str:
    made = record["config"][what]
    return json.dumps({"name": made["name"], **made["resolved"]}, sort_keys=True)


def comparable(one: Curve, other: Curve) -> bool:
    """Whether two curves are of the same queries, seed and data, so that their queries can be paired."""
    if (one.queries, one.seed) != (other.queries, other.seed):
        return False
    first, second = (
        {n: record["fingerprint"]["data"] for n, record in zip(curve.sizes, curve.records, strict=True)}
        for curve in (one, other)
    )
    return all(first[n] == second[n] for n in first.keys() & second.keys())


def falls_below(curve: Curve, level: float, *, extrapolate: bool = False) -> Position:
    """The smallest N at which the curve is below a level, linear in the logit of the metric against log N.

    Args:
        level: between 0 and 1.
        extrapolate: go on beyond the largest N along the last two sizes, to `FARTHEST` times it.
    """
    count = len(curve.queries)
    goal = _logit(np.array(level), count)
    return _position(curve.sizes, goal - _logit(_draws(count) @ curve.values.T, count), extrapolate)


@dataclass(frozen=True)
class Crossing:
    """A curve that is above another, with evidence, from some measured N on, and where it is so no longer. Evidence is
    an interval of the difference that excludes 0, and a randomisation test, since a handful of queries has no interval
    to speak of."""

    leader: Curve
    other: Curve
    sizes: tuple[int, ...]  # that both have, from the first with evidence
    until: Position


def crossover(one: Curve, other: Curve, *, extrapolate: bool = False) -> Crossing | None:
    """Who leads first, and the smallest N at which it does so no longer; None where no shared size tells the two apart.
    Queries are resampled together.

    Raises:
        UsageError: the curves share fewer than two sizes, or were asked different queries, or of different data.
    """
    shared = [n for n in one.sizes if n in other.sizes]
    if not comparable(one, other) or len(shared) < 2:
        raise UsageError(
            f"{one.name} and {other.name}: a crossover takes the same queries, seed and data, and two shared sizes"
        )
    count = len(one.queries)
    draws = _draws(count)
    ours, theirs = (curve.values[[curve.sizes.index(n) for n in shared]] for curve in (one, other))
    first, second = (_logit(draws @ values.T, count) for values in (ours, theirs))
    ahead = first - second  # (1 + resamples, sizes)
    low, high = np.quantile(ahead[1:], [0.025, 0.975], axis=0)
    apart = np.flatnonzero((low > ROUNDING) | (high < -ROUNDING))
    begin = next((int(at) for at in apart if randomisation(ours[at] - theirs[at], DRAWS) < LEVEL), None)
    if begin is None:
        return None
    leads = bool(low[begin] > ROUNDING)
    sizes = tuple(shared[begin:])
    until = _position(sizes, (-ahead if leads else ahead)[:, begin:], extrapolate)
    return Crossing(one, other, sizes, until) if leads else Crossing(other, one, sizes, until)


def exponent(curve: Curve, cost: str) -> float | None:
    """The power of N with which a cost grows: least squares of log cost on log N; None with fewer than three sizes, or
    where they were measured on several machines."""
    if len(machines([curve])) > 1:
        return None
    part, key = COSTS[cost]
    points = [
        (math.log(n), math.log(v)) for n, r in zip(curve.sizes, curve.records, strict=True) if (v := r[part][key])
    ]
    if len(points) < 3:
        return None
    x, y = np.array(points).T
    return float(np.polyfit(x, y, 1)[0])


def machines(found: Sequence[Curve]) -> set[str]:
    """What identifies the machines that curves were measured on."""
    return {record["environment"]["machine"]["id"] for curve in found for record in curve.records}


def _draws(count: int) -> metrics.Floats:
    """Weights of queries, (1 + RESAMPLES, count): first all the same, then bootstrap resamples."""
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return np.concatenate([np.ones((1, count)), drawn]) / count


def _logit(share: metrics.Floats, count: int) -> metrics.Floats:
    """Logit of a mean over queries, with half a query added to both sides so that 0 and 1 have one."""
    inner = (share * count + 0.5) / (count + 1)
    logits: metrics.Floats = np.log(inner / (1 - inner))
    return logits


def _position(sizes: Sequence[int], over: metrics.Floats, extrapolate: bool) -> Position:
    """Where each row first becomes more than 0, the first row being the curve itself and the others its resamples."""
    logs = np.log(sizes)
    found = np.array([_first(logs, row, extrapolate) for row in over])
    low, high = np.quantile(found[1:], [0.025, 0.975], method="inverted_cdf")  # one of them, since some are infinite
    n, low, high = (math.exp(x) if math.isfinite(x) else x for x in map(float, (found[0], low, high)))
    beyond = extrapolate and any(math.isfinite(x) and x > sizes[-1] * (1 + 1e-9) for x in (n, low, high))
    return Position(n, low, high, beyond)


def _first(logs: metrics.Floats, over: metrics.Floats, extrapolate: bool) -> float:
    if over[0] > ROUNDING:
        return BELOW
    for place in np.flatnonzero(over > ROUNDING)[:1]:
        share = over[place - 1] / (over[place - 1] - over[place])
        return float(logs[place - 1] + share * (logs[place] - logs[place - 1]))
    if extrapolate and len(logs) > 1 and over[-1] > over[-2]:
        further = -over[-1] * (logs[-1] - logs[-2]) / (over[-1] - over[-2])
        if further <= math.log(FARTHEST):
            return float(logs[-1] + further)
    return ABOVE


# Output


def failures(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Benchmark -> its failed cells, in words."""
    found: dict[str, list[str]] = {}
    for record in (entry.record for entry in entries if not entry.graded):
        seed = f", seed {record['seed']}" if record["seed"] else ""
        told = f"{record['retriever']} at N={record['n']:,}{seed}: {record['status']}"
        found.setdefault(record["benchmark"], []).append(told)
    return found


def text(entries: Sequence[Entry], metric: str, levels: Sequence[float], *, extrapolate: bool = False) -> str:
    """Markdown of all of it."""
    found, failed = curves(entries, metric), failures(entries)
    parts = []
    for benchmark in dict.fromkeys([*(curve.benchmark for curve in found), *failed]):
        own = [curve for curve in found if curve.benchmark == benchmark]
        parts.append(f"### {one_line(benchmark)}: {metric}\n")
        parts += [f"- failed: {one_line(told)}\n" for told in failed.get(benchmark, ())]
        if not own:
            continue
        head = ["retriever", *(f"falls below {level:g} at N" for level in levels)]
        body = []
        for curve in own:
            falls = (falls_below(curve, level, extrapolate=extrapolate) for level in levels)
            body.append([curve.name, *(_shown(one, curve.sizes) for one in falls)])
        parts.append(github(head, body))
        if crossings := [_crossing(*pair, extrapolate) for pair in _pairs(own)]:
            parts.append(github(["leads", "over", "from N", "until N"], crossings))
        parts.append(github(["retriever", "N", "seconds per 1,000 queries", "index"], list(_costs(own))))
        growth = [[c.name, *("" if (e := exponent(c, cost)) is None else f"{e:.2f}" for cost in COSTS)] for c in own]
        parts.append(github(["retriever", *(f"{cost} ~ N^" for cost in COSTS)], growth))
    beyond = f"; (extrapolated): along the last two sizes, to {FARTHEST} times the largest N" if extrapolate else ""
    parts.append(
        f"- N between sizes: linear in the logit of {metric} against log N; [low, high]: 95% bootstrap over queries, "
        f"{RESAMPLES:,} resamples{beyond}\n"
        "- leads: from the first N at which the interval of the difference over the same queries excludes 0 and a "
        f"paired randomisation test has p below {LEVEL:g}\n"
        "- seconds per 1,000 queries: in batches; growth: least squares of log cost on log N, three sizes or more; "
        "peak memory holds what the program itself takes\n"
    )
    if len(machines(found)) > 1:
        parts.append("- measured on several machines: costs do not compare, and growth across them is left out\n")
    return "\n".join(parts)


def as_json(entries: Sequence[Entry], metric: str, levels: Sequence[float], *, extrapolate: bool = False) -> str:
    """Everything, for programs; a position outside the measured range is "below" or "above"."""
    found, told = curves(entries, metric), list[dict[str, Any]]()
    for curve in found:
        falls = {f"{level:g}": _plain(falls_below(curve, level, extrapolate=extrapolate)) for level in levels}
        points = [
            {
                "n": n,
                "value": float(value),
                "queries_per_s": record["time"]["queries_per_s"],
                "query_p50_s": record["time"]["query_p50_s"],
                "index_bytes": record["memory"]["index_bytes"],
            }
            for n, value, record in zip(curve.sizes, curve.means, curve.records, strict=True)
        ]
        growth = {cost: exponent(curve, cost) for cost in COSTS}
        told.append(
            {"benchmark": curve.benchmark, "retriever": curve.retriever, "seed": curve.seed, "points": points}
            | {"falls_below": falls, "growth": growth}
        )
    crossings = []
    for benchmark in dict.fromkeys(curve.benchmark for curve in found):
        for one, other in _pairs([curve for curve in found if curve.benchmark == benchmark]):
            if crossing := crossover(one, other, extrapolate=extrapolate):
                names = {"leads": crossing.leader.name, "over": crossing.other.name, "from": crossing.sizes[0]}
                crossings.append({"benchmark": benchmark, **names, "until": _plain(crossing.until)})
    whole = {"metric": metric, "curves": told, "crossovers": crossings, "failed": failures(entries)}
    return json.dumps(whole, indent=1) + "\n"


def _plain(position: Position) -> dict[str, Any]:
    return {key: {BELOW: "below", ABOVE: "above"}.get(value, value) for key, value in asdict(position).items()}


def _pairs(own: Sequence[Curve]) -> Iterator[tuple[Curve, Curve]]:
    """Every two that can be compared."""
    for one, other in itertools.combinations(own, 2):
        if comparable(one, other) and len(set(one.sizes) & set(other.sizes)) > 1:
            yield one, other


def _crossing(one: Curve, other: Curve, extrapolate: bool) -> list[str]:
    crossing = crossover(one, other, extrapolate=extrapolate)
    if crossing is None:
        return [one.name, other.name, "", "cannot be told apart at any N"]
    until = _shown(crossing.until, crossing.sizes, "not behind up to")
    return [crossing.leader.name, crossing.other.name, f"{crossing.sizes[0]:,}", until]


def _shown(position: Position, sizes: Sequence[int], until: str = "not below up to") -> str:
    def number(n: float) -> str:
        if n == BELOW:
            return f"< {sizes[0]:,}"
        return f"> {sizes[-1]:,}" if n == ABOVE else f"{float(f'{n:.3g}'):,.0f}"

    if math.isfinite(position.n):
        shown = number(position.n)
    else:
        side = f"below at {sizes[0]:,} already" if position.n == BELOW else f"{until} {sizes[-1]:,}"
        shown = f"not within the measured range: {side}"
    mark = " (extrapolated)" if position.extrapolated else ""
    return f"{shown} [{number(position.low)}, {number(position.high)}]{mark}"


def _costs(own: Sequence[Curve]) -> Iterator[list[str]]:
    for curve in own:
        for n, record in zip(curve.sizes, curve.records, strict=True):
            rate = record["time"]["queries_per_s"]
            seconds = f"{1000 / rate:.3g}" if rate else ""
            yield [curve.name, f"{n:,}", seconds, human_bytes(record["memory"]["index_bytes"])]
