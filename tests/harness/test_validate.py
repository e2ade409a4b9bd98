"""The contract checks: a sound retriever keeps all of them, and each broken one fails exactly its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from icr_bench.harness.cli import main
from icr_bench.harness.validate import CHECKS, TEXTS, validate
from icr_bench.retrievers.base import Document, Ranking, Retriever
from icr_bench.retrievers.bm25 import BM25


class Overlap(Retriever):
    """Scores by the number of words that query and document share; keeps the contract."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def index(self, documents: Sequence[Document]) -> None:
        self.texts = [document.text for document in documents]

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        return [self.rank(query, k) for query in queries]

    def rank(self, query: str, k: int) -> Ranking:
        scores = [float(len(set(query.split()) & set(text.split()))) for text in self.texts]
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
        return Ranking(best, [scores[i] for i in best])

    def index_bytes(self) -> int:
        return 1 + sum(map(len, self.texts))


class FailsToLoad(Overlap):
    def load(self) -> None:
        raise OSError("no such model")


class OnlyFirst(Overlap):
    """Answers wrongly only where one of several documents is asked for, which one check alone does."""

    wrong = Ranking([], [])

    def rank(self, query: str, k: int) -> Ranking:
        return self.wrong if k == 1 < len(self.texts) else super().rank(query, k)


class TooMany(OnlyFirst):
    wrong = Ranking([0, 1], [1.0, 1.0])


class Unknown(OnlyFirst):
    wrong = Ranking([len(TEXTS) + 1], [1.0])


class NotFinite(OnlyFirst):
    wrong = Ranking([0], [float("nan")])


class Uneven(OnlyFirst):
    wrong = Ranking([0], [])


class Twice(Overlap):
    def rank(self, query: str, k: int) -> Ranking:
        found = super().rank(query, k)
        return Ranking([0, 0], [1.0, 1.0]) if k == 2 < len(self.texts) and query == "" else found


class OneTooMany(Overlap):
    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        more = ["one"] if queries and k == 1 < len(self.texts) else []
        return super().search([*queries, *more], k)


class AnswersNobody(Overlap):
    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        return super().search(queries or [""], k)


class NeedsTwo(Overlap):
    def index(self, documents: Sequence[Document]) -> None:
        super().index(documents)
        if len(documents) == 1:
            raise IndexError("a mean over no other documents")


