"""From specs to what can be run: options checked, weights identified, data read, before the first cell."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icr_bench.benchmarks.base import Benchmark, DataError, SizeError
from icr_bench.harness.cell import Job, refusal
from icr_bench.harness.environment import code_digest
from icr_bench.harness.errors import UsageError
from icr_bench.harness.process import Limits, run_cell
from icr_bench.harness.registry import Registry, convert
from icr_bench.harness.spec import ALL, Spec
from icr_bench.harness.suite import Suite
from icr_bench.retrievers.base import MissingExtra
from icr_bench.retrievers.weights import CacheFolder, Model, identify

COMMON: Mapping[str, tuple[Any, Any]] = {
    "queries": (int | None, None),
    "relevant": (int, 1),
    "max_tokens": (int | None, None),
    "exclude_self": (bool, False),
}
"""Options of every benchmark: type and default."""

COMMON_HELP = {
    "n": "corpus sizes, such as 500+1k+all, instead of the run's",
    "queries": "a seeded sample of that many declared queries; all by default",
    "relevant": "the lowest grade that makes a document relevant",
    "max_tokens": "cut every document to that many tokens of the retriever's tokenizer (whitespace, if it has none)",
    "exclude_self": "never return the document whose id equals the query's id",
    "label": "the name of the rows",
}


CHECK_S = 60
"""Seconds that a constructor may take before the first cell; one that takes longer is left to its cells."""


@dataclass(frozen=True)
class Asked:
    """A benchmark as asked for: its options apart from the harness's own."""

    spec: Spec
    own: dict[str, Any]
    common: dict[str, Any]


@dataclass(frozen=True)
class Answering:
    """A retriever as asked for, with what identifies it."""

    spec: Spec
    options: dict[str, Any]
    takes: set[str]  # of device, dtype and seed
    weights: dict[str, str]
    code: str


def takes(registry: Registry, spec: Spec) -> set[str]:
    """Which of device, dtype and seed a retriever takes, or another that it is made of."""
    return set[str]().union(*(registry.filled("retriever", one.name) for _, one in registry.within(spec)))


def takes_place(registry: Registry, spec: Spec) -> bool:
    """Whether a retriever runs on a device, or with a type of weights, that can be chosen."""
    return bool({"device", "dtype"} & takes(registry, spec))


def place(device: str, dtype: str) -> tuple[str, str]:
    """Device and type of weights with ``auto`` resolved: a GPU and bfloat16 if there is one, else CPU and float32.

    Raises:
        UsageError: a GPU is asked for that is not there.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    if device != "cpu" and int(device.partition(":")[2] or 0) >= count:
        raise UsageError(f"--device {device}: PyTorch sees {count} CUDA devices here; take cpu or auto")
    if dtype == "auto":
        dtype = "bfloat16" if device != "cpu" else "float32"
    return device, dtype


def prepare_retriever(registry: Registry, spec: Spec, suite: Suite) -> Answering:
    """Check a retriever's options and find what identifies its weights and code."""
    options = registry.resolve("retriever", spec)
    filled = {"device": suite.device, "dtype": suite.dtype, "seed": suite.seeds[0], "budget": suite.budget}
    weights: dict[str, str] = {}
    told = refusal(registry, spec, filled) if registry.is_own(spec) else _refusal_apart(registry, spec, filled)
    if told is not None:
        raise MissingExtra(*told) if len(told) > 1 else UsageError(f"retriever {spec.row}: {told[0]}")
    sources: list[Path] = []
    for path, one in registry.within(spec):
        weights |= {path + key: value for key, value in _weights(registry, one).items()}
        sources += registry.sources("retriever", one.name)
    return Answering(spec, options, takes(registry, spec), weights, code_digest(dict.fromkeys(sources)))


