"""Which retriever to use at a corpus size, under limits: an answer from measured cells alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from icr_bench.harness.compare import LEVEL, interval, randomisation
from icr_bench.harness.curve import DRAWS, Curve, comparable
from icr_bench.harness.errors import FAILED, OK, UsageError
from icr_bench.harness.folder import Record
from icr_bench.harness.metrics import Floats
from icr_bench.harness.tables import github, human_bytes, one_line


@dataclass(frozen=True)
class Wish:
    """What is asked for; None where there is no limit."""

    n: int
    metric: str
    least: float | None = None
    latency: float | None = None  # seconds, of 95% of queries asked alone
    memory: int | None = None  # bytes, of the process and of a GPU each

    def __str__(self) -> str:
        parts = [f"N = {self.n:,}"]
        parts += [f"{self.metric} >= {self.least:g}"] if self.least is not None else []
        parts += [f"latency <= {self.latency:g} s"] if self.latency is not None else []
        parts += [f"memory <= {human_bytes(self.memory)}"] if self.memory is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Candidate:
    """The cell of a retriever that answers for a size: the smallest one measured that is not smaller, else the
    largest. Where a cell in between failed, it does not keep the limits."""

    curve: Curve
    place: int  # among the curve's sizes
    low: float
    high: float
    short: dict[str, float]  # limits that are not kept -> by which factor
    failed: int | None = None  # the smallest N of a failed cell that is not below the size asked for

    @property
    def n(self) -> int:
        return self.curve.sizes[self.place]

    @property
    def values(self) -> Floats:
        values: Floats = self.curve.values[self.place]
        return values

    @property
    def value(self) -> float:
        return float(self.values.mean())

    @property
    def record(self) -> Record:
        return self.curve.records[self.place]

    @property
    def latency(self) -> float:
        """Infinite where it was not measured, since answers were kept from before."""
        told = self.record["time"]["query_p95_s"]
        return math.inf if told is None else float(told)

    @property
    def memory(self) -> int:
        """The larger of what the process and what a GPU held."""
        memory = self.record["memory"]
        return max(int(memory["peak_rss_bytes"]), int(memory["device_peak_bytes"] or 0))


@dataclass(frozen=True)
class Advice:
    """The candidates of one benchmark, those that keep all limits first, by their metric; then the others, nearest
    first."""

    benchmark: str
    wish: Wish
    candidates: list[Candidate]
    failed: Sequence[str] = ()  # cells, in words

    @property
    def best(self) -> Candidate | None:
        return next((one for one in self.candidates if not one.short), None)

    @property
    def equals(self) -> list[Candidate]:
        """Others that keep all limits and cannot be told from the best: the interval of the paired difference holds 0,
        or a randomisation test finds no evidence."""
        return [
            one
            for one in self.candidates
            if self.best and one is not self.best and not one.short and _untold(self.best, one)
        ]


def parse_seconds(text: str) -> float:
    """``0.5s``, ``200ms`` or plain seconds.

    Raises:
        UsageError: none of these.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(ms|s|)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--max-latency {text!r}: expected seconds or milliseconds, such as 0.5s or 200ms")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def advise(curves: Sequence[Curve], wish: Wish, failed: Mapping[str, Sequence[str]] | None = None) -> list[Advice]:
    """An advice for every benchmark that was measured.

    Args:
        failed: benchmark -> its failed cells, in words.
    """
    found, failed = list[Advice](), failed or {}
    for benchmark in dict.fromkeys([*(curve.benchmark for curve in curves), *failed]):
        own = [_candidate(curve, wish) for curve in curves if curve.benchmark == benchmark]
        own.sort(key=lambda one: (sum(map(math.log, one.short.values())), -one.value, one.latency))
        found.append(Advice(benchmark, wish, own, failed.get(benchmark, ())))
    return found


def exit_code(advices: Sequence[Advice]) -> int:
    """1 where nothing measured keeps the limits."""
    return OK if all(advice.best for advice in advices) else FAILED


def _candidate(curve: Curve, wish: Wish) -> Candidate:
    place = next((i for i, n in enumerate(curve.sizes) if n >= wish.n), len(curve.sizes) - 1)
    low, high = interval(curve.values[place])
    failed = min((n for n in curve.failed if n >= wish.n), default=None)
    if failed is not None and wish.n <= curve.sizes[place] < failed:
        failed = None  # a larger one failed
    one = Candidate(curve, place, low, high, {}, failed)
    if failed is not None:
        one.short["N"] = math.inf
    elif one.n < wish.n:
        one.short["N"] = wish.n / one.n
    if wish.least is not None and one.value < wish.least - 1e-9:
        one.short[wish.metric] = wish.least / one.value if one.value else math.inf
    if wish.latency is not None and one.latency > wish.latency:
        one.short["latency"] = one.latency / wish.latency
    if wish.memory is not None and one.memory > wish.memory:
        one.short["memory"] = one.memory / wish.memory
    return one


