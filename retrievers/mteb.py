"""Models of the Massive Text Embedding Benchmark (mteb), loaded and searched as its retrieval tasks do."""

from __future__ import annotations

import difflib
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from icr_bench.retrievers.base import Document, MissingExtra, Ranking, Retriever
from icr_bench.retrievers.top import OVERFLOW, top_k

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

CHUNK = 1024
"""Documents encoded between two signs of progress."""


class Mteb(Retriever):
    """A model of mteb with the prompts, the similarity and the search that mteb gives it.

    Embeddings of documents are kept, and all of them compared with a query. A model that searches for itself is left to
    it; one with many vectors a text reads the whole corpus at every search, as mteb has it. Scores are the model's, and
    so is what it returns: documents of score 0, say.

    Args:
        model: a name of mteb's registry, such as ``mteb/baseline-bm25s``, or a folder of a sentence-transformers model.
        language: of the texts, such as ``eng-Latn``; mteb's BM25 chooses stop words, stemmer and tokens by it.
        instruction: what models that take instructions are told of a query; mteb's words for retrieval by default.
        batch_size: texts encoded at once.
        trust_remote_code: run code that comes with the weights; a model that needs it is refused otherwise.
    """

    def __init__(
        self,
        *,
        model: str,
        language: str = "eng-Latn",
        instruction: str | None = None,
        batch_size: int = 32,
        trust_remote_code: bool = False,
        device: str = "cpu",
    ) -> None:
        if not model:
            raise ValueError("model is empty; give a name of mteb's registry or a local folder")
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
        if find_spec("mteb") is None:
            raise MissingExtra("mteb", "mteb")
        from mteb.languages import check_language_code

        check_language_code(language)
        self._meta: Any = None if Path(model).exists() else _registered(model)
        self.asks_once = self._meta is not None and "API" in self._meta.framework
        self._model_name, self._language, self._instruction = model, language, instruction
        self._encode_kwargs = {"batch_size": batch_size, "show_progress_bar": False}
        self._trust_remote_code, self._device = trust_remote_code, device
        self._searcher: Any = None
        self._corpus: Any = None  # a datasets.Dataset, of ids alone where nobody reads it again
        self._encoding, self._forgetting = list[Any](), list[Any]()

    def load(self) -> None:
        from mteb.models import SentenceTransformerEncoderWrapper

        with self._as_told():
            if self._meta is not None:
                self._model = self._meta.load_model(device=self._device)
            else:
                self._model = SentenceTransformerEncoderWrapper(
                    self._model_name, device=self._device, trust_remote_code=self._trust_remote_code
                )
        self._loaded_bytes = _held(self._model)
        if self._reader is not None:
            self.tokenizer = "model"
            if (limit := self._reader.max_seq_length) is not None and math.isfinite(limit):
                self.max_tokens = max(limit - len(self._reader.tokenizer("")["input_ids"]), 0)

    @cached_property
    def _reader(self) -> SentenceTransformer | None:
        """What reads the texts, where it can be asked for its tokens."""
        from sentence_transformers import SentenceTransformer

        inner = getattr(self._model, "model", None)
        return inner if isinstance(inner, SentenceTransformer) and callable(inner.tokenizer) else None

    @cached_property
    def _task(self) -> dict[str, Any]:
        """What mteb tells a model of the task at hand."""
        from mteb.abstasks.retrieval import AbsTaskRetrieval
        from mteb.abstasks.task_metadata import TaskMetadata

        given = self._instruction
        prompt: Any = {"query": AbsTaskRetrieval.abstask_prompt if given is None else given}
        task = TaskMetadata(
            dataset={"path": "icr-bench", "revision": "none"},
            name="icr-bench",
            description="a corpus of icr-bench",
            type="Retrieval",
            category="t2t",
            eval_langs=[self._language],
            main_score="ndcg_at_10",
            prompt=prompt,
        )
        return {
            "task_metadata": task,
            "hf_split": "test",
            "hf_subset": "default",
            "encode_kwargs": self._encode_kwargs,
            "num_proc": None,
        }

    @contextmanager
    def _as_told(self) -> Iterator[None]:
        """Without progress bars, which not every model of mteb lets a caller turn off, and without code from a
        repository, which some loaders of mteb run unasked."""
        from tqdm import tqdm
        from transformers import dynamic_module_utils

        shown = tqdm.__init__

        def hidden(bar: Any, *arguments: Any, **options: Any) -> None:
            shown(bar, *arguments, **options | {"disable": True})

        def refused(name: str, *_: Any, **__: Any) -> None:
            raise ValueError(
                f"{self._model_name} runs code that comes with its weights ({name}); "
                f"read it, then give trust_remote_code=true"
            )

        with ExitStack() as stack:
            stack.enter_context(_instead(tqdm, "__init__", hidden))
            if not self._trust_remote_code:
                stack.enter_context(_instead(dynamic_module_utils, "get_class_in_module", refused))
            yield

    def index(self, documents: Sequence[Document]) -> None:
        from mteb.models import SearchEncoderWrapper, SearchProtocol

        searches = isinstance(self._model, SearchProtocol)
        self._searcher = self._model if searches else SearchEncoderWrapper(self._model)
        parts = getattr(self._searcher, "wrapped_models", [self._searcher])  # those that a hybrid fuses
        self._encoding = [part for part in parts if isinstance(part, SearchEncoderWrapper)]
        self._forgetting = [part for part in parts if hasattr(part, "task_corpus") and part not in self._encoding]
        for part in self._encoding:
            part.index_backend = _Kept()
        corpus = _dataset(document.text for document in documents)
        self._corpus = corpus if self._forgetting else corpus.select_columns(["id"])
        # bm25s fails on a corpus without a token.
        self._answers = not searches or any(re.search(r"\w", document.text) for document in documents)
        step = len(corpus) if searches else CHUNK
        with self._as_told():
            for begin in range(0, len(corpus) if self._answers else 0, step):
                self.progress(begin, len(corpus))
                chosen = range(begin, min(begin + step, len(corpus)))
                self._searcher.index(corpus.select(chosen), **self._task)
        self._remind()

    def _remind(self) -> None:
        """Give encoders the ids that they forget at the end of every search, in place of the texts that they read."""
        for part in self._encoding:
            part.task_corpus = self._corpus

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        if self._searcher is None:
            raise RuntimeError("search before index")
        if not self._answers:
            return [Ranking([], []) for _ in queries]
        step = 1 if self.asks_once else max(len(queries), 1)
        return [
            ranking
            for begin in range(0, len(queries), step)
            for ranking in self._search(queries[begin : begin + step], min(k, len(self._corpus)))
        ]

    def _search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        start = time.perf_counter()
        with self._as_told():
            for part in self._forgetting:
                part.index(self._corpus, **self._task)
            found = self._searcher.search(_dataset(queries), top_k=k, **self._task)
            self._remind()
        seconds = time.perf_counter() - start if self.asks_once else None
        return [_ranking(found.get(str(number), {}), k, seconds) for number in range(len(queries))]

    def index_bytes(self) -> int:
        """The arrays, tensors, tables, texts and containers that the model and its corpus lead to, less those that the
        model led to when it was loaded. What a compiled library or a file holds is not among them."""
        return max(_held([self._model, self._searcher, self._corpus]) - self._loaded_bytes, 0)

    def settings(self) -> dict[str, Any]:
        import mteb

        meta = self._model.mteb_model_meta
        similarity, most = meta.similarity_fn_name, meta.max_tokens
        told = {
            "mteb": mteb.__version__,
            "name": meta.name,
            "revision": meta.revision if self._meta is not None else None,
            "model_type": list(meta.model_type),
            "class": type(self._model).__name__,
            "similarity": similarity and str(similarity.value),
            "dimensions": meta.embed_dim,
            "max_tokens": most if most is not None and math.isfinite(most) else None,
            "language": self._language,
            "instruction": self._task["task_metadata"].prompt["query"],
            "corpus_read": "at every search" if self._forgetting else "once",
            "device": self._device,
        }
        if self._reader is not None:
            told |= {
                "similarity": self._reader.similarity_fn_name,
                "dimensions": self._reader.get_embedding_dimension(),
                "max_tokens": self._reader.max_seq_length,
                "dtype": str(next(self._reader.parameters()).dtype).removeprefix("torch."),
            }
        return told

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        if self._reader is None:
            return super().token_spans(texts)
        encoded = self._reader.tokenizer(
            list(texts), add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
        )
        return [[(start, end) for start, end in spans] for spans in encoded["offset_mapping"]]


