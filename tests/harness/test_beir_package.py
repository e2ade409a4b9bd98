"""Loader and evaluator of the beir package: the same data, the same figures, and where its definitions differ."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from icr_bench.benchmarks.base import Benchmark
from icr_bench.benchmarks.beir import beir
from icr_bench.harness.export import descending
from icr_bench.harness.metrics import Scored, score
from icr_bench.harness.run import order
from icr_bench.retrievers.bm25 import BM25

pytest.importorskip("beir")

from beir.datasets.data_loader import GenericDataLoader
from beir.retrieval.evaluation import EvaluateRetrieval

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # beir's loader leaves them to Python

CUTOFFS = (1, 3, 5, 10, 100)
ROUNDED = 1e-5
"""The evaluator rounds to five decimals."""

DATA = os.environ.get("ICR_BENCH_DATA")
REAL = [("msmarco", "dev"), ("msmarco", "test"), ("hotpotqa", "dev"), ("nq", "test"), ("limit-small", "test")]
WORDS = [*"abcdefghij", "naïve", "café", "日本語", "Ωmega", "🙂", "line\u2028break", 'quo"te', "back\\slash"]

Judgments = Mapping[str, Mapping[str, int]]


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_qrels(file: Path, rows: list[tuple[str, str, int]]) -> None:
    lines = ["query-id\tcorpus-id\tscore", *(f"{query}\t{document}\t{grade}" for query, document, grade in rows)]
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in BEIR layout: Unicode, titles that are empty or missing, grades from -1 to 3, two splits, a query
    judged nowhere, queries without a gold, and queries whose ids are those of documents."""
    folder, rng = tmp_path_factory.mktemp("synthetic"), random.Random(5)

    def text(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    titles: list[dict[str, Any]] = [{"title": "Zwölf Äpfel"}, {"title": ""}, {}, {"title": None}]
    ids = [f"d é{i}" for i in range(150)]
    documents = [{"_id": key, **titles[i % 4], "text": text(12)} for i, key in enumerate(ids)]
    queries = [ids[i] if i % 3 == 0 else f"q{i}" for i in range(61)]
    rows = [(query, rng.choice(ids), rng.choice([-1, 0, 1, 1, 2, 3])) for query in queries[:60] for _ in range(6)]
    rows += [(query, query, 2) for query in queries[:60] if query in ids]
    once = {(query, document): grade for query, document, grade in rows if query not in queries[10:12]}
    once |= {(query, "d é7"): 0 for query in queries[10:12]}
    graded = [(query, document, grade) for (query, document), grade in once.items()]
    write_lines(folder / "corpus.jsonl", [*documents, {"_id": "empty", "title": "", "text": ""}])
    write_lines(folder / "queries.jsonl", [{"_id": query, "text": text(4)} for query in queries])
    write_qrels(folder / "qrels" / "test.tsv", [row for row in graded if queries.index(row[0]) < 40])
    write_qrels(folder / "qrels" / "dev.tsv", [row for row in graded if queries.index(row[0]) >= 40])
    return folder


SPLITS = [("synthetic", "test"), ("synthetic", "dev"), *REAL]


@pytest.fixture(params=SPLITS, ids="-".join, scope="module")
def sample(request: pytest.FixtureRequest, synthetic: Path) -> tuple[Path, str]:
    """A folder and a split of it."""
    name, split = request.param
    if name == "synthetic":
        return synthetic, split
    if not DATA:
        pytest.skip("ICR_BENCH_DATA is not set")
    return Path(DATA) / name, split


def test_both_loaders_read_the_same(sample: tuple[Path, str]) -> None:
    """The loader keeps title and text apart; its models join them with a space, as we do. It drops queries without
    judgments in the split; we keep those that no split judges, to say that they are not scored."""
    folder, split = sample
    documents, queries, judgments = GenericDataLoader(str(folder)).load(split)
    ours = beir(path=folder, split=split)
    joined = {key: f"{d['title']} {d['text']}" if d["title"] else d["text"] for key, d in documents.items()}
    assert {document.id: document.text for document in ours.documents} == joined
    assert ours.judgments == judgments
    assert {query.id: query.text for query in ours.queries if query.id in judgments} == queries
    unjudged = {query.id for query in ours.queries} - set(queries)
    assert unjudged == ({"d é60"} if folder.name.startswith("synthetic") else set())


def test_the_loader_takes_quotes_from_ids_of_judgments(tmp_path: Path) -> None:
    """It reads judgments as CSV, where a quote opens a field; we take fields as they stand, as trec_eval does."""
    for name in ("corpus.jsonl", "queries.jsonl"):
        write_lines(tmp_path / name, [{"_id": '"x"', "text": "a"}, {"_id": "x", "text": "b"}])
    write_qrels(tmp_path / "qrels" / "test.tsv", [('"x"', '"x"', 1)])
    assert beir(path=tmp_path).judgments == {'"x"': {'"x"': 1}}
    assert GenericDataLoader(str(tmp_path)).load("test")[2] == {"x": {"x": 1}}


@dataclass(frozen=True)
class Answered:
    """BM25's first documents for every query with a gold."""

    judgments: dict[str, dict[str, int]]
    rankings: dict[str, list[str]]  # in canonical order
    scores: dict[str, list[float]]

    def run(self) -> dict[str, dict[str, float]]:
        """As the evaluator takes it: scores lowered where float32 or a tie would change the order."""
        return {q: dict(zip(d, descending(self.scores[q]), strict=True)) for q, d in self.rankings.items()}

    def scored(self, cutoffs: tuple[int, ...] = CUTOFFS) -> Scored:
        return score(self.rankings, [], self.judgments, 1, cutoffs, {})


def answered(benchmark: Benchmark, *, exclude_self: bool = False) -> Answered:
    chosen = benchmark.choose()
    task = chosen.at(len(chosen.documents))
    retriever = BM25()
    retriever.index(task.documents)
    found = retriever.search([query.text for query in task.queries], max(CUTOFFS) + 1)
    answers = [(ranking.numbers, ranking.scores, "") for ranking in found]
    lines, _ = order(task, answers, max(CUTOFFS), set(task.ids) if exclude_self else set())
    documents = {line["query"]: line["documents"] for line in lines}
    return Answered(task.judgments, documents, {line["query"]: line["scores"] for line in lines})


def ours(scored: Scored) -> dict[str, float]:
    """Our figures under the evaluator's names."""
    named = {"NDCG": "ndcg", "Recall": "recall", "MRR": "mrr", "Accuracy": "hit"}
    return {f"{their}@{k}": float(scored.values[f"{own}@{k}"].mean()) for their, own in named.items() for k in CUTOFFS}


def precisions(given: Answered) -> dict[str, float]:
    """P@k and MAP@k from our recall at every cut-off, which tells how many relevant documents each rank adds."""
    shallow = CUTOFFS[:-1]  # a hundred cut-offs would take a while
    deepest = max(shallow)
    values = given.scored(tuple(range(1, deepest + 1))).values
    golds = np.array([sum(grade >= 1 for grade in grades.values()) for grades in given.judgments.values()])
    recall = np.stack([values[f"recall@{k}"] for k in range(1, deepest + 1)], axis=1)
    found = np.rint(recall * golds[:, None])  # (queries, ranks)
    precision = found / np.arange(1, deepest + 1)
    added = np.diff(found, axis=1, prepend=0)
    average = np.cumsum(added * precision, axis=1) / golds[:, None]
    told = {f"P@{k}": float(precision[:, k - 1].mean()) for k in shallow}
    return told | {f"MAP@{k}": float(average[:, k - 1].mean()) for k in shallow}


def theirs(
    judgments: Judgments, run: dict[str, dict[str, float]], *, ignore_identical_ids: bool = False
) -> dict[str, float]:
    told: dict[str, float] = {}
    copy = {query: dict(row) for query, row in run.items()}  # the evaluator takes documents out of it
    for part in EvaluateRetrieval.evaluate(judgments, copy, list(CUTOFFS), ignore_identical_ids):
        told |= part
    for metric in ("mrr", "accuracy"):
        told |= EvaluateRetrieval.evaluate_custom(judgments, copy, list(CUTOFFS), metric)
    return told


def assert_equal(own: dict[str, float], others: dict[str, float]) -> None:
    assert own == pytest.approx({name: others[name] for name in own}, rel=0, abs=ROUNDED)


def test_the_evaluator_gives_our_figures(sample: tuple[Path, str]) -> None:
    folder, split = sample
    given = answered(beir(path=folder, split=split))
    others = theirs(given.judgments, given.run())
    own = ours(given.scored()) | precisions(given)
    assert others.keys() - own.keys() == {"P@100", "MAP@100"}
    assert_equal(own, others)
    assert 0.05 < own["NDCG@10"] < 1


def test_identical_ids_are_dropped_by_the_evaluator_and_by_exclude_self(synthetic: Path) -> None:
    """The evaluator takes documents out of the run whose id is the query's unless told otherwise; here a benchmark says
    so (``exclude_self``). Both leave their judgments in place, so that the ideal ranking still holds them."""
    benchmark = beir(path=synthetic, split="test")
    with_self, without = answered(benchmark), answered(benchmark, exclude_self=True)
    assert any(query in documents for query, documents in with_self.rankings.items())
    others = theirs(with_self.judgments, with_self.run(), ignore_identical_ids=True)
    assert_equal(ours(without.scored()) | precisions(without), others)
    assert others["NDCG@10"] != pytest.approx(theirs(with_self.judgments, with_self.run())["NDCG@10"], abs=ROUNDED)


def test_equal_scores_rank_by_id_in_the_evaluator() -> None:
    """trec_eval compares float32 and takes the greater id first, MRR the first in the run; we take the lower document
    number, which is drawn at random. Scores made to descend, as our export writes them, leave no tie."""
    judgments, ranked = {"q": {"a": 1}}, ["a", "b"]
    scored = ours(score({"q": ranked}, [], judgments, 1, CUTOFFS, {}))
    for tied in ([0.5, 0.5], [0.5 + 1e-9, 0.5]):
        others = theirs(judgments, {"q": dict(zip(ranked, tied, strict=True))})
        assert (scored["Recall@1"], others["Recall@1"], others["MRR@1"]) == (1.0, 0.0, 1.0)
        assert_equal(scored, theirs(judgments, {"q": dict(zip(ranked, descending(tied), strict=True))}))


def test_queries_that_the_run_leaves_out_are_left_out_of_the_evaluators_mean() -> None:
    """Except of MRR's and accuracy's. An empty answer counts 0, as every missing one does for us."""
    judgments = {"answered": {"a": 1}, "other": {"a": 1}}
    scored = ours(score({"answered": ["a"]}, [], judgments, 1, CUTOFFS, {}))
    missing = theirs(judgments, {"answered": {"a": 1.0}})
    assert (scored["NDCG@10"], missing["NDCG@10"], missing["MRR@10"]) == (0.5, 1.0, 0.5)
    assert_equal(scored, theirs(judgments, {"answered": {"a": 1.0}, "other": {}}))


def test_queries_without_a_gold_count_zero_in_the_evaluator(synthetic: Path) -> None:
    """They are judged, all with grade 0 or less. We do not score them, since no ranking could be right."""
    benchmark = beir(path=synthetic, split="test")
    given = answered(benchmark)
    judged = {query: grades for query, grades in benchmark.judgments.items() if query not in given.judgments}
    assert judged
    others = theirs({**given.judgments, **judged}, {**given.run(), **{query: {} for query in judged}})
    share = len(given.judgments) / (len(given.judgments) + len(judged))
    assert_equal({name: value * share for name, value in ours(given.scored()).items()}, others)
