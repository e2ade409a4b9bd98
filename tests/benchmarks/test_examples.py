"""Training batches: made from a seed and a step alone, with the golds that they say, and nothing of any benchmark."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from icr_bench.benchmarks import examples as module
from icr_bench.benchmarks.base import DataError
from icr_bench.benchmarks.examples import (
    Batch,
    Biographies,
    Example,
    Examples,
    Lines,
    asks_for_held,
    is_held,
    key_of,
    letters,
    made_up,
    reserved,
)
from icr_bench.benchmarks.limit import words


def likes(document: str) -> set[str]:
    listed = document.partition(" likes ")[2].removesuffix(".")
    return set(re.split(r", | and (?=[^,]*$)", listed))


def asked(batch: Batch) -> list[str]:
    return [query[start:end] for query, (start, end) in zip(batch.queries, batch.focus, strict=True)]


@pytest.mark.parametrize("development", [False, True])
@pytest.mark.parametrize("step", range(3))
def test_golds_are_exactly_those_who_like_what_is_asked_for(step: int, development: bool) -> None:
    batch = Biographies(likes=(3, 20), two=0.5, development=development).batch(step, 24, 32)
    assert len(set(batch.documents)) == 32
    assert batch.queries == [f"Who likes {attribute}?" for attribute in asked(batch)]
    for attribute, golds in zip(asked(batch), batch.golds, strict=True):
        assert golds == [number for number, text in enumerate(batch.documents) if attribute in likes(text)]
    assert {len(golds) for golds in batch.golds} == {1, 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [("likes", 3), ("likes", (3,)), ("likes", (0, 0)), ("likes", (8, 3)), ("likes", (3, 8.5)), ("likes", "3-8")]
    + [(name, value) for name in ("two", "made_up") for value in (-0.1, 1.5, "half")],
)
def test_ranges_and_shares_that_are_none_are_told(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*, got {re.escape(repr(value))}"):
        Biographies(**{name: value})


def test_a_batch_follows_from_seed_and_step() -> None:
    one, other = Biographies(seed=4), Biographies(seed=4)
    other.batch(0, 8, 8)
    assert one.batch(7, 8, 8) == other.batch(7, 8, 8)
    assert one.batch(7, 8, 8) != one.batch(8, 8, 8)
    assert one.batch(7, 8, 8) != Biographies(seed=5).batch(7, 8, 8)


def test_a_benchmarks_attributes_are_refused_wherever_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training list and the generator are spoilt: much of what they give is a benchmark's."""
    tested = words("attributes", "benchmark") + words("attributes", "development")
    training, one_word = words("attributes", "training"), [attribute for attribute in tested if " " not in attribute]
    secret = frozenset(map(key_of, training[::2]))
    letters()  # are kept, and so made of the true list

    def spoilt(kind: Any, purpose: Any) -> tuple[str, ...]:
        return training + tested if (kind, purpose) == ("attributes", "training") else words(kind, purpose)

    def spelt(rng: random.Random, follow: Any) -> str:
        return rng.choice(one_word) if rng.random() < 0.5 else made_up(rng, follow)

    monkeypatch.setattr(module, "words", spoilt)
    monkeypatch.setattr(module, "made_up", spelt)
    monkeypatch.setattr(module, "reserved", lambda: secret)
    source, forbidden = Biographies(made_up=0.5), {attribute.casefold() for attribute in tested}
    for step in range(10):
        batch = source.batch(step, 32, 32)
        liked = {attribute for text in batch.documents for attribute in likes(text)}
        assert not {a for a in liked | set(asked(batch)) if a.casefold() in forbidden or key_of(a) in secret}
    assert source.refused > 500


def test_names_of_a_benchmark_are_never_drawn() -> None:
    first, last = set(words("first", "benchmark")), set(words("last", "benchmark"))
    for development in (False, True):
        batch = Biographies(development=development).batch(0, 32, 2000)
        names = [text.partition(" likes ")[0].split() for text in batch.documents]
        assert not {name[0] for name in names} & first
        assert not {name[-1] for name in names} & last


