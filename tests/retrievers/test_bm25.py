"""BM25: its formula, its analyser, and what is no match."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icr_bench.benchmarks.beir import beir
from icr_bench.retrievers.base import Document, MissingExtra
from icr_bench.retrievers.bm25 import BM25

BACKENDS = ("bm25s", "rank-bm25")


def indexed(texts: list[str], **options: object) -> BM25:
    retriever = BM25(**options)  # type: ignore[arg-type]
    retriever.index([Document(i, text) for i, text in enumerate(texts)])
    return retriever


def lucene(texts: list[str], query: str, k1: float, b: float) -> list[float]:
    """BM25 with Lucene's idf, computed the slow way, without the constant factor k1 + 1."""
    documents = [text.split() for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        score = 0.0
        for term in query.split():
            held = sum(term in other for other in documents)
            idf = math.log(1 + (len(documents) - held + 0.5) / (held + 0.5))
            frequency = words.count(term)
            if frequency:
                score += idf * frequency / (frequency + k1 * (1 - b + b * len(words) / mean))
        scores.append(score)
    return scores


words = st.lists(st.sampled_from("abcde"), min_size=1, max_size=8).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(words, min_size=1, max_size=12), words, st.sampled_from([0.0, 0.9, 20.0]), st.sampled_from([0, 0.4, 1]))
def test_scores_follow_the_formula(texts: list[str], query: str, k1: float, b: float) -> None:
    ranking = indexed(texts, k1=k1, b=b).search([query], len(texts))[0]
    expected = lucene(texts, query, k1, b)
    found = dict(zip(ranking.numbers, ranking.scores, strict=True))
    assert set(found) == {i for i, score in enumerate(expected) if score > 0}
    for number, score in found.items():
        assert score == pytest.approx(expected[number], rel=1e-4)
    assert list(ranking.scores) == sorted(ranking.scores, reverse=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("query", ["", "   ", "?!", "zebra", "the"])
def test_a_query_without_known_tokens_has_an_empty_ranking(backend: str, query: str) -> None:
    ranking = indexed(["red fox", "the blue hen"], backend=backend, stopwords="english").search([query], 2)[0]
    assert list(ranking.numbers) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k1", [0.0, 1.2])
def test_only_documents_that_share_a_token_are_returned(backend: str, k1: float) -> None:
    texts = ["red fox", "red hen", "blue hen", "grey cat"]  # "red" stands in half of them: Okapi's idf is 0
    ranking = indexed(texts, backend=backend, k1=k1).search(["red fox"], 4)[0]
    assert sorted(ranking.numbers) == [0, 1]
    assert ranking.numbers[0] == 0
    assert all(map(math.isfinite, ranking.scores))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_corpus_without_tokens_answers_nothing(backend: str) -> None:
    retriever = indexed(["", " ?"], backend=backend)
    assert [list(r.numbers) for r in retriever.search(["red", ""], 2)] == [[], []]
    assert retriever.index_bytes() == 0


@pytest.mark.parametrize(
    ("options", "text", "tokens"),
    [
        ({}, "CAFÉ 7 U.S. ﬁne", ["café", "7", "u", "s", "fine"]),
        ({"normalisation": "none", "lowercase": False}, "Ｆｕｌｌ ﬁne", ["Ｆｕｌｌ", "ﬁne"]),
        ({"pattern": r"[a-z]+"}, "a1b c", ["a", "b", "c"]),
        ({"stopwords": "english"}, "the fox is red", ["fox", "red"]),
        ({"stemmer": "english"}, "running foxes", ["run", "fox"]),
    ],
)
def test_analyser(options: dict[str, object], text: str, tokens: list[str]) -> None:
    assert BM25(**options).analyse(text) == tokens  # type: ignore[arg-type]


def test_composed_and_decomposed_accents_are_one_token() -> None:
    ranking = indexed(["cafe\N{COMBINING ACUTE ACCENT} noir", "cafe blanc"]).search(["café"], 2)[0]
    assert list(ranking.numbers) == [0]


def test_settings_name_every_step_of_the_analyser() -> None:
    retriever = indexed(["red"], stopwords="english", stemmer="porter")
    assert retriever.settings()["analyser"] == r"NFKC | lower case | \w+ | 33 stop words | stemmer porter"


@pytest.mark.parametrize("backend", ["bm25s", "rank-bm25"])
def test_the_largest_k1_still_finds(backend: str) -> None:
    (found,) = indexed(["red red fox", "blue hen", "red hen"], k1=1e30, backend=backend).search(["red"], 3)
    assert list(found.numbers) == [0, 2]
    assert all(math.isfinite(score) for score in found.scores)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k1": -0.1}, "k1 must be 0 or more, got -0.1"),
        ({"k1": math.nan}, "k1 must be"),
        ({"k1": math.inf}, r"k1 must be 1e\+30 at most, got inf"),
        ({"k1": 1e46}, r"k1 must be 1e\+30 at most, got 1e\+46"),
        ({"b": 1.5}, "b must be between 0 and 1, got 1.5"),
        ({"pattern": "("}, "not a regular expression"),
        ({"stemmer": "klingon"}, "stemmer must be none or one of"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        BM25(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "extra"), [({"backend": "rank-bm25"}, "rank-bm25"), ({"stemmer": "porter"}, "stem")]
)
def test_a_missing_extra_comes_with_its_pip_line(
    options: dict[str, str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("icr_bench.retrievers.bm25.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=rf"pip install 'icr-bench\[{extra}\]'"):
        BM25(**options)  # type: ignore[arg-type]


DATA = os.environ.get("ICR_BENCH_DATA")


@pytest.mark.skipif(not DATA, reason="ICR_BENCH_DATA is not set")
def test_hit_at_1_on_the_published_limit_small() -> None:
    task = beir(path=Path(DATA or "", "limit-small")).choose().at(46)
    retriever = BM25()
    retriever.index(task.documents)
    rankings = retriever.search([query.text for query in task.queries], 1)
    hits = [
        task.ids[ranking.numbers[0]] in task.judgments[query.id]
        for query, ranking in zip(task.queries, rankings, strict=True)
    ]
    assert len(hits) == 1000
    assert sum(hits) / len(hits) >= 0.98
