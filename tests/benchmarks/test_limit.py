"""LIMIT-style corpora: every query one pair of golds, golds like all others, word lists split by purpose."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean, quantiles
from typing import Literal

import pytest

from icr_bench.benchmarks import limit as module
from icr_bench.benchmarks.base import Benchmark, SizeError
from icr_bench.benchmarks.limit import biography, limit, people, words
from icr_bench.harness.cli import main

Purpose = Literal["benchmark", "training", "development"]
PURPOSES: tuple[Purpose, ...] = ("benchmark", "training")


def parse(name: str, text: str) -> list[str]:
    """The attributes of ``NAME likes A, B and C.``"""
    start = f"{name} likes "
    assert text.startswith(start)
    assert text.endswith(".")
    *most, last = text[len(start) : -1].split(", ")
    return most + last.split(" and ")


@dataclass(frozen=True)
class Made:
    """A made benchmark with its biographies and queries taken apart."""

    benchmark: Benchmark
    likes: int

    @cached_property
    def liked(self) -> dict[str, list[str]]:
        return {d.id: parse(d.id, d.text) for d in self.benchmark.documents}

    @cached_property
    def asked(self) -> dict[str, str]:
        return {q.id: q.text.removeprefix("Who likes ").removesuffix("?") for q in self.benchmark.queries}

    @cached_property
    def holders(self) -> dict[str, set[str]]:
        """Queried attribute -> ids of all documents that hold it."""
        found: dict[str, set[str]] = {attribute: set() for attribute in self.asked.values()}
        for document, liked in self.liked.items():
            for attribute in found.keys() & liked:
                found[attribute].add(document)
        return found

    @cached_property
    def golds(self) -> set[str]:
        return {document for judged in self.benchmark.judgments.values() for document in judged}


QUERIES = {45: 1000, 20: 460, 1: 23}


@pytest.fixture(scope="module", params=QUERIES, ids="likes={}".format)
def made(request: pytest.FixtureRequest) -> Made:
    """The whole benchmark of 50,000 people, for seed 0."""
    return Made(limit(seed=0, likes=request.param), request.param)


@pytest.fixture(scope="module")
def small() -> Iterator[Callable[..., Made]]:
    """Make benchmarks of 2,000 people, which takes a moment each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PEOPLE", 2000)
        yield lambda seed, likes=20: Made(limit(seed=seed, likes=likes), likes)


# --- queries and golds


def test_the_number_of_queries_is_that_of_the_published_form(made: Made) -> None:
    assert len(made.benchmark.queries) == QUERIES[made.likes]
    assert len(made.benchmark.choose().queries) == QUERIES[made.likes]


def test_the_default_is_the_published_form() -> None:
    assert module.LIKES == 45


def test_every_query_asks_for_another_attribute(made: Made) -> None:
    assert all(re.fullmatch(r"Who likes .+\?", q.text) for q in made.benchmark.queries)
    assert len(set(made.asked.values())) == len(made.benchmark.queries)


def test_queries_ask_for_benchmark_attributes_only(made: Made) -> None:
    assert set(made.asked.values()) <= set(words("attributes", "benchmark"))


def test_every_query_has_another_pair_of_golds(made: Made) -> None:
    pairs = [frozenset(judged) for judged in made.benchmark.judgments.values()]
    assert {len(pair) for pair in pairs} == {2}
    assert len(set(pairs)) == len(pairs) == len(made.benchmark.queries)


def test_all_judgments_have_grade_1(made: Made) -> None:
    assert {grade for judged in made.benchmark.judgments.values() for grade in judged.values()} == {1}


def test_there_are_46_golds(made: Made) -> None:
    assert len(made.golds) == 46


def test_the_golds_of_a_query_are_all_documents_that_hold_its_attribute(made: Made) -> None:
    """Checked against every document, so distractors hold no queried attribute."""
    assert made.holders == {made.asked[q]: set(judged) for q, judged in made.benchmark.judgments.items()}


def test_golds_are_gold_for_equally_many_queries(made: Made) -> None:
    counts = Counter(document for judged in made.benchmark.judgments.values() for document in judged)
    assert max(counts.values()) <= made.likes
    assert max(counts.values()) - min(counts.values()) <= (5 if made.likes == 45 else 0)


