"""Metrics: equal to ir-measures, one order for ties, ceilings, and intervals that mean what they say."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import ir_measures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_measures import RR, R, Success, nDCG

from icr_bench.benchmarks.base import Benchmark, Judgment, Passage, Query
from icr_bench.benchmarks.beir import msmarco
from icr_bench.harness.errors import UsageError
from icr_bench.harness.metrics import (
    DEFINITIONS,
    Scored,
    canonical,
    definition,
    intervals,
    names,
    parse_metric,
    score,
)
from icr_bench.retrievers.bm25 import BM25

CUTOFFS = (1, 2, 5, 10)
EXACT = 1e-9

Judgments = Mapping[str, Mapping[str, int]]
Rankings = Mapping[str, Sequence[str]]


def scored(rankings: Rankings, judgments: Judgments, relevant: int = 1, cutoffs: Sequence[int] = CUTOFFS) -> Scored:
    return score(rankings, [], judgments, relevant, cutoffs, {})


def means(rankings: Rankings, judgments: Judgments, relevant: int = 1) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in scored(rankings, judgments, relevant).values.items()}


def theirs(runs: Mapping[str, Mapping[str, float]], judgments: Judgments, relevant: int) -> dict[str, float]:
    measures = {"hit": Success(rel=relevant), "recall": R(rel=relevant), "mrr": RR(rel=relevant), "ndcg": nDCG}
    asked = {f"{name}@{k}": measure @ k for name, measure in measures.items() for k in CUTOFFS}
    found = ir_measures.calc_aggregate(asked.values(), judgments, runs)
    return {name: found[measure] for name, measure in asked.items()}


def assert_equal(ours: Mapping[str, float], others: Mapping[str, float]) -> None:
    assert {name: ours[name] for name in others} == pytest.approx(others, rel=0, abs=EXACT)


DOCUMENTS = [f"d{i}" for i in range(14)]
GRADES = st.dictionaries(st.sampled_from(DOCUMENTS), st.integers(-1, 3), min_size=1).filter(
    lambda grades: max(grades.values()) >= 2
)
CASES = st.lists(st.tuples(GRADES, st.lists(st.sampled_from(DOCUMENTS), unique=True)), min_size=1, max_size=4)
quickly = settings(max_examples=60, deadline=None, database=None)


@quickly
@given(cases=CASES, relevant=st.sampled_from([1, 2]))
def test_equals_ir_measures_on_generated_runs(cases: list[tuple[dict[str, int], list[str]]], relevant: int) -> None:
    judgments = {f"q{i}": grades for i, (grades, _) in enumerate(cases)}
    rankings = {f"q{i}": ranked for i, (_, ranked) in enumerate(cases)}
    runs = {q: {d: -float(rank) for rank, d in enumerate(ranked)} for q, ranked in rankings.items() if ranked}
    assert_equal(means(rankings, judgments, relevant), theirs(runs, judgments, relevant))


@quickly
@given(grades=GRADES, ranked=st.lists(st.sampled_from(DOCUMENTS), unique=True), relevant=st.sampled_from([1, 2]))
def test_complete_means_that_no_gold_is_left_out(grades: dict[str, int], ranked: list[str], relevant: int) -> None:
    golds = {document for document, grade in grades.items() if grade >= relevant}
    found = means({"q": ranked}, {"q": grades}, relevant)
    for k in CUTOFFS:
        assert found[f"complete@{k}"] == (not golds - set(ranked[:k]))


class RealRun:
    """BM25's first 20 documents on the graded MS MARCO sample."""

    def __init__(self, folder: Path) -> None:
        benchmark = msmarco(path=folder, split="test").choose()
        task = benchmark.at(len(benchmark.documents))
        retriever = BM25()
        retriever.load()
        retriever.index(task.documents)
        self.judgments = task.judgments
        self.rankings: dict[str, list[str]] = {}
        self.scores: dict[str, list[float]] = {}
        for query, answer in zip(task.queries, retriever.search([q.text for q in task.queries], 20), strict=True):
            order = canonical(answer.numbers, answer.scores)
            self.rankings[query.id] = [task.ids[answer.numbers[i]] for i in order]
            self.scores[query.id] = [float(answer.scores[i]) for i in order]


@pytest.fixture(scope="module")
def real_run() -> RealRun:
    if "ICR_BENCH_DATA" not in os.environ:
        pytest.skip("ICR_BENCH_DATA is not set")
    return RealRun(Path(os.environ["ICR_BENCH_DATA"]) / "msmarco")


