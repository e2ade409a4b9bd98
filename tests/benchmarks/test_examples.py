"""Training batches: made from a seed and a step alone, with the golds that they say, and nothing of any benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from icr_bench.benchmarks.base import DataError
from icr_bench.benchmarks.examples import (
    Batch,
    Biographies,
    Example,
    Examples,
    Lines,
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


def test_a_batch_follows_from_seed_and_step() -> None:
    one, other = Biographies(seed=4), Biographies(seed=4)
    other.batch(0, 8, 8)
    assert one.batch(7, 8, 8) == other.batch(7, 8, 8)
    assert one.batch(7, 8, 8) != one.batch(8, 8, 8)
    assert one.batch(7, 8, 8) != Biographies(seed=5).batch(7, 8, 8)


def test_nothing_of_a_benchmark_is_ever_asked_or_liked() -> None:
    held = {a.casefold() for purpose in ("benchmark", "development") for a in words("attributes", purpose)}  # type: ignore[arg-type]
    first, last = words("first", "benchmark"), words("last", "benchmark")
    for step in range(40):
        batch = Biographies(made_up=0.0).batch(step, 32, 32)
        liked = {attribute for text in batch.documents for attribute in likes(text)}
        assert not {a for a in liked | set(asked(batch)) if a.casefold() in held or key_of(a) in reserved()}
        names = [text.partition(" likes ")[0].split() for text in batch.documents]
        assert not {name[0] for name in names} & set(first) | {name[-1] for name in names} & set(last)


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


def test_too_few_examples_are_told() -> None:
    with pytest.raises(ValueError, match="10 examples are too few for 11 documents"):
        Examples(ROWS, 0).batch(0, 4, 11)


def test_lines_are_read_when_needed_and_bad_ones_named(tmp_path: Path) -> None:
    file = tmp_path / "examples.jsonl"
    rows = [{"query": f"q{i}", "positives": [f"é {i}"], "negatives": []} for i in range(3)]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) + '{"query": 3}\n', "utf-8")
    lines = Lines(file)
    assert len(lines) == 4
    assert lines[1] == Example("q1", ["é 1"], [])
    with pytest.raises(DataError, match=re.escape(f"{file}:4: no example")):
        lines[3]
    with pytest.raises(IndexError):
        lines[4]
