"""From documents to a `CorpusCache`: codes, blocks, what a cache on disk holds already, and room in memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from icr_bench.retrievers.base import Document, Ranking
from icr_bench.retrievers.lm.backbone import Backbone
from icr_bench.retrievers.lm.cache import BATCH_TOKENS, CorpusCache, Progress, Shard, prefill
from icr_bench.retrievers.lm.disk import DiskCache, Held, room
from icr_bench.retrievers.lm.prompt import (
    Block,
    Prompt,
    PromptSettings,
    Tokenizer,
    digits_for,
    draw_codes,
    text_keys,
)
from icr_bench.retrievers.weights import identify

QUERIES, QUERY_TOKENS = 32, 2048
"""Queries, and tokens of queries, that share a pass over the corpus, at most."""

CACHE_GB = 50.0
"""Size that keys and values in a folder may have unless told otherwise, in 10^9 bytes."""

SOURCE = ("attend.c", "attend.py", "backbone.py", "cache.py", "gguf.py", "lora.py", "prompt.py")
"""Files beside this one without which keys and values would not be what they are."""

LIBRARIES = ("gguf", "tokenizers", "transformers")
"""Packages that read models and texts."""


class NoRoom(MemoryError):
    """The corpus's keys and values would not fit into memory."""


class Corpus:
    """Fills and holds the cache of a corpus, with as much of it from disk as is there.

    Args:
        models: name the weights, for the cache's key; asked for only if there is a folder.
        codes: ``random`` or ``position``.
        folder: where keys and values are kept between runs; None to keep none.
        gigabytes: size that they may have there, in 10^9 bytes.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[str]],
        codes: Literal["random", "position"],
        seed: int,
        folder: Path | None,
        gigabytes: float,
    ) -> None:
        if not 0 < gigabytes < math.inf:
            raise ValueError(f"cache_gb must be above 0, got {gigabytes:g}")
        if folder is None and gigabytes != CACHE_GB:
            raise ValueError("cache_gb would change nothing; give cache=DIR too")
        self._models, self._kind, self._seed = models, codes, seed
        self._folder, self._limit = folder, int(gigabytes * 1e9)
        self._weights = ""
        self.cache = CorpusCache([], [], 0)
        self.reused = self.truncated = 0

    def load(self) -> None:
        """Find what identifies the weights, if anything is kept under their name."""
        if self._folder is not None:
            self._weights = " ".join(map(identify, self._models()))

    def fill(
        self,
        backbone: Backbone,
        tokenizer: Tokenizer,
        settings: PromptSettings,
        digits: int | None,
        documents: Sequence[Document],
        progress: Progress,
        first: int = 0,
    ) -> Prompt:
        """Take a corpus, replacing any earlier one, and return the prompt that it was written with.

        Args:
            first: the first layer of which keys and values are kept.

        Raises:
            NoRoom: if keys and values exceed the free memory and what the folder could hold: before anything is
                computed; or the memory alone, as soon as the folder takes no more or a part of what it holds would not
                fit as a copy.
        """
        self.cache = CorpusCache([], [], 0)  # what the last corpus took is free again
        prompt = Prompt(tokenizer, settings, digits or digits_for(len(documents)))
        texts = [document.text for document in documents]
        disk = self._disk(backbone, prompt, first)
        keys = text_keys(texts, self._seed)
        if self._kind == "position":
            keys = [f"{key} {number}" for number, key in enumerate(keys)]
        if disk and self._folder:
            whole = sum(map(len, prompt.documents(texts, [0] * len(texts))))
            beside = room(self._folder, self._limit) if backbone.device.type == "cpu" else 0
            check_room(backbone, first, whole, len(texts), beside)
        shards, held = _read(disk, keys, backbone, first) if disk else ([], {})
        if self._kind == "position":
            codes = list(range(len(texts)))
        else:
            codes = draw_codes(texts, prompt.digits, self._seed, held)
        missing = [number for number in range(len(texts)) if number not in held]
        blocks = list(prompt.documents(texts, codes))
        self.truncated = sum(block.truncated for block in blocks)
        todo = [blocks[number] for number in missing]
        left, ahead = sum(map(len, todo)), len(todo)
        if disk is None:
            check_room(backbone, first, left, ahead)
        elif missing:
            disk.prepare()
        for shard in prefill(backbone, todo, missing, progress, first=first):
            left, ahead = left - shard.tokens, ahead - len(shard.documents)
            kept = _keep(disk, shard, keys, codes) if disk else shard
            if disk and kept is shard and ahead:
                check_room(backbone, first, left, ahead)
            shards.append(kept)
        self.cache = CorpusCache(shards, codes, prompt.digits)
        self.reused = len(held)
        return prompt

    def _disk(self, backbone: Backbone, prompt: Prompt, first: int) -> DiskCache | None:
        if self._folder is None:
            return None
        blocks = prompt.shown()["block_ids"]
        told = [self._weights, prompt.settings.cap, blocks, prompt.digits, self._kind, self._seed]
        told += [first, backbone.depth, str(backbone.dtype), torch.__version__, made_by()]
        key = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:24]
        return DiskCache(self._folder, key, self._limit)

    def nbytes(self) -> int:
        return self.cache.nbytes()

    def settings(self) -> dict[str, Any]:
        """For the record."""
        n = len(self.cache)
        return {
            "codes": self._kind,
            "truncated": self.truncated,
            "corpus_tokens": self.cache.tokens,
            "prefill": f"reused {self.reused} of {n} documents" if self.reused else "measured",
        }


@cache
def made_by() -> str:
    """SHA-256 over what computes keys and values beside PyTorch: `SOURCE`, and the versions of `LIBRARIES`."""
    sha = hashlib.sha256(repr([(name, version(name)) for name in LIBRARIES]).encode())
    for name in SOURCE:
        sha.update(f"{name}\0".encode() + Path(__file__).with_name(name).read_bytes() + b"\0")
    return sha.hexdigest()


def _read(disk: DiskCache, keys: Sequence[str], backbone: Backbone, first: int) -> tuple[list[Shard], dict[int, int]]:
    """The shards of documents that could be read from disk, and these documents' codes, none of which occurs twice."""
    found = disk.find()
    taken: dict[int, tuple[int, Held]] = {}
    for number, key in enumerate(keys):
        entry = next((held for held in found.get(key, ()) if held.code not in taken), None)
        if entry:
            taken[entry.code] = number, entry
    copied = disk.load(taken.values(), lambda documents, tokens: check_room(backbone, first, tokens, documents))
    shards = [shard.to(backbone.device) for shard in copied]
    read = {number for shard in shards for number in shard.documents.tolist()}
    return shards, {number: code for code, (number, _) in taken.items() if number in read}


