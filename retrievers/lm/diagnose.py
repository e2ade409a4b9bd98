"""Why a query finds its document or not: what its last token sees in every layer (section 4 of the paper).

The measurements look on while the engine makes its own query pass, layer by layer; nothing that they do enters it. Of
what they see, only numbers a query, layer and head are kept, so that they take no more memory as the corpus grows than
the scores of `BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from icr_bench.retrievers.lm.attend import wide
from icr_bench.retrievers.lm.cache import CorpusCache
from icr_bench.retrievers.lm.corpus import NoRoom
from icr_bench.retrievers.lm.decode import digit_logs
from icr_bench.retrievers.lm.engine import Engine, Queries, Reading, check_heads, check_layer, head_scores

BYTES = 1 << 28
"""Scores of documents in one layer, by all heads for a group of queries, that are held at once."""

TOP = 10
"""Documents kept of a head's ranking."""


@dataclass(frozen=True)
class Look:
    """What to look at, and what counts as gold ranked first.

    The two choices decide the result (facts, section 8): all blocks begin with the same tokens, which have the same
    keys, so that a head which prefers them gives every document the same score.

    Args:
        layers, heads: all by default.
        ties: a gold that shares its score with another document is ranked behind it (``miss``) or before it (``hit``).
        tokens: a document's score is the best product with a token of its ``text``, or of its whole ``block``.
        per_query: keep the documents that heads rank first, and the probabilities of the digits.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    ties: Literal["miss", "hit"] = "miss"
    tokens: Literal["text", "block"] = "text"
    per_query: bool = False


Row = dict[str, Any]
"""What was seen of one query; lists go over the layers looked at, and within over heads.

- ``layers``, ``heads``: their numbers.
- ``rank_sum``, ``rank_heads``: rank of the best gold by MaxSim, summed over heads and by each; 0 in layers whose
  queries see no document.
- ``norm``, ``norm_gold``, ``norm_rest``: length of what attention writes, a_L, and of its parts from the golds' tokens
  and from all other tokens that the query sees, its own among them.
- ``mass``: share of attention on the golds' tokens; ``score``: their best score; ``gap``: log-sum-exp of all other
  tokens less that of the golds', None where no gold is seen.
- ``digit``, ``digit_best``, ``digit_right``: the probability of the golds' first digits after the layer, through the
  final norm and the head; the highest one of any digit; and whether that digit is a gold's.
- ``chance``: the share of the corpus's documents whose first digit is a gold's.
- ``constrained``, ``free``: whether the best code, of the corpus's or of all, is ``right``, wrong from its ``first`` or
  a ``later`` digit on, or the code of no document (``none``).

A share of attention is told to about 1e-6, so that a ``gap`` below -13 is only that. With bfloat16 on a processor that
multiplies it in hardware, queries are rounded on the way to the whole but not to the golds' part, and shares are good
to two digits.