# --- documents


def test_there_are_50000_people_with_distinct_names(made: Made) -> None:
    assert len(made.benchmark.documents) == 50_000
    assert len({d.id.casefold() for d in made.benchmark.documents}) == 50_000


def test_everybody_has_as_many_distinct_likes_as_asked_for(made: Made) -> None:
    assert {len(liked) for liked in made.liked.values()} == {made.likes}
    assert {len({a.casefold() for a in liked}) for liked in made.liked.values()} == {made.likes}


def test_all_likes_are_benchmark_attributes(made: Made) -> None:
    known = set(words("attributes", "benchmark"))
    assert all(known.issuperset(liked) for liked in made.liked.values())


def test_every_attribute_that_is_not_asked_for_is_in_use(made: Made) -> None:
    used = {attribute for liked in made.liked.values() for attribute in liked}
    assert len(used) == 1000 + QUERIES[made.likes]


def test_made_data_has_no_warnings(made: Made) -> None:
    assert made.benchmark.choose().warnings == ()


def test_golds_are_as_long_as_distractors(made: Made) -> None:
    lengths = {d.id: len(d.text) for d in made.benchmark.documents}
    golds = mean(lengths[gold] for gold in made.golds)
    assert golds == pytest.approx(mean(lengths.values()), rel=0.1 if made.likes == 1 else 0.03)


@pytest.mark.parametrize("likes", [20, 45])
def test_lengths_of_golds_are_distributed_as_those_of_distractors(small: Callable[..., Made], likes: int) -> None:
    """Over eight seeds: equal means, and as many golds below each quartile of the distractors as there should be."""
    golds: list[int] = []
    others: list[int] = []
    for seed in range(8):
        one = small(seed, likes)
        for document in one.benchmark.documents:
            (golds if document.id in one.golds else others).append(len(document.text))
    assert mean(golds) == pytest.approx(mean(others), rel=0.01)
    for share, cut in zip((0.25, 0.5, 0.75), quantiles(others, n=4), strict=True):
        assert mean(length < cut for length in golds) == pytest.approx(share, abs=0.08)


def test_a_queried_attribute_does_not_stand_where_it_tells_a_gold(small: Callable[..., Made]) -> None:
    """With 100 likes and about 43 of them asked for, these stand first as often as others do."""
    one = small(0, 100)
    asked = set(one.asked.values())
    first = sum(one.liked[gold][place] in asked for gold in one.golds for place in range(50))
    total = sum(attribute in asked for gold in one.golds for attribute in one.liked[gold])
    assert total == 2000
    assert first / total == pytest.approx(0.5, abs=0.05)


def test_a_biography_reads_as_in_the_published_data() -> None:
    assert biography("Ada Brown", ["Quokkas"]) == "Ada Brown likes Quokkas."
    assert biography("Ada Brown", ["Quokkas", "Tea"]) == "Ada Brown likes Quokkas and Tea."
    assert biography("Ada Brown", ["Quokkas", "Tea", "Chess"]) == "Ada Brown likes Quokkas, Tea and Chess."


# --- sizes and seeds


def test_the_smallest_corpus_is_the_golds_and_sizes_are_nested(made: Made) -> None:
    chosen = made.benchmark.choose()
    corpora = [set(chosen.at(n).ids) for n in (46, 47, 250, 2000)]
    assert corpora[0] == made.golds
    assert all(one < other for one, other in pairwise(corpora))


@pytest.mark.parametrize(("n", "numbers"), [(45, r"n=45 .*\b46 gold"), (50_001, r"n=50,001 .*\b50,000 documents")])
def test_sizes_below_the_golds_or_beyond_the_people_are_refused(made: Made, n: int, numbers: str) -> None:
    with pytest.raises(SizeError, match=numbers):
        made.benchmark.choose().at(n)


FINGERPRINTS = {
    45: "c260dfd450880b350161c1ea286ba7195c5cdaf979c8e0d09c063033e7b78cd2",
    20: "3abb6e0c65613dd2d224a1db0bd8f17897781d822b1e0e637efa2d96b3d153cd",
    1: "f9da71fc59110e7013198aebbb7b6aa2f0e820fdf42a113475727f120473dc63",
}