def _registered(name: str) -> Any:
    """What mteb knows of a model (``mteb.models.ModelMeta``).

    Raises:
        ValueError: there is no such model, or it cannot search a corpus.
    """
    import mteb

    try:
        meta = mteb.get_model_meta(name)
    except KeyError:
        near = _near(name, [str(meta.name) for meta in mteb.get_model_metas()])
        hint = f"did you mean {' or '.join(near)}?" if near else "mteb.get_model_metas() lists those that it has"
        raise ValueError(f"{name!r} is neither a model of mteb {mteb.__version__} nor a folder; {hint}") from None
    if meta.loader is None:
        raise ValueError(f"mteb lists {name} without code that loads it; choose another model")
    if "cross-encoder" in meta.model_type:
        raise ValueError(f"{name} scores pairs and cannot search a corpus; a cross-encoder is for rerank:model=")
    if "text" not in meta.modalities:
        raise ValueError(f"{name} reads {' and '.join(meta.modalities)}; a model that reads text is needed")
    return meta


def _near(name: str, known: list[str]) -> list[str]:
    """Up to three names that hold this one, or else look like it with or without their organisation."""
    if holding := sorted((one for one in known if name.lower() in one.lower()), key=len):
        return holding[:3]
    folded = {alias.lower(): one for one in known for alias in (one.partition("/")[2], one)}
    found = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)
    return list(dict.fromkeys(folded[alias] for alias in found))


