"""Short measurements on this machine, from which the cost of a whole corpus is told beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil
import torch

from icr_bench.retrievers.base import Estimate
from icr_bench.retrievers.lm.attend import attend, attend_ranges
from icr_bench.retrievers.lm.backbone import Backbone
from icr_bench.retrievers.lm.cache import CorpusCache, Shard, prefill
from icr_bench.retrievers.lm.corpus import batch_bytes
from icr_bench.retrievers.lm.engine import Config, Engine, Readout, head_scores
from icr_bench.retrievers.lm.prompt import Block

PREFILL_TOKENS = 768
"""Tokens prefilled to learn the speed."""

CACHE_TOKENS = 16_384
"""Tokens of one layer attended to, at most: enough that keys and values come from memory as they will."""


def estimate(
    backbone: Backbone,
    config: Config,
    blocks: Sequence[Block],
    queries: Sequence[Block],
    passes: Sequence[int],
    opening: int,
    first: int = 0,
    readout: Readout | None = None,
) -> Estimate:
    """The cost of holding documents and of one query.

    Args:
        blocks: the documents.
        queries: some queries, whose mean length counts.
        passes: beams of each digit pass after the query pass.
        opening: tokens of each query that are computed once for all.
        first: the first layer of which keys and values are kept.
        readout: which layer ranks the documents, where no digits are decoded; the query pass ends there.
    """
    lengths = [len(block) for block in blocks]
    tokens, n = sum(lengths), len(blocks)
    short: list[Block] = []
    for block in sorted(blocks, key=lambda block: abs(len(block) - tokens / n)):  # of about the mean length
        if short and sum(map(len, short)) + len(block) > PREFILL_TOKENS:
            break
        short.append(block)
    seconds = _fastest(lambda: list(prefill(backbone, short, range(len(short)), first=first)), backbone.device) / sum(
        map(len, short)
    )
    index_s = tokens * seconds
    # Half of a causal block's products, in the layers whose attention is read.
    attention_flops = 2 * backbone.heads * backbone.head_dim * (backbone.depth - 1) * sum(x * x for x in lengths)
    routing, depth = config.routing, readout.layer if readout else backbone.depth
    content = round(sum(block.after - block.text for block in queries) / len(queries))
    rows = max(round(sum(map(len, queries)) / len(queries)) - opening, 1)
    if readout and readout.tokens == "content" and not (routing and routing.tokens == "last"):
        rows = max(content, 1)  # as in `Engine.query_pass`, nothing after a query's own text
    query_s = 0.0
    kept = min(routing.keep, n) / n if routing else 1.0
    for number, beams in enumerate([rows, *passes]):
        dense = depth
        if routing:
            dense = 0 if number and routing.reach == "every" else min(routing.layer + 1, depth)
        query_s += _pass_s(backbone, beams, beams if number else 1, readout)
        query_s += max(dense - config.blind, 0) * _attend_s(backbone, beams, tokens)
        if dense < depth:
            query_s += (depth - max(dense, config.blind)) * _attend_s(backbone, beams, tokens * kept, routed=True)
    scoring = [readout] if readout else []
    if routing and routing.layer < depth:
        scoring.append(Readout(routing.layer, routing.tokens, tuple(range(backbone.heads))))
    text = round(sum(block.after - block.text for block in blocks) / n)
    for one in scoring:
        query_s += _score_s(backbone, content if one.tokens == "content" else 1, one.heads, n, round(tokens / n), text)
    index_bytes = tokens * backbone.token_bytes(first)
    held = (
        torch.cuda.memory_allocated(backbone.device)
        if backbone.device.type == "cuda"
        else psutil.Process().memory_info().rss
    )
    return Estimate(
        tokens=tokens,
        index_flops=float(tokens * backbone.prefill_flops() + attention_flops),
        index_bytes=index_bytes,
        peak_bytes=held + index_bytes + batch_bytes(backbone),
        index_s=index_s,
        query_s=query_s,
    )


def _pass_s(backbone: Backbone, rows: int, told: int, readout: Readout | None) -> float:
    """Seconds that query rows take in all layers, or in those below the readout's, but for the corpus; ``told`` of them
    are read after the last layer, over the vocabulary.

    Few rows take far longer each than those of a prefill: weights are read, and calls made, for them alone.
    """
    engine, block = Engine(backbone, Config(), 0), Block([0] * rows, 0, rows)
    cache = CorpusCache(list(prefill(backbone, [Block([0], 0, 0)], [0])), [0], 1)

    def work() -> None:
        state = engine.query_pass(cache, [block], readout, tail=told)
        if state.hidden is not None:
            backbone.log_probabilities(state.hidden)

    return _fastest(work, backbone.device)


def _score_s(backbone: Backbone, rows: int, heads: Sequence[int], documents: int, length: int, text: int) -> float:
    """Seconds that MaxSim of all documents takes in one layer.

    Args:
        rows: tokens of a query that score.
        length: tokens of a document, of which ``text`` count.
    """
    count = max(min(documents, CACHE_TOKENS // length), 1)
    keys = torch.zeros(1, backbone.kv_heads, count * length, backbone.head_dim, dtype=backbone.dtype)
    starts = torch.arange(count) * length
    shard = Shard(keys, keys, torch.arange(count), starts, starts + length, starts, starts + text).to(backbone.device)
    q = torch.zeros(rows, backbone.heads, backbone.head_dim, dtype=backbone.dtype, device=backbone.device)
    last = backbone.depth - 1  # a shard's last layer is the model's
    return _fastest(lambda: head_scores(backbone, shard, last, q, heads).sum(-1), backbone.device) * documents / count


def _attend_s(backbone: Backbone, rows: int, tokens: float, *, routed: bool = False) -> float:
    """Seconds that query rows take to attend to tokens in one layer."""
    size = max(min(int(tokens), CACHE_TOKENS), 1)
    shape = (backbone.kv_heads, size, backbone.head_dim)
    keys = torch.zeros(shape, dtype=backbone.dtype, device=backbone.device)
    values = torch.zeros_like(keys)
    q = torch.zeros(backbone.kv_heads, rows * backbone.heads // backbone.kv_heads, backbone.head_dim)
    q = q.to(backbone.device)
    if routed:
        starts = torch.arange(0, size, 128, device=backbone.device)
        ends = (starts + 128).clamp(max=size)
        return _fastest(lambda: attend_ranges(q, keys, values, starts, ends), backbone.device) * tokens / size
    return _fastest(lambda: attend(q, keys, values), backbone.device) * tokens / size


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the faster of two tries: the first one also pays for warming up."""
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken)
