"""``icr-bench plan``, and what a record says was predicted beside what was measured."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from icr_bench.harness import cli
from icr_bench.harness.cell import WARMUP, Job, measure
from icr_bench.harness.plan import duration
from icr_bench.harness.process import Limits, OnProgress

TinyModel = Callable[..., Path]

QUERIES = 4

GIVE_UP_S = 30
"""A test waits for another process at most that long."""

COLUMNS = ["benchmark", "N", "retriever", "seed"]
COLUMNS += ["tokens", "index", "FLOPs", "to index", "a query", "cell", "memory", "problem"]

PLUGIN = """
import os, sys, time
from pathlib import Path
from icr_bench.retrievers.base import Estimate, Ranking, Retriever

HERE = Path(__file__).parent
TOLD = dict(tokens=1200, index_flops=3e9, index_bytes=5000, peak_bytes=7_000_000, index_s=90.0, query_s=0.25)


class Silent(Retriever):
    def index(self, documents):
        (HERE / "indexed").touch()

    def search(self, queries, k):
        (HERE / "searched").touch()
        return [Ranking(list(range(k)), [1.0] * k) for _ in queries]

    def index_bytes(self):
        return 4000


class Fake(Silent):
    def load(self):
        (HERE / "loaded").touch()

    def estimate(self, documents, queries):
        {estimate}


class Broken(Fake):
    def load(self):
        {load}


class Placed(Fake):
    def __init__(self, *, device: str):
        pass


class Kept(Fake):
    def __init__(self, *, cache: Path | None = None, cache_gb: float = 50.0, device: str = "cpu"):
        pass


class Answers(Fake):  # keeps those there, not its index
    def __init__(self, *, cache: Path | None = None):
        pass


