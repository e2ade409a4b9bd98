"""Picking the best k scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from icr_bench.retrievers.base import Ranking

OVERFLOW = "a model's values overflow its type, for which --dtype float32 helps, or its weights are damaged"


def check_finite(vectors: NDArray[np.floating], what: str) -> None:
    """Check vectors, (n, dimensions).

    Raises:
        FloatingPointError: some hold a value that is not finite, by which they would rank nowhere, or first.
    """
    if bad := len(vectors) - int(np.isfinite(vectors).all(axis=1).sum()):
        raise FloatingPointError(f"{bad:,} of {len(vectors):,} {what} hold values that are not finite: {OVERFLOW}")


def top_k(scores: NDArray[np.floating], k: int, among: NDArray[np.integer] | None = None) -> Ranking:
    """The k best documents by score, then by number.

    Args:
        scores: one score a document, shape (N,).
        among: the numbers, ascending, that may be returned; all by default.

    Raises:
        FloatingPointError: a score that is no number, which ranks nowhere.
    """
    numbers = np.arange(len(scores)) if among is None else among
    kept = scores[numbers]
    if len(kept) and np.isnan(kept.max()):
        raise FloatingPointError(
            f"{np.isnan(kept).sum():,} of {len(kept):,} documents have a score that is no number: {OVERFLOW}"
        )
    if k < len(numbers):
        threshold = np.partition(kept, len(kept) - k)[len(kept) - k]
        numbers = numbers[kept >= threshold]  # every document tied with the k-th
        kept = scores[numbers]
    best = np.argsort(-kept, kind="stable")[:k]
    return Ranking(numbers[best].tolist(), kept[best].tolist())
