"""Numbers that papers published, beside measured ones: another set-up, and marked so."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from icr_bench.harness.errors import unknown
from icr_bench.harness.folder import Record
from icr_bench.harness.metrics import cutoff
from icr_bench.harness.tables import Cell, Table

FOLDER = files("icr_bench.reference")

BENCHMARKS = {"MS MARCO": "msmarco", "HotpotQA": "hotpotqa", "NQ": "nq", "LIMIT": "limit"}
"""A paper's data set -> the benchmark of that name."""

METRICS = (
    (r"Recall@(\d+) \(hit-based", "hit@"),
    (r"Recall@(\d+)(?: \(true|$)", "recall@"),
    (r"complete-evidence recall@(\d+)", "complete@"),
)
"""How papers name what is measured here."""

TRUST = (("current", ""), ("confirmed", ""), ("v1 only", "first version only"), ("row changed", "changed in v2"))
"""Statuses that are shown, the most trusted first, and the remark that each gets; others were superseded."""

MARK = "[published]"


@dataclass(frozen=True)
class Published:
    """One number of a paper, as a metric of this package."""

    benchmark: str
    retriever: str  # with the model behind it
    metric: str
    n: int
    value: float  # 0 to 1
    queries: int | None
    trust: int  # its place in `TRUST`
    source: str

    def cell(self) -> Cell:
        """With the interval that so many queries imply."""
        remark = f", {TRUST[self.trust][1]}" if TRUST[self.trust][1] else ""
        if self.queries is None:
            return Cell(f"{self.value:.3f}{remark}", {"value": self.value})
        low, high = wilson(self.value, self.queries)
        text = f"{self.value:.3f} [{low:.3f}, {high:.3f}]{remark}"
        return Cell(text, {"value": self.value, "low": low, "high": high})


def names() -> list[str]:
    """The papers whose numbers come with the package."""
    return sorted(file.name.removesuffix(".jsonl") for file in FOLDER.iterdir() if file.name.endswith(".jsonl"))


def read(name: str) -> list[Record]:
    """All numbers of a paper, as they were printed.

    Raises:
        UsageError: no such paper.
    """
    if name not in names():
        raise unknown("reference", name, names())
    return [json.loads(line) for line in FOLDER.joinpath(f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def describe(name: str) -> str:
    """What there is of a paper: its tables with how many numbers each has, and where they come from."""
    rows = read(name)
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        key = (row["table"], row["source"])
        counts[key] = counts.get(key, 0) + 1
    lines = [f"reference {name}: {len(rows):,} published numbers", ""]
    return "\n".join(lines + [f"  {table}: {count} ({source})" for (table, source), count in counts.items()]) + "\n"


def published(name: str) -> list[Published]:
    """Those of a paper's numbers that can stand in a table here: quality of a retriever on one of the benchmarks at a
    known N. Of several for a cell the most trusted one."""
    best: dict[tuple[str, str, str, int], Published] = {}
    for row in read(name):
        metric = _metric(row["metric"])
        trust = next((i for i, (status, _) in enumerate(TRUST) if row["status"].startswith(status)), None)
        if metric is None or trust is None or row["dataset"] not in BENCHMARKS or "n_means" in row:
            continue
        if row["n"] <= cutoff(metric):
            continue  # what is retrieved, not what it is retrieved from
        found = Published(
            BENCHMARKS[row["dataset"]],
            _label(row["retriever"], row["backbone"]),
            metric,
            row["n"],
            row["value"] / 100 if row["unit"] == "percent" else row["value"],
            row.get("queries"),
            trust,
            f"{row['table']}, from {row['source']}",
        )
        key = (found.benchmark, found.retriever, found.metric, found.n)
        if key not in best or trust < best[key].trust:
            best[key] = found
    return list(best.values())


def beside(tables: Sequence[Table], records: Sequence[Record], name: str) -> list[Table]:
    """The tables, with a paper's numbers below the measured ones of the same benchmark, N and metric."""
    rows = published(name)
    benchmarks = {record["benchmark"]: record["config"]["benchmark"]["name"] for record in records}
    return [_beside(table, rows, benchmarks[table.benchmark], name) for table in tables]


def _beside(table: Table, rows: Sequence[Published], benchmark: str, name: str) -> Table:
    if "@" not in table.name:
        return table
    own = [one for one in rows if (one.benchmark, one.metric) == (benchmark, table.name) and one.n in table.sizes]
    if not own:
        note = f"{name} has no published number for {benchmark}, {table.name} and these sizes"
        return replace(table, notes=[*table.notes, note])
    placed: dict[str, dict[int, Cell]] = {}
    for one in own:
        placed.setdefault(f"{one.retriever} {MARK}", {})[one.n] = one.cell()
    added = [(label, [cells.get(n) for n in table.sizes]) for label, cells in placed.items()]
    sources = "; ".join(dict.fromkeys(one.source for one in own))
    notes = [
        f"{MARK}: from the paper, another set-up (model, training, corpus and queries); [low, high]: 95% Wilson "
        f"interval of the paper's number of queries",
        f"{MARK} sources: {sources}",
    ]
    return replace(table, rows=[*table.rows, *added], notes=[*table.notes, *notes])


def _label(retriever: str, backbone: str | None) -> str:
    return retriever if backbone is None or backbone.startswith(retriever) else f"{retriever} ({backbone})"


def _metric(printed: str) -> str | None:
    for pattern, prefix in METRICS:
        if match := re.match(pattern, printed):
            return f"{prefix}{match[1]}"
    return None


def wilson(share: float, count: int) -> tuple[float, float]:
    """95% Wilson score interval of a share of ``count`` trials."""
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
