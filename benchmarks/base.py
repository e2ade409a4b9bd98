"""The `Benchmark` interface: documents, queries, graded judgments, and ``at(n)`` for every corpus size."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

__all__ = ["Benchmark", "DataError", "Document", "Judgment", "Passage", "Places", "Query", "SizeError", "Task"]


class DataError(Exception):
    """Data that cannot be used. Each line of the message names the file and line, or the row."""


class SizeError(ValueError):
    """A corpus size or a number of queries that the benchmark cannot give."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A document of a benchmark: its id and its text (title and text joined by one space)."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a benchmark."""

    id: str
    text: str


MOST_GRADE = 2**31 - 1
"""The largest grade, either way; it is what trec_eval reads, and metrics compute with it."""


@dataclass(frozen=True, slots=True)
class Judgment:
    """One graded judgment; a grade above 0 says how relevant the document is to the query."""

    query: str
    document: str
    grade: int


@dataclass(frozen=True)
class Places:
    """Where rows come from: row i stands on line ``lines[i]`` of ``file``."""

    file: str
    lines: Sequence[int]

    def __getitem__(self, row: int) -> str:
        return f"{self.file}:{self.lines[row]}"


@dataclass(frozen=True, slots=True)
class Document:
    """All that a retriever sees of a document: an opaque number and the text."""

    number: int
    text: str


@dataclass(frozen=True)
class Task:
    """A corpus of one size with the queries put to it and what the harness needs to score the answers."""

    documents: list[Document]  # documents[i].number == i
    ids: list[str]  # ids[number]
    queries: list[Query]
    judgments: dict[str, dict[str, int]]  # query id -> document id -> grade, for documents of this corpus only
    relevant: int  # the lowest grade that counts as relevant
    fingerprint: str  # SHA-256 over documents, queries and judgments, whatever their order


@dataclass(frozen=True)
class Benchmark:
    """Documents, queries and graded judgments, checked; make one with `Benchmark.of`.

    ``seed`` drives the order in which documents join as the corpus grows, the numbers they get and the
    sample of queries; ``relevant`` is the lowest grade that makes a document a gold.
    """

    documents: Sequence[Passage]
    queries: Sequence[Query]
    judgments: Mapping[str, Mapping[str, int]]  # query id -> document id -> grade
    warnings: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict, repr=False)  # query id -> "file:line", where known
    source: str = "judgments"  # where the judgments come from
    seed: int = 0
    relevant: int = 1

    @classmethod
    def of(
        cls,
        documents: Iterable[Passage],
        queries: Iterable[Query],
        judgments: Iterable[Judgment],
        places: Mapping[str, Places] | None = None,
    ) -> Benchmark:
        """Check rows and build a benchmark; identical duplicates are dropped with a warning.

        Args:
            places: where the rows of ``documents``, ``queries`` and ``judgments`` come from, for messages.

        Raises:
            DataError: conflicting duplicates, judgments for unknown documents or queries, an empty corpus.
        """
        from icr_bench.benchmarks.checks import check  # it imports the classes above

        given, places = list(queries), places or {}
        documents, queries, judgments, warnings = check(list(documents), given, list(judgments), places)
        lines = {q.id: places["queries"][row] for row, q in enumerate(given)} if "queries" in places else {}
        graded: dict[str, dict[str, int]] = {}
        for row in judgments:
            graded.setdefault(row.query, {})[row.document] = row.grade
        source = places["judgments"].file if "judgments" in places else cls.source
        return cls(documents, queries, graded, tuple(warnings), lines, source)

    def choose(self, *, seed: int = 0, relevant: int = 1, queries: int | None = None) -> Benchmark:
        """Keep the declared queries (those with a gold), or a seeded sample of ``queries`` of them.

        Raises:
            SizeError: fewer queries are declared than asked for.
            DataError: no query has a gold.
        """
        from icr_bench.benchmarks.checks import Findings

        declared: list[Query] = []
        findings = Findings()
        for q in self.queries:
            if any(grade >= relevant for grade in self.judgments.get(q.id, {}).values()):
                declared.append(q)
            else:
                place = self.places.get(q.id, "queries")
                findings.add("queries without a gold", f"{place}: query {q.id!r} has no gold and is not scored")
        if not declared:
            raise DataError(
                f"{self.source}: none of the {len(self.queries):,} queries has a judgment of grade {relevant} or more"
            )
        warnings = self.warnings + tuple(findings.lines())
        if queries is not None:
            if not 1 <= queries <= len(declared):
                raise SizeError(f"queries={queries} asked for, but the number of declared queries is {len(declared):,}")
            kept = set(random.Random(f"icr-bench queries {seed}").sample(sorted(q.id for q in declared), queries))
            declared = [q for q in declared if q.id in kept]
        return replace(self, queries=declared, warnings=warnings, seed=seed, relevant=relevant)

    @cached_property
    def golds(self) -> set[str]:
        """Ids of all documents that are relevant to a query."""
        judged = (self.judgments.get(q.id, {}) for q in self.queries)
        return {d for grades in judged for d, grade in grades.items() if grade >= self.relevant}

    @cached_property
    def _order(self) -> list[Passage]:
        documents = sorted(self.documents, key=lambda d: d.id)  # the order of a file is no part of the data
        golds = [d for d in documents if d.id in self.golds]
        rest = [d for d in documents if d.id not in self.golds]
        random.Random(f"icr-bench documents {self.seed}").shuffle(rest)
        return golds + rest

    def check_size(self, n: int) -> None:
        """Raise `SizeError` if ``n`` is below the number of golds or beyond the corpus."""
        if n < len(self.golds):
            raise SizeError(
                f"n={n:,} is below the {len(self.golds):,} gold documents of the {len(self.queries):,} queries; "
                f"take n >= {len(self.golds):,} or fewer queries"
            )
        if n > len(self.documents):
            raise SizeError(f"n={n:,} is beyond the corpus of {len(self.documents):,} documents")

    def at(self, n: int) -> Task:
        """The corpus of ``n`` documents: all golds, then a seeded order of the rest, so that sizes are nested.

        Numbers are a permutation drawn from (seed, n) alone, so that neither ties nor codes favour a gold.

        Raises:
            SizeError: ``n`` is below the number of golds or beyond the corpus.
        """
        self.check_size(n)
        numbers = list(range(n))
        random.Random(f"icr-bench numbers {self.seed} {n}").shuffle(numbers)
        placed = sorted(zip(numbers, self._order[:n], strict=True), key=lambda pair: pair[0])
        ids = [passage.id for _, passage in placed]
        present = set(ids)
        judgments = {
            q.id: {d: g for d, g in self.judgments.get(q.id, {}).items() if d in present} for q in self.queries
        }
        return Task(
            documents=[Document(number, passage.text) for number, passage in placed],
            ids=ids,
            queries=list(self.queries),
            judgments=judgments,
            relevant=self.relevant,
            fingerprint=_fingerprint(self._order[:n], self.queries, judgments, self.relevant),
        )


def _fingerprint(
    documents: Iterable[Passage], queries: Iterable[Query], judgments: Mapping[str, Mapping[str, int]], relevant: int
) -> str:
    sha = hashlib.sha256(f"relevant {relevant}".encode())
    rows = [("d", d.id, d.text) for d in documents]
    rows += [("q", q.id, q.text) for q in queries]
    rows += [("j", q, f"{d}\t{g}") for q, grades in judgments.items() for d, g in grades.items()]
    for row in sorted(rows):
        for part in row:
            data = part.encode("utf-8", "surrogatepass")
            sha.update(len(data).to_bytes(8, "big") + data)
    return sha.hexdigest()
