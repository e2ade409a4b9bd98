"""Where a cell ran: machine, versions, source."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import psutil

LIBRARIES = (
    "bm25s",
    "faiss-cpu",
    "numpy",
    "PyStemmer",
    "rank-bm25",
    "sentence-transformers",
    "tokenizers",
    "torch",
    "transformers",
)
"""Packages whose version can change a result."""


@cache
def environment() -> dict[str, Any]:
    """The machine and the software, as a record keeps them."""
    return {
        "icr_bench": _version("icr-bench"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": {
            "id": machine_id(),
            "processor": _processor(),
            "cores": psutil.cpu_count(logical=False),
            "threads": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "packages": libraries(),
        "git": _git(),
        "thread_settings": {k: os.environ[k] for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if k in os.environ},
    }


def libraries() -> dict[str, str]:
    """Installed packages among `LIBRARIES` and their versions."""
    return {name: found for name in LIBRARIES if (found := _version(name))}


@cache
def machine_id() -> str:
    """What two machines share whose times may be compared: processor, threads and gigabytes of memory."""
    memory = round(psutil.virtual_memory().total / 2**30)
    return hashlib.sha256(f"{_processor()} {os.cpu_count()} {memory}".encode()).hexdigest()[:12]


@cache
def package_digest() -> str:
    """SHA-256 over this package's own source and word lists; its models identify themselves, as all weights do."""
    rooms = [Path(__file__).parent, *(Path(__file__).parents[1] / room for room in ("retrievers", "benchmarks"))]
    sha = hashlib.sha256()
    for room in rooms:
        for file in sorted(p for p in room.rglob("*") if p.suffix in (".py", ".c", ".txt")):
            sha.update(f"{room.name}/{file.relative_to(room).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return sha.hexdigest()


def code_digest(sources: Iterable[Path]) -> str:
    """SHA-256 over this package, a plug-in's files or the packages that they stand in, and the library versions."""
    sha = hashlib.sha256(package_digest().encode())
    for source in sources:
        package = source
        while (package.parent / "__init__.py").exists():
            package = package.parent
        for file in sorted(package.rglob("*.py")) if package.is_dir() else [source]:
            sha.update(f"{file.relative_to(package.parent).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    sha.update(repr(sorted(libraries().items())).encode())
    return sha.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _git() -> dict[str, Any] | None:
    """Commit of the checkout that this package runs from; None for an installed wheel."""
    folder = Path(__file__).parent
    try:
        if Path(str(distribution("icr-bench").locate_file("icr_bench/harness"))).exists():
            return None  # a wheel: the repository around it, if any, is somebody else's
        commit = _run_git(folder, "rev-parse", "HEAD")
        dirty = bool(_run_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (PackageNotFoundError, OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": dirty}


def _run_git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
