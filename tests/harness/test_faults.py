"""Retrievers that break, and runs that are broken off: one row each, and nothing else is lost."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from icr_bench.harness.cli import main
from icr_bench.harness.folder import texts

Record = dict[str, Any]

GIVE_UP_S = 30
"""A test waits for another process at most that long."""

HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
from icr_bench.retrievers.base import Ranking, Retriever

HERE = Path(__file__).parent


class Healthy(Retriever):
    def index(self, documents):
        self.count = len(documents)

    def search(self, queries, k):
        return [self.rank(k) for _ in queries]

    def rank(self, k):
        return Ranking(list(range(k)), [1.0] * k)

    def index_bytes(self):
        return 8


RETRIEVERS = {"healthy": Healthy}
"""

FAULT = """
class Broken(Healthy):
{body}

RETRIEVERS[{name!r}] = Broken
"""


def _rank(expression: str) -> str:
    return f"    def rank(self, k):\n        return {expression}\n"


def _index(statements: str) -> str:
    return "    def index(self, documents):\n" + "".join(f"        {line}\n" for line in statements.splitlines())


FORKING = _index(
    """self.count = len(documents)
child = os.fork()
if not child:
    self.count = 1  # goes on as if it were the cell
    time.sleep(0.1)
else:
    os.waitpid(child, 0)"""
)

LEAVING = _index(
    """import subprocess
self.count = len(documents)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
(HERE / 'helper').write_text(str(child.pid))"""
)

SPIKE = _index("self.count = len(documents)\nheld = b'x' * 700_000_000\ndel held")

GARBAGE = _index("(Path(sys.argv[2])).write_bytes(b'\\xff{')\nos._exit(0)")

NO_RESULT = _index("(Path(sys.argv[2])).write_text('[]')\nos._exit(0)")

CHILD = "subprocess.run([sys.executable, '-c', 'import time; held = b\"x\" * 700_000_000; time.sleep(600)'])"

FAULTS: dict[str, tuple[str, str, str]] = {
    "unknown-number": (_rank("Ranking([self.count], [1.0])"), "error", "document 6; the corpus has 0 to 5"),
    "negative-number": (_rank("Ranking([-1], [1.0])"), "error", "document -1"),
    "no-number": (_rank("Ranking(['d1'], [1.0])"), "error", "str"),
    "repeated-number": (_rank("Ranking([3, 3], [2.0, 1.0])"), "error", "document 3 more than once"),
    "too-many": (_rank("Ranking(list(range(3)), [1.0] * 3)"), "error", "3 documents, more than k=2"),
    "fewer-scores": (_rank("Ranking([0, 1], [1.0])"), "error", "2 numbers but 1 scores"),
    "nan": (_rank("Ranking([0], [float('nan')])"), "error", "score nan"),
    "infinite": (_rank("Ranking([0], [float('inf')])"), "error", "score inf"),
    "no-ranking": (_rank("[0, 1]"), "error", "list of Ranking"),
    "one-too-few": ("    def search(self, queries, k):\n        return []\n", "error", "0 rankings for 1 queries"),
    "raises-in-init": ("    def __init__(self):\n        raise RuntimeError('no such GPU')\n", "error", "no such GPU"),
    "raises-in-load": (
        "    def load(self):\n        raise OSError('no such file')\n",
        "error",
        "OSError: no such file",
    ),
    "raises-in-index": (_index("raise KeyError('gone')"), "error", "KeyError: 'gone'"),
    "raises-in-search": (_rank("1 / 0"), "error", "ZeroDivisionError"),
    "exits": (_index("sys.exit('enough')"), "error", "SystemExit: enough"),
    "ends-at-once": (_index("os._exit(3)"), "error", "exit code 3"),
    "kills-itself": (
        _index("print('last words', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"),
        "killed",
        "SIGKILL",
    ),
    "out-of-memory": (_index("raise MemoryError('no room for vectors')"), "oom", "no room for vectors"),
    "forks-and-ends": (FORKING + " " * 12 + "os._exit(3)\n", "error", "ended with exit code 3 and no result"),
    "garbage": (GARBAGE, "error", "left a result that cannot be read"),
    "no-result": (NO_RESULT, "error", "cannot be read (the whole: expected an object, got [])"),
    "beyond-the-limit": (_index("held = b'x' * 700_000_000\ntime.sleep(600)"), "oom", "--memory-limit 600,000,000"),
}
"""What a retriever does wrong, the status of its row, and what its reason says."""

