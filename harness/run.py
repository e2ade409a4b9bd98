"""The run: every cell of a suite's grid that is not there yet, each in its own process, each kept as it ends."""

from __future__ import annotations

import datetime
import hashlib
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from icr_bench.benchmarks.base import Benchmark, Task
from icr_bench.harness import diagnose, metrics
from icr_bench.harness.cell import Job
from icr_bench.harness.display import Lines
from icr_bench.harness.environment import environment, machine_id
from icr_bench.harness.errors import FAILED, OK, UsageError
from icr_bench.harness.folder import Folder, Record, row
from icr_bench.harness.prepare import (
    Answering,
    Asked,
    check_sizes,
    load_benchmark,
    place,
    prepare_benchmark,
    prepare_retriever,
    takes_place,
)
from icr_bench.harness.process import Limits, last_lines, run_cell
from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import Spec
from icr_bench.harness.suite import Suite


@dataclass
class Outcome:
    """What a run came to."""

    records: list[Record] = field(default_factory=list)  # of the whole grid, in order
    computed: int = 0
    reused: int = 0

    @property
    def failed(self) -> list[Record]:
        return [record for record in self.records if record["status"] != "ok"]

    @property
    def exit_code(self) -> int:
        return FAILED if self.failed else OK


def run(
    suite: Suite,
    out: Path,
    command: str,
    display: Lines,
    *,
    fresh: bool,
    retry_failed: bool,
    look: dict[str, Any] | None = None,
) -> Outcome:
    """Compute the cells of a suite that the folder does not hold yet.

    Args:
        look: what to look at inside the retrievers, instead of timing them.

    Raises:
        UsageError, DataError, MissingExtra: before the first cell, if anything asked for cannot be had.
    """
    suite, answering, grid = lay_out(suite)
    name = suite.name
    if look is not None:
        name += " (diagnosis)"
        answering, left = diagnose.check(answering, grid, suite, look)
        suite = replace(suite, cutoffs=tuple(sorted({1, *suite.cutoffs})))  # what decoding is compared by
        for line in left:
            display.say(line)
    outcome = Outcome()
    total = len(grid) * len(answering)
    with Folder(out, name, command, fresh=fresh) as folder:
        if folder.cut_bytes:
            display.say(f"cut a torn last line of {folder.cut_bytes} bytes from {out / 'cells.jsonl'}")
        for prepared in {id(entry[0]): entry for entry in grid}.values():
            for warning in prepared[2].warnings:
                display.say(f"warning: {prepared[0].spec.row}: {warning}")
        for asked, seed, benchmark, n in grid:
            task = benchmark.at(n)
            for retriever in answering:
                number = len(outcome.records) + 1
                draft = draft_record(suite, command, asked, seed, benchmark, task, retriever, look)
                held = folder.latest.get(row(draft))
                if held and held["key"] == draft["key"] and not _again(held, draft, retry_failed):
                    outcome.records.append(held)
                    outcome.reused += 1
                    continue
                display.cell_started(draft, number, total)
                try:
                    record, rankings = compute(suite, draft, asked, task, retriever, folder, display)
                    folder.keep(record, rankings, task)
                except OSError as error:  # a full disk, say
                    raise UsageError(
                        f"the cell could not be computed or kept in {out}: {error.strerror or error}; finished cells "
                        "are kept, the same command goes on from there"
                    ) from None
                outcome.records.append(record)
                outcome.computed += 1
                display.cell_ended(record)
    return outcome


Grid = list[tuple[Asked, int, Benchmark, int]]
"""Benchmark as asked for, seed, benchmark and N of each column of cells."""