def _keep(disk: DiskCache, shard: Shard, keys: Sequence[str], codes: Sequence[int]) -> Shard:
    """Store a shard and return it mapped from its file, so that a corpus may exceed memory; or itself, if it cannot
    be stored or lies on a GPU."""
    numbers = shard.documents.tolist()
    file = disk.store(shard, [keys[number] for number in numbers], [codes[number] for number in numbers])
    if file is None or shard.keys.device.type != "cpu":
        return shard
    mapped = disk.load((number, Held(file, place, codes[number])) for place, number in enumerate(numbers))
    return next(mapped, shard)


def check_room(backbone: Backbone, first: int, tokens: int, documents: int, beside: int = 0) -> None:
    """Refuse documents whose keys and values, from a first layer on, exceed the free memory of the device.

    Args:
        beside: bytes that they may take on disk.

    Raises:
        NoRoom: with the numbers and what can be done.
    """
    needed = tokens * backbone.token_bytes(first) + batch_bytes(backbone)
    if backbone.device.type == "cuda":
        free = torch.cuda.mem_get_info(backbone.device)[0]
    else:
        free = psutil.virtual_memory().available
    rest = "bfloat16"
    if backbone.device.type == "cpu":
        rest += ", or keep them on disk (cache=DIR for this corpus alone, with room in cache_gb)"
    if needed > free + beside:
        there = f"{free:,} are free" + (f" and {beside:,} on disk" if beside else "")
        raise NoRoom(
            f"keys and values of {documents:,} documents ({tokens:,} tokens) take {needed:,} bytes, but only {there}; "
            f"use fewer documents, a smaller cap or model, or {rest}"
        )


def batch_bytes(backbone: Backbone) -> int:
    """Bytes that the activations of one prefill batch take, at most."""
    config = backbone.config
    row: int = 6 * config.hidden_size + 3 * config.intermediate_size
    return BATCH_TOKENS * row * 4


def ask_in_groups(blocks: Sequence[Block], ask: Callable[[Sequence[Block]], list[Ranking]]) -> list[Ranking]:
    """Answer queries in order, in groups of at most `QUERIES` and `QUERY_TOKENS`, or a longer one alone."""
    rankings: list[Ranking] = []
    group: list[Block] = []
    for block in blocks:
        if group and (len(group) == QUERIES or sum(map(len, group)) + len(block) > QUERY_TOKENS):
            rankings += ask(group)
            group = []
        group.append(block)
    return rankings + ask(group) if group else rankings


def spans(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Start and end character of every token of every text."""
    return [[(start, end) for start, end in encoding.offsets] for encoding in tokenizer.encode_batch(texts)]