RETRIEVERS = {{
    "silent": Silent, "fake": Fake, "broken": Broken, "placed": Placed, "kept": Kept, "answers": Answers
}}
"""


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def cells(self) -> list[dict[str, str]]:
        """The rows of the table, by its columns."""
        lines = [line for line in self.out.splitlines() if line.startswith("|")]
        head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
        return [dict(zip(head, row, strict=True)) for row in body]


class Planner:
    """Plans and runs retrievers of a plug-in on twelve documents and four queries."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.plugin, self.data, self.out = folder / "plugin.py", folder / "data", folder / "out"
        self.write()
        (self.data / "qrels").mkdir(parents=True)
        corpus = [{"_id": f"d{i}", "text": f"word{i} and {'some more of ' * (i % 3)}the text"} for i in range(12)]
        asked = [{"_id": f"q{i}", "text": f"word{i}"} for i in range(QUERIES)]
        (self.data / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in corpus))
        (self.data / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
        judged = "".join(f"q{i}\td{i}\t1\n" for i in range(QUERIES))
        (self.data / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)

    def write(self, estimate: str = "return Estimate(**TOLD)", load: str = "pass") -> None:
        self.plugin.write_text(PLUGIN.format(estimate=estimate, load=load))

    def arguments(self, *retrievers: str, flags: tuple[object, ...] = (), n: str = "all") -> list[str]:
        given = ["-b", f"beir:path={self.data}", "--plugin", str(self.plugin), "-n", n, *map(str, flags)]
        return given + [part for retriever in retrievers for part in ("-r", retriever)]

    def plan(self, *retrievers: str, flags: tuple[object, ...] = (), n: str = "all") -> Answer:
        self._capsys.readouterr()
        code = cli.main(["plan", *self.arguments(*retrievers, flags=flags, n=n)])
        return Answer(code, *self._capsys.readouterr())

    def run(self, *retrievers: str, flags: tuple[object, ...] = (), n: str = "all") -> list[dict[str, Any]]:
        """The records of a run."""
        cli.main(["run", *self.arguments(*retrievers, flags=flags, n=n), "-o", str(self.out)])
        return [json.loads(line) for line in (self.out / "cells.jsonl").read_text().splitlines()]


@pytest.fixture
def planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planner:
    return Planner(tmp_path, capsys)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Cells measured in this process, which is quicker; lists their jobs."""
    jobs: list[Job] = []

    def run_cell(job: Job, work: Path, log: Path, limits: Limits, progress: OnProgress) -> dict[str, Any]:
        log.touch()
        jobs.append(job)
        result: dict[str, Any] = json.loads(json.dumps(measure(json.loads(json.dumps(job)), progress)))
        result["memory"] |= {"peak_rss_bytes": 1, "device_peak_bytes": None}
        return result

    monkeypatch.setattr("icr_bench.harness.plan.run_cell", run_cell)
    monkeypatch.setattr("icr_bench.harness.run.run_cell", run_cell)
    return jobs


# What it prints


def test_a_cell_is_told_in_all_columns(planner: Planner, in_process: list[Job]) -> None:
    answer = planner.plan("fake")
    assert answer.code == 0
    (cell,) = answer.cells
    assert list(cell) == COLUMNS
    asked = WARMUP + QUERIES + QUERIES  # to warm up, one by one, in batches
    assert cell == {
        "benchmark": "beir",
        "N": "12",
        "retriever": "fake",
        "seed": "0",
        "tokens": "1,200",
        "index": "5 kB",
        "FLOPs": "3.00e+09",
        "to index": "1.5 min",
        "a query": "250 ms",
        "cell": duration(90 + asked * 0.25),
        "memory": "7 MB",
        "problem": "",
    }
    assert not (planner.folder / "indexed").exists()


def test_a_retriever_without_an_estimate_is_not_told(planner: Planner, in_process: list[Job]) -> None:
    answer = planner.plan("silent", "bm25")
    assert answer.code == 0
    assert [cell["tokens"] for cell in answer.cells] == ["not told", "not told"]
    assert {cell[column] for cell in answer.cells for column in COLUMNS[5:]} == {""}
    assert "not told: this retriever gives no estimate" in answer.out
    assert "not told" not in planner.plan("fake").out


def test_it_takes_the_arguments_of_a_run(planner: Planner, in_process: list[Job]) -> None:
    flags = ("--seed", "3,5", "-k", "2", "--queries", 3, "--latency-queries", 2, "--device", "cpu")
    answer = planner.plan("fake", "silent:label=mute", flags=flags, n="6,all")
    assert answer.code == 0
    order = [(seed, n, retriever) for seed in "35" for n in ("6", "12") for retriever in ("fake", "mute")]
    assert [(cell["seed"], cell["N"], cell["retriever"]) for cell in answer.cells] == order
    assert [len(job["documents"]) for job in in_process] == [6, 6, 12, 12] * 2
    assert {(len(job["queries"]), len(job["sample"]), job["depth"], job["plan"]) for job in in_process} == {
        (3, 2, 2, True)
    }
    assert answer.cells[0]["cell"] == duration(90 + (WARMUP + 2 + 3) * 0.25)


def test_it_takes_a_suite(planner: Planner, in_process: list[Job]) -> None:
    suite = planner.folder / "mine.yaml"
    suite.write_text(f"benchmark: beir:path={planner.data}\nretriever: [silent, bm25]\nn: [6, 8]\n")
    code = cli.main(["plan", str(suite), "--plugin", str(planner.plugin), "-n", "7"])
    assert code == 0
    assert [(len(job["documents"]), job["retriever"]) for job in in_process] == [(7, "silent"), (7, "bm25")]


@pytest.mark.parametrize(
    ("retriever", "flags", "code"),
    [("fakes", (), 2), ("fake:size=3", (), 2), ("fake", ("-n", "13"), 2), ("fake", ("--device", "tpu"), 2)],
)
def test_what_a_run_refuses_it_refuses(
    planner: Planner, in_process: list[Job], retriever: str, flags: tuple[str, ...], code: int
) -> None:
    answer = planner.plan(retriever, flags=flags)
    assert answer.code == code
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert in_process == []


def test_data_that_cannot_be_read_are_told(planner: Planner, in_process: list[Job]) -> None:
    (planner.data / "corpus.jsonl").write_text("nonsense\n")
    answer = planner.plan("fake")
    assert answer.code == 3
    assert "corpus.jsonl:1" in answer.err


def test_no_cell_is_computed_and_nothing_is_written(
    planner: Planner, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, work = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("work")
    monkeypatch.chdir(here)
    monkeypatch.setattr("tempfile.tempdir", str(work))
    before = sorted(planner.folder.rglob("*"))
    assert planner.plan("fake").code == 0
    assert list(here.iterdir()) == []
    assert list(work.iterdir()) == []
    new = set(planner.folder.rglob("*")) - set(before)
    assert {file.name for file in new if "__pycache__" not in str(file)} == {"loaded"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.0002, "0.2 ms"), (0.9994, "999 ms"), (1.0, "1 s"), (14.2, "14.2 s"), (90.0, "1.5 min")],
)
def test_durations_are_written_in_a_unit_of_their_size(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_long_durations_are_written_in_hours() -> None:
    assert duration(9000) == "2.5 h"


# Problems


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--memory-limit", "6.9MB"), "needs more than --memory-limit 6.9 MB"),
        (("--memory-limit", "7MB"), ""),
        (("--timeout", "93.2"), "takes longer than --timeout 93.2"),
        (("--timeout", "93.3"), ""),
    ],
)
def test_a_limit_that_would_be_exceeded_is_a_problem(
    planner: Planner, in_process: list[Job], flags: tuple[str, ...], problem: str
) -> None:
    """The cell needs 7 MB and takes 90 s and 13 times 0.25 s."""
    answer = planner.plan("fake", "silent", flags=flags)
    assert [cell["problem"] for cell in answer.cells] == [problem, ""]
    assert answer.code == bool(problem)


@pytest.mark.parametrize(("retriever", "device"), [("placed", "cpu"), ("fake", "auto")])
def test_what_does_not_fit_into_the_memory_there_is_is_a_problem(
    planner: Planner, in_process: list[Job], retriever: str, device: str
) -> None:
    planner.write("return Estimate(**(TOLD | dict(peak_bytes=10**15)))")
    answer = planner.plan(retriever, flags=("--device", device))
    assert answer.code == 1
    assert re.fullmatch(r"does not fit: [\d.]+ [MG]B are free", answer.cells[0]["problem"])


def with_free(monkeypatch: pytest.MonkeyPatch, memory: int, disk: int) -> None:
    told = SimpleNamespace(available=memory, total=10**12)
    monkeypatch.setattr("psutil.virtual_memory", lambda: told)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=disk, total=10**12))


@pytest.mark.parametrize(("free", "problem"), [(7_000_000, ""), (6_999_999, "does not fit: 7 MB are free")])
def test_memory_that_others_have_taken_does_not_count(
    planner: Planner, in_process: list[Job], monkeypatch: pytest.MonkeyPatch, free: int, problem: str
) -> None:
    with_free(monkeypatch, free, 10**12)
    assert [cell["problem"] for cell in planner.plan("fake").cells] == [problem]


@pytest.mark.parametrize(
    ("retriever", "disk", "problem"),
    [
        ("kept", 10**12, "does not fit: 5 MB are free"),
        ("kept:cache={folder}", 10**12, ""),
        ("kept:cache={folder}", 2_000_000, ""),
        ("kept:cache={folder}", 1_999_999, "does not fit: 5 MB are free, 2 MB on disk"),
        ("kept:cache={folder},cache_gb=0.002", 10**12, ""),
        ("kept:cache={folder},cache_gb=0.001", 10**12, "does not fit: 5 MB are free, 1 MB on disk"),
        ("answers:cache={folder}", 10**12, "does not fit: 5 MB are free"),
    ],
)
def test_what_may_lie_on_disk_needs_room_there(
    planner: Planner,
    in_process: list[Job],
    monkeypatch: pytest.MonkeyPatch,
    retriever: str,
    disk: int,
    problem: str,
) -> None:
    """Of the 7 MB, what memory does not hold."""
    with_free(monkeypatch, 5_000_000, disk)
    answer = planner.plan(retriever.format(folder=planner.folder / "cache"))
    assert [cell["problem"] for cell in answer.cells] == [problem]
    assert answer.code == bool(problem)
    assert not (planner.folder / "cache").exists()


def test_what_a_folder_holds_already_has_room(
    planner: Planner, in_process: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = planner.folder / "cache" / ("a" * 24) / "00000000-1.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(2_000_000))
    with_free(monkeypatch, 5_000_000, 0)
    assert planner.plan(f"kept:cache={planner.folder / 'cache'}").code == 0
    file.rename(file.with_name("model.safetensors"))
    assert planner.plan(f"kept:cache={planner.folder / 'cache'}").code == 1


@pytest.mark.parametrize("cache", ["", ",cache={folder}"])
def test_a_plan_and_a_run_refuse_alike(
    planner: Planner, in_process: list[Job], monkeypatch: pytest.MonkeyPatch, tiny_model: TinyModel, cache: str
) -> None:
    with_free(monkeypatch, 1000, 1000)
    retriever = f"blocksearch:model={tiny_model()}" + cache.format(folder=planner.folder / "cache")
    (cell,) = planner.plan(retriever).cells
    assert cell["problem"] == "does not fit: 1 kB are free" + (", 1 kB on disk" if cache else "")
    with pytest.raises(MemoryError, match="keys and values of 12 documents"):
        planner.run(retriever)


def test_a_limit_that_even_the_plan_exceeds_is_a_problem(planner: Planner) -> None:
    answer = planner.plan("fake", flags=("--memory-limit", "1MB"))
    assert answer.code == 1
    assert answer.cells[0]["problem"].startswith("oom: used ")
    assert answer.cells[0]["problem"].endswith(" bytes, more than --memory-limit 1,000,000")


@pytest.mark.parametrize(
    ("estimate", "load", "problem"),
    [
        ("return None", "raise ValueError('no such layer')", "error: ValueError: no such layer"),
        ("return None", "os.kill(os.getpid(), 9)", "killed: killed by SIGKILL"),
        ("return None", "raise MemoryError('too large')", "oom: MemoryError: too large"),
        ("raise RuntimeError('cannot tell')", "pass", "error: RuntimeError: cannot tell"),
    ],
)
def test_a_cell_that_cannot_be_told_is_a_problem_and_others_are_told(
    planner: Planner, estimate: str, load: str, problem: str
) -> None:
    planner.write(estimate, load)
    answer = planner.plan("broken", "silent")
    assert answer.code == 1
    assert [cell["problem"] for cell in answer.cells] == [problem, ""]
    assert [cell["tokens"] for cell in answer.cells] == ["", "not told"]
    assert "Traceback" not in answer.err


MISTAKES = {
    "a dict": ("return TOLD", "estimate must return an Estimate or None, got dict"),
    "a number": ("return 0", "estimate must return an Estimate or None, got int"),
    "a list": ("return []", "estimate must return an Estimate or None, got list"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_estimate_of_another_kind_is_told(planner: Planner, mistake: str) -> None:
    estimate, message = MISTAKES[mistake]
    planner.write(estimate)
    answer = planner.plan("fake")
    assert answer.code == 1
    assert answer.cells[0]["problem"] == f"error: TypeError: {message}"


def test_a_run_fails_with_an_estimate_of_another_kind(planner: Planner) -> None:
    planner.write(MISTAKES["a dict"][0])
    (record,) = planner.run("fake")
    assert record["status"] == "error"
    assert record["error"] == f"TypeError: {MISTAKES['a dict'][1]}"
    assert record["estimate"] is None
    assert not (planner.folder / "indexed").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        "tokens='many'",
        "query_s='soon'",
        "index_s=None",
        "index_s=float('nan')",
        "peak_bytes=-1",
        "index_flops=float('inf')",
    ],
)
def test_an_estimate_that_holds_something_else_than_numbers_is_told(planner: Planner, wrong: str) -> None:
    planner.write(f"return Estimate(**(TOLD | dict({wrong})))")
    answer = planner.plan("fake")
    assert answer.code == 1
    assert wrong.partition("=")[0] in answer.cells[0]["problem"]


def test_a_long_message_is_told_by_its_first_line(planner: Planner) -> None:
    planner.write(load="raise RuntimeError('first\\nsecond')")
    answer = planner.plan("broken")
    assert "second" not in answer.out
    assert [cell["problem"] for cell in answer.cells] == ["error: RuntimeError: first"]


# What a record says


def test_a_record_holds_what_was_predicted_and_what_was_measured(planner: Planner, in_process: list[Job]) -> None:
    (record,) = planner.run("fake")
    told, time_taken = record["estimate"], record["time"]
    assert {name: beside["predicted"] for name, beside in told.items()} == {
        "tokens": 1200,
        "index_flops": 3e9,
        "index_bytes": 5000,
        "peak_bytes": 7_000_000,
        "index_s": 90.0,
        "query_s": 0.25,
    }
    measured = {name: beside["measured"] for name, beside in told.items()}
    assert measured["index_bytes"] == record["memory"]["index_bytes"] == 4000
    assert measured["peak_bytes"] == record["memory"]["peak_rss_bytes"]
    assert measured["index_s"] == time_taken["index_s"] > 0
    assert measured["query_s"] == time_taken["query_p50_s"] > 0


def test_a_retriever_without_an_estimate_has_none_in_its_record(planner: Planner, in_process: list[Job]) -> None:
    assert [record["estimate"] for record in planner.run("silent", "bm25")] == [None, None]


def test_an_index_that_was_reused_was_not_measured(planner: Planner, in_process: list[Job]) -> None:
    source = planner.plugin.read_text().replace("class Fake(Silent):", "class Fake(Silent):\n    index_reused = True\n")
    planner.plugin.write_text(source)
    (record,) = planner.run("fake")
    assert record["time"]["index_s"] is None
    assert record["estimate"]["index_s"] == {"predicted": 90.0, "measured": None}
    assert cli.main(["table", str(planner.out)]) == 0


# Retrievers of the package


@pytest.mark.parametrize(
    "retriever",
    [
        "blocksearch:model={model}",
        "blocksearch:model={model},digits=2,cap=50",
        "blocksearch-ssmax-routing:model={model},routing_b=2",
        "blocksearch:model={model},readout=attention",
        "attention:model={model},layer=1",
        "attention:model={model},layer=2,heads=0+3,cap=40",
    ],
)
def test_bytes_and_tokens_are_predicted_exactly(
    planner: Planner, in_process: list[Job], tiny_model: TinyModel, retriever: str
) -> None:
    spec = retriever.format(model=tiny_model())
    (small, large) = planner.run(spec, n="6,all")
    for record in (small, large):
        told = record["estimate"]
        assert told["index_bytes"]["predicted"] == record["memory"]["index_bytes"] > 0
        assert told["tokens"]["predicted"] == record["config"]["retriever"]["settings"]["corpus_tokens"]
        assert told["index_flops"]["predicted"] > 0
    assert small["estimate"]["tokens"]["predicted"] < large["estimate"]["tokens"]["predicted"]
    cells = planner.plan(spec, n="6,all").cells
    assert [cell["tokens"] for cell in cells] == [
        f"{record['estimate']['tokens']['predicted']:,}" for record in (small, large)
    ]


def test_what_a_benchmark_cuts_is_not_counted(planner: Planner, in_process: list[Job], tiny_model: TinyModel) -> None:
    planner.data = Path(f"{planner.data},max_tokens=9")
    (record,) = planner.run(f"blocksearch:model={tiny_model()}")
    assert record["truncated"] == 12
    assert record["estimate"]["tokens"]["predicted"] == 12 * (18 + 9)
    assert record["config"]["retriever"]["settings"]["corpus_tokens"] == 12 * (18 + 9)


def test_time_and_memory_are_predicted_within_reason(
    planner: Planner, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other take any time on a busy machine
    (record,) = planner.run(f"blocksearch:model={tiny_model()}")
    for name in ("peak_bytes", "index_s", "query_s"):
        told = record["estimate"][name]
        assert 0 < told["predicted"] < 20 * told["measured"]
        assert told["measured"] < 20 * told["predicted"]


@pytest.mark.slow
def test_a_peak_is_predicted_with_its_index(planner: Planner, tiny_model: TinyModel) -> None:
    """Here of about half a gigabyte, which is nearly half of it."""
    texts = [f"{number:04d} " + "x" * 250 for number in range(250)]
    lines = [json.dumps({"_id": f"d{number}", "text": text}) + "\n" for number, text in enumerate(texts)]
    (planner.data / "corpus.jsonl").write_text("".join(lines))
    model = tiny_model(layers=8, num_key_value_heads=4, head_dim=32)
    (record,) = planner.run(f"blocksearch:model={model}", flags=("--dtype", "float32", "--device", "cpu"))
    assert record["memory"]["index_bytes"] > 4e8
    peak = record["estimate"]["peak_bytes"]
    assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.25)


# Interrupted


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait(until: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + GIVE_UP_S
    while not until():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_plan_exits_with_130_and_leaves_no_process(planner: Planner, number: signal.Signals) -> None:
    planner.write("""child = os.fork()
        if not child:
            time.sleep(600)
            os._exit(0)
        (HERE / "partial").write_text(f"{os.getpid()} {child}")
        (HERE / "partial").rename(HERE / "pids")
        time.sleep(600)""")
    work = planner.folder / "work"
    work.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "icr_bench.harness.cli", "plan", *planner.arguments("fake")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(work)},
    )
    try:
        wait(lambda: (planner.folder / "pids").exists() or process.poll() is not None)
        pids = [int(pid) for pid in (planner.folder / "pids").read_text().split()]
        assert all(alive(pid) for pid in pids)
        process.send_signal(number)
        out, error = process.communicate(timeout=GIVE_UP_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=GIVE_UP_S)
    assert process.returncode == 130
    assert "interrupted" in error
    assert "Traceback" not in error
    assert out == ""
    wait(lambda: not any(alive(pid) for pid in pids))
    assert list(work.iterdir()) == []


def test_an_interrupted_plan_does_not_speak_of_finished_cells(
    planner: Planner, in_process: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("icr_bench.harness.plan.run_cell", interrupt)
    answer = planner.plan("fake")
    assert answer.code == 130
    assert "finished cells" not in answer.err
