"""One HTML file that shows runs: curves, costs, tables, failures, provenance, and what was returned for every query."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from icr_bench.harness import tables
from icr_bench.harness.errors import UsageError
from icr_bench.harness.folder import JUDGED, RANKING, Record, merge, read_lines, texts, write
from icr_bench.harness.tables import Table, human_bytes, one_line
from icr_bench.retrievers.base import MissingExtra

SHOWN = 5
"""Documents of a ranking that the page shows."""

TEXT = 1_000
"""Characters of a document that the page shows."""

PAGE = files("icr_bench.harness").joinpath("page")


def report(folders: Sequence[Path], file: Path, command: str) -> int:
    """Write the page of one or several runs; returns the number of cells.

    Raises:
        UsageError: no run, no cell, or a file that cannot be written.
        MissingExtra: plotly is not installed.
    """
    if find_spec("plotly") is None:
        raise MissingExtra("plotly", "report")
    merged = merge(folders)
    if not merged:
        raise UsageError(f"{', '.join(map(str, folders))}: no finished cells yet")
    page = render(merged, command)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, page)
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
    return len(merged)


def render(merged: Sequence[tuple[Path, Record]], command: str) -> str:
    """The page as text. What comes from data stands in it as escaped text, or packed so that only its script reads
    it."""
    from plotly.offline import get_plotlyjs

    records = [record for _, record in merged]
    benchmarks = list(dict.fromkeys(_clean(record["benchmark"]) for record in records))
    scripts = {"plotly": get_plotlyjs().replace("\r", ""), "script": _file("page.js")}
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts.values())
    cells = {
        "benchmarks": benchmarks,
        "seeds": len({record["seed"] for record in records}),
        "cells": [_cell(record) for record in records],
    }
    parts = scripts | {
        "title": html.escape("icr-bench: " + ", ".join(benchmarks)),
        "made": html.escape(_clean(f"made by: {command}")),
        "hashes": " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests),
        "style": _file("page.css"),
        "tables": "\n".join(_table(table) for table in tables.build(records, None, command)),
        "failures": _failures(records),
        "provenance": "\n".join(_provenance(path, records) for path, records in _by_folder(merged).items()),
        "cells": json.dumps(cells).replace("<", "\\u003c"),
        "answers": base64.b64encode(gzip.compress(json.dumps(_answers(merged)).encode(), 6, mtime=0)).decode(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("page.html"))


def _file(name: str) -> str:
    return PAGE.joinpath(name).read_text(encoding="utf-8")


def _cell(record: Record) -> dict[str, Any]:
    """What the plots take of a cell."""
    kept = {key: record[key] for key in ("benchmark", "n", "retriever", "seed", "status")}
    for key in ("benchmark", "retriever"):
        kept[key] = _clean(kept[key])
    time, memory = record["time"] or {}, record["memory"]
    return kept | {
        "metrics": {name: [m["value"], m["low"], m["high"]] for name, m in (record["metrics"] or {}).items()},
        "p50": time.get("query_p50_s"),
        "p95": time.get("query_p95_s"),
        "index_s": time.get("index_s"),
        "index_bytes": memory["index_bytes"],
        "peak": max(memory["peak_rss_bytes"], memory["device_peak_bytes"] or 0) if record["status"] == "ok" else None,
    }


# Tables, which need no script


def _table(table: Table) -> str:
    head = ["retriever", *(f"N={n:,}" for n in table.sizes)]
    body = [[label, *(cell.text if cell else "" for cell in cells)] for label, cells in table.rows]
    notes = "".join(f'<p class="quiet">{_text(note)}</p>' for note in table.notes if not note.startswith("made by"))
    return f"<h3>{_text(f'{table.benchmark}: {table.name}')}</h3>\n{_grid(head, body)}\n{notes}"


def _grid(head: Sequence[str], body: Sequence[Sequence[str]], wide: Sequence[int] = ()) -> str:
    """A table of texts; the columns ``wide`` wrap."""
    rows = [
        "".join(
            f'<td class="wrap">{_text(t)}</td>' if i in wide else f"<td>{_text(t)}</td>" for i, t in enumerate(line)
        )
        for line in body
    ]
    top = "".join(f"<th>{_text(title)}</th>" for title in head)
    lines = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{lines}</tbody></table></div>'


def _text(told: object) -> str:
    """As text of a page: escaped, and what could turn the order of letters around kept within it."""
    return f"<bdi>{html.escape(_clean(str(told)))}</bdi>"


def _clean(told: str) -> str:
    """On one line, and without what UTF-8 cannot hold."""
    return one_line(told).encode("utf-8", "replace").decode()


def _failures(records: Sequence[Record]) -> str:
    failed = [record for record in records if record["status"] != "ok"]
    if not failed:
        return "<p>None: every cell was finished.</p>"
    parts = []
    for record in failed:
        name = f"{record['benchmark']}, N={record['n']:,}, {record['retriever']}, seed {record['seed']}"
        peak = human_bytes(record["memory"]["peak_rss_bytes"])
        reason = str(record["error"] or "").partition("\n")[0][:300]
        kept = record.get("log_tail", ["(not kept by this version)"])
        tail = "".join(f"{html.escape(_clean(line))}\n" for line in kept)
        parts.append(
            f"<details><summary>{_text(name)}: <b>{_text(record['status'])}</b>, peak {peak}: {_text(reason)}</summary>"
            f"<pre>{tail or 'its log is empty'}</pre></details>"
        )
    return "\n".join(parts)


def _by_folder(merged: Sequence[tuple[Path, Record]]) -> Mapping[Path, list[Record]]:
    found: dict[Path, list[Record]] = {}
    for path, record in merged:
        found.setdefault(path, []).append(record)
    return found


def _provenance(path: Path, records: Sequence[Record]) -> str:
    """What made the cells of a folder: commands, machine and software, and each row's settings."""
    lines: list[list[str]] = []
    for what, values in (
        ("command", [record["command"] for record in records]),
        ("icr-bench", [_software(record["environment"]) for record in records]),
        ("machine", [_machine(record["environment"]["machine"]) for record in records]),
        ("packages", [_pairs(record["environment"]["packages"]) for record in records]),
        ("first cell begun", [min(record["started"] for record in records)]),
        ("last cell begun", [max(record["started"] for record in records)]),
    ):
        lines += [[what, value] for value in dict.fromkeys(values)]
    rows: dict[str, list[str]] = {}
    for record in records:
        asked = record["config"]["retriever"]
        settings = _pairs({"name": asked["name"], **asked["resolved"], **asked.get("settings", {})})
        weights = _pairs(record["fingerprint"]["weights"])
        rows.setdefault(record["retriever"], [record["retriever"], settings, weights])
    data: dict[tuple[str, int], list[str]] = {}
    for record in records:
        made = record["config"]["benchmark"]
        told = _pairs({"name": made["name"], **made["resolved"]})
        line = [record["benchmark"], f"{record['n']:,}", told, record["fingerprint"]["data"][:16]]
        data.setdefault((record["benchmark"], record["n"]), line)
    return (
        f"<details><summary>{_text(path.name)}</summary>\n{_grid(['what', 'value'], lines, [1])}\n"
        f"{_grid(['row', 'settings', 'weights'], list(rows.values()), [1, 2])}\n"
        f"{_grid(['benchmark', 'N', 'made from', 'fingerprint'], list(data.values()), [2])}</details>"
    )


