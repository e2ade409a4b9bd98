"""What every benchmark's rows must satisfy before anything is measured on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from icr_bench.benchmarks.base import MOST_GRADE, DataError, Judgment, Passage, Places, Query

MOST_FINDINGS = 10
"""How many findings of one kind are listed one by one before the rest are counted."""


class Findings:
    """Collects messages by kind and lists the first few of each."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[str]] = {}

    def add(self, kind: str, message: str) -> None:
        self._kinds.setdefault(kind, []).append(message)

    def lines(self) -> list[str]:
        out = []
        for kind, messages in self._kinds.items():
            out += messages[:MOST_FINDINGS]
            if len(messages) > MOST_FINDINGS:
                out.append(f"... and {len(messages) - MOST_FINDINGS:,} more: {kind}")
        return out

    def stop(self) -> None:
        """Raise `DataError` if anything was found."""
        if self._kinds:
            raise DataError("\n".join(self.lines()))


Rows = tuple[list[Passage], list[Query], list[Judgment], list[str]]


def check(
    documents: list[Passage], queries: list[Query], judgments: list[Judgment], places: Mapping[str, Places]
) -> Rows:
    """Return the rows without identical duplicates, and warnings.

    Raises:
        DataError: with every error found (conflicting duplicates, unknown ids, an empty corpus).
    """
    errors, warnings = Findings(), Findings()

    def where(rows: str, row: int) -> str:
        return places[rows][row] if rows in places else f"{rows}[{row}]"

    def distinct(rows: str, texts: Sequence[Passage | Query]) -> dict[str, int]:
        first: dict[str, int] = {}
        for i, item in enumerate(texts):
            if item.id not in first:
                first[item.id] = i
            elif texts[first[item.id]].text == item.text:
                warnings.add(
                    "identical duplicates",
                    f"{where(rows, i)}: {item.id!r} is an identical duplicate of {where(rows, first[item.id])}",
                )
            else:
                errors.add(
                    "duplicate ids",
                    f"{where(rows, i)}: the id {item.id!r} has another text at {where(rows, first[item.id])}",
                )
        return first

    document_row = distinct("documents", documents)
    query_row = distinct("queries", queries)
    for rows, count, problem in (
        ("documents", len(documents), "the corpus is empty"),
        ("queries", len(queries), "there are no queries"),
    ):
        if not count:
            errors.add("empty", f"{places[rows].file if rows in places else rows}: {problem}")
    errors.stop()

    grades: dict[tuple[str, str], int] = {}
    for i, row in enumerate(judgments):
        pair = (row.query, row.document)
        if row.document not in document_row:
            errors.add("unknown documents", f"{where('judgments', i)}: the corpus has no document {row.document!r}")
        elif row.query not in query_row:
            errors.add("unknown queries", f"{where('judgments', i)}: there is no query {row.query!r}")
        elif abs(row.grade) > MOST_GRADE:
            told = (
                f"the grade must be {MOST_GRADE:,} at most, got {hex(row.grade):.20}"  # no decimals: they may be many
            )
            errors.add("grades", f"{where('judgments', i)}: {told}")
        elif pair not in grades:
            grades[pair] = i
        elif judgments[grades[pair]].grade == row.grade:
            warnings.add(
                "identical duplicates",
                f"{where('judgments', i)}: an identical duplicate of {where('judgments', grades[pair])}",
            )
        else:
            errors.add(
                "conflicting judgments",
                f"{where('judgments', i)}: grade {row.grade} for query {row.query!r} and document {row.document!r}, "
                f"but {judgments[grades[pair]].grade} at {where('judgments', grades[pair])}",
            )
    errors.stop()

    first_text: dict[str, int] = {}
    for i in document_row.values():
        text = documents[i].text
        if not text.strip():
            warnings.add("empty texts", f"{where('documents', i)}: document {documents[i].id!r} has no text")
        elif text in first_text:
            warnings.add(
                "equal texts",
                f"{where('documents', i)}: document {documents[i].id!r} has the text of "
                f"{documents[first_text[text]].id!r} at {where('documents', first_text[text])}",
            )
        else:
            first_text[text] = i
    for i in query_row.values():
        if not queries[i].text.strip():
            warnings.add("empty texts", f"{where('queries', i)}: query {queries[i].id!r} has no text")
        if queries[i].id in document_row:
            warnings.add(
                "query ids that are document ids",
                f"{where('queries', i)}: {queries[i].id!r} is also a document's id (see exclude_self)",
            )
    return (
        [documents[i] for i in document_row.values()],
        [queries[i] for i in query_row.values()],
        [judgments[i] for i in grades.values()],
        warnings.lines(),
    )
