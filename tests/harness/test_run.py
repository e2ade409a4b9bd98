"""The run: what a record holds, what makes a cell be computed again, whose folder it is, what a retriever sees."""

from __future__ import annotations

import csv
import fcntl
import gc
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from icr_bench.harness.cell import Job, measure
from icr_bench.harness.cli import main
from icr_bench.harness.folder import write
from icr_bench.harness.process import Limits, OnProgress
from icr_bench.harness.run import job_of, lay_out
from icr_bench.harness.suite import assemble

Record = dict[str, Any]
Options = dict[str, Any]

GOLDS = 4

PLUGIN = """
import time
from pathlib import Path
from icr_bench.retrievers.base import Ranking, Retriever


class Fake(Retriever):
    def index(self, documents):
        self.texts = [document.text for document in documents]

    def search(self, queries, k):
        return [self.rank(query, k) for query in queries]

    def rank(self, query, k):
        return Ranking(list(range(k)), [1.0] * k)

    def index_bytes(self):
        return 8

{methods}

RETRIEVERS = {{"fake": Fake}}
"""


def write_plugin(folder: Path, methods: str = "") -> Path:
    """A retriever called ``fake`` that returns the first k numbers with equal scores, unless ``methods`` differ."""
    file = folder / "fake.py"
    file.write_text(PLUGIN.format(methods=methods))
    return file


