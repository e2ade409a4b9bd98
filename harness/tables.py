"""Retriever x N tables of quality, latency and memory from records."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tabulate import tabulate

from icr_bench.harness import metrics
from icr_bench.harness.errors import UsageError
from icr_bench.harness.folder import Record

Format = Literal["md", "csv", "latex"]
ENDINGS: dict[Format, str] = {"md": "md", "csv": "csv", "latex": "tex"}


@dataclass(frozen=True)
class Cell:
    """An entry of a table: as text, and as named numbers; a failed cell has none."""

    text: str
    numbers: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Rows are retrievers, or what ``heading`` says; columns are corpus sizes."""

    benchmark: str
    name: str  # a metric, or what is measured
    sizes: list[int]
    rows: list[tuple[str, list[Cell | None]]]
    notes: list[str]
    heading: str = "retriever"
    file: str = ""  # its name as part of a file's; the table's own by default

    def render(self, form: Format) -> str:
        """As text that ends with a line feed."""
        if form == "csv":
            return self._csv()
        head = [self.heading, *(f"N={n:,}" for n in self.sizes)]
        body = [[one_line(label), *(cell.text if cell else "" for cell in cells)] for label, cells in self.rows]
        title = one_line(f"{self.benchmark}: {self.name}")
        told = [one_line(note) for note in self.notes]
        if form == "latex":
            notes = "".join(f"% {note}\n" for note in [title, *told])
            return notes + tabulate(body, head, tablefmt="latex_booktabs", disable_numparse=True) + "\n"
        return f"### {title}\n\n{github(head, body)}\n" + "".join(f"- {note}\n" for note in told)

    def _csv(self) -> str:
        out = io.StringIO()
        out.write("".join(f"# {one_line(note)}\n" for note in [f"{self.benchmark}: {self.name}", *self.notes]))
        kinds = list(dict.fromkeys(kind for _, cells in self.rows for cell in cells if cell for kind in cell.numbers))
        kinds = kinds or ["value"]
        writer = csv.writer(out, lineterminator="\n")
        quoting = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(
            [self.heading, *(f"{n}" if kind == "value" else f"{n} {kind}" for n in self.sizes for kind in kinds)]
        )
        for label, cells in self.rows:
            line: list[Any] = [label]
            for cell in cells:
                failure = [cell.text] + [None] * (len(kinds) - 1) if cell and not cell.numbers else None
                line += failure or [cell.numbers.get(kind) if cell else None for kind in kinds]
            (quoting if label.startswith("#") else writer).writerow(line)
        return out.getvalue()

    def as_dict(self) -> dict[str, Any]:
        """For JSON: one entry a cell."""
        cells = [
            {self.heading: label, "n": n, "text": cell.text, **cell.numbers}
            for label, row in self.rows
            for n, cell in zip(self.sizes, row, strict=True)
            if cell
        ]
        return {"benchmark": self.benchmark, "table": self.name, "cells": cells, "notes": self.notes}


