"""The `Benchmark` interface: nested corpora, numbers that tell nothing, and what the check of the rows finds."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icr_bench.benchmarks.base import Benchmark, DataError, Judgment, Passage, Places, Query, SizeError, Task


def passages(count: int) -> list[Passage]:
    return [Passage(f"d{i}", f"text of document {i}") for i in range(count)]


def queries(count: int) -> list[Query]:
    return [Query(f"q{i}", f"query {i}") for i in range(count)]


def make(documents: int, golds: Sequence[int]) -> Benchmark:
    """A benchmark whose query i has one gold, document ``golds[i]``."""
    judgments = [Judgment(f"q{i}", f"d{gold}", 1) for i, gold in enumerate(golds)]
    return Benchmark.of(passages(documents), queries(len(golds)), judgments)


def gold_positions(benchmark: Benchmark, task: Task) -> set[int]:
    return {number for number, id_ in enumerate(task.ids) if id_ in benchmark.golds}


SIXTY = make(60, [3, 17, 17, 59])
GOLDS = {"d3", "d17", "d59"}

STEADY = settings(derandomize=True, deadline=None)


# --- corpora of every size


@STEADY
@given(seed=st.integers(0, 2**32), n=st.integers(3, 60), more=st.integers(0, 57))
def test_a_smaller_corpus_is_part_of_a_larger_one(seed: int, n: int, more: int) -> None:
    chosen = SIXTY.choose(seed=seed)
    assert set(chosen.at(n).ids) <= set(chosen.at(min(n + more, 60)).ids)


@STEADY
@given(seed=st.integers(0, 2**32), n=st.integers(3, 60))
def test_a_corpus_has_n_distinct_documents_and_every_gold(seed: int, n: int) -> None:
    ids = SIXTY.choose(seed=seed).at(n).ids
    assert len(ids) == len(set(ids)) == n
    assert set(ids) >= GOLDS


@STEADY
@given(seed=st.integers(0, 2**32), n=st.integers(3, 60))
def test_document_i_has_number_i_and_the_text_of_its_id(seed: int, n: int) -> None:
    task = SIXTY.choose(seed=seed).at(n)
    texts = {d.id: d.text for d in SIXTY.documents}
    assert [d.number for d in task.documents] == list(range(n))
    assert [d.text for d in task.documents] == [texts[id_] for id_ in task.ids]


def test_the_smallest_corpus_is_the_golds_alone() -> None:
    assert set(SIXTY.choose().at(3).ids) == GOLDS


def test_the_largest_corpus_is_all_documents() -> None:
    assert set(SIXTY.choose().at(60).ids) == {d.id for d in SIXTY.documents}


def test_the_seed_chooses_which_other_documents_join_first() -> None:
    assert len({frozenset(SIXTY.choose(seed=seed).at(10).ids) for seed in range(20)}) == 20


def test_the_same_seed_and_size_give_the_same_task() -> None:
    assert SIXTY.choose(seed=5).at(20) == make(60, [3, 17, 17, 59]).choose(seed=5).at(20)


@pytest.mark.parametrize("n", [2, 1, 0, -1])
def test_a_size_below_the_gold_count_is_refused_with_both_numbers(n: int) -> None:
    with pytest.raises(SizeError, match=rf"n={n} is below the 3 gold documents"):
        SIXTY.choose().at(n)


def test_a_size_beyond_the_corpus_is_refused_with_both_numbers() -> None:
    with pytest.raises(SizeError, match=r"n=61 .* 60 documents"):
        SIXTY.choose().at(61)


def test_every_size_between_is_accepted() -> None:
    chosen = SIXTY.choose()
    for n in range(3, 61):
        chosen.check_size(n)


# --- numbers


@pytest.mark.parametrize(("seed", "n"), [(0, 10), (0, 40), (1, 10), (77, 23)])
def test_numbers_are_independent_of_which_documents_are_golds(seed: int, n: int) -> None:
    positions = set()
    for golds in ([0, 1, 2], [37, 38, 39], [5, 20, 33]):
        chosen = make(40, golds).choose(seed=seed)
        positions.add(frozenset(gold_positions(chosen, chosen.at(n))))
    assert len(positions) == 1


@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_independent_of_how_many_golds_there_are(seed: int) -> None:
    few, many = make(40, [4, 9]).choose(seed=seed), make(40, [4, 9, 11, 30]).choose(seed=seed)
    assert gold_positions(few, few.at(15)) < gold_positions(many, many.at(15))


def test_numbers_are_independent_of_texts_and_ids() -> None:
    renamed = Benchmark.of(
        [Passage(f"other {d.id}", d.text.upper()) for d in SIXTY.documents],
        SIXTY.queries,
        [Judgment(q, f"other {d}", g) for q, grades in SIXTY.judgments.items() for d, g in grades.items()],
    )
    assert renamed.choose(seed=3).at(30).ids == [f"other {id_}" for id_ in SIXTY.choose(seed=3).at(30).ids]


def test_a_judgment_of_grade_zero_changes_no_number() -> None:
    documents, asked = passages(30), queries(1)
    plain = Benchmark.of(documents, asked, [Judgment("q0", "d4", 1)])
    judged = Benchmark.of(documents, asked, [Judgment("q0", "d4", 1), Judgment("q0", "d9", 0)])
    assert plain.choose().at(12).ids == judged.choose().at(12).ids


def test_numbers_change_with_the_seed_and_with_the_size() -> None:
    by_seed = {frozenset(gold_positions(SIXTY, SIXTY.choose(seed=seed).at(50))) for seed in range(10)}
    by_size = {frozenset(gold_positions(SIXTY, SIXTY.choose().at(n))) for n in range(40, 50)}
    assert len(by_seed) >= 9
    assert len(by_size) >= 9


@pytest.mark.parametrize("documents", [20, 35], ids=["whole corpus", "part of the corpus"])
def test_golds_stand_at_every_position_equally_often(documents: int) -> None:
    """Chi-square over 20 positions; 43.8 is the 99.9 % point with 19 degrees of freedom."""
    benchmark, draws, n = make(documents, [0, 1, 2]), 1000, 20
    counts: Counter[int] = Counter()
    for seed in range(draws):
        counts.update(gold_positions(benchmark, benchmark.choose(seed=seed).at(n)))
    expected = 3 * draws / n
    assert sum((counts[i] - expected) ** 2 / expected for i in range(n)) < 43.8


# --- queries and judgments


def test_only_queries_with_a_gold_are_declared() -> None:
    judgments = [Judgment("q0", "d0", 1), Judgment("q1", "d1", 0), Judgment("q3", "d2", -1)]
    chosen = Benchmark.of(passages(5), queries(4), judgments).choose()
    assert [q.id for q in chosen.queries] == ["q0"]
    assert chosen.golds == {"d0"}


def test_a_sample_has_the_size_asked_for_and_keeps_the_order() -> None:
    benchmark = make(30, range(12))
    sample = [q.id for q in benchmark.choose(seed=1, queries=5).queries]
    assert len(set(sample)) == 5
    assert sample == [q.id for q in benchmark.queries if q.id in sample]


def test_a_sample_is_the_same_for_a_seed_and_another_for_other_seeds() -> None:
    def draw(seed: int) -> tuple[str, ...]:
        return tuple(q.id for q in make(30, range(12)).choose(seed=seed, queries=5).queries)

    assert draw(4) == draw(4)
    assert len({draw(seed) for seed in range(10)}) >= 9


def test_every_query_is_drawn_equally_often() -> None:
    """Each of 12 queries is in a sample of 3 with probability 1/4: 250 of 1,000 seeds, five deviations either way."""
    benchmark = make(12, range(12))
    counts = Counter(q.id for seed in range(1000) for q in benchmark.choose(seed=seed, queries=3).queries)
    assert len(counts) == 12
    assert all(180 < count < 320 for count in counts.values())


def test_only_the_golds_of_sampled_queries_must_be_in_the_corpus() -> None:
    sample = make(30, range(12)).choose(seed=2, queries=4)
    assert set(sample.at(4).ids) == {f"d{q.id[1:]}" for q in sample.queries}


def test_a_sample_of_all_declared_queries_is_all_of_them() -> None:
    benchmark = make(30, range(12))
    assert benchmark.choose(queries=12).queries == benchmark.choose().queries


@pytest.mark.parametrize("count", [0, -1, 13])
def test_more_queries_than_are_declared_or_none_are_refused_with_both_numbers(count: int) -> None:
    with pytest.raises(SizeError, match=rf"queries={count} .* 12$"):
        make(30, range(12)).choose(queries=count)


GRADED = [Judgment("q0", "d0", 1), Judgment("q0", "d1", 2), Judgment("q1", "d2", 1), Judgment("q1", "d3", 3)]


@pytest.mark.parametrize(
    ("relevant", "golds", "declared"),
    [(1, {"d0", "d1", "d2", "d3"}, 2), (2, {"d1", "d3"}, 2), (3, {"d3"}, 1)],
)
def test_relevant_sets_the_lowest_grade_of_a_gold(relevant: int, golds: set[str], declared: int) -> None:
    chosen = Benchmark.of(passages(9), queries(2), GRADED).choose(relevant=relevant)
    assert chosen.golds == golds
    assert len(chosen.queries) == declared
    assert set(chosen.at(len(golds)).ids) == golds
    assert chosen.at(9).relevant == relevant


def test_a_grade_that_no_judgment_reaches_is_an_error() -> None:
    with pytest.raises(DataError, match="none of the 2 queries has a judgment of grade 4 or more"):
        Benchmark.of(passages(9), queries(2), GRADED).choose(relevant=4)


def test_a_task_judges_only_documents_of_its_corpus_and_keeps_grades() -> None:
    chosen = Benchmark.of(passages(9), queries(2), GRADED).choose(relevant=2)
    assert chosen.at(2).judgments == {"q0": {"d1": 2}, "q1": {"d3": 3}}
    assert chosen.at(9).judgments == {"q0": {"d0": 1, "d1": 2}, "q1": {"d2": 1, "d3": 3}}


# --- fingerprint

ROWS = (passages(6), queries(2), [Judgment("q0", "d0", 1), Judgment("q1", "d1", 1), Judgment("q1", "d2", 2)])


def fingerprint(documents: list[Passage], asked: list[Query], judgments: list[Judgment]) -> str:
    return Benchmark.of(documents, asked, judgments).choose().at(len(documents)).fingerprint


@pytest.mark.parametrize(
    "changed",
    [
        ([*ROWS[0][:5], Passage("d5", "another text")], ROWS[1], ROWS[2]),
        ([*ROWS[0][:5], Passage("d6", "text of document 5")], ROWS[1], ROWS[2]),
        (ROWS[0], [ROWS[1][0], Query("q1", "another query")], ROWS[2]),
        (ROWS[0], ROWS[1], [*ROWS[2][:2], Judgment("q1", "d2", 3)]),
        (ROWS[0], ROWS[1], ROWS[2][:2]),
        (ROWS[0], ROWS[1], [*ROWS[2], Judgment("q0", "d5", 0)]),
    ],
    ids=["document text", "document id", "query text", "grade", "judgment less", "judgment more"],
)
def test_the_fingerprint_changes_with_the_data(changed: tuple[list[Passage], list[Query], list[Judgment]]) -> None:
    assert fingerprint(*changed) != fingerprint(*ROWS)


@STEADY
@given(st.randoms(use_true_random=False))
def test_the_fingerprint_does_not_change_with_the_order_of_rows(rng: random.Random) -> None:
    documents, asked, judgments = ROWS
    shuffled = fingerprint(rng.sample(documents, 6), rng.sample(asked, 2), rng.sample(judgments, 3))
    assert shuffled == fingerprint(*ROWS)


def test_the_fingerprint_changes_with_the_size_and_with_relevant() -> None:
    benchmark = Benchmark.of(*ROWS)
    prints = {benchmark.choose().at(n).fingerprint for n in (3, 4, 5, 6)}
    assert len(prints | {benchmark.choose(relevant=2).at(6).fingerprint}) == 5


def test_the_fingerprint_cannot_be_confused_by_moving_text_between_fields() -> None:
    one = fingerprint([Passage("a", "b\nc"), Passage("d0", "")], queries(1), [Judgment("q0", "d0", 1)])
    other = fingerprint([Passage("a\nb", "c"), Passage("d0", "")], queries(1), [Judgment("q0", "d0", 1)])
    assert one != other


def test_the_fingerprint_is_a_sha256() -> None:
    assert re.fullmatch("[0-9a-f]{64}", fingerprint(*ROWS))


# --- warnings


@pytest.mark.parametrize(
    ("documents", "asked", "judgments", "warning"),
    [
        ([Passage("d0", "same"), Passage("d1", "same")], queries(1), [], r"documents\[1\]: .*'d1'.*'d0' at documents"),
        ([Passage("d0", "x"), Passage("d1", " \n")], queries(1), [], r"documents\[1\]: document 'd1' has no text"),
        (passages(1), [*queries(1), Query("q9", "")], [], r"queries\[1\]: query 'q9' has no text"),
        (passages(1), [*queries(1), Query("d0", "x")], [], r"queries\[1\]: 'd0' is also a document's id"),
        ([*passages(1), *passages(1)], queries(1), [], r"documents\[1\]: 'd0' is an identical duplicate of documents"),
        (passages(1), [*queries(1), *queries(1)], [], r"queries\[1\]: 'q0' is an identical duplicate of queries\[0\]"),
        (passages(1), queries(1), [Judgment("q0", "d0", 1)], r"judgments\[1\]: an identical duplicate of judgments"),
    ],
    ids=["equal texts", "empty document", "empty query", "query is document", "document", "query", "judgment"],
)
def test_a_doubtful_row_is_warned_about_once_with_its_place(
    documents: list[Passage], asked: list[Query], judgments: list[Judgment], warning: str
) -> None:
    benchmark = Benchmark.of(documents, asked, [Judgment("q0", "d0", 1), *judgments])
    assert len(benchmark.warnings) == 1
    assert re.match(warning, benchmark.warnings[0])


def test_identical_duplicates_are_dropped() -> None:
    judgments = [Judgment("q0", "d0", 1)]
    benchmark = Benchmark.of(passages(3) * 2, queries(2) * 2, judgments * 2)
    assert list(benchmark.documents) == passages(3)
    assert list(benchmark.queries) == queries(2)
    assert benchmark.judgments == {"q0": {"d0": 1}}


def test_queries_without_a_gold_are_warned_about_when_queries_are_chosen() -> None:
    benchmark = Benchmark.of(passages(3), queries(2), [Judgment("q0", "d0", 1), Judgment("q1", "d1", 0)])
    assert benchmark.warnings == ()
    (warning,) = benchmark.choose().warnings
    assert "'q1' has no gold" in warning


def test_places_name_file_and_line() -> None:
    places = {
        "documents": Places("corpus.jsonl", [1, 4]),
        "queries": Places("queries.jsonl", [7, 9]),
        "judgments": Places("test.tsv", [2]),
    }
    documents = [Passage("d0", "same"), Passage("d1", "same")]
    benchmark = Benchmark.of(documents, queries(2), [Judgment("q0", "d0", 1)], places).choose()
    equal, unscored = benchmark.warnings
    assert equal.startswith("corpus.jsonl:4: ")
    assert equal.endswith(" at corpus.jsonl:1")
    assert unscored.startswith("queries.jsonl:9: query 'q1'")


def test_clean_data_has_no_warnings() -> None:
    assert SIXTY.choose().warnings == ()


def test_ten_findings_of_a_kind_are_listed_and_the_rest_counted() -> None:
    documents = [*passages(1), *(Passage(f"e{i}", "") for i in range(25))]
    *listed, rest = Benchmark.of(documents, queries(1), [Judgment("q0", "d0", 1)]).warnings
    assert len(listed) == 10
    assert rest == "... and 15 more: empty texts"


# --- errors


@pytest.mark.parametrize(
    ("documents", "asked", "judgments", "message"),
    [
        (passages(2), queries(1), [Judgment("q0", "d7", 1)], r"judgments\[0\]: the corpus has no document 'd7'"),
        (passages(2), queries(1), [Judgment("q7", "d0", 1)], r"judgments\[0\]: there is no query 'q7'"),
        (
            [*passages(2), Passage("d1", "else")],
            queries(1),
            [],
            r"documents\[2\]: the id 'd1' has another text at documents\[1\]",
        ),
        (passages(2), [*queries(1), Query("q0", "else")], [], r"queries\[1\]: .*'q0'.* at queries\[0\]"),
        (
            passages(2),
            queries(1),
            [Judgment("q0", "d0", 1), Judgment("q0", "d0", 2)],
            r"judgments\[1\]: grade 2 for query 'q0' and document 'd0', but 1 at judgments\[0\]",
        ),
        ([], queries(1), [], "documents: the corpus is empty"),
        (passages(2), [], [], "queries: there are no queries"),
    ],
    ids=["document", "query", "document twice", "query twice", "judgment twice", "empty corpus", "no queries"],
)
def test_rows_that_cannot_be_used_are_an_error_with_their_place(
    documents: list[Passage], asked: list[Query], judgments: list[Judgment], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Benchmark.of(documents, asked, judgments)


def test_all_errors_are_told_at_once() -> None:
    with pytest.raises(DataError) as raised:
        Benchmark.of(
            passages(1), queries(1), [Judgment("q0", "d8", 1), Judgment("q8", "d0", 1), Judgment("q0", "d9", 1)]
        )
    assert len(str(raised.value).splitlines()) == 3