def _software(environment: Record) -> str:
    git = environment["git"]
    commit = f", commit {git['commit'][:12]}{' with changes' if git['dirty'] else ''}" if git else ""
    return f"{environment['icr_bench']}, Python {environment['python']}{commit}"


def _machine(machine: Record) -> str:
    memory = human_bytes(machine["memory_bytes"])
    return f"{machine['processor']}, {machine['threads']} threads, {memory} ({machine['id']})"


def _pairs(told: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in told.items())


# Answers, query by query


def _answers(merged: Sequence[tuple[Path, Record]]) -> dict[str, Any]:
    """Queries with their golds, and of every finished cell the first documents of each ranking and the rank of the
    first gold."""
    tasks: dict[tuple[str, int], _Task] = {}
    asked = []
    for path, record in merged:
        if record["status"] == "ok":
            key = record["benchmark"], record["seed"]
            golds = tasks.setdefault(key, _Task(*key)).add(path, record)
            asked.append((path, record, key, golds))
    rankings = []
    for path, record, key, golds in asked:
        task = tasks[key]
        lines = {line["query"]: line for line in read_lines(path, record["rankings"], RANKING)}
        first, shown, errors = [], [], {}
        for at, query in enumerate(task.queries):
            line = lines.get(query, {"documents": []})
            documents, own = line["documents"], golds.get(query)
            hit = next((rank for rank, d in enumerate(documents, 1) if d in (own or ())), 0)
            first.append(-1 if own is None else hit)
            shown.append([task.number(document) for document in documents[:SHOWN]])
            if line.get("error"):
                errors[at] = _clean(str(line["error"]))[:300]
        rankings.append(
            {"task": list(tasks).index(key), "n": record["n"], "retriever": _clean(record["retriever"])}
            | {"first": first, "shown": shown, "errors": errors}
        )
    return {"tasks": [task.told() for task in tasks.values()], "rankings": rankings}


class _Task:
    """The queries and documents that the cells of a benchmark and seed share."""

    def __init__(self, benchmark: str, seed: int) -> None:
        self.benchmark, self.seed = benchmark, seed
        self.queries: dict[str, str] = {}
        self._golds: dict[str, dict[str, None]] = {}
        self._numbers: dict[str, int] = {}
        self._texts: dict[str, str] = {}
        self._read: set[tuple[Path, str]] = set()

    def add(self, path: Path, record: Record) -> dict[str, set[str]]:
        """Take over what a cell was asked; its golds by query."""
        if (name := record.get("documents")) and (path, name) not in self._read:
            self._read.add((path, name))
            self._texts |= texts(path, name)
        golds: dict[str, set[str]] = {}
        relevant = record["config"]["benchmark"]["resolved"]["relevant"]
        for line in read_lines(path, record["judgments"], JUDGED):
            query = line["query"]
            self.queries.setdefault(query, line.get("text", ""))
            golds[query] = {document for document, grade in line["judgments"].items() if grade >= relevant}
            self._golds.setdefault(query, {}).update(dict.fromkeys(sorted(golds[query])))
        return golds

    def number(self, document: str) -> int:
        return self._numbers.setdefault(document, len(self._numbers))

    def told(self) -> dict[str, Any]:
        golds = [[self.number(document) for document in self._golds[query]] for query in self.queries]
        documents: list[list[Any]] = []
        for identity in self._numbers:
            text = self._texts.get(identity)
            documents.append([identity, None if text is None else text[:TEXT], len(text or "")])
        return {
            "benchmark": _clean(self.benchmark),
            "seed": self.seed,
            "queries": [[identity, text[:TEXT]] for identity, text in self.queries.items()],
            "golds": golds,
            "documents": documents,
        }
