"""Retrievers made of other retrievers: rankings fused, or the head of one ranked again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from icr_bench.retrievers.base import Document, Inner, Ranking, Retriever, check_rankings
from icr_bench.retrievers.top import top_k
from icr_bench.retrievers.weights import Model, locate

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder


class _Combined(Retriever):
    """What a retriever of others does with all of them alike. Tokens are those of the first that reads a text only in
    part, or of the first."""

    def __init__(self, parts: Sequence[Retriever], others: Sequence[Retriever] = ()) -> None:
        self._parts = parts
        self.asks_once = any(part.asks_once for part in (*parts, *others))

    def load(self) -> None:
        for part in self._parts:
            part.load()
        self.tokenizer = self._reader.tokenizer

    @property
    def _reader(self) -> Retriever:
        return next((part for part in self._parts if part.max_tokens is not None), self._parts[0])

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        return self._reader.token_spans(texts)

    def _ask(self, part: Retriever, queries: Sequence[str], k: int, count: int) -> list[Ranking]:
        """A part's rankings over so many documents, checked; where answers cost money, with what each took."""
        start = time.perf_counter()
        found = check_rankings(part.search(queries, k), len(queries), count, k)
        if part.asks_once or not self.asks_once:
            return found
        each = (time.perf_counter() - start) / max(len(queries), 1)
        return [replace(ranking, seconds=each) for ranking in found]

    def _index(self, parts: Sequence[Retriever], documents: Sequence[Document]) -> None:
        for number, part in enumerate(parts):
            part.progress = partial(self._progress, number * len(documents), len(parts) * len(documents))  # type: ignore[method-assign]
            part.index(documents)
        self.index_reused = any(part.index_reused for part in parts)
        self.max_tokens = self._reader.max_tokens

    def _progress(self, before: int, whole: int, done: int, total: int) -> None:
        self.progress(before + done, whole)


class Hybrid(_Combined):
    """Reciprocal rank fusion: a document's score is the sum of 1 / (k + rank) over the rankings that hold it (Cormack
    et al., 2009).

    Args:
        of: the retrievers, two or more, such as ``bm25+dense-tiny``; in a suite a list of NAME:key=value or mappings.
        k: how little the first ranks stand out.
        depth: documents taken of each ranking.
    """

    def __init__(self, *, of: tuple[Inner, ...], k: int = 60, depth: int = 100) -> None:
        if len(of) < 2:
            raise ValueError(f"of names {len(of)} retriever; fusion takes two or more, such as of=bm25+dense-tiny")
        if k < 0 or depth < 1:
            raise ValueError(f"k must be 0 or more and depth 1 or more, got {k} and {depth}")
        super().__init__(of)
        self._k, self._depth, self._count = k, depth, 0

    def index(self, documents: Sequence[Document]) -> None:
        self._index(self._parts, documents)
        self._count = len(documents)

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        depth = min(max(self._depth, k), self._count)
        found = [self._ask(part, queries, depth, self._count) for part in self._parts]
        return [self._fused(rankings, k) for rankings in zip(*found, strict=True)]

    def _fused(self, rankings: Sequence[Ranking], k: int) -> Ranking:
        scores: dict[int, float] = {}
        for ranking in rankings:
            for rank, number in enumerate(_ordered(ranking)[: self._depth], 1):
                scores[number] = scores.get(number, 0.0) + 1 / (self._k + rank)
        numbers = np.array(sorted(scores), dtype=np.int64)
        best = top_k(np.array([scores[number] for number in numbers.tolist()]), k)
        error = "; ".join(dict.fromkeys(ranking.error for ranking in rankings if ranking.error))
        return Ranking(numbers[best.numbers].tolist(), best.scores, error, _together(rankings))

    def index_bytes(self) -> int:
        return sum(part.index_bytes() for part in self._parts)

    def settings(self) -> dict[str, Any]:
        return {"of": [part.settings() for part in self._parts]}


