"""The losses of one batch: documents prefilled once, all queries asked of them, and what supervises the answer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from icr_bench.retrievers.lm.attend import ranges_index
from icr_bench.retrievers.lm.backbone import Backbone
from icr_bench.retrievers.lm.cache import CorpusCache, Shard, prefill_traced
from icr_bench.retrievers.lm.engine import Config, Engine, Queries
from icr_bench.retrievers.lm.prompt import Block, Prompt


class Asked(Protocol):
    """What a batch of training examples has (`icr_bench.benchmarks.examples.Batch`)."""

    @property
    def queries(self) -> list[str]: ...
    @property
    def documents(self) -> list[str]: ...
    @property
    def golds(self) -> list[list[int]]: ...
    @property
    def focus(self) -> list[tuple[int, int]]: ...
    @property
    def scores(self) -> NDArray[np.floating] | None: ...


@dataclass(frozen=True)
class Weights:
    """What each loss counts beside the digits', at one step."""

    onpolicy: float = 0.0
    attention: float = 0.0
    probes: float = 0.0


@dataclass(frozen=True)
class Aids:
    """Where attention and probes are supervised; a departure from the paper."""

    layer: int  # whose attention is to find the gold documents
    probes: tuple[int, ...] = ()  # layers whose input at the query is to know the code
    own: int | None = None  # layer in which the answer's tokens are to look at what their own query asks for
    gather: int | None = None  # layer in which head h of a document's text is to look at digit h of its code
    digits: float = 1.0  # weight of attention from the path's digits, where 1 is that from a query's last token
    maxsim: tuple[int, ...] = ()  # layers whose MaxSim is to rank the golds first, by last and by content tokens


