"""Suites: the grid of benchmarks, sizes, retrievers and seeds that a run computes, from YAML and flags."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from icr_bench.harness import strict
from icr_bench.harness.errors import UsageError, unknown
from icr_bench.harness.spec import ALL, Spec, check_text, parse_budget, parse_bytes, parse_numbers, parse_sizes, spec_of

KEYS = (
    "benchmark",
    "retriever",
    "n",
    "k",
    "seed",
    "queries",
    "device",
    "dtype",
    "timeout",
    "memory_limit",
    "latency_queries",
    "budget",
    "plugin",
)
"""Keys of a suite file; each equals a flag of ``icr-bench run`` (dashes and underscores alike)."""

_ALIASES = {"benchmarks": "benchmark", "retrievers": "retriever", "plugins": "plugin", "seeds": "seed"}

DEFAULT, QUICK = "default", "quick"
CUSTOM = "custom"
"""The name of a run whose benchmarks come from flags alone."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Everything a run needs to know, checked."""

    name: str
    benchmarks: tuple[Spec, ...]
    sizes: tuple[tuple[int | str, ...], ...]  # one a benchmark
    retrievers: tuple[Spec, ...]
    cutoffs: tuple[int, ...] = (1, 2, 5, 10)
    seeds: tuple[int, ...] = (0,)
    queries: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    timeout: float | None = None  # seconds a cell
    memory_limit: int | None = None  # bytes a cell
    latency_queries: int = 50
    budget: Mapping[str, float] = field(default_factory=dict)  # ``tokens`` or ``money`` that services may take
    plugins: tuple[Path, ...] = ()


def names() -> list[str]:
    """The suites that come with the package."""
    folder = files("icr_bench.harness").joinpath("suites")
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def text(name: str) -> str:
    """The YAML text of a suite that comes with the package."""
    if name not in names():
        raise unknown("suite", name, names())
    return files("icr_bench.harness").joinpath("suites", f"{name}.yaml").read_text(encoding="utf-8")


def load(name: str) -> dict[str, Any]:
    """The keys of a suite file, or of a suite by name; ``${VARIABLE}`` expanded.

    Raises:
        UsageError: no such suite or file, not YAML, an unknown key, an unset variable; with file and line if known.
    """
    file = Path(name)
    if file.suffix in (".yaml", ".yml") or os.sep in name:
        try:
            source = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{name}: the suite file cannot be read: {error}") from None
    else:
        source = text(name)
    keys = strict.parse(source, name)
    if not isinstance(keys, dict):
        raise UsageError(f"{name}: a suite is a mapping of {', '.join(KEYS)}; got {type(keys).__name__}")
    found: dict[str, Any] = {}
    for key, value in keys.items():
        own = str(key).replace("-", "_")
        own = _ALIASES.get(own, own)
        if own not in KEYS:
            raise _at(unknown("key", str(key), KEYS), name, source, str(key))
        if own in found:
            raise UsageError(f"{name}: {own} is given twice")
        try:
            found[own] = _expand(value, name)
        except RecursionError:
            raise UsageError(f"{name}: {own} holds itself") from None
    if found.get("plugin") is not None:  # beside the suite file
        plugins = found["plugin"] if isinstance(found["plugin"], list) else [found["plugin"]]
        found["plugin"] = [str(file.parent / str(plugin)) for plugin in plugins]
    return found


def _at(error: UsageError, name: str, source: str, key: str) -> UsageError:
    lines = [i for i, line in enumerate(source.splitlines(), 1) if re.match(rf"['\"]?{re.escape(key)}['\"]?\s*:", line)]
    return UsageError(f"{name}:{lines[0]}: {error}" if lines else f"{name}: {error}")


def _expand(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, name) for item in value]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise UsageError(f"{name}: the environment variable {match[1]} is not set; it is used in {value!r}")
        return os.environ[match[1]]

    return re.sub(r"\$\{(\w+)\}", variable, value)


