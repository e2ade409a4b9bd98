"""One cell, measured in a process of its own: ``python -m icr_bench.harness.cell JOB RESULT``.

The job file holds texts and settings but no ids and no judgments, so that a retriever cannot see them.
The process reports progress as ``stage<tab>done<tab>total`` lines; whatever the retriever prints goes to the log.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import Spec
from icr_bench.retrievers.base import Document, Estimate, MissingExtra, Ranking, Retriever, check_rankings

BATCH = 32
"""Queries a call of the throughput pass."""

WARMUP = 5
"""Queries put one by one before any is timed."""

UNWRITTEN = "not written"
"""The stage that a process reports whose result could not be written, with the system's number of the error: its
retriever is not at fault."""

Report = Callable[[str, int, int], None]


class Job(TypedDict):
    """What the cell's process is given."""

    plugins: list[str]
    retriever: str
    options: dict[str, Any]
    filled: dict[str, Any]  # device, dtype, seed
    documents: list[str]  # document number i at position i
    queries: list[str]
    sample: list[int]  # positions of the queries timed one by one
    depth: int
    max_tokens: int | None
    check: bool  # whether the options are refused, and no more
    plan: bool  # estimate only
    look: dict[str, Any] | None  # what `diagnose` is to look at, instead of timing
    golds: list[list[int]]  # numbers of each query's relevant documents, only for that
    hidden: list[int | None]  # of the document that may not be returned for it, if there is one


def measure(job: Job, report: Report) -> dict[str, Any]:
    """Load, estimate, index, warm up, time single queries, then answer all queries in batches."""
    report("load", 0, 1)
    start = time.perf_counter()
    registry, spec = Registry(job["plugins"]), Spec(job["retriever"], job["options"])
    if job["check"]:
        return {"status": "ok", "refused": refusal(registry, spec, job["filled"]), "memory": {}}
    retriever: Retriever = registry.build("retriever", spec, job["filled"])
    retriever.progress = lambda done, total: report("index", int(done), int(total))  # type: ignore[method-assign]
    retriever.load()
    loaded = time.perf_counter() - start
    look: Any = None
    if job["look"] is not None:
        from icr_bench.retrievers.lm.diagnose import Look

        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in job["look"].items()}
        look = Look(**given)
        retriever.check_look(look, len(job["documents"]))  # type: ignore[attr-defined]
    texts, lengths, shortened = cut(retriever, job["documents"], job["max_tokens"])
    documents = [Document(number, text) for number, text in enumerate(texts)]
    queries, depth = job["queries"], job["depth"]
    query_tokens = sum(len(spans) for spans in retriever.token_spans(queries))
    estimate = retriever.estimate(documents, queries[:BATCH])
    if estimate is not None and not isinstance(estimate, Estimate):
        raise TypeError(f"estimate must return an Estimate or None, got {type(estimate).__name__}")
    told = asdict(estimate) if estimate else None
    for name in ("query_tokens", "query_cost"):  # of services only
        if told and told[name] is None:
            del told[name]
    for name, value in (told or {}).items():
        if value is None and name == "query_s":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"estimate: {name} must be a finite number of 0 or more, got {value!r}")
    if job["plan"]:
        return {"status": "ok", "estimate": told, "memory": {}}

    report("index", 0, 1)
    start = time.perf_counter()
    retriever.index(documents)
    indexed = time.perf_counter() - start
    most = math.inf if retriever.max_tokens is None else retriever.max_tokens

    def ask(texts: Sequence[str]) -> list[Ranking]:
        return retriever.search(texts, depth)

    once = retriever.asks_once or look is not None
    seen: list[dict[str, Any]] = []
    warmup = [] if once else [queries[i % len(queries)] for i in range(WARMUP)]
    for query in warmup:
        check_rankings(ask([query]), 1, len(documents), depth)
    single = []
    for done, position in enumerate(() if once else job["sample"]):
        report("one by one", done, len(job["sample"]))
        start = time.perf_counter()
        rankings = ask([queries[position]])
        single.append(time.perf_counter() - start)
        check_rankings(rankings, 1, len(documents), depth)
    answers: list[Ranking] = []
    batched = 0.0
    for begin in range(0, len(queries), BATCH):
        report("queries", begin, len(queries))
        batch = queries[begin : begin + BATCH]
        start = time.perf_counter()
        if look is None:
            rankings = ask(batch)
        else:
            golds, hidden = (job[key][begin : begin + BATCH] for key in ("golds", "hidden"))
            rankings, rows = retriever.diagnose(batch, golds, depth, look, hidden)  # type: ignore[attr-defined]
            seen += rows
        batched += time.perf_counter() - start
        answers += check_rankings(rankings, len(batch), len(documents), depth)
    report("queries", len(queries), len(queries))
    settings = retriever.settings()
    if not isinstance(settings, dict):
        raise TypeError(f"settings must return a dict, got {type(settings).__name__}")
    if once:
        single = [ranking.seconds for ranking in answers if ranking.seconds is not None]
        batched = batched if len(single) == len(queries) else 0.0  # kept answers took none, and to look on takes more
    p50, p95, p99 = (percentile(single, share) if single else None for share in (0.5, 0.95, 0.99))
    return {
        "status": "ok",
        "answers": [[ranking.numbers, ranking.scores, ranking.error] for ranking in answers],
        "seen": seen,
        "settings": settings,
        "time": {
            "load_s": loaded,
            "index_s": None if retriever.index_reused else indexed,
            "warmup": len(warmup),
            "query_p50_s": p50,
            "query_p95_s": p95,
            "query_p99_s": p99,
            "sampled": len(single),
            "queries_per_s": len(queries) / batched if batched else None,
            "batch": BATCH,
        },
        "memory": {"index_bytes": int(retriever.index_bytes())},
        "tokens": {
            "unit": retriever.tokenizer,
            "documents": sum(min(length, most) for length in lengths),
            "queries": query_tokens,
        },
        "truncated": sum(over or length > most for length, over in zip(lengths, shortened, strict=True)),
        "estimate": told,
    }