With ``per_query`` also ``top_sum`` and ``top_heads``, document numbers, best first; and ``digits``, the probabilities
of ten digits at each place of the first gold's code, its earlier digits given.
"""


class Diagnosis:
    """Looks on at the query pass of a group of queries: give it to `Engine.query_pass` as ``look``.

    Args:
        golds: document numbers of each query, one or more.
        digit_ids: the ids of the digits' tokens.
        hidden: the document that may not be returned for a query, if there is one.
    """

    def __init__(
        self,
        engine: Engine,
        cache: CorpusCache,
        golds: Sequence[Sequence[int]],
        digit_ids: Sequence[int],
        look: Look,
        hidden: Sequence[int | None],
    ) -> None:
        self.engine, self.cache, self.look = engine, cache, look
        self._hidden = hidden
        device = engine.backbone.device
        self._golds = [torch.tensor(sorted(set(own)), device=device) for own in golds]
        self._ids = torch.tensor(digit_ids, device=device)
        first = 10 ** (cache.digits - 1)
        self._first = torch.zeros(len(golds), 10, dtype=torch.bool, device=device)  # golds' first digits
        for row, own in zip(self._first, golds, strict=True):
            row[[cache.codes[number] // first for number in own]] = True
        drawn = torch.tensor(cache.codes, device=device) // first
        self._chance = torch.bincount(drawn, minlength=10) / len(cache)  # of a document's first digit
        self._layers = looked(look.layers, engine.backbone.depth)
        self._heads = looked(look.heads, engine.backbone.heads)
        self._places = [
            [torch.isin(shard.documents, own).nonzero().squeeze(1) for shard in cache.shards] for own in self._golds
        ]
        self._seen: dict[str, list[list[Any]]] = {}

    def __call__(self, reading: Reading) -> None:
        if reading.layer not in self._layers:
            return
        found = self._ranks(reading) | self._parts(reading) | self._digits(reading.hidden)
        for name, value in found.items():
            self._seen.setdefault(name, []).append(value)

    def rows(self) -> list[Row]:
        """What was seen so far, a row a query."""
        chance = (self._first * self._chance).sum(1).tolist()
        where = {"layers": self._layers, "heads": self._heads}
        return [
            where
            | {name: [layer[query] for layer in layers] for name, layers in self._seen.items()}
            | {"chance": chance[query]}
            for query in range(len(self._golds))
        ]

    def outcomes(self, documents: Tensor, scores: Tensor, codes: Tensor) -> list[str]:
        """What came of every query's best code, one of those of `Row`, from what `decode.search` gives."""
        first = 10 ** (self.cache.digits - 1)
        told = []
        for query, golds in enumerate(self._golds):
            found = zip(documents[query].tolist(), scores[query].tolist(), codes[query].tolist(), strict=True)
            left = ((d, code) for d, score, code in found if score > -math.inf and d != self._hidden[query])
            document, code = next(left, (-1, -1))
            if document in golds:
                told.append("right")
            elif document < 0:
                told.append("none")
            else:
                told.append("later" if self._first[query, code // first] else "first")
        return told

    def _ranks(self, reading: Reading) -> dict[str, list[Any]]:
        """The ranks of golds by MaxSim, and their best score."""
        queries, heads = len(self._golds), len(self._heads)
        empty: list[list[int]] = [[] for _ in range(queries)]
        blind: dict[str, list[Any]] = {
            "rank_sum": [0] * queries,
            "rank_heads": [[0] * heads] * queries,
            "score": [None] * queries,
            "top_sum": empty,
            "top_heads": [[[]] * heads] * queries,
        }
        found = blind
        if reading.layer >= self.engine.config.blind:
            scores = self._scores(reading)
            found = {name: [] for name in blind}
            for query, golds in enumerate(self._golds):
                own = scores[:, query]  # (N, heads)
                summed = own.sum(1, keepdim=True)
                (rank,), ranks = self._rank(summed, golds), self._rank(own, golds)
                best = own[golds].amax(0) * reading.scale[query, 0]
                found["rank_sum"].append(rank)
                found["rank_heads"].append(ranks)
                found["score"].append(_rounded(best))
                if self.look.per_query:
                    found["top_sum"] += _top(summed)
                    found["top_heads"].append(_top(own))
        if not self.look.per_query:
            del found["top_sum"], found["top_heads"]
        return found

    def _scores(self, reading: Reading) -> Tensor:
        """(N, Q, heads): MaxSim of every document; -inf where the layer does not see it, or it has no such token."""
        scores = torch.full((len(self.cache), len(self._golds), len(self._heads)), -torch.inf, device=reading.q.device)
        for number, shard in enumerate(self.cache.shards):
            block = self.look.tokens == "block"
            found = head_scores(self.engine.backbone, shard, reading.layer, reading.q, self._heads, wrapper=block)
            if reading.shortlists is None:
                scores[shard.documents] = found
                continue
            for query, kept in enumerate(reading.shortlists):
                scores[shard.documents[kept[number]], query] = found[kept[number], query]
        for query, document in enumerate(self._hidden):
            if document is not None:
                scores[document, query] = -torch.inf
        return scores

    def _rank(self, scores: Tensor, golds: Tensor) -> list[int]:
        """Of each column of scores (N, columns), the rank of the best gold among the other documents."""
        best = scores[golds].amax(0)
        beaten_by = torch.ge if self.look.ties == "miss" else torch.gt
        before = beaten_by(scores, best).sum(0) - beaten_by(scores[golds], best).sum(0)
        ranks: list[int] = (before + 1).tolist()
        return ranks

    def _parts(self, reading: Reading) -> dict[str, list[Any]]:
        """What heads read, divided into what comes from golds and the rest."""
        engine = self.engine
        places = self._places
        if reading.shortlists is not None:
            places = [
                [own[torch.isin(own, kept)] for own, kept in zip(*both, strict=True)]
                for both in zip(places, reading.shortlists, strict=True)
            ]
        sees = reading.layer >= engine.config.blind
        having = [query for query, own in enumerate(places) if sees and any(map(len, own))]
        gold, lse = torch.zeros_like(reading.out), torch.full_like(reading.lse, -torch.inf)
        if having:
            q = wide(reading.q[having]) * reading.scale[having]
            row_of = torch.arange(len(having), device=q.device)
            gold[having], lse[having] = engine.read_corpus(
                self.cache, q, reading.layer, row_of, [places[query] for query in having]
            )
        # Two log-sum-exps near each other tell their difference in double precision as well as they can.
        ahead = (reading.lse.double() - lse.double()).clamp(min=1e-9)
        mass = (-ahead).exp()
        gate = engine.gate(reading.layer, len(self.cache), reading.lse)
        gold = gold * mass.to(gold.dtype).unsqueeze(-1) * (1 if gate is None else gate)
        matrix = wide(engine.backbone.stack()[reading.layer].self_attn.o_proj.weight)
        lengths = [(part.flatten(1) @ matrix.T).norm(dim=1) for part in (reading.out, gold, reading.out - gold)]
        gap = ahead.expm1().log()[:, self._heads]
        return {
            **dict(zip(("norm", "norm_gold", "norm_rest"), map(_rounded, lengths), strict=True)),
            "mass": _rounded(mass[:, self._heads]),
            "gap": [own if query in having else None for query, own in enumerate(_rounded(gap))],
        }

    def _digits(self, hidden: Tensor) -> dict[str, list[Any]]:
        logs = digit_logs(self.engine.backbone, hidden, self._ids)  # (Q, 10)
        shares = logs.exp()
        return {
            "digit": _rounded((shares * self._first).sum(1)),
            "digit_best": _rounded(shares.amax(1)),
            "digit_right": self._first.gather(1, logs.argmax(1, keepdim=True)).squeeze(1).tolist(),
        }


def untouched(state: Queries) -> Queries:
    """The same without the digits of any search, for another one."""
    return replace(state, digit_keys=[], digit_values=[])


def along(
    engine: Engine, cache: CorpusCache, state: Queries, golds: Sequence[Sequence[int]], digit_ids: Sequence[int]
) -> list[list[list[float]]]:
    """Per query and place of its first gold's code, the probabilities of the ten digits, the earlier ones given."""
    assert state.hidden is not None
    ids = torch.tensor(digit_ids, device=engine.backbone.device)
    fresh = untouched(state)
    codes = torch.tensor([cache.codes[own[0]] for own in golds], device=ids.device)
    found = [digit_logs(engine.backbone, state.hidden, ids)]
    for place in range(1, cache.digits):
        digits = (codes // 10 ** (cache.digits - place) % 10).unsqueeze(1)
        hidden = engine.digit_pass(cache, fresh, ids[digits], torch.zeros_like(digits))
        found.append(digit_logs(engine.backbone, hidden[:, 0], ids))
    return _rounded(torch.stack(found, 1).exp())


def looked(chosen: Sequence[int] | None, there: int) -> list[int]:
    """The layers or heads looked at."""
    return list(range(there)) if chosen is None else sorted(chosen)


def at_once(documents: int, look: Look, layers: int, heads: int) -> int:
    """Queries that can be looked at together in a model of that many layers and heads, so that the scores of all
    documents fit.

    Raises:
        ValueError: a layer or head that is not there.
        NoRoom: not even one query's do.
    """
    for layer in look.layers or ():
        check_layer("layers", layer, layers)
    check_heads("heads", looked(look.heads, heads), heads)
    one = documents * len(looked(look.heads, heads)) * 4
    if one > BYTES:
        raise NoRoom(
            f"to look at one query takes the scores of {documents:,} documents by each head, {one:,} bytes, more than "
            f"the {BYTES:,} there are; use fewer documents or --heads"
        )
    return BYTES // one


def _top(scores: Tensor) -> list[list[int]]:
    """Of each column of scores (N, columns) the first documents, best first; ties by number, and none that is not
    seen."""
    order = scores.argsort(dim=0, descending=True, stable=True)[:TOP].T  # (columns, TOP)
    seen = scores.T.gather(1, order) > -torch.inf
    return [row[kept].tolist() for row, kept in zip(order, seen, strict=True)]


def _rounded(values: Tensor) -> list[Any]:
    """As nested lists of numbers of five digits, None for what is not finite."""
    shaped: list[Any] = [float(f"{x:.5g}") if math.isfinite(x) else None for x in values.flatten().tolist()]
    for size in reversed(values.shape[1:]):
        shaped = [shaped[at : at + size] for at in range(0, len(shaped), size)]
    return shaped
