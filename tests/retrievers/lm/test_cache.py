"""The corpus as keys and values: batches, prefill against Hugging Face's own model, and room in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icr_bench.harness.cli import main
from icr_bench.retrievers.base import Document
from icr_bench.retrievers.blocksearch import BlockSearch
from icr_bench.retrievers.lm.backbone import Backbone, load_backbone
from icr_bench.retrievers.lm.cache import BATCH_TOKENS, CorpusCache, Shard, batches, prefill
from icr_bench.retrievers.lm.corpus import NoRoom
from icr_bench.retrievers.lm.prompt import Block

FAMILIES = ("qwen3", "llama")
SHARD_BYTES = (1, 40_000, 1 << 29)
"""Each document alone, about three of them, all in one."""


# Batches


@settings(max_examples=150, deadline=None, database=None)
@given(st.lists(st.one_of(st.integers(1, 300), st.integers(1, 3000)), max_size=150))
def test_batches_hold_every_document_once_with_little_padding(lengths: list[int]) -> None:
    made = list(batches(lengths))
    assert sorted(position for batch in made for position in batch) == list(range(len(lengths)))
    for batch in made:
        real = [lengths[position] for position in batch]
        padded = max(real) * len(batch)
        assert real[0] == max(real)  # what the others are padded to
        assert padded - sum(real) <= 0.1 * sum(real)
        assert padded <= BATCH_TOKENS or len(batch) == 1


def test_documents_of_one_length_fill_batches() -> None:
    assert [len(batch) for batch in batches([BATCH_TOKENS // 8] * 20)] == [8, 8, 4]


def test_a_document_longer_than_a_batch_lies_alone() -> None:
    assert list(batches([5, BATCH_TOKENS + 1, 5])) == [[1], [0, 2]]


def test_no_documents_make_no_batch() -> None:
    assert list(batches([])) == []


# Prefill

LENGTHS = [7, 31, 1, 12, 31, 30, 29, 28, 60, 2, 15, 14, 13, 13, 40, 3]
NUMBERS = [5, 0, 11, 2, 15, 3, 9, 1, 4, 14, 7, 13, 6, 8, 12, 10]


@pytest.fixture(scope="module")
def backbones(tiny_model: Callable[..., Path]) -> dict[str, Backbone]:
    return {family: load_backbone(str(tiny_model(family)))[0] for family in FAMILIES}


@pytest.fixture(scope="module")
def blocks() -> list[Block]:
    """Random tokens; the text lies somewhere in the middle, and in the shortest there is none."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in LENGTHS:
        ids = torch.randint(0, 260, (length,), generator=generator).tolist()
        made.append(Block(ids, min(2, length), max(length - 3, min(2, length))))
    return made


@pytest.fixture(scope="module")
def alone(tiny_model: Callable[..., Path], blocks: list[Block]) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Keys and values (L, K, T, D) of each document by itself, through Hugging Face's model."""
    from transformers import AutoModelForCausalLM

    found = {}
    for family in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
        found[family] = []
        for block in blocks:
            with torch.no_grad():
                layers = model(input_ids=torch.tensor([block.ids]), use_cache=True).past_key_values.layers
            found[family].append((torch.cat([x.keys for x in layers]), torch.cat([x.values for x in layers])))
    return found


def filled(backbone: Backbone, blocks: Sequence[Block], shard_bytes: int = 1 << 29) -> list[Shard]:
    return list(prefill(backbone, blocks, NUMBERS[: len(blocks)], shard_bytes=shard_bytes))


@pytest.mark.parametrize("shard_bytes", SHARD_BYTES)
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_are_those_of_the_document_alone(
    backbones: dict[str, Backbone],
    blocks: list[Block],
    alone: dict[str, list[tuple[torch.Tensor, torch.Tensor]]],
    family: str,
    shard_bytes: int,
) -> None:
    seen = []
    for shard in filled(backbones[family], blocks, shard_bytes):
        for number, start, end in zip(
            shard.documents.tolist(), shard.starts.tolist(), shard.ends.tolist(), strict=True
        ):
            keys, values = alone[family][NUMBERS.index(number)]
            assert torch.allclose(shard.keys[:, :, start:end], keys, atol=1e-4)
            assert torch.allclose(shard.values[:, :, start:end], values, atol=1e-4)
            seen.append(number)
    assert sorted(seen) == list(range(len(blocks)))


def test_the_company_of_a_document_changes_nothing(backbones: dict[str, Backbone], blocks: list[Block]) -> None:
    """Alone, and in a batch where it is padded."""
    backbone = backbones["qwen3"]
    (company,) = filled(backbone, [Block([9] * 29, 0, 0), blocks[7], Block([8] * 30, 0, 0)])
    (single,) = filled(backbone, [blocks[7]])
    place = company.documents.tolist().index(NUMBERS[1])
    found = company.keys[:, :, company.starts[place] : company.ends[place]]
    assert torch.allclose(found, single.keys, atol=1e-5)