CHATTY = _index("self.count = len(documents)\nprint('x' * 5_000_000)\nprint('y' * 1000, file=sys.stderr)")

PARENT = _index(
    """self.count = len(documents)
child = os.fork()
if not child:
    time.sleep(600)
    os._exit(0)
(HERE / 'child').write_text(str(child))"""
)


def write_plugin(folder: Path, bodies: dict[str, str]) -> Path:
    """Retrievers by name, beside one called ``healthy``."""
    file = folder / "plugin.py"
    file.write_text(HEAD + "".join(FAULT.format(name=name, body=body) for name, body in bodies.items()))
    return file


def write_beir(folder: Path) -> Path:
    """Six documents and two queries."""
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text("".join(f'{{"_id": "d{i}", "text": "word{i}"}}\n' for i in range(6)))
    (folder / "queries.jsonl").write_text("".join(f'{{"_id": "q{i}", "text": "word{i}"}}\n' for i in range(2)))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\nq1\td1\t1\n")
    return folder


def command(folder: Path, names: list[str], bodies: dict[str, str], *more: object) -> list[str]:
    """Arguments of a run of plug-ins, whose folder is ``out``."""
    data = folder / "data"
    chosen = [argument for name in names for argument in ("-r", name)]
    plugin = write_plugin(folder, bodies)
    fixed = ["-b", f"beir:path={data if data.exists() else write_beir(data)}", "-k", "1,2", "--plugin", str(plugin)]
    return ["run", *fixed, *chosen, "-o", str(folder / "out"), *map(str, more)]


def records(folder: Path) -> list[Record]:
    file = folder / "out" / "cells.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait(until: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + GIVE_UP_S
    while not until():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


# Every fault in one run


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, list[str]]:
    """The folder of a run over every fault, its exit code, and its command."""
    folder = tmp_path_factory.mktemp("faulty")
    bodies = {name: body for name, (body, _, _) in FAULTS.items()} | {"chatty": CHATTY, "parent": PARENT}
    bodies |= {"forking": FORKING, "leaving": LEAVING}
    arguments = command(folder, [*bodies, "healthy"], bodies, "--memory-limit", "600MB")
    return folder, main(arguments), arguments


