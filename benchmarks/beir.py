"""Benchmarks in BEIR layout: ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/<split>.tsv`` (or ``qrels.jsonl``)."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from icr_bench.benchmarks.base import MOST_GRADE, Benchmark, DataError, Judgment, Passage, Places, Query
from icr_bench.benchmarks.checks import Findings

QRELS_HEADER = ["query-id", "corpus-id", "score"]
_INTEGER = re.compile(r"[+-]?[0-9]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_QRELS_ENDINGS = (".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz")


def beir(*, path: Path, split: str | None = None) -> Benchmark:
    """Any folder in BEIR layout; files plain or .gz, UTF-8 with or without byte-order mark.

    Args:
        path: the folder.
        split: which judgments; ``test`` if there is one, else the only one there is.

    Raises:
        DataError: a file is missing or malformed; the message names file and line.
    """
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; a benchmark in BEIR layout was expected")
    corpus, asked = _find(path, "corpus.jsonl"), _find(path, "queries.jsonl")
    splits = find_splits(path)
    qrels = splits[_choose_split(path, splits, split)]
    documents, document_lines = _read_texts(corpus, titled=True)
    queries, query_lines = _read_texts(asked, titled=False)
    judgments, judgment_lines = _read_qrels(qrels)
    elsewhere = {row.query for file in splits.values() if file != qrels for row in _judgments_if_sound(file)}
    elsewhere -= {row.query for row in judgments}
    kept = [i for i, (key, _) in enumerate(queries) if key not in elsewhere]  # judged by another split alone
    return Benchmark.of(
        [Passage(*row) for row in documents],
        [Query(*queries[i]) for i in kept],
        judgments,
        {
            "documents": Places(str(corpus), document_lines),
            "queries": Places(str(asked), [query_lines[i] for i in kept]),
            "judgments": Places(str(qrels), judgment_lines),
        },
    )


def msmarco(*, path: Path, split: str | None = None) -> Benchmark:
    """MS MARCO passage ranking in BEIR layout. Options as for ``beir``."""
    return beir(path=path, split=split)


def hotpotqa(*, path: Path, split: str | None = None) -> Benchmark:
    """HotpotQA in BEIR layout: two gold paragraphs a question. Options as for ``beir``."""
    return beir(path=path, split=split)


def nq(*, path: Path, split: str | None = None) -> Benchmark:
    """Natural Questions in BEIR layout. Options as for ``beir``."""
    return beir(path=path, split=split)


def find_splits(path: Path) -> dict[str, Path]:
    """Split name -> file of judgments. A ``qrels.jsonl`` beside the corpus is the split ``test``, as LIMIT ships it."""
    found: dict[str, list[Path]] = {}
    folder = path / "qrels"
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    for file in files:
        ending = next((e for e in _QRELS_ENDINGS if file.name.endswith(e)), None)
        if ending:
            found.setdefault(file.name.removesuffix(ending), []).append(file)
    for file in (path / "qrels.jsonl", path / "qrels.jsonl.gz"):
        if file.is_file():
            found.setdefault("test", []).append(file)
    for name, paths in found.items():
        if len(paths) > 1:
            raise DataError(f"{path}: the split {name!r} has two files: " + ", ".join(str(p) for p in paths))
    if not found:
        raise DataError(f"{path}: no judgments; expected qrels/<split>.tsv or qrels.jsonl (plain or .gz)")
    return {name: paths[0] for name, paths in sorted(found.items())}


def _choose_split(path: Path, splits: dict[str, Path], split: str | None) -> str:
    if split is None and "test" in splits:
        return "test"
    if split is None and len(splits) == 1:
        return next(iter(splits))
    if split in splits:
        return split
    asked = "no split was named and none is called 'test'" if split is None else f"there is no split {split!r}"
    raise DataError(f"{path}: {asked}; splits: {', '.join(splits)}")


def _find(path: Path, name: str) -> Path:
    found = [file for file in (path / name, path / f"{name}.gz") if file.is_file()]
    if len(found) != 1:
        problem = f"both {name} and {name}.gz; keep one" if found else f"no {name} (or {name}.gz)"
        raise DataError(f"{path}: {problem}; a folder in BEIR layout was expected")
    return found[0]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their line feed; empty lines are skipped."""
    open_binary = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with open_binary(file, "rb") as stream:
            for number, raw in enumerate(stream, 1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise DataError(f"{file}:{number}: not UTF-8 ({error.reason} at byte {error.start})") from None
                if line:
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}:{number + 1}: cannot be read: {error}") from None


