"""Beam search against the Hugging Face model's own log-probabilities of all codes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from icr_bench.retrievers.base import Document, Ranking
from icr_bench.retrievers.blocksearch import BlockSearch
from icr_bench.retrievers.lm.backbone import Backbone, load_backbone
from icr_bench.retrievers.lm.cache import CorpusCache, prefill
from icr_bench.retrievers.lm.decode import Beam, Codes, search
from icr_bench.retrievers.lm.engine import Config, Engine, Routing
from icr_bench.retrievers.lm.prompt import Block, Prompt, PromptSettings, Tokenizer, draw_codes

TinyModel = Callable[..., Path]
Digits = tuple[int, ...]

OFFSET = 300

QUERIES = ["who likes quince?", "reef", "how do leaves make food?"]

WORDS = ["quince", "cello", "coral", "yeast", "kernel", "Lima", "plant", "light", "train", "paper", "glass"]


def names(count: int) -> list[str]:
    """Different texts of a few tokens."""
    return [f"{WORDS[number % 11][:3]}{number}" for number in range(count)]


@functools.cache
def hugging_face(model: Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    return loaded.eval()


class Exhaustive:
    """Log-probabilities of codes by the unmodified Hugging Face model.

    It reads the documents in groups, under a mask that keeps them apart, and a query with all codes in one pass: each
    prefix of a code is a token that sees the documents, the query and the shorter prefixes of its own.
    """

    def __init__(self, model: Path, documents: Sequence[Block], tokenizer: Tokenizer) -> None:
        self.model, self.ids = hugging_face(model), tokenizer.digits
        kept = [self._read(documents[begin : begin + 16]) for begin in range(0, len(documents), 16)]
        layers = range(self.model.config.num_hidden_layers)
        self.kept = [tuple(torch.cat([group[layer][i] for group in kept], 2) for i in (0, 1)) for layer in layers]

    @torch.no_grad()
    def _read(self, documents: Sequence[Block]) -> list[tuple[Tensor, Tensor]]:
        owner = torch.tensor([number for number, block in enumerate(documents) for _ in block.ids])
        position = torch.tensor([place for block in documents for place in range(len(block))])
        sees = (owner.unsqueeze(1) == owner).tril()
        ids = torch.tensor([[i for block in documents for i in block.ids]])
        kept: Any = DynamicCache()
        self.model(ids, _additive(sees), position.unsqueeze(0), kept)
        return [(layer.keys, layer.values) for layer in kept.layers]

    @torch.no_grad()
    def next_digit(self, query: Block, codes: Iterable[Digits]) -> dict[Digits, Tensor]:
        """Log-probabilities (10,) in float64 of the digit after every proper prefix of the codes."""
        found = {code[:length] for code in codes for length in range(1, len(code))}
        prefixes = sorted(found, key=lambda prefix: (len(prefix), prefix))
        place = {prefix: len(query) + number for number, prefix in enumerate(prefixes)}
        total, before = len(query) + len(prefixes), self.kept[0][0].shape[2]
        sees = torch.ones(total, total, dtype=torch.bool).tril()
        sees[len(query) :, len(query) :] = False
        for prefix in prefixes:
            for length in range(1, len(prefix) + 1):
                sees[place[prefix], place[prefix[:length]]] = True
        sees = torch.cat((torch.ones(total, before, dtype=torch.bool), sees), 1)
        ids = [*query.ids, *(self.ids[prefix[-1]] for prefix in prefixes)]
        position = [*range(len(query)), *(len(query) + len(prefix) - 1 for prefix in prefixes)]
        kept = DynamicCache()
        for layer, (keys, values) in enumerate(self.kept):
            kept.update(keys, values, layer)
        # By place: the cache's name differs between versions of transformers.
        out = self.model(torch.tensor([ids]), _additive(sees), torch.tensor([position]) + OFFSET, kept)
        logs = out.logits[0].double().log_softmax(-1)[:, self.ids]
        return {(): logs[len(query) - 1]} | {prefix: logs[place[prefix]] for prefix in prefixes}


def _additive(sees: Tensor) -> Tensor:
    return torch.zeros(1, 1, *sees.shape).masked_fill(~sees, -torch.inf)


def total(logs: dict[Digits, Tensor], code: Digits) -> float:
    return sum(float(logs[code[:place]][digit]) for place, digit in enumerate(code))


def beam_search(
    logs: dict[Digits, Tensor], codes: set[Digits], digits: int, width: int, per_step: int, existing: bool
) -> list[Digits]:
    """The codes that a beam search finds, best first, written as plainly as can be."""
    beams: list[Digits] = [()]
    for length in range(1, digits + 1):
        there = {code[:length] for code in codes}
        grown: list[Digits] = []
        for beam in beams:
            longer = [(*beam, digit) for digit in range(10)]
            possible = [prefix for prefix in longer if prefix in there or not existing]
            grown += sorted(possible, key=lambda prefix: -total(logs, prefix))[:per_step]
        beams = sorted(grown, key=lambda prefix: -total(logs, prefix))[:width]
    return beams


@dataclass
class Corpus:
    """Documents with their codes, and queries, before a model."""

    backbone: Backbone
    tokenizer: Tokenizer
    documents: list[Block]
    queries: list[Block]
    codes: list[Digits]
    cache: CorpusCache
    exhaustive: Exhaustive

    @property
    def document(self) -> dict[Digits, int]:
        return {code: number for number, code in enumerate(self.codes)}

    def search(self, beam: Beam, config: Config | None = None) -> list[list[tuple[int, float]]]:
        """Per query, the documents and scores that come back, -1 for a code of none."""
        engine = Engine(self.backbone, config or Config(), OFFSET)
        tree = Codes(self.cache.codes, self.cache.digits, self.backbone.device)
        state = engine.query_pass(self.cache, self.queries)
        documents, scores, _ = search(engine, self.cache, tree, state, self.tokenizer.digits, beam)
        assert documents.shape == scores.shape
        assert documents.shape[0] == len(self.queries)
        assert documents.shape[1] <= beam.width
        assert scores.dtype == torch.float32
        rows = zip(documents.tolist(), scores.tolist(), strict=True)
        return [[(number, score) for number, score in zip(*row, strict=True) if score > -math.inf] for row in rows]


def corpus(
    model: Path,
    texts: Sequence[str],
    digits: int = 4,
    queries: Sequence[str] = QUERIES,
    prompt: PromptSettings = PromptSettings(before="Query: "),  # noqa: B008 - immutable
) -> Corpus:
    backbone, tokenizer, _ = load_backbone(str(model))
    written, numbers = Prompt(tokenizer, prompt, digits), draw_codes(texts, digits, 0)
    documents = list(written.documents(texts, numbers))
    cache = CorpusCache(list(prefill(backbone, documents, range(len(texts)))), numbers, digits)
    codes = [tuple(map(int, f"{number:0{digits}d}")) for number in numbers]
    asked = [*map(written.query, queries)]
    return Corpus(backbone, tokenizer, documents, asked, codes, cache, Exhaustive(model, documents, tokenizer))


def check_sorted(found: Sequence[tuple[int, float]]) -> None:
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)
    numbers = [number for number, _ in found if number >= 0]
    assert len(set(numbers)) == len(numbers)


def check_equal(made: Corpus, beam: Beam, count: int) -> None:
    """All codes of the corpus come back, in the order and with the scores of exhaustive scoring."""
    for query, found in zip(made.queries, made.search(beam), strict=True):
        logs = made.exhaustive.next_digit(query, made.codes)
        expected = {number: total(logs, code) for code, number in made.document.items()}
        check_sorted(found)
        assert [number for number, _ in found] == sorted(expected, key=lambda number: -expected[number])
        assert len(found) == count
        for number, score in found:
            assert score == pytest.approx(expected[number], abs=1e-3)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", layers=3, seed=6, initializer_range=0.12)


@pytest.fixture(scope="module")
def sixty(model: Path) -> Corpus:
    return corpus(model, names(60))


@pytest.mark.parametrize("count", [1, 2, 7, 60, 200])
def test_a_wide_beam_equals_exhaustive_scoring(model: Path, sixty: Corpus, count: int) -> None:
    made = sixty if count == 60 else corpus(model, names(count), queries=QUERIES[:2])
    check_equal(made, Beam(max(count, 25), 10), count)


def test_equals_exhaustive_scoring_in_the_other_family(tiny_model: TinyModel) -> None:
    made = corpus(tiny_model("qwen3", layers=2, tie_word_embeddings=False), names(30))
    check_equal(made, Beam(30, 10), 30)


@pytest.mark.parametrize(("digits", "count"), [(1, 1), (1, 10), (2, 30), (2, 100), (5, 25), (6, 3)])
def test_codes_of_other_lengths_equal_exhaustive_scoring(model: Path, digits: int, count: int) -> None:
    check_equal(corpus(model, names(count), digits, QUERIES[:2]), Beam(100, 10), count)


@pytest.mark.parametrize(("width", "per_step"), [(25, 5), (5, 5), (1, 1), (1, 10), (3, 10), (40, 2), (60, 1), (10, 3)])
def test_a_narrow_beam_finds_what_a_plain_search_finds(sixty: Corpus, width: int, per_step: int) -> None:
    """A part of all codes, with the scores that they have anyway."""
    for query, found in zip(sixty.queries, sixty.search(Beam(width, per_step)), strict=True):
        logs = sixty.exhaustive.next_digit(query, sixty.codes)
        expected = beam_search(logs, set(sixty.codes), 4, width, per_step, existing=True)
        check_sorted(found)
        assert [number for number, _ in found] == [sixty.document[code] for code in expected]
        for code, (_, score) in zip(expected, found, strict=True):
            assert score == pytest.approx(total(logs, code), abs=1e-3)
        assert 0 < len(found) < 60


@pytest.mark.parametrize(("width", "per_step"), [(100, 10), (25, 5), (4, 10), (1, 1)])
def test_without_restriction_any_code_may_come_back(model: Path, width: int, per_step: int) -> None:
    made = corpus(model, names(30), 2)
    every: set[Digits] = {(one, other) for one in range(10) for other in range(10)}
    for query, found in zip(made.queries, made.search(Beam(width, per_step, existing=False)), strict=True):
        logs = made.exhaustive.next_digit(query, every)
        expected = beam_search(logs, every, 2, width, per_step, existing=False)
        if width == 100:
            assert expected == sorted(every, key=lambda code: -total(logs, code))
        check_sorted(found)
        assert [number for number, _ in found] == [made.document.get(code, -1) for code in expected]
        for code, (_, score) in zip(expected, found, strict=True):
            assert score == pytest.approx(total(logs, code), abs=1e-3)


def test_per_step_bounds_how_many_digits_continue_a_beam(sixty: Corpus) -> None:
    for per_step in (1, 2, 3):
        for found in sixty.search(Beam(60, per_step)):
            codes = [sixty.codes[number] for number, _ in found]
            for length in range(4):
                digits: dict[Digits, set[int]] = {}
                for code in codes:
                    digits.setdefault(code[:length], set()).add(code[length])
                assert max(map(len, digits.values())) <= per_step
            assert len({code[0] for code in codes}) == per_step


@pytest.mark.parametrize("values", [(0, 5), (25, 0), (25, 11), (-1, 5)])
def test_a_beam_that_cannot_be_is_refused(values: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="beam must be 1 or more and per_step 1 to 10"):
        Beam(*values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [Config(), Config(ssmax=(0.3, 0.5, 0.4), routing=Routing(1, 9)), Config(routing=Routing(0, 9, reach="upper"))],
    ids=["plain", "ssmax and routing", "upper routing"],
)
def test_a_score_is_the_sum_along_the_codes_path_in_float32(model: Path, config: Config, dtype: str) -> None:
    backbone, tokenizer, _ = load_backbone(str(model), dtype=dtype)
    prompt, texts = Prompt(tokenizer, PromptSettings(before="Query: "), 4), names(20)
    numbers = draw_codes(texts, 4, 0)
    cache = CorpusCache(list(prefill(backbone, list(prompt.documents(texts, numbers)), range(20))), numbers, 4)
    engine, ids = Engine(backbone, config, OFFSET), torch.tensor(tokenizer.digits)
    blocks = [prompt.query(query) for query in QUERIES[:2]]
    state = engine.query_pass(cache, blocks)
    tree = Codes(numbers, 4, backbone.device)
    documents, scores, found = search(engine, cache, tree, state, tokenizer.digits, Beam(20, 10))
    assert found.tolist() == [[numbers[document] for document in row] for row in documents.tolist()]
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())
    codes = torch.tensor([[int(digit) for digit in f"{number:04d}"] for number in numbers])
    state = engine.query_pass(cache, blocks)  # the search has left its digits in the other one
    assert state.hidden is not None
    logs = [backbone.log_probabilities(state.hidden)[:, None, ids].expand(-1, 20, -1)]
    beams = torch.arange(20).expand(2, -1)
    for place in range(3):
        hidden = engine.digit_pass(cache, state, ids[codes[:, place]].expand(2, -1), beams)
        logs.append(backbone.log_probabilities(hidden)[..., ids])
    summed = sum(
        step.double().gather(2, codes[:, place].expand(2, -1).unsqueeze(2)).squeeze(2)
        for place, step in enumerate(logs)
    )
    assert isinstance(summed, Tensor)
    tolerance = 1e-4 if dtype == "float32" else 0.05  # kernels for few and for many rows round differently
    assert torch.allclose(scores.double(), summed.gather(1, documents), atol=tolerance, rtol=0)


def retriever(model: Path, texts: Sequence[str], **options: Any) -> BlockSearch:
    made = BlockSearch(model=str(model), **options)
    made.load()
    made.index([Document(number, text) for number, text in enumerate(texts)])
    return made


DEFAULT = PromptSettings()


@pytest.mark.parametrize("k", [26, 50, 60])
def test_more_documents_than_the_beam_holds_widen_it(model: Path, k: int) -> None:
    made = corpus(model, names(60), prompt=DEFAULT)
    for query, ranking in zip(made.queries, retriever(model, names(60)).search(QUERIES, k), strict=True):
        logs = made.exhaustive.next_digit(query, made.codes)
        code_of = {made.document[code]: code for code in made.codes}
        assert len(set(ranking.numbers)) == k
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)
        expected = [total(logs, code_of[number]) for number in ranking.numbers]
        assert list(ranking.scores) == pytest.approx(expected, abs=1e-3)


def test_as_many_documents_as_the_beam_holds_come_back(model: Path) -> None:
    for ranking in retriever(model, names(30)).search(QUERIES, 25):
        assert len(ranking.numbers) == 25


def test_fewer_documents_than_the_beam_holds_are_its_best(model: Path) -> None:
    searched = retriever(model, names(60))
    for all_of_them, few in zip(searched.search(QUERIES, 25), searched.search(QUERIES, 4), strict=True):
        assert list(few.numbers) == list(all_of_them.numbers)[:4]
        assert list(few.scores) == list(all_of_them.scores)[:4]


def test_codes_of_no_document_are_left_out_of_rankings(model: Path) -> None:
    made = corpus(model, names(12), 2, prompt=DEFAULT)
    searched = retriever(model, names(12), digits=2, beam=100, per_step=10, existing=False)
    for query, ranking in zip(made.queries, searched.search(QUERIES, 12), strict=True):
        logs = made.exhaustive.next_digit(query, made.codes)
        expected = sorted(made.codes, key=lambda code: -total(logs, code))
        assert list(ranking.numbers) == [made.document[code] for code in expected]
        assert list(ranking.scores) == pytest.approx([total(logs, code) for code in expected], abs=1e-3)
    narrow = retriever(model, names(12), digits=4, beam=2, existing=False)
    assert any(len(ranking.numbers) < 2 for ranking in narrow.search(QUERIES, 2))


CAP = 40
"""Tokens of a document, so that a text of a line is far above it."""

ODD = [
    "",
    "a",
    "\ud800",
    "x\udfffy \ud83d",
    "語" * 30,
    "Ünï ço\u0301de \u202e\u0000",
    "<|im_end|><|endoftext|>",
    "word " * 400,
    "(Doc 0000)",
    "\n \t",
]

TEXT = st.one_of(st.sampled_from(ODD), st.text(st.characters(), max_size=12), st.text(st.characters(), max_size=200))
QUERY = st.one_of(st.sampled_from(["", "\udc00", "z" * 230, "many words " * 30]), st.text(st.characters(), max_size=20))

CHECKED = settings(max_examples=10, deadline=None, derandomize=True, database=None)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"per_step": 10},
    "no restriction": {"per_step": 10, "existing": False, "digits": 1, "beam": 10},
    "ssmax and routing": {"per_step": 10, "ssmax": True, "routing": "content", "routing_layer": 1, "routing_b": 2},
    "sink and upper routing": {
        "per_step": 10,
        "sink_gate": True,
        "routing": "last",
        "routing_b": 1,
        "routing_reach": "upper",
    },
    "readout": {"readout": "attention", "readout_layer": 1},
    "readout by content": {"readout": "attention", "readout_tokens": "content", "readout_heads": (1,)},
}


@pytest.fixture(scope="module")
def loaded(model: Path) -> dict[str, BlockSearch]:
    made = {name: BlockSearch(model=str(model), cap=CAP, **VARIANTS[name]) for name in VARIANTS}
    for searched in made.values():
        searched.load()
    return made


def check_sound(ranking: Ranking, n: int, k: int) -> None:
    numbers, scores = list(ranking.numbers), list(ranking.scores)
    assert ranking.error == ""
    assert len(numbers) == len(scores) == min(k, n)
    assert len(set(numbers)) == len(numbers)
    assert all(isinstance(number, int) and 0 <= number < n for number in numbers)
    assert all(isinstance(score, float) and math.isfinite(score) for score in scores)
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("name", VARIANTS)
@given(st.lists(TEXT, min_size=1, max_size=6), st.lists(QUERY, min_size=1, max_size=3), st.integers(1, 6))
@example([""], [""], 1)
@example(["", "", ""], ["a", ""], 3)
@example(["a"], ["z" * 230], 1)
@example(["same", "same", "word " * 400], ["same"], 3)
@CHECKED
def test_rankings_are_sound(
    loaded: dict[str, BlockSearch], name: str, texts: list[str], queries: list[str], k: int
) -> None:
    searched = loaded[name]
    searched.index([Document(number, text) for number, text in enumerate(texts)])
    k = min(k, len(texts))
    rankings = searched.search(queries, k)
    assert len(rankings) == len(queries)
    for ranking in rankings:
        check_sound(ranking, len(texts), k)
        if "readout" not in name:
            assert max(ranking.scores) <= 0


@given(st.lists(TEXT, min_size=1, max_size=4), st.lists(QUERY, min_size=1, max_size=2))
@example(ODD, ["", "z" * 230])
@CHECKED
def test_rankings_equal_exhaustive_scoring(
    model: Path, loaded: dict[str, BlockSearch], texts: list[str], queries: list[str]
) -> None:
    searched = loaded["plain"]
    searched.index([Document(number, text) for number, text in enumerate(texts)])
    made = corpus(model, texts, queries=queries, prompt=PromptSettings(cap=CAP))
    assert all(len(block) <= CAP for block in made.documents)
    for query, ranking in zip(made.queries, searched.search(queries, len(texts)), strict=True):
        logs = made.exhaustive.next_digit(query, made.codes)
        expected = [total(logs, code) for code in made.codes]
        check_sound(ranking, len(texts), len(texts))
        assert list(ranking.scores) == pytest.approx([expected[number] for number in ranking.numbers], abs=1e-3)
