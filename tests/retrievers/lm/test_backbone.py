"""The decoder, piece by piece and as a whole, against transformers; what loads, and what is refused and how."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from icr_bench.retrievers.lm.backbone import Backbone, Norm, UnsupportedModel, load_backbone, same_fraction

TinyModel = Callable[..., Path]
RandomModel = Callable[..., tuple[Path, Any]]
Made = Callable[[str], tuple[Path, Any]]

IDS = torch.randint(0, 260, (2, 40), generator=torch.Generator().manual_seed(1))

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"max_position_embeddings": 128}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, narrow": (
        "llama",
        {
            "num_key_value_heads": 1,
            "head_dim": 8,
            "tie_word_embeddings": False,
            "rms_norm_eps": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        },
    ),
    "llama, biases": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR, **LONG}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3, **LONG}),
    "llama, yarn": ("llama", {"rope_parameters": YARN, **LONG}),
    "mistral": ("mistral", {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2, tied": ("qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3, wide": ("qwen3", {"head_dim": 32, "num_key_value_heads": 1, "attention_bias": True}),
}

SCALED = ("llama, linear", "llama, llama3", "llama, yarn")


@pytest.fixture
def made(random_model: RandomModel) -> Made:
    """Folder and transformers' model of a case."""

    def make(name: str) -> tuple[Path, Any]:
        family, config = MODELS[name]
        return random_model(family, **config)

    return make


def hidden_states(backbone: Backbone, ids: Tensor) -> list[Tensor]:
    """What enters each layer, and what leaves the last."""
    states = [backbone.embed_tokens(ids)]
    cos, sin = backbone.rotation(torch.arange(ids.shape[-1]))
    for layer in backbone.stack():
        q, k, v = (x.transpose(-3, -2) for x in layer.project(states[-1], cos, sin))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        states.append(layer.finish(states[-1], attended.transpose(-3, -2)))
    return states


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_logits_equal_those_of_transformers(made: Made, name: str) -> None:
    folder, model = made(name)
    backbone = load_backbone(str(folder))[0]
    with torch.no_grad():
        expected = model(IDS, output_hidden_states=True)
        states = hidden_states(backbone, IDS)
        logits = backbone.log_probabilities(states[-1])
    for ours, theirs in zip(states[:-1], expected.hidden_states[:-1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    torch.testing.assert_close(backbone.norm(states[-1]), expected.hidden_states[-1], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, expected.logits.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "llama, narrow", *SCALED, "qwen3, wide"])
def test_rotation_equals_that_of_transformers_at_far_positions(made: Made, name: str) -> None:
    model = made(name)[1]
    positions = torch.tensor([0, 1, 299, 300, 5000, 131071])
    cos, sin = Backbone(model.config).rotation(positions)
    expected = model.model.rotary_emb(torch.empty(1), positions.unsqueeze(0))
    for ours, theirs in zip((cos, sin), expected, strict=True):
        assert ours.shape == (6, 1, model.config.head_dim)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.squeeze(1), theirs.squeeze(0), atol=1e-4, rtol=0)


def test_positions_may_have_any_shape(made: Made) -> None:
    backbone = load_backbone(str(made("llama")[0]))[0]
    positions = torch.tensor([[3, 1, 4], [1, 5, 9]])
    for grid, row in zip(backbone.rotation(positions), backbone.rotation(positions.flatten()), strict=True):
        assert grid.shape == (2, 3, 1, 16)
        assert torch.equal(grid.flatten(0, 1), row)


def test_rotary_settings_in_the_old_place_are_read(made: Made, tmp_path: Path) -> None:
    """As most checkpoints on the hub have them: rope_theta and rope_scaling beside each other, and ``type``."""
    folder, model = made("llama, linear")
    shutil.copytree(folder, tmp_path / "old")
    told = json.loads((folder / "config.json").read_text())
    rope = told.pop("rope_parameters")
    told |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "linear", "factor": rope["factor"]}}
    (tmp_path / "old" / "config.json").write_text(json.dumps(told))
    old = AutoConfig.from_pretrained(tmp_path / "old")
    ours, expected = (Backbone(config).rotation(torch.arange(50)) for config in (old, model.config))
    assert torch.equal(ours[0], expected[0])


