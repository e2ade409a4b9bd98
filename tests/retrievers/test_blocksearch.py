"""BlockSearch as a retriever: its rows and options, what weights carry, its codes, its scores and its record."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from space_first import SPACE_FIRST, with_space_first

from icr_bench.harness.cell import Job, measure
from icr_bench.harness.cli import main
from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import Spec
from icr_bench.retrievers.attention import Attention
from icr_bench.retrievers.base import Document, Ranking
from icr_bench.retrievers.blocksearch import BlockSearch
from icr_bench.retrievers.weights import Model, identify

TinyModel = Callable[..., Path]

PEOPLE = ("Ada Brown", "Ben K. Lee", "Cleo Diaz", "Dan Wolf", "Eve Stone", "Finn Ochoa", "Gus Hall", "Hana Ito")
THINGS = ("Quokkas", "River Otters", "Chess", "Old Maps", "Candle Making", "Jazz", "Kites", "Figs", "Rye Bread")
TEXTS = [f"{PEOPLE[i % 8]} likes {THINGS[i % 9]} and {THINGS[(2 * i + 1) % 9]}{' a lot' * (i % 3)}." for i in range(20)]
QUERIES = ["Who likes River Otters?", "Who likes Jazz?", "a person fond of kites and bread"]

ROWS: dict[str, dict[str, Any]] = {
    "blocksearch": {},
    "blocksearch-position": {"model": "tiny-position", "codes": "position"},
    "blocksearch-offpolicy": {"model": "tiny-offpolicy"},
    "blocksearch-sink": {"model": "tiny-sink"},
    "blocksearch-ssmax": {"model": "tiny-ssmax", "ssmax": True},
    "blocksearch-routing": {"routing": "last"},
    "blocksearch-ssmax-routing": {"model": "tiny-ssmax", "ssmax": True, "routing": "last"},
}
"""Name -> what it changes about blocksearch."""


def corpus(texts: Sequence[str]) -> list[Document]:
    return [Document(number, text) for number, text in enumerate(texts)]


def made(model: Path | str, texts: Sequence[str] = TEXTS, **options: Any) -> BlockSearch:
    """A retriever that holds the texts."""
    retriever = BlockSearch(model=Model(str(model)), **options)
    retriever.load()
    retriever.index(corpus(texts))
    return retriever


def all_found(model: Path | str, texts: Sequence[str] = TEXTS, **options: Any) -> list[dict[int, float]]:
    """Per query document -> score, of every document: nothing is pruned."""
    options = {"beam": len(texts), "per_step": 10} | options
    rankings = made(model, texts, **options).search(QUERIES, len(texts))
    found = [dict(zip(ranking.numbers, ranking.scores, strict=True)) for ranking in rankings]
    assert all(set(scores) == set(range(len(texts))) for scores in found)
    return found


@cache
def _found(model: str, options: tuple[tuple[str, Any], ...]) -> list[dict[int, float]]:
    return all_found(model, **dict(options))


def known(model: Path, **options: Any) -> list[dict[int, float]]:
    """As `all_found`, computed once for all tests that compare with it."""
    return _found(str(model), tuple(sorted(options.items())))


def same(one: Sequence[dict[int, float]], other: Sequence[dict[int, float]]) -> bool:
    return all(scores == pytest.approx(others, abs=1e-3) for scores, others in zip(one, other, strict=True))


def cell(
    name: str, model: Path | str, texts: Sequence[str] = TEXTS, max_tokens: int | None = None, **options: Any
) -> Any:
    """What a run measures of a cell."""
    job = Job(
        plugins=[],
        retriever=name,
        options={"model": str(model)} | options,
        filled={"device": "cpu", "dtype": "float32", "seed": 0},
        documents=list(texts),
        queries=list(QUERIES),
        sample=[0],
        depth=3,
        max_tokens=max_tokens,
        check=False,
        plan=False,
        look=None,
        golds=[],
        hidden=[],
    )
    return measure(job, lambda stage, done, total: None)


@pytest.fixture
def with_extras(tiny_model: TinyModel, tmp_path: Path) -> Callable[[object], Path]:
    """The folder of the tiny model with this as its blocksearch.json."""

    def make(extras: object) -> Path:
        folder = shutil.copytree(tiny_model(), tmp_path / "weights", dirs_exist_ok=True)
        text = extras if isinstance(extras, str) else json.dumps(extras)
        (folder / "blocksearch.json").write_text(text)
        return folder

    return make


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder in BEIR layout: twelve documents, two queries."""
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{i}", "text": text} for i, text in enumerate(TEXTS[:12])]
    queries = [{"_id": f"q{i}", "text": text} for i, text in enumerate(QUERIES[:2])]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in documents))
    (folder / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in queries))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td1\t1\nq1\td5\t1\n")
    return folder


# Names and options


def test_every_row_and_the_attention_retriever_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "retrievers"]) == 0
    listed = capsys.readouterr().out.split()
    assert {name for name in listed if name.startswith("blocksearch")} == set(ROWS)
    assert "attention" in listed


