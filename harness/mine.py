"""Hard negatives for a few hundred queries from a corpus that streams by: what ranks high and is no gold."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from icr_bench.harness.folder import write

CHUNK = 4_096
"""Documents scored at once."""

SAVE_EVERY = 64
"""Chunks between two states kept, so that an interrupted pass goes on near where it stopped."""

Floats = NDArray[np.float32]


class Row(NamedTuple):
    """A document of a corpus."""

    id: str
    text: str


class Scorer(Protocol):
    """Scores documents for a fixed set of queries."""

    def count(self, texts: Sequence[str]) -> None:
        """Take note of documents before any is scored."""

    def scores(self, texts: Sequence[str]) -> Floats:
        """(queries, documents), more is better; -inf for what does not match."""


class Bm25Scorer:
    """BM25 with Lucene's idf over a corpus that is never held: one pass counts the queries' words, the next scores.

    Args:
        analyse: text to tokens.
    """

    def __init__(self, queries: Sequence[str], analyse: Callable[[str], list[str]], k1: float, b: float) -> None:
        self._analyse, self._k1, self._b = analyse, k1, b
        asked = [Counter(analyse(query)) for query in queries]
        self._words = {word: place for place, word in enumerate(sorted({w for own in asked for w in own}))}
        self._weights = np.zeros((len(queries), len(self._words)), np.float32)  # how often a query says a word
        for number, own in enumerate(asked):
            for word, times in own.items():
                self._weights[number, self._words[word]] = times
        self._frequency = np.zeros(len(self._words), np.int64)
        self._documents, self._tokens = 0, 0

    def count(self, texts: Sequence[str]) -> None:
        for text in texts:
            tokens = self._analyse(text)
            self._documents += 1
            self._tokens += len(tokens)
            for word in self._words.keys() & set(tokens):
                self._frequency[self._words[word]] += 1

    def scores(self, texts: Sequence[str]) -> Floats:
        mean = self._tokens / max(self._documents, 1) or 1.0
        idf = np.log(1 + (self._documents - self._frequency + 0.5) / (self._frequency + 0.5))
        held = np.zeros((len(texts), len(self._words)), np.float32)
        for row, text in enumerate(texts):
            tokens = self._analyse(text)
            norm = self._k1 * (1 - self._b + self._b * len(tokens) / mean)
            for word, times in Counter(word for word in tokens if word in self._words).items():
                place = self._words[word]
                held[row, place] = idf[place] * times / (times + norm)
        found = self._weights @ held.T
        found[found <= 0] = -np.inf
        return found


class DenseScorer:
    """Inner products of a dense model's vectors.

    Args:
        encode: texts and ``query`` or ``document`` to vectors.
    """

    def __init__(self, queries: Sequence[str], encode: Callable[[Sequence[str], Any], Floats]) -> None:
        self._encode = encode
        self._queries = encode(queries, "query")

    def count(self, texts: Sequence[str]) -> None:
        pass

    def scores(self, texts: Sequence[str]) -> Floats:
        return self._queries @ self._encode(texts, "document").T


class Best:
    """The best documents of each query so far, by score, then by the order in which they came."""

    def __init__(self, queries: int, depth: int) -> None:
        self._scores = np.full((queries, depth), -np.inf, np.float32)
        self._places = np.full((queries, depth), -1, np.int64)  # in the corpus
        self._rows: dict[int, Row] = {}
        self.seen = 0

    def add(self, rows: Sequence[Row], scores: Floats) -> None:
        better = scores > self._scores[:, -1:]
        for query in np.flatnonzero(better.any(1)):
            new = np.flatnonzero(better[query])
            merged = np.concatenate([self._scores[query], scores[query, new]])
            places = np.concatenate([self._places[query], self.seen + new])
            order = np.lexsort((places, -merged))[: self._scores.shape[1]]
            self._scores[query], self._places[query] = merged[order], places[order]
            for place in set(self._places[query].tolist()) - self._rows.keys() - {-1}:
                self._rows[place] = rows[place - self.seen]
        self.seen += len(rows)
        if len(self._rows) > 2 * self._places.size:
            kept = set(self._places.ravel().tolist())
            self._rows = {place: row for place, row in self._rows.items() if place in kept}

    def ranked(self) -> list[list[Row]]:
        """Of each query, the best first."""
        return [[self._rows[place] for place in own if place >= 0] for own in self._places.tolist()]

    def state(self) -> dict[str, Any]:
        kept = set(self._places.ravel().tolist()) - {-1}
        return {
            "scores": [[None if math.isinf(s) else s for s in own] for own in self._scores.tolist()],
            "places": self._places.tolist(),
            "rows": {str(place): self._rows[place] for place in sorted(kept)},
            "seen": self.seen,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._scores = np.array([[-np.inf if s is None else s for s in own] for own in state["scores"]], np.float32)
        self._places = np.array(state["places"], np.int64)
        self._rows = {int(place): Row(*row) for place, row in state["rows"].items()}
        self.seen = state["seen"]


def chunks(rows: Iterable[Row], skip: int = 0) -> Iterator[list[Row]]:
    """Rows in lists of `CHUNK`, without the first ``skip``."""
    part: list[Row] = []
    for number, row in enumerate(rows):
        if number < skip:
            continue
        part.append(row)
        if len(part) == CHUNK:
            yield part
            part = []
    if part:
        yield part


def mine(
    rows: Iterable[Row], scorer: Scorer, queries: int, depth: int, state: Path, advance: Callable[[int], None]
) -> list[list[Row]]:
    """The best documents of every query, best first.

    Args:
        depth: documents of each.
        state: file that holds how far an interrupted pass has come; gone at the end.
        advance: told how many documents were read.
    """
    best = Best(queries, depth)
    if state.is_file():
        best.restore(json.loads(state.read_text(encoding="utf-8")))
        advance(best.seen)
    for number, part in enumerate(chunks(rows, best.seen), 1):
        best.add(part, scorer.scores([row.text for row in part]))
        advance(len(part))
        if number % SAVE_EVERY == 0:
            write(state, json.dumps(best.state()))
    if state.is_file():
        os.unlink(state)
    return best.ranked()
