"""Retrieval metrics over one canonical order of each ranking, with attainable ceilings and bootstrap intervals.

Canonical order: score, highest first; equal scores by document number, lowest first. Numbers are a random permutation
of the corpus, so a tie favours nobody. A query without an answer scores 0 and stays in the mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from icr_bench.harness.errors import unknown

Floats = NDArray[np.float64]

DEFINITIONS = {
    "hit": "share of queries with any relevant document among the first k",
    "recall": "share of a query's relevant documents among the first k, mean over queries",
    "complete": "share of queries with all their relevant documents among the first k",
    "mrr": "1 / rank of the first relevant document if it is among the first k, else 0, mean over queries",
    "ndcg": "discounted cumulative gain (gain = grade, discount = log2(rank + 1)) at k over the ideal one, "
    "mean over queries",
}
"""Metric -> definition; `hit@1` is what the BlockSearch paper calls Recall@1."""

RESAMPLES = 2_000
INTERVAL = f"95% percentile bootstrap over queries, {RESAMPLES:,} resamples"

_NAME = re.compile(r"([a-z]+)@([0-9]{1,9})")


@dataclass(frozen=True)
class Scored:
    """Per-query values of every metric, shape (queries,), and the share of queries with tied scores."""

    values: dict[str, Floats]
    ceiling: dict[str, float]
    tie_rate: float


def parse_metric(text: str) -> str:
    """Check a metric's name, such as ``hit@1``.

    Raises:
        UsageError: not a metric; the closest are named.
    """
    match = _NAME.fullmatch(text.strip().lower())
    if match is None or match[1] not in DEFINITIONS or int(match[2]) < 1:
        at = text.partition("@")[2]
        cutoff = at if re.fullmatch("[1-9][0-9]*", at) else "k"
        raise unknown("metric", text, [f"{name}@{cutoff}" for name in DEFINITIONS])
    return f"{match[1]}@{int(match[2])}"


def cutoff(metric: str) -> int:
    """The k of ``name@k``."""
    return int(metric.partition("@")[2])


def names(cutoffs: Iterable[int]) -> list[str]:
    """All metrics at all cut-offs."""
    return [f"{metric}@{k}" for metric in DEFINITIONS for k in sorted(cutoffs)]


def canonical(numbers: Sequence[int], scores: Sequence[float]) -> list[int]:
    """Positions of a ranking's documents in canonical order."""
    return sorted(range(len(numbers)), key=lambda i: (-scores[i], numbers[i]))


def per_query(ranked: Sequence[int], judged: Iterable[int], relevant: int, cutoffs: Iterable[int]) -> dict[str, float]:
    """All metrics of one query.

    Args:
        ranked: grades of the returned documents in order; 0 where unjudged.
        judged: grades of all judged documents of the corpus.
        relevant: the lowest grade that counts as relevant.
    """
    judged = list(judged)
    golds = sum(grade >= relevant for grade in judged)
    found = [grade >= relevant for grade in ranked]
    first = found.index(True) + 1 if True in found else 0
    ideal = sorted((grade for grade in judged if grade > 0), reverse=True)
    values = {}
    for k in cutoffs:
        hits = sum(found[:k])
        best = _dcg(ideal[:k])
        values[f"hit@{k}"] = float(hits > 0)
        values[f"recall@{k}"] = hits / golds if golds else 0.0
        values[f"complete@{k}"] = float(0 < golds == hits)
        values[f"mrr@{k}"] = 1 / first if 0 < first <= k else 0.0
        values[f"ndcg@{k}"] = _dcg(ranked[:k]) / best if best else 0.0
    return values


def _dcg(grades: Sequence[int]) -> float:
    return float(sum(max(grade, 0) / np.log2(rank + 1) for rank, grade in enumerate(grades, 1)))


def score(
    rankings: Mapping[str, Sequence[str]],
    tied: Iterable[bool],
    judgments: Mapping[str, Mapping[str, int]],
    relevant: int,
    cutoffs: Iterable[int],
    unreturnable: Mapping[str, str],
) -> Scored:
    """Score the rankings of all declared queries.

    Args:
        rankings: query id -> document ids in canonical order; queries that are missing score 0.
        tied: whether scores were equal, a flag a ranking.
        judgments: query id -> document id -> grade, for every declared query.
        unreturnable: query id -> the document that may not be returned for it (see exclude_self).
    """
    cutoffs = sorted(cutoffs)
    rows, best = [], []
    for query, grades in judgments.items():
        ranked = [grades.get(document, 0) for document in rankings.get(query, ())]
        rows.append(per_query(ranked, grades.values(), relevant, cutoffs))
        ideal = sorted((g for d, g in grades.items() if d != unreturnable.get(query)), reverse=True)
        best.append(per_query(ideal, grades.values(), relevant, cutoffs))
    metrics = names(cutoffs)
    flags = list(tied)
    return Scored(
        values={name: np.array([row[name] for row in rows]) for name in metrics},
        ceiling={name: float(np.mean([row[name] for row in best])) for name in metrics},
        tie_rate=sum(flags) / len(flags) if flags else 0.0,
    )


def intervals(values: Mapping[str, Floats], seed: int = 0) -> dict[str, dict[str, float]]:
    """Mean and 95% percentile bootstrap interval over queries; the same resamples for every metric."""
    matrix = np.stack(list(values.values()), axis=1)  # (queries, metrics)
    count = len(matrix)
    rng = np.random.default_rng(seed)
    means = []
    for start in range(0, RESAMPLES, 200):
        draws = rng.multinomial(count, np.full(count, 1 / count), size=min(200, RESAMPLES - start))
        means.append(draws @ matrix / count)
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975], axis=0)
    return {
        name: {"value": float(matrix[:, i].mean()), "low": float(low[i]), "high": float(high[i])}
        for i, name in enumerate(values)
    }


def definition(metric: str) -> str:
    """The definition of ``name@k`` in words."""
    name, _, k = parse_metric(metric).partition("@")
    return f"{metric}: {DEFINITIONS[name]}".replace("first k", f"first {k}").replace("at k", f"at {k}")
