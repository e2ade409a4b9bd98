"""A new model of the Qwen3 architecture and its tokenizer, before any step."""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from icr_bench.retrievers.lm.backbone import Backbone
from icr_bench.retrievers.lm.prompt import Tokenizer as Words
from icr_bench.retrievers.training.recipe import Shape

START, END = "<|im_start|>", "<|im_end|>"


def new_tokenizer(texts: Iterable[str], vocabulary: int) -> str:
    """A byte-level BPE with digits apart, as ``tokenizer.json``; the same texts give the same."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(START, special=True), AddedToken(END, special=True)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False)


def new_backbone(shape: Shape, serialized: str, seed: int) -> tuple[Backbone, Words]:
    """Random weights of which the MLP's add little; with ``shape.match`` they start as the retrieval they are to learn:
    in every layer queries look for equal keys and copy what they find."""
    from transformers import AutoConfig

    words = Words(serialized, None, None, "new")
    vocabulary = Tokenizer.from_str(serialized)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocabulary.get_vocab_size(),
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.width // shape.heads,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        tie_word_embeddings=True,
        bos_token_id=vocabulary.token_to_id(START),
        eos_token_id=vocabulary.token_to_id(END),
    )
    backbone = Backbone(config)
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, std: float) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * std

    with torch.no_grad():
        backbone.embed_tokens.weight.copy_(draw(*backbone.embed_tokens.weight.shape, std=0.08))
        for layer in backbone.stack():
            attention, mlp = layer.self_attn, layer.mlp
            std = shape.width**-0.5
            for matrix in (attention.q_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                matrix.weight.copy_(draw(*matrix.weight.shape, std=std))
            if shape.match:
                attention.k_proj.weight.copy_(attention.q_proj.weight)
                attention.o_proj.weight.copy_(0.5 * attention.v_proj.weight.T)
            else:
                for matrix in (attention.k_proj, attention.o_proj):
                    matrix.weight.copy_(draw(*matrix.weight.shape, std=std))
            mlp.down_proj.weight.copy_(draw(*mlp.down_proj.weight.shape, std=0.1 * shape.mlp**-0.5))
            attention.q_norm.weight.fill_(shape.qk_norm)
            attention.k_norm.weight.fill_(shape.qk_norm)
    return backbone, words
