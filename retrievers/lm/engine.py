"""The query pass and the digit passes: rows of queries that see the cached corpus and the earlier tokens of their own.

One pass serves many queries, so that each reads the cache only once. What a variant changes is in `Config`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from icr_bench.retrievers.lm.attend import Part, attend, attend_ranges, maxsim, merge, wide
from icr_bench.retrievers.lm.backbone import Backbone
from icr_bench.retrievers.lm.cache import CorpusCache, Shard
from icr_bench.retrievers.lm.prompt import Block

Tokens = Literal["last", "content"]
"""Which tokens of a query score documents: the last one before the answer (the paper), or all of its own text."""

SINK_START = 128
"""N_0 of the sink's length signal, log(N / N_0) (facts 7.1)."""


@dataclass(frozen=True)
class Routing:
    """Documents are scored at one layer, the best are kept, and attention above that layer sees only those.

    ``reach`` says what digit passes see: with ``every`` the shortlist holds in all their layers; with ``upper`` only
    in those above the routing layer, so that the lower ones go on reading the whole corpus. The query pass is the same
    in both. The paper words it as ``upper``; its latencies (1.7 times from 500 to 10,000 documents, 5.4 times faster
    than dense) can only be had with ``every``, since layers 0 to 16 of 28 alone would grow with N.
    """

    layer: int
    keep: int = 256
    tokens: Tokens = "last"
    reach: Literal["every", "upper"] = "every"


@dataclass(frozen=True)
class Config:
    """All modifications of the attention of query rows. Documents never change, so one cache serves all variants.

    SSMax multiplies scores by ``s_L log N`` (section 5.1; natural logarithm). ``n_is`` says what N counts:
    ``documents`` are those that the softmax at hand sees, so after routing the shortlist; ``tokens`` are the tokens
    that the row sees, its own included, as in the original SSMax. Documents' own rows are not scaled: they see their
    block only, whose length does not grow with N.

    The sink (section 5.1, gate form) multiplies what a head reads by ``sigmoid(lse - b_L - log(N / 128))``, which
    equals one more logit in the softmax; the length signal of training is taken at the N of evaluation. It is off at
    evaluation, as in the paper, unless asked for.

    In the first ``blind`` layers query rows see their own query only, so that a growing corpus cannot drown it there;
    neither SSMax nor the sink touches these layers. The paper has none.
    """

    ssmax: Sequence[float] | Tensor | None = None  # s_L of every layer
    n_is: Literal["documents", "tokens"] = "documents"
    sink: Sequence[float] | Tensor | None = None  # b_L of every layer
    sink_n: float | None = None  # N of the gate, if not the documents at hand: the N_eff of training
    sink_strength: float = 1.0  # 0 for no gate; between, the factor is as far between 1 and the gate's
    routing: Routing | None = None
    blind: int = 0


@dataclass(frozen=True)
class Readout:
    """Which heads of a layer score documents, by which tokens of a query."""

    layer: int
    tokens: Tokens
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Opening:
    """The first tokens of every query, which all queries share, after one pass over the corpus."""

    length: int
    keys: list[Tensor]  # per layer (K, length, D)
    values: list[Tensor]
    hidden: Tensor | None  # (length, width) that enter the first layer above routing; None without routing


@dataclass(frozen=True)
class Reading:
    """What the last token of each query reads in one layer, for whoever looks on."""

    layer: int
    q: Tensor  # (Q, H, D) as they score documents in MaxSim
    scale: Tensor  # (Q, 1, 1) what multiplies them before they attend: 1 / sqrt(D), and s_L log N with SSMax
    out: Tensor  # (Q, H, D) what the heads read
    lse: Tensor  # (Q, H) log-sum-exp over all that they see
    shortlists: list[list[Tensor]] | None  # as in `Queries`, where they are in force; None where all documents are seen
    hidden: Tensor  # (Q, width) after the layer