@pytest.mark.parametrize("shard_bytes", SHARD_BYTES)
def test_shards_keep_to_their_size(backbones: dict[str, Backbone], blocks: list[Block], shard_bytes: int) -> None:
    backbone = backbones["qwen3"]
    shards = filled(backbone, blocks, shard_bytes)
    for shard in shards:
        assert shard.nbytes() <= shard_bytes or len(shard.documents) == 1
    if shard_bytes == 1 << 29:
        assert len(shards) == 1


def test_no_shard_could_have_taken_the_next_document(backbones: dict[str, Backbone], blocks: list[Block]) -> None:
    """Which is what makes few files of a corpus."""
    backbone = backbones["qwen3"]
    shards = filled(backbone, blocks, 40_000)
    for shard, following in pairwise(shards):
        first = int(following.ends[0]) * backbone.token_bytes()
        assert shard.nbytes() + first > 40_000


@pytest.mark.parametrize("shard_bytes", SHARD_BYTES)
def test_spans_say_where_documents_and_their_texts_lie(
    backbones: dict[str, Backbone], blocks: list[Block], shard_bytes: int
) -> None:
    for shard in filled(backbones["llama"], blocks, shard_bytes):
        assert shard.starts[0] == 0
        assert shard.ends[-1] == shard.tokens == shard.values.shape[2]
        assert torch.equal(shard.starts[1:], shard.ends[:-1])
        for place, number in enumerate(shard.documents.tolist()):
            block, start = blocks[NUMBERS.index(number)], int(shard.starts[place])
            assert int(shard.ends[place]) - start == len(block)
            assert int(shard.text_starts[place]) - start == block.text
            assert int(shard.text_ends[place]) - start == block.after


def test_progress_counts_tokens_up_to_all(backbones: dict[str, Backbone], blocks: list[Block]) -> None:
    told: list[tuple[int, int]] = []
    list(prefill(backbones["qwen3"], blocks, NUMBERS, lambda done, total: told.append((done, total)), 40_000))
    assert {total for _, total in told} == {sum(LENGTHS)}
    done = [done for done, _ in told]
    assert done[0] == 0
    assert done[-1] == sum(LENGTHS)
    assert all(one < other for one, other in pairwise(done))
    assert len(done) > 3


def test_prefill_of_nothing_gives_no_shard(backbones: dict[str, Backbone]) -> None:
    assert filled(backbones["qwen3"], []) == []


def test_bytes_are_those_of_the_tensors(tiny_model: Callable[..., Path], blocks: list[Block]) -> None:
    for family, dtype, size in (("qwen3", "float32", 4), ("llama", "bfloat16", 2)):
        backbone = load_backbone(str(tiny_model(family)), dtype=dtype)[0]
        shards = filled(backbone, blocks, 40_000)
        real = sum(tensor.numel() * size for shard in shards for tensor in (shard.keys, shard.values))
        assert {shard.keys.element_size() for shard in shards} == {size}
        assert real == sum(LENGTHS) * backbone.token_bytes()
        cache = CorpusCache(shards, list(range(len(blocks))), 4)
        assert cache.nbytes() == sum(shard.nbytes() for shard in shards) == real
        assert cache.tokens == sum(LENGTHS)
        assert len(cache) == len(blocks)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_layers_may_be_left_out(backbones: dict[str, Backbone], blocks: list[Block], first: int) -> None:
    backbone = backbones["qwen3"]
    (whole,) = filled(backbone, blocks)
    (less,) = prefill(backbone, blocks, NUMBERS, first=first)
    assert torch.equal(less.keys, whole.keys[first:])
    assert torch.equal(less.values, whole.values[first:])
    assert less.nbytes() == less.tokens * backbone.token_bytes(first)


# Parts of a shard


@pytest.mark.parametrize("kept", [[0], [15], [3, 4, 9], [9, 0, 3], list(range(16))])
def test_a_selection_holds_its_documents_as_they_were(
    backbones: dict[str, Backbone], blocks: list[Block], kept: list[int]
) -> None:
    (shard,) = filled(backbones["qwen3"], blocks)
    part = shard.select(kept)
    assert part.documents.tolist() == shard.documents[kept].tolist()
    assert part.tokens == int((shard.ends - shard.starts)[kept].sum())
    assert part.starts[0] == 0
    assert torch.equal(part.starts[1:], part.ends[:-1])
    for place, held in enumerate(kept):
        for begin, end in (("starts", "ends"), ("text_starts", "text_ends")):
            ours = slice(getattr(part, begin)[place], getattr(part, end)[place])
            theirs = slice(getattr(shard, begin)[held], getattr(shard, end)[held])
            assert torch.equal(part.keys[:, :, ours], shard.keys[:, :, theirs])
            assert torch.equal(part.values[:, :, ours], shard.values[:, :, theirs])


def test_other_numbers_leave_the_rest_as_it_is(backbones: dict[str, Backbone], blocks: list[Block]) -> None:
    (shard,) = filled(backbones["qwen3"], blocks)
    other = shard.numbered(range(100, 116))
    assert other.documents.tolist() == list(range(100, 116))
    assert other.keys is shard.keys
    assert other.values is shard.values
    assert sorted(shard.documents.tolist()) == list(range(16))
    for name in ("starts", "ends", "text_starts", "text_ends"):
        assert torch.equal(getattr(other, name), getattr(shard, name))


