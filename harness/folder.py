"""A run's folder: ``run.json``, ``cells.jsonl`` (append-only), rankings, judgments and texts beside it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
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


_PARTIAL = re.escape(ABOUT) + r"(\.\d+)?\.partial"


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
    if about is None and all(name == LOCK or re.fullmatch(_PARTIAL, name) for name in names):
        return None
    if not isinstance(about, dict) or about.get("format") != FORMAT or not isinstance(about.get("suite"), str):
        raise UsageError(f"output folder {path}: is not empty and holds no run; choose another with -o")
    suite: str = about["suite"]
    return suite


_NUMBER = int | float
_SECONDS = int | float | None  # None where nothing was measured
_INTERVAL = {"value": _NUMBER, "low": _NUMBER, "high": _NUMBER}

CELL = {
    "benchmark": str,
    "n": int,
    "retriever": str,
    "seed": int,
    "status": str,
    "error": str | None,
    "config": {
        "benchmark": {"name": str, "resolved": {"relevant": int}},
        "retriever": {"name": str, "resolved": dict},
        "k": [int],
        "depth": int,
        "device": str | None,
        "dtype": str | None,
    },
    "fingerprint": {"data": str, "weights": dict, "code": str},
    "environment": {"machine": {"id": str}},
    "memory": {"peak_rss_bytes": int},
}
"""What a record holds of every cell: a type, `[shape]` for a list, `{str: shape}` for any keys."""

DONE = {
    "metrics": {str: _INTERVAL},
    "time": {
        "load_s": _NUMBER,
        "index_s": _SECONDS,
        "warmup": int,
        "query_p50_s": _SECONDS,
        "query_p95_s": _SECONDS,
        "query_p99_s": _SECONDS,
        "sampled": int,
        "queries_per_s": _SECONDS,
        "batch": int,
    },
    "memory": {"index_bytes": int, "device_peak_bytes": int | None},
}
"""What it holds besides of a finished cell."""

DIAGNOSED = {
    "config": {"look": {"ties": str, "tokens": str}},
    "queries": {"declared": int},
    "diagnosis": {
        "layers": [int],
        "heads": [int],
        "chance": {str: _NUMBER},
        "shortlist": dict,
        "readout": dict,
        "outcomes": dict,
        **{name: [dict | None] for name in ("r_sum", "r_any", "digit", "digit_best", "digit_right")},
        **{name: [dict | None] for name in ("norm", "norm_gold", "norm_rest", "share", "mass", "score", "gap")},
        "r_head": list,
    },
}
"""What it holds besides where the cell was looked into."""

IN_FOLDER = {
    "key": str,
    "command": str,
    "started": str,
    "queries": {"declared": int, "scored": int, "empty": int, "failed": int},
    "environment": {
        "icr_bench": str | None,
        "python": str,
        "machine": {"processor": str, "threads": int | None, "memory_bytes": int},
        "packages": dict,
        "git": dict | None,
    },
}
"""What it holds besides in a run's folder."""

DONE_IN_FOLDER = {"rankings": str, "judgments": str, "ceiling": {str: _NUMBER}}
RANKING = {"query": str, "documents": [str], "scores": [_NUMBER]}
JUDGED = {"query": str, "judgments": {str: int}}

_TOLD: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    dict: "an object",
    list: "a list",
    _NUMBER: "a number",
    _SECONDS: "a number or null",
    int | None: "a whole number or null",
    str | None: "text or null",
    dict | None: "an object or null",
}


