"""What retrievers are trained on: queries, and documents that all of them are asked of, of which the golds are known.

A source makes the batch of every step from a seed and the step's number alone, so that training can resume anywhere.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from icr_bench.benchmarks.base import DataError
from icr_bench.benchmarks.limit import biography, people, words


@dataclass(frozen=True)
class Batch:
    """Q queries and N documents, no two of which are equal."""

    queries: list[str]
    documents: list[str]
    golds: list[list[int]]  # per query the numbers of all documents that answer it, one or more
    focus: list[tuple[int, int]]  # per query, the characters that say what is asked for; (0, 0) where unknown
    scores: NDArray[np.floating] | None = None  # (Q, N) of a teacher, NaN where it gave none; None without a teacher


class Biographies:
    """LIMIT-like biographies of people who do not exist, from the training word lists and made-up words.

    Args:
        likes: fewest and most likes of a person; of every batch the range is narrower, so that its documents are of
            similar length.
        two: share of queries with two golds; the others have one.
        made_up: share of words that are made up, letter by letter, after the training words.
        development: only attributes that are held out of training, none made up.
        excluded: called with a query, says whether a benchmark asks it; such queries are not made.
    """

    def __init__(
        self,
        *,
        likes: tuple[int, int] = (8, 20),
        two: float = 0.3,
        made_up: float = 0.3,
        development: bool = False,
        seed: int = 0,
        excluded: Callable[[str], bool] = lambda query: False,
    ) -> None:
        self.likes, self.two, self.made_up, self.seed = likes, two, made_up, seed
        self._listed = 1.0 if development else 0.5 * (1 - made_up)  # share of attributes that are one of the list
        self._attributes = words("attributes", "development" if development else "training")
        self._parts = tuple(sorted({part for attribute in self._attributes for part in attribute.split()}))
        self._forbidden = {a.casefold() for a in words("attributes", "benchmark")}
        if not development:
            self._forbidden |= {a.casefold() for a in words("attributes", "development")}
        self._reserved, self._excluded, self.refused = reserved(), excluded, 0
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
        wanted = max(2 * high, int(0.4 * sum(counts)))
        if self._listed == 1:  # a list ends
            wanted = min(wanted, len(self._attributes) - len(asked))
        while len(others) < wanted:
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
            held = found.casefold() in self._forbidden or key_of(found) in self._reserved
            if not held and not self._excluded(f"Who likes {found}?"):
                return found
            self.refused += 1

    def _word(self, rng: random.Random) -> str:
        return made_up(rng, self._letters) if rng.random() < self.made_up else rng.choice(self._parts)


@cache
def reserved() -> frozenset[str]:
    """Keys of the attributes of the published LIMIT (Weller et al. 2025, 46 documents): no training may ask for them.

    Keys only, since the words are not this project's.
    """
    return frozenset(files("icr_bench.benchmarks").joinpath("words", "reserved.txt").read_text().split())


def key_of(attribute: str) -> str:
    """What stands for an attribute in the list of the reserved ones."""
    return hashlib.sha256(f"icr-bench reserved {attribute.casefold()}".encode()).hexdigest()[:12]


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


@dataclass(frozen=True)
class Example:
    """A query with texts that answer it and, it may be, texts that do not, hardest first."""

    query: str
    positives: list[str]
    negatives: list[str]
    scores: list[float] | None = None  # of a teacher, for the positives, then the negatives


class Examples:
    """Batches of given examples, each once an epoch in an order drawn from the seed.

    A batch holds a positive of each of its queries, then their negatives in turn; where these do not suffice, positives
    of other examples. A text that is a positive of several queries of the batch is a gold of each.
    """

    def __init__(self, rows: Sequence[Example], seed: int) -> None:
        self.rows, self.seed = rows, seed

    def batch(self, step: int, queries: int, documents: int) -> Batch:
        total = len(self.rows)
        if documents > total or queries > documents:
            raise ValueError(
                f"{total:,} examples are too few for {documents:,} documents that {queries:,} queries are asked of"
            )
        rng = random.Random(f"icr-bench examples {self.seed} {step}")
        first = step * queries
        chosen = [
            self.rows[_place(self.seed, (first + i) // total, total)[(first + i) % total]] for i in range(queries)
        ]
        texts: dict[str, int] = {}
        for row in chosen:
            texts.setdefault(rng.choice(row.positives), len(texts))
        known = {text for row in chosen for text in row.positives}
        for rank in range(max((len(row.negatives) for row in chosen), default=0)):
            for row in chosen:
                if rank < len(row.negatives) and len(texts) < documents and row.negatives[rank] not in known:
                    texts.setdefault(row.negatives[rank], len(texts))
        while len(texts) < documents:
            other = rng.choice(self.rows[rng.randrange(total)].positives)
            if other not in known:
                texts.setdefault(other, len(texts))
        order = list(texts)
        rng.shuffle(order)
        place = {text: number for number, text in enumerate(order)}
        scores = None
        if any(row.scores is not None for row in chosen):
            scores = np.full((queries, documents), np.nan)
            for query, row in enumerate(chosen):
                for text, score in zip([*row.positives, *row.negatives], row.scores or [], strict=False):
                    if text in place:
                        scores[query, place[text]] = score
        golds = [sorted({place[text] for text in row.positives if text in place}) for row in chosen]
        return Batch([row.query for row in chosen], order, golds, [(0, 0)] * queries, scores)


@lru_cache(maxsize=4)
def _place(seed: int, epoch: int, total: int) -> list[int]:
    """The order of examples in an epoch."""
    order = list(range(total))
    random.Random(f"icr-bench epoch {seed} {epoch}").shuffle(order)
    return order


class Lines(Sequence[Example]):
    """Examples in a JSON-lines file (``query``, ``positives``, ``negatives``, ``scores``), read when needed."""

    def __init__(self, file: Path) -> None:
        self._path, self._starts = file, [0]
        with file.open("rb") as lines:
            for line in lines:
                self._starts.append(self._starts[-1] + len(line))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, at: int) -> Example: ...
    @overload
    def __getitem__(self, at: slice) -> list[Example]: ...
    def __getitem__(self, at: int | slice) -> Example | list[Example]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        with self._path.open("rb") as file:
            file.seek(self._starts[at])
            line = file.readline()
        try:
            told = json.loads(line)
            return Example(told["query"], told["positives"], told["negatives"], told.get("scores"))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._path}:{at + 1}: no example ({type(error).__name__}: {error})") from None


def tokenizer_texts() -> list[str]:
    """What a new tokenizer is made from: training words, made-up ones among them, in the form of the prompt."""
    source, texts = Biographies(seed=0), list[str]()
    for step in range(64):
        batch = source.batch(step, 16, 16)
        texts += [f"Doc 0: {text} (Doc 0)" for text in batch.documents] + batch.queries
    return texts + [f" {attribute}" for attribute in words("attributes", "training")]
