"""The `Retriever` interface: ``index(documents)``, then ``search(queries, k)``."""

from __future__ import annotations

import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NewType

from icr_bench.benchmarks.base import Document

__all__ = ["BadRanking", "Document", "Estimate", "Inner", "MissingExtra", "Ranking", "Retriever", "check_rankings"]


class MissingExtra(ImportError):
    """A package that the chosen retriever needs is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; pip install 'icr-bench[{extra}]'")
        self.package, self.extra = package, extra


@dataclass(frozen=True, slots=True)
class Ranking:
    """The answer to one query: document numbers and their scores, best first (higher is better).

    ``error`` says why a query has no answer (a refused request, say); it then counts as failed and scores 0.
    ``seconds`` is what the answer took, told by retrievers that are asked once; None where it was kept from before.
    """

    numbers: Sequence[int]
    scores: Sequence[float]
    error: str = ""
    seconds: float | None = field(default=None, compare=False)


class BadRanking(ValueError):
    """A retriever broke the contract of `search`."""


def check_rankings(rankings: Any, queries: int, documents: int, k: int) -> list[Ranking]:
    """What `search` returned for so many queries over so many documents, as plain numbers.

    Raises:
        BadRanking: what was got and expected.
    """
    if not isinstance(rankings, list) or not all(isinstance(ranking, Ranking) for ranking in rankings):
        raise BadRanking(f"search must return a list of Ranking, got {rankings!r:.100}")
    if len(rankings) != queries:
        raise BadRanking(f"search returned {len(rankings)} rankings for {queries} queries")
    checked = []
    for ranking in rankings:
        if len(ranking.numbers) != len(ranking.scores):
            raise BadRanking(f"a ranking has {len(ranking.numbers)} numbers but {len(ranking.scores)} scores")
        if len(ranking.numbers) > k:
            raise BadRanking(f"a ranking has {len(ranking.numbers)} documents, more than k={k}")
        try:
            numbers = [operator.index(number) for number in ranking.numbers]
            scores = [float(score) for score in ranking.scores]
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRanking(f"a ranking holds something that is no number: {error}") from None
        for number in numbers:
            if not 0 <= number < documents:
                raise BadRanking(f"a ranking names document {number}; the corpus has 0 to {documents - 1}")
        if len(set(numbers)) < len(numbers):
            repeated = next(number for number in numbers if numbers.count(number) > 1)
            raise BadRanking(f"a ranking names document {repeated} more than once")
        for score in scores:
            if not math.isfinite(score):
                raise BadRanking(f"a ranking holds the score {score}; scores must be finite")
        checked.append(Ranking(numbers, scores, str(ranking.error or ""), ranking.seconds))
    return checked


@dataclass(frozen=True, slots=True)
class Estimate:
    """What indexing a corpus and answering one query alone would take, told before either."""

    tokens: int  # of all documents as they are read
    index_flops: float  # floating-point operations of indexing
    index_bytes: int  # of the index
    peak_bytes: int  # resident memory of the process, or of the GPU where one is used
    index_s: float
    query_s: float | None  # None where no calibration tells, as of a service
    query_tokens: float | None = None  # sent to a service for a query, and received
    query_cost: float | None = None  # money for a query


class Retriever(ABC):
    """Answers queries from an index of documents. It sees texts and numbers, never ids or judgments.

    A subclass's ``__init__`` takes its options as keyword-only arguments with annotations, checks them (ValueError)
    and does nothing expensive; ``load`` brings the weights. The run fills the arguments ``device`` (``cpu``, ``cuda``,
    ``cuda:N``), ``dtype`` (a torch type's name) and ``seed``, where a subclass has them.
    """

    tokenizer: str = "whitespace"  # names what `token_spans` counts, for the record
    max_tokens: int | None = None  # tokens of a document beyond this are not read; known after `index`
    asks_once: bool = False  # every answer costs money: no warm-up, no query alone; rankings tell their ``seconds``
    index_reused: bool = False  # whether the last `index` took work from a cache, so that its time measures nothing

    def progress(self, done: int, total: int) -> None:  # noqa: B027 - nobody is watching
        """Tell how far a long `index` has come; a run puts its own display here."""

    def load(self) -> None:  # noqa: B027 - most retrievers have nothing to load
        """Bring everything that does not depend on the corpus into memory; timed apart from `index`."""

    def estimate(self, documents: Sequence[Document], queries: Sequence[str]) -> Estimate | None:
        """What these documents and queries would take, from a short calibration after `load`; None if not known.

        Args:
            queries: some of those to come.
        """
        return None

    @abstractmethod
    def index(self, documents: Sequence[Document]) -> None:
        """Take the corpus, replacing any earlier one; ``documents[i].number == i``."""

    @abstractmethod
    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """One ranking a query, in order, each of at most k documents (1 <= k <= N)."""

    @abstractmethod
    def index_bytes(self) -> int:
        """Bytes that the index holds in memory, computed from what it holds."""

    def settings(self) -> dict[str, Any]:
        """What the options came to (prompts, lengths, versions of an analyser), for the record; after `load`."""
        return {}

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Start and end character of every token of every text."""
        return [[match.span() for match in re.finditer(r"\S+", text)] for text in texts]


Inner = NewType("Inner", Retriever)
"""Annotation of an option that names another retriever (``bm25``, ``bm25:k1=1.2``); the constructor is given it, made
from its own options but not loaded."""