def expect(told: Any, shape: Any, at: str = "") -> None:
    """Check what a file holds.

    Raises:
        ValueError: the key that is not there or holds something else, and what was expected.
    """
    if isinstance(shape, dict):
        expect(told, dict, at)
        if str in shape:
            for key, value in told.items():
                expect(value, shape[str], f"{at}[{key!r}]")
            return
        for key, of in shape.items():
            own = f"{at}.{key}" if at else key
            if key not in told:
                raise ValueError(f"{own} is missing")
            expect(told[key], of, own)
    elif isinstance(shape, list):
        if not isinstance(told, list):
            raise ValueError(f"{at}: expected a list, got {told!r:.60}")
        for place, value in enumerate(told):
            expect(value, shape[0], f"{at}[{place}]")
    elif not isinstance(told, shape) or isinstance(told, bool):
        raise ValueError(f"{at or 'the whole'}: expected {_TOLD[shape]}, got {told!r:.60}")


def expect_cell(record: Any) -> None:
    """Check the record of a cell.

    Raises:
        ValueError: as `expect`.
    """
    expect(record, CELL)
    if record["n"] < 1:
        raise ValueError(f"n: expected 1 or more, got {record['n']}")
    if not record["config"]["k"]:
        raise ValueError("config.k: expected one cut-off or more, got none")
    if record["status"] == "ok":
        expect(record, DONE)
        if "diagnosis" in record:
            expect(record, DIAGNOSED)
            layers = len(record["diagnosis"]["layers"])
            for name, told in record["diagnosis"].items():
                if isinstance(told, list) and name != "heads" and len(told) != layers:
                    raise ValueError(f"diagnosis.{name}: expected a value for each of {layers} layers, got {len(told)}")


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
        for left in (*self.path.glob("*.partial"), *self.path.glob("*/*.partial")):  # by a run that was killed
            if left.is_file():
                left.unlink()
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
        _sync(self.path)
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


REPAIR = "run with --fresh to compute the cells again"


def texts(path: Path, name: str) -> dict[str, str]:
    """What a file of a run's folder holds of documents' texts; the last of a document counts, and a line that was torn
    is none."""
    found: dict[str, str] = {}
    file = path / name
    for line in _text(file).split("\n") if file.exists() else ():
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            expect(told, {"_id": str, "text": str})
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
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")  # of no other process that may write it too
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
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
    for number, line in enumerate(_text(cells).split("\n")[:-1], 1):
        try:
            record = json.loads(line)
            expect_cell(record)
            expect(record, IN_FOLDER)
            if record["status"] == "ok":
                expect(record, DONE_IN_FOLDER)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{cells}:{number}: not a record of a cell ({error}): {line[:80]!r}; delete the line, and the same run "
                "computes the cell again"
            ) from None
        yield record


def _text(file: Path) -> str:
    """What a file holds.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 ({error.reason} at byte {error.start})") from None


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


def read_lines(path: Path, name: str, shape: Any = dict) -> list[Record]:
    """The rows of a file of rankings or judgments.

    Raises:
        DataError: it cannot be read, is empty, or a row has another shape.
    """
    file, found = path / name, list[Record]()
    for number, line in enumerate(_text(file).split("\n"), 1):
        if not line:
            continue
        try:
            found.append(json.loads(line))
            expect(found[-1], shape)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}:{number}: {error}; {REPAIR}") from None
    if not found:
        raise DataError(f"{file}: holds nothing; {REPAIR}")
    return found


def rankings(path: Path, record: Record) -> tuple[dict[str, Record], dict[str, dict[str, int]]]:
    """What a run kept of a finished cell: the line of each query's ranking, and each query's judgments.

    Raises:
        DataError: as `read_lines`, or a query has no ranking.
    """
    ranked = {line["query"]: line for line in read_lines(path, record["rankings"], RANKING)}
    judged = {line["query"]: line["judgments"] for line in read_lines(path, record["judgments"], JUDGED)}
    for query in judged:
        if query not in ranked:
            raise DataError(f"{path / record['rankings']}: holds no ranking of the query {query!r}; {REPAIR}")
        if len(ranked[query]["documents"]) != len(ranked[query]["scores"]):
            raise DataError(
                f"{path / record['rankings']}: query {query!r} has {len(ranked[query]['documents'])} documents but "
                f"{len(ranked[query]['scores'])} scores; {REPAIR}"
            )
    return ranked, judged
