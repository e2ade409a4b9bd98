"""The corpus as keys and values: documents prefilled one by one, in batches of nearly equal length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from icr_bench.retrievers.lm.backbone import Backbone, Layer
from icr_bench.retrievers.lm.prompt import Block

BATCH_TOKENS = 2048
"""Tokens, padding included, of one prefill batch; more gain nothing on a processor and take memory."""

PADDING = 0.1
"""Padding of a batch, at most, as a share of its tokens."""

SHARD_BYTES = 1 << 29
"""Keys and values of one shard, at most (but at least one document): what a crash can lose of a cache on disk."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Shard:
    """Keys and values of some documents, whole documents one after another along the tokens.

    Documents do not see each other, so any set of them in any order makes a shard.
    """

    keys: Tensor  # (L, K, T, D): the last layers, key/value heads, tokens, size of a head
    values: Tensor  # (L, K, T, D)
    documents: Tensor  # (n,) document numbers
    starts: Tensor  # (n,) first token of each document
    ends: Tensor  # (n,) token after its last one
    text_starts: Tensor  # (n,) first token of its own text, within the block
    text_ends: Tensor  # (n,) equal to text_starts where the text is empty

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    @cached_property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (K, T, D) of each layer that is kept, the model's last at the end; taken apart at once, which
        keeps their gradients apart too."""
        return list(zip(self.keys.unbind(), self.values.unbind(), strict=True))

    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def to(self, device: torch.device) -> Shard:
        """The same on another device; itself where it lies there already."""
        return Shard(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def select(self, places: Sequence[int]) -> Shard:
        """A shard of some of the documents, given by their places here."""
        kept = torch.tensor(places)
        lengths = (self.ends - self.starts)[kept]
        ends = lengths.cumsum(0)
        starts = ends - lengths
        keys = self.keys.new_empty((*self.keys.shape[:2], int(ends[-1]), self.keys.shape[3]))
        values = torch.empty_like(keys)
        for place, start, end in zip(places, starts.tolist(), ends.tolist(), strict=True):
            begin = int(self.starts[place])
            keys[:, :, start:end] = self.keys[:, :, begin : begin + end - start]
            values[:, :, start:end] = self.values[:, :, begin : begin + end - start]
        moved = starts - self.starts[kept]
        texts = (self.text_starts[kept] + moved, self.text_ends[kept] + moved)
        return Shard(keys, values, self.documents[kept], starts, ends, *texts)

    def numbered(self, documents: Sequence[int]) -> Shard:
        """The same documents under other numbers."""
        numbers = torch.tensor(documents, device=self.keys.device)
        rest = (self.starts, self.ends, self.text_starts, self.text_ends)
        return Shard(self.keys, self.values, numbers, *rest)


@dataclass(frozen=True)
class CorpusCache:
    """The whole corpus, in shards, and its codes; document numbers run from 0 to N - 1."""

    shards: Sequence[Shard]
    codes: Sequence[int]  # of document i at position i
    digits: int

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def nbytes(self) -> int:
        return sum(shard.nbytes() for shard in self.shards)


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Positions of documents in batches by length, longest first: at most `BATCH_TOKENS` with padding, of which
    padding makes at most `PADDING`; every position occurs once."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batch: list[int] = []
    real = 0
    for position in order:
        if batch:
            padded = lengths[batch[0]] * (len(batch) + 1)
            total = real + lengths[position]
            if padded > BATCH_TOKENS or padded - total > PADDING * total:
                yield batch
                batch, real = [], 0
        batch.append(position)
        real += lengths[position]
    if batch:
        yield batch


def prefill(
    backbone: Backbone,
    blocks: Sequence[Block],
    documents: Sequence[int],
    progress: Progress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
    first: int = 0,
) -> Iterator[Shard]:
    """Keys and values of every block, each attending only to itself from position 0, shard by shard.

    Args:
        blocks: the documents' token blocks.
        documents: their numbers.
        progress: told the tokens done and in all.
        first: the first layer of which keys and values are kept.

    Raises:
        FloatingPointError: some are not finite.
    """
    lengths = [len(block) for block in blocks]
    total, done = sum(lengths), 0
    progress(0, total)
    for part in _parts(list(batches(lengths)), lengths, max(shard_bytes // backbone.token_bytes(first), 1)):
        order = [position for batch in part for position in batch]
        ends = torch.tensor([lengths[position] for position in order]).cumsum(0)
        starts = ends - torch.tensor([lengths[position] for position in order])
        shape = (backbone.depth - first, backbone.kv_heads, int(ends[-1]), backbone.head_dim)
        keys = torch.empty(shape, dtype=backbone.dtype, device=backbone.device)
        values = torch.empty_like(keys)
        at = 0
        for batch in part:
            size = sum(lengths[position] for position in batch)
            ids = [blocks[position].ids for position in batch]
            here = slice(at, at + size)
            for number, (k, v) in enumerate(_read(backbone, ids, first=first), -first):
                if number >= 0:
                    keys[number, :, here], values[number, :, here] = k, v
            backbone.check_finite(*keys[:, :, here], *values[:, :, here])
            at += size
            done += size
            progress(done, total)
        texts = [torch.tensor([getattr(blocks[p], name) for p in order]) + starts for name in ("text", "after")]
        numbers = torch.tensor([documents[position] for position in order])
        spans = (x.to(backbone.device) for x in (numbers, starts, ends, *texts))
        yield Shard(keys, values, *spans)


def _parts(batches: list[list[int]], lengths: Sequence[int], limit: int) -> Iterator[list[list[int]]]:
    """Consecutive batches that make a shard of at most ``limit`` tokens; a batch that is too large is split."""
    part: list[list[int]] = []
    held = 0
    for batch in batches:
        rest: list[int] = []
        for position in batch:
            if held + lengths[position] > limit and (part or rest):
                yield [*part, rest] if rest else part
                part, rest, held = [], [], 0
            rest.append(position)
            held += lengths[position]
        part.append(rest)
    if part:
        yield part


def prefill_traced(
    backbone: Backbone,
    blocks: Sequence[Block],
    observe: Callable[[int, Tensor], None] = lambda layer, hidden: None,
    *,
    recompute: bool = False,
) -> Shard:
    """`prefill` of few documents with gradients: document i is ``blocks[i]``.

    Args:
        observe: told each layer's number and the hidden states that enter it, (T, width), of all tokens in the order of
            the shard.
        recompute: keep a layer's input only and compute the layer once more on the way back.
    """
    lengths = [len(block) for block in blocks]
    parts = list(batches(lengths))
    order = [position for batch in parts for position in batch]
    ends = torch.tensor([lengths[position] for position in order]).cumsum(0)
    starts = ends - torch.tensor([lengths[position] for position in order])
    texts = [torch.tensor([getattr(blocks[p], name) for p in order]) + starts for name in ("text", "after")]
    entering: list[list[Tensor]] = [[] for _ in range(backbone.depth)]
    reading = [
        _read(backbone, [blocks[p].ids for p in batch], lambda n, h: entering[n].append(h), recompute=recompute)
        for batch in parts
    ]
    keys, values = list[Tensor](), list[Tensor]()
    for number, layer in enumerate(zip(*reading, strict=True)):
        keys.append(torch.cat([k for k, _ in layer], 1))
        values.append(torch.cat([v for _, v in layer], 1))
        observe(number, torch.cat(entering[number]))
    spans = (x.to(backbone.device) for x in (torch.tensor(order), starts, ends, *texts))
    return Shard(torch.stack(keys), torch.stack(values), *spans)


def _read(
    backbone: Backbone,
    ids: list[list[int]],
    observe: Callable[[int, Tensor], None] | None = None,
    *,
    recompute: bool = False,
    first: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Layer by layer the keys and values (K, T, D) of documents padded to the first one's length; below ``first``, what
    comes is empty.

    Padding follows a document and attention is causal, so that no token of a document sees any.
    """
    longest = len(ids[0])
    device = backbone.device
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ids], device=device)
    lengths = torch.tensor([len(row) for row in ids], device=device)
    real = torch.arange(longest, device=device) < lengths.unsqueeze(1)
    hidden = backbone.embed_tokens(tokens)
    cos, sin = backbone.rotation(torch.arange(longest, device=device))

    def through(layer: Layer, hidden: Tensor, seen: bool) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = layer.project(hidden, cos, sin)
        kept = (k[real].transpose(0, 1), v[real].transpose(0, 1)) if seen else (k[:0], v[:0])
        if layer is last:  # nothing reads what it would put out
            return *kept, hidden
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return *kept, layer.finish(hidden, attended.transpose(1, 2))

    *_, last = layers = backbone.stack()
    for number, layer in enumerate(layers):
        if observe:
            observe(number, hidden[real])
        if recompute:
            keys, values, hidden = checkpoint(through, layer, hidden, number >= first, use_reentrant=False)
        else:
            keys, values, hidden = through(layer, hidden, number >= first)
        yield keys, values
