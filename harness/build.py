"""``icr-bench build``: the papers' evaluation corpora from their source, in BEIR layout, with a manifest."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import random
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from heapq import heappush, heapreplace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from icr_bench.benchmarks.base import DataError
from icr_bench.harness.download import Fetched, NotReachable, digest, fetch, hub_file, hub_files
from icr_bench.harness.errors import UsageError, unknown
from icr_bench.harness.folder import write
from icr_bench.harness.mine import Bm25Scorer, DenseScorer, Row, Scorer, chunks, mine
from icr_bench.harness.prepare import place
from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import parse_spec
from icr_bench.retrievers.base import MissingExtra
from icr_bench.retrievers.weights import identify

ZIPS = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
"""BEIR's archives (Thakur et al., 2021)."""

SPARE = 32
"""Documents mined beyond the negatives asked for, since some are golds or equal to one."""


@dataclass(frozen=True)
class Recipe:
    """Where a benchmark comes from, and the paper's setting of it."""

    repo: str
    split: str
    qrels_repo: str = ""  # of a BEIR set, whose judgments lie apart
    md5: str = ""  # of BEIR's archive
    folder: str = ""  # within the repository
    documents: int | None = None  # of the corpus made; all where None
    queries: int | None = None
    negatives: int = 0


RECIPES: Mapping[str, Recipe] = {
    "msmarco": Recipe(
        "BeIR/msmarco", "dev", "BeIR/msmarco-qrels", "444067daf65d982533ea17ebd59501e4", "", 10_000, 400, 24
    ),
    "hotpotqa": Recipe(
        "BeIR/hotpotqa", "test", "BeIR/hotpotqa-qrels", "f412724f78b0d91183a0e86805e16114", "", 10_000, 400, 24
    ),
    "nq": Recipe("BeIR/nq", "test", "BeIR/nq-qrels", "d4d3d2e48787a744b6f6e691ff534307", "", 8_607, 400, 24),
    "limit": Recipe("orionweller/LIMIT", "test"),
    "limit-small": Recipe("orionweller/LIMIT-small", "test"),
    "obliq-math": Recipe("dianetc/OBLIQ-Bench", "test", folder="analogues/math"),
    "obliq-writing": Recipe("dianetc/OBLIQ-Bench", "test", folder="analogues/writing", documents=4_000),
    "obliq-twitter": Recipe("dianetc/OBLIQ-Bench", "test", folder="descriptive/twitter", documents=10_000),
}
"""Name -> source. Sizes, queries and negatives are BlockSearch's (section 3.3; appendix of v1 for OBLIQ); NQ's corpus
ends at 8,607 documents, HotpotQA keeps both golds of a question."""


@dataclass(frozen=True)
class Wish:
    """What is asked for; None for the recipe's own."""

    name: str
    source: str = "hub"  # hub, zip, or a folder in BEIR layout
    miner: str = "bm25"  # a spec of bm25 or dense, or a file of given negatives
    split: str | None = None
    queries: int | None = None
    negatives: int | None = None
    documents: int | None = None
    revision: str | None = None
    seed: int = 0


@dataclass
class Found:
    """The files of a benchmark's source."""

    corpus: list[Callable[[], Iterator[Row]]]
    queries: dict[str, str]
    judgments: dict[str, dict[str, int]]
    files: dict[str, str] = field(default_factory=dict)  # name -> SHA-256
    revision: str | None = None
    excluded: dict[str, list[str]] = field(default_factory=dict)  # query -> documents that are not to be returned

    def rows(self) -> Iterator[Row]:
        for part in self.corpus:
            yield from part()

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(sorted(self.files.items())).encode()).hexdigest()[:16]


Bar = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
Say = Callable[[str], None]


def build(wish: Wish, out: Path, cache: Path, device: str = "auto") -> dict[str, Any]:
    """Write a benchmark in BEIR layout; returns its manifest, which lies beside it.

    Raises:
        UsageError: an unknown name, a source that cannot be had, a folder that is not empty.
        DataError: files that are not what they should be.
    """
    if wish.name not in RECIPES:
        raise unknown("benchmark to build", wish.name, RECIPES)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: is not empty; choose another folder with -o")
    recipe = RECIPES[wish.name]
    console = Console(stderr=True, soft_wrap=True, highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False)

    split = wish.split or recipe.split
    try:
        found = _find(wish, recipe, split, cache, say)
    except NotReachable as error:
        raise UsageError(
            f"{error}; where {wish.name} lies in BEIR layout already, give --source FOLDER, and without a network "
            "icr-bench run makes limit itself"
        ) from None
    queries = _choose(found, wish.queries or recipe.queries, wish.seed)
    documents, told = _assemble(wish, recipe, found, queries, cache, device, lambda w, n: _bar(console, w, n), say)
    return _write(out, wish, split, found, queries, documents, told)


