"""Adapters in peft's files: added when loaded what was added when trained, and refused when they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from icr_bench.retrievers.lm.backbone import load_backbone, made_of
from icr_bench.retrievers.lm.lora import CONFIG, WEIGHTS, LowRank, add_lora, round_bases, save_lora

TinyModel = Callable[..., Path]


@pytest.fixture
def adapter(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A random adapter for layers 1 and 2 of the tiny model."""
    backbone, _, _ = load_backbone(str(tiny_model()))
    layers = dict(list(enumerate(backbone.stack()))[1:3])
    add_lora(layers.values(), 3, 6.0, seed=0)
    torch.manual_seed(1)
    for module in backbone.modules():
        if isinstance(module, LowRank):
            module.lora_B.data.normal_()
            module.lora_A.data = module.lora_A.data.bfloat16().float()  # as they are written
            module.lora_B.data = module.lora_B.data.bfloat16().float()
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_lora(folder, layers, str(tiny_model()), 3, 6.0)
    torch.save({"out": through(backbone)}, tmp_path / "out.pt")
    return folder


def through(backbone: Any) -> torch.Tensor:
    hidden = backbone.embed_tokens(torch.arange(5))
    cos, sin = backbone.rotation(torch.arange(5))
    for layer in backbone.stack():
        q, k, v = layer.project(hidden, cos, sin)
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        hidden = layer.finish(
            hidden, (torch.einsum("ihd,jhd->hij", q, k).softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)
        )
    return hidden.detach()


def test_loaded_adapter_computes_what_the_trained_one_did(adapter: Path, tiny_model: TinyModel) -> None:
    expected = torch.load(adapter.parent / "out.pt", weights_only=True)["out"]
    backbone, _, path = load_backbone(str(adapter))
    assert path == adapter
    assert torch.allclose(through(backbone), expected, atol=1e-4)
    plain, _, _ = load_backbone(str(tiny_model()))
    assert not torch.allclose(through(plain), expected, atol=1e-2)


def test_a_new_adapter_changes_nothing(tiny_model: TinyModel) -> None:
    backbone, _, _ = load_backbone(str(tiny_model()))
    before = through(backbone)
    add_lora(backbone.stack(), 2, 4.0, seed=0)
    assert torch.equal(through(backbone), before)


def test_rounded_bases_compute_nearly_the_same_and_what_learns_stays_exact(tiny_model: TinyModel) -> None:
    backbone, _, _ = load_backbone(str(tiny_model()))
    backbone.requires_grad_(False)
    layers = backbone.stack()
    before = through(backbone)
    add_lora(layers[1:], 2, 4.0, seed=0)
    round_bases(layers)
    after = through(backbone)
    assert after.dtype == torch.float32
    assert 0 < (after - before).abs().max() < 0.05 * before.abs().max()
    low = layers[1].mlp.up_proj
    assert isinstance(low, LowRank)
    low.lora_B.data.fill_(1e-3)  # less than half of bfloat16's last digit of what it is added to
    x = torch.randn(3, low.lora_A.shape[1])
    added = low(x) - low.base(x)
    assert torch.allclose(added, 2 * x @ low.lora_A.T @ low.lora_B.T, atol=1e-6)
    low(x).sum().backward()
    assert low.lora_A.grad is not None
    assert low.lora_A.grad.dtype == torch.float32
    assert not [name for name, p in backbone.named_parameters() if p.requires_grad and "lora" not in name]


def test_another_copy_of_the_base_can_be_given(adapter: Path, tiny_model: TinyModel) -> None:
    told = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(told | {"base_model_name_or_path": "nobody/nothing"}))
    assert made_of(str(adapter)) == [str(adapter), "nobody/nothing"]
    assert made_of(str(adapter), "x") == [str(adapter), "x"]
    load_backbone(str(adapter), base=str(tiny_model()))
    with pytest.raises(ValueError, match="is no adapter, so that base="):
        load_backbone(str(tiny_model()), base="x")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "only plain LoRA adapters load"),
    "dora": ({"use_dora": True}, "without use_dora"),
    "no rank": ({"r": 0}, "only plain LoRA adapters load"),
    "no base": ({"base_model_name_or_path": None}, "only plain LoRA adapters load"),
}


@pytest.mark.parametrize("name", BAD)
def test_adapters_of_another_kind_are_refused(adapter: Path, name: str) -> None:
    changes, message = BAD[name]
    told = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(told | changes))
    with pytest.raises(ValueError, match=message):
        load_backbone(str(adapter))


def test_an_adapter_of_another_model_is_refused(adapter: Path, tiny_model: TinyModel) -> None:
    with pytest.raises(ValueError, match="fits no matrix of the base model"):
        load_backbone(str(adapter), base=str(tiny_model(hidden_size=32)))
    tensors = load_file(adapter / WEIGHTS)
    save_file({**tensors, "more": torch.zeros(1)}, adapter / WEIGHTS)
    with pytest.raises(ValueError, match="holds other tensors"):
        load_backbone(str(adapter))
    (adapter / WEIGHTS).write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="cannot be read"):
        load_backbone(str(adapter))