def _untold(best: Candidate, other: Candidate) -> bool:
    if not comparable(best.curve, other.curve):
        return False
    differences = best.values - other.values
    low, high = interval(differences)
    return low <= 0 <= high or randomisation(differences, DRAWS) >= LEVEL


# Output


def text(advices: Sequence[Advice]) -> str:
    """Markdown."""
    return "\n".join(_advice(advice) for advice in advices)


def _advice(advice: Advice) -> str:
    wish, best = advice.wish, advice.best
    lines = [f"### {one_line(advice.benchmark)}: {wish}\n"]
    if best:
        lines.append(f"**{one_line(best.curve.name)}**: {_told(best, wish)}.\n")
        for one in advice.equals:
            cheaper = [
                f"{factor:.3g} times {word}"
                for word, factor in (
                    ("faster", best.latency / one.latency if one.latency else 1.0),
                    ("smaller", best.memory / one.memory),
                )
                if factor >= 1.1
            ]
            words = f" and is {' and '.join(cheaper)}" if cheaper else ""
            lines.append(f"{one_line(one.curve.name)} cannot be told from it over these queries{words}.\n")
        if wish.least is not None and best.low < wish.least:
            lines.append(f"Its interval reaches below {wish.least:g}: more queries would tell.\n")
    elif not advice.candidates:
        lines.append("**Nothing was measured**: every cell failed.\n")
        return "\n".join([*lines, *(f"- failed: {one_line(told)}" for told in advice.failed)]) + "\n"
    else:
        nearest = advice.candidates[0]
        lines.append(
            f"**Nothing measured keeps these limits.** Nearest: {one_line(nearest.curve.name)}, "
            f"{_told(nearest, wish)}; it misses {_misses(nearest)}.\n"
        )
    body = [
        [
            one.curve.name,
            f"{one.n:,}",
            f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]",
            _seconds(one.latency),
            human_bytes(one.memory),
            _misses(one) or "yes",
        ]
        for one in advice.candidates
    ]
    lines.append(github(["retriever", "N", wish.metric, "latency", "memory", "keeps the limits, or misses"], body))
    lines += [f"- {note}" for note in _notes(advice)]
    return "\n".join(lines) + "\n"


def _told(one: Candidate, wish: Wish) -> str:
    return (
        f"{wish.metric} {one.value:.3f} [{one.low:.3f}, {one.high:.3f}] at N={one.n:,}, 95% of queries within "
        f"{_seconds(one.latency)}, {human_bytes(one.memory)}"
    )


def _misses(one: Candidate) -> str:
    if one.failed is None:
        size = f"N (measured up to {one.n:,})"
    else:
        size = f"N (its cell at N={one.failed:,} failed: {one.curve.failed[one.failed]})"
    return ", ".join(size if name == "N" else f"{name} (by x{factor:.3g})" for name, factor in one.short.items())


def _seconds(value: float) -> str:
    if math.isinf(value):
        return "not measured"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _notes(advice: Advice) -> list[str]:
    records = [one.record for one in advice.candidates]
    machines = {record["environment"]["machine"]["id"]: record["environment"]["machine"] for record in records}
    counts = sorted({len(one.curve.queries) for one in advice.candidates})
    notes = [
        f"rests on one measured cell a retriever, of {' or '.join(f'{count:,}' for count in counts)} queries; [low, "
        "high]: 95% bootstrap over queries",
        "latency: 95th percentile of one query alone; memory: peak of the process, or of the GPU where that is more; "
        + (f"measured on {one_line(_machine(next(iter(machines.values()))))}" if len(machines) == 1 else "")
        + (f"measured on {len(machines)} machines, so that rows do not compare" if len(machines) > 1 else ""),
    ]
    if any(one.n > advice.wish.n for one in advice.candidates):
        notes.append(f"N={advice.wish.n:,} was not measured for all: the next larger size stands in")
    return notes + [f"failed: {one_line(told)}" for told in advice.failed]


def _machine(machine: dict[str, Any]) -> str:
    return f"{machine['processor']}, {machine['threads']} threads, {human_bytes(machine['memory_bytes'])}"


def _row(one: Candidate) -> dict[str, Any]:
    return {"retriever": one.curve.retriever, "seed": one.curve.seed}


def as_json(advices: Sequence[Advice]) -> str:
    """Everything, for programs."""
    told = []
    for advice in advices:
        rows = [
            _row(one)
            | {
                "n": one.n,
                "value": one.value,
                "low": one.low,
                "high": one.high,
                "latency_s": one.latency if math.isfinite(one.latency) else None,
                "memory_bytes": one.memory,
            }
            | {"misses": {name: factor if math.isfinite(factor) else None for name, factor in one.short.items()}}
            for one in advice.candidates
        ]
        best = _row(advice.best) if advice.best else None
        equals = [_row(one) for one in advice.equals]
        whole = {"benchmark": advice.benchmark, "best": best, "not_told_from_it": equals, "candidates": rows}
        told.append(whole | {"failed": list(advice.failed)})
    return json.dumps(told, indent=1) + "\n"