def test_norm_rounds_its_float32_result_once() -> None:
    torch.manual_seed(0)
    norm = Norm(64, 1e-6).bfloat16()
    norm.weight.data.normal_()
    x = (torch.randn(50, 64) * 30).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
    out = norm(x)
    assert out.dtype == torch.bfloat16
    assert (out == exact.float().bfloat16()).float().mean() > 0.999  # float32 may fall on the other side of a tie
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_float32(made: Made, dtype: str) -> None:
    folder = made("qwen3")[0]
    full, half = load_backbone(str(folder))[0], load_backbone(str(folder), dtype=dtype)[0]
    assert {weight.dtype for weight in half.parameters()} == {getattr(torch, dtype)}
    assert half.dtype == getattr(torch, dtype)
    expected, states = hidden_states(full, IDS), hidden_states(half, IDS)
    assert states[-1].dtype == half.dtype
    logits = half.log_probabilities(states[-1])
    assert logits.dtype == torch.float32
    assert F.cosine_similarity(states[-1].float(), expected[-1], dim=-1).min() > 0.99
    difference = (logits - full.log_probabilities(expected[-1])).abs().mean()
    assert difference < (0.2 if dtype == "bfloat16" else 0.03)


def test_queries_and_keys_are_rotated_in_float32(made: Made) -> None:
    """Far from 0, a cosine rounded to bfloat16 would be off by more than the rounding of the result."""
    backbone = load_backbone(str(made("llama")[0]), dtype="bfloat16")[0]
    layer, hidden = backbone.stack()[0], backbone.embed_tokens(IDS[0])
    cos, sin = backbone.rotation(torch.arange(1000, 1040))
    projected = layer.project(hidden, cos, sin)
    x = layer.input_layernorm(hidden)
    for linear, ours in zip((layer.self_attn.q_proj, layer.self_attn.k_proj), projected, strict=False):
        plain = linear(x).unflatten(-1, (-1, 16)).double()
        turned = torch.cat((-plain[..., 8:], plain[..., :8]), -1)
        exact = plain * cos.double() + turned * sin.double()
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_stored_once_if_tied(made: Made, tied: bool) -> None:
    backbone = load_backbone(str(made("qwen2, tied" if tied else "qwen2")[0]))[0]
    assert (backbone.lm_head.weight is backbone.embed_tokens.weight) == tied
    assert torch.equal(backbone.lm_head.weight, backbone.embed_tokens.weight) == tied


def test_a_loaded_backbone_takes_no_gradient(made: Made) -> None:
    folder = made("qwen2")[0]
    backbone, tokenizer, path = load_backbone(str(folder))
    assert path == folder
    assert tokenizer.encode("Doc") == [257]
    assert not any(weight.requires_grad for weight in backbone.parameters())
    assert not backbone.training


def test_bytes_and_operations_of_a_token(made: Made) -> None:
    backbone = load_backbone(str(made("qwen3, wide")[0]))[0]
    assert (backbone.depth, backbone.heads, backbone.kv_heads, backbone.head_dim) == (2, 4, 1, 32)
    queries, keys, mlp = 64 * 4 * 32, 64 * 1 * 32, 64 * 96
    read = 2 * (queries + 2 * keys) + queries + 3 * mlp  # of two layers, but what the last one puts out
    assert backbone.prefill_flops() == 2 * read  # a product and a sum
    assert backbone.token_bytes() == 2 * 2 * 1 * 32 * 4  # keys and values, layers, heads, size, bytes of a float32
    assert load_backbone(str(made("qwen3, wide")[0]), dtype="bfloat16")[0].token_bytes() == 2 * 2 * 1 * 32 * 2