@dataclass
class Queries:
    """A batch of queries after their pass: all that the digit passes need."""

    lengths: Tensor  # (Q,)
    keys: list[Tensor]  # per layer (Q, K, W, D), W the longest query
    values: list[Tensor]
    shortlists: list[list[Tensor]] | None  # per query and shard, places of the kept documents in the shard
    kept: Tensor | None  # (Q,) documents or tokens on each shortlist, whichever SSMax counts
    scores: Tensor | None  # (Q, N) of the layer that was asked for
    hidden: Tensor | None  # (Q * tail, width) of the last tokens after the last layer; None if the pass stopped before
    digit_keys: list[Tensor] = field(default_factory=list)  # per layer (Q, B, K, j, D)
    digit_values: list[Tensor] = field(default_factory=list)


class Engine:
    """A backbone that answers queries from a corpus.

    Args:
        config: the modifications; lengths and layers must fit the backbone.
        offset: position of a query's first token.

    Raises:
        ValueError: a routing layer, a number of scalars or of blind layers that does not fit the backbone, or nothing
            kept.
    """

    def __init__(self, backbone: Backbone, config: Config, offset: int) -> None:
        self.backbone, self.config, self.offset = backbone, config, offset
        for name in ("ssmax", "sink"):
            scalars = getattr(config, name)
            if scalars is not None and len(scalars) != backbone.depth:
                raise ValueError(f"{name} has {len(scalars)} scalars for a model of {backbone.depth} layers")
        if not 0 <= config.blind < backbone.depth:
            raise ValueError(f"blind is {config.blind}; of {backbone.depth} layers, 0 to {backbone.depth - 1} may be")
        if config.routing:
            check_layer("routing layer", config.routing.layer, backbone.depth)
            if config.routing.layer < config.blind - 1:
                raise ValueError(
                    f"routing layer {config.routing.layer}: above it, layers must see documents, but the first "
                    f"{config.blind} layers see none; take {config.blind - 1} or more"
                )
            if config.routing.keep < 1:
                raise ValueError(f"routing must keep 1 document or more, got {config.routing.keep}")

    @property
    def first(self) -> int:
        """The first layer in which keys and values of documents are read."""
        config = self.config
        return min(config.blind, config.routing.layer) if config.routing else config.blind

    def opening_pass(self, cache: CorpusCache, ids: Sequence[int]) -> Opening:
        """Run the tokens that open every query over the corpus, so that no query needs to do it again.

        They do not see what follows them. Above a routing layer they see the query's own shortlist, so that there they
        join each query again.
        """
        routing = self.config.routing
        plain = Engine(self.backbone, replace(self.config, routing=None), self.offset)
        entering: list[Tensor] = []

        def observe(layer: int, hidden: Tensor, q: Tensor) -> None:
            if routing and layer == routing.layer + 1:
                entering.append(hidden)

        state = plain.query_pass(cache, [Block(list(ids), len(ids), len(ids))], observe=observe)
        keys, values = ([x[0] for x in own] for own in (state.keys, state.values))
        return Opening(len(ids), keys, values, entering[0] if entering else None)

    def query_pass(
        self,
        cache: CorpusCache,
        blocks: Sequence[Block],
        readout: Readout | None = None,
        observe: Callable[[int, Tensor, Tensor], None] = lambda layer, hidden, q: None,
        opening: Opening | None = None,
        tail: int = 1,
        look: Callable[[Reading], None] | None = None,
    ) -> Queries:
        """Run queries over the corpus up to the token before the first digit.

        Args:
            readout: whose MaxSim scores all documents; the pass then stops at that layer.
            observe: told each layer's number, and of all rows (those of all blocks, in order, without an opening) the
                hidden states that enter it, (R, width), and the queries (R, H, D).
            opening: what `opening_pass` made of the tokens that all blocks begin with.
            tail: how many tokens at the end of each block are wanted after the last layer.
            look: told after each layer what the last token of each block reads there.
        """
        backbone, routing = self.backbone, self.config.routing
        device = backbone.device
        if readout and readout.tokens == "content" and not (routing and routing.tokens == "last"):
            # Nothing after a query's own text is read.
            least = opening.length + 1 if opening else 1
            blocks = [replace(block, ids=block.ids[: max(block.after, least)]) for block in blocks]
        lengths = torch.tensor([len(block) for block in blocks], device=device)
        width = int(lengths.max())
        first = opening.length if opening else 0
        row_of, place, last = _rows(lengths, first)
        hidden = backbone.embed_tokens(torch.tensor([i for b in blocks for i in b.ids[first:]], device=device))
        cos, sin = backbone.rotation(place + self.offset)
        state = Queries(lengths, [], [], None, None, None, None)
        for number, layer in enumerate(backbone.stack()):
            if opening and opening.hidden is not None and routing and number == routing.layer + 1:
                fresh = hidden
                row_of, place, last = _rows(lengths, 0)
                hidden = fresh.new_empty(len(row_of), fresh.shape[1])
                hidden[place >= first], hidden[place < first] = fresh, opening.hidden.repeat(len(blocks), 1)
                cos, sin = backbone.rotation(place + self.offset)
                first = 0
            q, k, v = layer.project(hidden, cos, sin)
            for kept, new in ((state.keys, k), (state.values, v)):
                padded = new.new_zeros((len(blocks), width, *new.shape[1:]))
                padded[row_of, place] = new
                if opening and first:
                    shared = opening.keys if kept is state.keys else opening.values
                    padded[:, :first] = shared[number].transpose(0, 1)
                kept.append(padded.transpose(1, 2))
            observe(number, hidden, q)
            if readout and number == readout.layer:
                state.scores = self._document_scores(cache, q, blocks, first, readout)
                return state
            if routing and number == routing.layer:
                every = Readout(number, routing.tokens, tuple(range(backbone.heads)))
                scores = self._document_scores(cache, q, blocks, first, every)
                state.shortlists = shortlists(cache, scores, routing.keep)
                state.kept = self._kept(cache, state.shortlists, device)
            rows: Tensor | slice = slice(None)
            rows_of, slot = row_of, place - first
            if number == backbone.depth - 1:  # of the last layer only the last tokens are read
                end = torch.arange(tail, device=device)
                rows, slot = (last.unsqueeze(1) - end.flip(0)).flatten(), end.repeat(len(blocks))
                rows_of = torch.repeat_interleave(torch.arange(len(blocks), device=device), tail)
            upper = routing is not None and number > routing.layer
            kept_here = state.shortlists if upper else None
            scale = self._scale(number, cache, state, rows_of, place[rows] + 1, routed=upper)
            plain, q = q, wide(q[rows]) * scale
            own = self._own_rows(q, state.keys[-1], state.values[-1], rows_of, place[rows], slot)
            out, lse = self._attended(cache, q, number, rows_of, kept_here, own)
            hidden = layer.finish(hidden[rows], out.to(backbone.dtype))
            if look:
                ends = (
                    last if number < backbone.depth - 1 else torch.arange(len(blocks), device=device) * tail + tail - 1
                )
                look(Reading(number, plain[last], scale[ends], out[ends], lse[ends], kept_here, hidden[ends]))
        state.hidden = hidden
        return state

    def digit_pass(
        self,
        cache: CorpusCache,
        state: Queries,
        tokens: Tensor,
        parents: Tensor,
        observe: Callable[[int, Tensor, Tensor], None] = lambda layer, hidden, q: None,
    ) -> Tensor:
        """Feed one digit to every beam and return the hidden states after the last layer, (Q, B, width).

        Args:
            tokens: (Q, B) ids of the digits.
            parents: (Q, B) which beam of the last pass each one continues; not read in the first.
            observe: as in `query_pass`, of the rows of all beams, query by query.
        """
        backbone, routing = self.backbone, self.config.routing
        queries, beams = tokens.shape
        row_of = torch.repeat_interleave(torch.arange(queries, device=tokens.device), beams)
        before = state.digit_keys[0].shape[3] if state.digit_keys else 0
        length = state.lengths[row_of] + before
        hidden = backbone.embed_tokens(tokens.flatten())
        cos, sin = backbone.rotation(length + self.offset)
        picked = torch.arange(queries, device=tokens.device).unsqueeze(1), parents
        for number, layer in enumerate(backbone.stack()):
            q, k, v = layer.project(hidden, cos, sin)
            observe(number, hidden, q)
            new = [x.unflatten(0, (queries, beams)).unsqueeze(3) for x in (k, v)]
            for kept, added in zip((state.digit_keys, state.digit_values), new, strict=True):
                if before:
                    kept[number] = torch.cat((kept[number][picked], added), 3)
                else:
                    kept.append(added)
            every = routing is not None and routing.reach == "every"
            upper = routing is not None and (every or number > routing.layer)
            q = wide(q) * self._scale(number, cache, state, row_of, length + 1, routed=upper)
            own = self._own_beams(q, state, number, queries, beams)
            out, _ = self._attended(cache, q, number, row_of, state.shortlists if upper else None, own)
            hidden = layer.finish(hidden, out.to(backbone.dtype))
        after: Tensor = hidden.unflatten(0, (queries, beams))
        return after

    def _scale(
        self, layer: int, cache: CorpusCache, state: Queries, row_of: Tensor, own: Tensor, *, routed: bool
    ) -> Tensor:
        """The factor on each row's scores, (R, 1, 1): 1 / sqrt(D), times s_L log N with SSMax."""
        plain = torch.full((len(row_of), 1, 1), 1 / math.sqrt(self.backbone.head_dim), device=row_of.device)
        if self.backbone.dtype == torch.float64:
            plain = plain.double()
        if self.config.ssmax is None or layer < self.config.blind:
            return plain
        if routed and state.kept is not None:
            n = state.kept[row_of]
        else:
            whole = len(cache) if self.config.n_is == "documents" else cache.tokens
            n = torch.full_like(row_of, whole)
        if self.config.n_is == "tokens":
            n = n + own
        return plain * self.config.ssmax[layer] * n.to(plain.dtype).log().view(-1, 1, 1)

    def _kept(self, cache: CorpusCache, kept: list[list[Tensor]], device: torch.device) -> Tensor:
        if self.config.n_is == "documents":
            return torch.tensor([sum(map(len, places)) for places in kept], device=device)
        lengths = [shard.ends - shard.starts for shard in cache.shards]
        return torch.stack(
            [sum(own[p].sum() for own, p in zip(lengths, places, strict=True)) for places in kept]  # type: ignore[misc]
        )

    def _attended(
        self, cache: CorpusCache, q: Tensor, layer: int, row_of: Tensor, kept: list[list[Tensor]] | None, own: Part
    ) -> Part:
        """What rows read of the corpus and of their own query together, and the log-sum-exp over both."""
        if layer < self.config.blind:
            return own
        out, lse = merge([self.read_corpus(cache, q, layer, row_of, kept), own])
        gate = self.gate(layer, len(cache), lse)
        return out if gate is None else out * gate, lse

    def gate(self, layer: int, documents: int, lse: Tensor) -> Tensor | None:
        """The sink's factor on what heads read, (R, H, 1), from their log-sum-exp (R, H); None without a sink."""
        if self.config.sink is None or layer < self.config.blind:
            return None
        threshold = self.config.sink[layer] + math.log((self.config.sink_n or documents) / SINK_START)
        gate = torch.sigmoid(lse - threshold).unsqueeze(-1)
        return 1 + self.config.sink_strength * (gate - 1)

    def _group(self, q: Tensor) -> Tensor:
        """(R, H, D) as (K, R * H / K, D): the rows of each key/value head together."""
        grouped: Tensor = q.unflatten(1, (self.backbone.kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        return grouped

    def _ungroup(self, part: Part, rows: int) -> Part:
        """The inverse of `_group` for what rows read and their log-sum-exp."""
        out, lse = (x.unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2) for x in part)
        return out, lse

    def read_corpus(
        self, cache: CorpusCache, q: Tensor, layer: int, row_of: Tensor, kept: list[list[Tensor]] | None
    ) -> Part:
        """What rows (R, H, D) read from the corpus, all of it or the documents on their queries' shortlists."""
        if kept is None:
            grouped = self._group(q)
            dense = (attend(grouped, *shard.layers[layer - self.backbone.depth]) for shard in cache.shards)
            return self._ungroup(merge(dense), len(q))
        outs, lses = torch.empty_like(q), q.new_empty(q.shape[:2])
        for query, places in enumerate(kept):
            rows = (row_of == query).nonzero().squeeze(1)
            grouped = self._group(q[rows])
            parts = [
                attend_ranges(grouped, *s.layers[layer - self.backbone.depth], s.starts[p], s.ends[p])
                for s, p in zip(cache.shards, places, strict=True)
                if len(p)
            ]
            outs[rows], lses[rows] = self._ungroup(merge(parts), len(rows))
        return outs, lses

    def _own_rows(self, q: Tensor, keys: Tensor, values: Tensor, row_of: Tensor, place: Tensor, slot: Tensor) -> Part:
        """What rows read from their own query up to themselves; ``slot`` numbers the rows of each query from 0."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        slots, width = int(slot.max()) + 1, keys.shape[2]
        size = max(1, (1 << 24) // (self.backbone.heads * slots * width))  # 64 MiB of scores, or those of one query
        for begin in range(0, len(keys), size):
            rows = ((row_of >= begin) & (row_of < begin + size)).nonzero().squeeze(1)
            at = row_of[rows] - begin, slot[rows]
            padded = q.new_zeros((int(at[0].max()) + 1, slots, *q.shape[1:]))
            padded[at] = q[rows]
            seen = torch.zeros(padded.shape[:2], dtype=torch.long, device=q.device)
            seen[at] = place[rows]
            later = torch.arange(width, device=q.device) > seen.unsqueeze(-1)  # (Q, slots, W)
            grouped = padded.unflatten(2, (self.backbone.kv_heads, -1)).permute(0, 2, 3, 1, 4)  # (Q, K, G, slots, D)
            ours = slice(begin, begin + len(padded))
            scores = grouped @ wide(keys[ours]).unsqueeze(2).transpose(-1, -2)
            scores = scores.masked_fill(later.unsqueeze(1).unsqueeze(1), -torch.inf)
            part = _softmax(scores, wide(values[ours]).unsqueeze(2))
            out[rows] = part[0].permute(0, 3, 1, 2, 4).flatten(2, 3)[at]
            lse[rows] = part[1].permute(0, 3, 1, 2).flatten(2, 3)[at]
        return out, lse

    def _own_beams(self, q: Tensor, state: Queries, layer: int, queries: int, beams: int) -> Part:
        """What beams read from their query and from their own digits up to themselves."""
        kv_heads = self.backbone.kv_heads
        rows = q.unflatten(0, (queries, beams)).unflatten(2, (kv_heads, -1))  # (Q, B, K, G, D)
        stacked = rows.transpose(1, 2).flatten(2, 3)  # (Q, K, B * G, D)
        scores = stacked @ wide(state.keys[layer]).transpose(-1, -2)
        beyond = torch.arange(scores.shape[-1], device=q.device) >= state.lengths.view(-1, 1, 1, 1)
        query = _softmax(scores.masked_fill(beyond, -torch.inf), wide(state.values[layer]))
        query_part = tuple(x.unflatten(2, (beams, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1) for x in query)
        digits = rows @ wide(state.digit_keys[layer]).transpose(-1, -2)
        digit_part = tuple(x.flatten(2, 3).flatten(0, 1) for x in _softmax(digits, wide(state.digit_values[layer])))
        return merge([(query_part[0], query_part[1]), (digit_part[0], digit_part[1])])

    def _document_scores(
        self, cache: CorpusCache, q: Tensor, blocks: Sequence[Block], first: int, readout: Readout
    ) -> Tensor:
        """(Q, N): the sum over heads, and over the query's scoring tokens, of the best product with a text token.

        Only tokens of a document's own text count: the first tokens of all blocks are the same and so are their keys,
        so that a head which prefers them would give every document the same score (facts, section 8).
        """
        scores = torch.zeros(len(blocks), len(cache), device=q.device)
        rows, owner = scoring_rows(blocks, readout.tokens, q, first)
        self.backbone.check_finite(rows)  # keys are; and the compiled kernel may take no number for a small one
        for shard in cache.shards:
            found = head_scores(self.backbone, shard, readout.layer, rows, readout.heads).sum(-1)  # (n, R)
            per_query = torch.zeros(len(blocks), len(found), device=q.device)
            scores[:, shard.documents] = per_query.index_add_(0, owner, found.T)
        return finite(scores)


def _rows(lengths: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the tokens from ``first`` on of queries of these lengths: the query of each row, its place there, and the row
    of each query's last token."""
    counts = lengths - first
    row_of = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), counts)
    place = torch.arange(len(row_of), device=lengths.device) - (counts.cumsum(0) - counts)[row_of] + first
    return row_of, place, counts.cumsum(0) - 1