@pytest.mark.parametrize("relevant", [1, 2])
def test_equals_ir_measures_on_a_real_run(real_run: RealRun, relevant: int) -> None:
    judgments = {
        query: grades
        for query, grades in real_run.judgments.items()
        if max(grades.values()) >= relevant and len(set(real_run.scores[query])) == len(real_run.scores[query])
    }
    assert len(judgments) > 50  # queries without ties
    rankings = {query: real_run.rankings[query] for query in judgments}
    runs = {q: dict(zip(ranked, real_run.scores[q], strict=True)) for q, ranked in rankings.items()}
    assert_equal(means(rankings, judgments, relevant), theirs(runs, judgments, relevant))


def test_canonical_order_is_score_then_number() -> None:
    assert canonical([7, 3, 9, 1], [0.5, 0.5, 0.9, 0.5]) == [2, 3, 1, 0]


def test_canonical_order_ignores_the_order_given() -> None:
    pairs = [(4, 1.0), (2, 1.0), (8, 2.0), (0, 0.0)]
    orders = {
        tuple(given[i][0] for i in canonical([n for n, _ in given], [s for _, s in given]))
        for given in (pairs, pairs[::-1], pairs[2:] + pairs[:2])
    }
    assert orders == {(8, 2, 4, 0)}


def test_constant_scorer_is_at_chance() -> None:
    documents, golds, k, draws = 100, 20, 10, 200
    benchmark = Benchmark.of(
        [Passage(f"d{i}", f"text {i}") for i in range(documents)],
        [Query(f"q{i}", "?") for i in range(golds)],
        [Judgment(f"q{i}", f"d{i}", 1) for i in range(golds)],
    )
    hits = []
    for seed in range(draws):
        task = benchmark.choose(seed=seed).at(documents)
        first = [task.ids[i] for i in canonical(range(documents), [1.0] * documents)]
        hits.append(scored(dict.fromkeys(task.judgments, first), task.judgments, 1, [k]).values[f"hit@{k}"].mean())
    # golds among the first k of a random order: a hypergeometric count
    deviation = math.sqrt(k * 0.2 * 0.8 * (documents - k) / (documents - 1)) / golds
    assert np.mean(hits) == pytest.approx(k / documents, abs=4 * deviation / math.sqrt(draws))


def test_queries_without_an_answer_score_zero_and_count() -> None:
    judgments = {"answered": {"a": 1}, "empty": {"a": 1}, "missing": {"a": 1}, "wrong": {"a": 1}}
    found = means({"answered": ["a"], "empty": [], "wrong": ["b"]}, judgments)
    assert found == dict.fromkeys(names(CUTOFFS), 0.25)


def test_two_golds_put_a_ceiling_on_recall_and_complete() -> None:
    ceiling = scored({}, {"q": {"a": 1, "b": 1}}).ceiling
    assert (ceiling["recall@1"], ceiling["complete@1"]) == (0.5, 0.0)
    assert (ceiling["recall@2"], ceiling["complete@2"]) == (1.0, 1.0)
    assert ceiling["hit@1"] == ceiling["mrr@1"] == ceiling["ndcg@1"] == 1.0


def test_ceiling_is_a_mean_over_queries() -> None:
    assert scored({}, {"one": {"a": 1}, "two": {"a": 1, "b": 1}}).ceiling["recall@1"] == 0.75


@quickly
@given(grades=GRADES, relevant=st.sampled_from([1, 2]))
def test_the_best_ranking_reaches_the_ceiling(grades: dict[str, int], relevant: int) -> None:
    best = sorted(grades, key=lambda document: -grades[document])
    result = scored({"q": best}, {"q": grades}, relevant)
    assert {name: float(values.mean()) for name, values in result.values.items()} == result.ceiling


def test_a_document_that_may_not_be_returned_lowers_the_ceiling() -> None:
    judgments = {"self": {"self": 1, "b": 1}}
    ceiling = score({}, [], judgments, 1, CUTOFFS, {"self": "self"}).ceiling
    assert (ceiling["hit@1"], ceiling["recall@2"], ceiling["complete@10"]) == (1.0, 0.5, 0.0)
    assert 0 < ceiling["ndcg@10"] < 1