def test_queries_for_held_attributes_are_known_by_their_form() -> None:
    for purpose in ("benchmark", "development"):
        for attribute in words("attributes", purpose):  # type: ignore[arg-type]
            assert asks_for_held(f"Who likes {attribute}?")
            assert is_held(attribute, development=False) == (purpose == "benchmark")
    (one, *_) = words("attributes", "benchmark")
    for form in (f"who  LIKES {one.upper()} ?", f"Who likes {one}.", f"Tell me: who likes {one}"):
        assert asks_for_held(form)
    for form in (f"Who likes {words('attributes', 'training')[0]}?", f"Where is {one}?", "Who likes ?", "who likes"):
        assert not asks_for_held(form)


@pytest.mark.skipif("ICR_BENCH_DATA" not in os.environ, reason="ICR_BENCH_DATA names no folder of real samples")
def test_every_query_of_the_published_limit_is_held() -> None:
    lines = (Path(os.environ["ICR_BENCH_DATA"]) / "limit-small" / "queries.jsonl").read_text("utf-8").splitlines()
    queries = [json.loads(line)["text"] for line in lines]
    assert len(queries) == 1000
    asked_for = {query: query.removeprefix("Who likes ").removesuffix("?") for query in queries}
    assert [query for query, attribute in asked_for.items() if key_of(attribute) not in reserved()] == []
    assert [query for query in queries if not asks_for_held(query)] == []


def test_development_asks_what_training_never_has() -> None:
    batch = Biographies(development=True).batch(0, 64, 64)
    liked = {attribute for text in batch.documents for attribute in likes(text)}
    assert liked <= set(words("attributes", "development"))


def test_development_words_suffice_for_many_documents() -> None:
    batch = Biographies(development=True).batch(0, 64, 500)
    assert len(set(batch.documents)) == 500


def test_excluded_queries_are_made_again() -> None:
    plain = Biographies(seed=1).batch(0, 8, 8)
    source = Biographies(seed=1, excluded=lambda query: query == plain.queries[2])
    assert plain.queries[2] not in source.batch(0, 8, 8).queries
    assert source.refused > Biographies(seed=1).refused


def test_made_up_words_are_many_and_look_like_words() -> None:
    import random

    rng, follow = random.Random(0), letters()
    made = {made_up(rng, follow) for _ in range(2000)}
    assert len(made) > 1500
    assert all(re.fullmatch("[A-Z][a-z]{2,11}", word) for word in made)


ROWS = [
    Example(f"q{i}", [f"gold {i}", f"also {i}"], [f"near {i}.{j}" for j in range(3)], [1, 0.9, 0.5, 0.4, 0.3])
    for i in range(10)
]


def test_every_example_comes_once_an_epoch() -> None:
    source = Examples(ROWS, 0)
    for epoch in range(2):
        queries = [query for step in range(2) for query in source.batch(2 * epoch + step, 5, 8).queries]
        assert sorted(queries) == sorted(row.query for row in ROWS)


def test_hard_negatives_come_before_other_examples_golds() -> None:
    batch = Examples(ROWS, 0).batch(0, 2, 8)
    own = {query.removeprefix("q") for query in batch.queries}
    assert sorted(text.split()[0] for text in batch.documents) == sorted(
        [next(t for t in batch.documents if t.endswith(f" {i}")).split()[0] for i in own] + ["near"] * 6
    )
    assert {text.split()[1].split(".")[0] for text in batch.documents} == own