class Jitters(Overlap):
    """Never gives the same score twice, within the tolerance of other checks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def rank(self, query: str, k: int) -> Ranking:
        found, shift = super().rank(query, k), 1e-9 * next(self.calls)
        return Ranking(found.numbers, [score + shift for score in found.scores])


class Pads(Overlap):
    """Scores depend on the batch, as with padding that is not masked."""

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        found = super().search(queries, k)
        return [Ranking(r.numbers, [score + len(queries) / 10 for score in r.scores]) for r in found]


class WorstOfTwo(Overlap):
    def rank(self, query: str, k: int) -> Ranking:
        found = super().rank(query, len(self.texts))
        head = slice(-2, None) if k == 2 < len(self.texts) else slice(k)
        return Ranking(found.numbers[head], found.scores[head])


class KeepsTheOld(Overlap):
    """Takes two documents that it has already for no news."""

    def index(self, documents: Sequence[Document]) -> None:
        texts = [document.text for document in documents]
        if len(texts) != 2 or texts != self.texts[:2]:
            self.texts = texts


class Consumes(Overlap):
    def index(self, documents: Sequence[Document]) -> None:
        super().index(documents)
        assert isinstance(documents, list)
        documents.clear()


class CountsNothing(Overlap):
    def index_bytes(self) -> int:
        return 0


class CountsTheSame(Overlap):
    def index_bytes(self) -> int:
        return 1000


class CountsInFractions(Overlap):
    def index_bytes(self) -> Any:
        return super().index_bytes() / 1


class SettingsOfObjects(Overlap):
    def settings(self) -> dict[str, Any]:
        return {"model": object()}


class SettingsInAList(Overlap):
    def settings(self) -> Any:
        return ["float32"]


class TooFewSpans(Overlap):
    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        return super().token_spans(texts)[1:]


class SpansBeyondTheText(Overlap):
    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        return [[(0, len(text) + 1)] for text in texts]


class SpansBackwards(Overlap):
    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        return [spans[::-1] for spans in super().token_spans(texts)]


BROKEN: list[tuple[type[Retriever], str, str]] = [
    (FailsToLoad, "is made from its options and loads", "no such model"),
    (TooMany, "search gives one ranking a query", "2 documents, more than k=1"),
    (Unknown, "search gives one ranking a query", f"document {len(TEXTS) + 1}"),
    (NotFinite, "search gives one ranking a query", "nan"),
    (Uneven, "search gives one ranking a query", "1 numbers but 0 scores"),
    (OneTooMany, "search gives one ranking a query", "rankings for"),
    (AnswersNobody, "search of no queries", "expected []"),
    (NeedsTwo, "a corpus of one document", "a mean over no other documents"),
    (Jitters, "the same search twice", "equal rankings"),
    (Pads, "the same scores alone as among others", "alone"),
    (WorstOfTwo, "a smaller k gives the head of a larger one", "k=2"),
    (KeepsTheOld, "index replaces an earlier corpus", "the corpus has 0 to 1"),
    (Consumes, "leaves the list of documents", "[]"),
    (CountsNothing, "index_bytes", "0"),
    (CountsTheSame, "index_bytes", "1000"),
    (CountsInFractions, "index_bytes", "integers"),
    (SettingsOfObjects, "settings is a dict", "JSON serializable"),
    (SettingsInAList, "settings is a dict", "list"),
    (TooFewSpans, "token_spans", "lists"),
    (SpansBeyondTheText, "token_spans", "within the text"),
    (SpansBackwards, "token_spans", "ascending"),
]
"""A retriever, the check that it fails, and what the problem says."""


def problems(make: type[Retriever]) -> dict[str, str]:
    return {result.name: result.problem for result in validate(make) if not result.ok}


@pytest.mark.parametrize("make", [BM25, Overlap])
def test_a_sound_retriever_keeps_every_check(make: type[Retriever]) -> None:
    results = validate(make)
    assert [result for result in results if not result.ok] == []
    assert len(results) == len(CHECKS) + 1


@pytest.mark.parametrize(("make", "check", "problem"), BROKEN, ids=[make.__name__ for make, _, _ in BROKEN])
def test_a_broken_retriever_fails_exactly_its_check(make: type[Retriever], check: str, problem: str) -> None:
    found = problems(make)
    assert len(found) == 1, found
    ((name, said),) = found.items()
    assert check in name
    assert problem in said


def test_a_document_named_twice_is_told() -> None:
    assert any("document 0 more than once" in problem for problem in problems(Twice).values())


def test_every_check_has_a_broken_retriever() -> None:
    names = [" ".join((check.__doc__ or "").split()) for check in CHECKS]
    for name in names:
        assert any(check in name for _, check, _ in BROKEN), name


def test_every_check_has_a_name_of_its_own() -> None:
    names = [result.name for result in validate(Overlap)]
    assert len(set(names)) == len(names)


def test_a_problem_names_the_line_that_raised() -> None:
    (problem,) = problems(FailsToLoad).values()
    assert "OSError" in problem
    assert f"{Path(__file__).name}:" in problem


PLUGIN = """
from icr_bench.retrievers.base import Ranking, Retriever


class Mine(Retriever):
    def index(self, documents):
        self.count = len(documents)

    def search(self, queries, k):
        return [Ranking([0] * k, [1.0] * k) for _ in queries]

    def index_bytes(self):
        return 8 * self.count


RETRIEVERS = {"mine": Mine}
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    return file


def test_the_command_passes_bm25(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "bm25:k1=1.2"]) == 0
    assert f"bm25: {len(CHECKS) + 1} of {len(CHECKS) + 1} checks hold" in capsys.readouterr().out


def test_the_command_names_the_problem_of_a_plugin(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "mine", "--plugin", str(plugin)]) == 1
    out = capsys.readouterr().out
    assert "FAIL search gives one ranking a query" in out
    assert "document 0 more than once" in out
    assert "ok   search of no queries" in out


def test_the_command_passes_a_plugin_that_was_repaired(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin.write_text(PLUGIN.replace("[0] * k", "list(range(k))"))
    assert main(["validate", "mine", "--plugin", str(plugin)]) == 0
    assert "FAIL" not in capsys.readouterr().out


@pytest.mark.parametrize("spec", ["mien", "bm25:k9=1", "bm25:k1=x"])
def test_the_command_refuses_what_it_does_not_know(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", spec]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("told", "apart", "kept"),
    [
        ({}, 5e-4, True),
        ({}, 5e-3, False),
        ({"dtype": "float32", "model": "of-bfloat16"}, 5e-3, False),
        ({"dtype": "bfloat16"}, 5e-3, True),
        ({"parts": [{"settings": {"dtype": "float16"}}]}, 5e-3, True),
        ({"dtype": "bfloat16"}, 5e-2, False),
    ],
)
def test_scores_alone_may_differ_as_far_as_their_precision_goes(told: dict[str, Any], apart: float, kept: bool) -> None:
    class Drifts(Overlap):
        def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
            factor = 1 + apart * (len(queries) > 1)
            return [Ranking(r.numbers, [s * factor for s in r.scores]) for r in super().search(queries, k)]

        def settings(self) -> dict[str, Any]:
            return told

    failed = [result.name for result in validate(Drifts) if not result.ok]
    assert failed == ([] if kept else ["a query gets the same scores alone as among others"])