def refusal(registry: Registry, spec: Spec, filled: dict[str, Any]) -> list[str] | None:
    """Make a retriever: what its constructor says of its options, or package and extra if one is missing; None where it
    is made, or fails for another reason, with which its cells will fail too."""
    try:
        registry.build("retriever", spec, filled)
    except MissingExtra as error:
        return [error.package, error.extra]
    except (ValueError, TypeError) as error:
        return [str(error)]
    except (Exception, SystemExit):
        return None
    return None


def cut(retriever: Retriever, texts: list[str], max_tokens: int | None) -> tuple[list[str], list[int], list[bool]]:
    """Texts cut to ``max_tokens`` of the retriever's tokenizer, their tokens after that, and whether each was cut."""
    kept: list[str] = []
    lengths: list[int] = []
    shortened: list[bool] = []
    for begin in range(0, len(texts), 256):
        batch = texts[begin : begin + 256]
        for text, spans in zip(batch, retriever.token_spans(batch), strict=True):
            over = max_tokens is not None and max_tokens < len(spans)
            lengths.append(max_tokens if over and max_tokens else len(spans))
            shortened.append(over)
            kept.append(text[: spans[max_tokens - 1][1]] if over and max_tokens else text)
    return kept, lengths, shortened


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def peak_rss() -> int:
    """Peak resident bytes of this process."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):  # ru_maxrss would start from the parent's peak
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_peak() -> int | None:
    """Peak bytes allocated on all GPUs together; None where none was used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return sum(int(torch.cuda.max_memory_allocated(i)) for i in range(torch.cuda.device_count())) or None


def _guard() -> None:
    """Fork a guard that kills this process group when the parent, which holds the other end of stdin, is gone.

    It is a shell, not a Python process: it costs no memory to speak of and does not wait for this interpreter.
    """
    if not os.fork():
        os.execv("/bin/sh", ["sh", "-c", "read -r line; kill -9 0"])


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def main(job_file: str, result_file: str) -> None:
    """Run the cell; the result file appears whole or not at all."""
    _guard()
    own = os.getpid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # whoever asks for input gets none
    progress = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(stage: str, done: int, total: int) -> None:
        progress.write(f"{stage}\t{done}\t{total}\n")
        progress.flush()

    try:
        result = measure(json.loads(Path(job_file).read_text()), report)
        result["memory"] |= {"peak_rss_bytes": peak_rss(), "device_peak_bytes": device_peak()}
        text = json.dumps(result)
    except BaseException as error:
        with contextlib.suppress(OSError):  # of a log on a full disk
            traceback.print_exc()
        status = "oom" if _out_of_memory(error) else "error"
        message = f"{type(error).__name__}: {error}".strip()
        memory = {"peak_rss_bytes": peak_rss(), "device_peak_bytes": device_peak()}
        text = json.dumps({"status": status, "error": message, "memory": memory})
    if os.getpid() != own:
        os._exit(1)  # a child that a retriever forked and let go on; the result is its parent's to write
    try:
        partial = Path(f"{result_file}.{own}.partial")
        partial.write_text(text)
        partial.rename(result_file)
    except OSError as error:
        report(UNWRITTEN, error.errno or 0, 0)
        os._exit(1)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # threads that a retriever left running are not waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
