"""What a corpus and a query would take, told beforehand: operations counted, times put together from short ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from icr_bench.retrievers.attention import Attention
from icr_bench.retrievers.base import Document, Estimate
from icr_bench.retrievers.blocksearch import BlockSearch
from icr_bench.retrievers.lm import calibrate
from icr_bench.retrievers.lm.cache import prefill
from icr_bench.retrievers.lm.corpus import batch_bytes
from icr_bench.retrievers.lm.engine import Readout
from icr_bench.retrievers.weights import Model

TinyModel = Callable[..., Path]

QUERIES = ["Who likes jazz?", "Who likes old maps?"]
LENGTH = 18 + 32
"""Tokens of every document here, with its wrapper."""


def documents(count: int) -> list[Document]:
    return [Document(number, f"{number:06d} " + "x" * 25) for number in range(count)]


def made(model: Path, *, layer: int | None = None, **options: Any) -> Attention | BlockSearch:
    """`Attention` of a layer, or `BlockSearch`."""
    given = {"model": Model(str(model)), **options}
    retriever = BlockSearch(**given) if layer is None else Attention(layer=layer, **given)
    retriever.load()
    return retriever


def told(model: Path, count: int, **options: Any) -> Estimate:
    estimate = made(model, **options).estimate(documents(count), QUERIES)
    assert estimate is not None
    return estimate


# Operations and memory


@pytest.mark.parametrize("options", [{}, {"layer": 1}, {"layer": 0}], ids=str)
def test_operations_are_those_of_prefill(tiny_model: TinyModel, options: dict[str, int]) -> None:
    """Of a causal block, which kernels compute half of, attention that multiplies all counts double."""
    retriever = made(tiny_model(), **options)
    estimate = retriever.estimate(documents(6), QUERIES)
    assert estimate
    assert estimate.tokens == 6 * LENGTH
    blocks = list(retriever._prompt.documents([document.text for document in documents(6)], range(6)))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        list(prefill(retriever._loaded().backbone, blocks, range(6)))
    counted = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    products, attention = counted.pop("aten.mm"), counted.pop("aten.bmm", 0)
    assert counted == {}
    assert estimate.index_flops == products + attention / 2
    assert estimate.index_flops == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_the_peak_holds_what_is_there_the_index_and_a_batch(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=123_456))
    monkeypatch.setattr("psutil.Process", lambda: held)
    estimate = told(tiny_model(), 50)
    assert estimate.index_bytes == 50 * LENGTH * 1024  # 4 layers, keys and values, 2 heads of 16, 4 bytes
    batch = batch_bytes(made(tiny_model())._loaded().backbone)
    assert estimate.peak_bytes == 123_456 + estimate.index_bytes + batch


# The time of a query


class Times:
    """Stands in for all measurements: what each would be of, with times that say how they are put together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[tuple[int, int]] = []  # rows, and those that are read
        self.read: list[tuple[int, float, bool]] = []  # rows, tokens, whether of a shortlist
        self.scored: list[tuple[int, int, int, int, int]] = []  # rows, heads, documents, their tokens and text
        monkeypatch.setattr(calibrate, "_pass_s", self.pass_s)
        monkeypatch.setattr(calibrate, "_attend_s", self.attend_s)
        monkeypatch.setattr(calibrate, "_score_s", self.score_s)

    def pass_s(self, backbone: Any, rows: int, read: int, readout: Readout | None) -> float:
        self.passes.append((rows, read))
        return 0.0

    def attend_s(self, backbone: Any, rows: int, tokens: float, *, routed: bool = False) -> float:
        self.read.append((rows, tokens, routed))
        return tokens

    def score_s(self, backbone: Any, rows: int, heads: Sequence[int], count: int, length: int, text: int) -> float:
        self.scored.append((rows, len(heads), count, length, text))
        return 1e9


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    return Times(monkeypatch)


COUNT = 1000
TOKENS = COUNT * LENGTH
SCORED = 1e9


