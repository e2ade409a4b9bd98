"""Decoder language models of the Llama, Mistral and Qwen families, cut where in-context retrieval needs to cut them.

The parameters carry the names that Hugging Face gives them, so that checkpoints load and save unchanged; the forward
pass is split into what comes before and after attention, since prefill, query pass and digit passes attend differently.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from icr_bench.retrievers.lm.attend import wide
from icr_bench.retrievers.lm.lora import CONFIG, WEIGHTS, merge_lora, read_config
from icr_bench.retrievers.lm.prompt import Tokenizer
from icr_bench.retrievers.weights import locate

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` in config.json that load."""

ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not depend on the length of the input."""


class UnsupportedModel(ValueError):
    """A checkpoint that this code cannot run; the message says which and what can be done."""


class Norm(nn.Module):
    """RMSNorm over the last dimension, computed in float32 whatever the type of its input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(wide(x), (x.shape[-1],), wide(self.weight), self.eps).to(x.dtype)


class Attention(nn.Module):
    """The projections of one layer's attention; attending itself happens elsewhere."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        family, width, size = config.model_type, config.hidden_size, head_dim(config)
        bias = family == "qwen2" or bool(getattr(config, "attention_bias", False))
        out_bias = family != "qwen2" and bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, width, bias=out_bias)
        if family == "qwen3":
            self.q_norm, self.k_norm = Norm(size, config.rms_norm_eps), Norm(size, config.rms_norm_eps)


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One layer in two halves: `project` before attention, `finish` after it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self._size = head_dim(config)

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (..., H, D), keys and values (..., K, D) of hidden states (..., width), rotated.

        ``cos`` and ``sin`` are (..., 1, D) in float32, as `Backbone.rotation` gives them.
        """
        x = self.input_layernorm(hidden)
        attention = self.self_attn
        q = attention.q_proj(x).unflatten(-1, (-1, self._size))
        k = attention.k_proj(x).unflatten(-1, (-1, self._size))
        v = attention.v_proj(x).unflatten(-1, (-1, self._size))
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Hidden states after this layer, from those before it and what its heads read, (..., H, D)."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """Embedding, layers, final norm and head of a decoder language model.

    Args:
        config: a configuration of transformers with a ``model_type`` among `FAMILIES`.

    Raises:
        UnsupportedModel: another family, or a rotary embedding that depends on the input's length.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.model_type not in FAMILIES:
            raise UnsupportedModel(f"model type {config.model_type!r}; expected one of {', '.join(FAMILIES)}")
        if config.hidden_act != "silu":
            raise UnsupportedModel(f"activation {config.hidden_act!r}; expected silu")
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim = head_dim(config)
        self._frequencies, self._scaling = frequencies(config)

    def stack(self) -> list[Layer]:
        """The layers, from the first to the last."""
        return cast(list[Layer], list(self.layers))

    @property
    def depth(self) -> int:
        return len(self.layers)

    def cut(self, depth: int) -> None:
        """Drop all layers from ``depth`` on: who reads a layer's keys needs none above it."""
        self.layers = self.layers[:depth]

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary embedding at integer positions (...), each (..., 1, D) in float32."""
        angles = positions.float().unsqueeze(-1) * self._frequencies.to(positions.device)
        angles = torch.cat((angles, angles), -1).unsqueeze(-2)
        return angles.cos() * self._scaling, angles.sin() * self._scaling

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of the next token, (..., vocabulary) in float32, of the last layer's hidden states."""
        return F.log_softmax(wide(self.lm_head(self.norm(hidden))), -1)

    def check_finite(self, *values: Tensor) -> None:
        """Refuse what would rank documents by no numbers at all.

        Raises:
            FloatingPointError: some of the values, which this model has computed, are not finite.
        """
        if not torch.stack([some.isfinite().all() for some in values]).all():
            name = str(self.dtype).removeprefix("torch.")
            cause = "its weights are damaged"
            if self.dtype == torch.float16:
                cause = "what exceeds 65,504 overflows there, so use --dtype bfloat16 or float32"
            raise FloatingPointError(f"the model computes values in {name} that are not finite: {cause}")

    def prefill_flops(self) -> int:
        """Floating-point operations of the layers' matrix products for one token of a document; nothing reads what the
        last layer puts out."""
        *_, last = self.stack()
        unread = {last.self_attn.o_proj, *last.mlp.modules()}
        return 2 * sum(m.weight.numel() for m in self.layers.modules() if isinstance(m, nn.Linear) and m not in unread)

    def token_bytes(self, first: int = 0) -> int:
        """Bytes of keys and values that one token leaves in the cache, over all layers from ``first`` on."""
        return 2 * (self.depth - first) * self.kv_heads * self.head_dim * self.embed_tokens.weight.element_size()


def head_dim(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = wide(x).chunk(2, -1)
    cos, sin = cos[..., : one.shape[-1]], sin[..., : one.shape[-1]]
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1).to(x.dtype)


def frequencies(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies (D / 2) and the factor on cosine and sine of a configuration's rotary embedding."""
    rope = config.rope_parameters
    kind, size = rope.get("rope_type", "default"), head_dim(config)
    if kind not in ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"rotary embedding {kind!r} ({rope}); expected one of {', '.join(ROPE)}, not partial")
    with torch.device("cpu"):
        steps = torch.arange(0, size, 2, dtype=torch.int64).float()
    plain = 1.0 / (rope["rope_theta"] ** (steps / size))
    if kind == "default":
        return plain, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with torch.device("cpu"):  # a backbone is laid out without memory for its parameters; these numbers are real
        scaled, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return scaled, float(factor)


