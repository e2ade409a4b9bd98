"""Digit-by-digit beam search over the codes of a corpus (section 9 of the facts: width 25, five digits a step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from icr_bench.retrievers.lm.backbone import Backbone
from icr_bench.retrievers.lm.cache import CorpusCache
from icr_bench.retrievers.lm.engine import Engine, Queries

ROWS = 64
"""Beams whose logits over the whole vocabulary are held at once."""


@dataclass(frozen=True)
class Beam:
    """How wide the search is.

    ``existing`` restricts it to codes of the corpus: a digit that no code continues with is not taken. Probabilities
    are those of the model over its whole vocabulary in either case, so that a score is the log-probability of the code.
    """

    width: int = 25
    per_step: int = 5  # digits that one beam continues with, at most
    existing: bool = True

    def __post_init__(self) -> None:
        if self.width < 1 or not 1 <= self.per_step <= 10:
            raise ValueError(f"beam must be 1 or more and per_step 1 to 10, got {self.width} and {self.per_step}")


class Codes:
    """The codes of a corpus as a tree: which prefixes exist, and which document a whole code names."""

    def __init__(self, codes: Sequence[int], digits: int, device: torch.device) -> None:
        self.digits = digits
        whole = torch.tensor(codes, device=device)
        self.below = []  # per length of a prefix, how many codes begin with each
        for length in range(1, digits + 1):
            prefixes = whole // 10 ** (digits - length)
            self.below.append(torch.bincount(prefixes, minlength=10**length))
        self.document = torch.full((10**digits,), -1, device=device)
        self.document[whole] = torch.arange(len(whole), device=device)


def search(
    engine: Engine,
    cache: CorpusCache,
    codes: Codes,
    state: Queries,
    digit_ids: Sequence[int],
    beam: Beam,
    k: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best codes of every query.

    In a small corpus the digits of each step can leave fewer than k codes of documents to be reached. The search then
    takes the next best ones in addition until k can be, so that k documents come back wherever there are as many
    (unless codes of no document are allowed); a k beyond the beam's width widens it.

    Returns:
        Documents (Q, width), -1 where a beam ended in no document, the log-probabilities of their codes in float32,
        best first, and the codes.
    """
    assert state.hidden is not None
    ids = torch.tensor(digit_ids, device=engine.backbone.device)
    queries, most = len(state.lengths), max(beam.width, k)
    prefixes = torch.zeros(queries, 1, dtype=torch.long, device=ids.device)
    scores = torch.zeros(queries, 1, device=ids.device)
    logs = digit_logs(engine.backbone, state.hidden, ids).unsqueeze(1)  # (Q, 1, 10)
    for length in range(codes.digits):
        longer = prefixes.unsqueeze(-1) * 10 + torch.arange(10, device=ids.device)  # (Q, B, 10)
        total = scores.unsqueeze(-1) + logs
        below = codes.below[length][longer]
        if beam.existing:
            total = total.masked_fill(below == 0, -torch.inf)
        best = total.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < beam.per_step
        first = (best & (total > -torch.inf)).flatten(1)  # what the search takes by itself, by score; the rest after it
        flat = total.flatten(1)
        order = flat.argsort(dim=1, descending=True, stable=True)
        order = order.gather(1, first.gather(1, order).logical_not().long().argsort(dim=1, stable=True))
        flat, first, below = (x.gather(1, order) for x in (flat, first, below.flatten(1)))
        taken = first & (torch.arange(flat.shape[1], device=ids.device) < most)
        if beam.existing:
            taken |= below.cumsum(1) - below < k
        taken &= flat > -torch.inf
        width = max(int(taken.sum(1).max()), 1)
        scores, places = flat.masked_fill(~taken, -torch.inf)[:, :width], order[:, :width]
        parents, digits = places // 10, places % 10
        prefixes = prefixes.gather(1, parents) * 10 + digits
        if length < codes.digits - 1:
            hidden = engine.digit_pass(cache, state, ids[digits], parents)
            logs = digit_logs(engine.backbone, hidden, ids)  # (Q, B, 10)
    order = scores.argsort(dim=1, descending=True, stable=True)
    prefixes, scores = prefixes.gather(1, order), scores.gather(1, order)
    return codes.document[prefixes].masked_fill(scores == -torch.inf, -1), scores, prefixes


def digit_logs(backbone: Backbone, hidden: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the digits, (..., 10), after hidden states (..., width).

    Raises:
        FloatingPointError: some are not finite.
    """
    parts = [backbone.log_probabilities(rows)[:, ids] for rows in hidden.flatten(0, -2).split(ROWS)]
    logs: Tensor = torch.cat(parts).unflatten(0, hidden.shape[:-1])
    backbone.check_finite(logs)  # no code of a query would be likelier than none, and nothing be found
    return logs