def lay_out(suite: Suite) -> tuple[Suite, list[Answering], Grid]:
    """The suite with its device resolved, and its retrievers and columns, everything checked and read."""
    registry = Registry(suite.plugins)
    if suite.device.startswith("cuda") or any(takes_place(registry, spec) for spec in suite.retrievers):
        device, dtype = place(suite.device, suite.dtype)
        suite = replace(suite, device=device, dtype=dtype)
    answering = [prepare_retriever(registry, spec, suite) for spec in suite.retrievers]
    grid = [
        (prepared, seed, benchmark, n)
        for spec, sizes in zip(suite.benchmarks, suite.sizes, strict=True)
        for prepared in [prepare_benchmark(registry, spec, suite.queries)]
        for seed, benchmark in load_benchmark(registry, prepared, suite.seeds).items()
        for n in check_sizes(prepared.spec.row, benchmark, sizes)
    ]
    return suite, answering, grid


def _again(held: Record, draft: Record, retry_failed: bool) -> bool:
    """Whether a failed cell is computed again: when asked to, or under other limits."""
    limits = ("timeout", "memory_limit")
    changed = any(held["config"][key] != draft["config"][key] for key in limits)
    return held["status"] != "ok" and (retry_failed or changed)


def draft_record(
    suite: Suite,
    command: str,
    asked: Asked,
    seed: int,
    benchmark: Benchmark,
    task: Task,
    retriever: Answering,
    look: dict[str, Any] | None = None,
) -> Record:
    """The part of a record that is known beforehand, with the key that tells whether the cell is there already."""
    n = len(task.documents)
    made = {key: str(value.resolve()) if isinstance(value, Path) else value for key, value in asked.own.items()}
    config = {
        "benchmark": {
            "name": asked.spec.name,
            "given": dict(asked.spec.options),
            "resolved": made | asked.common,
        },
        "retriever": {
            "name": retriever.spec.name,
            "given": dict(retriever.spec.options),
            "resolved": dict(retriever.options),
        },
        "k": list(suite.cutoffs),
        "depth": min(max(suite.cutoffs), n),
        "device": suite.device if "device" in retriever.takes else None,
        "dtype": suite.dtype if "dtype" in retriever.takes else None,
        "latency_queries": suite.latency_queries,
        "timeout": suite.timeout,
        "memory_limit": suite.memory_limit,
    }
    if look is not None:
        config["look"] = look
    draft = {
        "benchmark": asked.spec.row,
        "n": n,
        "retriever": retriever.spec.row,
        "seed": seed,
        "config": config,
        "fingerprint": {"data": task.fingerprint, "weights": retriever.weights, "code": retriever.code},
        "command": command,
        "warnings": list(benchmark.warnings),
        "environment": environment(),
    }
    identity: list[Any] = json.loads(json.dumps([draft["fingerprint"], row(draft), config, machine_id()], default=str))
    for key in ("timeout", "memory_limit"):
        del identity[2][key]  # they do not change a cell that ended within them
    for side in ("benchmark", "retriever"):
        del identity[2][side]["given"]  # the same options may be written in several ways
    canonical = json.dumps(identity, sort_keys=True)
    draft["key"] = hashlib.sha256(canonical.encode()).hexdigest()
    normal: Record = json.loads(json.dumps(draft, default=str))
    return normal


def job_of(
    suite: Suite,
    asked: Asked,
    task: Task,
    retriever: Spec,
    seed: int,
    *,
    plan: bool = False,
    look: dict[str, Any] | None = None,
) -> Job:
    """What the cell's process is given: texts and settings."""
    rng = random.Random(f"icr-bench latency {seed}")
    depth = min(max(suite.cutoffs), len(task.documents))
    exclude = asked.common["exclude_self"]
    return Job(
        plugins=[str(plugin.absolute()) for plugin in suite.plugins],
        retriever=retriever.name,
        options=dict(retriever.options),
        filled={"device": suite.device, "dtype": suite.dtype, "seed": seed},
        documents=[document.text for document in task.documents],
        queries=[query.text for query in task.queries],
        sample=rng.sample(range(len(task.queries)), min(suite.latency_queries, len(task.queries))),
        depth=min(depth + 1, len(task.documents)) if exclude else depth,
        max_tokens=asked.common["max_tokens"],
        check=False,
        plan=plan,
        look=look,
        golds=[] if look is None else diagnose.golds(task, exclude=exclude),
        hidden=diagnose.hidden(task) if exclude else [None] * len(task.queries),
    )


