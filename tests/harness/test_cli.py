"""The command line: exit codes, messages, names, help."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from icr_bench.harness.cli import main, parser

COMMANDS = {
    "baseline",
    "build",
    "claims",
    "compare",
    "curve",
    "describe",
    "diagnose",
    "doctor",
    "export",
    "lint",
    "list",
    "plan",
    "plot",
    "recommend",
    "report",
    "run",
    "table",
    "train",
    "validate",
}

RUN_FLAGS = (
    "-b --benchmark -r --retriever -n -k --seed --queries --latency-queries --device --dtype --timeout "
    "--memory-limit --budget --plugin -o --output --fresh --retry-failed --dry-run -h --help"
)


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Answer]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process."""

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        try:
            code: object = main([*map(str, arguments)])
        except SystemExit as ended:  # how argparse ends a command
            code = ended.code
        assert isinstance(code, int)
        return Answer(code, *capsys.readouterr())

    return call


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder in BEIR layout: twelve documents, four queries, four golds."""
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    write(folder / "corpus.jsonl", *({"_id": f"d{i}", "text": f"word{i} text"} for i in range(12)))
    write(folder / "queries.jsonl", *({"_id": f"q{i}", "text": f"word{i}"} for i in range(4)))
    write(folder / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", *(f"q{i}\td{i}\t1" for i in range(4)))
    return folder


def write(file: Path, *lines: object) -> None:
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def refused(answer: Answer, code: int, *parts: str) -> None:
    """One line on standard error that holds all parts, no traceback, nothing on standard output."""
    assert answer.code == code, answer.err
    assert "Traceback" not in answer.err
    last = answer.err.strip().splitlines()
    assert len(last) == 1 or last[0].startswith("usage: ")
    for part in parts:
        assert part in last[-1]
    assert not answer.out


# Usage: exit code 2


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        ("3", ("n=3", "4 gold documents")),
        ("6,13", ("n=13", "12 documents")),
        ("0", ("'0'",)),
        ("-1", ("'-1'",)),
        ("x", ("'x'",)),
        ("2.5", ("'2.5'",)),
        ("6,,7", ("''",)),
        pytest.param("9" * 400, ("999",), id="400 digits"),
    ],
)
def test_sizes_that_cannot_be(cli: Cli, data: Path, tmp_path: Path, size: str, parts: tuple[str, ...]) -> None:
    refused(cli("run", "-b", f"beir:path={data}", "-n", size, "-o", tmp_path / "out"), 2, *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("-k", "0"),
        ("-k", "-1"),
        ("-k", "x"),
        ("-k", "2.5"),
        ("--seed", "-1"),
        ("--seed", "x"),
        ("--queries", "0"),
        ("--queries", "x"),
        ("--queries", "1,2"),
        ("--latency-queries", "0"),
        ("--timeout", "0"),
        ("--timeout", "x"),
        ("--timeout", "nan"),
        ("--memory-limit", "0"),
        ("--memory-limit", "lots"),
        ("--device", "gpu"),
        ("--dtype", "int3"),
    ],
)
def test_values_of_flags_that_cannot_be(cli: Cli, data: Path, tmp_path: Path, flag: str, value: str) -> None:
    answer = cli("run", "-b", f"beir:path={data}", flag, value, "-o", tmp_path / "out")
    refused(answer, 2, flag.strip("-"), value)
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_is_not_there(cli: Cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    answer = cli("run", "-b", f"beir:path={data}", "--device", "cuda:3", "-o", tmp_path / "out")
    refused(answer, 2, "cuda:3", "0 CUDA devices")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("run", "defualt"), ("suite 'defualt'", "did you mean default?")),
        (("run", "-r", "bm52"), ("retriever 'bm52'", "did you mean bm25?")),
        (("run", "-b", "beer"), ("benchmark 'beer'", "did you mean beir?")),
        (("run", "-r", "bm25:stopword=english"), ("'stopword'", "did you mean stopwords?")),
        (("run", "-b", "limit:lykes=20"), ("'lykes'", "did you mean likes?")),
        (("run", "-r", "blocksearch-smax"), ("retriever 'blocksearch-smax'", "did you mean blocksearch-ssmax ")),
        (("plan", "-r", "blocksearch-sinks"), ("retriever 'blocksearch-sinks'", "did you mean blocksearch-sink ")),
        (("describe", "densse"), ("name 'densse'", "did you mean dense or ")),
        (("validate", "bm52"), ("retriever 'bm52'", "did you mean bm25?")),
        (("lint", "limti"), ("benchmark 'limti'", "did you mean limit?")),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    flags = ("-o", tmp_path / "out") if arguments[0] == "run" else ()
    refused(cli(*arguments, *flags), 2, *parts)
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_like_no_other_is_answered_with_all(cli: Cli) -> None:
    refused(cli("run", "-r", "zzzzzz"), 2, "there are: api, attention, blocksearch, ", ", bm25, dense")


@pytest.mark.parametrize(("key", "closest"), [("max_token", "max_tokens"), ("exclude_sefl", "exclude_self")])
def test_an_option_of_every_benchmark_is_among_the_closest(cli: Cli, data: Path, key: str, closest: str) -> None:
    refused(cli("run", "-b", f"beir:path={data},{key}=3"), 2, f"did you mean {closest}?")


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("bm25:k1", ("expected key=value", "'k1'")),
        ("bm25:k1=1,k1=2", ("k1 is given twice",)),
        ("bm25:k1=x", ("k1", "'x'")),
        ("bm25:k1=-1", ("k1", "-1")),
        ("bm25:b=2", ("b must be between 0 and 1", "2")),
        ("bm25:backend=lucene", ("backend", "'lucene'", "bm25s, rank-bm25")),
        ("bm25:pattern=(", ("pattern", "'('")),
        ("dense", ("model=",)),
        (":k1=1", ("name is missing",)),
    ],
)
def test_a_retriever_that_cannot_be(cli: Cli, data: Path, tmp_path: Path, spec: str, parts: tuple[str, ...]) -> None:
    refused(cli("run", "-b", f"beir:path={data}", "-r", spec, "-o", tmp_path / "out"), 2, *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("queries=0", ("queries", "0")),
        ("queries=5", ("queries=5", "4")),
        ("queries=x", ("queries", "'x'")),
        ("relevant=0", ("relevant", "0")),
        ("max_tokens=0", ("max_tokens", "0")),
        ("exclude_self=maybe", ("exclude_self", "'maybe'")),
    ],
)
def test_a_benchmark_that_cannot_be(cli: Cli, data: Path, tmp_path: Path, option: str, parts: tuple[str, ...]) -> None:
    refused(cli("run", "-b", f"beir:path={data},{option}", "-o", tmp_path / "out"), 2, *parts)
    assert not (tmp_path / "out").exists()


def test_a_benchmark_without_its_path(cli: Cli) -> None:
    refused(cli("run", "-b", "beir"), 2, "beir needs path=")


def test_two_rows_of_one_name(cli: Cli, data: Path) -> None:
    refused(cli("run", "-b", f"beir:path={data}", "-r", "bm25", "-r", "bm25:b=0"), 2, "'bm25'", "label=")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("benchmrk: limit\nretriever: bm25\n", (":1:", "'benchmrk'", "did you mean benchmark?")),
        ("benchmark: limit\n\nretreiver: bm25\n", (":3:", "'retreiver'", "did you mean retriever?")),
        ("benchmark: [limit\nretriever: bm25\n", (":2:", "not YAML")),
        ("- limit\n", ("mapping", "list")),
        ("", ("mapping",)),
        ("benchmark: limit\n", ("no retriever is named",)),
        ("benchmark: limit\nretriever: {k1: 1}\n", ("retriever", "name")),
        ("benchmark: 'beir:path=${NOT_SET_ANYWHERE}'\nretriever: bm25\n", ("NOT_SET_ANYWHERE",)),
        ("benchmark: limit\nretriever: bm25\nn: many\n", ("'many'",)),
    ],
)
def test_a_suite_file_that_cannot_be(cli: Cli, tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text(text)
    refused(cli("run", file, "-o", tmp_path / "out"), 2, *parts)
    assert not (tmp_path / "out").exists()


def test_a_suite_file_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    refused(cli("run", tmp_path / "none.yaml"), 2, "none.yaml")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("import no_such_module\n", (":1:", "no_such_module")),
        ("x = 1\n1 / 0\n", (":2:", "ZeroDivisionError")),
        ("x = 1\nx = (\n", (":2:", "SyntaxError")),
        ("x = 1\n", ("neither RETRIEVERS nor BENCHMARKS",)),
        ("RETRIEVERS = ['fake']\n", ("RETRIEVERS must be a dict", "list")),
        ("RETRIEVERS = {'bm25': dict}\n", ("'bm25' exists already",)),
        ("raise SystemExit(0)\n", ("SystemExit",)),
    ],
)
def test_a_plugin_that_fails_to_import(cli: Cli, tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    refused(cli("run", "--plugin", file, "-o", tmp_path / "out"), 2, "broken.py", *parts)
    assert not (tmp_path / "out").exists()


def test_a_plugin_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    refused(cli("run", "--plugin", tmp_path / "none.py"), 2, "none.py", "no such file")


def test_an_unknown_name_of_a_plugin(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: pass\nRETRIEVERS = {'my-retriever': Mine}\n")
    answer = cli("run", "--plugin", tmp_path / "mine.py", "-r", "my-retreiver")
    refused(answer, 2, "did you mean my-retriever?")


def test_flags_that_are_not_there(cli: Cli) -> None:
    refused(cli("run", "--fersh"), 2, "--fersh")


def test_flags_are_not_abbreviated(cli: Cli) -> None:
    refused(cli("run", "--fre"), 2, "--fre")


def test_commands_that_are_not_there(cli: Cli) -> None:
    refused(cli("rnu"), 2, "'rnu'")


def test_a_benchmark_plugin_that_raises_is_told(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def broken():\n    return {}['documents']\n\nBENCHMARKS = {'broken': broken}\n")
    answer = cli("run", "--plugin", file, "-b", "broken", "-o", tmp_path / "out")
    assert answer.code in (2, 3)
    assert "broken" in answer.err


def test_a_benchmark_plugin_that_makes_something_else_is_told(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def broken():\n    return []\n\nBENCHMARKS = {'broken': broken}\n")
    refused(cli("run", "--plugin", file, "-b", "broken"), 2, "broken", "expected a Benchmark, got list")


# Data: exit code 3


def _spoil_corpus(*lines: object) -> Callable[[Path], None]:
    def spoil(data: Path) -> None:
        with (data / "corpus.jsonl").open("a") as corpus:
            corpus.write("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))

    return spoil


def _spoil_qrels(*lines: str) -> Callable[[Path], None]:
    return lambda data: write(data / "qrels" / "test.tsv", *lines)


SPOILT: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "malformed line": (_spoil_corpus('{"_id": "d12", '), ("corpus.jsonl:13", "not JSON")),
    "missing field": (_spoil_corpus({"_id": "d12"}), ("corpus.jsonl:13", "'text'", "missing")),
    "number as id": (_spoil_corpus({"_id": 12, "text": "x"}), ("corpus.jsonl:13", "'_id'", "12")),
    "duplicate id": (_spoil_corpus({"_id": "d3", "text": "x"}), ("corpus.jsonl:13", "'d3'", "corpus.jsonl:4")),
    "unknown document": (
        _spoil_qrels("query-id\tcorpus-id\tscore", "q0\tnone\t1"),
        ("test.tsv:2", "'none'"),
    ),
    "wrong header": (_spoil_qrels("query\tdocument\tgrade", "q0\td0\t1"), ("test.tsv:1", "wrong header")),
    "wrong grade": (_spoil_qrels("query-id\tcorpus-id\tscore", "q0\td0\thigh"), ("test.tsv:2", "'high'")),
    "no judgments": (lambda data: (data / "qrels" / "test.tsv").unlink(), ("data", "no judgments")),
    "no gold": (_spoil_qrels("query-id\tcorpus-id\tscore", "q0\td0\t0"), ("none of the 4 queries",)),
    "not BEIR": (lambda data: (data / "corpus.jsonl").unlink(), ("data", "no corpus.jsonl", "BEIR")),
}


@pytest.mark.parametrize("fault", SPOILT)
@pytest.mark.parametrize("command", ["run", "lint"])
def test_data_that_cannot_be_used(cli: Cli, data: Path, tmp_path: Path, fault: str, command: str) -> None:
    spoil, parts = SPOILT[fault]
    spoil(data)
    spec = f"beir:path={data}"
    arguments = ("run", "-b", spec, "-o", tmp_path / "out") if command == "run" else ("lint", spec)
    refused(cli(*arguments), 3, *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "problem"), [("corpus.jsonl", "the corpus is empty"), ("queries.jsonl", "there are no queries")]
)
def test_a_file_without_rows(cli: Cli, data: Path, tmp_path: Path, file: str, problem: str) -> None:
    write(data / file)
    answer = cli("run", "-b", f"beir:path={data}", "-o", tmp_path / "out")
    assert answer.code == 3
    assert answer.err.splitlines()[0] == f"icr-bench: {data / file}: {problem}"
    assert "Traceback" not in answer.err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    refused(cli("run", "-b", f"beir:path={tmp_path / 'none'}"), 3, str(tmp_path / "none"))


def test_a_split_that_is_not_there(cli: Cli, data: Path) -> None:
    refused(cli("run", "-b", f"beir:path={data},split=dev"), 3, "'dev'", "test")


def test_bad_data_of_the_last_benchmark_stops_before_the_first_cell(cli: Cli, data: Path, tmp_path: Path) -> None:
    specs = ("-b", f"beir:path={data}", "-b", f"nq:path={tmp_path / 'none'}")
    refused(cli("run", *specs, "-o", tmp_path / "out"), 3, "none")
    assert not (tmp_path / "out").exists()


# A missing extra: exit code 4


@pytest.mark.parametrize(
    ("module", "spec", "package", "extra"),
    [
        ("bm25", "bm25:backend=rank-bm25", "rank-bm25", "rank-bm25"),
        ("bm25", "bm25:stemmer=english", "PyStemmer", "stem"),
        ("dense", "dense:model=somewhere/model,index=faiss-flat", "faiss", "faiss"),
    ],
)
def test_a_missing_extra_is_named_with_its_pip_line(
    cli: Cli,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    spec: str,
    package: str,
    extra: str,
) -> None:
    monkeypatch.setattr(f"icr_bench.retrievers.{module}.find_spec", lambda name: None)
    answer = cli("run", "-b", f"beir:path={data}", "-r", spec, "-o", tmp_path / "out")
    refused(answer, 4, f"{package} is not installed", f"pip install 'icr-bench[{extra}]'")
    assert not (tmp_path / "out").exists()


def test_validate_tells_a_missing_extra(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icr_bench.retrievers.bm25.find_spec", lambda name: None)
    refused(cli("validate", "bm25:stemmer=english"), 4, "pip install 'icr-bench[stem]'")


# Interrupted: exit code 130; the others are in test_faults.py


def test_an_interrupt_is_told(cli: Cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("icr_bench.harness.run.run_cell", interrupt)
    refused(cli("run", "-b", f"beir:path={data}", "-o", tmp_path / "out"), 130, "interrupted")


# list, describe, table, lint


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("retrievers", {"bm25", "dense"}),
        ("benchmarks", {"beir", "hotpotqa", "limit", "msmarco", "nq"}),
        ("suites", {"default", "paper", "quick"}),
        ("metrics", {"hit@k", "recall@k", "complete@k", "mrr@k", "ndcg@k"}),
    ],
)
def test_list_prints_names_to_standard_output(cli: Cli, what: str, names: set[str]) -> None:
    answer = cli("list", what)
    assert answer.code == 0
    assert names <= set(answer.out.split())
    assert not answer.err


def test_list_knows_plugins(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    pass\n\nRETRIEVERS = {'mine': Mine}\nBENCHMARKS = {'own': Mine}\n"
    )
    assert "mine" in cli("list", "retrievers", "--plugin", tmp_path / "mine.py").out.split()
    assert "own" in cli("list", "benchmarks", "--plugin", tmp_path / "mine.py").out.split()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("bm25", ("retriever bm25", "k1=", "default 0.9", "label=")),
        ("dense", ("retriever dense", "model= (hub id or path; required)")),
        ("limit", ("benchmark limit", "likes=", "max_tokens=", "exclude_self=")),
        ("quick", ("suite quick", "limit")),
        ("ndcg", ("metric ndcg@k", "log2")),
        ("hit@1", ("metric hit@k", "any relevant document")),
    ],
)
def test_describe_prints_to_standard_output(cli: Cli, name: str, parts: tuple[str, ...]) -> None:
    answer = cli("describe", name)
    assert answer.code == 0
    for part in parts:
        assert part in answer.out
    assert not answer.err


@pytest.mark.parametrize("name", ["bm25", "dense", "beir", "hotpotqa", "limit", "msmarco", "nq"])
def test_everything_that_can_be_chosen_is_described(cli: Cli, name: str) -> None:
    assert "(no description)" not in cli("describe", name).out


def test_lint_counts_what_it_read(cli: Cli, data: Path) -> None:
    answer = cli("lint", f"beir:path={data}")
    assert answer.code == 0
    for part in ("12 documents", "4 declared queries", "4 gold documents", "no errors"):
        assert part in answer.out


def test_lint_takes_what_run_takes(cli: Cli, data: Path) -> None:
    assert cli("lint", f"beir:path={data},n=6+all,max_tokens=3").code == 0


def test_lint_prints_warnings_with_file_and_line(cli: Cli, data: Path) -> None:
    _spoil_corpus({"_id": "blank", "text": " "})(data)
    answer = cli("lint", f"beir:path={data}")
    assert answer.code == 0
    assert "warning: " in answer.out
    assert "corpus.jsonl:13" in answer.out


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one cell on the benchmark ``limit``."""
    out = tmp_path_factory.mktemp("finished") / "out"
    flags = ("-b", "limit:likes=2", "-n", "46", "--latency-queries", "3")
    assert main(["run", *flags, "-o", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    ("form", "part"),
    [("md", "| bm25"), ("csv", "bm25,"), ("latex", r"\begin{tabular}"), ("json", '"retriever": "bm25"')],
)
def test_table_makes_the_tables_again(cli: Cli, finished: Path, form: str, part: str) -> None:
    answer = cli("table", finished, "--format", form)
    assert answer.code == 0
    assert part in answer.out


def test_table_of_a_chosen_metric(cli: Cli, finished: Path) -> None:
    tables = json.loads(cli("table", finished, "--metric", "mrr@5", "--format", "json").out)
    assert [table["table"] for table in tables] == ["mrr@5", "latency", "memory"]


def test_an_unknown_metric_is_answered_with_the_closest(cli: Cli, finished: Path) -> None:
    refused(cli("table", finished, "--metric", "hits@1"), 2, "metric 'hits@1'", "did you mean hit@1?")


@pytest.mark.parametrize("metric", ["hit@0", "hit@x", "hit", "hit@-1"])
def test_a_metric_without_a_cutoff(cli: Cli, finished: Path, metric: str) -> None:
    refused(cli("table", finished, "--metric", metric), 2, repr(metric))


def test_a_metric_that_was_not_computed(cli: Cli, finished: Path) -> None:
    refused(cli("table", finished, "--metric", "hit@7"), 2, "hit@7 was not computed", "hit@1")


@pytest.mark.parametrize("command", ["table", "plot", "export"])
def test_a_folder_without_a_run(cli: Cli, tmp_path: Path, command: str) -> None:
    refused(cli(command, tmp_path / "none", "-o" if command != "table" else "--metric", "hit@1"), 2, "none", "no run")


def test_plot_needs_its_extra(cli: Cli, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icr_bench.harness.plot.find_spec", lambda name: None)
    answer = cli("plot", finished, "-o", tmp_path / "curves.svg")
    refused(answer, 4, "matplotlib is not installed", "pip install 'icr-bench[report]'")


def test_plot_knows_what_it_can_write(cli: Cli, finished: Path, tmp_path: Path) -> None:
    refused(cli("plot", finished, "-o", tmp_path / "curves.docx"), 2, "curves.docx", ".png, .svg, .pdf")


# Help and output


def _parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    top = parser()
    yield "icr-bench", top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _arguments() -> dict[str, argparse.Action]:
    return {
        f"{name} {'/'.join(action.option_strings) or action.dest}": action
        for name, sub in _parsers()
        for action in sub._actions
        if not isinstance(action, argparse._SubParsersAction)
    }


@pytest.mark.parametrize("argument", _arguments())
def test_every_argument_has_a_help_text(argument: str) -> None:
    assert _arguments()[argument].help


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_says_what_it_does(cli: Cli, command: str) -> None:
    answer = cli(command, "--help")
    assert answer.code == 0
    assert dict(_parsers())[command].description
    assert "exit codes: 0 ok" in " ".join(answer.out.split())


def test_the_commands_are_these() -> None:
    assert {name for name, _ in _parsers()} - {"icr-bench"} == COMMANDS


def test_the_flags_of_run_are_these() -> None:
    flags = {flag for action in dict(_parsers())["run"]._actions for flag in action.option_strings}
    assert flags == set(RUN_FLAGS.split())


def test_the_flags_of_plan_are_those_of_run_that_lead_to_no_folder() -> None:
    flags = {flag for action in dict(_parsers())["plan"]._actions for flag in action.option_strings}
    assert flags == set(RUN_FLAGS.split()) - {"-o", "--output", "--fresh", "--retry-failed", "--dry-run"}


def test_the_flags_of_diagnose_are_those_of_run_and_what_to_look_at() -> None:
    flags = {flag for action in dict(_parsers())["diagnose"]._actions for flag in action.option_strings}
    more = {"--layers", "--heads", "--ties", "--tokens", "--per-query"}
    assert flags == (set(RUN_FLAGS.split()) - {"--dry-run"}) | more


def test_every_command_takes_plugins() -> None:
    for name in COMMANDS:
        assert any("--plugin" in action.option_strings for action in dict(_parsers())[name]._actions)


HEAVY = (
    "torch transformers sentence_transformers bm25s rank_bm25 faiss scipy pandas sklearn numba huggingface_hub "
    "tokenizers safetensors matplotlib plotly ir_measures ranx gguf"
)


@pytest.mark.parametrize("arguments", [["--help"], ["list", "retrievers"]])
def test_nothing_heavy_is_imported_before_it_is_chosen(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom icr_bench.harness.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"sys.exit(' '.join(set({HEAVY.split()!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
    assert done.stdout


def test_without_a_terminal_progress_is_plain_lines_on_standard_error(cli: Cli, data: Path, tmp_path: Path) -> None:
    answer = cli("run", "-b", f"beir:path={data}", "-n", "6", "-o", tmp_path / "out")
    assert answer.err.startswith("[1/1] beir n=6 bm25 seed 0: hit@1 1.000")
    assert answer.err.count("\n") == 1
    assert "\x1b" not in answer.err
    assert "\r" not in answer.err
    assert "### beir: hit@1" in answer.out


def test_the_installed_command_answers() -> None:
    command = Path(sys.executable).with_name("icr-bench")
    if not command.exists():
        pytest.skip("the command is not beside the interpreter")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("icr-bench ")


def test_a_reader_that_goes_away_is_no_failure() -> None:
    read, end = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "icr_bench.harness.cli", "describe", "limit"],
        stdout=end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(end)
    assert (process.returncode, process.stderr) == (0, "")
