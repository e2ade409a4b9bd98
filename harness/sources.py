"""What the data of a recipe stand for: sources of training batches, and what must not be in them."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from icr_bench.benchmarks.base import Benchmark, Document
from icr_bench.benchmarks.examples import (
    Batch,
    Biographies,
    Example,
    Examples,
    Lines,
    asks_for_held,
    tokenizer_texts,
)
from icr_bench.harness.errors import UsageError, unknown
from icr_bench.harness.prepare import Asked, load_benchmark, prepare_benchmark
from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import parse_spec
from icr_bench.retrievers.base import MissingExtra
from icr_bench.retrievers.weights import digest, identify

if TYPE_CHECKING:
    from icr_bench.retrievers.training.trainer import Source

RLHN = "rlhn/rlhn-680K"
SUBSETS = ("msmarco_passage", "hotpotqa", "fever", "nq", "scidocsrr", "fiqa", "arguana")
"""The paper's training set and the parts of it that are used (facts 4), by the names that its rows have."""

NEGATIVES, POOL = 15, 32
"""Hard negatives of a query, and of how many candidates they are taken, evenly over the ranks (facts 4)."""

PART = 256
"""Examples that a teacher scores together; what is scored is kept part by part."""

ASKS, HOLDS = "ask for an attribute of a LIMIT benchmark", "hold an excluded text"
"""Why an example is left out."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Made:
    """A source with what tells it from any other, and what the model card says of it, as things stand."""

    source: Source
    identity: str
    told: Callable[[], str]


class Data:
    """The sources that recipes name.

    Args:
        cache: folder of what was mined, scored or brought from the hub.
        exclude: benchmarks whose queries and documents no source may give.
        say: told what was found and left out.
        device: where retrievers that mine and teachers run.
    """

    def __init__(
        self,
        seed: int,
        cache: Path,
        exclude: Sequence[str],
        say: Say = lambda text: None,
        device: str = "cpu",
    ) -> None:
        self._seed, self._cache, self._say, self._device = seed, cache, say, device
        self._registry = Registry()
        self._excluded: set[str] = set()
        self._made: dict[str, _Made] = {}
        self._left_out = "queries for attributes of `limit`, of its development form and of the published LIMIT"
        for spec in exclude:
            texts = {_folded(text) for text in self._texts(self._benchmark(self._asked(spec)))}
            self._excluded |= texts
            self._left_out += f"; all that holds a query or document of {_bare(spec)} ({len(texts):,} texts)"
        if exclude:
            say(f"excluded: {len(self._excluded):,} texts of {', '.join(exclude)}")

    def source(self, told: Mapping[str, Any]) -> Source:
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
        name = options.pop("source", "")
        kinds: dict[str, Callable[..., _Made]] = {
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
        self._made[json.dumps(told, sort_keys=True, default=str)] = made
        return made.source

    def held_out(self, queries: int, documents: int) -> Batch:
        """Biographies whose attributes training never sees; the people's names are of the training lists."""
        return Biographies(development=True, seed=0).batch(0, queries, documents)

    def texts(self) -> Iterable[str]:
        return tokenizer_texts()

    def identity(self) -> list[str]:
        """What tells the sources made so far from any others: their examples, or what these are made from."""
        return [made.identity for made in self._made.values()]

    def summary(self) -> list[str]:
        """For the model card: what each source made so far holds and leaves out, and what all of them leave out.

        Of folders and files of this machine it has the last name alone.
        """
        return [*(made.told() for made in self._made.values()), f"left out of all data: {self._left_out}"]

    def _biographies(self, likes: tuple[int, int] = (8, 20), two: float = 0.3, made_up: float = 0.3) -> _Made:
        def excluded(query: str) -> bool:
            return _folded(query) in self._excluded

        source = Biographies(likes=likes, two=two, made_up=made_up, seed=self._seed, excluded=excluded)

        def told() -> str:
            return (
                f"biographies with {likes[0]} to {likes[1]} likes, {two:.0%} of queries with two golds, {made_up:.0%} "
                f"of words made up: new ones in every step; {source.refused:,} attributes refused so far because a "
                f"benchmark holds them"
            )

        return _Made(source, _digest(["biographies", likes, two, made_up, self._seed, sorted(self._excluded)]), told)

    def _given(self, path: str) -> _Made:
        """A file of JSON lines with ``query``, ``positives``, ``negatives`` and, it may be, ``scores``."""
        file = Path(path)
        if not file.is_file():
            raise UsageError(f"source examples: {path}: no such file")
        return self._without_leaks(Lines(file), path, f"examples of {file.name} (sha256 {digest(file)})")

    def _mined(
        self,
        spec: str,
        miner: str | None = None,
        negatives: int = NEGATIVES,
        pool: int = POOL,
        teacher: str | None = None,
    ) -> _Made:
        """The queries of any benchmark with their golds, and negatives that a retriever ranks high."""
        asked = self._asked(spec)
        if asked.spec.name == "limit":
            raise UsageError(
                f"source benchmark: {spec}: limit is for tests, with all its words; train on source: biographies, "
                f"which has its form and other words"
            )
        if asked.spec.name == "packages" and asked.own["split"] != "train":
            raise UsageError(
                f"source benchmark: {spec}: the split {asked.own['split']!r} is for tests; give packages:split=train"
            )
        benchmark = self._benchmark(asked)
        self._say(f"{spec}: {benchmark.source}")
        rows: Sequence[Example] = _pairs(benchmark)
        left = {"have no text": len(benchmark.queries) - len(rows)}
        about = f"benchmark {_bare(spec)}, from {_file_alone(benchmark.source)}"
        if miner is not None or teacher is not None:
            begun = [spec, miner, negatives, pool, self._weights(miner)]
            fingerprint = benchmark.at(len(benchmark.documents)).fingerprint
        if miner is not None:
            about += f", {negatives} negatives of the {pool} best of {_bare(miner)}"
            file = self._cache / f"mined-{_digest([*begun, None, None, fingerprint])}.jsonl"
            if not file.is_file():
                _write(file, map(_line, self._with_negatives(rows, benchmark, miner, negatives, pool)))
            rows = Lines(file)
        if teacher is not None:
            file = self._cache / f"mined-{_digest([*begun, teacher, _identified(teacher), fingerprint])}.jsonl"
            rows = self._scored(file, rows, teacher)
            about += f", scores of {_name_alone(teacher)}"
        return self._without_leaks(rows, spec, about, left)

    def _rlhn(
        self,
        repo: str = RLHN,
        subsets: tuple[str, ...] = SUBSETS,
        negatives: int = NEGATIVES,
        pool: int = POOL,
        teacher: str | None = None,
    ) -> _Made:
        """The paper's training set, from the hub or a local copy of its files."""
        version = _version(repo)
        begun = [version or repo, sorted(subsets), negatives, pool]
        file = self._cache / f"rlhn-{_digest(begun)}.jsonl"
        counted = file.with_suffix(".json")
        if not (file.is_file() and counted.is_file()):
            counts = Counts()
            _write(file, map(_line, rlhn(repo, subsets, negatives, pool, self._say, counts)))
            _write(counted, [json.dumps({"kept": counts.kept, "left": counts.left})])
        told = json.loads(counted.read_text(encoding="utf-8"))
        rows = Lines(file)
        about = f"rlhn {_name_alone(repo)} ({version or 'commit unknown'}), {negatives} negatives of the first {pool}"
        if teacher is not None:
            file = self._cache / f"rlhn-{_digest([*begun, teacher, _identified(teacher)])}.jsonl"
            rows = self._scored(file, rows, teacher)
            about += f", scores of {_name_alone(teacher)}"
        about += f"; {_listed(told['kept'])}"
        return self._without_leaks(rows, repo, about, told["left"])

    def _asked(self, spec: str) -> Asked:
        return prepare_benchmark(self._registry, parse_spec(spec), None)

    def _benchmark(self, asked: Asked) -> Benchmark:
        return load_benchmark(self._registry, asked, (0,))[0]

    @staticmethod
    def _texts(benchmark: Benchmark) -> Iterator[str]:
        yield from (query.text for query in benchmark.queries)
        yield from (passage.text for passage in benchmark.documents)

    def _weights(self, spec: str | None) -> str:
        """What identifies the models of a retriever and of those that it is made of."""
        within = self._registry.within(parse_spec(spec)) if spec else []
        return "+".join(_identified(str(one.options["model"])) for _, one in within if one.options.get("model"))

    def _with_negatives(
        self, rows: Sequence[Example], benchmark: Benchmark, miner: str, negatives: int, pool: int
    ) -> Iterator[Example]:
        """Golds are never negatives, nor are texts that equal a gold's."""
        texts = [passage.text for passage in benchmark.documents]
        retriever = self._registry.build(
            "retriever", parse_spec(miner), {"device": self._device, "dtype": "float32", "seed": 0}
        )
        retriever.load()
        retriever.index([Document(number, text) for number, text in enumerate(texts)])
        most = min(pool + max((len(row.positives) for row in rows), default=0), len(texts))
        for row, ranking in zip(rows, retriever.search([row.query for row in rows], most), strict=True):
            found = dict.fromkeys(texts[number] for number in ranking.numbers)
            others = [text for text in found if text not in row.positives and text.strip()][:pool]
            yield Example(row.query, row.positives, spread(others, negatives))

    def _scored(self, file: Path, rows: Sequence[Example], teacher: str) -> Lines:
        """The same with the similarity that a dense model sees between a query and each of its texts.

        What an interrupted scoring has done lies beside the file, and the next goes on from there.
        """
        if file.is_file():
            return Lines(file)
        part = file.with_suffix(".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("a+b") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # other processes of the training wait here, and find the file
            if file.is_file():
                part.unlink(missing_ok=True)
            else:
                self._score(held, rows, teacher)
                os.fsync(held.fileno())
                os.replace(part, file)
        return Lines(file)

    def _score(self, held: IO[bytes], rows: Sequence[Example], teacher: str) -> None:
        from icr_bench.retrievers.dense import Dense

        done = _whole_parts(held)
        if done:
            self._say(f"{teacher}: {done:,}/{len(rows):,} queries scored before")
        model = Dense(model=teacher, device=self._device)  # type: ignore[arg-type]
        model.load()
        for begin in range(done, len(rows), PART):
            some = rows[begin : begin + PART]
            texts = list(dict.fromkeys(text for row in some for text in (*row.positives, *row.negatives)))
            place = {text: number for number, text in enumerate(texts)}
            queries = model.encode([row.query for row in some], "query")
            scores = queries @ model.encode(texts, "document").T
            for row, found in zip(some, scores, strict=True):
                own = [float(found[place[text]]) for text in (*row.positives, *row.negatives)]
                held.write(f"{_line(Example(row.query, row.positives, row.negatives, own))}\n".encode())
            held.flush()
            self._say(f"{teacher}: {min(begin + PART, len(rows)):,}/{len(rows):,} queries scored")

    def _without_leaks(
        self, rows: Sequence[Example], name: str, about: str, left: Mapping[str, int] | None = None
    ) -> _Made:
        """Drop examples that ask what a test asks, or of which a query or text is one of a benchmark that is excluded.

        Args:
            about: what the rows are, for the model card.
            left: how many were left out before, by reason.
        """
        kept: list[int] = []
        reasons, content = Counter(left or {}), hashlib.sha256()
        for number, row in enumerate(rows):
            if reason := self._leak(row):
                reasons[reason] += 1
            else:
                kept.append(number)
                content.update(_line(row).encode())
        told = f"{len(kept):,} examples, {reasons.total():,} left out"
        if +reasons:
            told += f": {', '.join(f'{count:,} {reason}' for reason, count in (+reasons).items())}"
        self._say(f"{name}: {told}")
        if not kept:
            raise UsageError(f"source {name}: no example is left ({told})")
        source = Examples(rows if len(kept) == len(rows) else _Some(rows, kept), self._seed)
        return _Made(source, content.hexdigest()[:16], lambda: f"{about}: {told}")

    def _leak(self, row: Example) -> str | None:
        if asks_for_held(row.query):
            return ASKS
        if self._excluded and any(_folded(t) in self._excluded for t in (row.query, *row.positives, *row.negatives)):
            return HOLDS
        return None


class _Some(Sequence[Example]):
    """Some of the rows of another sequence."""

    def __init__(self, rows: Sequence[Example], kept: Sequence[int]) -> None:
        self._rows, self._kept = rows, kept

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, at: Any) -> Any:
        return self._rows[self._kept[at]]