def test_the_data_of_seed_0_is_what_it_was(made: Made) -> None:
    """A change here makes every earlier result incomparable: make it on purpose only, and say so in the change log."""
    assert made.benchmark.choose(seed=0).at(46).fingerprint == FINGERPRINTS[made.likes]


def test_a_seed_gives_the_same_benchmark_again(small: Callable[..., Made]) -> None:
    assert small(3).benchmark == small(3).benchmark


def test_seeds_give_other_queries_golds_and_texts(small: Callable[..., Made]) -> None:
    one, other = small(0), small(1)
    assert len(set(one.asked.values()) & set(other.asked.values())) < 300
    assert len(one.golds & other.golds) < 5
    assert one.benchmark.choose().at(46).fingerprint != other.benchmark.choose().at(46).fingerprint


def test_more_than_45_likes_work(small: Callable[..., Made]) -> None:
    one = small(0, 60)
    assert len(one.asked) == 1000
    assert {len(set(liked)) for liked in one.liked.values()} == {60}
    assert one.holders == {one.asked[q]: set(judged) for q, judged in one.benchmark.judgments.items()}


@pytest.mark.parametrize("likes", [2, 3, 7, 44])
def test_any_number_of_likes_gives_23_queries_a_like(small: Callable[..., Made], likes: int) -> None:
    one = small(0, likes)
    assert len({frozenset(judged) for judged in one.benchmark.judgments.values()}) == min(1000, 23 * likes)
    assert len(one.golds) == 46