def assemble(suite: str | None, flags: Mapping[str, Any]) -> Suite:
    """The suite named (``default`` if none), with flags that are not None put over its keys.

    Benchmarks given by flag without a suite make a run called ``custom``, of all documents with the retrievers of
    ``quick`` unless flags say otherwise.
    """
    if suite is not None:
        check_text(suite, "suite")
    flags = {key: value for key, value in flags.items() if value is not None}
    custom = suite is None and "benchmark" in flags
    keys = load(suite or (QUICK if custom else DEFAULT))
    name = CUSTOM if custom else Path(suite or DEFAULT).stem
    where = name if suite is None else suite
    given = {**keys, **flags}

    specs, sizes = [], []
    common = parse_sizes(given.get("n", ALL))
    for spec in _specs(given.get("benchmark"), "benchmark", where):
        own = dict(spec.options)
        wanted = own.pop("n", None)
        if "benchmark" not in flags:  # a flag wins over the suite, but a SPEC over the flags beside it
            wanted = None if "n" in flags else wanted
            if "queries" in flags:
                own.pop("queries", None)
        specs.append(Spec(spec.name, own, spec.label))
        sizes.append(common if wanted is None else parse_sizes(wanted))
    retrievers = _specs(given.get("retriever"), "retriever", where)
    for kind, chosen in (("benchmark", specs), ("retriever", retrievers)):
        rows = [spec.row for spec in chosen]
        for row in rows:
            if rows.count(row) > 1:
                raise UsageError(f"{where}: two {kind}s are called {row!r}; tell them apart with label=")
    timeout = given.get("timeout")
    limit = given.get("memory_limit")
    queries = given.get("queries")
    return Suite(
        name=name,
        benchmarks=tuple(specs),
        sizes=tuple(sizes),
        retrievers=tuple(retrievers),
        cutoffs=_cutoffs(given.get("k", Suite.cutoffs)),
        seeds=parse_numbers(given.get("seed", Suite.seeds), "--seed", 0),
        queries=None if queries is None else _one(queries, "--queries", 1),
        device=_device(given.get("device", "auto")),
        dtype=_dtype(given.get("dtype", "auto")),
        timeout=None if timeout is None else _seconds(timeout),
        memory_limit=None if limit is None else parse_bytes(limit),
        latency_queries=_one(given.get("latency_queries", Suite.latency_queries), "--latency-queries", 1),
        budget=parse_budget(given["budget"]) if given.get("budget") is not None else {},
        plugins=tuple(Path(plugin) for plugin in given.get("plugin") or ()),
    )


def _specs(values: Any, kind: str, where: str) -> list[Spec]:
    values = values if isinstance(values, list) else [] if values is None else [values]
    if not values:
        raise UsageError(f"{where}: no {kind} is named")
    return [spec_of(value, f"{where}: {kind}") for value in values]


def _cutoffs(value: Any) -> tuple[int, ...]:
    cutoffs = tuple(sorted(parse_numbers(value, "-k", 1)))
    if len(str(cutoffs[-1])) > 9:  # as in the name of a metric
        raise UsageError(f"-k: expected numbers of at most 9 digits, got {value!r}")
    return cutoffs


def _one(value: Any, flag: str, lowest: int) -> int:
    numbers = parse_numbers(value, flag, lowest)
    if len(numbers) != 1:
        raise UsageError(f"{flag} takes one number, got {value!r}")
    return numbers[0]


def _seconds(value: Any) -> float:
    try:
        seconds = 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--timeout: {value!r} is no number of seconds above 0")
    return seconds


def _device(value: Any) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(value)):
        raise UsageError(f"--device: expected auto, cpu, cuda or cuda:N, got {value!r}")
    return str(value)


def _dtype(value: Any) -> str:
    if value not in DTYPES:
        raise UsageError(f"--dtype: expected one of {', '.join(DTYPES)}, got {value!r}")
    return str(value)