def scoring_rows(blocks: Sequence[Block], tokens: Tokens, q: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """The rows (R, H, D) of the tokens that score documents, and which query each belongs to, (R,).

    ``q`` holds the tokens from ``first`` on of every block, in order.
    """
    chosen, owners, at = list[int](), list[int](), 0
    for query, block in enumerate(blocks):
        places = range(block.text, block.after) if tokens == "content" else range(len(block) - 1, len(block))
        chosen += [at + place - first for place in places]
        owners += [query] * len(places)
        at += len(block) - first
    return q[chosen], torch.tensor(owners, dtype=torch.long, device=q.device)


def head_scores(
    backbone: Backbone, shard: Shard, layer: int, rows: Tensor, heads: Sequence[int], *, wrapper: bool = False
) -> Tensor:
    """(n, R, heads): per document, row (R, H, D) and head the best product with a key of the document's text, or with
    one of its whole block."""
    starts, ends = (shard.starts, shard.ends) if wrapper else (shard.text_starts, shard.text_ends)
    group = backbone.heads // backbone.kv_heads
    scores = torch.empty(len(shard.documents), len(rows), len(heads), device=rows.device)
    for kv_head in sorted({head // group for head in heads}):
        places = [place for place, head in enumerate(heads) if head // group == kv_head]
        q = rows[:, [heads[place] for place in places]].flatten(0, 1).unsqueeze(0)
        best = maxsim(q, shard.layers[layer - backbone.depth][0][kv_head : kv_head + 1], starts, ends)
        scores[:, :, places] = best[:, 0].unflatten(1, (len(rows), len(places)))
    return scores


def shortlists(cache: CorpusCache, scores: Tensor, keep: int) -> list[list[Tensor]]:
    """Per query and shard, the places of the ``keep`` documents with the highest scores; ties by document number."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :keep]
    kept = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    kept.scatter_(1, order, True)
    return [[row[shard.documents].nonzero().squeeze(1) for shard in cache.shards] for row in kept]


def finite(scores: Tensor) -> Tensor:
    """Scores with -inf (a document without text) replaced by less than the row's lowest other score."""
    missing = scores.isinf()
    lowest = scores.masked_fill(missing, torch.inf).amin(1, keepdim=True)
    lowest = torch.where(lowest.isinf(), torch.zeros_like(lowest), lowest)
    return torch.where(missing, lowest - 1, scores)


def check_heads(what: str, heads: Sequence[int], there: int) -> None:
    if not heads or len(set(heads)) < len(heads) or not all(0 <= head < there for head in heads):
        raise ValueError(f"{what} {'+'.join(map(str, heads))}: expected different ones of 0 to {there - 1}")


def check_layer(what: str, layer: int, depth: int) -> None:
    if not 0 <= layer < depth:
        raise ValueError(f"{what} {layer}: the model has layers 0 to {depth - 1}")


def _softmax(scores: Tensor, values: Tensor) -> Part:
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ values, lse