def compute(
    suite: Suite, draft: Record, asked: Asked, task: Task, retriever: Answering, folder: Folder, display: Lines
) -> tuple[Record, list[Record]]:
    """Run one cell and score it; the record, and the rankings as they are kept."""
    exclude = asked.common["exclude_self"]
    ids = set(task.ids) if exclude else set()
    depth = draft["config"]["depth"]
    look = draft["config"].get("look")
    job = job_of(suite, asked, task, retriever.spec, draft["seed"], look=look)
    job["filled"]["budget"] = {**suite.budget, "ledger": str((folder.work / "ledger.jsonl").absolute())}
    log = folder.path / "logs" / f"{draft['key'][:16]}.log"
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    limits = Limits(suite.timeout, suite.memory_limit)
    result = run_cell(job, folder.work, log, limits, display.cell_progress)
    record = {**draft, "status": result["status"], "error": result.get("error"), "started": started}
    record["memory"] = {"index_bytes": None, **result["memory"]}
    declared = len(task.queries)
    if result["status"] != "ok":
        record["log"], record["log_tail"] = f"logs/{log.name}", last_lines(log)
        record |= dict.fromkeys(("metrics", "ceiling", "tie_rate", "time", "tokens", "truncated", "estimate"))
        record["queries"] = {"declared": declared, "scored": 0, "empty": 0, "failed": declared}
        return record, []
    if log.stat().st_size:
        record["log"] = f"logs/{log.name}"
    else:
        log.unlink()
    kept, tied = order(task, result["answers"], depth, ids)
    if look is not None:
        record["diagnosis"] = diagnose.summary(result["seen"], job["golds"], len(task.documents))
        for line, row in zip(kept, diagnose.trimmed(result["seen"], record["diagnosis"], task.ids), strict=True):
            line["seen"] = row
    scored = metrics.score(
        {line["query"]: line["documents"] for line in kept},
        tied,
        task.judgments,
        task.relevant,
        suite.cutoffs,
        {query.id: query.id for query in task.queries if query.id in ids},
    )
    failed = sum(bool(line.get("error")) for line in kept)
    empty = sum(not line["documents"] and not line.get("error") for line in kept)
    record |= {
        "metrics": metrics.intervals(scored.values),
        "queries": {"declared": declared, "scored": declared - failed, "empty": empty, "failed": failed},
        "ceiling": scored.ceiling,
        "tie_rate": scored.tie_rate,
        **{key: result[key] for key in ("time", "tokens", "truncated")},
    }
    record["estimate"] = _beside(result["estimate"], record) if result["estimate"] else None
    record["config"]["retriever"]["settings"] = result["settings"]
    return record, kept


def _beside(told: Record, record: Record) -> Record:
    """What was predicted before the cell's index was made, beside what was measured; None for what was not."""
    memory, device = record["memory"], record["memory"]["device_peak_bytes"]
    measured = {
        "index_bytes": memory["index_bytes"],
        "peak_bytes": memory["peak_rss_bytes"] if device is None else device,
        "index_s": record["time"]["index_s"],
        "query_s": record["time"]["query_p50_s"],
    }
    return {key: {"predicted": value, "measured": measured.get(key)} for key, value in told.items()}


def order(task: Task, answers: list[Any], depth: int, excluded: set[str]) -> tuple[list[Record], list[bool]]:
    """Rankings in canonical order as they are kept, cut to depth, and whether equal scores occur in each."""
    kept, tied = [], []
    for query, (numbers, scores, error) in zip(task.queries, answers, strict=True):
        positions = [] if error else metrics.canonical(numbers, scores)
        positions = [p for p in positions if not (query.id in excluded and task.ids[numbers[p]] == query.id)][:depth]
        line = {
            "query": query.id,
            "documents": [task.ids[numbers[p]] for p in positions],
            "scores": [scores[p] for p in positions],
        }
        kept.append(line | ({"error": error} if error else {}))
        tied.append(len(set(line["scores"])) < len(line["scores"]))
    return kept, tied
