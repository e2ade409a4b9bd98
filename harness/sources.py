"""What the data of a recipe stand for: sources of training batches, and what must not be in them."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from icr_bench.benchmarks.base import Benchmark, Document
from icr_bench.benchmarks.examples import Batch, Biographies, Example, Examples, Lines, tokenizer_texts
from icr_bench.harness.errors import UsageError, unknown
from icr_bench.harness.prepare import load_benchmark, prepare_benchmark
from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import parse_spec
from icr_bench.retrievers.base import MissingExtra
from icr_bench.retrievers.weights import identify

if TYPE_CHECKING:
    from icr_bench.retrievers.training.trainer import Source

RLHN, SUBSETS = "rlhn/rlhn-680K", ("msmarco", "hotpotqa", "fever", "nq", "scidocsrr", "fiqa", "arguana")
"""The paper's training set and the parts of it that are used (facts 4)."""

NEGATIVES, POOL = 15, 32
"""Hard negatives of a query, and of how many candidates they are taken, evenly over the ranks (facts 4)."""

Say = Callable[[str], None]


class Data:
    """The sources that recipes name.

    Args:
        cache: folder of what was mined, scored or brought from the hub.
        exclude: benchmarks whose queries and documents no source may give.
        say: told what was found and left out.
    """

    def __init__(self, seed: int, cache: Path, exclude: Sequence[str], say: Say = lambda text: None) -> None:
        self._seed, self._cache, self._say = seed, cache, say
        self._registry = Registry()
        self._excluded = {_folded(text) for spec in exclude for text in self._texts(self._benchmark(spec))}
        if exclude:
            say(f"excluded: {len(self._excluded):,} texts of {', '.join(exclude)}")

    def source(self, told: Mapping[str, Any]) -> Source:
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
        name = options.pop("source", "")
        kinds: dict[str, Callable[..., Source]] = {
            "biographies": self._biographies,
            "benchmark": self._mined,
            "examples": self._given,
            "rlhn": self._rlhn,
        }
        if name not in kinds:
            raise unknown("source", str(name), kinds)
        try:
            inspect.signature(kinds[name]).bind(**options)
        except TypeError as error:
            raise UsageError(f"source {name}: {error}") from None
        try:
            made = kinds[name](**options)
        except ValueError as error:
            raise UsageError(f"source {name}: {error}") from None
        return made

    def held_out(self, queries: int, documents: int) -> Batch:
        return Biographies(development=True, seed=0).batch(0, queries, documents)

    def texts(self) -> Iterable[str]:
        return tokenizer_texts()

    def _biographies(self, likes: tuple[int, int] = (8, 20), two: float = 0.3, made_up: float = 0.3) -> Source:
        def excluded(query: str) -> bool:
            return _folded(query) in self._excluded

        return Biographies(likes=likes, two=two, made_up=made_up, seed=self._seed, excluded=excluded)

    def _given(self, path: str) -> Source:
        """A file of JSON lines with ``query``, ``positives``, ``negatives`` and, it may be, ``scores``."""
        if not Path(path).is_file():
            raise UsageError(f"source examples: {path}: no such file")
        return self._without_leaks(Lines(Path(path)), path)

    def _mined(
        self,
        spec: str,
        miner: str | None = None,
        negatives: int = NEGATIVES,
        pool: int = POOL,
        teacher: str | None = None,
    ) -> Source:
        """The queries of any benchmark with their golds, and negatives that a retriever ranks high."""
        benchmark = self._benchmark(spec)
        self._say(f"{spec}: {benchmark.source}")
        if miner is None and teacher is None:
            return self._without_leaks(self._pairs(benchmark), spec)
        identity = [spec, miner, negatives, pool, self._weights(miner), teacher, teacher and identify(teacher)]
        identity.append(benchmark.at(len(benchmark.documents)).fingerprint)
        file = self._cache / f"mined-{_digest(identity)}.jsonl"
        if not file.is_file():
            rows: Iterable[Example] = self._pairs(benchmark)
            if miner is not None:
                rows = self._with_negatives(benchmark, miner, negatives, pool)
            _write(file, self._scored(list(rows), teacher) if teacher else rows)
        return self._without_leaks(Lines(file), spec)

    def _rlhn(
        self,
        repo: str = RLHN,
        subsets: tuple[str, ...] = SUBSETS,
        negatives: int = NEGATIVES,
        pool: int = POOL,
        teacher: str | None = None,
    ) -> Source:
        """The paper's training set, from the hub or a local copy of its files."""
        identity = [repo, sorted(subsets), negatives, pool, teacher]
        file = self._cache / f"rlhn-{_digest(identity)}.jsonl"
        if not file.is_file():
            rows = rlhn(repo, subsets, negatives, pool, self._say)
            _write(file, self._scored(list(rows), teacher) if teacher else rows)
        return self._without_leaks(Lines(file), repo)

    def _benchmark(self, spec: str) -> Benchmark:
        asked = prepare_benchmark(self._registry, parse_spec(spec), None)
        return load_benchmark(self._registry, asked, (0,))[0]

    @staticmethod
    def _texts(benchmark: Benchmark) -> Iterator[str]:
        yield from (query.text for query in benchmark.queries)
        yield from (passage.text for passage in benchmark.documents)

    def _weights(self, spec: str | None) -> str:
        model = parse_spec(spec).options.get("model") if spec else None
        return identify(str(model)) if model else ""

    @staticmethod
    def _pairs(benchmark: Benchmark) -> list[Example]:
        text_of = {passage.id: passage.text for passage in benchmark.documents}
        return [
            Example(query.text, [text_of[d] for d, grade in judged.items() if grade >= benchmark.relevant], [])
            for query in benchmark.queries
            if (judged := benchmark.judgments[query.id])
        ]

    def _with_negatives(self, benchmark: Benchmark, miner: str, negatives: int, pool: int) -> Iterator[Example]:
        """Golds are never negatives, nor are texts that equal a gold's."""
        rows = self._pairs(benchmark)
        texts = [passage.text for passage in benchmark.documents]
        retriever = self._registry.build(
            "retriever", parse_spec(miner), {"device": "cpu", "dtype": "float32", "seed": 0}
        )
        retriever.load()
        retriever.index([Document(number, text) for number, text in enumerate(texts)])
        most = min(pool + max(len(row.positives) for row in rows), len(texts))
        for row, ranking in zip(rows, retriever.search([row.query for row in rows], most), strict=True):
            found = dict.fromkeys(texts[number] for number in ranking.numbers)
            others = [text for text in found if text not in row.positives][:pool]
            yield Example(row.query, row.positives, spread(others, negatives))

    def _scored(self, rows: Sequence[Example], teacher: str) -> Iterator[Example]:
        """The same with the similarity that a dense model sees between a query and each of its texts."""
        from icr_bench.retrievers.dense import Dense

        model = Dense(model=teacher)  # type: ignore[arg-type]
        model.load()
        for begin in range(0, len(rows), 256):
            some = rows[begin : begin + 256]
            texts = list(dict.fromkeys(text for row in some for text in (*row.positives, *row.negatives)))
            place = {text: number for number, text in enumerate(texts)}
            queries = model.encode([row.query for row in some], "query")
            scores = queries @ model.encode(texts, "document").T
            for row, found in zip(some, scores, strict=True):
                own = [float(found[place[text]]) for text in (*row.positives, *row.negatives)]
                yield Example(row.query, row.positives, row.negatives, own)
            self._say(f"{teacher}: {min(begin + 256, len(rows)):,}/{len(rows):,} queries scored")

    def _without_leaks(self, rows: Sequence[Example], name: str) -> Source:
        """Drop examples of which a query or text is one of a benchmark that is excluded."""
        kept = [number for number in range(len(rows)) if not self._leaks(rows[number])]
        self._say(f"{name}: {len(kept):,} examples, {len(rows) - len(kept):,} left out as they hold an excluded text")
        if not kept:
            raise UsageError(f"source {name}: no example is left")
        return Examples(rows if len(kept) == len(rows) else _Some(rows, kept), self._seed)

    def _leaks(self, row: Example) -> bool:
        if not self._excluded:
            return False
        return any(_folded(text) in self._excluded for text in (row.query, *row.positives, *row.negatives))


