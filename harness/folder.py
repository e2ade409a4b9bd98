"""A run's folder: ``run.json``, ``cells.jsonl`` (append-only), rankings and judgments beside it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from icr_bench.benchmarks.base import DataError, Task
from icr_bench.harness.errors import UsageError

Record = dict[str, Any]
Row = tuple[str, int, str, int]

FORMAT = 1

OWN = ("run.json", "cells.jsonl", "rankings", "judgments", "tables", "logs", "work")


def row(record: Record) -> Row:
    """Which cell of the grid a record is: benchmark, n, retriever, seed."""
    return record["benchmark"], record["n"], record["retriever"], record["seed"]


class Folder:
    """A run's folder, held by one run at a time. Use as a context manager."""

    def __init__(self, path: Path, suite: str, command: str, *, fresh: bool = False) -> None:
        """Take the folder, or make it.

        Raises:
            UsageError: it cannot be written, holds something else or another suite's cells, or is in use.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (path / ".lock").open("w")
        except OSError as error:
            problem = f"cannot be written: {error.strerror}; choose another with -o"
            raise UsageError(f"output folder {path}: {problem}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"output folder {path}: another run is using it") from None
        about = path / "run.json"
        if not about.exists() and any(entry.name != ".lock" for entry in path.iterdir()):
            raise UsageError(f"output folder {path}: is not empty and holds no run; choose another with -o")
        if about.exists():
            held = json.loads(about.read_text())
            if fresh:
                self._clear()
            elif held["suite"] != suite or held["format"] != FORMAT:
                raise UsageError(
                    f"output folder {path}: holds cells of the suite {held['suite']!r}, not {suite!r}; "
                    f"choose another with -o, or --fresh to delete them"
                )
        write(about, json.dumps({"suite": suite, "format": FORMAT, "command": command}) + "\n")
        for name in ("rankings", "judgments", "logs"):
            (path / name).mkdir(exist_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        self.cut_bytes = self._cut_torn_line()
        self.latest = {row(record): record for record in read(path)}

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self._lock.close()

    @property
    def work(self) -> Path:
        """Files of the cell being computed."""
        return self.path / "work"

    def _clear(self) -> None:
        for name in OWN:
            entry = self.path / name
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)

    def _cut_torn_line(self) -> int:
        cells = self.path / "cells.jsonl"
        if not cells.exists():
            return 0
        with cells.open("rb+") as stream:
            data = stream.read()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                stream.truncate(whole)
                os.fsync(stream.fileno())
        return len(data) - whole

    def keep(self, record: Record, rankings: Iterable[Record], task: Task) -> None:
        """Write a cell's rankings and judgments, then its record; each is on the disk before the next begins."""
        if record["status"] == "ok":
            record["rankings"] = f"rankings/{record['key'][:16]}.jsonl"
            record["judgments"] = f"judgments/{task.fingerprint[:16]}.jsonl"
            write(self.path / record["rankings"], _lines(rankings))
            if not (self.path / record["judgments"]).exists():
                judged = ({"query": q.id, "text": q.text, "judgments": task.judgments[q.id]} for q in task.queries)
                write(self.path / record["judgments"], _lines(judged))
        with (self.path / "cells.jsonl").open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.latest[row(record)] = record


def _lines(rows: Iterable[Record]) -> str:
    return "".join(json.dumps(item) + "\n" for item in rows)


def write(file: Path, text: str) -> None:
    """Write a file whole or not at all, and to the disk."""
    partial = file.with_name(file.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
    directory = os.open(file.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def read(path: Path) -> Iterator[Record]:
    """The records of a run's folder, in order; a torn last line is not one.

    Raises:
        DataError: a line is no record.
    """
    cells = path / "cells.jsonl"
    if not cells.exists():
        return
    for number, line in enumerate(cells.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            record = json.loads(line)
            row(record), record["fingerprint"]["data"]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{cells}:{number}: not a record of a cell: {line[:80]!r}") from None
        yield record


def latest(path: Path) -> list[Record]:
    """The last record of every cell of a run's folder.

    Cells of data that changed since are left out: what stands in one table was asked the same questions.

    Raises:
        UsageError: the folder holds no run.
    """
    if not (path / "run.json").is_file():
        raise UsageError(f"{path}: no run was found there (a folder with run.json and cells.jsonl was expected)")
    records = {row(record): record for record in read(path)}
    data = {(r["benchmark"], r["n"], r["seed"]): r["fingerprint"]["data"] for r in read(path)}
    return [r for r in records.values() if r["fingerprint"]["data"] == data[r["benchmark"], r["n"], r["seed"]]]


def merge(paths: Sequence[Path]) -> list[Record]:
    """Records of several runs, renamed after their folder where two runs would share a row or a table.

    A benchmark is told apart where its data differ between runs, a retriever where runs hold the same cell.
    """
    runs = [(path.name or str(path), latest(path)) for path in dict.fromkeys(path.resolve() for path in paths)]
    data: dict[tuple[str, int, int], set[str]] = {}
    cells: dict[tuple[Row, str], int] = {}
    for _, records in runs:
        for r in records:
            data.setdefault((r["benchmark"], r["n"], r["seed"]), set()).add(r["fingerprint"]["data"])
            held = (row(r), r["fingerprint"]["data"])
            cells[held] = cells.get(held, 0) + 1
    differing = {benchmark for (benchmark, _, _), prints in data.items() if len(prints) > 1}
    repeated = {(r[0], r[2]) for (r, _), count in cells.items() if count > 1}
    merged = []
    for name, records in runs:
        for r in records:
            suffix = f" [{name}]"
            benchmark = r["benchmark"] + suffix * (r["benchmark"] in differing)
            retriever = r["retriever"] + suffix * ((r["benchmark"], r["retriever"]) in repeated)
            merged.append(r | {"benchmark": benchmark, "retriever": retriever})
    return merged


def read_lines(path: Path, name: str) -> list[Record]:
    """The rows of a file of rankings or judgments."""
    file = path / name
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{file}: not JSON lines: {error}") from None