# Sources


def _find(wish: Wish, recipe: Recipe, split: str, cache: Path, say: Say) -> Found:
    if wish.source == "hub":
        return _of_hub(recipe, split, wish.revision, say)
    if wish.source == "zip":
        if not recipe.md5:
            raise UsageError(f"{wish.name} has no archive of BEIR; take --source hub, or a folder")
        file = fetch(f"{ZIPS}/{wish.name}.zip", cache / f"{wish.name}.zip", md5=recipe.md5, say=say)
        return _of_zip(file, split)
    folder = Path(wish.source)
    if not folder.is_dir():
        raise UsageError(f"--source {wish.source}: expected hub, zip or a folder in BEIR layout")
    return _of_folder(folder, split)


def _of_folder(folder: Path, split: str) -> Found:
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    kept = _sort_out(names, split, str(folder))
    files = {name: Fetched(folder / name, digest(folder / name)) for part in kept.values() for name in part}
    return _read(kept, files, split, str(folder))


def _of_hub(recipe: Recipe, split: str, revision: str | None, say: Say) -> Found:
    sha, listed = hub_files(recipe.repo, revision)
    inside = {name: told for name, told in listed.items() if name.startswith(recipe.folder)}
    kept = _sort_out([*inside], split, recipe.repo, judged=not recipe.qrels_repo)
    files = {name: hub_file(recipe.repo, name, sha, inside[name], say) for part in kept.values() for name in part}
    if recipe.qrels_repo:
        sha_of_qrels, listed = hub_files(recipe.qrels_repo, None)
        name = next((n for n in (f"{split}.tsv", f"{split}.jsonl", f"qrels/{split}.tsv") if n in listed), None)
        if name is None:
            raise UsageError(f"{recipe.qrels_repo}: no judgments of the split {split!r}; files: {', '.join(listed)}")
        kept["judgments"] = [name]
        files[name] = hub_file(recipe.qrels_repo, name, sha_of_qrels, listed[name], say)
        sha = f"{sha}, judgments {sha_of_qrels}"
    found = _read(kept, files, split, recipe.repo)
    found.revision = sha
    return found


def _of_zip(file: Fetched, split: str) -> Found:
    try:
        archive = zipfile.ZipFile(file.path)
        names = [name for name in archive.namelist() if not name.endswith("/")]
        kept = _sort_out(names, split, str(file.path))
        return _read(kept, {name: Fetched(file.path, file.sha256) for name in names}, split, str(file.path), archive)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{file.path}: not a zip archive: {error}") from None


def _sort_out(names: Sequence[str], split: str, where: str, *, judged: bool = True) -> dict[str, list[str]]:
    """Which files hold what."""
    found: dict[str, list[str]] = {"corpus": [], "queries": [], "judgments": [], "excluded": []}
    for name in sorted(names):
        path = PurePosixPath(name)
        base = path.name.removesuffix(".gz")
        kind = next((kind for kind in ("corpus", "queries") if base.startswith(kind) or path.parent.name == kind), None)
        if base in ("per_query_excluded_ids.json", "excluded_ids.json"):
            found["excluded"].append(name)
        elif base in ("qrels.tsv", "qrels.jsonl") or (
            path.parent.name == "qrels" and path.name.partition(".")[0] == split
        ):
            found["judgments"].append(name)
        elif kind and base.endswith((".jsonl", ".parquet")):
            found[kind].append(name)
    for kind in ("corpus", "queries", *(["judgments"] if judged else [])):
        plain = [name for name in found[kind] if not name.endswith(".parquet")]
        found[kind] = plain or found[kind]  # a copy as parquet beside the lines is one too many
        if not found[kind]:
            raise DataError(f"{where}: no file of its {kind}" + (f", split {split!r}" if kind == "judgments" else ""))
    return found


