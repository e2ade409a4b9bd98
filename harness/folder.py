"""A run's folder: ``run.json``, ``cells.jsonl`` (append-only), rankings, judgments and texts beside it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
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

ABOUT, LOCK = "run.json", ".lock"
OWN = ("cells.jsonl", "rankings", "judgments", "documents", "tables", "pictures", "logs", "work", ABOUT)
"""What a run writes, in the order in which it is deleted: the file that makes the folder a run's goes last."""


def _held_suite(path: Path) -> str | None:
    """The suite whose cells a folder holds; None for a folder that is empty or not there.

    Raises:
        UsageError: the folder holds something else.
    """
    try:
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        about = json.loads((path / ABOUT).read_text(encoding="utf-8")) if ABOUT in names else None
    except (OSError, ValueError):
        about = {}
    if about is None and names <= {LOCK, f"{ABOUT}.partial"}:
        return None
    if not isinstance(about, dict) or about.get("format") != FORMAT or not isinstance(about.get("suite"), str):
        raise UsageError(f"output folder {path}: is not empty and holds no run; choose another with -o")
    suite: str = about["suite"]
    return suite


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
        _held_suite(path)  # before anything is written
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (path / LOCK).open("w")
        except OSError as error:
            problem = f"cannot be written: {error.strerror}; choose another with -o"
            raise UsageError(f"output folder {path}: {problem}") from None
        try:
            self._open(suite, command, fresh)
        except BaseException:
            self._lock.close()
            raise

    def _open(self, suite: str, command: str, fresh: bool) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"output folder {self.path}: another run is using it") from None
        held = _held_suite(self.path)
        if held is not None and fresh:
            self._clear()
        elif held not in (None, suite):
            raise UsageError(
                f"output folder {self.path}: holds cells of the suite {held!r}, not {suite!r}; "
                f"choose another with -o, or --fresh to delete them"
            )
        write(self.path / ABOUT, json.dumps({"suite": suite, "format": FORMAT, "command": command}) + "\n")
        for name in ("rankings", "judgments", "documents", "logs"):
            (self.path / name).mkdir(exist_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        self.cut_bytes = self._cut_torn_line()
        self.latest = {row(record): record for record in read(self.path)}
        self._texts: dict[str, dict[str, str]] = {}  # file -> the texts that it holds, by document

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
        """Write a cell's rankings, judgments and texts, then its record; each is on the disk before the next begins."""
        if record["status"] == "ok":
            record["rankings"] = f"rankings/{record['key'][:16]}.jsonl"
            record["judgments"] = f"judgments/{task.fingerprint[:16]}.jsonl"
            record["documents"] = f"documents/{_corpus(record)}.jsonl"
            rankings = list(rankings)
            self._keep_texts(record["documents"], rankings, task)
            write(self.path / record["rankings"], _lines(rankings))
            if not (self.path / record["judgments"]).exists():
                judged = ({"query": q.id, "text": q.text, "judgments": task.judgments[q.id]} for q in task.queries)
                write(self.path / record["judgments"], _lines(judged))
        with (self.path / "cells.jsonl").open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(json.dumps(_finite(record), allow_nan=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.latest[row(record)] = record

    def _keep_texts(self, name: str, rankings: Sequence[Record], task: Task) -> None:
        """Add the texts of what was returned and of the golds to a file that cells of one corpus share."""
        if name not in self._texts:
            self._texts[name] = texts(self.path, name)
        held = self._texts[name]
        wanted = {document for line in rankings for document in line["documents"]}
        wanted |= {document for judged in task.judgments.values() for document in judged}
        for line in rankings:
            wanted.update(*line.get("seen", {}).get("top", {}).values())
        new = {
            identity: document.text
            for identity, document in zip(task.ids, task.documents, strict=True)
            if identity in wanted and held.get(identity) != document.text
        }
        with (self.path / name).open("a", encoding="utf-8", newline="\n") as stream:
            stream.write("\n" * _torn(self.path / name) + _lines({"_id": i, "text": t} for i, t in new.items()))
            stream.flush()
            os.fsync(stream.fileno())
        _sync((self.path / name).parent)
        held |= new


def _torn(file: Path) -> bool:
    """Whether a file's last line has no end."""
    with file.open("rb") as stream:
        if not stream.seek(0, os.SEEK_END):
            return False
        stream.seek(-1, os.SEEK_END)
        return stream.read() != b"\n"


def texts(path: Path, name: str) -> dict[str, str]:
    """What a file of a run's folder holds of documents' texts; the last of a document counts, and a line that was torn
    is none."""
    found: dict[str, str] = {}
    file = path / name
    for line in file.read_text(encoding="utf-8").split("\n") if file.exists() else ():
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            found[told["_id"]] = told["text"]
    return found


def _finite(value: Any) -> Any:
    """The same with infinities and NaN as text, since JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


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
    _sync(file.parent)


def _sync(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    directory = os.open(folder, os.O_RDONLY)
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
            row(record), record["fingerprint"]["data"], record["config"]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{cells}:{number}: not a record of a cell: {line[:80]!r}") from None
        yield record


def latest(path: Path) -> list[Record]:
    """The last record of every cell of a run's folder.

    Cells of data or settings that changed since are left out: what stands in one table was asked the same questions,
    and what stands in one row answered in the same way.

    Raises:
        UsageError: the folder holds no run.
    """
    if not (path / ABOUT).is_file():
        raise UsageError(f"{path}: no run was found there (a folder with {ABOUT} and cells.jsonl was expected)")
    records = list({row(record): record for record in read(path)}.values())
    for kind in (_questions, _data, _answers):
        newest = dict(kind(record) for record in read(path))
        records = [record for record in records if newest.get(kind(record)[0]) == kind(record)[1]]
    return records


def _corpus(record: Record) -> str:
    """What cells share whose documents have the same ids."""
    return hashlib.sha256(f"{record['seed']} {_questions(record)[1]}".encode()).hexdigest()[:16]


Identity = tuple[tuple[Any, ...], str]


def _questions(record: Record) -> Identity:
    """A benchmark, and what it was made from."""
    made = record["config"]["benchmark"]
    return (record["benchmark"],), json.dumps([made["name"], made["resolved"]], sort_keys=True)


def _data(record: Record) -> Identity:
    """A corpus, and what is in it."""
    return (record["benchmark"], record["n"], record["seed"]), record["fingerprint"]["data"]


def _answers(record: Record) -> Identity:
    """A row, and what gave its answers."""
    config, fingerprint = record["config"], record["fingerprint"]
    made = [config["retriever"]["name"], config["retriever"]["resolved"], config["device"], config["dtype"]]
    made += [fingerprint["weights"], fingerprint["code"]]
    return (record["benchmark"], record["retriever"]), json.dumps(made, sort_keys=True)


def merge(paths: Sequence[Path]) -> list[tuple[Path, Record]]:
    """Records of several runs, each with its folder; what only shares a name is told apart by the folder.

    A benchmark is renamed if runs made it from different options or data, a retriever if runs gave it different
    options, weights or code, or hold the same cell of it.
    """
    runs = {path.resolve(): latest(path) for path in paths}
    questions: dict[str, set[str]] = {}
    corpora: dict[tuple[Any, ...], set[str]] = {}
    answers: dict[tuple[Any, ...], set[str]] = {}
    cells: dict[Row, int] = {}
    for r in (r for records in runs.values() for r in records):
        questions.setdefault(r["benchmark"], set()).add(_questions(r)[1])
        corpora.setdefault(*_keyed(_data(r))).add(_data(r)[1])
        answers.setdefault(*_keyed(_answers(r))).add(_answers(r)[1])
        cells[row(r)] = cells.get(row(r), 0) + 1
    several = {name for name, made in questions.items() if len(made) > 1}
    several |= {key[0] for key, data in corpora.items() if len(data) > 1}
    unlike = {key for key, made in answers.items() if len(made) > 1}
    unlike |= {(key[0], key[2]) for key, count in cells.items() if count > 1}
    names = _short_names(list(runs))
    return [
        (
            path,
            r
            | {
                "benchmark": r["benchmark"] + f" [{names[path]}]" * (r["benchmark"] in several),
                "retriever": r["retriever"] + f" [{names[path]}]" * ((r["benchmark"], r["retriever"]) in unlike),
            },
        )
        for path, records in runs.items()
        for r in records
    ]


def _keyed(identity: Identity) -> tuple[tuple[Any, ...], set[str]]:
    return identity[0], set()


def _short_names(paths: Sequence[Path]) -> dict[Path, str]:
    """The fewest last parts of each path that tell it from the others."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = {path: "/".join(path.parts[-length:]) for path in paths}
        if len(set(names.values())) == len(paths):
            break
    return names


def read_lines(path: Path, name: str) -> list[Record]:
    """The rows of a file of rankings or judgments."""
    file = path / name
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{file}: not JSON lines: {error}") from None
