"""Small tokenizers of SentencePiece's form, which put a space before every text."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

SPACE_FIRST = ("normalizer", "first", "always")
"""Ways to put it there: as Mistral-7B-v0.1's file does, and as Metaspace of newer ones."""

MERGES = [
    ("▁", "D"),
    ("▁D", "o"),
    ("▁Do", "c"),
    ("D", "o"),
    ("Do", "c"),
    ("▁", "("),
    ("▁", "▁"),
    ("l", "i"),
    ("▁", "li"),
]


def with_space_first(form: str, more: Sequence[tuple[str, str]] = ()) -> str:
    """A tokenizer.json with bytes for what has no letter; <s> is 1 and </s> 2."""
    special, merges = ("<unk>", "<s>", "</s>"), [*MERGES, *more]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127)), "▁"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*tokens, *map("".join, merges)]))}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if form == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    told: str = made.to_str()
    return told