class Learner(nn.Module):
    """A backbone with what is learned beside it.

    Args:
        ssmax, sink: initial value of the scalar of every layer, or None.
        blind: first layers in which queries see no documents.
        tau: temperature of the teacher's distribution.
    """

    def __init__(
        self,
        backbone: Backbone,
        prompt: Prompt,
        *,
        ssmax: float | None = None,
        sink: float | None = None,
        aids: Aids | None = None,
        tau: float = 0.05,
        blind: int = 0,
    ) -> None:
        super().__init__()
        self.backbone, self.prompt, self.aids, self.tau, self.blind = backbone, prompt, aids, tau, blind
        options: dict[str, Any] = {"dtype": backbone.dtype, "device": backbone.device}
        self.ssmax = None if ssmax is None else nn.Parameter(torch.full((backbone.depth,), ssmax, **options))
        self.sink = None if sink is None else nn.Parameter(torch.full((backbone.depth,), sink, **options))
        self.document_probe: nn.Linear | None = None
        self.query_probes = nn.ModuleList()
        if aids:
            width, sizes = backbone.embed_tokens.embedding_dim, prompt.digits * 10
            self.document_probe = nn.Linear(width, sizes, **options)
            self.query_probes.extend(nn.Linear(width, sizes, **options) for _ in aids.probes)
            for probe in (self.document_probe, *self.query_probes):
                nn.init.zeros_(probe.weight)
                nn.init.zeros_(probe.bias)
        self.digit_ids = torch.tensor(prompt.tokenizer.digits, device=backbone.device)

    def forward(
        self,
        batch: Asked,
        codes: Sequence[int],
        weights: Weights,
        config: Config,
        rng: random.Random,
        recompute: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and what a log shows of it.

        Args:
            config: what is not learned of the modifications: N_eff and strength of the sink.
        """
        backbone, prompt, device = self.backbone, self.prompt, self.backbone.device
        documents = list(prompt.documents(batch.documents, codes))
        blocks = [prompt.query(query) for query in batch.queries]
        digits = torch.tensor([[int(d) for d in f"{code:0{prompt.digits}d}"] for code in codes], device=device)
        told: dict[str, Tensor] = {}
        aids = self.aids if weights.attention or weights.probes else None
        inner: dict[int, Tensor] = {}

        def keep(layer: int, hidden: Tensor) -> None:
            if aids and layer in (aids.layer, aids.gather):
                inner[layer] = hidden

        shard = prefill_traced(backbone, documents, keep, recompute=recompute)
        cache = CorpusCache([shard], list(codes), prompt.digits)
        config = replace(config, ssmax=self.ssmax, sink=self.sink, blind=self.blind)
        engine = Engine(backbone, config, prompt.settings.offset)

        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def observe(layer: int, hidden: Tensor, q: Tensor) -> None:
            if aids and layer in (aids.layer, aids.own, *aids.probes, *aids.maxsim):
                seen[layer] = hidden, q

        gold = torch.zeros(len(blocks), len(codes), dtype=backbone.dtype, device=device)
        for query, numbers in enumerate(batch.golds):
            gold[query, numbers] = 1
        path = digits[torch.tensor([rng.choice(numbers) for numbers in batch.golds], device=device)]
        forced = [replace(b, ids=b.ids + p) for b, p in zip(blocks, self.digit_ids[path[:, :-1]].tolist(), strict=True)]
        state = engine.query_pass(cache, forced, observe=observe, tail=prompt.digits)
        assert state.hidden is not None
        hidden = state.hidden.unflatten(0, (len(blocks), -1))
        losses, right = self._digits(hidden, *targets(gold, digits, path))
        loss = losses.mean()
        for place in range(prompt.digits):
            told |= {f"digit{place + 1}": losses[:, place].mean(), f"right{place + 1}": right[:, place].mean()}
        if weights.onpolicy:
            begun = replace(state, lengths=state.lengths - prompt.digits + 1, hidden=hidden[:, 0])
            with torch.no_grad():
                rolled = self._rollout(engine, cache, fresh(begun))
            replayed = [hidden[:, 0], *self._replay(engine, cache, fresh(begun), rolled)]
            wanted, there = targets(self._teacher(batch, gold), digits, rolled)
            losses, _ = self._digits(torch.stack(replayed, 1), wanted, there)
            policy = (losses.sum(1) / there.sum(1)).mean()
            told["onpolicy"] = policy
            loss = loss + weights.onpolicy * policy
        if aids:
            read = rows(blocks, batch, prompt)
            attention, masses = self._attention(shard, seen[aids.layer][1], read, digits, path, gold)
            told |= {"attention": attention, **masses}
            loss = loss + weights.attention * attention
            if aids.maxsim:
                ranks = [self._maxsim(shard, seen[layer][1], layer, read, gold) for layer in aids.maxsim]
                for name, part in zip(("maxsim_last", "maxsim_content"), torch.stack(ranks).mean(0), strict=True):
                    told[name] = part
                    loss = loss + weights.attention * part
            if aids.own is not None:
                looking = self._looking(seen[aids.own][1], state.keys[aids.own], read)
                told["looking"] = looking
                loss = loss + weights.attention * looking
            if aids.gather is not None and weights.probes:
                gathering = self._gathering(shard, inner[aids.gather], aids.gather)
                told["gathering"] = gathering
                loss = loss + weights.probes * gathering
            if weights.probes:
                probes = self._probes(shard, inner[aids.layer], seen, read, digits, path)
                told["probes"] = probes
                loss = loss + weights.probes * probes
        told = {name: value.detach() for name, value in told.items()} | {"loss": loss.detach()}
        told["tokens"] = torch.tensor(float(sum(map(len, documents)) + sum(map(len, blocks))))
        return loss, told

    def _digits(self, hidden: Tensor, wanted: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the digits (Q, digits), 0 where no digit is wanted, and whether the best digit has a share.

        Args:
            hidden: (Q, digits, width) of the tokens before each digit.
            wanted: (Q, digits, 10) and ``there``: (Q, digits), as `targets` gives them.
        """
        logs = self.backbone.log_probabilities(hidden)[..., self.digit_ids]
        best = logs.detach().argmax(-1, keepdim=True)
        return -(wanted * logs).sum(-1) * there, (wanted.gather(2, best).squeeze(2) > 0).to(logs.dtype)

    def _rollout(self, engine: Engine, cache: CorpusCache, state: Queries) -> Tensor:
        """The digits that the model itself decodes, the most probable one each time, (Q, digits)."""
        assert state.hidden is not None
        found: list[Tensor] = []
        hidden = state.hidden
        for place in range(self.prompt.digits):
            if place:
                tokens = self.digit_ids[found[-1]].unsqueeze(1)
                hidden = engine.digit_pass(cache, state, tokens, torch.zeros_like(tokens))[:, 0]
            found.append(self.backbone.log_probabilities(hidden)[:, self.digit_ids].argmax(-1))
        return torch.stack(found, 1)

    def _replay(self, engine: Engine, cache: CorpusCache, state: Queries, path: Tensor) -> list[Tensor]:
        """Hidden states (Q, width) of the tokens before the digits of a path, from the second digit on."""
        tokens = self.digit_ids[path[:, :-1]].split(1, 1)
        return [engine.digit_pass(cache, state, one, torch.zeros_like(one))[:, 0] for one in tokens]

    def _teacher(self, batch: Asked, gold: Tensor) -> Tensor:
        """w(q, d) = exp(r(q, d) / tau), (Q, N), up to a factor a query; without a teacher r is 1 for golds, else 0."""
        scores = gold
        if batch.scores is not None:
            given = torch.as_tensor(batch.scores, dtype=gold.dtype, device=gold.device)
            scores = torch.where(given.isnan(), torch.full_like(given, -torch.inf), given)
        return ((scores - scores.amax(1, keepdim=True)) / self.tau).exp()

    def _attention(
        self, shard: Shard, q: Tensor, read: Rows, digits: Tensor, path: Tensor, gold: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """How little attention at one layer falls on the golds, of that on the text of all documents: from the tokens
        of each query's focus, from its last one, and from the digits of the path. Also the shares that the golds get.
        """
        assert self.aids
        layer = self.aids.layer
        text, owner = texts(shard)
        keys = shard.layers[layer][0][:, text]  # (K, T, D)
        q = q[[*read.focus, *read.last, *read.digits]]  # (R, H, D)
        scale = keys.shape[-1] ** -0.5
        if self.ssmax is not None and layer >= self.blind:
            scale = scale * self.ssmax[layer] * math.log(gold.shape[1])
        grouped = q.unflatten(1, (keys.shape[0], -1)).transpose(0, 1).flatten(1, 2)
        shares = (grouped @ keys.transpose(-1, -2) * scale).softmax(-1)  # (K, R * G, T)
        each = shares.new_zeros(*shares.shape[:2], gold.shape[1])
        each = each.index_add(2, owner, shares).unflatten(1, (len(q), -1)).mean((0, 2))  # (R, N)
        # A digit is to read the golds whose codes begin as the path does so far, and to tell them from other documents
        # that begin so too: else it learns to find the digits before it in the codes, and not what was asked for.
        same, begun = torch.ones_like(gold), list[Tensor]()
        for place in range(path.shape[1] - 1):
            same = same * (digits[:, place] == path[:, place : place + 1])
            begun.append(same)
        prefix = torch.stack(begun, 1).flatten(0, 1)  # (rows of digits, N)
        golds = torch.cat([gold[read.asking], gold, gold.repeat_interleave(len(begun), 0) * prefix])
        focus, last, answer = (each * golds).sum(1).split([len(read.focus), len(read.last), len(prefix)])
        among = (each[-len(prefix) :] * prefix).sum(1)
        rivals = prefix.sum(1) > golds[-len(prefix) :].sum(1)
        count = rivals.sum().clamp_min(1)
        told = {"mass_focus": focus.mean(), "mass": last.mean(), "mass_digits": answer.mean()}
        told["mass_rivals"] = (answer / among)[rivals].sum() / count
        apart = (_surprise(answer) - _surprise(among))[rivals].sum() / count
        answers = self.aids.digits * (_surprise(answer).mean() + apart)
        return (_surprise(focus).mean() + _surprise(last).mean() + answers) / (2 + self.aids.digits), told

    def _maxsim(self, shard: Shard, q: Tensor, layer: int, read: Rows, gold: Tensor) -> Tensor:
        """How far MaxSim, summed over the heads of a layer, is from ranking the golds of each query first (2,): by its
        last token, and by the mean over its content tokens. The surprise of the golds in a softmax over documents."""
        text, owner = texts(shard)
        keys = shard.layers[layer][0][:, text]  # (K, T, D)
        q = q[[*read.last, *(row for _, row in read.content)]]  # (R, H, D)
        grouped = q.unflatten(1, (keys.shape[0], -1)).transpose(0, 1).flatten(1, 2)
        scores = grouped @ keys.transpose(-1, -2) * keys.shape[-1] ** -0.5  # (K, R * G, T)
        best = scores.new_full((*scores.shape[:2], gold.shape[1]), -math.inf)
        best = best.scatter_reduce(2, owner.expand_as(scores), scores, "amax")
        each = best.unflatten(1, (len(q), -1)).sum((0, 2))  # (R, N)
        last, content = each.split([len(read.last), len(read.content)])
        asking = torch.tensor([query for query, _ in read.content], device=q.device)
        counts = asking.bincount(minlength=len(last)).clamp_min(1)
        mean = torch.zeros_like(last).index_add(0, asking, content) / counts.unsqueeze(1)
        logs = torch.stack([last, mean]).log_softmax(-1)
        return -logs.masked_fill(gold == 0, -math.inf).logsumexp(-1).mean(1)

    def _looking(self, q: Tensor, keys: Tensor, read: Rows) -> Tensor:
        """How little the tokens before each digit look at their own query's focus, of what they see of their query.

        Args:
            q: (R, H, D) of all rows; ``keys`` are (Q, K, W, D).
        """
        places = torch.arange(keys.shape[2], device=keys.device)
        chosen = [(query, row, place) for query, row, place in read.answers if read.spans[query] is not None]
        if not chosen:
            return q.new_zeros(())
        queries, rows_, ends = (torch.tensor(list(column), device=q.device) for column in zip(*chosen, strict=True))
        begin, after = (torch.tensor([(span or (0, 0))[i] for span in read.spans], device=q.device) for i in (0, 1))
        grouped = q[rows_].unflatten(1, (keys.shape[1], -1))  # (R, K, G, D)
        scores = (grouped @ keys[queries].transpose(-1, -2)) * keys.shape[-1] ** -0.5  # (R, K, G, W)
        later = places > ends.unsqueeze(1)
        shares = scores.masked_fill(later[:, None, None], -torch.inf).softmax(-1).mean((1, 2))  # (R, W)
        inside = (places >= begin[queries, None]) & (places < after[queries, None])
        return _surprise((shares * inside).sum(1)).mean()

    def _gathering(self, shard: Shard, inner: Tensor, number: int) -> Tensor:
        """How little each head of the documents' text tokens looks at its digit of the code, head h at digit h."""
        backbone, prompt = self.backbone, self.prompt
        lengths = shard.ends - shard.starts
        places = torch.arange(int(lengths.max()), device=inner.device)
        real = places < lengths.unsqueeze(1)  # (n, L)
        padded = inner.new_zeros(*real.shape, inner.shape[1])
        padded[real] = inner
        q, k, _ = backbone.stack()[number].project(padded, *backbone.rotation(places))
        k = k.repeat_interleave(backbone.heads // backbone.kv_heads, 2)
        scores = torch.einsum("nlhd,nmhd->nhlm", q, k) * k.shape[-1] ** -0.5
        scores = scores.masked_fill(places > places.unsqueeze(1), -torch.inf)
        heads = torch.arange(backbone.heads, device=inner.device)
        of_code = scores.softmax(-1)[:, heads, :, prompt.code_at + heads % prompt.digits]  # (H, n, L)
        text = (places >= (shard.text_starts - shard.starts).unsqueeze(1)) & (
            places < (shard.text_ends - shard.starts).unsqueeze(1)
        )
        return _surprise(of_code[:, text]).mean()

    def _probes(
        self,
        shard: Shard,
        inner: Tensor,
        seen: dict[int, tuple[Tensor, Tensor]],
        read: Rows,
        digits: Tensor,
        path: Tensor,
    ) -> Tensor:
        """How badly a linear map reads the code off the text of documents, and off the queries once they have read."""
        assert self.aids
        assert self.document_probe
        text, owner = texts(shard)
        shape = self.prompt.digits, 10
        found = self.document_probe(inner[text]).unflatten(-1, shape)
        loss = F.cross_entropy(found.flatten(0, 1), digits[owner].flatten())
        for layer, probe in zip(self.aids.probes, self.query_probes, strict=True):
            found = probe(seen[layer][0][read.focus_end]).unflatten(-1, shape)
            loss = loss + F.cross_entropy(found.flatten(0, 1), path.flatten())
        return loss / (1 + len(self.aids.probes))


def _surprise(mass: Tensor) -> Tensor:
    return -(mass + 1e-6).log()


def fresh(state: Queries) -> Queries:
    """The same queries before any digit."""
    return replace(state, digit_keys=[], digit_values=[])


def targets(weights: Tensor, digits: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """The digits that documents of weight (Q, N) and codes (N, digits) continue a path (Q, digits) with.

    Returns:
        Their shares (Q, digits, 10), all zero where no document's code begins as the path does, and whether one's does.
    """
    kinds = F.one_hot(digits, 10).to(weights.dtype)  # (N, digits, 10)
    shares, match = [], torch.ones_like(weights)
    present = []
    for place in range(path.shape[1]):
        held = weights * match
        total = held.sum(1, keepdim=True)
        there = match.any(1)
        shares.append(held @ kinds[:, place] / total.clamp_min(torch.finfo(total.dtype).tiny))
        present.append(there & (total.squeeze(1) > 0))
        match = match * (digits[:, place] == path[:, place : place + 1])
    return torch.stack(shares, 1), torch.stack(present, 1)


def texts(shard: Shard) -> tuple[Tensor, Tensor]:
    """The positions of all text tokens of a shard, and the number of the document that each belongs to."""
    lengths = shard.text_ends - shard.text_starts
    return ranges_index(shard.text_starts, shard.text_ends), torch.repeat_interleave(shard.documents, lengths)


@dataclass(frozen=True)
class Rows:
    """Places among the rows of all queries, one after another with the first digits of their answers."""

    last: list[int]  # of the token before the first digit
    digits: list[int]  # of those digits
    focus: list[int]  # of all tokens of each focus, or of the last token where a query has none
    asking: list[int]  # whose query each of these is
    focus_end: list[int]  # of the last one of each
    content: list[tuple[int, int]]  # query and row of each token of a query's own text
    answers: list[tuple[int, int, int]]  # query, row, and place in the query, of each token before a digit
    spans: list[tuple[int, int] | None]  # of each query, the places in it of its focus


def rows(blocks: Sequence[Block], batch: Asked, prompt: Prompt) -> Rows:
    """Where the tokens of queries are, of blocks without their answers."""
    read, at = Rows([], [], [], [], [], [], [], []), 0
    encodings = prompt.tokenizer.encode_batch(batch.queries)
    for query, (block, encoding, (start, end)) in enumerate(zip(blocks, encodings, batch.focus, strict=True)):
        after = at + len(block)
        read.last.append(after - 1)
        read.digits.extend(range(after, after + prompt.digits - 1))
        inside = [block.text + i for i, (a, b) in enumerate(encoding.offsets) if a < end and b > start]
        read.content.extend((query, at + place) for place in range(block.text, block.after))
        read.focus.extend([at + place for place in inside] or read.last[-1:])
        read.asking.extend([query] * (len(inside) or 1))
        read.focus_end.append(read.focus[-1])
        read.answers.extend((query, after - 1 + i, len(block) - 1 + i) for i in range(prompt.digits))
        read.spans.append((inside[0], inside[-1] + 1) if inside else None)
        at = after + prompt.digits - 1
    return read
