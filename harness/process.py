"""Starting a cell's process, watching it, and ending it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from icr_bench.harness.cell import UNWRITTEN, Job
from icr_bench.harness.folder import expect

POLL_S = 0.05

MARK = "ICR_BENCH_CELL"
"""Variable in the environment of a cell, and so of all that it starts, by which those that left its process group and
outlived it are found."""

ROUNDS = 5
"""Looks for such processes, which may start others while they are killed."""

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Limits:
    """What a cell may use; None for no limit."""

    timeout: float | None  # seconds
    memory: int | None  # resident bytes of the process and its children


def run_cell(job: Job, work: Path, log: Path, limits: Limits, progress: OnProgress) -> dict[str, Any]:
    """Run one cell in a process group of its own, which ends with this process, and return its result.

    The result has ``status`` (ok, oom, timeout, killed, error), ``error`` and ``memory`` whatever happened.

    Raises:
        OSError: a file of the cell cannot be written, its result among them.
    """
    job_file, result_file = work.absolute() / "job.json", work.absolute() / "result.json"
    job_file.write_text(json.dumps(job))
    result_file.unlink(missing_ok=True)
    mark = uuid.uuid4().hex
    with log.open("wb") as log_stream:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "icr_bench.harness.cell", str(job_file), str(result_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_stream,
            start_new_session=True,
            env={**os.environ, MARK: mark, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
    assert process.stdout is not None
    assert process.stdin is not None
    unwritten: list[int] = []

    def hear(stage: str, done: int, total: int) -> None:
        if stage == UNWRITTEN:
            unwritten.append(done)
        else:
            progress(stage, done, total)

    relay = threading.Thread(target=_relay, args=(process.stdout, hear), daemon=True)
    relay.start()
    try:
        peak, ended = _watch(process, limits)
    finally:
        _end(process, mark)
        process.stdin.close()
        relay.join(1.0)  # a process that left the group may hold the pipe open for ever
    if ended is None and result_file.exists():
        return _result(result_file, peak, limits)
    if unwritten:
        raise OSError(unwritten[0], os.strerror(unwritten[0]), str(result_file))
    status, error = ended or _death(process.returncode, log)
    return {"status": status, "error": error, "memory": {"peak_rss_bytes": peak, "device_peak_bytes": None}}


def _result(file: Path, peak: int, limits: Limits) -> dict[str, Any]:
    """What the process wrote; a failure where it is no result, or where it tells of more memory than is allowed."""
    memory = {"peak_rss_bytes": peak, "device_peak_bytes": None}
    try:
        result: Any = json.loads(file.read_text(encoding="utf-8"))
        expect(result, {"status": str, "memory": dict})
        used = int(result["memory"].get("peak_rss_bytes", 0))
    except (ValueError, TypeError, RecursionError) as error:
        told = f"its process left a result that cannot be read ({error}); something that it started wrote it"
        return {"status": "error", "error": told, "memory": memory}
    if result["status"] == "ok" and limits.memory is not None and used > limits.memory:  # between two looks
        told = f"used {used:,} bytes at its peak, more than --memory-limit {limits.memory:,}"
        return {"status": "oom", "error": told, "memory": memory | {"peak_rss_bytes": used}}
    found: dict[str, Any] = result
    return found


def _watch(process: subprocess.Popen[bytes], limits: Limits) -> tuple[int, tuple[str, str] | None]:
    """Wait for the process; peak resident bytes seen, and why it was ended, if it was."""
    start = time.monotonic()
    peak = 0
    while True:
        try:
            process.wait(POLL_S)
            return peak, None
        except subprocess.TimeoutExpired:
            pass
        # One look for both numbers: of two looks at a growing process, the earlier could lie far below the limit.
        own, others = _resident(process.pid, children=limits.memory is not None)
        peak = max(peak, own)
        if limits.memory is not None and own + others > limits.memory:
            return peak, ("oom", f"used {own + others:,} bytes, more than --memory-limit {limits.memory:,}")
        if limits.timeout is not None and time.monotonic() - start > limits.timeout:
            return peak, ("timeout", f"took longer than --timeout {limits.timeout:g} seconds")


def _resident(pid: int, *, children: bool) -> tuple[int, int]:
    """Resident bytes of a process and of all its descendants if asked; to find those takes a look at every process."""
    own = others = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        own = int(process.memory_info().rss)
        for child in process.children(recursive=True) if children else ():
            with suppress(psutil.NoSuchProcess):
                others += child.memory_info().rss
    return own, others


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the cell and whatever it left running, its guard included."""
    with suppress(psutil.NoSuchProcess):
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                descendant.kill()  # also one that left the group and has another environment
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(ROUNDS):
        left = [one for one in psutil.process_iter() if _is_marked(one, mark)]
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        if not left:
            return
        psutil.wait_procs(left, 1.0)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):  # gone, or another user's
        return False


def _relay(stream: IO[bytes], progress: OnProgress) -> None:
    with stream:
        for line in stream:
            stage, _, numbers = line.decode("utf-8", "replace").partition("\t")
            if match := re.fullmatch(r"(\d+)\t(\d+)\n", numbers):
                progress(stage, int(match[1]), int(match[2]))


def _death(code: int, log: Path) -> tuple[str, str]:
    last = last_line(log)
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return "killed", f"killed by {name}" + (f"; last line of its log: {last}" if last else "")
    return "error", f"ended with exit code {code} and no result" + (f"; last line of its log: {last}" if last else "")


def last_line(log: Path) -> str:
    """The last line that is not empty of a log."""
    lines = last_lines(log)
    return lines[-1][:300] if lines else ""


def last_lines(log: Path, count: int = 20) -> list[str]:
    """The last lines of a log, read from its end, of at most 4 kB together."""
    with log.open("rb") as stream:
        stream.seek(max(log.stat().st_size - 4096, 0))
        return stream.read().decode("utf-8", "replace").strip().splitlines()[-count:]
