"""Digit-by-digit beam search over the codes of a corpus (section 9 of the facts: width 25, five digits a step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from icr_bench.retrievers.lm.cache import CorpusCache
from icr_bench.retrievers.lm.engine import Engine, Queries


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

    def at_least(self, k: int) -> Beam:
        """A beam that can return k codes."""
        if k <= self.width:
            return self
        return Beam(k, 10, self.existing)  # five digits a step could leave fewer codes than k


class Codes:
    """The codes of a corpus as a tree: which prefixes exist, and which document a whole code names."""

    def __init__(self, codes: Sequence[int], digits: int, device: torch.device) -> None:
        self.digits = digits
        whole = torch.tensor(codes, device=device)
        self.exists = []
        for length in range(1, digits + 1):
            table = torch.zeros(10**length, dtype=torch.bool, device=device)
            table[whole // 10 ** (digits - length)] = True
            self.exists.append(table)
        self.document = torch.full((10**digits,), -1, device=device)
        self.document[whole] = torch.arange(len(whole), device=device)


def search(
    engine: Engine, cache: CorpusCache, codes: Codes, state: Queries, digit_ids: Sequence[int], beam: Beam
) -> tuple[Tensor, Tensor]:
    """The best codes of every query.

    Returns:
        Documents (Q, width), -1 where a beam ended in no document, and the log-probabilities of their codes in
        float32, best first.
    """
    assert state.hidden is not None
    ids = torch.tensor(digit_ids, device=engine.backbone.device)
    queries = len(state.lengths)
    prefixes = torch.zeros(queries, 1, dtype=torch.long, device=ids.device)
    scores = torch.zeros(queries, 1, device=ids.device)
    logs = engine.backbone.log_probabilities(state.hidden).unsqueeze(1)[..., ids]  # (Q, 1, 10)
    for length in range(codes.digits):
        longer = prefixes.unsqueeze(-1) * 10 + torch.arange(10, device=ids.device)  # (Q, B, 10)
        total = scores.unsqueeze(-1) + logs
        if beam.existing:
            total = total.masked_fill(~codes.exists[length][longer], -torch.inf)
        best, digits = total.topk(beam.per_step, -1)
        flat, places = best.flatten(1).topk(min(beam.width, best.shape[1] * best.shape[2]), -1)
        width = max(int((flat > -torch.inf).sum(1).max()), 1)  # beams beyond the last possible one for any query
        scores, places = flat[:, :width], places[:, :width]
        parents = places // beam.per_step
        chosen = digits.flatten(1).gather(1, places)
        prefixes = prefixes.gather(1, parents) * 10 + chosen
        if length < codes.digits - 1:
            hidden = engine.digit_pass(cache, state, ids[chosen], parents)
            logs = engine.backbone.log_probabilities(hidden)[..., ids]
    documents = codes.document[prefixes].masked_fill(scores == -torch.inf, -1)
    return documents, scores
