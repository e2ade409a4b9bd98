"""The Hugging Face model over all documents, a query and digits as one sequence under a mask: the slow truth."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from icr_bench.retrievers.lm.engine import Config, Tokens
from icr_bench.retrievers.lm.prompt import Block, Tokenizer

OFFSET = 300

Step = tuple[list[int], list[int]]
"""Digits that a pass feeds, a beam each, and the beams of the pass before that they continue."""

STEPS: list[Step] = [([1, 7, 3], [0, 0, 0]), ([0, 5, 9, 2], [2, 0, 2, 1]), ([4, 4], [3, 1])]


def planned(steps: Sequence[Step], queries: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Digits and parents (Q, B) of each pass, which differ from query to query."""
    before = 1
    for digits, parents in steps:
        rolled = torch.arange(queries).unsqueeze(1)
        yield (torch.tensor(digits) + rolled) % 10, (torch.tensor(parents) + rolled) % before
        before = len(digits)


@functools.cache
def hugging_face(model: Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    return loaded.eval()


def by_rule(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any) -> Any:
    return module.rule(module.layer_idx, query, key, value, mask, scaling), None


AttentionInterface.register("by_rule", by_rule)


@dataclass
class Reference:
    """The Hugging Face model over all documents, a query and digits as one sequence, modified as ``config`` says.

    Without a modification its own attention runs.
    """

    model: Any
    documents: list[Block]
    config: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        owners = [number for number, block in enumerate(self.documents) for _ in block.ids]
        self.owner = torch.tensor(owners)
        lengths = torch.tensor([len(block) for block in self.documents])
        self.starts = lengths.cumsum(0) - lengths
        self.layers = self.model.config.num_hidden_layers

    @torch.no_grad()
    def run(self, query: Block, paths: Sequence[Sequence[int]], kept: Sequence[int] | None = None) -> Tensor:
        """Log-probabilities (paths, length + 1, V) at the query's last token and at each id of paths of one length.

        The hidden states that enter each layer stay in ``hidden``, its queries and keys in ``seen``.
        """
        digits, n = len(paths[0]), len(self.documents)
        begin = [i for block in self.documents for i in block.ids]
        ids = torch.tensor([[*begin, *query.ids, *path] for path in paths])
        own = len(query) + digits
        owner = torch.cat((self.owner, torch.full((own,), n)))
        position = torch.cat((torch.arange(len(self.owner)) - self.starts[self.owner], torch.arange(own) + OFFSET))
        earlier = torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
        sees = ((owner.unsqueeze(1) == owner) | (owner.unsqueeze(1) == n)) & earlier
        mask = torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)
        self.kept, self.query, self.seen = kept, query, dict[int, tuple[Tensor, Tensor]]()
        self.model.set_attn_implementation("eager" if self.config == Config() and kept is None else "by_rule")
        for layer in self.model.model.layers:
            layer.self_attn.rule = self.attend
        batch = len(paths)
        out = self.model(
            ids,
            attention_mask=mask.expand(batch, 1, -1, -1),
            position_ids=position.expand(batch, -1),
            use_cache=False,
            logits_to_keep=digits + 1,
            output_hidden_states=True,
        )
        self.hidden = out.hidden_states
        logs: Tensor = out.logits.log_softmax(-1)
        return logs

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
        """What a layer's heads read, (B, T, H, D), every modification put into its scores."""
        config, n = self.config, len(self.documents)
        self.seen[layer] = q, k
        corpus = len(self.owner)
        sees = mask[0, 0] == 0
        if config.routing is not None and self.kept is not None:
            dropped = torch.tensor([number not in self.kept for number in range(n)])[self.owner]
            first = corpus if layer > config.routing.layer else len(sees)
            if config.routing.reach == "every":
                first = min(first, corpus + len(self.query))
            sees[first:, :corpus] &= ~dropped
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * scaling
        sees[corpus:, :corpus] &= layer >= config.blind
        if config.ssmax is not None and layer >= config.blind:
            counted = sees[:, self.starts] if config.n_is == "documents" else sees
            scores[:, :, corpus:] *= config.ssmax[layer] * counted.sum(1)[corpus:].float().log().unsqueeze(1)
        scores = scores.masked_fill(~sees, -torch.inf)
        shares = scores.softmax(-1)
        if config.sink is not None and layer >= config.blind:
            sink = torch.full((*scores.shape[:3], 1), -torch.inf)
            sink[:, :, corpus:] = config.sink[layer] + math.log((config.sink_n or n) / 128)
            gated = torch.cat((scores, sink), -1).softmax(-1)[..., : len(sees)]
            shares = shares + config.sink_strength * (gated - shares)
        return (shares @ v).transpose(1, 2)

    def products(
        self, query: Block, layer: int, heads: Sequence[int], tokens: Tokens, kept: Sequence[int] | None = None
    ) -> list[float]:
        """Of every document, the best product of its text's keys with a query, summed over heads and tokens."""
        self.run(query, [[]], range(len(self.documents)) if kept is None else kept)
        q, k = (x[0] for x in self.seen[layer])
        own = range(query.text, query.after) if tokens == "content" else [len(query) - 1]
        group = len(q) // len(k)
        scores = []
        for start, block in zip(self.starts.tolist(), self.documents, strict=True):
            text = slice(start + block.text, start + block.after)
            rows = (q[head, len(self.owner) + place] @ k[head // group, text].T for head in heads for place in own)
            scores.append(sum((float(row.max()) for row in rows), 0.0) if block.after > block.text else -math.inf)
        return scores

    def shortlist(self, query: Block) -> list[int] | None:
        routing = self.config.routing
        if routing is None:
            return None
        heads = range(self.model.config.num_attention_heads)
        scores = self.products(query, routing.layer, heads, routing.tokens)
        return sorted(range(len(scores)), key=lambda number: (-scores[number], number))[: routing.keep]

    def answered(self, tokenizer: Tokenizer, queries: Sequence[Block], steps: Sequence[Step] = STEPS) -> list[Tensor]:
        """As the function of this name gives it for the engine."""
        paths: list[list[list[tuple[int, ...]]]] = [[[()] for _ in queries]]
        for digits, parents in planned(steps, len(queries)):
            grown = [
                [before[parent] + (tokenizer.digits[digit],) for digit, parent in zip(*rows, strict=True)]
                for before, *rows in zip(paths[-1], digits.tolist(), parents.tolist(), strict=True)
            ]
            paths.append(grown)
        logs: list[list[Tensor]] = [[] for _ in paths]
        for number, query in enumerate(queries):
            wanted = {path for step in paths for path in step[number]}
            leaves = [a for a in wanted if not any(a != b and b[: len(a)] == a for b in wanted)]
            found: dict[tuple[int, ...], Tensor] = {}
            kept = self.shortlist(query)
            for length in sorted({len(path) for path in leaves}):
                same = [path for path in leaves if len(path) == length]
                for path, rows in zip(same, self.run(query, same, kept), strict=True):
                    found |= {path[:depth]: row for depth, row in enumerate(rows)}
            for step, of_step in zip(paths, logs, strict=True):
                of_step.append(torch.stack([found[path] for path in step[number]]))
        return [torch.stack(of_step) for of_step in logs]