def _objects(file: Path, errors: Findings) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(file):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            errors.add("malformed lines", f"{file}:{number}: not JSON: {error}")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            errors.add("malformed lines", f"{file}:{number}: expected a JSON object, got {type(row).__name__}")


def _field(row: dict[str, Any], key: str, place: str, errors: Findings) -> str | None:
    value = row.get(key)
    if isinstance(value, str):
        if not _SURROGATE.search(value):
            return value
        errors.add("malformed lines", f"{place}: {key!r} holds half a surrogate pair, which no UTF-8 file can hold")
        return None
    problem = f"got {value!r:.60}" if key in row else "the field is missing"
    errors.add("malformed lines", f"{place}: {key!r} must be a string, {problem}")
    return None


def _read_texts(file: Path, *, titled: bool) -> tuple[list[tuple[str, str]], list[int]]:
    rows: list[tuple[str, str]] = []
    lines: list[int] = []
    errors = Findings()
    for number, row in _objects(file, errors):
        place = f"{file}:{number}"
        key, text = _field(row, "_id", place, errors), _field(row, "text", place, errors)
        title = row.get("title") if titled else None
        if title is not None and not isinstance(title, str):
            errors.add("malformed lines", f"{place}: 'title' must be a string or null, got {title!r:.60}")
        elif key == "":
            errors.add("malformed lines", f"{place}: '_id' is empty")
        elif key is not None and text is not None:
            rows.append((key, f"{title} {text}" if title else text))
            lines.append(number)
    errors.stop()
    return rows, lines


def _read_qrels(file: Path) -> tuple[list[Judgment], list[int]]:
    rows: list[Judgment] = []
    lines: list[int] = []
    errors = Findings()
    for number, query, document, score in _qrels_rows(file, errors):
        if isinstance(score, bool) or not _INTEGER.fullmatch(str(score)):
            errors.add("malformed lines", f"{file}:{number}: the score must be an integer, got {score!r:.60}")
        elif len(str(score)) > 11 or abs(int(score)) > MOST_GRADE:  # longer ones take long to read, or cannot be
            errors.add(
                "malformed lines", f"{file}:{number}: the score must be {MOST_GRADE:,} at most, got {score!s:.60}"
            )
        else:
            rows.append(Judgment(query, document, int(score)))
            lines.append(number)
    errors.stop()
    if not rows:
        raise DataError(f"{file}: holds no judgments")
    return rows, lines


def _qrels_rows(file: Path, errors: Findings) -> Iterator[tuple[int, str, str, Any]]:
    if ".jsonl" in file.suffixes:
        for number, row in _objects(file, errors):
            place = f"{file}:{number}"
            query, document = (_field(row, key, place, errors) for key in QRELS_HEADER[:2])
            if "score" not in row:
                errors.add("malformed lines", f"{place}: 'score' must be an integer, the field is missing")
            elif query is not None and document is not None:
                yield number, query, document, row["score"]
        return
    rows = _lines(file)
    number, header = next(rows, (1, ""))
    if header.split("\t") != QRELS_HEADER:
        raise DataError(f"{file}:{number}: wrong header: expected {'<tab>'.join(QRELS_HEADER)}, got {header[:80]!r}")
    for number, line in rows:
        fields = line.split("\t")
        if len(fields) == 3:
            yield number, fields[0], fields[1], fields[2]
        else:
            errors.add(
                "malformed lines", f"{file}:{number}: expected 3 tab-separated fields, got {len(fields)}: {line[:80]!r}"
            )


def _judgments_if_sound(file: Path) -> list[Judgment]:
    """Judgments of a split that was not asked for; its faults are not this run's."""
    try:
        return _read_qrels(file)[0]
    except DataError:
        return []
