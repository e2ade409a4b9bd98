"""Short measurements on this machine, from which the cost of a whole corpus is told beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil
import torch

from icr_bench.retrievers.base import Estimate
from icr_bench.retrievers.lm.attend import attend, attend_ranges
from icr_bench.retrievers.lm.backbone import Backbone
from icr_bench.retrievers.lm.cache import CorpusCache, prefill
from icr_bench.retrievers.lm.corpus import batch_bytes
from icr_bench.retrievers.lm.engine import Config, Engine
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
    depth: int,
    first: int = 0,
) -> Estimate:
    """The cost of holding documents and of one query.

    Args:
        blocks: the documents.
        queries: some queries, whose mean length counts.
        passes: beams of each digit pass after the query pass.
        opening: tokens of each query that are computed once for all.
        depth: layers in which a query attends; all, unless it is read out at one.
        first: the first layer of which keys and values are kept.
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
    attention_flops = 4 * backbone.heads * backbone.head_dim * backbone.depth * sum(x * x / 2 for x in lengths)
    rows = max(round(sum(map(len, queries)) / len(queries)) - opening, 1)
    query_s = 0.0
    kept = min(config.routing.keep, n) / n if config.routing else 1.0
    for number, beams in enumerate([rows, *passes]):
        dense = depth
        if config.routing:
            dense = 0 if number and config.routing.reach == "every" else min(config.routing.layer + 1, depth)
        seeing = max(min(dense, depth) - config.blind, 0)
        told = 0 if depth < backbone.depth else beams if number else 1
        query_s += _pass_s(backbone, beams, told) * depth / backbone.depth + seeing * _attend_s(backbone, beams, tokens)
        if dense < depth:
            query_s += (depth - max(dense, config.blind)) * _attend_s(backbone, beams, tokens * kept, routed=True)
    index_bytes = tokens * backbone.token_bytes(first)
    held = (
        torch.cuda.memory_allocated(backbone.device)
        if backbone.device.type == "cuda"
        else psutil.Process().memory_info().rss
    )
    return Estimate(
        tokens=tokens,
        index_flops=float(tokens * backbone.body_flops() + attention_flops),
        index_bytes=index_bytes,
        peak_bytes=held + index_bytes + batch_bytes(backbone),
        index_s=index_s,
        query_s=query_s,
    )


def _pass_s(backbone: Backbone, rows: int, told: int) -> float:
    """Seconds that query rows take in all layers, but for the corpus, and ``told`` of them over the vocabulary.

    Few rows take far longer each than those of a prefill: weights are read, and calls made, for them alone.
    """
    engine, block = Engine(backbone, Config(), 0), Block([0] * rows, 0, 0)
    cache = CorpusCache(list(prefill(backbone, [Block([0], 0, 0)], [0])), [0], 1)

    def work() -> None:
        state = engine.query_pass(cache, [block])
        assert state.hidden is not None
        if told:
            backbone.log_probabilities(state.hidden.expand(told, -1))

    return _fastest(work, backbone.device)


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