def _refusal_apart(registry: Registry, spec: Spec, filled: dict[str, Any]) -> list[str] | None:
    """`refusal` of somebody else's retriever, whose constructor may end its process or hold it up; None if it does."""
    job = Job(
        plugins=[str(plugin) for plugin in registry.plugins],
        retriever=spec.name,
        options=dict(spec.options),
        filled=filled,
        documents=[],
        queries=[],
        sample=[],
        depth=0,
        max_tokens=None,
        check=True,
        plan=False,
        look=None,
        golds=[],
        hidden=[],
    )
    with tempfile.TemporaryDirectory(prefix="icr-bench-check-") as work:
        log = Path(work) / "log"
        result = run_cell(job, Path(work), log, Limits(CHECK_S, None), lambda stage, done, total: None)
    told: list[str] | None = result.get("refused")
    return told


def _weights(registry: Registry, spec: Spec) -> dict[str, str]:
    """What identifies the weights and data that a retriever's own options name."""
    weights = {}
    known = registry.options("retriever", spec.name)
    for key, value in registry.resolve("retriever", spec).items():
        annotation = known[key].annotation
        if value is None or annotation in (CacheFolder, CacheFolder | None):
            continue
        if annotation in (Model, Model | None) or _names_data(key, value):
            try:
                weights[key] = identify(str(value))
            except OSError as error:
                raise UsageError(f"retriever {spec.row}: {key}: {error}") from error
    return weights


def _names_data(key: str, value: Any) -> bool:
    """Whether an option names a file or folder whose content can change the answers."""
    try:
        if isinstance(value, Path) or key == "model":
            return Path(value).exists()
        return isinstance(value, str) and Path(value).is_file()
    except (OSError, TypeError):  # longer than a path can be, or no text
        return False


def prepare_benchmark(registry: Registry, spec: Spec, queries: int | None) -> Asked:
    """Check a benchmark's options and set the harness's own apart."""
    given = dict(spec.options)
    common = {}
    for key, (annotation, default) in COMMON.items():
        try:
            common[key] = convert(given.pop(key), annotation) if key in given else default
        except ValueError as error:
            raise UsageError(f"benchmark {spec.row}: {key}: {error}") from None
    if common["queries"] is None:
        common["queries"] = queries
    for key in ("queries", "max_tokens", "relevant"):
        if common[key] is not None and common[key] < 1:
            raise UsageError(f"benchmark {spec.row}: {key} must be 1 or more, got {common[key]}")
    given.pop("n", None)  # sizes are the suite's matter
    bare = Spec(spec.name, given, spec.label)
    return Asked(bare, registry.resolve("benchmark", bare, COMMON_HELP), common)


def load_benchmark(registry: Registry, asked: Asked, seeds: tuple[int, ...]) -> dict[int, Benchmark]:
    """Seed -> benchmark with its queries chosen; read once where the seed does not change the data."""
    made = "seed" in registry.filled("benchmark", asked.spec.name)
    loaded: dict[int, Benchmark] = {}
    benchmark: Benchmark | None = None
    try:
        for seed in seeds:
            if made or benchmark is None:
                benchmark = registry.build("benchmark", asked.spec, {"seed": seed})
            if not isinstance(benchmark, Benchmark):
                raise UsageError(f"benchmark {asked.spec.name}: expected a Benchmark, got {type(benchmark).__name__}")
            loaded[seed] = benchmark.choose(
                seed=seed, relevant=asked.common["relevant"], queries=asked.common["queries"]
            )
    except (DataError, UsageError):
        raise
    except ValueError as error:
        raise UsageError(f"benchmark {asked.spec.row}: {error}") from error
    except Exception as error:  # a plug-in's code may raise anything
        raise UsageError(f"benchmark {asked.spec.row}: {type(error).__name__}: {error}") from error
    return loaded


def check_sizes(name: str, benchmark: Benchmark, sizes: tuple[int | str, ...]) -> list[int]:
    """Sizes as integers, each one that the benchmark has."""
    whole = [len(benchmark.documents) if size == ALL else int(size) for size in sizes]
    try:
        for n in whole:
            benchmark.check_size(n)
    except SizeError as error:
        raise UsageError(f"benchmark {name}: {error}") from None
    return list(dict.fromkeys(whole))