class Rerank(_Combined):
    """The first documents of one retriever, ranked again by a cross-encoder or by another retriever that is given
    those documents alone. No more than those are returned.

    Args:
        first: the retriever whose documents are ranked again.
        model: a cross-encoder: hub id (``org/name`` or ``org/name@revision``) or a local folder.
        by: a retriever instead; it indexes the documents anew for every query.
        m: documents ranked again.
        max_length: tokens read of a query with a document, at most; the cross-encoder's own limit by default.
        batch_size: pairs that the cross-encoder reads at once.
    """

    def __init__(
        self,
        *,
        first: Inner,
        model: Model | None = None,
        by: Inner | None = None,
        m: int = 100,
        max_length: int | None = None,
        batch_size: int = 32,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        if (model is None) == (by is None):
            raise ValueError("give either model=, a cross-encoder, or by=, a retriever")
        for name, value in (("m", m), ("batch_size", batch_size), ("max_length", max_length)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        super().__init__([first], [] if by is None else [by])
        self._first, self._by, self._model_name = first, by, model
        self._m, self._max_length, self._batch_size = m, max_length, batch_size
        self._device, self._dtype = device, dtype
        self._texts: list[str] = []

    def load(self) -> None:
        super().load()
        if self._by is not None:
            self._by.load()
            return
        import torch
        from sentence_transformers import CrossEncoder

        name, revision = locate(str(self._model_name))
        self._encoder: CrossEncoder = CrossEncoder(
            name,
            revision=revision,
            device=self._device,
            max_length=self._max_length,
            model_kwargs={"dtype": getattr(torch, self._dtype)},
        )
        if self._encoder.num_labels != 1:
            raise ValueError(f"{name}: has {self._encoder.num_labels} labels; a cross-encoder with one score is needed")

    def index(self, documents: Sequence[Document]) -> None:
        self._index(self._parts, documents)
        self._texts = [document.text for document in documents]

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        count = len(self._texts)
        found = self._ask(self._first, queries, min(self._m, count), count) if queries else []
        return [self._again(query, ranking, k) for query, ranking in zip(queries, found, strict=True)]

    def _again(self, query: str, ranking: Ranking, k: int) -> Ranking:
        numbers = np.array(sorted(ranking.numbers), dtype=np.int64)
        if ranking.error or not len(numbers):
            return Ranking([], [], ranking.error, ranking.seconds)
        start = time.perf_counter()
        texts = [self._texts[number] for number in numbers.tolist()]
        if self._by is None:
            best = top_k(self._scores(query, texts), k)
        else:
            self._by.index([Document(place, text) for place, text in enumerate(texts)])
            (best,) = self._ask(self._by, [query], min(k, len(texts)), len(texts))
        if self.asks_once and not (self._by and self._by.asks_once):
            best = replace(best, seconds=time.perf_counter() - start)
        return Ranking(numbers[list(best.numbers)].tolist(), best.scores, best.error, _together([ranking, best]))

    def _scores(self, query: str, texts: Sequence[str]) -> Any:
        import torch

        # A sigmoid would make equals of the best in float32.
        told = self._encoder.predict(
            [(query, text) for text in texts],
            batch_size=self._batch_size,
            activation_fn=torch.nn.Identity(),
            convert_to_tensor=True,
            show_progress_bar=False,
        )
        return told.float().cpu().numpy()

    def index_bytes(self) -> int:
        """The first retriever's, and the texts that are read again."""
        return self._first.index_bytes() + sum(len(text.encode("utf-8", "surrogatepass")) for text in self._texts)

    def settings(self) -> dict[str, Any]:
        told: dict[str, Any] = {"first": self._first.settings()}
        if self._by is not None:
            return told | {"by": self._by.settings()}
        return told | {
            "max_length": self._encoder.max_seq_length,
            "device": str(self._encoder.device),
            "dtype": self._dtype,
        }


def _together(rankings: Sequence[Ranking]) -> float | None:
    """What rankings took in all; None where one does not tell, or was kept from before."""
    told = [ranking.seconds for ranking in rankings if ranking.seconds is not None]
    return sum(told) if len(told) == len(rankings) else None


def _ordered(ranking: Ranking) -> list[int]:
    """Numbers by score, then number, whatever order they came in."""
    pairs = sorted(zip(ranking.scores, ranking.numbers, strict=True), key=lambda pair: (-pair[0], pair[1]))
    return [number for _, number in pairs]
