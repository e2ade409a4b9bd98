"""The models that ship answer by bare name, read whole documents, and have not got worse."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors import safe_open

from icr_bench.benchmarks.beir import beir
from icr_bench.benchmarks.limit import limit
from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import parse_spec
from icr_bench.retrievers.base import Document
from icr_bench.retrievers.weights import SHIPPED, shipped

ROWS = [name for name in Registry().names("retriever") if name.startswith("blocksearch")]


def test_every_model_is_small_and_tells_what_made_it() -> None:
    assert shipped() == ["dense-tiny", "tiny-base", "tiny-offpolicy", "tiny-position", "tiny-sink", "tiny-ssmax"]
    for name in shipped():
        folder = SHIPPED / name
        assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 5_000_000
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert card.startswith(f"# {name}, seed ")
        for part in ("Made by `icr-bench train ", "- start: ", "- data: ", "- limits: ", "- hit@1 on held-out "):
            assert part in card
        assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert {str(file.get_tensor(key).dtype) for key in file.keys()} == {"torch.bfloat16"}  # noqa: SIM118


def hits(name: str, n: int, queries: int) -> float:
    """hit@1 on the short form of LIMIT."""
    task = limit(seed=0, likes=20).choose(seed=0, relevant=1, queries=queries).at(n)
    retriever = Registry().build("retriever", parse_spec(name), {"device": "cpu", "dtype": "float32", "seed": 0})
    retriever.load()
    retriever.index([Document(number, document.text) for number, document in enumerate(task.documents)])
    assert retriever.max_tokens is None or all(
        len(spans) <= retriever.max_tokens
        for spans in retriever.token_spans([document.text for document in task.documents])
    )
    rankings = retriever.search([query.text for query in task.queries], 1)
    first = [task.ids[ranking.numbers[0]] for ranking in rankings]
    return sum(one in task.judgments[q.id] for one, q in zip(first, task.queries, strict=True)) / queries


@pytest.mark.parametrize("name", ROWS)
def test_every_row_finds_what_is_asked_for_among_few(name: str) -> None:
    assert hits(f"{name}:beam=3", 46, 60) >= 0.95


def test_the_dense_model_is_above_chance_and_below_blocksearch() -> None:
    assert 0.3 < hits("dense-tiny", 46, 60) < 0.9


@pytest.mark.slow
def test_the_collapse_and_its_remedies_at_a_thousand() -> None:
    names = ("blocksearch", "blocksearch-position", "blocksearch-ssmax-routing")
    base, position, remedied = (hits(f"{name}:beam=3", 1000, 100) for name in names)
    assert base >= 0.85
    assert remedied >= 0.90
    assert position < base - 0.05


@pytest.mark.parametrize("name", [name for name in shipped() if name != "dense-tiny"])
def test_no_document_of_the_published_limit_is_cut(name: str) -> None:
    folder = Path(os.environ.get("ICR_BENCH_DATA", "nowhere")) / "limit-small"
    if not folder.is_dir():
        pytest.skip("ICR_BENCH_DATA names no folder with limit-small")
    texts = [document.text for document in beir(path=folder).documents]
    spec = parse_spec(f"blocksearch:model={name},beam=1")
    retriever = Registry().build("retriever", spec, {"device": "cpu", "dtype": "float32", "seed": 0})
    retriever.load()
    retriever.index([Document(number, text) for number, text in enumerate(texts)])
    assert retriever.max_tokens is not None
    assert max(map(len, retriever.token_spans(texts))) <= retriever.max_tokens
