"""What retrievers are trained on: queries, and documents that all of them are asked of, of which the golds are known.

A source makes the batch of every step from a seed and the step's number alone, so that training can resume anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from icr_bench.benchmarks.limit import biography, people, words


@dataclass(frozen=True)
class Batch:
    """Q queries and N documents, no two of which are equal."""

    queries: list[str]
    documents: list[str]
    golds: list[list[int]]  # per query the numbers of all documents that answer it, one or more
    focus: list[tuple[int, int]]  # per query, the characters that say what is asked for; (0, 0) where unknown
    scores: np.ndarray | None = None  # (Q, N) of a teacher, NaN where it gave none; None without a teacher


class Biographies:
    """LIMIT-like biographies of people who do not exist, from the training word lists and made-up words.

    Args:
        likes: fewest and most likes of a person; of every batch the range is narrower, so that its documents are of
            similar length.
        two: share of queries with two golds; the others have one.
        made_up: share of words that are made up, letter by letter, after the training words.
        development: only attributes that are held out of training, none made up.
    """

    def __init__(
        self,
        *,
        likes: tuple[int, int] = (8, 20),
        two: float = 0.3,
        made_up: float = 0.3,
        development: bool = False,
        seed: int = 0,
    ) -> None:
        self.likes, self.two, self.made_up, self.seed = likes, two, made_up, seed
        self._listed = 1.0 if development else 0.5 * (1 - made_up)  # share of attributes that are one of the list
        self._attributes = words("attributes", "development" if development else "training")
        self._parts = tuple(sorted({part for attribute in self._attributes for part in attribute.split()}))
        self._forbidden = {a.casefold() for a in words("attributes", "benchmark")}
        if not development:
            self._forbidden |= {a.casefold() for a in words("attributes", "development")}
        self._letters = letters()

    def batch(self, step: int, queries: int, documents: int) -> Batch:
        rng = random.Random(f"icr-bench biographies {self.seed} {step}")
        names = rng.sample(_names(self.seed), documents)
        low, high = self._range(rng)
        counts = [rng.randint(low, high) for _ in names]
        asked: dict[str, None] = {}
        while len(asked) < queries:
            asked[self._attribute(rng)] = None
        others: dict[str, None] = {}
        while len(others) < max(2 * high, int(0.4 * sum(counts))):
            new = self._attribute(rng)
            if new not in asked:
                others[new] = None
        pool = list(others)
        owned: list[list[str]] = [[] for _ in names]
        golds = []
        for attribute in asked:
            roomy = [number for number, own in enumerate(owned) if len(own) < counts[number]]
            golds.append(sorted(rng.sample(roomy, min(1 + (rng.random() < self.two), len(roomy)))))
            for number in golds[-1]:
                owned[number].append(attribute)
        for own, count in zip(owned, counts, strict=True):
            own += rng.sample(pool, count - len(own))
            rng.shuffle(own)
        texts = [biography(name, own) for name, own in zip(names, owned, strict=True)]
        focus = [(10, 10 + len(attribute)) for attribute in asked]
        return Batch([f"Who likes {attribute}?" for attribute in asked], texts, golds, focus)

    def _range(self, rng: random.Random) -> tuple[int, int]:
        """Half of all batches near the fewest likes: what many documents of few likes teach costs the least."""
        low, high = self.likes
        middle = low + (high - low) * rng.random() ** 2
        return max(low, int(middle / 1.25)), min(high, int(middle * 1.25) + 1)

    def _attribute(self, rng: random.Random) -> str:
        """One of the list, or one to three words of which some may be made up or shared with another attribute."""
        while True:
            if rng.random() < self._listed:
                found = rng.choice(self._attributes)
            else:
                count = rng.choices((1, 2, 3), (5, 4, 1))[0]
                found = " ".join(self._word(rng) for _ in range(count))
            if found.casefold() not in self._forbidden:
                return found

    def _word(self, rng: random.Random) -> str:
        return made_up(rng, self._letters) if rng.random() < self.made_up else rng.choice(self._parts)


@cache
def _names(seed: int) -> tuple[str, ...]:
    return tuple(people(20_000, "training", seed))


@cache
def letters() -> dict[str, tuple[str, ...]]:
    """Which letters follow two others in the training words, as often as they do."""
    follow: dict[str, list[str]] = {}
    for attribute in words("attributes", "training"):
        for word in attribute.split():
            if word.isalpha() and word.isascii():
                told = f"^^{word.lower()}$"
                for (a, b), c in zip(pairwise(told), told[2:], strict=False):
                    follow.setdefault(a + b, []).append(c)
    return {key: tuple(value) for key, value in follow.items()}


def made_up(rng: random.Random, follow: dict[str, tuple[str, ...]]) -> str:
    """A word of 3 to 12 letters that looks like the training words."""
    while True:
        word, before = "", "^^"
        while (letter := rng.choice(follow[before])) != "$" and len(word) < 13:
            word, before = word + letter, before[1] + letter
        if 3 <= len(word) <= 12:
            return word.capitalize()


def check(batch: Batch) -> None:
    """Raise ValueError for a batch that cannot teach: no gold, an unknown document, or equal documents."""
    for query, golds in zip(batch.queries, batch.golds, strict=True):
        if not golds:
            raise ValueError(f"no document of the batch answers {query!r}")
        if not all(0 <= gold < len(batch.documents) for gold in golds):
            raise ValueError(f"golds {golds} of {query!r}: the batch has {len(batch.documents)} documents")
    if len(set(batch.documents)) < len(batch.documents):
        raise ValueError("two documents of the batch are equal, so that a code would name either")


class Source(Protocol):
    """Where batches come from."""

    def batch(self, step: int, queries: int, documents: int) -> Batch: ...


SOURCES: dict[str, Callable[..., Source]] = {"biographies": Biographies}


def make_source(told: Mapping[str, Any], seed: int) -> Source:
    """A source by its name and options, as a recipe gives them.

    Raises:
        ValueError: an unknown name or option.
    """
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
    name = options.pop("source", None)
    if name not in SOURCES:
        raise ValueError(f"source {name!r} is not known; expected one of {', '.join(SOURCES)}")
    try:
        return SOURCES[name](**options, seed=seed)
    except TypeError as error:
        raise ValueError(f"source {name}: {error}") from None


def tokenizer_texts() -> list[str]:
    """What a new tokenizer is made from: training words, made-up ones among them, in the form of the prompt."""
    source, texts = Biographies(seed=0), list[str]()
    for step in range(64):
        batch = source.batch(step, 16, 16)
        texts += [f"Doc 0: {text} (Doc 0)" for text in batch.documents] + batch.queries
    return texts + [f" {attribute}" for attribute in words("attributes", "training")]