@pytest.mark.parametrize("likes", [0, -1, 1001])
def test_a_number_of_likes_that_cannot_be_is_refused_with_the_range(likes: int) -> None:
    with pytest.raises(ValueError, match=f"likes must be 1 to 1000, got {likes}"):
        limit(seed=0, likes=likes)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("limit:likes=0", "likes must be 1 to 1000, got 0"),
        ("limit:likes=many", "likes: expected a whole number, got 'many'"),
        ("limit:like=20", "did you mean likes?"),
        ("limit:split=test", "split= goes with path="),
    ],
)
def test_a_spec_that_cannot_be_used_exits_2(spec: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert main(["lint", spec]) == 2
    signal.signal(signal.SIGTERM, handler)
    assert message in capsys.readouterr().err


# --- word lists


def fold(attribute: str) -> str:
    """Without case, articles and plural s."""
    parts = (word.removesuffix("s") for word in re.findall(r"\w+", attribute.casefold()))
    return " ".join(part for part in parts if part not in ("the", "a", "an"))


def test_there_are_enough_attributes_for_each_purpose() -> None:
    assert len(words("attributes", "benchmark")) == 2000
    assert len(words("attributes", "training")) >= 2500
    assert len(words("attributes", "development")) >= 800


@pytest.mark.parametrize("purpose", PURPOSES)
def test_attributes_are_distinct_without_case_article_and_plural(purpose: Purpose) -> None:
    attributes = words("attributes", purpose)
    assert len({fold(a) for a in attributes}) == len(attributes)


def test_attributes_of_different_purposes_are_disjoint_without_case_article_and_plural() -> None:
    purposes: tuple[Purpose, ...] = (*PURPOSES, "development")
    folded = [{fold(a) for a in words("attributes", purpose)} for purpose in purposes]
    assert not [one & other for one, other in combinations(folded, 2) if one & other]


def test_development_attributes_make_a_benchmark_of_their_own() -> None:
    made = limit(seed=0, likes=20, words="development")
    assert len(made.queries) == 425
    asked = {query.text.removeprefix("Who likes ").removesuffix("?") for query in made.queries}
    assert asked <= set(words("attributes", "development"))


@pytest.mark.parametrize("purpose", PURPOSES)
def test_attributes_have_one_to_three_words_and_survive_being_listed(purpose: Purpose) -> None:
    attributes = words("attributes", purpose)
    assert not [a for a in attributes if not 1 <= len(a.split(" ")) <= 3 or a != " ".join(a.split())]
    assert not [a for a in attributes if "," in a or " and " in a or a.endswith((".", "?"))]


@pytest.mark.parametrize("purpose", PURPOSES)
def test_some_attributes_have_articles_and_some_punctuation(purpose: Purpose) -> None:
    attributes = words("attributes", purpose)
    assert sum(a.lower().startswith(("the ", "a ", "an ")) for a in attributes) >= 20
    assert sum(bool(re.search(r"[^\w ]", a)) for a in attributes) >= 20


def test_no_attribute_is_part_of_another_as_whole_words() -> None:
    split = [tuple(re.findall(r"\w+", a.casefold())) for a in words("attributes", "benchmark")]
    known = set(split)
    parts = [(a, a[i:j]) for a in split for i in range(len(a)) for j in range(i + 1, len(a) + 1) if j - i < len(a)]
    assert not [(a, part) for a, part in parts if part in known]


@pytest.mark.parametrize("kind", ["first", "middle", "last"])
def test_names_are_distinct_and_those_for_training_are_others(kind: Literal["first", "middle", "last"]) -> None:
    benchmark, training = words(kind, "benchmark"), words(kind, "training")
    assert len({name.casefold() for name in benchmark + training}) == len(benchmark) + len(training)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_there_are_enough_names_for_50000_people(purpose: Purpose) -> None:
    names = people(50_000, purpose, 0)
    assert len({(name.split()[0], name.split()[-1]) for name in names}) == 50_000


def test_some_people_have_a_middle_name_some_an_initial_and_most_neither() -> None:
    names = people(2000, "benchmark", 0)
    assert mean(name.count(" ") == 1 for name in names) == pytest.approx(0.6, abs=0.05)
    assert mean(". " in name for name in names) == pytest.approx(0.2, abs=0.05)


def names_that_are_attributes(folded: Callable[[str], str]) -> set[str]:
    attributes = {folded(attribute) for attribute in words("attributes", "benchmark")}
    names = {*words("first", "benchmark"), *words("middle", "benchmark"), *words("last", "benchmark")}
    return {name for name in names if folded(name) in attributes}


def test_no_name_is_an_attribute() -> None:
    """Or a distractor called Patience holds the words of "Who likes Patience?"."""
    assert not names_that_are_attributes(str.casefold)


def test_no_name_is_an_attribute_in_the_singular() -> None:
    assert not names_that_are_attributes(fold)


# --- the published files


def test_path_loads_the_published_layout(tmp_path: Path) -> None:
    names = ["Geneva Durben", "Dorathea Bastress", "Olinda Campain"]
    corpus = [{"_id": name, "title": "", "text": f"{name} likes Joshua Trees."} for name in names]
    qrels = [{"query-id": "query_0", "corpus-id": name, "score": 1} for name in names[:2]]
    queries = [{"_id": "query_0", "text": "Who likes Joshua Trees?"}]
    for file, rows in (("corpus", corpus), ("queries", queries), ("qrels", qrels)):
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    benchmark = limit(seed=0, path=tmp_path)
    assert [d.text for d in benchmark.documents] == [f"{name} likes Joshua Trees." for name in names]
    assert benchmark.judgments == {"query_0": {"Geneva Durben": 1, "Dorathea Bastress": 1}}


def test_likes_does_not_go_with_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="likes="):
        limit(seed=0, likes=20, path=tmp_path)


def test_split_goes_with_path_only() -> None:
    with pytest.raises(ValueError, match="split="):
        limit(seed=0, split="test")


@pytest.mark.skipif("ICR_BENCH_DATA" not in os.environ, reason="ICR_BENCH_DATA names no folder of real samples")
def test_path_loads_the_real_small_set() -> None:
    one = Made(limit(seed=0, path=Path(os.environ["ICR_BENCH_DATA"]) / "limit-small").choose(), 45)
    assert (len(one.benchmark.documents), len(one.benchmark.queries), len(one.golds)) == (46, 1000, 46)
    assert {len(judged) for judged in one.benchmark.judgments.values()} == {2}
    assert one.benchmark.warnings == ()
