"""What retrievers are trained on: queries, and documents that all of them are asked of, of which the golds are known.

A source makes the batch of every step from a seed and the step's number alone, so that training can resume anywhere.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

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
        development: only attributes that are held out of training, none made up; names as ever.
        excluded: called with a query, says whether a benchmark asks it; such queries are not made.

    ``refused`` counts the attributes that were drawn again since a benchmark holds them.
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
        whole = isinstance(likes, tuple) and len(likes) == 2 and all(type(count) is int for count in likes)
        if not whole or not 1 <= likes[0] <= likes[1]:
            raise ValueError(f"likes must be the fewest and the most, whole numbers from 1, got {likes!r}")
        for name, share in (("two", two), ("made_up", made_up)):
            if not isinstance(share, (int, float)) or not 0 <= share <= 1:
                raise ValueError(f"{name} must be a share, from 0 to 1, got {share!r}")
        self.likes, self.two, self.made_up, self.seed = likes, two, made_up, seed
        self._listed = 1.0 if development else 0.5 * (1 - made_up)  # share of attributes that are one of the list
        self._attributes = words("attributes", "development" if development else "training")
        self._parts = tuple(sorted({part for attribute in self._attributes for part in attribute.split()}))
        self._development, self._excluded, self.refused = development, excluded, 0
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
            held = is_held(found, development=not self._development)
            if not held and not self._excluded(f"Who likes {found}?"):
                return found
            self.refused += 1

    def _word(self, rng: random.Random) -> str:
        return made_up(rng, self._letters) if rng.random() < self.made_up else rng.choice(self._parts)


def is_held(attribute: str, *, development: bool = True) -> bool:
    """Whether a benchmark asks for an attribute, so that no training may: `limit`, or the published LIMIT.

    Args:
        development: whether the development form of `limit` counts too.
    """
    return _folded(attribute) in _tested(development) or key_of(attribute) in reserved()


def asks_for_held(query: str) -> bool:
    """Whether a query has the form of LIMIT's, "Who likes X?", and X is such an attribute."""
    _, _, asked = _folded(query).partition("who likes ")
    return any(is_held(asked.rstrip(end)) for end in (" ?", " ?.!"))


@cache
def _tested(development: bool) -> frozenset[str]:
    tested = words("attributes", "benchmark") + (words("attributes", "development") if development else ())
    return frozenset(map(_folded, tested))


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


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
    """Batches of given examples, in an order that is drawn anew for every epoch.

    A step's number and its number of queries say which examples it takes. Each comes once an epoch only where all
    steps take their batches from this source and ask for as many queries; else some come sooner again than others.

    A batch holds a positive of each of its queries, then their negatives in turn; where these do not suffice, positives
    of other examples, and where there are no more of them, their negatives. A text that is a positive of several
    queries of the batch is a gold of each.
    """

    def __init__(self, rows: Sequence[Example], seed: int) -> None:
        self.rows, self.seed = rows, seed

    def batch(self, step: int, queries: int, documents: int) -> Batch:
        """The batch of a step.

        Raises:
            ValueError: there are fewer examples, documents or distinct texts than it takes.
        """
        total = len(self.rows)
        if queries > total:
            raise ValueError(f"{total:,} examples are too few for {queries:,} queries")
        if queries > documents:
            raise ValueError(f"{documents:,} documents are too few for {queries:,} queries; expected as many at least")
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
        fruitless = 0  # draws since the last new text
        while len(texts) < documents:
            other = rng.choice(self.rows[rng.randrange(total)].positives)
            fruitless += 1
            if other not in known and other not in texts:
                texts[other], fruitless = len(texts), 0
            if fruitless == max(1_000, total) and not self._may_draw(known | texts.keys(), documents - len(texts)):
                self._fill(texts, known, documents, rng)
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

    def _may_draw(self, held: set[str], wanted: int) -> bool:
        """Whether there are so many positives that are not held, so that drawing ends."""
        found: set[str] = set()
        for row in self.rows:
            found.update(text for text in row.positives if text not in held)
            if len(found) >= wanted:
                return True
        return False

    def _fill(self, texts: dict[str, int], known: set[str], documents: int, rng: random.Random) -> None:
        """Add what texts there are, of one example after the other, until there are enough."""
        for number in rng.sample(range(len(self.rows)), len(self.rows)):
            row = self.rows[number]
            for text in (*row.positives, *row.negatives):
                if len(texts) == documents:
                    return
                if text not in known:
                    texts.setdefault(text, len(texts))
        if len(texts) < documents:
            raise ValueError(
                f"{len(texts):,} distinct texts are too few for {documents:,} documents; further golds of the same "
                f"queries do not count"
            )