# A whole corpus

TEXTS = [f"text {i} " + "more words " * (i % 9) for i in range(30)] + [""]


def made(model: Path, **options: Any) -> BlockSearch:
    retriever = BlockSearch(model=str(model), **options)  # type: ignore[arg-type]
    retriever.load()
    return retriever


def documents(texts: Sequence[str]) -> list[Document]:
    return [Document(number, text) for number, text in enumerate(texts)]


def test_a_corpus_holds_documents_0_to_n(tiny_model: Callable[..., Path]) -> None:
    retriever = made(tiny_model())
    retriever.index(documents(TEXTS))
    cache = retriever._corpus.cache
    assert sorted(number for shard in cache.shards for number in shard.documents.tolist()) == list(range(len(TEXTS)))
    assert len(set(cache.codes)) == len(TEXTS)
    settings = retriever.settings()
    assert settings["corpus_tokens"] == cache.tokens
    assert settings["prefill"] == "measured"
    assert retriever.index_bytes() == cache.tokens * 2 * 4 * 2 * 16 * 4  # 4 layers, 2 heads of 16, float32
    assert not retriever.index_reused


def test_truncated_documents_are_counted(tiny_model: Callable[..., Path]) -> None:
    retriever = made(tiny_model(), cap=40)
    retriever.index(documents(["x" * 10, "x " * 100, "y " * 200]))
    assert retriever.settings()["truncated"] == 2
    assert retriever.settings()["corpus_tokens"] == 18 + 10 + 2 * 40


def test_a_second_corpus_replaces_the_first(tiny_model: Callable[..., Path]) -> None:
    retriever = made(tiny_model())
    retriever.index(documents(TEXTS))
    retriever.index(documents(TEXTS[:3]))
    assert len(retriever._corpus.cache) == 3
    assert {number for ranking in retriever.search(["text"], 3) for number in ranking.numbers} == {0, 1, 2}


# Room in memory


def with_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=size, total=size))


def refusal(retriever: BlockSearch) -> tuple[str, list[tuple[int, int]]]:
    """What an index that finds no room says, and the progress told before."""
    told: list[tuple[int, int]] = []
    retriever.progress = lambda done, total: told.append((done, total))  # type: ignore[method-assign]
    with pytest.raises(NoRoom) as caught:
        retriever.index(documents(TEXTS))
    return str(caught.value), told


def test_a_corpus_without_room_is_refused_before_prefill(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = made(tiny_model())
    retriever.index(documents(TEXTS))
    tokens, size = retriever.settings()["corpus_tokens"], retriever.index_bytes()
    with_free(monkeypatch, 12_345)
    message, told = refusal(retriever)
    assert told == []
    assert f"{len(TEXTS):,} documents ({tokens:,} tokens)" in message
    assert "only 12,345 are free" in message
    needed = int(re.search(r"take ([\d,]+) bytes", message)[1].replace(",", ""))  # type: ignore[index]
    assert needed > size
    for option in ("fewer documents", "smaller cap or model", "bfloat16", "cache=DIR"):
        assert option in message
    assert "\n" not in message
    assert ". " not in message
    with_free(monkeypatch, needed - 1)
    assert refusal(retriever)[1] == []
    with_free(monkeypatch, needed)
    retriever.index(documents(TEXTS))
    assert len(retriever.search(["text"], 5)[0].numbers) == 5


def test_no_room_is_out_of_memory() -> None:
    assert issubclass(NoRoom, MemoryError)


TIGHT = """
from types import SimpleNamespace

from icr_bench.retrievers.blocksearch import BlockSearch
from icr_bench.retrievers.lm import corpus


class Tight(BlockSearch):
    def load(self):
        super().load()
        corpus.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=1000))


RETRIEVERS = {"tight": Tight}
"""


@pytest.mark.slow
def test_a_cell_without_room_is_a_row_of_its_own(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    data, plugin = tmp_path / "data", tmp_path / "tight.py"
    (data / "qrels").mkdir(parents=True)
    (data / "corpus.jsonl").write_text("".join(f'{{"_id": "d{i}", "text": "word{i}"}}\n' for i in range(6)))
    (data / "queries.jsonl").write_text('{"_id": "q0", "text": "word0"}\n')
    (data / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\n")
    plugin.write_text(TIGHT)
    chosen = ["-r", f"tight:model={tiny_model()}", "-r", f"blocksearch:model={tiny_model()}"]
    fixed = ["-b", f"beir:path={data}", "-k", "1", "--plugin", str(plugin), "--device", "cpu"]
    assert main(["run", *fixed, *chosen, "-o", str(tmp_path / "out")]) == 1
    tight, roomy = map(json.loads, (tmp_path / "out" / "cells.jsonl").read_text().splitlines())
    assert tight["status"] == "oom"
    assert "keys and values of 6 documents" in tight["error"]
    assert "only 1,000 are free" in tight["error"]
    assert tight["time"] is None
    assert roomy["status"] == "ok"
