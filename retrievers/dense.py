"""Dense bi-encoder through sentence-transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from icr_bench.retrievers.base import Document, MissingExtra, Ranking, Retriever
from icr_bench.retrievers.rows import row
from icr_bench.retrievers.top import check_finite, top_k
from icr_bench.retrievers.weights import Model, locate

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Floats = NDArray[np.float32]

CHUNK = 1024
"""Documents encoded between two signs of progress; each chunk is sorted by length."""

HNSW_LINKS, HNSW_CONSTRUCTION, HNSW_SEARCH = 32, 200, 128

LOSS_QUERIES, LOSS_DEPTH = 256, 10
"""How many different queries, and how many answers of each, HNSW is held against exact search by."""


class Dense(Retriever):
    """One vector a text from a sentence-transformers model; exact inner-product search in float32 by default.

    Queries and documents are encoded with the model's own prompts (Qwen3-Embedding: its query instruction) and its
    similarity, cosine or dot product.

    Args:
        model: hub id (``org/name`` or ``org/name@revision``) or a local folder.
        query_prompt: text put before every query instead of the model's own prompt.
        document_prompt: the same for documents.
        max_length: tokens read of a text, at most; the model's own limit by default.
        batch_size: texts encoded at once.
        index: ``exact``, or ``faiss-flat`` or ``faiss-hnsw`` (extra ``faiss``, or ``faiss-gpu``, with which a flat
            index lies on the GPU). HNSW is approximate: its record says, under ``settings``, what share of the exact
            best 10 the answers lack, and how often they lack the best.
        trust_remote_code: run code that comes with the model.
    """

    tokenizer = "model"

    def __init__(
        self,
        *,
        model: Model,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        max_length: int | None = None,
        batch_size: int = 32,
        index: Literal["exact", "faiss-flat", "faiss-hnsw"] = "exact",
        trust_remote_code: bool = False,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        if not model:
            raise ValueError("model is empty; give a hub id or a local folder")
        for name, value in (("max_length", max_length), ("batch_size", batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if index != "exact" and find_spec("faiss") is None:
            raise MissingExtra("faiss", "faiss")
        self._model_name, self._device, self._dtype = model, device, dtype
        self._given_prompts = {"query": query_prompt, "document": document_prompt}
        self._max_length, self._batch_size, self._index_name = max_length, batch_size, index
        self._trust_remote_code = trust_remote_code
        self._vectors: _Vectors | None = None

    def load(self) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        name, revision = locate(self._model_name)
        self._encoder: SentenceTransformer = SentenceTransformer(
            name,
            revision=revision,
            device=self._device,
            trust_remote_code=self._trust_remote_code,
            model_kwargs={"dtype": getattr(torch, self._dtype)},
        )
        if self._encoder.similarity_fn_name not in ("cosine", "dot"):
            raise ValueError(f"{name}: similarity {self._encoder.similarity_fn_name!r} is neither cosine nor dot")
        if self._max_length is not None:
            self._encoder.max_seq_length = self._max_length
        limit = self._encoder.max_seq_length
        if limit is not None and math.isfinite(limit):
            wrapping = len(self._encoder.tokenizer(self._prompt("document"), truncation=False)["input_ids"])
            self.max_tokens = max(limit - wrapping, 0)

    def _prompt(self, kind: str) -> str:
        """The prompt put before a text: the one given, else what sentence-transformers takes for its kind."""
        if (given := self._given_prompts[kind]) is not None:
            return given
        names = ("query",) if kind == "query" else ("document", "passage", "corpus")
        name = next((n for n in names if n in self._encoder.prompts), self._encoder.default_prompt_name)
        return self._encoder.prompts[name] or "" if name else ""

    def encode(self, texts: Sequence[str], kind: Literal["query", "document"]) -> Floats:
        """A vector of each text, (n, dimensions).

        Raises:
            FloatingPointError: some hold values that are not finite.
        """
        encode = self._encoder.encode_query if kind == "query" else self._encoder.encode_document
        vectors = encode(
            list(texts),
            prompt=self._given_prompts[kind],
            batch_size=self._batch_size,
            normalize_embeddings=self._encoder.similarity_fn_name == "cosine",
            show_progress_bar=False,
            convert_to_numpy=True,
        )
        found = np.ascontiguousarray(vectors, dtype=np.float32)
        check_finite(found, "queries" if kind == "query" else "documents")  # faiss would leave some out in silence
        return found

    def index(self, documents: Sequence[Document]) -> None:
        parts = []
        for start in range(0, len(documents), CHUNK):
            self.progress(start, len(documents))
            parts.append(self.encode([document.text for document in documents[start : start + CHUNK]], "document"))
        vectors = np.concatenate(parts)
        self._vectors = (
            _Exact(vectors) if self._index_name == "exact" else _Faiss(vectors, self._index_name, self._device)
        )

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        if self._vectors is None:
            raise RuntimeError("search before index")
        return self._vectors.search(self.encode(queries, "query"), k) if queries else []

    def index_bytes(self) -> int:
        return self._vectors.nbytes() if self._vectors else 0

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "query_prompt": self._prompt("query"),
            "document_prompt": self._prompt("document"),
            "max_length": self._encoder.max_seq_length,
            "similarity": self._encoder.similarity_fn_name,
            "dimensions": self._encoder.get_embedding_dimension(),
            "device": str(self._encoder.device),
            "dtype": self._dtype,
        }
        if isinstance(self._vectors, _Faiss):
            settings["index_device"] = self._vectors.device
        if self._index_name == "faiss-hnsw":
            settings["hnsw"] = {"m": HNSW_LINKS, "ef_construction": HNSW_CONSTRUCTION, "ef_search": HNSW_SEARCH}
            if isinstance(self._vectors, _Faiss):
                settings["hnsw"] |= self._vectors.loss()
        return settings

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        tokenizer: Any = self._encoder.tokenizer
        if not callable(tokenizer):  # a static embedding has a bare tokenizer
            return [encoding.offsets for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        encoded = tokenizer(
            list(texts), add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
        )
        return [[(start, end) for start, end in spans] for spans in encoded["offset_mapping"]]


class _Vectors(Protocol):
    def search(self, queries: Floats, k: int) -> list[Ranking]: ...

    def nbytes(self) -> int: ...


class _Exact:
    def __init__(self, vectors: Floats) -> None:
        self._vectors = vectors  # (N, dimensions)

    def search(self, queries: Floats, k: int) -> list[Ranking]:
        rankings = []
        for start in range(0, len(queries), 64):  # bounds the score matrix to 64 x N
            scores = queries[start : start + 64] @ self._vectors.T
            rankings += [top_k(row, k) for row in scores]
        return rankings

    def nbytes(self) -> int:
        return int(self._vectors.nbytes)


class _Faiss:
    """An index of faiss: of the package for processors, or of the one for GPUs, where a flat index lies on the GPU
    that encodes (HNSW is of processors in both)."""

    def __init__(self, vectors: Floats, kind: str, device: str) -> None:
        import faiss

        self._faiss = faiss
        dimensions = vectors.shape[1]
        if kind == "faiss-flat":
            self._index: Any = faiss.IndexFlatIP(dimensions)
        else:
            self._index = faiss.IndexHNSWFlat(dimensions, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
            self._index.hnsw.efConstruction, self._index.hnsw.efSearch = HNSW_CONSTRUCTION, HNSW_SEARCH
        self._index.add(vectors)
        self._bytes = int(faiss.serialize_index(self._index).nbytes)
        self._exact, self.device = kind == "faiss-flat", "cpu"
        if self._exact and device.startswith("cuda") and hasattr(faiss, "StandardGpuResources"):
            self._held, self.device = faiss.StandardGpuResources(), device
            self._index = faiss.index_cpu_to_gpu(self._held, int(device.partition(":")[2] or 0), self._index)
        self._depth = 0
        self._answered: dict[bytes, tuple[Floats, Floats]] = {}  # a query's vector and its best scores, by that vector

    def search(self, queries: Floats, k: int) -> list[Ranking]:
        scores, numbers = self._index.search(queries, k)
        if not self._exact:
            self._keep(queries, scores[:, :LOSS_DEPTH])
        found = numbers >= 0  # HNSW may find fewer than k
        return [
            Ranking(row[kept].tolist(), values[kept].tolist())
            for row, values, kept in zip(numbers, scores, found, strict=True)
        ]

    def _keep(self, queries: Floats, scores: Floats) -> None:
        """Hold the first answers to `LOSS_QUERIES` different queries, all of one depth."""
        if scores.shape[1] != self._depth:
            self._depth, self._answered = scores.shape[1], {}
        for query, best in zip(queries, scores, strict=True):
            if len(self._answered) < LOSS_QUERIES:
                self._answered[query.tobytes()] = query, best

    def loss(self) -> dict[str, Any]:
        """What the kept answers lack of the exact ones; a document that scores the same is none that is missed."""
        if not self._answered:
            return {}
        queries, given = (np.stack(rows) for rows in zip(*self._answered.values(), strict=True))
        exact, _ = self._faiss.downcast_index(self._index.storage).search(queries, self._depth)
        least = exact - 1e-6 * np.maximum(np.abs(exact), 1)  # sums of another order
        return {
            "queries": len(queries),
            "depth": self._depth,
            "missed": float((given < least[:, -1:]).mean()),
            "missed_first": float((given[:, 0] < least[:, 0]).mean()),
        }

    def nbytes(self) -> int:
        return self._bytes


tiny = row(Dense, "Dense bi-encoder of 1.7M parameters, trained on what the tiny BlockSearch is.", model="dense-tiny")
