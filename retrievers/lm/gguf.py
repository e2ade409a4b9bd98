"""GGUF files as transformers reads them: configuration, parameters in float32, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from icr_bench.retrievers.lm.backbone import UnsupportedModel
from icr_bench.retrievers.lm.prompt import Tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}

CONTROL, USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type`` for tokens that are not made by merges."""

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": (False, GPT2_SPLIT),
    "default": (False, GPT2_SPLIT),
    "smollm": (True, GPT2_SPLIT),
    "qwen2": (False, QWEN_SPLIT),
}
"""Value of ``tokenizer.ggml.pre`` -> whether single digits are split off first, and the pattern of pieces."""


def read_gguf(path: Path) -> tuple[Any, dict[str, Tensor], Tokenizer]:
    """Configuration, parameters in float32 and tokenizer of a GGUF file.

    Raises:
        UnsupportedModel: not a GGUF file, or an architecture or tokenizer that is not supported.
    """
    from gguf import dequantize

    reader = _open(path)
    fields = reader.fields

    def get(key: str, default: Any = None) -> Any:
        return fields[key].contents() if key in fields else default

    def need(key: str) -> Any:
        if key not in fields:
            raise UnsupportedModel(f"{path}: holds no {key}; is it a whole model?")
        return fields[key].contents()

    architecture = need("general.architecture")
    if architecture not in ARCHITECTURES:
        expected = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{path}: architecture {architecture!r}; expected one of {expected}")
    tensors: dict[str, Tensor] = {}
    factors: Tensor | None = None
    for entry in reader.tensors:
        try:
            values = torch.from_numpy(np.array(dequantize(entry.data, entry.tensor_type), dtype=np.float32))
        except (NotImplementedError, ValueError) as error:
            raise UnsupportedModel(f"{path}: tensor {entry.name!r} cannot be read: {error}") from None
        if entry.name == "rope_freqs.weight":
            factors = values
            continue
        name = _name(path, entry.name)
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            kind = "head_count" if ".q_proj." in name else "head_count_kv"
            values = _halves(values, get(f"llama.attention.{kind}") or need("llama.attention.head_count"))
        tensors[name] = values
    if factors is not None and not torch.all(factors == 1):
        raise UnsupportedModel(f"{path}: scaled rotary frequencies in a GGUF file; use the safetensors folder instead")
    if "embed_tokens.weight" not in tensors:
        raise UnsupportedModel(f"{path}: holds no token_embd.weight; is it a whole model?")
    return _config(path, architecture, get, need, tensors), tensors, _tokenizer(path, get, need)


def gguf_shape(path: Path) -> tuple[int, int]:
    """Layers and query heads of a GGUF file's model.

    Raises:
        UnsupportedModel: not a GGUF file of a model.
    """
    fields = _open(path).fields
    try:
        architecture = fields["general.architecture"].contents()
        layers, heads = (fields[f"{architecture}.{key}"].contents() for key in ("block_count", "attention.head_count"))
    except KeyError as error:
        raise UnsupportedModel(f"{path}: holds no {error}; is it a whole model?") from None
    return int(layers), int(heads)


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise UnsupportedModel(f"{path}: not a readable GGUF file ({error})") from None


def _name(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in NAMES:
        return f"layers.{parts[1]}.{NAMES[parts[2]]}.{kind}"
    raise UnsupportedModel(f"{path}: tensor {name!r} is not known")


def _halves(values: Tensor, heads: int) -> Tensor:
    """Undo the interleaving that GGUF applies to the rotated rows of each head: pairs back to two halves."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape).contiguous()


def _config(
    path: Path,
    architecture: str,
    get: Callable[..., Any],
    need: Callable[[str], Any],
    tensors: dict[str, Tensor],
) -> Any:
    from transformers import AutoConfig

    if (scaling := get(f"{architecture}.rope.scaling.type", "none")) != "none":
        raise UnsupportedModel(f"{path}: rotary scaling {scaling!r} in a GGUF file; use the safetensors folder instead")
    heads, width = need(f"{architecture}.attention.head_count"), need(f"{architecture}.embedding_length")
    size = get(f"{architecture}.attention.key_length", width // heads)
    if (rotated := get(f"{architecture}.rope.dimension_count", size)) != size:
        raise UnsupportedModel(f"{path}: only {rotated} of the {size} dimensions of a head are rotated; expected all")
    return AutoConfig.for_model(
        architecture,
        vocab_size=tensors["embed_tokens.weight"].shape[0],
        hidden_size=width,
        intermediate_size=need(f"{architecture}.feed_forward_length"),
        num_hidden_layers=need(f"{architecture}.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=get(f"{architecture}.attention.head_count_kv", heads),
        head_dim=size,
        rms_norm_eps=need(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": get(f"{architecture}.rope.freq_base", 10000.0)},
        max_position_embeddings=need(f"{architecture}.context_length"),
        tie_word_embeddings="lm_head.weight" not in tensors,
        hidden_act="silu",
    )


def _tokenizer(path: Path, get: Callable[..., Any], need: Callable[[str], Any]) -> Tokenizer:
    model, pre = need("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in SPLITS:
        raise UnsupportedModel(
            f"{path}: tokenizer {model!r} with pieces {pre!r}; expected 'gpt2' with one of {', '.join(SPLITS)}; "
            "use the safetensors folder instead"
        )
    tokens, kinds = need("tokenizer.ggml.tokens"), need("tokenizer.ggml.token_type")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    single, pattern = SPLITS[pre]
    digits = [{"type": "Digits", "individual_digits": True}] if single else []
    pieces = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = {token: kind for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)}
    serialized = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocabulary[token], "content": token, "special": kind == CONTROL}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for token, kind in added.items()
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*digits, pieces, {"type": "ByteLevel"} | level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"} | level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [merge.split(" ") for merge in need("tokenizer.ggml.merges")],
        },
    }
    bos = get("tokenizer.ggml.bos_token_id") if get("tokenizer.ggml.add_bos_token", False) else None
    return Tokenizer(json.dumps(serialized), bos, get("tokenizer.ggml.eos_token_id"), path.name)
