"""Where a cell ran: machine, versions, source; `icr-bench doctor` shows the same."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, metadata, requires, version
from pathlib import Path
from typing import Any

import psutil

LIBRARIES = (
    "bm25s",
    "faiss-cpu",
    "faiss-gpu-cu12",
    "mteb",
    "numpy",
    "pyserini",
    "PyStemmer",
    "rank-bm25",
    "sentence-transformers",
    "tokenizers",
    "torch",
    "transformers",
)
"""Packages whose version can change a result."""


UNITS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "sme", "bf16", "i8mm", "asimd")
"""Names by which Linux tells what a processor multiplies matrices with."""


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
            "free_bytes": psutil.virtual_memory().available,
            "usable_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "matrix_units": matrix_units(),
            "gpus": gpus(),
            "compiler": shutil.which("cc"),
        },
        "packages": libraries(),
        "missing_extras": missing_extras(),
        "git": _git(),
        "thread_settings": {k: os.environ[k] for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if k in os.environ},
    }


def libraries() -> dict[str, str]:
    """Installed packages among `LIBRARIES` and their versions."""
    return {name: found for name in LIBRARIES if (found := _version(name))}


def matrix_units() -> list[str]:
    """What this processor multiplies matrices with, of `UNITS`; empty where the system does not tell."""
    told = re.search(r"^(?:flags|Features)\s*:(.*)$", _cpuinfo(), re.M)
    known = set(told[1].split()) if told else set()
    return [unit for unit in UNITS if unit in known]


@cache
def gpus() -> list[dict[str, Any]]:
    """NVIDIA's GPUs with their memory and driver, as ``nvidia-smi`` tells them without PyTorch being imported."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in told.splitlines():
        name, *rest = (part.strip() for part in line.rsplit(",", 2))
        if len(rest) == 2:  # else a message
            memory, driver = rest
            size = int(memory) * 2**20 if memory.isdigit() else None
            found.append({"name": name, "memory_bytes": size, "driver": driver})
    return found


def missing_extras() -> dict[str, list[str]]:
    """Extras of this package of which something is not installed -> what."""
    found: dict[str, list[str]] = {}
    for extra in metadata("icr-bench").get_all("Provides-Extra") or []:
        needed = [line for line in requires("icr-bench") or [] if re.search(rf"extra == [\"']{extra}[\"']", line)]
        names = [match[0] for line in needed if (match := re.match(r"[\w.-]+", line))]
        if missing := [name for name in names if _version(name) is None]:
            found[extra] = missing
    return found


def doctor(told: dict[str, Any]) -> str:
    """An environment in words."""
    machine = told["machine"]
    units = ", ".join(machine["matrix_units"]) or "unknown"
    slow = machine["matrix_units"] and not any("bf16" in unit for unit in machine["matrix_units"])
    lines = [
        f"icr-bench {told['icr_bench']}, Python {told['python']}, {told['platform']}",
        f"processor: {machine['processor']}, {machine['cores']} cores, {machine['usable_threads']} of "
        f"{machine['threads']} threads usable"
        + "".join(f", {name}={value}" for name, value in told["thread_settings"].items()),
        f"matrix units: {units}" + ("; none for bfloat16, which is slow on this processor" if slow else ""),
        f"memory: {machine['memory_bytes'] / 1e9:.1f} GB, {machine['free_bytes'] / 1e9:.1f} GB free",
        "GPUs: "
        + (
            "; ".join(f"{gpu['name']}, {(gpu['memory_bytes'] or 0) / 1e9:.0f} GB" for gpu in machine["gpus"])
            or "none that nvidia-smi knows of"
        ),
        f"C compiler: {machine['compiler'] or 'none; the cache is read by slower code'}",
        "packages: " + ", ".join(f"{name} {found}" for name, found in told["packages"].items()),
    ]
    lines += [
        f"extra {extra}: without {', '.join(missing)}; pip install 'icr-bench[{extra}]'"
        for extra, missing in told["missing_extras"].items()
    ]
    return "\n".join(lines) + "\n"


@cache
def machine_id() -> str:
    """What two machines share whose times may be compared: processor, threads, gigabytes of memory, and GPUs."""
    memory = round(psutil.virtual_memory().total / 2**30)
    told = " ".join([f"{_processor()} {os.cpu_count()} {memory}", *(gpu["name"] for gpu in gpus())])
    return hashlib.sha256(told.encode()).hexdigest()[:12]


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
    told = re.search(r"^model name\s*:(.*)$", _cpuinfo(), re.M)
    return told[1].strip() if told else platform.processor() or platform.machine()


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""  # not Linux


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