@pytest.mark.parametrize("name", ROWS)
def test_describe_tells_every_option_with_the_rows_own_default(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", name]) == 0
    told = capsys.readouterr().out.partition("\nreference ")[0]
    defaults = {
        "model": "tiny-base",
        "base": None,
        "codes": "random",
        "digits": None,
        "cap": None,
        "offset": None,
        "ssmax": False,
        "ssmax_n": "documents",
        "sink_gate": False,
        "routing": "none",
        "routing_layer": None,
        "routing_b": None,
        "routing_reach": "every",
        "readout": "decode",
        "readout_layer": None,
        "readout_heads": None,
        "readout_tokens": "last",
        "beam": 25,
        "per_step": 5,
        "existing": True,
        "cache": None,
        "cache_gb": 50.0,
    }
    lines = {line.split("=")[0].strip(): line for line in told.splitlines() if line.startswith("  ") and "=" in line}
    assert lines.pop("label")
    for option, default in (defaults | ROWS[name]).items():
        assert lines.pop(option).endswith(f"; default {default})")
        assert re.search(rf"^    {option}: \S", told, re.M)
    assert not lines


def test_every_row_is_described_in_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    first = []
    for name in ROWS:
        assert main(["describe", name]) == 0
        first.append(capsys.readouterr().out.splitlines()[2])
    assert len(set(first)) == len(ROWS)


@pytest.mark.parametrize("command", ["run", "plan", "validate"])
def test_attention_must_be_given_a_model(command: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["attention"] if command == "validate" else ["-r", "attention", "-b", f"beir:path={data}"]
    assert main([command, *arguments]) == 2
    answer = capsys.readouterr()
    assert answer.err == "icr-bench: retriever attention needs model=: attention:model=...\n"
    assert not answer.out


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_blocksearch_with_the_options_written_out(name: str, tiny_model: TinyModel) -> None:
    kept = {"routing_b": 3} if "routing" in ROWS[name] else {}
    given = {"model": str(tiny_model()), **kept}
    filled = {"device": "cpu", "dtype": "float32", "seed": 0}
    row = Registry().build("retriever", Spec(name, given), filled)
    row.load()
    row.index(corpus(TEXTS))
    plain = made(**{**ROWS[name], **given})
    assert row.search(QUERIES, 5) == plain.search(QUERIES, 5)
    assert row.settings() == plain.settings()


def test_a_rows_option_can_be_given_back(tiny_model: TinyModel) -> None:
    spec = Spec("blocksearch-ssmax-routing", {"model": str(tiny_model()), "ssmax": "no", "routing": "none"})
    row = Registry().build("retriever", spec, {})
    row.load()
    assert {"ssmax", "routing"} & row.settings().keys() == set()


BAD: dict[str, tuple[str, str]] = {
    "routing_b": ("0", "routing_b must be 1 or more, got 0"),
    "beam": ("0", "beam must be 1 or more and per_step 1 to 10, got 0 and 5"),
    "per_step": ("11", "beam must be 1 or more and per_step 1 to 10, got 25 and 11"),
    "digits": ("0", "digits must be 1 to 7, got 0"),
    "cap": ("0", "cap must be 1 or more and offset 0 or more, got 0 and 300"),
    "offset": ("-1", "cap must be 1 or more and offset 0 or more, got 300 and -1"),
    "cache_gb": ("0", "cache_gb must be above 0, got 0"),
    "codes": ("sequential", "codes: expected one of random, position, got 'sequential'"),
    "readout": ("dense", "readout: expected one of decode, attention, got 'dense'"),
    "routing": ("first", "routing: expected one of none, last, content, got 'first'"),
    "routing_reach": ("lower", "routing_reach: expected one of every, upper, got 'lower'"),
    "readout_heads": ("1+x", "readout_heads: expected a whole number, got 'x'"),
    "model": ("", "model is empty; give a hub id, a local folder or a .gguf file"),
}


@pytest.mark.parametrize("option", BAD)
def test_an_option_that_cannot_be_is_refused_before_anything_is_loaded(
    option: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value, sentence = BAD[option]
    model = "" if option == "model" else f"model={tmp_path},"
    arguments = ["-b", f"beir:path={data}", "-r", f"blocksearch:{model}{option}={value}", "-o", str(tmp_path / "out")]
    assert main(["run", *arguments]) == 2
    assert capsys.readouterr().err == f"icr-bench: retriever blocksearch: {sentence}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_cache_size_that_is_no_number_of_bytes_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"cache_gb must be above 0, got {value}"):
        BlockSearch(model=Model("org/name"), cache_gb=value)


IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "ssmax_n": ({"ssmax_n": "tokens"}, "ssmax_n would change nothing; give ssmax=true too"),
    "routing_b": ({"routing_b": 5}, "routing_b would change nothing; give routing=last or content too"),
    "routing_reach": ({"routing_reach": "upper"}, "routing_reach would change nothing; give routing=last or content"),
    "routing_layer": ({"routing_layer": 2}, "routing_layer would change nothing; give routing=last or content, or"),
    "beam": (
        {"readout": "attention", "beam": 5, "existing": False},
        "beam and existing would change nothing; give readout=decode too",
    ),
    "readout_heads": ({"readout_heads": (1,)}, "readout_heads would change nothing; give readout=attention too"),
    "cache_gb": ({"cache_gb": 5.0}, "cache_gb would change nothing; give cache=DIR too"),
}


@pytest.mark.parametrize("option", IDLE)
def test_an_option_without_effect_is_refused(option: str) -> None:
    options, sentence = IDLE[option]
    with pytest.raises(ValueError, match=f"^{sentence}"):
        BlockSearch(model=Model("org/name"), **options)


def test_an_option_of_a_row_that_is_switched_off_is_refused() -> None:
    spec = Spec("blocksearch-routing", {"model": "org/name", "routing": "none", "routing_b": 5})
    with pytest.raises(ValueError, match="routing_b would change nothing"):
        Registry().build("retriever", spec, {})


BEYOND: dict[str, tuple[dict[str, Any], str]] = {
    "cap": ({"cap": 17}, "a block's wrapper takes 18 tokens, more than the cap of 17"),
    "routing layer": ({"routing": "last", "routing_layer": 4}, "routing_layer 4: the model has layers 0 to 3"),
    "negative routing layer": ({"routing": "last", "routing_layer": -1}, "routing_layer -1: the model has layers 0"),
    "readout layer": ({"readout": "attention", "readout_layer": 4}, "readout_layer 4: the model has layers 0 to 3"),
    "readout heads": (
        {"readout": "attention", "readout_heads": (0, 4)},
        r"readout_heads 0\+4: expected different ones of 0 to 3",
    ),
    "digits": ({"digits": 1}, "digits=1 make 10 codes, fewer than the 20 documents"),
}


@pytest.mark.parametrize("option", BEYOND)
def test_an_option_that_does_not_fit_the_model_or_corpus_is_told_in_one_sentence(
    option: str, tiny_model: TinyModel
) -> None:
    options, sentence = BEYOND[option]
    with pytest.raises(ValueError, match=sentence) as refused:
        made(tiny_model(), **options)
    assert "\n" not in str(refused.value)


def test_what_does_not_fit_the_model_is_a_failed_cell_with_that_sentence(
    tiny_model: TinyModel, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["-b", f"beir:path={data}", "-r", f"blocksearch:model={tiny_model()},cap=17", "-o", str(tmp_path / "out")]
    assert main(["run", *flags]) == 1
    (record,) = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    assert record["status"] == "error"
    assert record["error"] == f"ValueError: {BEYOND['cap'][1]}"
    assert record["estimate"] is None
    assert BEYOND["cap"][1] in capsys.readouterr().err


def test_a_routing_layer_beyond_the_model_is_told_under_its_own_name(tiny_model: TinyModel) -> None:
    with pytest.raises(ValueError, match=r"^routing_layer 4: the model has layers 0 to 3$"):
        made(tiny_model(), routing="last", routing_layer=4)


@pytest.mark.parametrize("heads", [(0, 0), ()])
def test_repeated_or_no_heads_are_refused(heads: tuple[int, ...], tiny_model: TinyModel) -> None:
    with pytest.raises(ValueError, match="readout_heads"):
        made(tiny_model(), readout="attention", readout_heads=heads)


def test_a_tokenizer_that_merges_digits_is_refused_by_name(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "merging")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = tokenizer["pre_tokenizer"]["pretokenizers"][1]
    vocabulary = tokenizer["model"]["vocab"]
    del vocabulary["ke"]
    vocabulary["34"] = vocabulary["li"]
    del vocabulary["li"]
    tokenizer["model"]["merges"] = [["3", "4"]]
    vocabulary |= {f"unused{number}": number for number in range(264) if number not in vocabulary.values()}
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] not in vocabulary.values()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"tokenizer merging: merges digits \(34 is 1 token\(s\)\).*digit by digit"):
        made(folder)


@pytest.mark.parametrize("form", SPACE_FIRST)
def test_a_tokenizer_of_mistrals_form_is_served(form: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("mistral", vocab_size=400), tmp_path / form)
    (folder / "tokenizer.json").write_text(with_space_first(form))
    told = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    retriever = made(folder)
    assert [len(ranking.numbers) for ranking in retriever.search(QUERIES, 20)] == [20] * 3
    assert retriever.settings()["prompt"]["wrapper_tokens"] == 18
    spans = retriever.token_spans(["Ada likes"])
    assert ["Ada likes"[start:end] for start, end in spans[0]] == ["A", "d", "a", " li", "k", "e", "s"]


def test_search_before_index_is_refused(tiny_model: TinyModel) -> None:
    retriever = BlockSearch(model=Model(str(tiny_model())))
    retriever.load()
    with pytest.raises(RuntimeError, match="search before index"):
        retriever.search(QUERIES, 1)


@pytest.mark.parametrize("readout", ["decode", "attention"])
def test_search_after_an_index_that_failed_is_refused(
    readout: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError("no room")

    retriever = made(tiny_model(layers=1), readout=readout)
    monkeypatch.setattr("icr_bench.retrievers.lm.corpus.check_room", full)
    with pytest.raises(MemoryError):
        retriever.index(corpus(TEXTS[:5]))
    with pytest.raises(RuntimeError, match="search before index"):
        retriever.search(QUERIES, 1)


# The score of a code


def reference(
    folder: Path, prompt: dict[str, Any], texts: Sequence[str], codes: Sequence[int], query: str
) -> list[float]:
    """Log-probability of each code after corpus and query, through transformers and one large mask."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    blocks = []
    for text, code in zip(texts, codes, strict=True):
        parts = ["Doc ", *f"{code:04d}", ": ", text, " (Doc ", *f"{code:04d}", ")"]
        blocks.append([start, *(token for part in parts for token in encode(part)), end])
    asked = [start, *encode(prompt["before"]), *encode(query), *encode(prompt["after"]), *encode("Doc ")]
    documents = [token for block in blocks for token in block]
    bounds = [0]
    for block in blocks:
        bounds.append(bounds[-1] + len(block))
    scores = []
    for code in codes:
        digits = [token for digit in f"{code:04d}" for token in encode(digit)]
        ids = torch.tensor([documents + asked + digits])
        total = ids.shape[1]
        sees = torch.ones(total, total, dtype=torch.bool).tril()
        for begin, after in pairwise(bounds):
            sees[begin:after, :begin] = False
        places = [place for block in blocks for place in range(len(block))]
        places += [prompt["offset"] + place for place in range(total - len(documents))]
        mask = torch.zeros(1, 1, total, total).masked_fill(~sees, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, position_ids=torch.tensor([places])).logits[0]
        logs = logits[-5:-1].log_softmax(-1)
        scores.append(sum(float(logs[i, token]) for i, token in enumerate(digits)))
    return scores


@pytest.mark.parametrize(("family", "codes"), [("qwen3", "position"), ("llama", "random")])
def test_scores_are_the_log_probabilities_of_the_codes(family: str, codes: str, tiny_model: TinyModel) -> None:
    texts = TEXTS[:6]
    retriever = made(tiny_model(family), texts, codes=codes, per_step=10)
    held = list(range(6)) if codes == "position" else list(retriever._corpus.cache.codes)
    assert len(set(held)) == 6
    for query, ranking in zip(QUERIES, retriever.search(QUERIES, 6), strict=True):
        expected = reference(tiny_model(family), retriever.settings()["prompt"], texts, held, query)
        assert sorted(ranking.numbers) == list(range(6))
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)
        for number, score in zip(ranking.numbers, ranking.scores, strict=True):
            assert score == pytest.approx(expected[number], abs=2e-3)


@pytest.mark.parametrize(
    "prompt",
    [{"before": "", "after": "?"}, {"after": ""}, {"before": "Q: ", "after": "\n"}, {"offset": 0}],
    ids=str,
)
def test_scores_are_those_of_the_prompt_that_the_weights_carry(
    prompt: dict[str, Any], with_extras: Callable[[object], Path]
) -> None:
    weights, queries = with_extras({"prompt": prompt}), [QUERIES[0], "", QUERIES[1]]
    retriever = made(weights, TEXTS[:3], codes="position")
    told = retriever.settings()["prompt"]
    assert told.items() >= prompt.items()
    for query, ranking in zip(queries, retriever.search(queries, 3), strict=True):
        expected = dict(enumerate(reference(weights, told, TEXTS[:3], range(3), query)))
        assert dict(zip(ranking.numbers, ranking.scores, strict=True)) == pytest.approx(expected, abs=2e-3)


def test_a_narrow_search_gives_the_same_scores_for_what_it_finds(tiny_model: TinyModel) -> None:
    everything = known(tiny_model())
    for options, k in (({}, 10), ({"beam": 1, "per_step": 1}, 1), ({"beam": 4, "per_step": 2}, 3)):
        for scores, ranking in zip(everything, made(tiny_model(), **options).search(QUERIES, k), strict=True):
            assert 1 <= len(ranking.numbers) <= k
            for number, score in zip(ranking.numbers, ranking.scores, strict=True):
                assert score == pytest.approx(scores[number], abs=1e-3)


def test_a_larger_k_widens_the_search(tiny_model: TinyModel) -> None:
    retriever = made(tiny_model(), beam=2, per_step=1)
    assert [len(ranking.numbers) for ranking in retriever.search(QUERIES, 20)] == [20] * 3


def test_codes_that_name_no_document_are_not_returned(tiny_model: TinyModel) -> None:
    """Two documents and ten codes of one digit: a search over all codes finds what one over existing codes finds."""
    within = all_found(tiny_model(), TEXTS[:2], digits=1)
    for scores, ranking in zip(
        within, made(tiny_model(), TEXTS[:2], digits=1, existing=False, per_step=10).search(QUERIES, 2), strict=True
    ):
        found = dict(zip(ranking.numbers, ranking.scores, strict=True))
        assert found == pytest.approx(scores, abs=1e-3)
    few = made(tiny_model(), TEXTS[:2], digits=1, existing=False, per_step=1).search(QUERIES, 1)
    assert any(not ranking.numbers for ranking in few)


def test_a_long_query_is_answered_among_others_as_alone(tiny_model: TinyModel) -> None:
    long = "Who likes River Otters and " + "very many other things, " * 40
    retriever = made(tiny_model(layers=2))
    (alone,), (_, among, _) = retriever.search([long], 5), retriever.search([QUERIES[0], long, QUERIES[1]], 5)
    assert len(alone.numbers) == 5
    assert alone.numbers == among.numbers
    assert alone.scores == pytest.approx(among.scores, abs=1e-3)


# Codes


def test_the_seed_changes_the_codes_and_so_the_scores(tiny_model: TinyModel) -> None:
    one, again, other = (all_found(tiny_model(), seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert not same(one, other)


def test_codes_follow_the_texts_not_their_order(tiny_model: TinyModel) -> None:
    forwards, backwards = all_found(tiny_model()), all_found(tiny_model(), TEXTS[::-1])
    assert same(forwards, [{19 - number: score for number, score in scores.items()} for scores in backwards])


def test_codes_by_position_follow_the_order_and_no_seed(tiny_model: TinyModel) -> None:
    forwards, backwards = (all_found(tiny_model(), texts, codes="position") for texts in (TEXTS, TEXTS[::-1]))
    assert not same(forwards, [{19 - number: score for number, score in scores.items()} for scores in backwards])
    assert forwards == all_found(tiny_model(), codes="position", seed=1)
    assert list(made(tiny_model(), codes="position")._corpus.cache.codes) == list(range(20))


def test_more_documents_take_more_digits(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icr_bench.retrievers.lm.prompt.DIGITS", 1)
    few, many = made(tiny_model(), TEXTS[:10], beam=10, per_step=10), made(tiny_model(), TEXTS[:11])
    assert few.settings()["digits"] == 1
    assert many.settings()["digits"] == 2
    assert [sorted(ranking.numbers) for ranking in few.search(QUERIES, 10)] == [list(range(10))] * 3
    assert all(ranking.numbers for ranking in many.search(QUERIES, 10))


def test_five_digits_work(tiny_model: TinyModel) -> None:
    retriever = made(tiny_model(), digits=5)
    assert retriever.settings()["digits"] == 5
    assert retriever.settings()["prompt"]["wrapper_tokens"] == 20
    assert max(retriever._corpus.cache.codes) > 9999
    assert not same(all_found(tiny_model(), digits=5), known(tiny_model()))


# Modifications


def test_ssmax_that_comes_to_a_factor_of_1_changes_nothing(
    tiny_model: TinyModel, with_extras: Callable[[object], Path]
) -> None:
    weights = with_extras({"ssmax": [1 / math.log(20)] * 4})
    assert same(all_found(weights, ssmax=True), known(tiny_model()))


CHANGES: dict[str, dict[str, Any]] = {
    "ssmax": {"ssmax": True},
    "ssmax over tokens": {"ssmax": True, "ssmax_n": "tokens"},
    "sink gate": {"sink_gate": True},
    "routing": {"routing": "last", "routing_b": 3},
    "routing by content": {"routing": "content", "routing_b": 3},
    "routing above a layer only": {"routing": "last", "routing_b": 3, "routing_reach": "upper"},
    "routing at another layer": {"routing": "last", "routing_b": 3, "routing_layer": 0},
    "routing of ssmax": {"routing": "last", "routing_b": 3, "ssmax": True},
    "routing of ssmax over tokens": {"routing": "last", "routing_b": 3, "ssmax": True, "ssmax_n": "tokens"},
    "queries at another place": {"offset": 0},
}


def test_every_modification_gives_other_scores_than_all_others(tiny_model: TinyModel) -> None:
    found = {"none": known(tiny_model())} | {name: known(tiny_model(), **o) for name, o in CHANGES.items()}
    names = list(found)
    alike = [(a, b) for i, a in enumerate(names) for b in names[:i] if same(found[a], found[b])]
    assert alike == []


@pytest.mark.parametrize("reach", ["every", "upper"])
@pytest.mark.parametrize("tokens", ["last", "content"])
@pytest.mark.parametrize("ssmax", [{}, {"ssmax": True}, {"ssmax": True, "ssmax_n": "tokens"}])
def test_routing_that_keeps_all_documents_changes_nothing(
    reach: str, tokens: str, ssmax: dict[str, Any], tiny_model: TinyModel
) -> None:
    routed = all_found(tiny_model(), routing=tokens, routing_b=20, routing_reach=reach, **ssmax)
    assert same(routed, known(tiny_model(), **ssmax))


def test_routing_at_the_last_layer_leaves_nothing_above_it_to_change(tiny_model: TinyModel) -> None:
    options: dict[str, Any] = {"routing": "last", "routing_b": 1, "routing_layer": 3}
    plain = known(tiny_model())
    assert same(all_found(tiny_model(), routing_reach="upper", **options), plain)
    assert not same(all_found(tiny_model(), routing_reach="every", **options), plain)


def test_ssmax_above_a_routing_layer_counts_the_shortlist(with_extras: Callable[[object], Path]) -> None:
    """The logarithm of one document is 0, whatever multiplies it; all documents count where all are seen."""
    options: dict[str, Any] = {"ssmax": True, "routing": "last", "routing_layer": 1, "routing_reach": "upper"}

    def scores(scalars: list[float], keep: int) -> list[dict[int, float]]:
        return all_found(with_extras({"ssmax": scalars}), routing_b=keep, **options)

    one, other = [0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 5.0, 2.0]
    assert same(scores(one, 1), scores(other, 1))
    assert not same(scores(one, 2), scores(other, 2))
    assert not same(scores(one, 1), scores([0.4, 2.0, 0.2, 0.1], 1))


def test_a_sink_is_off_unless_asked_for(tiny_model: TinyModel, with_extras: Callable[[object], Path]) -> None:
    weights, plain = with_extras({"sink": [2.0, 1.0, 0.0, -1.0]}), known(tiny_model())
    assert same(all_found(weights), plain)
    assert not same(all_found(weights, sink_gate=True), plain)


def test_a_sink_far_below_all_scores_changes_nothing(
    tiny_model: TinyModel, with_extras: Callable[[object], Path]
) -> None:
    assert same(all_found(with_extras({"sink": [-1e4] * 4}), sink_gate=True), known(tiny_model()))


def test_bfloat16_halves_the_index(tiny_model: TinyModel) -> None:
    half, whole = made(tiny_model(), dtype="bfloat16"), made(tiny_model())
    assert half.index_bytes() * 2 == whole.index_bytes()
    assert [len(ranking.numbers) for ranking in half.search(QUERIES, 1)] == [1, 1, 1]


# Ranking by attention


def rows(rankings: Sequence[Ranking]) -> list[dict[int, float]]:
    return [dict(zip(ranking.numbers, ranking.scores, strict=True)) for ranking in rankings]


def test_attention_ranks_every_document(tiny_model: TinyModel) -> None:
    for ranking in made(tiny_model(), readout="attention").search(QUERIES, 20):
        assert sorted(ranking.numbers) == list(range(20))
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)


def test_attention_adds_up_over_heads(tiny_model: TinyModel) -> None:
    def scores(**options: Any) -> list[dict[int, float]]:
        return rows(made(tiny_model(), readout="attention", **options).search(QUERIES, 20))

    heads = [scores(readout_heads=(head,)) for head in range(4)]
    for query, whole in enumerate(scores()):
        summed = {number: sum(head[query][number] for head in heads) for number in whole}
        assert whole == pytest.approx(summed, rel=1e-4)


def test_attention_follows_its_layer_and_tokens(tiny_model: TinyModel) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"readout_tokens": "content"},
        {"readout_layer": 0},
        {"readout_layer": 3},
        {"routing_layer": 1},
    ]
    found = [rows(made(tiny_model(), readout="attention", **o).search(QUERIES, 20)) for o in options]
    assert not any(same(a, b) for i, a in enumerate(found) for b in found[:i])


def test_attention_reads_out_at_the_routing_layer_by_default(tiny_model: TinyModel) -> None:
    one, other = (
        made(tiny_model(), readout="attention", **o).search(QUERIES, 5)
        for o in ({"routing_layer": 1}, {"readout_layer": 1})
    )
    assert one == other


def test_attention_by_content_is_the_attention_retriever(tiny_model: TinyModel) -> None:
    attention = Attention(model=Model(str(tiny_model())), layer=1, heads=(1, 2))
    attention.load()
    attention.index(corpus(TEXTS))
    options: dict[str, Any] = {"readout": "attention", "readout_layer": 1, "readout_heads": (1, 2)}
    ours = made(tiny_model(), readout_tokens="content", **options).search(QUERIES, 20)
    assert same(rows(ours), rows(attention.search(QUERIES, 20)))


# What weights carry

PROMPT = {"cap": 60, "offset": 100, "before": "Q: ", "after": "\n"}


def test_what_weights_carry_is_used(tiny_model: TinyModel, with_extras: Callable[[object], Path]) -> None:
    scalars = [0.5, 0.25, 1.0, 2.0]
    weights = with_extras({"prompt": PROMPT, "routing_layer": 1, "ssmax": scalars, "sink": [1, 2, 3, 4]})
    retriever = made(weights, ssmax=True, sink_gate=True, routing="last", routing_b=2)
    settings = retriever.settings()
    assert settings["prompt"].items() >= PROMPT.items()
    assert settings["routing"]["layer"] == 1
    assert settings["ssmax"] == {"values": scalars, "from": "weights"}
    assert settings["sink"] == {"values": [1, 2, 3, 4], "from": "weights"}
    assert retriever.max_tokens == 60 - 18


@pytest.mark.parametrize(
    ("extras", "options"),
    [
        ({"prompt": {"before": "Q: "}}, {}),
        ({"prompt": {"after": "\n"}}, {}),
        ({"prompt": {"offset": 7}}, {}),
        ({"prompt": {"cap": 30}}, {}),
        ({"routing_layer": 0}, {"routing": "last", "routing_b": 2}),
        ({"routing_b": 2}, {"routing": "last"}),
        ({"blind": 2}, {}),
        ({"ssmax": [0.1, 0.2, 0.3, 0.4]}, {"ssmax": True}),
        ({"sink": [1, 2, 3, 4]}, {"sink_gate": True}),
    ],
    ids=str,
)
def test_what_weights_carry_changes_the_scores(
    extras: dict[str, Any], options: dict[str, Any], tiny_model: TinyModel, with_extras: Callable[[object], Path]
) -> None:
    assert not same(all_found(with_extras(extras), **options), known(tiny_model(), **options))


@pytest.mark.parametrize(
    ("extras", "options", "kept"),
    [
        ({}, {}, 4),
        ({"blind": 3}, {}, 1),
        ({"blind": 3}, {"routing": "last", "routing_layer": 2, "routing_b": 2}, 2),
        ({"blind": 3}, {"readout": "attention", "routing_layer": 1}, 3),
    ],
    ids=str,
)
def test_only_layers_that_are_read_are_kept(
    extras: dict[str, Any],
    options: dict[str, Any],
    kept: int,
    tiny_model: TinyModel,
    with_extras: Callable[[object], Path],
    tmp_path: Path,
) -> None:
    found = made(with_extras(extras), **options)
    assert found.index_bytes() * 4 == kept * made(tiny_model()).index_bytes()
    for reused in (0, len(found._corpus.cache)):
        again = made(with_extras(extras), **options, cache=tmp_path / "cache")
        assert again._corpus.reused == reused
        assert again.index_bytes() == found.index_bytes()
        assert again.search(["who likes quince?"], 3) == found.search(["who likes quince?"], 3)


@pytest.mark.parametrize("blind", [0, 3])
def test_all_layers_but_the_last_may_be_blind(blind: int, with_extras: Callable[[object], Path]) -> None:
    assert len(made(with_extras({"blind": blind})).search(QUERIES, 1)) == 3


def test_options_win_over_what_weights_carry(tiny_model: TinyModel, with_extras: Callable[[object], Path]) -> None:
    weights = with_extras({"prompt": {"cap": 30, "offset": 7}, "routing_layer": 0})
    options: dict[str, Any] = {"cap": 300, "offset": 300, "routing": "last", "routing_b": 2, "routing_layer": 2}
    retriever = made(weights, **options)
    assert retriever.settings()["prompt"].items() >= {"cap": 300, "offset": 300}.items()
    assert retriever.settings()["routing"]["layer"] == 2
    assert all_found(weights, **options) == known(tiny_model(), **options)


def test_without_scalars_of_the_weights_they_are_said_to_be_initial(tiny_model: TinyModel) -> None:
    settings = made(tiny_model(), ssmax=True, sink_gate=True).settings()
    assert settings["ssmax"] == {"values": [0.43] * 4, "from": "initial value, not trained"}
    assert settings["sink"] == {"values": [14.0] * 4, "from": "initial value, not trained"}


def test_what_weights_carry_identifies_them(with_extras: Callable[[object], Path]) -> None:
    one = identify(str(with_extras({"ssmax": [0.1] * 4})))
    assert identify(str(with_extras({"ssmax": [0.2] * 4}))) != one


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        (
            {"ssmx": [1]},
            r"blocksearch\.json: 'ssmx' is not known; expected prompt, routing_layer, routing_b, blind, ssmax or sink",
        ),
        ({"prompt": {"capp": 3}}, r"blocksearch\.json: .*'capp'"),
        ({"prompt": {"cap": 0}}, "cap must be 1 or more"),
    ],
    ids=str,
)
def test_weights_that_carry_something_else_are_refused(
    extras: object, message: str, with_extras: Callable[[object], Path]
) -> None:
    with pytest.raises(ValueError, match=message):
        made(with_extras(extras))


def test_scalars_for_another_depth_are_refused(with_extras: Callable[[object], Path]) -> None:
    with pytest.raises(ValueError, match="ssmax has 3 scalars for a model of 4 layers"):
        made(with_extras({"ssmax": [1, 2, 3]}), ssmax=True)


@pytest.mark.parametrize(
    ("extras", "options"),
    [
        ("not JSON", {}),
        ([], {}),
        ({"prompt": 3}, {}),
        ({"prompt": {"cap": "many"}}, {}),
        ({"routing_layer": "two"}, {}),
        ({"ssmax": 0.43}, {"ssmax": True}),
        ({"sink": ["a", "b", "c", "d"]}, {"sink_gate": True}),
        ({"ssmax": [0.43, math.nan, 0.43, 0.43]}, {"ssmax": True}),
        ({"sink": [14.0, 14.0, math.inf, 14.0]}, {"sink_gate": True}),
        ({"ssmax": [10**400] * 4}, {"ssmax": True}),
        ({"ssmax": [1, 2, 3]}, {"ssmax": True}),
        ({"routing_b": 0}, {"routing": "last"}),
        ({"blind": -1}, {}),
        ({"blind": 4}, {}),
        ({"blind": 99}, {}),
        ({"blind": 4}, {"routing": "last", "routing_layer": 3}),
        ({"blind": 3}, {"routing": "last", "routing_layer": 1}),
        ({"blind": 0.5}, {}),
    ],
    ids=str,
)
def test_a_broken_file_beside_the_weights_is_named(
    extras: object, options: dict[str, Any], with_extras: Callable[[object], Path]
) -> None:
    weights = with_extras(extras)
    with pytest.raises(ValueError, match=r"blocksearch\.json"):
        made(weights, **options).search(QUERIES, 1)


# Values that overflow

READERS: dict[str, dict[str, Any]] = {
    "decode": {},
    "routing": {"routing": "last", "routing_b": 2},
    "routing by content": {"routing": "content", "routing_b": 2},
    "readout": {"readout": "attention"},
    "readout by content": {"readout": "attention", "readout_tokens": "content"},
}


@pytest.fixture
def overflowing(tiny_model: TinyModel, tmp_path: Path) -> Callable[[str, float], Path]:
    """The folder of the tiny model with a weight so large that values exceed 65,504, but not what float32 holds."""

    def make(name: str, factor: float) -> Path:
        from safetensors.torch import load_file, save_file

        folder = shutil.copytree(tiny_model("llama"), tmp_path / "large", dirs_exist_ok=True)
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        (found,) = (full for full in tensors if full.endswith(name))
        tensors[found] *= factor
        save_file(tensors, file, {"format": "pt"})
        return folder

    return make


LARGE = {"a layer": ("layers.1.mlp.down_proj.weight", 2e4), "keys": ("layers.3.self_attn.k_proj.weight", 2e5)}


@pytest.mark.parametrize("where", LARGE)
@pytest.mark.parametrize("reader", READERS)
def test_documents_that_overflow_are_refused(
    reader: str, where: str, overflowing: Callable[[str, float], Path]
) -> None:
    folder, options = overflowing(*LARGE[where]), READERS[reader]
    assert [len(ranking.numbers) for ranking in made(folder, **options).search(QUERIES, 3)] == [3] * 3
    assert [len(r.numbers) for r in made(folder, dtype="bfloat16", **options).search(QUERIES, 3)] == [3] * 3
    with pytest.raises(FloatingPointError, match=r"^the model computes values in float16 .*--dtype bfloat16 or float"):
        made(folder, dtype="float16", **options)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("reader", READERS)
def test_queries_without_numbers_are_refused(reader: str, dtype: str, tiny_model: TinyModel) -> None:
    """Documents may be fine where queries, which read them all, are not."""
    retriever = made(tiny_model("llama"), dtype=dtype, **READERS[reader])
    layer = 2 if reader != "decode" else 3
    weight = retriever._loaded().backbone.stack()[layer].self_attn.q_proj.weight
    weight.fill_(6e4 if dtype == "float16" else math.nan)
    with pytest.raises(FloatingPointError, match=f"^the model computes values in {dtype} that are not finite"):
        retriever.search(QUERIES, 3)


@pytest.mark.parametrize("name", ["blocksearch", "attention"])
def test_values_that_overflow_make_a_failed_cell(
    name: str, overflowing: Callable[[str, float], Path], data: Path, tmp_path: Path
) -> None:
    folder, layer = overflowing(*LARGE["a layer"]), ",layer=3" if name == "attention" else ""
    flags = ["-b", f"beir:path={data}", "-r", f"{name}:model={folder}{layer}", "-o", str(tmp_path / "out")]
    assert main(["run", *flags, "--device", "cpu", "--dtype", "float16"]) == 1
    (record,) = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    assert record["status"] == "error"
    assert record["error"].startswith("FloatingPointError: the model computes values in float16 that are not finite")


# The record


def test_settings_tell_how_blocks_begin_and_end(tiny_model: TinyModel) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    settings = made(tiny_model()).settings()
    prompt = settings["prompt"]
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert prompt["block_ids"]["first"][0] == start
    assert prompt["block_ids"]["last"][-1] == end
    assert tokenizer.decode(prompt["block_ids"]["first"][1:]) == "Doc 0000:"
    assert tokenizer.decode(prompt["block_ids"]["last"][:-1]) == "00)"
    assert prompt["query_ids"]["first"][0] == start
    assert tokenizer.decode(prompt["query_ids"]["first"][1:]) == prompt["before"][:7]
    assert f"{prompt['after']}Doc ".endswith(tokenizer.decode(prompt["query_ids"]["last"]))
    assert (prompt["cap"], prompt["offset"], prompt["wrapper_tokens"]) == (300, 300, 18)
    assert settings["digits"] == 4
    assert settings["codes"] == "random"


def test_a_models_own_start_token_is_used(tiny_model: TinyModel) -> None:
    one, other = (made(tiny_model(bos=bos)).settings()["prompt"] for bos in (None, "<|endoftext|>"))
    assert one["block_ids"]["first"][0] != other["block_ids"]["first"][0] == other["query_ids"]["first"][0]
    assert one["block_ids"]["first"][1:] == other["block_ids"]["first"][1:]


def test_settings_tell_the_search(tiny_model: TinyModel) -> None:
    settings = made(tiny_model(), beam=7, per_step=3, existing=False).settings()
    assert settings["beam"] == {"width": 7, "per_step": 3, "existing": False}
    assert not {"routing", "ssmax", "sink", "readout"} & settings.keys()
    settings = made(tiny_model(), readout="attention", readout_layer=1, readout_heads=(2, 0)).settings()
    assert settings["readout"] == {"layer": 1, "heads": [2, 0], "tokens": "last"}
    assert "beam" not in settings


def test_settings_tell_the_routing(tiny_model: TinyModel) -> None:
    options: dict[str, Any] = {"routing": "content", "routing_b": 5, "routing_reach": "upper"}
    settings = made(tiny_model(), **options).settings()
    assert settings["routing"] == {"layer": 2, "keep": 5, "tokens": "content", "reach": "upper"}  # 2.3 of 4 is 16 of 28


@pytest.mark.parametrize(("depth", "layer"), [(28, 16), (14, 8), (7, 4)])
def test_routing_is_as_in_the_paper_unless_told(depth: int, layer: int, tiny_model: TinyModel) -> None:
    """Its section 5.1: 256 documents, layer 16 of 28."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    retriever = BlockSearch(model=Model(str(tiny_model(layers=depth, **small))), routing="last")
    retriever.load()
    assert retriever.settings()["routing"] == {"layer": layer, "keep": 256, "tokens": "last", "reach": "every"}


@pytest.mark.parametrize("name", ["blocksearch", "attention"])
@pytest.mark.parametrize(("cap", "max_tokens"), [(300, None), (50, None), (18, None), (300, 30), (50, 40)])
def test_truncated_documents_are_counted_alike_by_retriever_and_harness(
    name: str, cap: int, max_tokens: int | None, tiny_model: TinyModel
) -> None:
    texts = [*TEXTS, "", "x" * 32, "x" * 33, "é" * 16]
    layer = {"layer": 0} if name == "attention" else {}
    result = cell(name, tiny_model(layers=1), texts, max_tokens, cap=cap, **layer)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model(layers=1))
    lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    own = cap - 18
    shortest = own if max_tokens is None else min(own, max_tokens)
    assert result["truncated"] == sum(length > shortest for length in lengths)
    assert result["tokens"]["documents"] == sum(min(length, shortest) for length in lengths)
    given = lengths if max_tokens is None else [min(length, max_tokens) for length in lengths]
    assert result["settings"]["truncated"] == sum(length > own for length in given)
    assert result["settings"]["corpus_tokens"] == sum(min(length, own) + 18 for length in given)


def test_index_bytes_are_those_of_keys_and_values(tiny_model: TinyModel) -> None:
    retriever = made(tiny_model())
    each = 2 * 4 * 2 * 16 * 4  # keys and values, layers, heads, size of a head, bytes of a float
    assert retriever.index_bytes() == retriever.settings()["corpus_tokens"] * each
    retriever.index(corpus(TEXTS[:5]))
    assert retriever.index_bytes() == retriever.settings()["corpus_tokens"] * each


def test_an_index_from_the_cache_is_the_same_and_not_timed(tiny_model: TinyModel, tmp_path: Path) -> None:
    first, second = (cell("blocksearch", tiny_model(), cache=str(tmp_path)) for _ in range(2))
    assert first["answers"] == second["answers"]
    assert first["time"]["index_s"] > 0
    assert first["settings"]["prefill"] == "measured"
    assert second["time"]["index_s"] is None
    assert second["settings"]["prefill"] == "reused 20 of 20 documents"
    assert first["memory"]["index_bytes"] == second["memory"]["index_bytes"]


@pytest.mark.parametrize("name", ["blocksearch", "attention"])
def test_a_corpus_of_more_than_10_000_documents_is_told_beforehand_as_it_is(name: str, tiny_model: TinyModel) -> None:
    options = {"layer": 0} if name == "attention" else {}
    retriever = Registry().build("retriever", Spec(name, {"model": str(tiny_model(layers=1))} | options), {})
    retriever.load()
    assert retriever.estimate(corpus(["x"] * 10_001), QUERIES).tokens == 10_001 * (2 * 10 + 1)


def test_truncated_documents_are_counted_alike_also_with_more_digits(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("icr_bench.retrievers.lm.prompt.DIGITS", 1)
    monkeypatch.setattr("icr_bench.retrievers.blocksearch.DIGITS", 1)
    texts = [*TEXTS, "x" * (60 - 12), "x" * (60 - 14)]  # one digit leaves room for 48 tokens, two for 46
    result = cell("blocksearch", tiny_model(), texts, cap=60)
    assert result["settings"]["digits"] == 2
    assert result["truncated"] == result["settings"]["truncated"]


def test_too_few_digits_are_told_beforehand(tiny_model: TinyModel) -> None:
    retriever = BlockSearch(model=Model(str(tiny_model())), digits=1)
    retriever.load()
    with pytest.raises(ValueError, match="digits=1 make 10 codes"):
        retriever.estimate(corpus(TEXTS), QUERIES)