@lru_cache(maxsize=4)
def _place(seed: int, epoch: int, total: int) -> list[int]:
    """The order of examples in an epoch."""
    order = list(range(total))
    random.Random(f"icr-bench epoch {seed} {epoch}").shuffle(order)
    return order


class Lines(Sequence[Example]):
    """Examples in a JSON-lines file (``query``, ``positives``, ``negatives``, ``scores``), all checked at once and read
    again when needed.

    Raises:
        DataError: a row is no example, or only some have scores; the message names file and line.
    """

    def __init__(self, file: Path) -> None:
        self._path, self._starts = file, [0]
        scored = False
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                self._starts.append(self._starts[-1] + len(line))
                has = _example(line, f"{file}:{number}").scores is not None
                if number == 1:
                    scored = has
                elif has != scored:
                    raise DataError(
                        f"{file}:{number}: got {'scores' if has else 'no scores'}, but line 1 has "
                        f"{'some' if scored else 'none'}; expected scores in all rows or in none"
                    )

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[Example]:
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                yield _example(line, f"{self._path}:{number}")

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
            return _example(file.readline(), f"{self._path}:{at + 1}")


def _example(line: bytes, where: str) -> Example:
    """What a line holds, checked."""
    try:
        told = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: no example: not JSON ({error})") from None
    if not isinstance(told, dict):
        raise DataError(f"{where}: no example: expected an object with query, positives, negatives, got {told!r:.80}")
    query = told.get("query")
    if not isinstance(query, str) or not query.strip():
        raise DataError(f"{where}: no example: query: expected text, got {query!r:.80}")
    positives = _texts(told, "positives", where)
    if not positives:
        raise DataError(f"{where}: no example: positives: expected one text at least, got none")
    negatives, scores = _texts(told, "negatives", where), told.get("scores")
    if scores is not None:
        count = len(positives) + len(negatives)
        if not isinstance(scores, list) or not all(_finite(score) for score in scores):
            raise DataError(f"{where}: no example: scores: expected a list of finite numbers, got {scores!r:.80}")
        if len(scores) != count:
            raise DataError(
                f"{where}: no example: scores: expected {count}, one a positive and one a negative, got {len(scores)}"
            )
    return Example(query, positives, negatives, scores)


def _texts(told: Mapping[str, Any], key: str, where: str) -> list[str]:
    texts = told.get(key)
    if not isinstance(texts, list):
        raise DataError(f"{where}: no example: {key}: expected a list of texts, got {texts!r:.80}")
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: no example: {key}: expected texts that are not empty, got {text!r:.80}")
    return texts


def _finite(score: object) -> bool:
    return isinstance(score, (int, float)) and not isinstance(score, bool) and abs(score) < 1e300  # NaN is not


def tokenizer_texts() -> list[str]:
    """What a new tokenizer is made from: training words, made-up ones among them, in the form of the prompt."""
    source, texts = Biographies(seed=0), list[str]()
    for step in range(64):
        batch = source.batch(step, 16, 16)
        texts += [f"Doc 0: {text} (Doc 0)" for text in batch.documents] + batch.queries
    return texts + [f" {attribute}" for attribute in words("attributes", "training")]