def test_tie_rate_is_the_share_of_tied_rankings() -> None:
    judgments = {"q": {"a": 1}}
    assert score({}, [True, False, False, True], judgments, 1, (1,), {}).tie_rate == 0.5
    assert score({}, [], judgments, 1, (1,), {}).tie_rate == 0.0


def test_cutoffs_beyond_the_ranking_take_all_of_it() -> None:
    values = scored({"q": ["x", "b", "a"]}, {"q": {"a": 2, "b": 1, "c": 1}}, cutoffs=(3, 1000)).values
    for metric in DEFINITIONS:
        assert values[f"{metric}@1000"] == pytest.approx(values[f"{metric}@3"])


def test_gain_is_linear_in_the_grade() -> None:
    found = means({"q": ["one", "three"]}, {"q": {"one": 1, "three": 3}})
    second = 1 / math.log2(3)
    assert found["ndcg@10"] == pytest.approx((1 + 3 * second) / (3 + second))


def test_a_grade_below_relevant_still_gains() -> None:
    found = means({"q": ["one"]}, {"q": {"one": 1, "two": 2}}, relevant=2)
    assert found["hit@10"] == 0.0
    assert found["ndcg@10"] > 0


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=40))
@settings(max_examples=25, deadline=None, database=None)
def test_intervals_hold_the_mean(values: list[float]) -> None:
    row = intervals({"hit@1": np.array(values)})["hit@1"]
    assert row["value"] == pytest.approx(sum(values) / len(values))
    assert row["low"] - EXACT <= row["value"] <= row["high"] + EXACT


def test_intervals_are_the_same_every_time() -> None:
    values = {"hit@1": np.array([0.0, 1.0, 1.0, 0.0, 1.0])}
    assert intervals(values) == intervals(values)
    assert intervals(values, seed=1)["hit@1"]["value"] == intervals(values)["hit@1"]["value"]


def test_intervals_do_not_depend_on_the_other_metrics() -> None:
    one, other = np.array([0.0, 1.0, 1.0, 0.0]), np.array([0.2, 0.4, 0.1, 0.9])
    assert intervals({"a": one, "b": other})["b"] == pytest.approx(intervals({"b": other})["b"], rel=1e-12)


@pytest.mark.parametrize(("hits", "queries"), [(200, 400), (40, 400), (950, 1000)])
def test_intervals_are_as_wide_as_the_binomial(hits: int, queries: int) -> None:
    values = np.array([1.0] * hits + [0.0] * (queries - hits))
    row = intervals({"hit@1": values})["hit@1"]
    share = hits / queries
    width = 2 * 1.96 * math.sqrt(share * (1 - share) / queries)
    assert row["high"] - row["low"] == pytest.approx(width, rel=0.1)


@pytest.mark.parametrize("values", [[0.3], [1.0] * 7, [0.0] * 7])
def test_values_without_spread_have_a_point_interval(values: list[float]) -> None:
    row = intervals({"hit@1": np.array(values)})["hit@1"]
    assert row["low"] == row["high"] == pytest.approx(row["value"])


@pytest.mark.parametrize("metric", names(CUTOFFS))
def test_names_are_parsed_as_they_are_listed(metric: str) -> None:
    assert parse_metric(metric) == metric
    assert parse_metric(f" {metric.upper()} ") == metric


@pytest.mark.parametrize(
    ("given", "closest"),
    [
        ("recal@5", "recall@5"),
        ("hits@1", "hit@1"),
        ("NDGC@10", "ndcg@10"),
        ("recall", "recall@k"),
        ("mrr@0", "mrr@k"),
        ("hit@x", "hit@"),
        ("hit@-1", "hit@"),
        ("hit@1.5", "hit@"),
    ],
)
def test_unknown_metric_names_the_closest(given: str, closest: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_metric(given)
    assert repr(given) in str(caught.value)
    assert closest in str(caught.value)


def test_metric_like_none_lists_them_all() -> None:
    with pytest.raises(UsageError) as caught:
        parse_metric("zzz")
    assert all(f"{name}@k" in str(caught.value) for name in DEFINITIONS)


def test_superscript_cutoff_is_refused() -> None:
    with pytest.raises(UsageError, match="hit@"):
        parse_metric("hit@²")


@pytest.mark.parametrize("metric", names((7,)))
def test_definition_names_the_cutoff(metric: str) -> None:
    words = definition(metric)
    assert words.startswith(f"{metric}: ")
    assert "first 7" in words or "at 7" in words
    assert " k" not in words