def _read(
    kept: Mapping[str, Sequence[str]],
    files: Mapping[str, Fetched],
    split: str,
    where: str,
    archive: zipfile.ZipFile | None = None,
) -> Found:
    def rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        return _objects(name, files[name].path, archive)

    def corpus(name: str) -> Callable[[], Iterator[Row]]:
        return lambda: (_row(place, told) for place, told in rows(name))

    queries = {row.id: row.text for name in kept["queries"] for row in corpus(name)()}
    judgments: dict[str, dict[str, int]] = {}
    for name in kept["judgments"]:
        for at, told in rows(name):
            try:
                query, document, grade = str(told["query-id"]), str(told["corpus-id"]), int(told["score"])
            except (KeyError, ValueError, TypeError) as error:
                raise DataError(f"{at}: expected query-id, corpus-id and a whole score ({error})") from None
            judgments.setdefault(query, {})[document] = grade
    found = Found([corpus(name) for name in kept["corpus"]], queries, judgments)
    found.files = {name: files[name].sha256 for part in kept.values() for name in part}
    for name in kept["excluded"]:
        with _opened(files[name].path, name, archive) as stream:
            found.excluded = {str(q): [str(d) for d in own] for q, own in json.load(stream).items()}
    if not judgments:
        raise DataError(f"{where}: holds no judgments of the split {split!r}")
    return found


def _row(place: str, told: Mapping[str, Any]) -> Row:
    identity, text, title = told.get("_id"), told.get("text"), told.get("title")
    if not isinstance(identity, (str, int)) or not isinstance(text, str) or identity == "":
        raise DataError(f"{place}: expected '_id' and 'text', got {str(told)[:80]}")
    return Row(str(identity), f"{title} {text}" if title else text)


@contextmanager
def _opened(path: Path, name: str, archive: zipfile.ZipFile | None) -> Iterator[IO[bytes]]:
    with archive.open(name) if archive else path.open("rb") as raw:
        if name.endswith(".gz"):
            with gzip.open(raw) as stream:
                yield stream  # type: ignore[misc]
        else:
            yield raw


