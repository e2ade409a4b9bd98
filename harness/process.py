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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from icr_bench.harness.cell import Job

POLL_S = 0.05

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Limits:
    """What a cell may use; None for no limit."""

    timeout: float | None  # seconds
    memory: int | None  # resident bytes of the process and its children


def run_cell(job: Job, work: Path, log: Path, limits: Limits, progress: OnProgress) -> dict[str, Any]:
    """Run one cell in a process group of its own, which ends with this process, and return its result.

    The result has ``status`` (ok, oom, timeout, killed, error), ``error`` and ``memory`` whatever happened.
    """
    job_file, result_file = work.absolute() / "job.json", work.absolute() / "result.json"
    job_file.write_text(json.dumps(job))
    result_file.unlink(missing_ok=True)
    with log.open("wb") as log_stream:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "icr_bench.harness.cell", str(job_file), str(result_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_stream,
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
    assert process.stdout is not None
    assert process.stdin is not None
    relay = threading.Thread(target=_relay, args=(process.stdout, progress), daemon=True)
    relay.start()
    try:
        peak, ended = _watch(process, limits)
    finally:
        _end_group(process)
        process.stdin.close()
        relay.join(1.0)  # a process that left the group may hold the pipe open for ever
    if ended is None and result_file.exists():
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result
    status, error = ended or _death(process.returncode, log)
    return {"status": status, "error": error, "memory": {"peak_rss_bytes": peak, "device_peak_bytes": None}}


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


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the cell and whatever it left running, its guard included."""
    with suppress(psutil.NoSuchProcess):
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                descendant.kill()  # also one that left the group, as long as the cell lives
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