@dataclass
class Counts:
    """What was found in RLHN: queries kept by subset, and left out by reason."""

    kept: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)


def rlhn(
    repo: str, subsets: Sequence[str], negatives: int, pool: int, say: Say, counts: Counts | None = None
) -> Iterator[Example]:
    """The examples of RLHN (``query``, ``positive_passages``, ``negative_passages``, ``subset``) in the order of its
    files: of each query the first positive, and negatives evenly over its candidates, none of which equals any of the
    positives. Queries without a positive or with too few negatives are left out.

    Args:
        repo: hub id of the data set, or a folder with its ``.parquet`` files.
        counts: is told what is kept and left out.

    Raises:
        UsageError: a subset of which nothing is kept.
    """
    if find_spec("pyarrow") is None:
        raise MissingExtra("pyarrow", "hub")
    import pyarrow.parquet

    counts = counts or Counts()
    kept, left, seen = counts.kept, counts.left, Counter[str]()
    for file in _parquet(repo):
        for group in pyarrow.parquet.ParquetFile(file).iter_batches(256):
            for row in group.to_pylist():
                seen[row["subset"]] += 1
                if row["subset"] not in subsets:
                    continue
                positives = [text for p in row["positive_passages"] if (text := _passage(p)).strip()]
                others = [text for p in row["negative_passages"] if (text := _passage(p)).strip()]
                others = list(dict.fromkeys(text for text in others if text not in positives))[:pool]
                if not positives or not row["query"].strip():
                    left["have no positive or no text"] += 1
                elif len(others) < negatives:
                    left[f"have fewer than {negatives} negatives"] += 1
                else:
                    kept[row["subset"]] += 1
                    yield Example(row["query"], positives[:1], spread(others, negatives))
        say(f"{file}: {kept.total():,} queries so far, {left.total():,} left out")
    say(f"{repo}: kept {_listed(kept)}")
    if missing := [name for name in subsets if not kept[name]]:
        raise UsageError(
            f"source rlhn: {repo}: nothing to train on in the subsets {', '.join(missing)}; it holds {_listed(seen)} "
            f"rows; give subsets: of these"
        )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _version(repo: str) -> str:
    """What tells a data set's files from any others: a digest of local ones, or the hub's commit; empty where neither
    the hub nor its cache knows it."""
    if Path(repo).is_dir():
        files = [Path(file) for file in _parquet(repo)]
        return f"sha256:{_digest([(file.relative_to(repo).as_posix(), digest(file)) for file in files])}"
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    try:
        return f"hub:{HfApi().dataset_info(repo).sha}"
    except Exception:  # the hub's client raises many kinds
        cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="dataset") / "refs" / "main"
        return f"hub:{cached.read_text().strip()}" if cached.is_file() else ""


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