@pytest.fixture(scope="module")
def rows(faulty: tuple[Path, int, list[str]]) -> dict[str, Record]:
    return {record["retriever"]: record for record in records(faulty[0])}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_row_with_status_and_reason(rows: dict[str, Record], name: str) -> None:
    _, status, reason = FAULTS[name]
    assert rows[name]["status"] == status
    assert reason in rows[name]["error"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_cell_answers_nothing(rows: dict[str, Record], name: str) -> None:
    assert rows[name]["queries"] == {"declared": 2, "scored": 0, "empty": 0, "failed": 2}
    assert rows[name]["metrics"] is None
    assert rows[name]["memory"]["peak_rss_bytes"] >= 0


def test_there_is_one_row_a_cell(faulty: tuple[Path, int, list[str]], rows: dict[str, Record]) -> None:
    assert len(records(faulty[0])) == len(rows) == len(FAULTS) + 5


def test_a_run_with_failed_cells_exits_with_1(faulty: tuple[Path, int, list[str]]) -> None:
    assert faulty[1] == 1


def test_other_cells_go_on(rows: dict[str, Record]) -> None:
    assert rows["healthy"]["status"] == "ok"
    assert rows["healthy"]["queries"]["scored"] == 2


def test_the_last_words_of_a_killed_cell_are_kept(rows: dict[str, Record]) -> None:
    assert "last words" in rows["kills-itself"]["error"]


def test_the_log_of_a_failed_cell_holds_its_traceback(
    faulty: tuple[Path, int, list[str]], rows: dict[str, Record]
) -> None:
    log = (faulty[0] / "out" / rows["raises-in-index"]["log"]).read_text()
    assert "Traceback" in log
    assert "plugin.py" in log


def test_a_failed_row_holds_the_last_lines_of_its_log(rows: dict[str, Record]) -> None:
    assert rows["kills-itself"]["log_tail"] == ["last words"]
    assert rows["raises-in-index"]["log_tail"][-1] == "KeyError: 'gone'"
    assert all(len("".join(rows[name]["log_tail"])) < 5_000 for name in FAULTS)


def test_a_cell_beyond_its_limit_is_charged_with_what_it_held(rows: dict[str, Record]) -> None:
    row = rows["beyond-the-limit"]
    used = int(row["error"].removeprefix("used ").split()[0].replace(",", ""))
    assert used > 600_000_000
    # The rest was held by the guard beside it, a shell.
    assert used - 20_000_000 < row["memory"]["peak_rss_bytes"] <= used


def test_what_a_retriever_prints_goes_to_the_log(faulty: tuple[Path, int, list[str]], rows: dict[str, Record]) -> None:
    assert rows["chatty"]["status"] == "ok"
    assert (faulty[0] / "out" / rows["chatty"]["log"]).stat().st_size > 5_000_000


def test_a_child_that_lives_on_is_gone_afterwards(faulty: tuple[Path, int, list[str]], rows: dict[str, Record]) -> None:
    assert rows["parent"]["status"] == "ok"
    child = int((faulty[0] / "child").read_text())
    wait(lambda: not alive(child))


def test_a_helper_in_a_session_of_its_own_is_gone_afterwards(
    faulty: tuple[Path, int, list[str]], rows: dict[str, Record]
) -> None:
    assert rows["leaving"]["status"] == "ok"
    helper = int((faulty[0] / "helper").read_text())
    wait(lambda: not alive(helper))


def test_a_forked_child_that_goes_on_leaves_the_result_to_its_parent(
    faulty: tuple[Path, int, list[str]], rows: dict[str, Record]
) -> None:
    assert rows["forking"]["status"] == "ok", rows["forking"]["error"]
    assert not list((faulty[0] / "out").rglob("*.partial"))


def test_a_peak_between_two_looks_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icr_bench.harness.process.POLL_S", 600)
    assert main(command(tmp_path, ["spike"], {"spike": SPIKE}, "--memory-limit", "600MB")) == 1
    (record,) = records(tmp_path)
    assert record["status"] == "oom"
    assert re.fullmatch(r"used [\d,]+ bytes at its peak, more than --memory-limit 600,000,000", record["error"])
    assert record["memory"]["peak_rss_bytes"] > 700_000_000


def test_the_limit_counts_children(tmp_path: Path) -> None:
    body = _index("import subprocess\nself.count = len(documents)\n" + CHILD)
    assert main(command(tmp_path, ["shared"], {"shared": body}, "--memory-limit", "600MB")) == 1
    (record,) = records(tmp_path)
    assert record["status"] == "oom"
    assert record["memory"]["peak_rss_bytes"] < 600_000_000


def test_the_tables_show_the_status(faulty: tuple[Path, int, list[str]]) -> None:
    text = (faulty[0] / "out" / "tables" / "beir-hit@1.md").read_text()
    for name, (_, status, _) in FAULTS.items():
        assert any(f"| {name} " in line and f" {status} " in line for line in text.splitlines())


def test_a_rerun_leaves_failed_cells(faulty: tuple[Path, int, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(faulty[2]) == 1
    shown = capsys.readouterr()
    assert "0 cells computed" in shown.out
    assert "error: KeyError: 'gone'" in shown.err


# What brings a failed cell back

FLAKY = _index(
    """self.count = len(documents)
if (HERE / 'broken').exists():
    raise RuntimeError('not today')"""
)
SLOW = _index(
    """self.count = len(documents)
if (HERE / 'slow').exists():
    time.sleep(600)"""
)


def test_retry_failed_computes_only_failed_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, ["flaky", "healthy"], {"flaky": FLAKY})
    (tmp_path / "broken").touch()
    assert main(arguments) == 1
    (tmp_path / "broken").unlink()
    assert main(arguments) == 1
    assert len(records(tmp_path)) == 2
    assert main([*arguments, "--retry-failed"]) == 0
    assert "1 cells computed, 1 there already" in capsys.readouterr().out
    assert [(r["retriever"], r["status"]) for r in records(tmp_path)][-1] == ("flaky", "ok")


def test_a_cell_over_its_time_is_ended_and_retried_under_another_limit(tmp_path: Path) -> None:
    arguments = command(tmp_path, ["slow"], {"slow": SLOW})
    (tmp_path / "slow").touch()
    assert main([*arguments, "--timeout", "1"]) == 1
    (record,) = records(tmp_path)
    assert record["status"] == "timeout"
    assert "--timeout 1" in record["error"]
    assert main([*arguments, "--timeout", "1"]) == 1
    assert len(records(tmp_path)) == 1
    (tmp_path / "slow").unlink()
    assert main([*arguments, "--timeout", "600"]) == 0


# A plug-in's constructor, which runs before the first cell too


def _init(statement: str) -> dict[str, str]:
    return {"broken": f"    def __init__(self, *, size: int = 1):\n        {statement}\n"}


def test_options_that_the_constructor_refuses_are_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = _init("raise ValueError(f'size must be even, got {size}')")
    assert main(command(tmp_path, ["broken"], bodies)) == 2
    error = capsys.readouterr().err
    assert error.startswith("icr-bench: ")
    assert "size must be even, got 1" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("statement", ["assert size > 1", "import no_such_module", "raise Exception('broken')"])
def test_a_constructor_that_raises_is_one_row(tmp_path: Path, statement: str) -> None:
    assert main(command(tmp_path, ["broken", "healthy"], _init(statement))) == 1
    assert [record["status"] for record in records(tmp_path)] == ["error", "ok"]


@pytest.mark.parametrize("statement", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)"])
def test_a_constructor_that_ends_its_process_is_one_row(tmp_path: Path, statement: str) -> None:
    arguments = command(tmp_path, ["broken", "healthy"], _init(statement))
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    assert ended.returncode == 1
    assert [record["status"] == "ok" for record in records(tmp_path)] == [False, True]


def test_a_constructor_that_sleeps_does_not_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icr_bench.harness.prepare.CHECK_S", 0.5)
    arguments = command(tmp_path, ["broken", "healthy"], _init("time.sleep(600)"), "--timeout", "20")
    assert main(arguments) == 1
    assert [record["status"] for record in records(tmp_path)] == ["timeout", "ok"]


def test_a_constructor_runs_in_no_process_of_the_run(tmp_path: Path) -> None:
    where = "(HERE / 'ran').open('a').write(f'{os.getpid()}\\n')"
    bodies = {"broken": f"    def __init__(self):\n        {where}\n"}
    assert main(command(tmp_path, ["broken"], bodies)) == 0
    assert main(["diagnose", *command(tmp_path, ["broken"], bodies)[1:-2], "-o", str(tmp_path / "seen")]) == 2
    assert main(["plan", *command(tmp_path, ["broken"], bodies)[1:-2]]) == 0
    ran = [int(line) for line in (tmp_path / "ran").read_text().splitlines()]
    assert len(ran) >= 4
    assert os.getpid() not in ran


def test_an_extra_that_a_constructor_lacks_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raising = "from icr_bench.retrievers.base import MissingExtra; raise MissingExtra('faiss', 'faiss')"
    assert main(command(tmp_path, ["broken"], _init(raising))) == 4
    assert "faiss is not installed; pip install 'icr-bench[faiss]'" in capsys.readouterr().err


def test_an_annotation_that_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = {"broken": "    def __init__(self, *, size: 'Missing' = 1):\n        pass\n"}
    assert main(command(tmp_path, ["broken"], bodies)) == 2
    assert "Missing" in capsys.readouterr().err


def test_a_callable_whose_options_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(tmp_path, ["made"], {})
    with (tmp_path / "plugin.py").open("a") as plugin:
        plugin.write("import functools\nRETRIEVERS['made'] = functools.partial(Healthy)\n")
    assert main(arguments) == 2
    assert "'made'" in capsys.readouterr().err


def test_settings_that_are_no_dict_are_one_row(tmp_path: Path) -> None:
    bodies = {"broken": "    def settings(self):\n        return None\n"}
    assert main(command(tmp_path, ["broken"], bodies)) == 1
    assert records(tmp_path)[0]["status"] == "error"


def test_progress_in_fractions_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda problem: died.append(str(problem.exc_value)))
    bodies = {"broken": _index("self.count = len(documents)\nself.progress(0.5, 1.0)")}
    assert main(command(tmp_path, ["broken"], bodies)) == 0
    assert not died


def test_a_thread_that_lives_on_does_not_hold_the_cell(tmp_path: Path) -> None:
    thread = "threading.Thread(target=lambda: (time.sleep(2), (HERE / 'ended').touch())).start()"
    bodies = {"threaded": _index(f"self.count = len(documents)\n{thread}")}
    assert main(command(tmp_path, ["threaded"], bodies)) == 0
    assert not (tmp_path / "ended").exists()


def test_a_question_on_standard_input_finds_its_end(tmp_path: Path) -> None:
    """Else it waits for ever: there is something to read, be it the end, or there is not."""
    body = _index("import select\nself.count = len(documents)\nassert select.select([0], [], [], 0)[0]")
    assert main(command(tmp_path, ["asks"], {"asks": body})) == 0


def test_a_retriever_may_change_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = command(Path(), ["moves"], {"moves": _index("self.count = len(documents)\nos.chdir('/')")})
    assert main(arguments) == 0


def test_a_module_in_the_working_directory_does_not_stand_in_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("raise ImportError('not the one that was meant')\n")
    assert main(command(tmp_path, ["healthy"], {})) == 0


# Runs that are broken off

HANGING = _index(
    """self.count = len(documents)
if (HERE / 'hang').exists():
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    (HERE / 'partial').write_text(f'{os.getpid()} {child}')
    (HERE / 'partial').rename(HERE / 'pids')
    time.sleep(600)"""
)


RUN = "from icr_bench.harness.cli import main; sys.exit(main(sys.argv[1:]))"

COMMAND = (sys.executable, "-m", "icr_bench.harness.cli")


class Hanging:
    """A run in a process of its own that has finished one cell and hangs in the second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arguments = command(folder, ["healthy", "hanging"], {"hanging": HANGING})
        (folder / "hang").touch()
        # Else a run whose parent ignores SIGINT, such as a shell that started it in the background, ignores it too.
        heeding = f"import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); {RUN}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", heeding, *self.arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait(lambda: (folder / "pids").exists() or self.process.poll() is not None)
        self.pids = [int(pid) for pid in (folder / "pids").read_text().split()]
        (folder / "hang").unlink()

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Exit code and standard error after a signal."""
        self.process.send_signal(number)
        _, error = self.process.communicate(timeout=GIVE_UP_S)
        return self.process.returncode, error


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    run = Hanging(tmp_path)
    yield run
    if run.process.poll() is None:
        run.process.kill()
    run.process.communicate(timeout=GIVE_UP_S)


def _goes_on(run: Hanging) -> None:
    wait(lambda: not any(alive(pid) for pid in run.pids))
    kept = records(run.folder)
    assert [record["retriever"] for record in kept] == ["healthy"]
    again = subprocess.run([*COMMAND, *run.arguments], capture_output=True, text=True, check=True)
    assert "1 cells computed, 1 there already" in again.stdout
    assert records(run.folder)[:1] == kept


def test_a_killed_run_takes_its_cell_along_and_goes_on(hanging: Hanging) -> None:
    assert all(alive(pid) for pid in hanging.pids)
    assert hanging.end(signal.SIGKILL)[0] == -signal.SIGKILL
    _goes_on(hanging)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_exits_with_130_and_goes_on(hanging: Hanging, number: signal.Signals) -> None:
    code, error = hanging.end(number)
    assert code == 130
    assert "interrupted" in error
    assert "Traceback" not in error
    _goes_on(hanging)


def test_two_runs_at_once_the_second_refuses(hanging: Hanging, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(hanging.arguments) == 2
    assert "another run" in capsys.readouterr().err
    assert hanging.process.poll() is None
    assert all(alive(pid) for pid in hanging.pids)


# The same records, whatever happened on the way

MEASURED = ("time", "memory", "started", "environment", "command", "log", "estimate")
"""What differs between two runs of one cell."""

ROWS = ["bm25", "bm25:k1=1.2,label=other", "bm25:b=0.9,label=third", "healthy"]


def outcome(folder: Path) -> dict[str, Any]:
    """What a run came to but for its measurements: records, rankings, judgments and texts."""
    kept = {}
    for record in records(folder):
        name = f"{record['retriever']} {record['n']}"
        own = {key: value for key, value in record.items() if key not in MEASURED}
        files = [(folder / "out" / own[key]).read_text() for key in ("rankings", "judgments")]
        kept[name] = own, files, texts(folder / "out", own["documents"])
    return kept


def dies_at(arguments: list[str], seconds: float) -> bool:
    """Whether a run was still going when it was killed after so long."""
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    assert process.wait() in (0, -signal.SIGKILL)
    return process.returncode != 0


@pytest.mark.slow
def test_a_run_killed_at_thirty_moments_ends_with_the_same_records(tmp_path: Path) -> None:
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    for folder in (quiet, killed):
        folder.mkdir()
    arguments = command(quiet, ROWS, {}, "-n", "2,4,6")
    assert main(arguments) == 0
    expected = outcome(quiet)
    assert len(expected) == 12

    arguments = command(killed, ROWS, {}, "-n", "2,4,6")
    arguments[arguments.index("-b") + 1] = f"beir:path={quiet / 'data'}"
    arguments[arguments.index("--plugin") + 1] = str(quiet / "plugin.py")
    rng, kills = random.Random(7), 0
    while kills < 30:
        if dies_at(arguments, rng.uniform(0.2, 4)):
            kills += 1
        else:  # it came to its end before the moment did
            assert outcome(killed) == expected
            shutil.rmtree(killed / "out")
    assert main(arguments) == 0
    assert outcome(killed) == expected
    assert {entry.name for entry in (killed / "out").iterdir()} == {entry.name for entry in (quiet / "out").iterdir()}


def test_a_disk_too_full_for_a_result_is_no_row(tmp_path: Path) -> None:
    wordy = "    def settings(self):\n        return {'told': 'x' * 20_000}\n"
    arguments = command(tmp_path, ["healthy", "wordy"], {"wordy": wordy})
    limited = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, 14_000)); {RUN}"
    ended = subprocess.run([sys.executable, "-c", limited, *arguments], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "out: File too large; finished cells are kept, the same command goes on from there" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [record["retriever"] for record in records(tmp_path)] == ["healthy"]
    assert not list((tmp_path / "out").rglob("*.partial"))
    assert main(arguments) == 0


def test_what_a_killed_run_left_half_written_is_deleted(tmp_path: Path) -> None:
    arguments = command(tmp_path, ["healthy"], {})
    assert main(arguments) == 0
    left = [tmp_path / "out" / "run.json.7.partial", tmp_path / "out" / "rankings" / "x.jsonl.7.partial"]
    for file in left:
        file.write_text("{")
    assert main(arguments) == 0
    assert not any(file.exists() for file in left)


def test_a_torn_texts_file_is_made_whole(tmp_path: Path) -> None:
    arguments = command(tmp_path, ["healthy"], {}, "-n", "4")
    assert main(arguments) == 0
    name = records(tmp_path)[0]["documents"]
    whole, file = texts(tmp_path / "out", name), tmp_path / "out" / name
    assert set(whole.items()) <= {(f"d{i}", f"word{i}") for i in range(6)}
    file.write_bytes(file.read_bytes()[:-5])
    assert len(texts(tmp_path / "out", name)) == len(whole) - 1
    (tmp_path / "out" / "cells.jsonl").unlink()
    assert main(arguments) == 0
    assert texts(tmp_path / "out", name) == whole


def test_a_full_disk_loses_no_finished_cell_and_is_told(tmp_path: Path) -> None:
    arguments = command(tmp_path, ROWS, {}, "-n", "2,4,6")
    limited = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, 14_000)); {RUN}"
    ended = subprocess.run([sys.executable, "-c", limited, *arguments], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "out: File too large; finished cells are kept, the same command goes on from there" in ended.stderr
    assert "Traceback" not in ended.stderr
    lines = (tmp_path / "out" / "cells.jsonl").read_text().split("\n")
    kept = [json.loads(line) for line in lines[:-1]]
    assert 1 < len(kept) < 12
    assert all(record["status"] == "ok" for record in kept)
    again = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=True)
    assert f"{12 - len(kept)} cells computed, {len(kept)} there already" in again.stdout
    assert records(tmp_path)[: len(kept)] == kept