def github(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table that ends with a line feed."""
    lines = [[one_line(text).replace("|", "\\|") for text in line] for line in body]
    return tabulate(lines, head, tablefmt="github", disable_numparse=True) + "\n"


def one_line(text: str) -> str:
    """Text with every run of line breaks and control characters as one space."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)


def build(records: Iterable[Record], chosen: Sequence[str] | None, command: str) -> list[Table]:
    """Tables of every benchmark: the chosen metrics (or the usual three), latency and memory.

    Several seeds are rows of their own.

    Args:
        chosen: metrics; None for hit@1, recall and ndcg at the largest cut-off.
        command: what makes these tables, for their notes.

    Raises:
        UsageError: a metric that the records do not hold.
    """
    records = list(records)
    tables = []
    for benchmark in dict.fromkeys(record["benchmark"] for record in records):
        own = [record for record in records if record["benchmark"] == benchmark]
        done = [record for record in own if record["status"] == "ok"]
        for metric in chosen or _usual(done):
            tables.append(_quality(benchmark, own, metrics.parse_metric(metric), command))
        tables.append(_latency(benchmark, own, command))
        tables.append(_memory(benchmark, own, command))
    return tables


def quality(tables: Iterable[Table]) -> list[Table]:
    """Only the tables of metrics."""
    return [table for table in tables if "@" in table.name]


def _usual(records: Sequence[Record]) -> list[str]:
    if not records:
        return ["hit@1"]
    shared = set.intersection(*(set(record["config"]["k"]) for record in records)) or set(records[-1]["config"]["k"])
    return [f"hit@{min(shared)}", f"recall@{max(shared)}", f"ndcg@{max(shared)}"]


def _grid(
    benchmark: str, records: Sequence[Record], name: str, cell: Callable[[Record], Cell | None], notes: list[str]
) -> Table:
    sizes = sorted({record["n"] for record in records})
    seeds = {record["seed"] for record in records}
    placed: dict[str, dict[int, Cell | None]] = {}
    for record in records:
        label = record["retriever"] + (f" (seed {record['seed']})" if len(seeds) > 1 else "")
        value = cell(record) if record["status"] == "ok" else Cell(record["status"])
        if record["n"] in placed.setdefault(label, {}):
            raise UsageError(f"{benchmark}: two cells of {label} at n={record['n']}; merge runs before making tables")
        placed[label][record["n"]] = value
    rows = [(label, [cells.get(n) for n in sizes]) for label, cells in placed.items()]
    return Table(benchmark, name, sizes, rows, notes)


def _range(values: Iterable[Any]) -> str:
    kept = sorted(set(values))
    return f"{kept[0]:,}" if len(kept) == 1 else f"{kept[0]:,} to {kept[-1]:,}" if kept else "0"


def _quality(benchmark: str, records: Sequence[Record], metric: str, command: str) -> Table:
    done = [record for record in records if record["status"] == "ok"]
    holding = [record for record in done if metric in record["metrics"]]
    if done and not holding:
        has = ", ".join(done[-1]["metrics"])
        raise UsageError(f"{benchmark}: {metric} was not computed; there are: {has}; run with -k to get others")

    def cell(record: Record) -> Cell | None:
        if metric not in record["metrics"]:
            return None
        m = record["metrics"][metric]
        return Cell(f"{m['value']:.3f} [{m['low']:.3f}, {m['high']:.3f}]", m)

    ceilings = _range(round(record["ceiling"][metric], 3) for record in holding) if holding else "unknown"
    notes = [
        f"queries: {_range(record['queries']['declared'] for record in records)}; "
        f"without an answer: {_range(r['queries']['empty'] + r['queries']['failed'] for r in done)} (these score 0)",
        f"{metrics.definition(metric)}; best attainable: {ceilings}",
        f"[low, high]: {metrics.INTERVAL}; equal scores rank by document number, a random permutation",
        f"made by: {command}",
    ]
    return _grid(benchmark, records, metric, cell, notes)


def _latency(benchmark: str, records: Sequence[Record], command: str) -> Table:
    done = [record for record in records if record["status"] == "ok"]

    def cell(record: Record) -> Cell:
        t = record["time"]
        index = "reused" if t["index_s"] is None else f"{t['index_s']:.2g} s"
        rate = "" if t["queries_per_s"] is None else f", {t['queries_per_s']:.3g}/s"
        untimed = "not timed" if "diagnosis" in record else "kept answers"
        one = untimed if t["query_p50_s"] is None else f"{_ms(t['query_p50_s'])} / {_ms(t['query_p95_s'])} ms"
        text = f"{one}{rate}, {index}"
        kept = ("query_p50_s", "query_p95_s", "query_p99_s", "queries_per_s", "index_s", "load_s")
        return Cell(text, {kind: t[kind] for kind in kept})

    notes = [
        f"median / 95th percentile of one query alone, over {_range(r['time']['sampled'] for r in done)} sampled "
        f"queries after {_range(r['time']['warmup'] for r in done)} warm-up queries; "
        f"queries a second in batches of {_range(r['time']['batch'] for r in done)}; seconds to index "
        "(reused: taken from a cache, at least in part, and so no measurement)",
        f"queries: {_range(record['queries']['declared'] for record in records)}; CSV and JSON hold seconds; "
        f"no interval; compare only rows of one machine",
        f"made by: {command}",
    ]
    return _grid(benchmark, records, "latency", cell, notes)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g}"


def _memory(benchmark: str, records: Sequence[Record], command: str) -> Table:
    def cell(record: Record) -> Cell:
        m = record["memory"]
        text = f"{human_bytes(m['index_bytes'])}, {human_bytes(m['peak_rss_bytes'])}"
        if m["device_peak_bytes"] is not None:
            text += f", {human_bytes(m['device_peak_bytes'])}"
        return Cell(text, m)

    notes = [
        "bytes of the index computed from what it holds, peak resident memory of the cell's process, peak of the GPU "
        "where one was used; no interval",
        f"queries: {_range(record['queries']['declared'] for record in records)}",
        f"made by: {command}",
    ]
    return _grid(benchmark, records, "memory", cell, notes)


def human_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