def _dataset(texts: Iterable[str]) -> Any:
    """Texts as mteb is given them, in memory; the id of each is its position."""
    from datasets import Dataset

    held = list(texts)
    return Dataset.from_dict({"id": [str(number) for number in range(len(held))], "text": held})


def _ranking(found: dict[str, float], k: int, seconds: float | None) -> Ranking:
    if bad := sum(not math.isfinite(score) for score in found.values()):
        raise FloatingPointError(f"{bad:,} of {len(found):,} documents have a score that is not finite: {OVERFLOW}")
    best = sorted((-float(score), int(number)) for number, score in found.items())[:k]
    return Ranking([number for _, number in best], [-score for score, _ in best], seconds=seconds)


class _Kept:
    """An index for mteb's encoders: all embeddings, which outlast a search, compared by the model's own similarity."""

    def __init__(self) -> None:
        self._embeddings: list[Any] = []  # arrays or tensors, (documents, dimensions)

    def add_documents(self, embeddings: Any, idxs: Sequence[str]) -> None:
        self._embeddings.append(embeddings)

    def search(
        self, embeddings: Any, k: int, similarity_fn: Any, **_: Any
    ) -> tuple[list[Sequence[float]], list[Sequence[int]]]:
        import torch

        parts = [torch.as_tensor(similarity_fn(embeddings, one)).double().cpu() for one in self._embeddings]
        best = [top_k(row, k) for row in torch.cat(parts, dim=1).numpy()]
        return [ranking.scores for ranking in best], [ranking.numbers for ranking in best]

    def clear(self) -> None:
        """Asked for after every search; the next one needs the embeddings."""


@contextmanager
def _instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of another package, replaced for a while."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _held(root: object) -> int:
    """Bytes of what an object leads to, each thing once; code and the weights of PyTorch's modules apart."""
    import torch
    from datasets import Dataset

    total, seen, left = 0, set[int](), [root]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (type, ModuleType, FunctionType, torch.nn.Module)):
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            total += value.nbytes
        elif isinstance(value, torch.Tensor):
            parts = [value._indices(), value._values()] if value.is_sparse else [value]
            total += sum(one.element_size() * one.nelement() for one in parts)
        elif isinstance(value, Dataset):
            total += value.data.nbytes
        else:
            total += sys.getsizeof(value)
            if isinstance(value, dict):
                left += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple, set, frozenset)):
                left += value
            elif hasattr(value, "__dict__"):
                left.append(vars(value))
    return total