def test_golds_are_all_positives_that_the_batch_holds_and_scores_are_the_teachers() -> None:
    batch = Examples(ROWS, 0).batch(3, 4, 10)
    assert batch.scores is not None
    for query, golds, scores in zip(batch.queries, batch.golds, batch.scores, strict=True):
        number = query.removeprefix("q")
        assert golds == [n for n, text in enumerate(batch.documents) if text in (f"gold {number}", f"also {number}")]
        for text, score in zip(batch.documents, scores, strict=True):
            told = {
                f"gold {number}": 1,
                f"also {number}": 0.9,
                **{f"near {number}.{j}": 0.5 - j / 10 for j in range(3)},
            }
            assert score == pytest.approx(told[text]) if text in told else score != score


def test_an_equal_text_is_a_gold_of_both_queries() -> None:
    rows = [
        Example("a", ["same"], []),
        Example("b", ["same"], []),
        Example("c", ["other"], []),
        Example("d", ["more"], []),
    ]
    batch = Examples(rows, 1)
    found = next(b for step in range(20) if {"a", "b"} <= set((b := batch.batch(step, 2, 3)).queries))
    assert found.golds[0] == found.golds[1]


POSITIVES = [Example(f"q{i}", [f"gold {i % 40}", f"also {i}"], [f"gold {(i + 1) % 40}"] * (i % 3)) for i in range(60)]

FROZEN = [
    (Biographies(seed=0), 3, 16, 16, "e82321138a7bbc34"),
    (Biographies(seed=7, likes=(20, 45)), 1000, 64, 96, "6a490c24e9f927e9"),
    (Biographies(seed=1, likes=(3, 8)), 0, 32, 200, "5f365adcb8f57b02"),
    (Biographies(seed=1, development=True), 3, 16, 16, "5a52e8111c48fe0d"),
    (Examples(ROWS, 4), 5, 4, 10, "40ecf883fae0f1ab"),
    (Examples(POSITIVES, 0), 1, 20, 60, "f95119cdd7aab4f8"),
]


@pytest.mark.parametrize(("source", "step", "queries", "documents", "frozen"), FROZEN)
def test_batches_stay_as_they_are(source: Any, step: int, queries: int, documents: int, frozen: str) -> None:
    batch = source.batch(step, queries, documents)
    scores = batch.scores
    if scores is not None:
        scores = [[round(float(score), 6) if score == score else None for score in row] for row in scores]
    told = [batch.queries, batch.documents, batch.golds, batch.focus, scores]
    assert hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16] == frozen


def test_fewer_examples_than_documents_suffice_where_their_texts_do() -> None:
    rows = [Example(f"q{i}", [f"gold {i}"], [f"near {i}.{j}" for j in range(15)]) for i in range(16)]
    for queries, documents in ((1, 32), (2, 64), (16, 256)):
        batch = Examples(rows, 0).batch(3, queries, documents)
        assert len(set(batch.documents)) == documents
        for query, golds in zip(batch.queries, batch.golds, strict=True):
            assert [batch.documents[gold] for gold in golds] == [query.replace("q", "gold ")]
        assert batch == Examples(rows, 0).batch(3, queries, documents)
    own = {f"near {number}.{j}" for number in (query[1:] for query in batch.queries) for j in range(15)}
    assert own <= set(batch.documents)
    assert Examples(rows, 0).batch(3, 1, 32) != Examples(rows, 1).batch(3, 1, 32)


def test_rare_golds_of_other_examples_come_before_their_negatives() -> None:
    rows = [
        Example("q0", ["a"], []),
        Example("q1", ["b"], ["near b"]),
        Example("q2", ["c"] * 3000 + ["rare"], ["near c"]),
    ]
    found = [batch for step in range(30) if (batch := Examples(rows, 0).batch(step, 1, 4)).queries == ["q0"]]
    assert len(found) == 10
    assert all(sorted(batch.documents) == ["a", "b", "c", "rare"] for batch in found)