def _objects(name: str, path: Path, archive: zipfile.ZipFile | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file, each with its place."""
    shown = f"{path}/{name}" if archive else str(path)
    if name.endswith(".parquet"):
        if find_spec("pyarrow") is None:
            raise MissingExtra("pyarrow", "hub")
        import pyarrow.parquet

        with _opened(path, name, archive) as stream:
            file = pyarrow.parquet.ParquetFile(io.BytesIO(stream.read()) if archive else str(path))
            number = 0
            for part in file.iter_batches(4_096):
                for row in part.to_pylist():
                    number += 1
                    yield f"{shown}:{number}", row
        return
    number = 0
    try:
        with _opened(path, name, archive) as stream:
            if ".tsv" in name:
                lines = io.TextIOWrapper(stream, encoding="utf-8", newline="")
                for number, told in enumerate(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), 2):
                    yield f"{shown}:{number}", told
                return
            for number, line in enumerate(stream, 1):
                if not line.isspace():
                    told = json.loads(line)
                    if not isinstance(told, dict):
                        raise ValueError(f"expected a JSON object, got {type(told).__name__}")
                    yield f"{shown}:{number}", told
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        at = f":{number}" if number else ""
        raise DataError(f"{shown}{at}: cannot be read: {error}") from None


# What stays


def _choose(found: Found, count: int | None, seed: int) -> list[str]:
    """Queries with a gold, of which as many as asked are drawn."""
    judged = sorted(q for q, own in found.judgments.items() if q in found.queries and any(g >= 1 for g in own.values()))
    if not judged:
        raise DataError("no query has a gold")
    if count is None or count >= len(judged):
        return judged
    return sorted(random.Random(f"icr-bench queries {seed}").sample(judged, count))


def _golds(found: Found, queries: Sequence[str]) -> dict[str, list[str]]:
    return {query: sorted(d for d, grade in found.judgments[query].items() if grade >= 1) for query in queries}


def _assemble(
    wish: Wish,
    recipe: Recipe,
    found: Found,
    queries: Sequence[str],
    cache: Path,
    device: str,
    bar: Bar,
    say: Say,
) -> tuple[list[Row], dict[str, Any]]:
    """The documents that the corpus is made of, and how they were chosen."""
    golds = _golds(found, queries)
    needed = {document for own in golds.values() for document in own}
    needed |= {document for query in queries for document in found.excluded.get(query, ())}
    negatives = recipe.negatives if wish.negatives is None else wish.negatives
    most = wish.documents or recipe.documents
    texts = [found.queries[query] for query in queries]
    miner = _miner(wish.miner, texts, device) if negatives else None
    held, spare, count = _first_pass(found, needed, most, wish.seed, miner, bar)
    if missing := sorted(needed - held.keys()):
        raise DataError(f"{len(missing)} documents that are judged are not in the corpus, such as {missing[0]!r}")
    chosen, kept = dict(held), dict[str, int]()
    equal = {row.text for row in held.values()}
    if miner:
        mined = miner.negatives(found, golds, equal, cache, wish, count, bar)
        for rank in range(negatives):  # by rank, so that a corpus that is full has the hardest of every query
            for query, ranked in mined.items():
                if rank < len(ranked) and (most is None or len(chosen) < most or ranked[rank].id in chosen):
                    chosen[ranked[rank].id] = ranked[rank]
                    kept[query] = kept.get(query, 0) + 1
    union = len(chosen)
    for row in spare:
        if most is not None and len(chosen) >= most:
            break
        if row.text not in equal:
            chosen.setdefault(row.id, row)
    if most is None and not negatives:
        chosen = {row.id: row for row in found.rows()}
        union = len(chosen)
    told = {
        "documents_of_the_source": count,
        "golds": sum(map(len, golds.values())),
        "negatives_asked": negatives,
        "negatives_kept": {"least": min(kept.values(), default=0), "most": max(kept.values(), default=0)},
        "union": union,
        "drawn_at_random": len(chosen) - union,
        "miner": miner.identity if miner else None,
        "rule": "all golds; negatives rank by rank until the corpus is full; then documents drawn at random",
    }
    say(
        f"{wish.name}: {len(queries):,} queries, {told['golds']:,} golds, {union:,} documents with their negatives, "
        f"{told['drawn_at_random']:,} drawn at random"
    )
    return list(chosen.values()), told


def _first_pass(
    found: Found, needed: set[str], most: int | None, seed: int, miner: _Miner | None, bar: Bar
) -> tuple[dict[str, Row], list[Row], int]:
    """The texts of the documents that are needed, others drawn at random in the order in which they are taken, and how
    many there are; the miner counts what it has to."""
    held: dict[str, Row] = {}
    heap: list[tuple[int, Row]] = []  # those of the smallest keys, the largest first
    count, size = 0, 2 * (most or 0)
    with bar("reading", None) as advance:
        for part in chunks(found.rows()):
            count += len(part)
            if miner:
                miner.count([row.text for row in part])
            for row in part:
                if row.id in needed:
                    held[row.id] = row
                elif size:
                    key = -int.from_bytes(hashlib.sha256(f"icr-bench {seed} {row.id}".encode()).digest()[:8])
                    if len(heap) < size:
                        heappush(heap, (key, row))
                    elif key > heap[0][0]:
                        heapreplace(heap, (key, row))
            advance(len(part))
    return held, [row for _, row in sorted(heap, reverse=True)], count


class _Miner:
    """Where negatives come from.

    Args:
        scorer: None where they are given.
    """

    def __init__(self, identity: str, queries: int, scorer: Scorer | None, given: Mapping[str, list[str]]) -> None:
        self.identity, self._queries, self._scorer, self._given = identity, queries, scorer, given

    def count(self, texts: Sequence[str]) -> None:
        if self._scorer:
            self._scorer.count(texts)

    def negatives(
        self,
        found: Found,
        golds: Mapping[str, Sequence[str]],
        equal: set[str],
        cache: Path,
        wish: Wish,
        count: int,
        bar: Bar,
    ) -> dict[str, list[Row]]:
        """Of every query what ranks highest and is neither a gold of any query nor equal to one, best first."""
        never = {document for own in golds.values() for document in own}
        ranked = self._ranked(found, golds, cache, wish, count, bar)
        return {
            query: [row for row in own if row.id not in never and row.text not in equal]
            for query, own in ranked.items()
        }

    def _ranked(
        self, found: Found, golds: Mapping[str, Sequence[str]], cache: Path, wish: Wish, count: int, bar: Bar
    ) -> dict[str, list[Row]]:
        if self._scorer is None:
            wanted = {document for query in golds for document in self._given.get(query, ())}
            with bar("reading", count) as advance:
                held = dict[str, Row]()
                for part in chunks(found.rows()):
                    held |= {row.id: row for row in part if row.id in wanted}
                    advance(len(part))
            return {query: [held[d] for d in self._given.get(query, ()) if d in held] for query in golds}
        depth = min((wish.negatives or RECIPES[wish.name].negatives) + max(map(len, golds.values())) + SPARE, count)
        key = [found.fingerprint, self.identity, depth, sorted((q, found.queries[q]) for q in golds)]
        name = f"mined-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
        file = cache / f"{name}.json"
        if not file.is_file():
            cache.mkdir(parents=True, exist_ok=True)
            with bar("mining", count) as advance:
                best = mine(found.rows(), self._scorer, self._queries, depth, cache / f"{name}.state", advance)
            write(file, json.dumps(best))
        told = json.loads(file.read_text(encoding="utf-8"))
        return {query: [Row(*row) for row in own] for query, own in zip(golds, told, strict=True)}


def _miner(text: str, queries: Sequence[str], device: str) -> _Miner:
    if Path(text).is_file():
        return _Miner(f"given, sha256 {digest(Path(text))}", len(queries), None, _given(Path(text)))
    spec, registry = parse_spec(text), Registry()
    filled = dict(zip(("device", "dtype"), place(device, "auto"), strict=True)) | {"seed": 0}
    try:
        retriever = registry.build("retriever", spec, filled)
    except ValueError as error:
        raise UsageError(f"--miner {text}: {error}") from None
    from icr_bench.retrievers.bm25 import BM25
    from icr_bench.retrievers.dense import Dense

    if not isinstance(retriever, (BM25, Dense)) or spec.options.get("backend", "bm25s") != "bm25s":
        raise UsageError(
            f"--miner {text}: expected bm25, a dense model such as dense:model=..., or a file of negatives"
        )
    retriever.load()
    settings = json.dumps([spec.name, registry.resolve("retriever", spec), retriever.settings()], default=str)
    if isinstance(retriever, BM25):
        options = registry.resolve("retriever", spec)
        scorer = Bm25Scorer(queries, retriever.analyse, options["k1"], options["b"])
        return _Miner(settings, len(queries), scorer, {})
    weights = identify(str(spec.options.get("model", "dense-tiny")))
    return _Miner(f"{settings} {weights}", len(queries), DenseScorer(queries, retriever.encode), {})


def _given(file: Path) -> dict[str, list[str]]:
    """JSON lines with ``query`` and ``documents``, ids both, the hardest first."""
    found = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            told = json.loads(line)
            found[str(told["query"])] = [str(document) for document in told["documents"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}:{number}: expected query and documents ({error})") from None
    return found


# Output


def _write(
    out: Path,
    wish: Wish,
    split: str,
    found: Found,
    queries: Sequence[str],
    documents: Sequence[Row],
    told: Mapping[str, Any],
) -> dict[str, Any]:
    """The folder, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        renamed = _own_passages(found, queries)
        present = {row.id for row in documents}
        (work / "qrels").mkdir()
        _lines(work / "corpus.jsonl", ({"_id": row.id, "text": row.text} for row in sorted(documents)))
        _lines(work / "queries.jsonl", ({"_id": renamed[q], "text": found.queries[q]} for q in queries))
        judged = [
            f"{renamed[q]}\t{d}\t{grade}\n"
            for q in queries
            for d, grade in sorted(found.judgments[q].items())
            if d in present
        ]
        (work / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged), encoding="utf-8")
        files = ("corpus.jsonl", "queries.jsonl", f"qrels/{split}.tsv")
        manifest = {
            "icr-bench": version("icr-bench"),
            "asked": asdict(wish),
            "split": split,
            "revision": found.revision,
            "source_files": found.files,
            "queries": len(queries),
            "documents": len(documents),
            **told,
            "exclude_self": any(renamed[q] != q for q in queries),
            "files": {name: digest(work / name) for name in files},
        }
        (work / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()
        work.replace(out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return manifest


def _own_passages(found: Found, queries: Sequence[str]) -> dict[str, str]:
    """Query ids as they are written: where a query's own passage must not be returned, the passage's id, so that
    ``exclude_self`` leaves it out."""
    renamed = {}
    for query in queries:
        own = [d for d in found.excluded.get(query, ()) if d not in found.judgments[query]]
        if len(own) > 1:
            raise DataError(f"query {query!r} excludes {len(own)} documents; only one, its own passage, can be")
        renamed[query] = own[0] if own else query
    if len(set(renamed.values())) < len(renamed):
        raise DataError("two queries exclude the same document, so that they cannot be told apart by it")
    return renamed


def _lines(file: Path, rows: Iterator[dict[str, str]]) -> None:
    with file.open("w", encoding="utf-8", newline="\n") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


@contextmanager
def _bar(console: Console, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