def _pairs(benchmark: Benchmark) -> list[Example]:
    """Queries with their golds, where neither is without text."""
    text_of = {passage.id: passage.text for passage in benchmark.documents if passage.text.strip()}
    return [
        Example(query.text, golds, [])
        for query in benchmark.queries
        if query.text.strip()
        and (
            golds := [
                text_of[document]
                for document, grade in benchmark.judgments[query.id].items()
                if grade >= benchmark.relevant and document in text_of
            ]
        )
    ]


def _identified(model: str) -> str:
    try:
        return identify(model)
    except OSError as error:
        raise UsageError(str(error)) from None


def _bare(spec: str) -> str:
    """A spec without the folders that its files lie in."""
    return re.sub(r"""(?<==)[\s"']*[/~][^,+"']*""", lambda found: Path(found[0].strip("\"' ")).name, spec)


def _name_alone(name: str) -> str:
    """A hub id as it is, a file or folder without those above it."""
    return Path(name).name if Path(name).exists() or name.startswith(("/", "~")) else name


def _file_alone(source: str) -> str:
    """What a benchmark says of its judgments, without the folders that its file lies in."""
    file, about, rest = source.partition(" (sha256 ")
    return Path(file).name + about + rest


def _folded(text: str) -> str:
    return hashlib.sha256(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _digest(told: Any) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _line(row: Example) -> str:
    told: dict[str, Any] = {"query": row.query, "positives": row.positives, "negatives": row.negatives}
    if row.scores is not None:
        told["scores"] = [round(score, 5) for score in row.scores]
    return json.dumps(told)


def _write(file: Path, lines: Iterable[str]) -> None:
    """All lines or no file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".new", delete=False, encoding="utf-8") as part:
        try:
            part.writelines(f"{line}\n" for line in lines)
            part.flush()
            os.fsync(part.fileno())
            os.replace(part.name, file)
        except BaseException:
            os.unlink(part.name)
            raise


def _whole_parts(held: IO[bytes]) -> int:
    """Cut a file of lines after its last whole part, and return how many lines are left: parts are scored as a whole,
    so that the scores are those of a run that nothing interrupted."""
    ends = [0]
    held.seek(0)
    for line in held:
        if not line.endswith(b"\n"):
            break
        ends.append(ends[-1] + len(line))
    done = (len(ends) - 1) // PART * PART
    held.truncate(ends[done])
    return done