def write_beir(folder: Path, documents: int = 12, queries: int = GOLDS, same_ids: bool = False) -> Path:
    """Query i asks for the word of document i, its only gold."""
    kind = "d" if same_ids else "q"
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": f"d{i}", "text": f"word{i} and some more of the text {i}"} for i in range(documents)]
    asked = [{"_id": f"{kind}{i}", "text": f"word{i}"} for i in range(queries)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in corpus))
    (folder / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    judged = "".join(f"{kind}{i}\td{i}\t1\n" for i in range(queries))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return folder


def run(*arguments: object) -> int:
    return main(["run", *map(str, arguments)])


def records(out: Path) -> list[Record]:
    return [json.loads(line) for line in (out / "cells.jsonl").read_text().splitlines()]


def rankings(out: Path, record: Record) -> dict[str, list[str]]:
    lines = (out / record["rankings"]).read_text().splitlines()
    return {line["query"]: line["documents"] for line in map(json.loads, lines)}


def table(out: Path, name: str) -> list[list[str]]:
    lines = (out / "tables" / f"beir-{name}.csv").read_text().splitlines()
    return list(csv.reader(line for line in lines if not line.startswith("#")))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells measured in this process: quicker, where neither the cell's process nor a crash is what is tested."""

    def run_cell(job: Job, work: Path, log: Path, limits: Limits, progress: OnProgress) -> Record:
        log.touch()
        result: Record = json.loads(json.dumps(measure(json.loads(json.dumps(job)), progress)))
        result["memory"] |= {"peak_rss_bytes": 1, "device_peak_bytes": None}
        return result

    for module in ("run", "prepare"):
        monkeypatch.setattr(f"icr_bench.harness.{module}.run_cell", run_cell)
    monkeypatch.setattr("os.fsync", lambda file: None)  # most of the time of a small run


@contextmanager
def leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collects warnings about files that were left open."""
    gc.collect()
    found: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: found.append(str(problem.exc_value)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        yield found
        gc.collect()


# What a record holds


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of bm25 at N = 6 and all, each cell in its own process."""
    folder = tmp_path_factory.mktemp("finished")
    data, out = write_beir(folder / "data"), folder / "out"
    assert run("-b", f"beir:path={data}", "-r", "bm25:k1=1.5", "-n", "6,all", "--latency-queries", 3, "-o", out) == 0
    return out


FIELDS = {
    "benchmark": str,
    "n": int,
    "retriever": str,
    "seed": int,
    "status": str,
    "error": type(None),
    "metrics": dict,
    "queries": dict,
    "ceiling": dict,
    "tie_rate": float,
    "time": dict,
    "memory": dict,
    "tokens": dict,
    "truncated": int,
    "config": dict,
    "fingerprint": dict,
    "environment": dict,
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_record_holds_every_field_in_its_type(finished: Path, field: str) -> None:
    for record in records(finished):
        assert type(record[field]) is FIELDS[field]


def test_n_is_an_integer_also_for_all(finished: Path) -> None:
    assert [record["n"] for record in records(finished)] == [6, 12]


def test_the_retriever_is_a_bare_name(finished: Path) -> None:
    assert {(record["benchmark"], record["retriever"]) for record in records(finished)} == {("beir", "bm25")}


def test_every_line_is_one_strict_json_object(finished: Path) -> None:
    text = (finished / "cells.jsonl").read_text()
    assert text.endswith("\n")

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    for line in text.splitlines():
        assert isinstance(json.loads(line, parse_constant=refuse), dict)


def test_every_metric_stands_at_every_cutoff_within_its_interval(finished: Path) -> None:
    metrics = records(finished)[0]["metrics"]
    assert set(metrics) == {f"{m}@{k}" for m in ("hit", "recall", "complete", "mrr", "ndcg") for k in (1, 2, 5, 10)}
    for metric in metrics.values():
        assert 0 <= metric["low"] <= metric["value"] <= metric["high"] <= 1


def test_bm25_finds_the_documents_that_hold_the_word(finished: Path) -> None:
    assert [record["metrics"]["hit@1"]["value"] for record in records(finished)] == [1.0, 1.0]


def test_a_ceiling_stands_beside_every_metric(finished: Path) -> None:
    record = records(finished)[0]
    assert record["ceiling"].keys() == record["metrics"].keys()
    assert set(record["ceiling"].values()) == {1.0}


def test_queries_are_counted(finished: Path) -> None:
    assert records(finished)[0]["queries"] == {"declared": GOLDS, "scored": GOLDS, "empty": 0, "failed": 0}


def test_times_are_split(finished: Path) -> None:
    time = records(finished)[0]["time"]
    names = {"load_s", "index_s", "warmup", "query_p50_s", "query_p95_s", "query_p99_s", "sampled", "queries_per_s"}
    assert set(time) == names | {"batch"}
    assert 0 < time["query_p50_s"] <= time["query_p95_s"] <= time["query_p99_s"]
    assert time["load_s"] > 0
    assert time["index_s"] > 0


def test_warm_up_and_sample_sizes_are_recorded(finished: Path) -> None:
    time = records(finished)[0]["time"]
    assert time["warmup"] > 0
    assert time["sampled"] == 3
    assert time["batch"] >= 1


def test_memory_is_recorded(finished: Path) -> None:
    small, large = (record["memory"] for record in records(finished))
    assert set(small) == {"index_bytes", "peak_rss_bytes", "device_peak_bytes"}
    assert 0 < small["index_bytes"] < large["index_bytes"] < small["peak_rss_bytes"]


def test_tokens_are_counted(finished: Path) -> None:
    record = records(finished)[1]
    assert record["tokens"] == {"unit": "whitespace", "documents": 12 * 8, "queries": GOLDS}
    assert record["truncated"] == 0


def test_options_are_recorded_as_given_and_as_resolved(finished: Path) -> None:
    retriever = records(finished)[0]["config"]["retriever"]
    assert retriever["given"] == {"k1": "1.5"}
    assert retriever["resolved"]["k1"] == 1.5
    assert retriever["resolved"]["backend"] == "bm25s"


def test_what_the_analyser_came_to_is_recorded(finished: Path) -> None:
    assert "lower case" in records(finished)[0]["config"]["retriever"]["settings"]["analyser"]


def test_options_of_the_harness_are_recorded(finished: Path) -> None:
    config = records(finished)[0]["config"]
    assert config["benchmark"]["resolved"]["exclude_self"] is False
    assert (config["k"], config["depth"]) == ([1, 2, 5, 10], 6)


def test_the_fingerprint_tells_data_weights_and_code(finished: Path) -> None:
    small, large = (record["fingerprint"] for record in records(finished))
    assert set(small) == {"data", "weights", "code"}
    assert small["data"] != large["data"]
    assert small["code"] == large["code"]
    assert small["weights"] == {}


def test_the_environment_tells_machine_versions_and_source(finished: Path) -> None:
    environment = records(finished)[0]["environment"]
    assert {"icr_bench", "python", "platform", "machine", "packages", "git"} <= set(environment)
    assert {"bm25s", "numpy"} <= set(environment["packages"])


def test_rankings_of_every_query_lie_beside_the_record(finished: Path) -> None:
    for record in records(finished):
        assert {query: documents[:1] for query, documents in rankings(finished, record).items()} == {
            f"q{i}": [f"d{i}"] for i in range(GOLDS)
        }


@pytest.mark.parametrize("name", ["hit@1", "recall@10", "ndcg@10", "latency", "memory"])
@pytest.mark.parametrize("ending", ["md", "csv", "tex"])
def test_tables_lie_in_the_folder(finished: Path, name: str, ending: str) -> None:
    text = (finished / "tables" / f"beir-{name}.{ending}").read_text()
    assert "bm25" in text
    assert "12" in text
    assert "made by: icr-bench table " in text


def test_a_quality_table_says_n_definition_and_interval(finished: Path) -> None:
    text = (finished / "tables" / "beir-recall@10.md").read_text()
    assert "queries: 4" in text
    assert "recall@10: share of a query's relevant documents" in text
    assert "95% percentile bootstrap" in text


def test_a_second_run_computes_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "cells.jsonl").read_bytes()
    spec = f"beir:path={finished.parent / 'data'}"
    assert run("-b", spec, "-r", "bm25:k1=1.5", "-n", "6,all", "--latency-queries", 3, "-o", finished) == 0
    assert "0 cells computed, 2 there already" in capsys.readouterr().out
    assert (finished / "cells.jsonl").read_bytes() == before


# What makes a cell be computed again

WEIGHED = """
    def __init__(self, *, weights: str = "", step: int = 1, seed: int = 0):
        self.step = step
"""


class Grid:
    """A plug-in on a benchmark in a folder; `compute` says how many cells a run computed."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.data, self.out = write_beir(folder / "data"), folder / "out"
        self.plugin, self.weights = write_plugin(folder, WEIGHED), folder / "weights.bin"
        self.weights.write_bytes(b"one")
        self._capsys = capsys

    def compute(self, *more: object, retriever: str = "", n: str = "8") -> int:
        spec = retriever or f"fake:weights={self.weights}"
        benchmark = f"beir:path={self.data}"
        assert run("-b", benchmark, "-r", spec, "--plugin", self.plugin, "-n", n, "-o", self.out, *more) == 0
        counted = re.search(r"(\d+) cells computed", self._capsys.readouterr().out)
        assert counted
        return int(counted[1])


@pytest.fixture
def grid(tmp_path: Path, capsys: pytest.CaptureFixture[str], in_process: None) -> Grid:
    return Grid(tmp_path, capsys)


def _edit_gold(grid: Grid) -> Options:
    corpus = grid.data / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("word0 and", "word0 or"))
    return {}


def _edit_query(grid: Grid) -> Options:
    queries = grid.data / "queries.jsonl"
    queries.write_text(queries.read_text().replace("word0", "word1"))
    return {}


def _edit_judgment(grid: Grid) -> Options:
    qrels = grid.data / "qrels" / "test.tsv"
    qrels.write_text(qrels.read_text().replace("q0\td0\t1", "q0\td0\t2"))
    return {}


def _edit_plugin(grid: Grid) -> Options:
    grid.plugin.write_text(grid.plugin.read_text() + "# changed\n")
    return {}


def _edit_weights(grid: Grid) -> Options:
    grid.weights.write_bytes(b"two")
    return {}


def _option(grid: Grid) -> Options:
    return {"retriever": f"fake:weights={grid.weights},step=2"}


CHANGES: dict[str, Callable[[Grid], Options]] = {
    "document": _edit_gold,
    "query": _edit_query,
    "judgment": _edit_judgment,
    "plug-in": _edit_plugin,
    "weight file": _edit_weights,
    "option": _option,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_input_is_computed_again(grid: Grid, change: str) -> None:
    assert grid.compute() == 1
    assert grid.compute(**CHANGES[change](grid)) == 1


@pytest.mark.parametrize("flags", [("-k", "1,3"), ("--seed", "1"), ("--queries", "3"), ("--latency-queries", "2")])
def test_a_changed_setting_is_computed_again(grid: Grid, flags: tuple[str, str]) -> None:
    assert grid.compute() == 1
    assert grid.compute(*flags) == 1


def test_changed_source_of_the_package_is_computed_again(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    assert grid.compute() == 1
    monkeypatch.setattr("icr_bench.harness.environment.package_digest", lambda: "another")
    assert grid.compute() == 1


def test_an_option_written_out_with_its_default_is_no_change(grid: Grid) -> None:
    assert grid.compute() == 1
    assert grid.compute(retriever=f"fake:step=1,weights={grid.weights}") == 0


def test_other_limits_leave_a_finished_cell(grid: Grid) -> None:
    assert grid.compute() == 1
    assert grid.compute("--timeout", 1000, "--memory-limit", "100GB") == 0


def test_a_document_beyond_the_corpus_size_is_no_change(grid: Grid) -> None:
    assert grid.compute(n="4") == 1
    corpus = grid.data / "corpus.jsonl"
    corpus.write_text(corpus.read_text() + json.dumps({"_id": "new", "text": "not in the corpus of 4"}) + "\n")
    assert grid.compute(n="4") == 0


def test_only_the_sizes_that_are_missing_are_computed(grid: Grid) -> None:
    assert grid.compute(n="4,8") == 2
    assert grid.compute(n="4,6,8,all") == 2


def test_fresh_computes_everything_again(grid: Grid) -> None:
    assert grid.compute(n="4,8") == 2
    assert grid.compute("--fresh", n="8") == 1
    assert [record["n"] for record in records(grid.out)] == [8]


def test_going_back_to_former_options_shows_their_results(grid: Grid) -> None:
    assert grid.compute(retriever="bm25") == 1
    assert table(grid.out, "hit@1")[1][:2] == ["bm25", "1.0"]
    assert grid.compute(retriever="bm25:pattern=x") == 1
    assert table(grid.out, "hit@1")[1][:2] == ["bm25", "0.0"]
    assert grid.compute(retriever="bm25") == 1
    assert table(grid.out, "hit@1")[1][:2] == ["bm25", "1.0"]


def test_a_pattern_that_happens_to_name_a_folder_is_no_weight_file(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(grid.out.parent)
    assert grid.compute(retriever="bm25:pattern=.") == 1
    assert grid.compute(retriever="bm25:pattern=.") == 0


def test_a_plugin_that_passes_on_a_class_of_another_file_is_watched(grid: Grid) -> None:
    source = "from icr_bench.retrievers.bm25 import BM25\nRETRIEVERS = {'fake': BM25}\n"
    grid.plugin.write_text(source)
    assert grid.compute(retriever="fake") == 1
    grid.plugin.write_text(source + "# changed\n")
    assert grid.compute(retriever="fake") == 1


def test_a_model_that_is_no_hub_id_is_the_plugins_own_business(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    def identify(model: str) -> str:
        raise OSError(f"{model}: no such model")

    monkeypatch.setattr("icr_bench.harness.prepare.identify", identify)
    write_plugin(grid.plugin.parent, "    def __init__(self, *, model: str):\n        pass\n")
    assert grid.compute(retriever="fake:model=some-api-model") == 1
    assert grid.compute(retriever="fake:model=another-api-model") == 1


def test_another_machine_computes_anew(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    assert grid.compute() == 1
    monkeypatch.setattr("icr_bench.harness.run.machine_id", lambda: "another")
    assert grid.compute() == 1
    assert grid.compute() == 0


def test_a_module_beside_a_plugin_is_watched(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = grid.plugin.parent
    monkeypatch.syspath_prepend(folder)
    helper = folder / f"beside_{abs(hash(str(folder)))}.py"
    helper.write_text("NUMBER = 1\n")
    grid.plugin.write_text(f"import {helper.stem}\n" + grid.plugin.read_text())
    assert grid.compute() == 1
    assert grid.compute() == 0
    helper.write_text("NUMBER = 2\n")
    assert grid.compute() == 1


def test_a_module_that_a_plugin_imports_late_is_watched_and_no_other(grid: Grid) -> None:
    folder = grid.plugin.parent
    (folder / "held").mkdir()
    (folder / "held" / "__init__.py").touch()
    (folder / "held" / "late.py").write_text("from .inner import NUMBER\n")
    (folder / "held" / "inner.py").write_text("NUMBER = 1\n")
    (folder / "other.py").write_text("RETRIEVERS = {}\n")
    grid.plugin.write_text(f"def late():\n    from held import late\n\n\n{grid.plugin.read_text()}")
    arguments = ("--plugin", folder / "other.py")
    assert grid.compute(*arguments) == 1
    (folder / "other.py").write_text("RETRIEVERS = {}  # changed\n")
    assert grid.compute(*arguments) == 0
    for name in ("inner.py", "late.py", "__init__.py"):
        with (folder / "held" / name).open("a") as file:
            file.write("# changed\n")
        assert grid.compute(*arguments) == 1


def test_a_model_folder_is_watched(grid: Grid) -> None:
    write_plugin(grid.plugin.parent, "    def __init__(self, *, model: str):\n        pass\n")
    model = grid.plugin.parent / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"one")
    assert grid.compute(retriever=f"fake:model={model}") == 1
    (model / "model.safetensors").write_bytes(b"two")
    assert grid.compute(retriever=f"fake:model={model}") == 1


def test_a_long_text_option_is_no_path(grid: Grid) -> None:
    assert grid.compute(retriever=f"bm25:pattern={'x' * 5000}") == 1


def test_the_spelling_of_a_path_changes_nothing(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    assert grid.compute() == 1
    monkeypatch.chdir(grid.data.parent)
    grid.data = Path("data")
    assert grid.compute() == 0


def test_tables_of_a_folder_are_those_of_its_newest_cut_offs(grid: Grid) -> None:
    assert grid.compute("-k", 5) == 1
    assert (grid.out / "tables" / "beir-recall@5.md").exists()
    assert grid.compute("-k", 2) == 1
    assert not (grid.out / "tables" / "beir-recall@5.md").exists()
    assert (grid.out / "tables" / "beir-recall@2.md").exists()


def test_auto_is_recorded_as_what_it_became(tmp_path: Path, in_process: None) -> None:
    methods = (
        "    def __init__(self, *, device: str = 'auto', dtype: str = 'auto'):\n        self.given = device, dtype\n"
    )
    methods += "    def settings(self):\n        return {'given': list(self.given)}\n"
    data, plugin = write_beir(tmp_path / "data"), write_plugin(tmp_path, methods)
    assert run("-b", f"beir:path={data}", "-r", "fake", "--plugin", plugin, "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    config = record["config"]
    assert "auto" not in (config["device"], config["dtype"])
    assert config["retriever"]["settings"]["given"] == [config["device"], config["dtype"]]


def test_a_device_is_part_of_a_cell_only_where_it_is_used(grid: Grid) -> None:
    assert grid.compute(retriever="bm25") == 1
    assert grid.compute("--device", "cpu", "--dtype", "bfloat16", retriever="bm25") == 0
    assert records(grid.out)[0]["config"]["device"] is None
    write_plugin(grid.plugin.parent, "    def __init__(self, *, dtype: str):\n        pass\n")
    assert grid.compute(retriever="fake") == 1
    assert grid.compute("--dtype", "bfloat16", retriever="fake") == 1


def test_a_place_in_a_warning_is_printed_as_it_is(
    tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither an emoji (``:100:``) nor markup (``[b]``) is made of it."""
    data = write_beir(tmp_path / "[b]data", documents=120)
    lines = (data / "corpus.jsonl").read_text().splitlines()
    lines[99] = json.dumps({"_id": "d99", "text": ""})
    (data / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    assert run("-b", f"beir:path={data}", "-r", "bm25", "-o", tmp_path / "out") == 0
    assert f"{data}/corpus.jsonl:100: document 'd99' has no text" in capsys.readouterr().err


def test_a_long_message_of_a_failed_cell_is_told_by_its_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = "    def search(self, queries, k):\n        raise KeyError('\\n'.join(['first'] + ['more'] * 99))\n"
    methods = methods.replace("KeyError", "RuntimeError")
    data, plugin = write_beir(tmp_path / "data"), write_plugin(tmp_path, methods)
    assert run("-b", f"beir:path={data}", "-r", "fake", "--plugin", plugin, "-o", tmp_path / "out") == 1
    told = capsys.readouterr().err
    assert "RuntimeError: first" in told
    assert "more" not in told
    assert "more" in records(tmp_path / "out")[0]["error"]


def made_tables(capsys: pytest.CaptureFixture[str], *folders: Path) -> dict[str, set[str]]:
    """Benchmark -> rows of its table of hit@1."""
    capsys.readouterr()
    assert main(["table", *map(str, folders), "--metric", "hit@1", "--format", "json"]) == 0
    built = json.loads(capsys.readouterr().out)
    return {t["benchmark"]: {c["retriever"] for c in t["cells"]} for t in built if t["table"] == "hit@1"}


def test_runs_of_other_data_or_options_share_no_table(grid: Grid, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = grid.out.with_name("one"), grid.out.with_name("other")
    grid.out = one
    grid.compute(n="8")
    grid.data = write_beir(grid.plugin.parent / "more", documents=20)
    grid.out = other
    grid.compute(n="16")
    assert set(made_tables(capsys, one, other)) == {"beir [one]", "beir [other]"}


def test_runs_of_other_settings_share_no_row(grid: Grid, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = grid.out.parent / "a" / "run", grid.out.parent / "b" / "run"
    grid.out = one
    grid.compute(n="8", retriever="bm25")
    grid.out = other
    grid.compute(n="10", retriever="bm25:k1=0")
    assert made_tables(capsys, one, other) == {"beir": {"bm25 [a/run]", "bm25 [b/run]"}}


def test_runs_of_equal_settings_share_a_row(grid: Grid, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = grid.out.with_name("one"), grid.out.with_name("other")
    grid.out = one
    grid.compute(n="8", retriever="bm25")
    grid.out = other
    grid.compute(n="10", retriever="bm25")
    assert made_tables(capsys, one, other) == {"beir": {"bm25"}}


def test_another_order_of_the_corpus_gives_the_same_results_or_is_computed_again(grid: Grid) -> None:
    assert grid.compute(n="all") == 1
    corpus = grid.data / "corpus.jsonl"
    corpus.write_text("".join(reversed(corpus.read_text().splitlines(keepends=True))))
    if grid.compute(n="all") == 0:
        held = rankings(grid.out, records(grid.out)[-1])
        assert grid.compute("--fresh", n="all") == 1
        assert rankings(grid.out, records(grid.out)[-1]) == held


def test_cells_with_other_cutoffs_in_one_folder_do_not_stop_the_tables(grid: Grid) -> None:
    assert grid.compute("-k", "1,5", n="6") == 1
    assert grid.compute("-k", "2,10", n="8") == 1


def test_a_row_of_a_table_does_not_mix_options(grid: Grid) -> None:
    assert grid.compute(retriever="bm25", n="6,8") == 2
    assert grid.compute(retriever="bm25:pattern=x", n="6") == 1
    head, row = table(grid.out, "hit@1")
    assert dict(zip(head, row, strict=True)).get("8") in (None, "")


def test_an_infinite_option_is_written_as_json(grid: Grid) -> None:
    write_plugin(grid.plugin.parent, "    def __init__(self, *, limit: float):\n        pass\n")
    assert grid.compute(retriever="fake:limit=inf") == 1
    assert "Infinity" not in re.sub(r'"[^"]*"', "", (grid.out / "cells.jsonl").read_text())


# Whose folder it is


@pytest.fixture
def small(tmp_path: Path, in_process: None) -> list[object]:
    """Arguments of a run of one cell."""
    return ["-b", f"beir:path={write_beir(tmp_path / 'data')}", "-n", 6]


def test_a_torn_last_line_is_cut_and_told(
    small: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*small, "-o", tmp_path / "out") == 0
    cells = tmp_path / "out" / "cells.jsonl"
    whole = cells.read_text()
    cells.write_text(whole + whole[:40])
    capsys.readouterr()
    assert run(*small, "-o", tmp_path / "out") == 0
    assert "torn last line" in capsys.readouterr().err
    assert cells.read_text() == whole


def test_a_record_torn_before_its_line_end_is_computed_again(small: list[object], tmp_path: Path) -> None:
    assert run(*small, "-o", tmp_path / "out") == 0
    cells = tmp_path / "out" / "cells.jsonl"
    cells.write_text(cells.read_text().rstrip("\n"))
    assert run(*small, "-o", tmp_path / "out") == 0
    assert len(records(tmp_path / "out")) == 1


def test_a_line_that_is_no_record_is_named(
    small: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*small, "-o", tmp_path / "out") == 0
    cells = tmp_path / "out" / "cells.jsonl"
    cells.write_text("nonsense\n" + cells.read_text())
    assert run(*small, "-o", tmp_path / "out") == 3
    assert "cells.jsonl:1" in capsys.readouterr().err


def _suite(folder: Path, name: str) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(f"benchmark: beir:path={folder / 'data'}\nretriever: bm25\nn: 6\n")
    return file


def test_a_folder_with_another_suite_is_refused_and_left_alone(
    small: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(_suite(tmp_path, "one"), "-o", tmp_path / "out") == 0
    before = (tmp_path / "out" / "cells.jsonl").read_bytes()
    assert run(_suite(tmp_path, "two"), "-o", tmp_path / "out") == 2
    assert "'one'" in capsys.readouterr().err
    assert (tmp_path / "out" / "cells.jsonl").read_bytes() == before


def test_fresh_takes_over_another_suites_folder(small: list[object], tmp_path: Path) -> None:
    assert run(_suite(tmp_path, "one"), "-o", tmp_path / "out") == 0
    assert run(_suite(tmp_path, "two"), "-o", tmp_path / "out", "--fresh") == 0
    assert len(records(tmp_path / "out")) == 1


@pytest.mark.parametrize("flags", [(), ("--fresh",)])
def test_a_folder_that_holds_no_run_is_refused(small: list[object], tmp_path: Path, flags: tuple[str, ...]) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    assert run(*small, "-o", foreign, *flags) == 2
    assert (foreign / "thesis.tex").read_text() == "years of work"


def test_a_folder_that_is_refused_stays_as_it_was(small: list[object], tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    assert run(*small, "-o", foreign) == 2
    assert [entry.name for entry in foreign.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("text", ["{}", "[1]", "not JSON"])
def test_a_foreign_run_json_is_refused(small: list[object], tmp_path: Path, text: str) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "run.json").write_text(text)
    assert run(*small, "-o", foreign) == 2


def test_fresh_deletes_nothing_beside_a_foreign_run_json(small: list[object], tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "logs").mkdir(parents=True)
    (foreign / "run.json").write_text('{"experiment": 7}')
    assert run(*small, "-o", foreign, "--fresh") == 2
    assert (foreign / "logs").is_dir()


def test_a_run_killed_while_it_took_its_folder_goes_on(small: list[object], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").touch()
    (tmp_path / "out" / "run.json.partial").write_text('{"su')
    assert run(*small, "-o", tmp_path / "out") == 0


def test_a_run_interrupted_while_it_deleted_cells_goes_on(
    small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    assert run(*small, "-o", tmp_path / "out") == 0
    with monkeypatch.context() as patch:
        patch.setattr("icr_bench.harness.folder.shutil.rmtree", interrupt)
        assert run(*small, "-o", tmp_path / "out", "--fresh") == 130
    assert run(*small, "-o", tmp_path / "out", "--fresh") == 0


def test_a_path_below_a_file_is_refused(
    small: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(*small, "-o", tmp_path / "file" / "out") == 2
    assert str(tmp_path / "file" / "out") in capsys.readouterr().err


def test_a_folder_in_use_is_refused(small: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*small, "-o", tmp_path / "out") == 0
    before = (tmp_path / "out" / "cells.jsonl").read_bytes()
    with (tmp_path / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(*small, "-o", tmp_path / "out", "--fresh") == 2
    assert "another run" in capsys.readouterr().err
    assert (tmp_path / "out" / "cells.jsonl").read_bytes() == before


def test_a_refused_folder_is_let_go(small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").touch()
    with leaks(monkeypatch) as found:
        assert run(*small, "-o", tmp_path / "foreign") == 2
    assert not found


def test_the_folder_is_named_after_the_suite_by_default(
    small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*small) == 0
    assert run(_suite(tmp_path, "mine")) == 0
    assert sorted(folder.name for folder in (tmp_path / "results" / "runs").iterdir()) == ["custom", "mine"]


def test_nothing_of_the_computation_is_left_behind(small: list[object], tmp_path: Path) -> None:
    assert run(*small, "-o", tmp_path / "out") == 0
    assert not (tmp_path / "out" / "work").exists()
    assert not list((tmp_path / "out").rglob("*.partial"))


# Options of every benchmark


def test_exclude_self_fetches_one_more_and_drops_the_query_itself(tmp_path: Path, in_process: None) -> None:
    seen = tmp_path / "k"
    methods = f"""
    def rank(self, query, k):
        Path({str(seen)!r}).write_text(str(k))
        return Ranking(list(range(k)), [1.0] * k)
"""
    data, plugin = write_beir(tmp_path / "data", same_ids=True), write_plugin(tmp_path, methods)
    spec = f"beir:path={data},exclude_self=true"
    assert run("-b", spec, "-r", "fake", "--plugin", plugin, "-k", 5, "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert seen.read_text() == "6"
    for query, documents in rankings(tmp_path / "out", record).items():
        assert len(documents) == 5
        assert query not in documents


def test_a_gold_that_is_the_query_itself_lowers_the_ceiling(tmp_path: Path, in_process: None) -> None:
    data = write_beir(tmp_path / "data", same_ids=True)
    with (data / "qrels" / "test.tsv").open("a") as qrels:
        qrels.write("d0\td5\t1\nd1\td6\t1\n")  # two of four queries have another gold
    assert run("-b", f"beir:path={data},exclude_self=true", "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert record["ceiling"]["hit@10"] == 0.5
    assert record["ceiling"]["recall@10"] == 0.25
    assert record["config"]["benchmark"]["resolved"]["exclude_self"] is True


def test_self_is_kept_by_default(tmp_path: Path, in_process: None) -> None:
    data = write_beir(tmp_path / "data", same_ids=True)
    assert run("-b", f"beir:path={data}", "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert record["metrics"]["hit@1"]["value"] == record["ceiling"]["hit@1"] == 1.0


TEXTS = """
    def __init__(self, *, label: str = ""):
        pass

    def index(self, documents):
        Path({file!r}).write_text("\\n".join(sorted(document.text for document in documents)))
"""


def test_max_tokens_cuts_and_counts(tmp_path: Path, in_process: None) -> None:
    seen = tmp_path / "seen"
    data, plugin = write_beir(tmp_path / "data"), write_plugin(tmp_path, TEXTS.format(file=str(seen)))
    with (data / "corpus.jsonl").open("a") as corpus:
        corpus.write(json.dumps({"_id": "short", "text": "just  two"}) + "\n")
    spec = f"beir:path={data},max_tokens=2"
    assert run("-b", spec, "-r", "fake", "-r", "bm25", "--plugin", plugin, "-o", tmp_path / "out") == 0
    assert seen.read_text().splitlines() == sorted([f"word{i} and" for i in range(12)] + ["just  two"])
    for record in records(tmp_path / "out"):
        assert record["truncated"] == 12
        assert record["tokens"]["documents"] == 26


def test_max_tokens_counts_in_the_retrievers_own_tokens(tmp_path: Path, in_process: None) -> None:
    methods = TEXTS.format(file=str(tmp_path / "seen")) + (
        "    tokenizer = 'characters'\n\n"
        "    def token_spans(self, texts):\n"
        "        return [[(i, i + 1) for i in range(len(text))] for text in texts]\n"
    )
    data, plugin = write_beir(tmp_path / "data"), write_plugin(tmp_path, methods)
    spec = f"beir:path={data},max_tokens=4"
    assert run("-b", spec, "-r", "fake", "--plugin", plugin, "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert set((tmp_path / "seen").read_text().split()) == {"word"}
    assert record["tokens"]["unit"] == "characters"
    assert record["tokens"]["documents"] == 4 * 12


@pytest.mark.parametrize(
    ("spec", "flags"), [(",queries=3", ()), ("", ("--queries", 3)), (",queries=3", ("--queries", 2))]
)
def test_queries_are_sampled(tmp_path: Path, in_process: None, spec: str, flags: tuple[object, ...]) -> None:
    data = write_beir(tmp_path / "data")
    assert run("-b", f"beir:path={data}{spec}", "-n", 3, *flags, "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert record["queries"]["declared"] == 3
    assert len(rankings(tmp_path / "out", record)) == 3


def test_the_sample_of_queries_follows_the_seed(tmp_path: Path, in_process: None) -> None:
    data = write_beir(tmp_path / "data", documents=40, queries=30)
    for name in ("one", "two"):
        assert run("-b", f"beir:path={data}", "--queries", 8, "--seed", "0,1", "-o", tmp_path / name) == 0
    one, two = ([set(rankings(tmp_path / name, r)) for r in records(tmp_path / name)] for name in ("one", "two"))
    assert one == two
    assert one[0] != one[1]


def test_k_beyond_n_is_clamped(tmp_path: Path, in_process: None) -> None:
    data, plugin = write_beir(tmp_path / "data"), write_plugin(tmp_path)
    flags = ("-r", "fake", "--plugin", plugin, "-n", 5, "-k", "1,1000")
    assert run("-b", f"beir:path={data}", *flags, "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert record["config"]["depth"] == 5
    assert record["metrics"]["hit@1000"]["value"] == 1.0
    assert {len(documents) for documents in rankings(tmp_path / "out", record).values()} == {5}


def test_the_largest_cutoff_is_the_depth_kept(tmp_path: Path, in_process: None) -> None:
    data, plugin = write_beir(tmp_path / "data"), write_plugin(tmp_path)
    assert run("-b", f"beir:path={data}", "-r", "fake", "--plugin", plugin, "-k", "3,1", "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert {len(documents) for documents in rankings(tmp_path / "out", record).values()} == {3}


def test_a_label_renames_the_row(tmp_path: Path, in_process: None) -> None:
    data = write_beir(tmp_path / "data")
    flags = ("-r", "bm25", "-r", "bm25:b=0,label=flat")
    assert run("-b", f"beir:path={data},label=mine", *flags, "-o", tmp_path / "out") == 0
    assert [(r["benchmark"], r["retriever"]) for r in records(tmp_path / "out")] == [("mine", "bm25"), ("mine", "flat")]


def test_warnings_about_the_data_are_told_and_recorded(
    tmp_path: Path, in_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_beir(tmp_path / "data")
    with (data / "corpus.jsonl").open("a") as corpus:
        corpus.write(json.dumps({"_id": "blank", "text": ""}) + "\n")
    assert run("-b", f"beir:path={data}", "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert any("corpus.jsonl:13" in warning for warning in record["warnings"])
    assert "corpus.jsonl:13" in capsys.readouterr().err


# Answers


def test_an_empty_answer_counts_as_empty_and_scores_0(tmp_path: Path, in_process: None) -> None:
    data = write_beir(tmp_path / "data")
    queries = data / "queries.jsonl"
    queries.write_text(queries.read_text().replace('"word0"', '"nowhere"'))
    assert run("-b", f"beir:path={data}", "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert record["queries"] == {"declared": 4, "scored": 4, "empty": 1, "failed": 0}
    assert record["metrics"]["hit@1"]["value"] == 0.75


def _failing(numbers: str, scores: str) -> str:
    return f"""
    def rank(self, query, k):
        if query == "word0":
            return Ranking({numbers}, {scores}, error="refused")
        return Ranking(list(range(k)), [1.0] * k)
"""


@pytest.mark.parametrize(
    "methods",
    [
        _failing("[]", "[]"),
        _failing("list(range(k))", "[1.0] * k"),
    ],
    ids=["without documents", "with documents"],
)
def test_an_answer_with_an_error_counts_as_failed_and_scores_0(tmp_path: Path, in_process: None, methods: str) -> None:
    data, plugin = write_beir(tmp_path / "data"), write_plugin(tmp_path, methods)
    flags = ("-r", "fake", "--plugin", plugin, "-k", 12)
    assert run("-b", f"beir:path={data}", *flags, "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert record["queries"] == {"declared": 4, "scored": 3, "empty": 0, "failed": 1}
    assert record["metrics"]["hit@12"]["value"] == 0.75


def test_an_answers_error_is_kept_with_the_rankings(tmp_path: Path, in_process: None) -> None:
    data, plugin = write_beir(tmp_path / "data"), write_plugin(tmp_path, _failing("[]", "[]"))
    assert run("-b", f"beir:path={data}", "-r", "fake", "--plugin", plugin, "-o", tmp_path / "out") == 0
    lines = map(json.loads, (tmp_path / "out" / records(tmp_path / "out")[0]["rankings"]).read_text().splitlines())
    assert {line["query"]: line.get("error") for line in lines}["q0"] == "refused"


def test_equal_scores_rank_by_document_number(tmp_path: Path, in_process: None) -> None:
    forwards, backwards = tmp_path / "a", tmp_path / "b"
    data = write_beir(tmp_path / "data")
    for out, step in ((forwards, 1), (backwards, -1)):
        methods = f"    def rank(self, query, k):\n        return Ranking(list(range(k))[::{step}], [1.0] * k)\n"
        flags = ("-r", "fake", "--plugin", write_plugin(tmp_path, methods))
        assert run("-b", f"beir:path={data}", *flags, "-o", out) == 0
    one, other = (records(out)[0] for out in (forwards, backwards))
    assert rankings(forwards, one) == rankings(backwards, other)
    assert one["tie_rate"] == 1.0


def _tail(hits: int, trials: int, chance: float) -> float:
    """Probability of a number of hits at least as far out on its side."""
    at = [math.comb(trials, i) * chance**i * (1 - chance) ** (trials - i) for i in range(trials + 1)]
    return min(sum(at[: hits + 1]), sum(at[hits:]))


@pytest.mark.parametrize("scores", ["[1.0] * k", "[-float(i) for i in range(k)]"])
def test_a_scorer_that_reads_nothing_is_at_chance(tmp_path: Path, in_process: None, scores: str) -> None:
    seeds = 30
    methods = f"    def rank(self, query, k):\n        return Ranking(list(range(k)), {scores})\n"
    data, plugin = write_beir(tmp_path / "data", documents=16), write_plugin(tmp_path, methods)
    flags = ("-r", "fake", "--plugin", plugin, "-k", "1,16", "--seed", ",".join(map(str, range(seeds))))
    assert run("-b", f"beir:path={data}", *flags, "-o", tmp_path / "out") == 0
    hits = [round(record["metrics"]["hit@1"]["value"] * GOLDS) for record in records(tmp_path / "out")]
    assert len(hits) == seeds
    assert set(hits) == {0, 1}  # the first document is a gold of one query or of none
    assert _tail(sum(hits), seeds, GOLDS / 16) > 0.001


# What a retriever sees, and what it costs


def test_the_job_holds_neither_ids_nor_judgments(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    methods = f"""
    def index(self, documents):
        import os, shutil, sys
        shutil.copytree(Path(sys.argv[1]).parent, {str(copies)!r}, dirs_exist_ok=True)
        Path({str(copies / "process")!r}).write_text(repr(sys.argv) + repr(os.environ))
"""
    data, plugin = write_beir(tmp_path / "data"), write_plugin(tmp_path, methods)
    for file in (data / "corpus.jsonl", data / "queries.jsonl", data / "qrels" / "test.tsv"):
        file.write_text(re.sub(r"\b([dq]\d+)\b", r"secret-\1", file.read_text()))
    spec = f"beir:path={data},label=secret-benchmark"
    assert run("-b", spec, "-r", "fake", "--plugin", plugin, "-o", tmp_path / "out") == 0
    seen = {file.name: file.read_text() for file in copies.iterdir()}
    assert "word3 and some more" in seen["job.json"]
    assert "judg" not in seen["job.json"]
    assert "secret" not in "".join(seen.values())


def test_peak_memory_is_the_cells_own(tmp_path: Path) -> None:
    ballast = b"x" * 300_000_000
    assert run("-b", f"beir:path={write_beir(tmp_path / 'data')}", "-r", "bm25", "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert 10_000_000 < record["memory"]["peak_rss_bytes"] < len(ballast)


def test_latency_is_of_single_queries_and_apart_from_indexing(tmp_path: Path) -> None:
    methods = """
    def load(self):
        time.sleep(0.1)

    def index(self, documents):
        time.sleep(0.3)

    def rank(self, query, k):
        time.sleep(0.02)
        return Ranking([0], [1.0])
"""
    data, plugin = write_beir(tmp_path / "data"), write_plugin(tmp_path, methods)
    flags = ("-r", "fake", "--plugin", plugin, "--latency-queries", 3, "-o", tmp_path / "out")
    assert run("-b", f"beir:path={data}", *flags) == 0
    time = records(tmp_path / "out")[0]["time"]
    assert 0.02 <= time["query_p50_s"] < 0.5  # the median of three survives one slow turn
    assert time["index_s"] >= 0.3
    assert time["load_s"] >= 0.1
    assert time["queries_per_s"] <= 50
    assert time["sampled"] == 3


def test_no_file_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_beir(tmp_path / "data")
    with leaks(monkeypatch) as found:
        assert run("-b", f"beir:path={data}", "-r", "bm25", "-o", tmp_path / "out") == 0
    assert not found


def test_the_sample_is_no_larger_than_the_queries(tmp_path: Path, in_process: None) -> None:
    assert run("-b", f"beir:path={write_beir(tmp_path / 'data')}", "-o", tmp_path / "out") == 0
    assert records(tmp_path / "out")[0]["time"]["sampled"] == GOLDS


def test_a_long_index_is_not_part_of_the_query_time(tmp_path: Path, in_process: None) -> None:
    methods = "    def index(self, documents):\n        time.sleep(0.2)\n"
    data, plugin = write_beir(tmp_path / "data"), write_plugin(tmp_path, methods)
    assert run("-b", f"beir:path={data}", "-r", "fake", "--plugin", plugin, "-o", tmp_path / "out") == 0
    time = records(tmp_path / "out")[0]["time"]
    assert time["query_p50_s"] < 0.2 <= time["index_s"]


# What is measured, by a clock that the retriever moves

CLOCKED = """
from icr_bench.harness import cell
from icr_bench.retrievers.base import Estimate, Ranking, Retriever


class Clocked(Retriever):
    def load(self):
        cell.time.now += 1

    def estimate(self, documents, queries):
        cell.time.now += 100  # of no phase
        return None

    def token_spans(self, texts):
        cell.time.now += 1000  # of no phase
        return super().token_spans(texts)

    def index(self, documents):
        cell.time.now += 20
        self.count, self.alone = len(documents), 0

    def search(self, queries, k):
        if len(queries) == 1:
            self.alone += 1
        warm = self.alone <= cell.WARMUP
        cell.time.now += 500 if warm else self.alone - cell.WARMUP if len(queries) == 1 else 2 * len(queries)
        return [Ranking([0], [1.0]) for _ in queries]

    def index_bytes(self):
        return 8


RETRIEVERS = {"clocked": Clocked}
"""


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_each_phase_is_timed_apart(tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icr_bench.harness.cell.time", Clock())
    (tmp_path / "plugin.py").write_text(CLOCKED)
    data = write_beir(tmp_path / "data", documents=80, queries=70)
    fixed = ("-b", f"beir:path={data}", "-r", "clocked", "--plugin", tmp_path / "plugin.py", "--latency-queries", "10")
    assert run(*fixed, "-o", tmp_path / "out") == 0
    (record,) = records(tmp_path / "out")
    assert record["time"] == {
        "load_s": 1,
        "index_s": 20,
        "warmup": 5,
        "query_p50_s": 5,
        "query_p95_s": 10,
        "query_p99_s": 10,
        "sampled": 10,
        "queries_per_s": 0.5,
        "batch": 32,
    }


def test_which_queries_are_timed_alone_follows_from_the_seed(tmp_path: Path) -> None:
    spec = f"beir:path={write_beir(tmp_path / 'data', documents=80, queries=70)}"
    flags = {"benchmark": [spec], "retriever": ["bm25"], "seed": "0,1", "latency_queries": "10"}
    suite, (answering,), grid = lay_out(assemble(None, flags))
    samples = [
        [job_of(suite, asked, benchmark.at(n), answering.spec, seed)["sample"] for asked, seed, benchmark, n in grid]
        for _ in range(2)
    ]
    assert samples[0] == samples[1]
    assert samples[0][0] != samples[0][1]
    assert len(set(samples[0][0])) == 10


def test_a_file_and_then_its_name_are_put_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(os.path.realpath(f"/proc/self/fd/{file}")))
    write(tmp_path / "file", "text")
    assert [Path(name).name.partition(".")[0] for name in synced] == ["file", tmp_path.name]
    synced.clear()
    data = write_beir(tmp_path / "data")
    assert run("-b", f"beir:path={data}", "-r", "bm25", "-o", tmp_path / "out") == 0
    out = tmp_path / "out"
    for file, folder in ((out / "run.json", out), (out / "cells.jsonl", out), (None, out / "rankings")):
        at = 0 if file is None else next(i for i, name in enumerate(synced) if name.startswith(str(file)))
        assert str(folder) in synced[at:]
