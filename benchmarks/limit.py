"""LIMIT-style corpora (Weller et al. 2025): "Who likes X?", two golds a query, another pair for every query."""

from __future__ import annotations

import random
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from icr_bench.benchmarks.base import Benchmark, Judgment, Passage, Query
from icr_bench.benchmarks.beir import beir

PEOPLE = 50_000
GOLDS = 46
MOST_QUERIES = 1_000  # of the 1,035 pairs among 46 people
LIKES = 45  # as published: about 176 Qwen tokens a document

Words = Literal["attributes", "first", "middle", "last"]
Purpose = Literal["benchmark", "training", "development"]


def limit(
    *,
    seed: int,
    likes: int = LIKES,
    words: Literal["benchmark", "development"] = "benchmark",
    path: Path | None = None,
    split: str | None = None,
) -> Benchmark:
    """Biographies of people and what they like, made in process from a seed; or the published files.

    46 gold biographies answer min(1000, 46 x likes / 2) queries; every query has two golds, every pair of golds at
    most one query. The other 49,954 people like nothing that is asked for. Golds and distractors have the same number
    of likes and likes of the same lengths. Documents 1 to 46 are the golds.

    Args:
        likes: likes a person; 45 is the published form (1,000 queries), 20 the short form (460 queries).
        words: ``development`` for attributes that are neither trained on nor in any benchmark (425 queries at most):
            settings are chosen on them.
        path: a folder with the published LIMIT files (BEIR layout) to load instead.
        split: the judgments to load from ``path``; ``test`` if there is one.
    """
    if path is not None:
        if likes != LIKES or words != "benchmark":
            raise ValueError("likes= and words= describe made corpora and cannot go with path=")
        return beir(path=path, split=split)
    if split is not None:
        raise ValueError("split= goes with path=")
    queried, unqueried = _queried_half(words, seed)
    if not 1 <= likes <= len(unqueried):
        raise ValueError(f"likes must be 1 to {len(unqueried)}, got {likes}")
    rng = random.Random(f"icr-bench limit {seed} {likes}")
    names = people(PEOPLE, "benchmark" if words == "benchmark" else "training", seed)
    pairs = _pairs(rng, min(likes, GOLDS - 1))[: min(MOST_QUERIES, len(queried))]
    asked = rng.sample(queried, len(pairs))
    liked: list[list[str]] = [[] for _ in range(GOLDS)]
    for attribute, pair in zip(asked, pairs, strict=True):
        for person in pair:
            liked[person].append(attribute)
    for own in liked:
        own += rng.sample(unqueried, likes - len(own))
        rng.shuffle(own)
    liked += [rng.sample(unqueried, likes) for _ in range(PEOPLE - GOLDS)]
    queries = [Query(f"query_{i}", f"Who likes {attribute}?") for i, attribute in enumerate(asked)]
    return Benchmark.of(
        [Passage(name, biography(name, own)) for name, own in zip(names, liked, strict=True)],
        queries,
        [Judgment(query.id, names[person], 1) for query, pair in zip(queries, pairs, strict=True) for person in pair],
    )


def biography(name: str, likes: list[str]) -> str:
    """One sentence in LIMIT's form: ``Ada Brown likes Quokkas, River Otters and Candle Making.``"""
    listed = ", ".join(likes[:-1]) + " and " + likes[-1] if len(likes) > 1 else likes[0]
    return f"{name} likes {listed}."


@cache
def words(kind: Words, purpose: Purpose) -> tuple[str, ...]:
    """The project's own word lists; no entry of one purpose occurs in another. Development has attributes only."""
    file = files("icr_bench.benchmarks").joinpath("words", purpose, f"{kind}.txt")
    return tuple(file.read_text(encoding="utf-8").split("\n")[:-1])


def people(count: int, purpose: Literal["benchmark", "training"], seed: int) -> list[str]:
    """``count`` distinct names; no two people share first and last name; some have a middle name or an initial."""
    first, middle, last = (words(kind, purpose) for kind in ("first", "middle", "last"))
    rng = random.Random(f"icr-bench people {purpose} {seed}")
    names = []
    for number in rng.sample(range(len(first) * len(last)), count):
        given, family = first[number // len(last)], last[number % len(last)]
        between = rng.choice(middle)
        form = rng.random()
        if form < 0.2:
            given += f" {between}"
        elif form < 0.4:
            given += f" {between[0]}."
        names.append(f"{given} {family}")
    return names


def _queried_half(purpose: Purpose, seed: int) -> tuple[list[str], list[str]]:
    """Split the attributes in two by seed, one of each two neighbours in length going to either half."""
    rng = random.Random(f"icr-bench attributes {seed}")
    ordered = list(words("attributes", purpose))
    rng.shuffle(ordered)
    ordered.sort(key=lambda a: (a.count(" "), len(a)))
    halves: tuple[list[str], list[str]] = ([], [])
    for one, other in zip(ordered[::2], ordered[1::2], strict=True):
        flip = rng.random() < 0.5
        halves[0].append(other if flip else one)
        halves[1].append(one if flip else other)
    return halves


def _pairs(rng: random.Random, degree: int) -> list[tuple[int, int]]:
    """Distinct pairs of golds in which everyone occurs ``degree`` times, in random order.

    The complete graph on an even number of people falls into perfect matchings (the rounds of a round-robin
    tournament); ``degree`` of them are drawn and the people renamed at random.
    """
    last = GOLDS - 1
    person = rng.sample(range(GOLDS), GOLDS)
    pairs = []
    for turn in rng.sample(range(last), degree):
        games = [(last, turn)] + [((turn + i) % last, (turn - i) % last) for i in range(1, GOLDS // 2)]
        pairs += [(person[a], person[b]) for a, b in games]
    rng.shuffle(pairs)
    return pairs
