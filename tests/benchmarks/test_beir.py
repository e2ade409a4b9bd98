"""Folders in BEIR layout: what may stand in them, what is refused with file and line, and ``icr-bench lint``."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from icr_bench.benchmarks.base import Benchmark, DataError
from icr_bench.benchmarks.beir import beir, find_splits, hotpotqa, msmarco, nq
from icr_bench.harness.cli import main

CORPUS = """\
{"_id": "d0", "title": "Zero", "text": "nought"}
{"_id": "d1", "title": "", "text": "one"}
{"_id": "d2", "text": "two"}
{"_id": "d3", "title": null, "text": "three"}
"""
QUERIES = """\
{"_id": "q0", "text": "what is nothing"}
{"_id": "q1", "text": "what is single"}
"""
HEADER = "query-id\tcorpus-id\tscore\n"
QRELS = HEADER + "q0\td0\t2\nq0\td2\t0\nq1\td1\t1\n"
QRELS_JSONL = """\
{"query-id": "q0", "corpus-id": "d0", "score": 2}
{"query-id": "q0", "corpus-id": "d2", "score": 0}
{"query-id": "q1", "corpus-id": "d1", "score": 1}
"""
JUDGMENTS = {"q0": {"d0": 2, "d2": 0}, "q1": {"d1": 1}}

Files = Mapping[str, str | bytes | None]


def layout(folder: Path, changes: Files | None = None) -> Path:
    """Write a small benchmark; ``changes`` replaces, adds or (None) leaves out files, and packs those named .gz."""
    files: dict[str, str | bytes | None] = {"corpus.jsonl": CORPUS, "queries.jsonl": QUERIES, "qrels/test.tsv": QRELS}
    for name, content in (files | dict(changes or {})).items():
        if content is not None:
            data = content.encode() if isinstance(content, str) else content
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder


def texts(benchmark: Benchmark) -> dict[str, str]:
    return {d.id: d.text for d in benchmark.documents}


# --- what may stand in a folder


def test_documents_queries_and_judgments_are_read(tmp_path: Path) -> None:
    benchmark = beir(path=layout(tmp_path))
    assert [d.id for d in benchmark.documents] == ["d0", "d1", "d2", "d3"]
    assert {q.id: q.text for q in benchmark.queries} == {"q0": "what is nothing", "q1": "what is single"}
    assert benchmark.judgments == JUDGMENTS
    assert benchmark.warnings == ()


def test_a_title_is_joined_by_one_space_and_may_be_empty_absent_or_null(tmp_path: Path) -> None:
    assert texts(beir(path=layout(tmp_path))) == {"d0": "Zero nought", "d1": "one", "d2": "two", "d3": "three"}


@pytest.mark.parametrize("name", ["msmarco", "hotpotqa", "nq", "beir"])
def test_every_name_reads_the_same_layout(tmp_path: Path, name: str) -> None:
    read = {"msmarco": msmarco, "hotpotqa": hotpotqa, "nq": nq, "beir": beir}[name]
    assert read(path=layout(tmp_path), split="test") == beir(path=tmp_path)


FORMS: dict[str, Files] = {
    "packed corpus": {"corpus.jsonl": None, "corpus.jsonl.gz": CORPUS},
    "packed queries": {"queries.jsonl": None, "queries.jsonl.gz": QUERIES},
    "packed tsv": {"qrels/test.tsv": None, "qrels/test.tsv.gz": QRELS},
    "jsonl in the folder": {"qrels/test.tsv": None, "qrels/test.jsonl": QRELS_JSONL},
    "packed jsonl in the folder": {"qrels/test.tsv": None, "qrels/test.jsonl.gz": QRELS_JSONL},
    "jsonl beside the corpus": {"qrels/test.tsv": None, "qrels.jsonl": QRELS_JSONL},
    "packed jsonl beside the corpus": {"qrels/test.tsv": None, "qrels.jsonl.gz": QRELS_JSONL},
    "CRLF corpus": {"corpus.jsonl": CORPUS.replace("\n", "\r\n")},
    "CRLF queries": {"queries.jsonl": QUERIES.replace("\n", "\r\n")},
    "CRLF tsv": {"qrels/test.tsv": QRELS.replace("\n", "\r\n")},
    "BOM corpus": {"corpus.jsonl": "\ufeff" + CORPUS},
    "BOM queries": {"queries.jsonl": "\ufeff" + QUERIES},
    "BOM tsv": {"qrels/test.tsv": "\ufeff" + QRELS},
    "BOM jsonl": {"qrels/test.tsv": None, "qrels.jsonl": "\ufeff" + QRELS_JSONL},
    "packed with BOM and CRLF": {"corpus.jsonl": None, "corpus.jsonl.gz": "\ufeff" + CORPUS.replace("\n", "\r\n")},
    "corpus without last line feed": {"corpus.jsonl": CORPUS.removesuffix("\n")},
    "tsv without last line feed": {"qrels/test.tsv": QRELS.removesuffix("\n")},
    "blank lines": {"corpus.jsonl": CORPUS.replace("\n", "\n\n"), "qrels/test.tsv": QRELS + "\n"},
    "further fields": {"corpus.jsonl": CORPUS.replace('"d2"', '"d2", "metadata": {"url": "x"}')},
    "further files": {"README.md": "# notes", "qrels/notes.txt": "not a split"},
}


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_the_same_data_in_another_form_is_the_same_benchmark(tmp_path: Path, changes: Files) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    benchmark, plain = beir(path=layout(tmp_path / "other", changes)), beir(path=layout(tmp_path / "plain"))
    assert benchmark.choose().at(4) == plain.choose().at(4)
    assert benchmark.warnings == ()


SEPARATORS = "\x85\u2028\u2029"


def test_control_characters_inside_a_text_do_not_end_its_line(tmp_path: Path) -> None:
    row = json.dumps({"_id": "d4", "text": f"a{SEPARATORS}b\x9dc"}, ensure_ascii=False)
    query = json.dumps({"_id": "q2", "text": f"{SEPARATORS}?"}, ensure_ascii=False)
    benchmark = beir(path=layout(tmp_path, {"corpus.jsonl": f"{CORPUS}{row}\n", "queries.jsonl": f"{QUERIES}{query}"}))
    assert texts(benchmark)["d4"] == f"a{SEPARATORS}b\x9dc"
    assert benchmark.queries[-1].text == f"{SEPARATORS}?"


def test_escaped_control_characters_are_kept_as_they_are(tmp_path: Path) -> None:
    row = r'{"_id": "d4", "text": "\u00e2\u0080\u0099 \u0085 \n \r\n \t \u2028"}'
    benchmark = beir(path=layout(tmp_path, {"corpus.jsonl": f"{CORPUS}{row}\n"}))
    assert texts(benchmark)["d4"] == "\xe2\x80\x99 \x85 \n \r\n \t \u2028"


@pytest.mark.parametrize(
    "name",
    ["Geneva Durben", " leading and trailing ", "Żółw\xa0ß", "a:b,c=d", "0", f"x{SEPARATORS}\x0b\x0c\x1c\x1e", "\x85"],
    ids=ascii,
)
@pytest.mark.parametrize("qrels", ["qrels/test.tsv", "qrels.jsonl"])
def test_ids_may_hold_spaces_and_other_characters(tmp_path: Path, name: str, qrels: str) -> None:
    judgment = {"query-id": name, "corpus-id": name, "score": 1}
    changes: dict[str, str | None] = {
        "corpus.jsonl": CORPUS + json.dumps({"_id": name, "text": "x"}),
        "queries.jsonl": QUERIES + json.dumps({"_id": name, "text": "y"}),
        "qrels/test.tsv": None,
        qrels: json.dumps(judgment) if qrels == "qrels.jsonl" else f"{HEADER}{name}\t{name}\t1\n",
    }
    assert beir(path=layout(tmp_path, changes)).judgments == {name: {name: 1}}


def test_negative_and_zero_grades_are_read(tmp_path: Path) -> None:
    benchmark = beir(path=layout(tmp_path, {"qrels/test.tsv": HEADER + "q0\td0\t-2\nq0\td1\t0\nq1\td2\t3\n"}))
    assert benchmark.judgments == {"q0": {"d0": -2, "d1": 0}, "q1": {"d2": 3}}


# --- splits

DEV = HEADER + "q1\td3\t1\n"


def test_test_is_the_default_split(tmp_path: Path) -> None:
    assert beir(path=layout(tmp_path, {"qrels/dev.tsv": DEV})).judgments == JUDGMENTS


def test_the_only_split_is_the_default_where_there_is_no_test(tmp_path: Path) -> None:
    assert beir(path=layout(tmp_path, {"qrels/test.tsv": None, "qrels/dev.tsv": DEV})).judgments == {"q1": {"d3": 1}}


def test_a_named_split_is_taken(tmp_path: Path) -> None:
    assert beir(path=layout(tmp_path, {"qrels/dev.tsv": DEV}), split="dev").judgments == {"q1": {"d3": 1}}


def test_several_splits_without_test_and_no_choice_is_an_error_that_lists_them(tmp_path: Path) -> None:
    changes = {"qrels/test.tsv": None, "qrels/dev.tsv": DEV, "qrels/train.jsonl.gz": QRELS_JSONL}
    with pytest.raises(DataError, match="splits: dev, train"):
        beir(path=layout(tmp_path, changes))


def test_an_unknown_split_is_an_error_that_names_it_and_lists_the_others(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no split 'train'.* dev, test"):
        beir(path=layout(tmp_path, {"qrels/dev.tsv": DEV}), split="train")


@pytest.mark.parametrize("second", ["qrels.jsonl", "qrels/test.jsonl", "qrels/test.tsv.gz"])
def test_two_files_for_one_split_are_an_error_that_names_both(tmp_path: Path, second: str) -> None:
    content = QRELS_JSONL if "jsonl" in second else QRELS
    with pytest.raises(DataError) as raised:
        beir(path=layout(tmp_path, {second: content}))
    assert str(tmp_path / "qrels/test.tsv") in str(raised.value)
    assert str(tmp_path / second) in str(raised.value)


def test_splits_are_found_by_name(tmp_path: Path) -> None:
    layout(tmp_path, {"qrels/dev.tsv.gz": DEV, "qrels/train.v2.jsonl": QRELS_JSONL, "qrels/notes.txt": ""})
    assert list(find_splits(tmp_path)) == ["dev", "test", "train.v2"]


def test_queries_that_only_another_split_judges_are_not_warned_about(tmp_path: Path) -> None:
    chosen = beir(path=layout(tmp_path, {"qrels/dev.tsv": DEV}), split="dev").choose()
    assert [q.id for q in chosen.queries] == ["q1"]
    assert chosen.warnings == ()


def test_queries_that_no_split_judges_are_warned_about(tmp_path: Path) -> None:
    changes = {"queries.jsonl": QUERIES + '{"_id": "q2", "text": "nobody asks"}\n', "qrels/dev.tsv": DEV}
    (warning,) = beir(path=layout(tmp_path, changes)).choose().warnings
    assert warning.startswith(f"{tmp_path / 'queries.jsonl'}:3: query 'q2' has no gold")


def test_lines_of_queries_are_right_where_another_split_judges_earlier_ones(tmp_path: Path) -> None:
    queries = QUERIES + '{"_id": "q2", "text": ""}\n'
    dev, test = HEADER + "q2\td3\t1\n", HEADER + "q0\td0\t1\nq1\td1\t1\n"
    changes = {"queries.jsonl": queries, "qrels/dev.tsv": dev, "qrels/test.tsv": test}
    (warning,) = beir(path=layout(tmp_path, changes), split="dev").warnings
    assert warning == f"{tmp_path / 'queries.jsonl'}:3: query 'q2' has no text"


# --- malformed lines

BAD_LINES: list[tuple[str, str, str | bytes, int, str]] = [
    ("JSON cut off", "corpus.jsonl", CORPUS + '{"_id": "d4", "text"\n', 5, "not JSON"),
    ("JSON of another type", "corpus.jsonl", '["d0", "x"]\n' + CORPUS, 1, "expected a JSON object"),
    ("two objects on a line", "queries.jsonl", QUERIES.replace("\n", " ", 1), 1, "not JSON"),
    ("after blank lines", "corpus.jsonl", "\n\n" + CORPUS + "\n\nx\n", 9, "not JSON"),
    ("no id", "corpus.jsonl", CORPUS.replace('"_id": "d1", ', ""), 2, "'_id' .*missing"),
    ("no text", "corpus.jsonl", CORPUS.replace(', "text": "two"', ""), 3, "'text' .*missing"),
    ("null text", "corpus.jsonl", CORPUS.replace('"two"', "null"), 3, "'text' must be a string, got None"),
    ("number as id", "corpus.jsonl", CORPUS.replace('"d2"', "2"), 3, "'_id' must be a string, got 2"),
    ("empty id", "corpus.jsonl", CORPUS.replace('"d3"', '""'), 4, "'_id' is empty"),
    ("number as title", "corpus.jsonl", CORPUS.replace('"Zero"', "0"), 1, "'title' must be"),
    ("query without text", "queries.jsonl", QUERIES + '{"_id": "q2"}\n', 3, "'text' .*missing"),
    ("number as query id", "queries.jsonl", QUERIES.replace('"q1"', "1"), 2, "'_id' must be a string, got 1"),
    ("no header", "qrels/test.tsv", QRELS.removeprefix(HEADER), 1, "wrong header"),
    ("another header", "qrels/test.tsv", QRELS.replace("corpus-id", "doc-id"), 1, "wrong header.*doc-id"),
    ("header with spaces", "qrels/test.tsv", QRELS.replace("\t", " "), 1, "wrong header"),
    ("empty qrels", "qrels/test.tsv", "", 1, "wrong header"),
    ("TREC qrels", "qrels/test.tsv", "q0 0 d0 2\n", 1, "wrong header"),
    ("two columns", "qrels/test.tsv", QRELS + "q1\td1\n", 5, "expected 3 tab-separated fields, got 2"),
    ("four columns", "qrels/test.tsv", QRELS + "q1\t0\td1\t1\n", 5, "expected 3 tab-separated fields, got 4"),
    ("fraction", "qrels/test.tsv", QRELS + "q1\td2\t0.5\n", 5, "integer, got '0.5'"),
    ("word as score", "qrels/test.tsv", QRELS + "q1\td2\thigh\n", 5, "integer, got 'high'"),
    ("empty score", "qrels/test.tsv", QRELS + "q1\td2\t\n", 5, "integer, got ''"),
    ("fraction in JSON", "qrels.jsonl", QRELS_JSONL.replace("2}", "2.5}"), 1, "integer, got 2.5"),
    ("null in JSON", "qrels.jsonl", QRELS_JSONL.replace(": 1}", ": null}"), 3, "integer, got None"),
    ("true in JSON", "qrels.jsonl", QRELS_JSONL.replace(": 1}", ": true}"), 3, "integer, got True"),
    ("score missing", "qrels.jsonl", QRELS_JSONL.replace(', "score": 0', ""), 2, "'score' .*missing"),
    ("query missing", "qrels.jsonl", QRELS_JSONL.replace('"query-id": "q1", ', ""), 3, "'query-id' .*missing"),
    ("number as document", "qrels.jsonl", QRELS_JSONL.replace('"d1"', "1"), 3, "'corpus-id' must be a string, got 1"),
    ("Latin-1", "corpus.jsonl", CORPUS.replace("nought", "Café").encode("latin-1"), 1, "not UTF-8"),
    ("UTF-16", "queries.jsonl", QUERIES.encode("utf-16"), 1, "not UTF-8"),
    ("Latin-1 judgment", "qrels/test.tsv", QRELS.encode() + b"q\xe9\td0\t1\n", 5, "not UTF-8"),
    ("packed", "corpus.jsonl.gz", CORPUS + "{\n", 5, "not JSON"),
    ("packed Latin-1", "queries.jsonl.gz", QUERIES.encode() + b"\xe9\n", 3, "not UTF-8"),
    ("unknown document", "qrels/test.tsv", QRELS + "q1\td9\t1\n", 5, "no document 'd9'"),
    ("unknown query", "qrels/test.tsv", QRELS + "q9\td1\t1\n", 5, "no query 'q9'"),
    ("conflicting judgments", "qrels/test.tsv", QRELS + "\nq1\td1\t2\n", 6, "grade 2 .* but 1 at .*test.tsv:4"),
    ("id with another text", "corpus.jsonl", CORPUS + '{"_id": "d1", "text": "uno"}', 5, "'d1' .* at .*corpus.jsonl:2"),
    ("id with another title", "corpus.jsonl", CORPUS + '{"_id": "d2", "title": "T", "text": "two"}', 5, "another text"),
    ("query twice", "queries.jsonl", QUERIES + '{"_id": "q0", "text": "?"}', 3, "'q0' .* at .*queries.jsonl:1"),
]


@pytest.mark.parametrize(
    ("name", "content", "line", "problem"), [row[1:] for row in BAD_LINES], ids=[row[0] for row in BAD_LINES]
)
def test_a_bad_line_is_an_error_that_names_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, line: int, problem: str
) -> None:
    changes: dict[str, str | bytes | None] = {name.removesuffix(".gz"): None}
    if name == "qrels.jsonl":
        changes["qrels/test.tsv"] = None
    with pytest.raises(DataError) as raised:
        beir(path=layout(tmp_path, changes | {name: content}))
    (message,) = str(raised.value).splitlines()
    assert re.match(f"{re.escape(str(tmp_path / name))}:{line}: .*{problem}", message)


def test_all_bad_lines_of_a_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        beir(path=layout(tmp_path, {"corpus.jsonl": "x\n" + CORPUS + '{"_id": 4}\n'}))
    places = [line.split(": ")[0] for line in str(raised.value).splitlines()]
    assert places == [f"{tmp_path}/corpus.jsonl:{line}" for line in (1, 6, 6)]


def test_ten_bad_lines_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        beir(path=layout(tmp_path, {"qrels/test.tsv": QRELS + "q1\n" * 30}))
    *listed, rest = str(raised.value).splitlines()
    assert len(listed) == 10
    assert rest == "... and 20 more: malformed lines"


def test_json_nested_too_deeply_is_a_malformed_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus\.jsonl:5: not JSON"):
        beir(path=layout(tmp_path, {"corpus.jsonl": CORPUS + "[" * 100_000}))


@pytest.mark.parametrize("score", ["1_0", "\uff11", "\u0661"], ids=ascii)
def test_a_score_is_written_in_plain_digits(tmp_path: Path, score: str) -> None:
    with pytest.raises(DataError, match=r"test\.tsv:5: the score must be an integer"):
        beir(path=layout(tmp_path, {"qrels/test.tsv": f"{QRELS}q1\td2\t{score}\n"}))


@pytest.mark.parametrize("score", ["2147483648", "-2147483648", "1" + "0" * 400, "9" * 5_000], ids=len)
def test_a_score_beyond_all_reason_is_refused(tmp_path: Path, score: str) -> None:
    with pytest.raises(DataError, match=r"test\.tsv:5: the score must be 2,147,483,647 at most, got -?\d+$"):
        beir(path=layout(tmp_path, {"qrels/test.tsv": f"{QRELS}q1\td2\t{score}\n"}))


def test_the_largest_score_is_a_gain(tmp_path: Path) -> None:
    read = beir(path=layout(tmp_path, {"qrels/test.tsv": f"{QRELS}q1\td2\t2147483647\n"}))
    assert read.judgments["q1"]["d2"] == 2**31 - 1


@pytest.mark.parametrize("row", [r'{"_id": "d\ud800", "text": "x"}', r'{"_id": "d4", "text": "\udc00"}'])
def test_text_that_is_no_unicode_is_a_malformed_line(tmp_path: Path, row: str) -> None:
    with pytest.raises(DataError, match=r"corpus\.jsonl:5: "):
        beir(path=layout(tmp_path, {"corpus.jsonl": CORPUS + row}))


# --- files that are missing or cannot be read


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"corpus.jsonl": None}, "no corpus.jsonl"),
        ({"queries.jsonl": None}, "no queries.jsonl"),
        ({"qrels/test.tsv": None}, "no judgments; expected qrels/<split>.tsv or qrels.jsonl"),
        ({"qrels/test.tsv": None, "qrels/test.txt": QRELS}, "no judgments"),
        ({"qrels/test.tsv": None, "qrels.tsv": QRELS}, "no judgments"),
    ],
    ids=["no corpus", "no queries", "no judgments", "not a .tsv", "tsv beside the corpus"],
)
def test_a_folder_that_is_not_beir_is_an_error_that_names_it(tmp_path: Path, changes: Files, problem: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path))}: {problem}"):
        beir(path=layout(tmp_path, changes))


@pytest.mark.parametrize("name", ["missing", "corpus.jsonl"])
def test_a_path_that_is_no_folder_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    path = layout(tmp_path) / name
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: no such folder"):
        beir(path=path)


@pytest.mark.parametrize(
    ("name", "problem"), [("corpus.jsonl", "the corpus is empty"), ("queries.jsonl", "there are no queries")]
)
@pytest.mark.parametrize("content", ["", "\n \n"], ids=["no byte", "blank lines"])
def test_an_empty_file_is_an_error_that_names_it(tmp_path: Path, name: str, problem: str, content: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path / name))}: {problem}"):
        beir(path=layout(tmp_path, {name: content}))


def packed(tmp_path: Path, damage: Callable[[bytes], bytes]) -> Path:
    """A benchmark with a damaged ``corpus.jsonl.gz`` of 2,000 documents."""
    rng = random.Random(0)
    rows = [json.dumps({"_id": f"d{i}", "text": f"{rng.getrandbits(400):x}"}) for i in range(2000)]
    folder = layout(tmp_path, {"corpus.jsonl": None})
    (folder / "corpus.jsonl.gz").write_bytes(damage(gzip.compress("\n".join(rows).encode(), mtime=0)))
    return folder


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut in the middle": lambda data: data[: len(data) // 2],
    "cut before its end": lambda data: data[:-4],
    "wrong checksum": lambda data: data[:-8] + bytes(8),
    "not packed": lambda data: CORPUS.encode(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_gz_is_an_error_that_names_the_file(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path / 'corpus.jsonl.gz'))}.*: cannot be read: "):
        beir(path=packed(tmp_path, damage))


def test_a_gz_with_wrong_bytes_inside_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus\.jsonl\.gz.*: cannot be read: "):
        beir(path=packed(tmp_path, lambda data: data[:30] + bytes(len(data) - 60) + data[-30:]))


def test_a_truncated_gz_is_an_error_that_names_the_line_reached(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        beir(path=packed(tmp_path, DAMAGE["cut in the middle"]))
    line = re.search(r"corpus\.jsonl\.gz:(\d+): ", str(raised.value))
    assert line
    assert 500 < int(line[1]) < 1500


# --- icr-bench lint

Lint = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def lint(capsys: pytest.CaptureFixture[str]) -> Iterator[Lint]:
    """Run ``icr-bench lint`` and give back its exit code, standard output and standard error."""

    def run(spec: str) -> tuple[int, str, str]:
        code = main(["lint", spec])
        return code, *capsys.readouterr()

    handler = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, handler)


def test_lint_counts_clean_data_and_exits_0(tmp_path: Path, lint: Lint) -> None:
    code, out, err = lint(f"beir:path={layout(tmp_path)}")
    assert (code, err) == (0, "")
    assert out == "beir: 4 documents, 2 declared queries, 2 gold documents, no errors\n"


def test_lint_names_file_and_line_of_every_warning_and_exits_0(tmp_path: Path, lint: Lint) -> None:
    corpus = CORPUS + '{"_id": "d4", "text": "two"}\n{"_id": "q1", "text": " "}\n{"_id": "d2", "text": "two"}\n'
    queries = QUERIES + '{"_id": "q2", "text": ""}\n'
    changes = {"corpus.jsonl": corpus, "queries.jsonl": queries, "qrels/test.tsv": QRELS + "q0\td0\t2\n"}
    code, out, err = lint(f"beir:path={layout(tmp_path, changes)}")
    *warnings, summary = out.splitlines()
    assert (code, err) == (0, "")
    assert len(warnings) == 7
    assert "no errors" in summary
    expected = [
        ("corpus.jsonl:5", "'d4' has the text of 'd2' at .*corpus.jsonl:3"),
        ("corpus.jsonl:6", "'q1' has no text"),
        ("corpus.jsonl:7", "'d2' is an identical duplicate of .*corpus.jsonl:3"),
        ("qrels/test.tsv:5", "identical duplicate of .*test.tsv:2"),
        ("queries.jsonl:2", "'q1' is also a document's id"),
        ("queries.jsonl:3", "'q2' has no gold"),
        ("queries.jsonl:3", "'q2' has no text"),
    ]
    for warning, (place, problem) in zip(sorted(warnings), expected, strict=True):
        assert re.match(f"warning: {re.escape(str(tmp_path / place))}: .*{problem}", warning)


def test_lint_names_file_and_line_of_an_error_and_exits_3(tmp_path: Path, lint: Lint) -> None:
    code, out, err = lint(f"beir:path={layout(tmp_path, {'qrels/test.tsv': QRELS + 'q1	d9	1'})}")
    assert (code, out) == (3, "")
    assert err == f"icr-bench: {tmp_path}/qrels/test.tsv:5: the corpus has no document 'd9'\n"


@pytest.mark.parametrize("changes", [{"corpus.jsonl": None}, {"queries.jsonl": ""}, {"qrels/test.tsv": "x"}], ids=repr)
def test_lint_of_data_that_cannot_be_used_exits_3_and_names_it(tmp_path: Path, lint: Lint, changes: Files) -> None:
    code, out, err = lint(f"beir:path={layout(tmp_path, changes)}")
    assert (code, out) == (3, "")
    assert err.startswith(f"icr-bench: {tmp_path}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("beir", "path"),
        ("beir:path=x,splitt=dev", "did you mean split"),
        ("beer:path=x", "did you mean beir"),
        ("beir:path=x,relevant=0", "relevant"),
        ("beir:path=x,queries=many", "queries"),
    ],
)
def test_lint_of_a_spec_that_cannot_be_used_exits_2(lint: Lint, spec: str, message: str) -> None:
    code, out, err = lint(spec)
    assert (code, out) == (2, "")
    assert message in err


def test_lint_refuses_more_queries_than_are_declared_with_both_numbers(tmp_path: Path, lint: Lint) -> None:
    code, _, err = lint(f"beir:path={layout(tmp_path)},queries=5")
    assert code == 2
    assert re.search(r"\b5\b.*\b2\b", err)


@pytest.mark.parametrize("rows", ["", "q0\td0\t0\nq1\td1\t0\n"], ids=["no judgment", "grade 0 alone"])
def test_lint_names_the_judgments_in_which_no_query_has_a_gold(tmp_path: Path, lint: Lint, rows: str) -> None:
    code, _, err = lint(f"beir:path={layout(tmp_path, {'qrels/test.tsv': HEADER + rows})}")
    assert code == 3
    assert str(tmp_path) in err


def test_lint_blames_an_empty_split_not_the_queries(tmp_path: Path, lint: Lint) -> None:
    code, _, err = lint(f"beir:path={layout(tmp_path, {'qrels/dev.tsv': HEADER})},split=dev")
    assert code == 3
    assert "there are no queries" not in err
    assert "dev.tsv" in err


# --- real data


@pytest.mark.skipif("ICR_BENCH_DATA" not in os.environ, reason="ICR_BENCH_DATA names no folder of real samples")
@pytest.mark.parametrize(
    ("name", "split", "documents", "queries", "judgments"),
    [
        ("msmarco", "test", 9996, 97, 3355),
        ("msmarco", "dev", 9996, 400, 403),
        ("hotpotqa", None, 4937, 500, 1000),
        ("nq", None, 8743, 441, 441),
        ("limit-small", None, 46, 1000, 2000),
    ],
)
def test_real_samples_have_the_counts_that_their_notes_state(
    name: str, split: str | None, documents: int, queries: int, judgments: int
) -> None:
    chosen = beir(path=Path(os.environ["ICR_BENCH_DATA"]) / name, split=split).choose()
    assert len(chosen.documents) == documents
    assert len(chosen.queries) == queries
    assert sum(map(len, chosen.at(documents).judgments.values())) == judgments
    assert not [warning for warning in chosen.warnings if "has no gold" in warning or "has no text" in warning]