@pytest.mark.parametrize(
    ("options", "dense", "routed", "scored"),
    [
        ({}, 4 * 4, 0, 0),  # four layers in the query pass and after each digit but the last
        ({"digits": 5}, 5 * 4, 0, 0),
        ({"readout": "attention"}, 2, 0, 1),
        ({"readout": "attention", "readout_layer": 0}, 0, 0, 1),
        ({"layer": 3}, 3, 0, 1),
        ({"layer": 0}, 0, 0, 1),
        ({"routing": "last"}, 3, 3 * 4 + 1, 1),
        ({"routing": "content"}, 3, 3 * 4 + 1, 1),
        ({"routing": "last", "routing_reach": "upper"}, 4 * 3, 4, 1),
        ({"routing": "last", "routing_layer": 0}, 1, 3 * 4 + 3, 1),
        ({"routing": "last", "routing_layer": 1, "readout": "attention", "readout_layer": 3}, 2, 1, 2),
        ({"routing": "last", "routing_layer": 1, "readout": "attention", "readout_layer": 1}, 1, 0, 1),
    ],
    ids=str,
)
def test_a_query_takes_what_its_layers_read_and_score(
    tiny_model: TinyModel, times: Times, options: dict[str, Any], dense: int, routed: int, scored: int
) -> None:
    if "routing" in options:
        options = options | {"routing_b": 10}
    estimate = told(tiny_model(), COUNT, **options)
    tokens = COUNT * (LENGTH + 2 * (options.get("digits", 4) - 4))
    shortlist = tokens * 10 / COUNT
    assert estimate.query_s == pytest.approx(dense * tokens + routed * shortlist + scored * SCORED)
    assert len(times.scored) == scored


def test_documents_and_queries_are_scored_by_the_tokens_of_their_text(tiny_model: TinyModel, times: Times) -> None:
    def scored(**options: Any) -> tuple[int, int, int, int, int]:
        times.scored.clear()
        told(tiny_model(), COUNT, **options)
        (one,) = times.scored
        return one

    own = (len(QUERIES[0]) + len(QUERIES[1])) // 2 - 1  # a token a letter, but for "li" and "ke"
    (content, *_) = scored(layer=1)
    assert own - 4 < content <= own
    assert scored(layer=1) == (content, 4, COUNT, LENGTH, LENGTH - 18)
    assert scored(layer=1, heads=(0, 3))[:2] == (content, 2)
    assert scored(readout="attention")[:2] == (1, 4)
    assert scored(readout="attention", readout_heads=(2,), readout_tokens="content")[:2] == (content, 1)
    assert scored(routing="last")[:2] == (1, 4)
    assert scored(routing="content")[:2] == (content, 4)


def test_passes_are_of_the_rows_that_run(tiny_model: TinyModel, times: Times) -> None:
    """A query's tokens but for the opening, of which one is read, then the beams, which all are; of a readout by
    content, nothing after a query's text."""

    def passes(**options: Any) -> list[tuple[int, int]]:
        times.passes.clear()
        told(tiny_model(), COUNT, **options)
        return times.passes

    ((query, one), *digits) = passes()
    assert one == 1
    assert digits == [(5, 5), (25, 25), (25, 25)]
    ((content, _),) = passes(layer=2)
    assert content == query - len("\nAnswer: ") - 2  # the last ones are those of "Doc "
    assert passes(readout="attention") == [(query, 1)]
    assert passes(readout="attention", readout_tokens="content") == [(content, 1)]
    both = {"readout": "attention", "readout_tokens": "content", "readout_layer": 3, "routing": "last"}
    assert passes(**both) == [(query, 1)]


@pytest.mark.parametrize("options", [{"layer": 0}, {"readout": "attention", "readout_layer": 0}], ids=str)
def test_scoring_takes_time_that_grows_with_the_corpus(tiny_model: TinyModel, options: dict[str, Any]) -> None:
    """Also at the first layer, where a query has read nothing before."""
    few, many = (told(tiny_model(), count, **options).query_s for count in (10, 8000))
    assert few
    assert many
    assert 0 < few < many


def test_a_score_is_timed_on_what_memory_holds_and_counts_for_all(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = made(tiny_model())._loaded().backbone
    seen = []

    def head_scores(backbone: Any, shard: Any, layer: int, rows: torch.Tensor, heads: Any) -> torch.Tensor:
        seen.append((shard.tokens, len(shard.documents), tuple(rows.shape)))
        assert torch.equal(shard.text_ends - shard.text_starts, torch.full((len(shard.documents),), 30))
        return torch.zeros(len(shard.documents), len(rows), len(heads))

    monkeypatch.setattr(calibrate, "head_scores", head_scores)
    monkeypatch.setattr(calibrate, "_fastest", lambda work, device: work() is None or 1.0)
    assert calibrate._score_s(backbone, 3, (0, 1), 10, 50, 30) == 1.0
    assert calibrate._score_s(backbone, 3, (0, 1), 10_000, 50, 30) == pytest.approx(10_000 / 327)
    assert calibrate._score_s(backbone, 3, (0, 1), 5, 20_000, 30) == 5.0
    assert seen == [(500, 10, (3, 4, 16)), (16_350, 327, (3, 4, 16)), (20_000, 1, (3, 4, 16))]
