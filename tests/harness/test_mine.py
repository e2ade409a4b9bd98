"""Negatives from a corpus that streams by, against retrievers that hold it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from icr_bench.harness import mine as module
from icr_bench.harness.mine import Best, Bm25Scorer, DenseScorer, Row, chunks, mine
from icr_bench.retrievers.base import Document
from icr_bench.retrievers.bm25 import BM25

WORDS = ["otter", "river", "map", "kettle", "lamp", "sea", "of", "the", "and", "a", "tram", "yard", "moss", "pear"]


def corpus(count: int, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    return [Row(f"d{i}", " ".join(rng.choices(WORDS, k=rng.randint(0, 30)))) for i in range(count)]


QUERIES = ["otter of the river", "map map kettle", "nothing known", "", "the sea"]


def counted(rows: Sequence[Row]) -> Bm25Scorer:
    scorer = Bm25Scorer(QUERIES, BM25().analyse, 0.9, 0.4)
    for part in chunks(rows):
        scorer.count([row.text for row in part])
    return scorer


def nothing(count: int) -> None:
    pass


def test_bm25_that_streams_ranks_as_the_retriever_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 37)
    rows = corpus(500)
    held = BM25()
    held.load()
    held.index([Document(number, row.text) for number, row in enumerate(rows)])
    found = mine(rows, counted(rows), len(QUERIES), 20, tmp_path / "state", nothing)
    scorer = counted(rows)
    scores = scorer.scores([row.text for row in rows])
    for query, own, mined in zip(range(len(QUERIES)), held.search(QUERIES, 20), found, strict=True):
        expected = dict(zip(own.numbers, own.scores, strict=True))
        assert {number: scores[query, number] for number in expected} == pytest.approx(expected, rel=1e-4)
        assert len(mined) == len(expected)
        best = [float(scores[query, int(row.id[1:])]) for row in mined]
        assert best == pytest.approx(list(own.scores), rel=1e-4)
    assert found[2] == found[3] == []


def test_a_dense_model_that_streams_ranks_by_inner_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 11)
    rng = np.random.default_rng(0)
    vectors = {row.id: rng.normal(size=8).astype(np.float32) for row in corpus(100)}
    asked = rng.normal(size=(3, 8)).astype(np.float32)

    def encode(texts: Sequence[str], kind: Any) -> Any:
        return asked if kind == "query" else np.array([vectors[text] for text in texts])

    rows = [Row(name, name) for name in vectors]
    found = mine(rows, DenseScorer(["a", "b", "c"], encode), 3, 7, tmp_path / "state", nothing)
    for query, own in zip(asked, found, strict=True):
        assert [row.id for row in own] == sorted(vectors, key=lambda name: -float(vectors[name] @ query))[:7]


def test_an_interrupted_pass_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 10)
    monkeypatch.setattr(module, "SAVE_EVERY", 2)
    rows = corpus(200)
    whole = mine(rows, counted(rows), len(QUERIES), 5, tmp_path / "whole", nothing)

    class Interrupted(Exception):
        pass

    def some() -> Iterator[Row]:
        yield from rows[:95]
        raise Interrupted

    scorer, state = counted(rows), tmp_path / "state"
    with pytest.raises(Interrupted):
        mine(some(), scorer, len(QUERIES), 5, state, nothing)
    assert state.is_file()
    scored: list[int] = []
    monkeypatch.setattr(scorer, "scores", lambda texts, was=scorer.scores: scored.append(len(texts)) or was(texts))
    assert mine(rows, scorer, len(QUERIES), 5, state, nothing) == whole
    assert sum(scored) == 200 - 80
    assert not state.exists()


def test_ties_go_to_who_came_first() -> None:
    best = Best(1, 3)
    for begin in range(0, 12, 4):
        best.add([Row(f"d{begin + i}", "") for i in range(4)], np.ones((1, 4), np.float32))
    assert [row.id for row in best.ranked()[0]] == ["d0", "d1", "d2"]


def test_texts_of_what_fell_out_are_not_kept() -> None:
    best = Best(2, 3)
    for begin in range(0, 4_000, 100):
        scores = np.arange(begin, begin + 100, dtype=np.float32)
        best.add([Row(f"d{begin + i}", "") for i in range(100)], np.stack([scores, scores]))
    assert len(best._rows) <= 2 * 6
    assert [row.id for row in best.ranked()[0]] == ["d3999", "d3998", "d3997"]


MEMORY = Path(__file__).parents[1] / "perf" / "mine.py"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    peaks = []
    for count in (20_000, 120_000):
        command = [sys.executable, MEMORY, str(count), tmp_path / "state"]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 1e9