def test_layers_above_a_depth_can_be_dropped(tiny_model: TinyModel) -> None:
    folder = str(tiny_model("qwen3"))
    whole, cut = load_backbone(folder)[0], load_backbone(folder)[0]
    cut.cut(3)
    assert (whole.depth, cut.depth, len(cut.stack())) == (4, 3, 3)
    assert torch.equal(hidden_states(cut, IDS)[-1], hidden_states(whole, IDS)[3])
    assert cut.token_bytes() == whole.token_bytes() * 3 // 4
    layer = sum(weight.numel() for weight in whole.stack()[0].parameters() if weight.dim() == 2)
    assert whole.prefill_flops() - cut.prefill_flops() == 2 * layer


@pytest.mark.parametrize(
    ("layer", "of", "depth", "expected"),
    [(16, 28, 30, 17), (16, 28, 28, 16), (0, 28, 30, 0), (28, 28, 30, 29), (27, 28, 4, 3), (1, 2, 3, 2), (5, 10, 1, 0)],
)
def test_the_same_fraction_of_another_depth(layer: int, of: int, depth: int, expected: int) -> None:
    assert same_fraction(layer, of, depth) == expected


def test_sharded_weights_load(made: Made, tmp_path: Path) -> None:
    folder, model = made("qwen2")
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    # Mistral ships its weights a second time, under other names; the index does not list that file.
    save_file({"tok_embeddings.weight": torch.zeros(2)}, tmp_path / "model" / "consolidated.safetensors")
    sharded, single = (load_backbone(str(x))[0].state_dict() for x in (tmp_path / "model", folder))
    assert sharded.keys() == single.keys()
    assert all(torch.equal(sharded[name], single[name]) for name in single)


def changed(folder: Path, to: Path, **config: Any) -> Path:
    """A copy of a model's folder with settings of config.json replaced."""
    shutil.copytree(folder, to)
    told = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(told))
    return to


