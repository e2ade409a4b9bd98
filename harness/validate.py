"""The contract of `Retriever`, as checks that anyone can run on any retriever."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from icr_bench.harness.metrics import canonical
from icr_bench.retrievers.base import BadRanking, Document, MissingExtra, Ranking, Retriever, check_rankings

TEXTS = [
    "Ada Brown likes Quokkas, River Otters and Candle Making.",
    "The quick brown fox jumps over the lazy dog.",
    "Ωmega and naïve café: 日本語のテキスト, emoji 🙂, number 42.",
    "",
    "The quick brown fox jumps over the lazy dog.",
    "Paris is the capital of France, Bern the seat of Switzerland's government.",
    "?",
]
QUERIES = ["who likes River Otters", "capital of France", "", "日本語 🙂", "the\x00 of\nand\ttab"]
LONG = "word " * 600
"""Longer than many a model reads; asked once, since it costs as much as all the rest."""

TOLERANCE = 1e-3
"""Relative difference allowed between scores of the same query alone and in a batch."""

HALF_TOLERANCE = 1e-2
"""The same in bfloat16 and float16, where a processor rounds products of few rows and of many differently."""


@dataclass(frozen=True)
class Result:
    """One check: what must hold, and what went wrong (empty if it holds)."""

    name: str
    problem: str

    @property
    def ok(self) -> bool:
        return not self.problem


def validate(make: Callable[[], Retriever]) -> list[Result]:
    """Run every check on a retriever from ``make``; only the first if it cannot be made and loaded."""
    try:
        retriever = make()
        retriever.load()
    except MissingExtra:
        raise
    except (Exception, SystemExit) as error:
        return [Result("is made from its options and loads", _why(error))]
    results = [Result("is made from its options and loads", "")]
    for check in CHECKS:
        try:
            check(retriever)
            problem = ""
        except Exception as error:  # a plug-in may raise anything; its author is to see it
            problem = _why(error)
        results.append(Result((check.__doc__ or "").strip().rstrip("."), problem))
    return results


def _why(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, (AssertionError, BadRanking)) else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {error}{place}" if place else str(error)


def _tolerance(retriever: Retriever) -> float:
    """By what the retriever, or a part of it, says that it computes in."""
    half = re.search(r"'dtype': 'b?float16'", repr(retriever.settings()))
    return HALF_TOLERANCE if half else TOLERANCE


def _corpus(texts: Sequence[str]) -> list[Document]:
    return [Document(number, text) for number, text in enumerate(texts)]


def _ask(retriever: Retriever, queries: Sequence[str], k: int, n: int) -> list[Ranking]:
    return check_rankings(retriever.search(queries, k), len(queries), n, k)


def _expect(holds: bool, got: object, expected: str) -> None:
    if not holds:
        raise AssertionError(f"got {got}, expected {expected}")


def search_is_sound(retriever: Retriever) -> None:
    """search gives one ranking a query: known numbers, none twice, at most k, finite scores, for k = 1 to N."""
    texts = [*TEXTS, LONG]
    retriever.index(_corpus(texts))
    for k in (1, 2, len(texts)):
        _ask(retriever, [*QUERIES, LONG] if k == 1 else QUERIES, k, len(texts))


def no_queries(retriever: Retriever) -> None:
    """search of no queries gives no rankings."""
    retriever.index(_corpus(TEXTS))
    rankings = retriever.search([], 1)
    _expect(rankings == [], rankings, "[]")


def one_document(retriever: Retriever) -> None:
    """a corpus of one document works, even one without text."""
    for text in (TEXTS[0], ""):
        retriever.index(_corpus([text]))
        _ask(retriever, QUERIES, 1, 1)


def repeats(retriever: Retriever) -> None:
    """the same search twice gives the same rankings and scores."""
    retriever.index(_corpus(TEXTS))
    first, second = (_ask(retriever, QUERIES, len(TEXTS), len(TEXTS)) for _ in range(2))
    for query, one, other in zip(QUERIES, first, second, strict=True):
        _expect(one == other, f"{other} after {one} for {query!r}", "equal rankings")


def batches(retriever: Retriever) -> None:
    """a query gets the same scores alone as among others."""
    retriever.index(_corpus(TEXTS))
    n = len(TEXTS)
    for query, batched in zip(QUERIES, _ask(retriever, QUERIES, n, n), strict=True):
        alone = _ask(retriever, [query], n, n)[0]
        one, other = (dict(zip(r.numbers, r.scores, strict=True)) for r in (alone, batched))
        bound = _tolerance(retriever) * max([1.0, *map(abs, one.values())])
        close = one.keys() == other.keys() and all(abs(one[d] - other[d]) <= bound for d in one)
        _expect(close, f"{other} in a batch but {one} alone for {query!r}", "the same documents and scores")


def prefix(retriever: Retriever) -> None:
    """a smaller k gives the head of a larger one, up to ties."""
    retriever.index(_corpus(TEXTS))
    n = len(TEXTS)
    for query, few, many in zip(QUERIES, _ask(retriever, QUERIES, 2, n), _ask(retriever, QUERIES, n, n), strict=True):
        best = [many.scores[p] for p in canonical(many.numbers, many.scores)][: len(few.scores)]
        got = sorted(few.scores, reverse=True)
        close = all(abs(a - b) <= _tolerance(retriever) * max(1.0, abs(a)) for a, b in zip(best, got, strict=True))
        _expect(close, f"scores {got} for k=2 but {best} at the head of k={n} for {query!r}", "the same")


def reindexing(retriever: Retriever) -> None:
    """index replaces an earlier corpus."""
    retriever.index(_corpus(TEXTS))
    retriever.index(_corpus(TEXTS[:2]))
    _ask(retriever, QUERIES, 2, 2)


def documents_are_left_alone(retriever: Retriever) -> None:
    """index leaves the list of documents as it was."""
    documents = _corpus(TEXTS)
    retriever.index(documents)
    _expect(documents == _corpus(TEXTS), documents, "the documents given")


def bytes_are_counted(retriever: Retriever) -> None:
    """index_bytes is a whole number above 0 and grows with the corpus."""
    sizes = []
    for count in (2, 40):
        retriever.index(_corpus([f"document {i} is about topic{i}" for i in range(count)]))
        sizes.append(retriever.index_bytes())
    _expect(all(isinstance(size, int) and size > 0 for size in sizes), sizes, "integers above 0")
    _expect(sizes[1] > sizes[0], f"{sizes[1]} bytes for 40 documents after {sizes[0]} for 2", "more")


def settings_are_json(retriever: Retriever) -> None:
    """settings is a dict that JSON can hold."""
    settings: Any = retriever.settings()
    _expect(isinstance(settings, dict), type(settings).__name__, "a dict")
    import json

    json.dumps(settings)


def spans(retriever: Retriever) -> None:
    """token_spans gives, for every text, ascending spans within it."""
    found = retriever.token_spans(TEXTS)
    _expect(len(found) == len(TEXTS), f"{len(found)} lists", f"{len(TEXTS)}")
    for text, own in zip(TEXTS, found, strict=True):
        ends = [end for _, end in own]
        within = all(0 <= start <= end <= len(text) for start, end in own)
        _expect(within and ends == sorted(ends), f"{own[:5]} for {text[:30]!r}", "ascending spans within the text")


CHECKS: tuple[Callable[[Retriever], None], ...] = (
    search_is_sound,
    no_queries,
    one_document,
    repeats,
    batches,
    prefix,
    reindexing,
    documents_are_left_alone,
    bytes_are_counted,
    settings_are_json,
    spans,
)
