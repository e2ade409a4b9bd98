"""TREC runs and qrels that any evaluation tool reads to the same figures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from icr_bench.harness.errors import UsageError
from icr_bench.harness.folder import Record, latest, rankings, write


def quote(identifier: str) -> str:
    """Percent-encode what would break a TREC line: all Unicode white space, the percent sign, control characters."""
    return re.sub(
        r"[\s%\x00-\x1f\x7f-\x9f\ud800-\udfff]",
        lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode("utf-8", "surrogatepass")),
        identifier,
    )


def descending(scores: Iterable[float]) -> list[float]:
    """Scores as float32, each below the one before it.

    trec_eval compares scores as float32 and orders ties by document id. Lowering a score that float32 cannot tell
    from its predecessor by the smallest step keeps the canonical order, so that every tool ranks as the record did.
    """
    kept: list[float] = []
    most = float(np.finfo(np.float32).max) / 2
    for score in scores:
        value = np.float32(min(max(score, -most), most))
        if kept and value >= np.float32(kept[-1]):
            value = np.nextafter(np.float32(kept[-1]), np.float32(-np.inf))
        kept.append(float(value))
    return kept


def safe_name(label: str) -> str:
    """A label as part of a file name: what is neither a letter, a digit nor one of ``_+-`` is percent-encoded."""
    return re.sub(r"[^\w+-]", lambda m: "".join(f"%{b:02X}" for b in m[0].encode("utf-8", "surrogatepass")), label)


def file_name(record: Record) -> str:
    """Benchmark, size, retriever and seed as a file name; another for every cell."""
    parts = (record["benchmark"], f"n{record['n']}", record["retriever"], f"seed{record['seed']}")
    return ".".join(safe_name(part) for part in parts)


def export(folder: Path, out: Path) -> list[Path]:
    """Write ``run.<cell>.trec`` and ``qrels.<cell>.trec`` for every finished cell of a run's folder."""
    records = [record for record in latest(folder) if record["status"] == "ok"]
    if not records:
        raise UsageError(f"{folder}: holds no finished cell to export")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"output folder {out}: cannot be written: {error.strerror}") from None
    written = []
    for record in records:
        name, tag = file_name(record), quote(record["retriever"])
        runs = []
        ranked_queries, judgments = rankings(folder, record)
        for line in ranked_queries.values():
            query = quote(line["query"])
            ranked = zip(line["documents"], descending(line["scores"]), strict=True)
            runs += [f"{query} Q0 {quote(d)} {rank} {score!r} {tag}\n" for rank, (d, score) in enumerate(ranked, 1)]
        judged = [
            f"{quote(query)} 0 {quote(document)} {grade}\n"
            for query, own in judgments.items()
            for document, grade in own.items()
        ]
        for kind, lines in (("run", runs), ("qrels", judged)):
            file = out / f"{kind}.{name}.trec"
            write(file, "".join(lines))
            written.append(file)
    return written
