"""Late interaction: MaxSim between the token vectors of a query and of every document (ColBERT, Khattab and Zaharia
2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from icr_bench.retrievers.base import Document, Ranking, Retriever
from icr_bench.retrievers.top import top_k
from icr_bench.retrievers.weights import Model, locate

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

CHUNK = 512
"""Documents encoded between two signs of progress."""

TOKENS = 32_768
"""Document tokens scored at once, at least one document's."""


class Late(Retriever):
    """The vectors that an encoder gives each token, its special ones among them, each of length 1. A document's score
    is the sum, over the query's tokens, of the largest inner product with any of its tokens.

    Vectors are kept in float16; products are summed in float32.

    Args:
        model: any encoder of sentence-transformers: hub id (``org/name`` or ``org/name@revision``) or a local folder.
        max_length: tokens read of a text, at most; the model's own limit by default.
        batch_size: texts encoded at once.
    """

    tokenizer = "model"

    def __init__(
        self,
        *,
        model: Model,
        max_length: int | None = None,
        batch_size: int = 32,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        for name, value in (("max_length", max_length), ("batch_size", batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        self._model_name, self._max_length, self._batch_size = model, max_length, batch_size
        self._device, self._dtype = device, dtype
        self._vectors: NDArray[np.float16] | None = None  # (tokens of all documents, dimensions)
        self._starts = np.zeros(1, np.int64)  # first token of each document, and where the last one ends

    def load(self) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        name, revision = locate(self._model_name)
        self._encoder: SentenceTransformer = SentenceTransformer(
            name, revision=revision, device=self._device, model_kwargs={"dtype": getattr(torch, self._dtype)}
        )
        if self._max_length is not None:
            self._encoder.max_seq_length = self._max_length
        self._encoder.tokenizer.padding_side = "right"  # what is cut off behind the last token is padding
        if (limit := self._encoder.max_seq_length) is not None:
            self.max_tokens = max(limit - len(self._encoder.tokenizer("")["input_ids"]), 0)

    def encode(self, texts: Sequence[str], kind: Literal["query", "document"]) -> list[NDArray[np.float32]]:
        """The token vectors of each text, (tokens, dimensions), of length 1; a zero for a text without tokens."""
        encode = self._encoder.encode_query if kind == "query" else self._encoder.encode_document
        found: Any = encode(
            list(texts), output_value="token_embeddings", batch_size=self._batch_size, show_progress_bar=False
        )
        arrays = [vectors.float().cpu().numpy() for vectors in found]
        return [
            vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            if len(vectors)
            else np.zeros((1, vectors.shape[1]), np.float32)
            for vectors in arrays
        ]

    def index(self, documents: Sequence[Document]) -> None:
        parts, lengths = list[NDArray[np.float16]](), list[int]()
        for begin in range(0, len(documents), CHUNK):
            self.progress(begin, len(documents))
            for vectors in self.encode([document.text for document in documents[begin : begin + CHUNK]], "document"):
                parts.append(vectors.astype(np.float16))
                lengths.append(len(vectors))
        self._vectors = np.concatenate(parts)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        if self._vectors is None:
            raise RuntimeError("search before index")
        if not queries:
            return []
        asked = self.encode(queries, "query")
        rows = np.concatenate(asked)  # (query tokens of the batch, dimensions)
        begins = np.cumsum([0, *map(len, asked)])[:-1]
        scores = np.concatenate([self._block(rows, begins, *block) for block in self._blocks()], axis=1)
        return [top_k(row, k) for row in scores]

    def _blocks(self) -> list[tuple[int, int]]:
        """Consecutive documents, from and to, of about `TOKENS` tokens each."""
        count, blocks, begin = len(self._starts) - 1, list[tuple[int, int]](), 0
        while begin < count:
            end = max(int(np.searchsorted(self._starts, self._starts[begin] + TOKENS, "right")) - 1, begin + 1)
            blocks.append((begin, end))
            begin = end
        return blocks

    def _block(self, rows: NDArray[np.float32], begins: NDArray[np.int64], begin: int, end: int) -> NDArray[np.float32]:
        """Scores of some documents, (queries, documents)."""
        assert self._vectors is not None
        first = int(self._starts[begin])
        products = rows @ self._vectors[first : int(self._starts[end])].astype(np.float32).T
        best = np.maximum.reduceat(products, self._starts[begin:end] - first, axis=1)  # (query tokens, documents)
        return np.add.reduceat(best, begins, axis=0)

    def index_bytes(self) -> int:
        return 0 if self._vectors is None else int(self._vectors.nbytes + self._starts.nbytes)

    def settings(self) -> dict[str, Any]:
        return {
            "max_length": self._encoder.max_seq_length,
            "dimensions": self._encoder.get_embedding_dimension(),
            "device": str(self._encoder.device),
            "dtype": self._dtype,
        }

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        encoded = self._encoder.tokenizer(
            list(texts), add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
        )
        return [[(start, end) for start, end in spans] for spans in encoded["offset_mapping"]]