def with_weights(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def refusal(model: Path | str, kind: type[Exception] = UnsupportedModel) -> str:
    """The message with which a model is refused, of one line."""
    with pytest.raises(kind) as caught:
        load_backbone(str(model))
    told = str(caught.value)
    assert told.strip()
    assert "\n" not in told
    return told


def test_only_the_file_that_transformers_reads_counts(made: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(made("mistral")[0], tmp_path / "model")
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    assert load_backbone(str(folder))[0].depth == 2


def test_buffers_of_old_checkpoints_and_a_copy_of_a_tied_head_are_passed_over(made: Made, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    backbone = load_backbone(str(with_weights(made("llama")[0], tmp_path / "model", change)))[0]
    assert backbone.lm_head.weight is backbone.embed_tokens.weight


def test_another_family_is_refused(made: Made, tmp_path: Path) -> None:
    folder = changed(made("llama")[0], tmp_path / "model", model_type="gemma2")
    told = refusal(folder)
    assert str(folder) in told
    assert "'gemma2'" in told
    assert "llama, mistral, qwen2, qwen3" in told
    with pytest.raises(UnsupportedModel, match="'gpt_neox'; expected one of llama"):
        Backbone(AutoConfig.for_model("gpt_neox"))


def test_another_activation_is_refused(made: Made, tmp_path: Path) -> None:
    told = refusal(changed(made("llama")[0], tmp_path / "model", hidden_act="gelu"))
    assert "'gelu'" in told
    assert "expected silu" in told


def test_a_rotary_embedding_that_depends_on_length_is_refused(made: Made, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    told = refusal(changed(made("llama")[0], tmp_path / "model", rope_parameters=rope))
    assert "'dynamic'" in told
    assert "default, linear, llama3, yarn" in told


def test_a_partial_rotary_embedding_is_refused(made: Made, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    told = refusal(changed(made("llama")[0], tmp_path / "model", rope_parameters=rope))
    assert "not partial" in told


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("llama", "layers.1.mlp.up_proj.weight"),
        ("qwen2", "layers.0.self_attn.k_proj.bias"),
        ("qwen3", "layers.0.self_attn.q_norm.weight"),
    ],
)
def test_a_missing_parameter_is_named(made: Made, tmp_path: Path, name: str, parameter: str) -> None:
    folder = with_weights(made(name)[0], tmp_path / "model", lambda tensors: tensors.pop(f"model.{parameter}"))
    told = refusal(folder)
    assert str(folder) in told
    assert "missing" in told
    assert parameter in told


def test_a_missing_head_is_named_if_not_tied(made: Made, tmp_path: Path) -> None:
    folder = with_weights(made("qwen2")[0], tmp_path / "model", lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "qwen2, tied",
    ],
)
def test_a_missing_embedding_is_named(made: Made, tmp_path: Path, name: str) -> None:
    drop = "model.embed_tokens.weight"
    folder = with_weights(made(name)[0], tmp_path / "model", lambda tensors: tensors.pop(drop))
    assert "embed_tokens.weight" in refusal(folder)


def test_a_parameter_that_is_not_known_is_named(made: Made, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)

    told = refusal(with_weights(made("llama")[0], tmp_path / "model", change))
    assert "layers.0.self_attn.q_norm.weight" in told


def test_a_wrong_shape_is_named_with_the_expected_one(made: Made, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(63)

    folder = with_weights(made("llama")[0], tmp_path / "model", change)
    told = refusal(folder)
    assert str(folder) in told
    assert "norm.weight" in told
    assert "(63,), expected (64,)" in told


def test_what_is_no_model_is_refused(made: Made, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    told = refusal(tmp_path / "empty")
    assert str(tmp_path / "empty") in told
    assert "config.json" in told
    pickled = shutil.copytree(made("llama")[0], tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    told = refusal(pickled)
    assert str(pickled) in told
    assert "safetensors" in told
    (tmp_path / "weights.bin").write_bytes(b"PK")
    told = refusal(tmp_path / "weights.bin")
    assert str(tmp_path / "weights.bin") in told
    assert ".gguf" in told
    told = refusal(tmp_path / "absent.gguf", OSError)
    assert str(tmp_path / "absent.gguf") in told


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    assert str(tmp_path / "absent") in refusal(tmp_path / "absent", OSError)


def test_broken_weights_are_named(made: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(made("llama")[0], tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert str(folder) in refusal(folder)


def test_a_folder_without_tokenizer_is_named(made: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(made("llama")[0], tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert str(folder) in refusal(folder, Exception)


def test_the_hub_is_asked_for_a_revision_and_for_nothing_that_could_run(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any, list[str]]] = []

    def snapshot_download(repo_id: str, *, revision: Any = None, allow_patterns: Any = None, **rest: Any) -> str:
        asked.append((repo_id, revision, allow_patterns))
        return str(made("qwen3")[0])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    backbone, _, path = load_backbone("org/name@a1b2c3")
    assert backbone.depth == 2
    assert path == made("qwen3")[0]
    load_backbone("org/name")
    assert [(name, revision) for name, revision, _ in asked] == [("org/name", "a1b2c3"), ("org/name", None)]
    for _, _, patterns in asked:
        wanted = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json"]
        wanted += ["model.safetensors.index.json", "tokenizer_config.json", "vocab.json", "merges.txt"]
        refused = ["pytorch_model.bin", "modeling_qwen3.py", "model.pt", "model.pth", "model.pkl", "tf_model.h5"]
        refused += ["onnx/model.onnx", "model.gguf", "training_args.bin", "evil.so"]
        brought = [name for name in wanted + refused if any(fnmatch(name, pattern) for pattern in patterns)]
        assert brought == wanted


def test_loading_does_not_wait_for_pytorchs_compiler(tiny_model: TinyModel) -> None:
    code = f"""
import sys
from icr_bench.retrievers.lm.backbone import load_backbone
load_backbone({str(tiny_model("qwen3"))!r})
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