class _Some(Sequence[Example]):
    """Some of the rows of another sequence."""

    def __init__(self, rows: Sequence[Example], kept: Sequence[int]) -> None:
        self._rows, self._kept = rows, kept

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, at: Any) -> Any:
        return self._rows[self._kept[at]]


def rlhn(repo: str, subsets: Sequence[str], negatives: int, pool: int, say: Say) -> Iterator[Example]:
    """The examples of RLHN (``query``, ``positive_passages``, ``negative_passages``, ``subset``) in the order of its
    files: of each query the first positive, and negatives evenly over its candidates. Queries without a positive or
    with too few negatives are left out.

    Args:
        repo: hub id of the data set, or a folder with its ``.parquet`` files.
    """
    if find_spec("pyarrow") is None:
        raise MissingExtra("pyarrow", "hub")
    import pyarrow.parquet

    kept = left = 0
    for file in _parquet(repo):
        for group in pyarrow.parquet.ParquetFile(file).iter_batches(256):
            for row in group.to_pylist():
                if row["subset"] not in subsets:
                    continue
                positives = [_passage(p) for p in row["positive_passages"]][:1]
                others = [text for p in row["negative_passages"] if (text := _passage(p)) not in positives]
                others = list(dict.fromkeys(others))[:pool]
                if not positives or len(others) < negatives:
                    left += 1
                    continue
                kept += 1
                yield Example(row["query"], positives, spread(others, negatives))
        say(f"{file}: {kept:,} queries so far, {left:,} left out")


def _parquet(repo: str) -> list[str]:
    if Path(repo).is_dir():
        found = sorted(map(str, Path(repo).rglob("*.parquet")))
    else:
        from huggingface_hub import HfApi, hf_hub_download

        try:
            names = sorted(n for n in HfApi().list_repo_files(repo, repo_type="dataset") if n.endswith(".parquet"))
            found = [hf_hub_download(repo, name, repo_type="dataset") for name in names]
        except Exception as error:  # the hub's client raises many kinds
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                f"source rlhn: {repo} cannot be had from the hub ({reason}); give repo: a folder"
            ) from None
    if not found:
        raise UsageError(f"source rlhn: {repo}: holds no .parquet file")
    return found


def _passage(told: Mapping[str, Any]) -> str:
    return " ".join(part for part in (told.get("title"), told.get("text")) if part)


def spread(ranked: Sequence[str], count: int) -> list[str]:
    """As many of a ranked list, evenly from its first to its last."""
    if len(ranked) <= count:
        return list(ranked)
    return [ranked[int(place)] for place in np.floor(np.arange(count) * len(ranked) / count)]


def _folded(text: str) -> str:
    return hashlib.sha256(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _digest(told: Any) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _write(file: Path, rows: Iterable[Example]) -> None:
    """All rows or no file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as part:
        try:
            for row in rows:
                told: dict[str, Any] = {"query": row.query, "positives": row.positives, "negatives": row.negatives}
                if row.scores is not None:
                    told["scores"] = [round(score, 5) for score in row.scores]
                part.write(json.dumps(told) + "\n")
            part.flush()
            os.fsync(part.fileno())
            os.replace(part.name, file)
        except BaseException:
            os.unlink(part.name)
            raise
