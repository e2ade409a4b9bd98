"""What the cells of a suite would take, told by each retriever from a short calibration, before any is computed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from tabulate import tabulate

from icr_bench.harness.cell import WARMUP
from icr_bench.harness.display import Lines
from icr_bench.harness.process import Limits, run_cell
from icr_bench.harness.run import job_of, lay_out
from icr_bench.harness.suite import Suite
from icr_bench.harness.tables import human_bytes


@dataclass(frozen=True)
class Planned:
    """One cell: what it would take (None where its retriever cannot tell), and what stands in its way."""

    benchmark: str
    n: int
    retriever: str
    seed: int
    asked: int  # queries put in all: warm-up, one by one, and in batches
    queries: int
    estimate: dict[str, Any] | None
    problem: str

    @property
    def seconds(self) -> float | None:
        """For the whole cell, at most: queries in batches take less than one by one."""
        if self.estimate is None or self.estimate["query_s"] is None:
            return None
        return float(self.estimate["index_s"] + self.asked * self.estimate["query_s"])


def plan(suite: Suite, display: Lines) -> list[Planned]:
    """Ask the retriever of every cell, each in a process of its own.

    Raises:
        UsageError, DataError, MissingExtra: if anything asked for cannot be had.
    """
    suite, answering, grid = lay_out(suite)
    planned: list[Planned] = []
    total = len(grid) * len(answering)
    on_gpu = suite.device.startswith("cuda")
    free = _free_on(suite.device) if on_gpu else psutil.virtual_memory().available
    with tempfile.TemporaryDirectory(prefix="icr-bench-plan-") as work:
        for asked, seed, benchmark, n in grid:
            task = benchmark.at(n)
            for retriever in answering:
                row = {"benchmark": asked.spec.row, "n": n, "retriever": retriever.spec.row, "seed": seed}
                display.cell_started(row, len(planned) + 1, total)
                job = job_of(suite, asked, task, retriever.spec, seed, plan=True)
                log, limits = Path(work) / "log", Limits(suite.timeout, suite.memory_limit)
                result = run_cell(job, Path(work), log, limits, display.cell_progress)
                estimate = result.get("estimate")
                problem = "" if result["status"] == "ok" else f"{result['status']}: {result['error'].splitlines()[0]}"
                cell = Planned(
                    asked.spec.row,
                    n,
                    retriever.spec.row,
                    seed,
                    WARMUP + len(job["sample"]) + len(job["queries"]),
                    len(job["queries"]),
                    estimate,
                    problem,
                )
                planned.append(cell if problem or not estimate else _judged(cell, suite, free, retriever.options))
    return planned


def _free_on(device: str) -> int:
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def _judged(cell: Planned, suite: Suite, free: int, options: dict[str, Any]) -> Planned:
    """The cell with what stands in its way, if it would exceed memory, with what may lie on disk instead, or time."""
    assert cell.estimate is not None
    peak, seconds = cell.estimate["peak_bytes"], cell.seconds or 0.0
    problem = ""
    on_gpu = suite.device.startswith("cuda")
    beside = 0
    if options.get("cache") and "cache_gb" in options and not on_gpu:
        from icr_bench.retrievers.lm.disk import room

        beside = room(options["cache"], int(options["cache_gb"] * 1e9))
    if suite.memory_limit is not None and not on_gpu and peak > suite.memory_limit:
        problem = f"needs more than --memory-limit {human_bytes(suite.memory_limit)}"
    elif peak > free + beside:
        problem = f"does not fit: {human_bytes(free)} are free" + (f", {human_bytes(beside)} on disk" if beside else "")
    elif suite.timeout is not None and seconds > suite.timeout:
        problem = f"takes longer than --timeout {suite.timeout:g}"
    return replace(cell, problem=problem)


def render(planned: Sequence[Planned]) -> str:
    """As a table that ends with a line feed."""
    head = ["benchmark", "N", "retriever", "seed", "tokens", "index", "FLOPs", "to index", "a query", "cell", "memory"]
    paid = any(cell.estimate and "query_tokens" in cell.estimate for cell in planned)
    head += ["asked of a service", "cost"] if paid else []
    body = []
    for cell in planned:
        told = cell.estimate
        columns = 9 if paid else 7
        numbers = [""] * columns if cell.problem else ["not told"] + [""] * (columns - 1)
        if told:
            numbers = [
                f"{told['tokens']:,}",
                human_bytes(told["index_bytes"]),
                f"{told['index_flops']:.2e}",
                duration(told["index_s"]),
                "not told" if told["query_s"] is None else duration(told["query_s"]),
                "not told" if cell.seconds is None else duration(cell.seconds),
                human_bytes(told["peak_bytes"]),
            ]
            if paid:
                tokens, cost = told.get("query_tokens"), told.get("query_cost")
                numbers.append("" if tokens is None else f"{tokens * cell.queries:,.0f} tokens")
                numbers.append("" if cost is None else f"{cost * cell.queries:.4g}")
        body.append([cell.benchmark, f"{cell.n:,}", cell.retriever, cell.seed, *numbers, cell.problem])
    notes = ["cell: indexing and all queries one by one, which is more than a run takes, since it puts most in batches"]
    if any(cell.estimate is None and not cell.problem for cell in planned):
        notes.append("not told: this retriever gives no estimate")
    if paid:
        notes.append(
            "asked of a service: all queries once, in one round, with replies of full length; cost: in the money of "
            "the prices given"
        )
    drawn = tabulate(body, [*head, "problem"], tablefmt="github", disable_numparse=True)
    return f"{drawn}\n\n" + "".join(f"- {note}\n" for note in notes)


def duration(seconds: float) -> str:
    """Such as ``0.2 ms``, ``14 s``, ``2.5 h``."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"