def test_golds_of_the_queries_do_not_fill_a_batch() -> None:
    rows = [Example(f"q{i}", [f"gold {i}.{j}" for j in range(4)], ["gold 0.0", f"near {i}"]) for i in range(3)]
    batch = Examples(rows, 0).batch(0, 1, 8)
    (own,) = (query.removeprefix("q") for query in batch.queries)
    assert sum(text.startswith(f"gold {own}.") for text in batch.documents) == len(batch.golds[0]) == 1


@pytest.mark.parametrize(
    ("rows", "queries", "documents", "message"),
    [
        (
            [Example(f"q{i}", [f"gold {i % 3}"], []) for i in range(10)],
            2,
            6,
            "3 distinct texts are too few for 6 documents",
        ),
        (ROWS, 10, 45, "40 distinct texts are too few for 45 documents"),
        (ROWS, 11, 12, "10 examples are too few for 11 queries"),
        (ROWS, 4, 3, "3 documents are too few for 4 queries"),
    ],
)
def test_too_few_texts_are_told(rows: list[Example], queries: int, documents: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Examples(rows, 0).batch(0, queries, documents)


def test_lines_are_read_when_needed(tmp_path: Path) -> None:
    file = tmp_path / "examples.jsonl"
    rows = [{"query": f"q{i}", "positives": [f"é {i}"], "negatives": []} for i in range(3)]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    lines = Lines(file)
    assert len(lines) == 3
    assert lines[1] == Example("q1", ["é 1"], [])
    assert list(lines) == [lines[0], lines[1], lines[2]] == lines[:]
    with pytest.raises(IndexError):
        lines[3]


GOOD = {"query": "q", "positives": ["a", "b"], "negatives": ["c"]}

BAD = {
    "not JSON": ("{", "not JSON"),
    "empty": ("", "not JSON"),
    "not UTF-8": (b'{"query": "\xff"}', "not JSON"),
    "no object": ('["q"]', r"expected an object with query, positives, negatives, got \['q'\]"),
    "no query": ({"query": 3}, "query: expected text, got 3"),
    "empty query": ({"query": " "}, "query: expected text, got ' '"),
    "no positives": ({"positives": []}, "positives: expected one text at least, got none"),
    "text for positives": ({"positives": "text"}, "positives: expected a list of texts, got 'text'"),
    "empty positive": ({"positives": ["a", ""]}, "positives: expected texts that are not empty, got ''"),
    "number as negative": ({"negatives": ["a", 3]}, "negatives: expected texts that are not empty, got 3"),
    "negatives left out": ({"negatives": None}, "negatives: expected a list of texts, got None"),
    "too few scores": ({"scores": [1, 2]}, "scores: expected 3, one a positive and one a negative, got 2"),
    "NaN": ({"scores": [1, 2, float("nan")]}, r"scores: expected a list of finite numbers, got \[1, 2, nan\]"),
    "infinite": ({"scores": [1, 2, float("inf")]}, "scores: expected a list of finite numbers"),
    "true": ({"scores": [1, 2, True]}, "scores: expected a list of finite numbers"),
    "one number": ({"scores": 0.5}, "scores: expected a list of finite numbers, got 0.5"),
    "scores in some": (
        {"scores": [1, 0.5, 0]},
        "got scores, but line 1 has none; expected scores in all rows or in none",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_are_named_when_the_file_is_opened(tmp_path: Path, name: str) -> None:
    bad, message = BAD[name]
    file = tmp_path / "examples.jsonl"
    line = json.dumps(GOOD | bad).encode() if isinstance(bad, dict) else bad.encode() if isinstance(bad, str) else bad
    file.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=re.escape(f"{file}:2: ") + ".*" + message):
        Lines(file)


def test_a_row_without_scores_among_others_with_them_is_named(tmp_path: Path) -> None:
    file = tmp_path / "examples.jsonl"
    rows = [GOOD | {"scores": [1, 0.5, 0]}, GOOD | {"scores": [1, 0.5, 0.1]}, GOOD | {"scores": None}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=re.escape(f"{file}:3: ") + "got no scores, but line 1 has some"):
        Lines(file)
