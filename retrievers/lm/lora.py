"""Low-rank additions to a model's matrices, in the files of peft: trained apart, added to the weights when loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

PREFIX = "base_model.model.model."

OTHER_KINDS = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")
"""Settings of peft that would change what an adapter adds."""

MODULES = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}


class Rounded(nn.Module):
    """A linear map that stays as it is and multiplies in bfloat16, with float32 before and after: twice as fast on
    processors that have instructions for it, slower on others."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", base.weight.detach().bfloat16())
        self.register_buffer("bias", None if base.bias is None else base.bias.detach().bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight, self.bias).to(x.dtype)


class LowRank(nn.Module):
    """A linear map W that stays as it is, plus scale * B A with A (rank, in) and B (out, rank), which starts at 0."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base: nn.Module = base.requires_grad_(False)
        self.scale = scale
        weight = base.weight
        start = torch.randn(rank, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        self.lora_A = nn.Parameter(start.to(weight.device, weight.dtype))
        self.lora_B = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device, dtype=weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        added = F.linear(F.linear(x, self.lora_A), self.lora_B)
        return torch.add(self.base(x), added, alpha=self.scale)


def add_lora(layers: Iterable[nn.Module], rank: int, alpha: float, seed: int) -> None:
    """Put a `LowRank` in the place of every linear map of some layers."""
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        for name, part in MODULES.items():
            module = getattr(layer, part)
            setattr(module, name, LowRank(getattr(module, name), rank, alpha / rank, generator))


def round_bases(layers: Iterable[nn.Module]) -> None:
    """Let every linear map of some layers that does not learn multiply in bfloat16."""
    for layer in layers:
        for name, part in MODULES.items():
            module = getattr(layer, part)
            linear = getattr(module, name)
            if isinstance(linear, LowRank):
                assert isinstance(linear.base, nn.Linear)
                linear.base = Rounded(linear.base)
            else:
                setattr(module, name, Rounded(linear))


def save_lora(folder: Path, layers: Mapping[int, nn.Module], base: str, rank: int, alpha: float) -> None:
    """Write the additions of layers, by number, in bfloat16, as peft reads them."""
    tensors: dict[str, Tensor] = {}
    for number, layer in layers.items():
        for name, part in MODULES.items():
            low: LowRank = getattr(getattr(layer, part), name)
            for letter in ("A", "B"):
                key = f"{PREFIX}layers.{number}.{part}.{name}.lora_{letter}.weight"
                tensors[key] = getattr(low, f"lora_{letter}").detach().to(torch.bfloat16).contiguous()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(MODULES),
        "layers_to_transform": sorted(layers),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    """What an adapter's folder says of it.

    Raises:
        ValueError: it is not a LoRA adapter of the plain kind.
    """
    file = folder / CONFIG
    try:
        told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        base, rank, alpha = told["base_model_name_or_path"], told["r"], told["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: no LoRA adapter ({type(error).__name__}: {error})") from None
    other = [key for key in OTHER_KINDS if told.get(key)]
    if told.get("peft_type") != "LORA" or other or not isinstance(base, str) or rank < 1 or alpha <= 0:
        raise ValueError(f"{file}: only plain LoRA adapters load, without {', '.join(other or OTHER_KINDS)}")
    return told


def merge_lora(named: dict[str, Tensor], folder: Path) -> None:
    """Add an adapter to a model's tensors, named as in `Backbone`.

    Raises:
        ValueError: the file cannot be read, or its matrices do not fit the model's.
    """
    told, file = read_config(folder), folder / WEIGHTS
    try:
        low = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None
    scale = told["lora_alpha"] / told["r"]
    done = 0
    for key in sorted(low):
        if not key.endswith(".lora_A.weight"):
            continue
        name = key.removeprefix(PREFIX).removesuffix(".lora_A.weight") + ".weight"
        a, b = low[key].float(), low.get(key.replace("lora_A", "lora_B"), torch.empty(0, 0)).float()
        weight = named.get(name)
        if weight is None or b.shape[1:] != a.shape[:1] or weight.shape != (b.shape[0], a.shape[1]):
            raise ValueError(f"{file}: {key} fits no matrix of the base model; was it trained on another one?")
        named[name] = weight.float() + scale * b @ a
        done += 2
    if done != len(low) or not done:
        raise ValueError(f"{file}: holds other tensors than the two of each matrix")
