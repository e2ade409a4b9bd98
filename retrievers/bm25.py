"""BM25 through bm25s (default) or rank-bm25."""

from __future__ import annotations

import importlib
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from icr_bench.retrievers.base import Document, MissingExtra, Ranking, Retriever
from icr_bench.retrievers.top import top_k

MOST_K1 = 1e30
"""With more, scores are below what float32 holds, and nothing would be found."""


class _Backend(Protocol):
    def scores(self, tokens: list[str]) -> tuple[NDArray[np.floating], NDArray[np.integer]]:
        """Scores of all documents, shape (N,), and the numbers, ascending, of those that hold a token."""
        ...

    def nbytes(self) -> int: ...


class BM25(Retriever):
    """BM25 over an analyser of named steps: normalise, lower-case, match tokens, drop stop words, stem.

    A document that shares no token with the query is never returned, so a query without known tokens has an empty
    ranking. Defaults are k1 and b of Anserini and BEIR, without stop words or stemming.

    Args:
        backend: ``bm25s`` (Lucene's idf) or ``rank-bm25`` (its Okapi idf with a floor; a reference, slow).
        k1: saturation of term frequency, 0 or more.
        b: length normalisation, 0 to 1.
        normalisation: Unicode form applied to texts and queries.
        lowercase: fold case.
        pattern: regular expression of a token.
        stopwords: ``none`` or ``english`` (the list of bm25s).
        stemmer: ``none`` or a Snowball algorithm such as ``english`` or ``porter`` (extra ``stem``).
    """

    def __init__(
        self,
        *,
        backend: Literal["bm25s", "rank-bm25"] = "bm25s",
        k1: float = 0.9,
        b: float = 0.4,
        normalisation: Literal["NFKC", "NFC", "none"] = "NFKC",
        lowercase: bool = True,
        pattern: str = r"\w+",
        stopwords: Literal["none", "english"] = "none",
        stemmer: str = "none",
    ) -> None:
        if not 0 <= k1 <= MOST_K1:
            raise ValueError(f"k1 must be {f'{MOST_K1:g} at most' if k1 > 0 else '0 or more'}, got {k1}")
        if not 0 <= b <= 1:
            raise ValueError(f"b must be between 0 and 1, got {b}")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern={pattern!r} is not a regular expression: {error}") from None
        if backend == "rank-bm25" and find_spec("rank_bm25") is None:
            raise MissingExtra("rank-bm25", "rank-bm25")
        self._backend_name, self._k1, self._b = backend, k1, b
        self._normalisation, self._lowercase = normalisation, lowercase
        self._stopwords: frozenset[str] = frozenset()
        if stopwords == "english":
            from bm25s.stopwords import STOPWORDS_EN

            self._stopwords = frozenset(STOPWORDS_EN)
        self._stem, self._stemmer = _stemmer(stemmer), stemmer
        self._backend: _Backend | None = None

    def load(self) -> None:
        importlib.import_module({"bm25s": "bm25s", "rank-bm25": "rank_bm25"}[self._backend_name])

    def index(self, documents: Sequence[Document]) -> None:
        tokens = [self.analyse(document.text) for document in documents]
        make = _Bm25s if self._backend_name == "bm25s" else _RankBm25
        self._backend = make(tokens, self._k1, self._b) if any(tokens) else None

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> Ranking:
        if self._backend is None:
            return Ranking([], [])
        scores, matching = self._backend.scores(self.analyse(query))
        return top_k(scores, k, matching)

    def index_bytes(self) -> int:
        return self._backend.nbytes() if self._backend else 0

    def settings(self) -> dict[str, Any]:
        case = "lower case" if self._lowercase else "case kept"
        steps = [self._normalisation, case, self._pattern.pattern]
        steps += [f"{len(self._stopwords)} stop words", f"stemmer {self._stemmer}"]
        return {
            "analyser": " | ".join(steps),
            "idf": "lucene" if self._backend_name == "bm25s" else "okapi with floor",
            "backend_version": version(self._backend_name),
            "stemmer_version": version("PyStemmer") if self._stem else None,
        }

    def analyse(self, text: str) -> list[str]:
        """The tokens of a text, in order."""
        if self._normalisation != "none":
            text = unicodedata.normalize(self._normalisation, text)
        if self._lowercase:
            text = text.lower()
        tokens = [match[0] for match in self._pattern.finditer(text) if match[0]]
        if self._stopwords:
            tokens = [token for token in tokens if token not in self._stopwords]
        return self._stem(tokens) if self._stem else tokens


def _stemmer(name: str) -> Callable[[list[str]], list[str]] | None:
    if name == "none":
        return None
    if find_spec("Stemmer") is None:
        raise MissingExtra("PyStemmer", "stem")
    import Stemmer

    if name not in Stemmer.algorithms():
        raise ValueError(f"stemmer must be none or one of {', '.join(Stemmer.algorithms())}, got {name!r}")
    stem: Callable[[list[str]], list[str]] = Stemmer.Stemmer(name).stemWords
    return stem


def _sizeof(vocabulary: dict[str, Any]) -> int:
    return sys.getsizeof(vocabulary) + sum(sys.getsizeof(key) + sys.getsizeof(v) for key, v in vocabulary.items())


class _Bm25s:
    def __init__(self, tokens: list[list[str]], k1: float, b: float) -> None:
        import bm25s

        self._index = bm25s.BM25(k1=k1, b=b, method="lucene")
        self._index.index(tokens, show_progress=False)
        self._vocabulary: dict[str, int] = self._index.vocab_dict

    def scores(self, tokens: list[str]) -> tuple[NDArray[np.floating], NDArray[np.integer]]:
        known = [self._vocabulary[token] for token in tokens if token in self._vocabulary]
        if not known:
            return np.zeros(0), np.zeros(0, dtype=np.int64)
        scores = self._index.get_scores_from_ids(np.array(known))
        return scores, np.flatnonzero(scores > 0)  # Lucene's idf is positive: a match always scores

    def nbytes(self) -> int:
        arrays = (self._index.scores[name] for name in ("data", "indices", "indptr"))
        return sum(int(array.nbytes) for array in arrays) + _sizeof(self._vocabulary)


class _RankBm25:
    def __init__(self, tokens: list[list[str]], k1: float, b: float) -> None:
        import rank_bm25

        self._index = rank_bm25.BM25Okapi(tokens, k1=k1, b=b)

    def scores(self, tokens: list[str]) -> tuple[NDArray[np.floating], NDArray[np.integer]]:
        asked = set(tokens)
        if not asked:
            return np.zeros(0), np.zeros(0, dtype=np.int64)
        # its idf can be 0 or below, so that a score does not tell whether a document matches
        matching = np.flatnonzero([not asked.isdisjoint(held) for held in self._index.doc_freqs])
        with np.errstate(invalid="ignore"):  # k1=0 divides 0 by 0 in documents without the token
            scores = np.sum([np.nan_to_num(self._index.get_scores([token])) for token in tokens], axis=0)
        return scores, matching

    def nbytes(self) -> int:
        held = sum(_sizeof(frequencies) for frequencies in self._index.doc_freqs)
        return held + _sizeof(self._index.idf) + sys.getsizeof(self._index.doc_len)
