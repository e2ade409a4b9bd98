"""Models of a few thousand parameters with random weights, in Hugging Face's layout."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Before PyTorch is imported: threads that wait for one another on a busy machine make small work slow, not fast.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TinyModel = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Make the folder of a model: ``tiny_model("qwen3", layers=4, seed=0, bos=None, **config)``; the same is reused."""
    made: dict[str, Path] = {}

    def make(family: str = "qwen3", layers: int = 4, seed: int = 0, bos: str | None = None, **config: Any) -> Path:
        key = repr((family, layers, seed, bos, sorted(config.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            _write(made[key], family, layers, seed, bos, config)
        return made[key]

    return make


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know, as in many a container, and who tells no folder either."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


RandomModel = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="session")
def random_model(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """Make folder and transformers' model of two layers, ``random_model("qwen3", **config)``, with biases and norms
    that are not zero and one; the same is reused."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(family: str, **config: Any) -> tuple[Path, Any]:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        key = repr((family, sorted(config.items())))
        if key not in made:
            tiny = tiny_model("llama", layers=2)
            base = AutoConfig.from_pretrained(tiny).to_dict()
            for name in ("model_type", "architectures", "rope_parameters"):
                base.pop(name)
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(base | config))).eval()
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim == 1:
                        weight += 0.4 * torch.randn_like(weight)
            folder = tmp_path_factory.mktemp("random") / "model"
            model.save_pretrained(folder)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tiny / file, folder)
            made[key] = folder, model
        return made[key]

    return make


def _write(folder: Path, family: str, layers: int, seed: int, bos: str | None, config: dict[str, Any]) -> None:
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "Do", "Doc", "Ġ(", "li", "ke"])}
    merges = [("D", "o"), ("Do", "c"), ("Ġ", "("), ("l", "i"), ("k", "e")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    torch.manual_seed(seed)
    settings = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,  # large enough that attention is not nearly uniform
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(settings | config)))
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a cross-encoder of one score with random weights, which reads letters."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("cross") / "model"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789")
    vocabulary = {token: number for number, token in enumerate([*special, *letters, *(f"##{c}" for c in letters)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": 64,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(
        vocab_size=len(vocabulary), num_labels=1, max_position_embeddings=64, initializer_range=0.5, **shape
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder
