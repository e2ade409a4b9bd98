"""What the answers of a cell are worth, query by query: from a run's folder, or from a baseline file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from icr_bench.benchmarks.base import DataError
from icr_bench.harness import metrics
from icr_bench.harness.errors import UsageError
from icr_bench.harness.folder import Record, expect, expect_cell, latest, merge, rankings, write

FORMAT = 1

KEPT = ("benchmark", "n", "retriever", "seed", "config", "fingerprint", "status", "error", "metrics", "time", "memory")
"""What a baseline keeps of a record, besides the machine's identity."""


@dataclass(frozen=True)
class Graded:
    """The answers to all declared queries of a cell, as grades."""

    queries: list[str]
    ranked: list[list[int]]  # grades of the documents returned, best first; none where nothing was returned
    judged: list[list[int]]  # grades of all judged documents of the corpus
    depth: int  # documents asked for; metrics at larger cut-offs are unknown unless the corpus ends before
    relevant: int  # the lowest grade that counts

    def values(self, metric: str) -> metrics.Floats:
        """A metric of every query, shape (queries,).

        Raises:
            UsageError: rankings were not kept as deep as its cut-off.
        """
        k = metrics.cutoff(metric)
        if k > self.depth:
            raise UsageError(f"{metric}: only the first {self.depth} documents were kept; run with -k {k}")
        scored = (metrics.per_query(r, j, self.relevant, [k]) for r, j in zip(self.ranked, self.judged, strict=True))
        return np.array([one[metric] for one in scored])


@dataclass(frozen=True)
class Entry:
    """A cell, and its answers unless it failed."""

    record: Record
    graded: Graded | None


def read(path: Path) -> list[Entry]:
    """The cells of a run's folder, or of a baseline file.

    Raises:
        UsageError: neither is there.
        DataError: files that cannot be read.
    """
    if path.is_dir():
        return [Entry(record, graded(path, record)) for record in latest(path)]
    if path.is_file():
        return _baseline(path)
    raise UsageError(f"{path}: expected the folder of a run, or a file of icr-bench baseline; there is neither")


def read_runs(folders: Sequence[Path]) -> list[Entry]:
    """The cells of several runs' folders; what only shares a name is told apart by the folder.

    Raises:
        UsageError: a folder holds no run, or none holds a cell.
    """
    entries = [Entry(record, graded(folder, record)) for folder, record in merge(folders)]
    if not entries:
        raise UsageError(f"{', '.join(map(str, folders))}: no finished cells yet")
    return entries


def graded(folder: Path, record: Record) -> Graded | None:
    """The answers that a run kept of a cell; None of a cell that failed."""
    if record["status"] != "ok":
        return None
    ranked, judged = rankings(folder, record)
    grades = [[judged[query].get(document, 0) for document in ranked[query]["documents"]] for query in judged]
    return Graded(list(judged), grades, [list(own.values()) for own in judged.values()], *_asked(record))


def _asked(record: Record) -> tuple[int, int]:
    """Depth and the lowest relevant grade. A corpus that is returned whole is known to any depth."""
    config, n = record["config"], record["n"]
    return max(config["k"]) if config["depth"] < n else 10**9, config["benchmark"]["resolved"]["relevant"]


def write_baseline(folder: Path, file: Path, command: str) -> int:
    """Write what `compare` needs of a run into one file; returns the number of cells."""
    cells = []
    for entry in read(folder):
        cell: dict[str, Any] = {key: entry.record[key] for key in KEPT}
        cell["environment"] = {"machine": {"id": entry.record["environment"]["machine"]["id"]}}
        if "diagnosis" in entry.record:
            cell["diagnosis"], cell["queries"] = entry.record["diagnosis"], entry.record["queries"]
        if entry.graded:
            cell["answers"] = {
                "queries": entry.graded.queries,
                "ranked": [_trimmed(own) for own in entry.graded.ranked],
                "judged": entry.graded.judged,
            }
        cells.append(cell)
    if not cells:
        raise UsageError(f"{folder}: no finished cells yet")
    lines = ",\n".join(json.dumps(cell) for cell in cells)  # a line a cell, so that a diff shows which changed
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, f'{{"icr-bench baseline": {FORMAT}, "made by": {json.dumps(command)}, "cells": [\n{lines}\n]}}\n')
    return len(cells)


def _trimmed(ranked: Sequence[int]) -> list[int]:
    """Without the zeros at the end, which say nothing."""
    kept = list(ranked)
    while kept and kept[-1] == 0:
        kept.pop()
    return kept


ANSWERS = {"queries": [str], "ranked": [[int]], "judged": [[int]]}


def _baseline(file: Path) -> list[Entry]:
    where = ""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        if told["icr-bench baseline"] != FORMAT:
            raise ValueError(f"format {told['icr-bench baseline']}, expected {FORMAT}")
        if not isinstance(told["cells"], list):
            raise ValueError(f"cells: expected a list, got {told['cells']!r:.60}")
        found = []
        for place, cell in enumerate(told["cells"], 1):
            where = f"cell {place} of {len(told['cells'])}: "
            expect_cell(cell)
            if missing := [key for key in KEPT if key not in cell]:
                raise ValueError(f"{missing[0]} is missing")
            answers = cell.pop("answers", None)
            if cell["status"] == "ok":
                expect({"answers": answers}, {"answers": ANSWERS})
                if not len(answers["queries"]) == len(answers["ranked"]) == len(answers["judged"]) > 0:
                    raise ValueError(
                        f"answers: expected as many of queries, ranked and judged, 1 or more, got "
                        f"{len(answers['queries'])}, {len(answers['ranked'])} and {len(answers['judged'])}"
                    )
                found.append(
                    Entry(cell, Graded(answers["queries"], answers["ranked"], answers["judged"], *_asked(cell)))
                )
            else:
                found.append(Entry(cell, None))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        told = f"no {error}" if isinstance(error, KeyError) else error
        raise DataError(f"{file}: no baseline ({where}{told}); icr-bench baseline writes one") from None
    return found