class _Unset(TorchFunctionMode):
    """Leaves parameters as they are allocated: without memory there is nothing to set, and PyTorch would import its
    compiler for it, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def load_backbone(
    model: str, device: str = "cpu", dtype: str = "float32", base: str | None = None
) -> tuple[Backbone, Tokenizer, Path]:
    """Bring a model from the hub, a folder or a ``.gguf`` file.

    Args:
        model: ``org/name``, ``org/name@revision``, a folder with config.json and safetensors, a GGUF file, the name of
            a model that ships with this package, or the folder of a LoRA adapter.
        base: the model that an adapter adds to; the one that it names by default.

    Returns:
        The backbone without gradients, its tokenizer, and the folder or file that it was read from.

    Raises:
        UnsupportedModel: weights or tokenizer of a kind that is not supported.
        OSError: nothing there, or the hub does not answer.
    """
    path = given = fetch(model)
    _, *below = made_of(str(path), base)
    if base and not below:
        raise ValueError(f"{model} is no adapter, so that base={base} would change nothing")
    if below:
        path = fetch(below[0])
    if path.is_file():
        from icr_bench.retrievers.lm.gguf import read_gguf

        config, tensors, tokenizer = read_gguf(path)
    else:
        config, tensors, tokenizer = _read_folder(path)
    try:
        with torch.device("meta"), _Unset():
            backbone = Backbone(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if config.tie_word_embeddings and "embed_tokens.weight" in named:
        named["lm_head.weight"] = named["embed_tokens.weight"]
    if below:
        merge_lora(named, given)
    expected = dict(backbone.state_dict())
    named = {name: tensor for name, tensor in named.items() if not name.endswith("rotary_emb.inv_freq")}
    if wrong := sorted(expected.keys() ^ named.keys()):
        raise UnsupportedModel(f"{path}: parameters missing or not known: {', '.join(wrong[:5])}")
    for name, tensor in named.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
            raise UnsupportedModel(f"{path}: {name} has shape {shapes}")
    kind = getattr(torch, dtype)
    placed = {name: tensor.to(device, kind) for name, tensor in named.items()}
    if config.tie_word_embeddings:
        placed["lm_head.weight"] = placed["embed_tokens.weight"]
    backbone.load_state_dict(placed, assign=True)
    if config.tie_word_embeddings:
        backbone.lm_head.weight = backbone.embed_tokens.weight
    return backbone.requires_grad_(False).eval(), tokenizer, given


def shape_of(model: str, base: str | None = None) -> tuple[int, int] | None:
    """Layers and query heads of a local model, told without loading it; None of one that is not there yet.

    Raises:
        UnsupportedModel: there is no model at that place.
    """
    path = Path(locate(made_of(model, base)[-1])[0])
    if path.is_file():
        from icr_bench.retrievers.lm.gguf import gguf_shape

        return gguf_shape(path)
    if not path.is_dir():
        return None
    try:
        told = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return int(told["num_hidden_layers"]), int(told["num_attention_heads"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"{path}: its config.json cannot be read: {error!r}") from None


def made_of(model: str, base: str | None = None) -> list[str]:
    """The models whose weights a model has: itself, and what it adds to if it is an adapter."""
    path = Path(locate(model)[0])
    if (path / CONFIG).is_file() and not (path / "config.json").is_file():
        return [model, base or read_config(path)["base_model_name_or_path"]]
    return [model]


def fetch(model: str) -> Path:
    """The local folder or file of a model; one on the hub is brought into the hub's own cache."""
    name, revision = locate(model)
    path = Path(name)
    if path.is_dir() or path.suffix == ".gguf":
        if not path.exists():
            raise OSError(f"{model}: no such file")
        return path
    if path.is_file():
        raise UnsupportedModel(f"{model}: neither a folder nor a .gguf file")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    # Never *.bin or *.py: nothing is unpickled and no code of a model's author runs.
    wanted = ["*.json", "model*.safetensors", WEIGHTS, "merges.txt", "vocab.txt"]
    spare = ["original/*"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=spare))
    except HFValidationError:
        raise OSError(f"{model}: neither a local folder or .gguf file nor a hub id (org/name)") from None


def _read_folder(folder: Path) -> tuple[Any, dict[str, Tensor], Tokenizer]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder}: holds no config.json; give the folder of a Hugging Face model")
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in FAMILIES:
        raise UnsupportedModel(f"{folder}: model type {kind!r}; expected one of {', '.join(FAMILIES)}")
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors").is_file():  # some folders hold the same weights in a second form beside it
        files = [folder / "model.safetensors"]
    elif index := sorted(folder.glob("*.safetensors.index.json")):
        parts = set(json.loads(index[0].read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / part for part in sorted(parts)]
    if not files:
        raise UnsupportedModel(f"{folder}: holds no .safetensors file; convert other weights to safetensors first")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(f"{file}: cannot be read: {error}") from None
    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModel(f"{folder}: its tokenizer cannot be loaded (tokenizer.json): {reason:.200}") from None
    tokenizer = Tokenizer(loaded.backend_tokenizer.to_str(), loaded.bos_token_id, loaded.eos_token_id, f"{folder.name}")
    return AutoConfig.from_pretrained(folder, trust_remote_code=False), tensors, tokenizer


def same_fraction(layer: int, of: int, depth: int) -> int:
    """The layer at the same fraction of another depth: layer 16 of 28 is layer 17 of 30."""
    return min(max(math.floor(layer * depth / of + 0.5), 0), depth - 1)
