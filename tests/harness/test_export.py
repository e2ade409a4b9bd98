"""TREC files: any id survives, and every tool that reads them gets the figures of the record."""

import itertools
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

import ir_measures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_measures import RR, R, Success, nDCG

from icr_bench.harness.cli import main
from icr_bench.harness.errors import UsageError
from icr_bench.harness.export import descending, export, file_name, quote
from icr_bench.harness.folder import Record, latest, read_lines
from icr_bench.harness.run import run
from icr_bench.harness.suite import assemble

IDS = [
    "plain",
    "two words",
    "100%",
    "%20",
    "a%20b c",
    "no\u00a0break",
    "line\u2028separator",
    "tab\tbed",
    "line\nfeed",
    "\u3000wide",
    "n\u0085l",
    "\ufeffmark",
    "é\u0301",
    "#1",
    " ",
    "日本語",
]

SCORERS = '''
"""Scores that trec_eval's float32 cannot tell apart."""

from icr_bench.retrievers.base import Ranking, Retriever


class Flat(Retriever):
    """Gives every document the same score."""

    step = 0.0

    def index(self, documents):
        self.count = len(documents)

    def search(self, queries, k):
        scores = [1 + self.step * (i * 7 % self.count) for i in range(self.count)]
        best = sorted(range(self.count), key=lambda i: -scores[i])[:k]
        return [Ranking(best, [scores[i] for i in best]) for _ in queries]

    def index_bytes(self):
        return 1


class Close(Flat):
    """Gives scores that differ in the twelfth place."""

    step = 1e-12


RETRIEVERS = {"flat": Flat, "close": Close}
'''


class Silent:
    """A display that shows nothing."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def cell_started(self, title: str, number: int, total: int) -> None:
        pass

    def cell_progress(self, stage: str, done: int, total: int) -> None:
        pass

    def cell_ended(self, record: Record) -> None:
        pass


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run on documents with awkward ids, some of equal text, some queries matching nothing; and its warnings."""
    place = tmp_path_factory.mktemp("awkward ids")
    (place / "data").mkdir()
    texts = [f"colour{i % 3} shape{i % 4 // 2} thing" for i in range(len(IDS))]
    write_lines(place / "data" / "corpus.jsonl", [{"_id": i, "text": t} for i, t in zip(IDS, texts, strict=True)])
    asked = [text if i % 5 else "unheard" for i, text in enumerate(texts)]
    write_lines(place / "data" / "queries.jsonl", [{"_id": i, "text": t} for i, t in zip(IDS, asked, strict=True)])
    judged = [
        {"query-id": IDS[i], "corpus-id": IDS[(i + step) % len(IDS)], "score": grade}
        for i in range(len(IDS))
        for step, grade in ((0, i % 3), (3, 2), (6, 1), (7, 0))
    ]
    write_lines(place / "data" / "qrels.jsonl", judged)
    (place / "scorers.py").write_text(SCORERS)
    data = place / "data"
    suite = assemble(
        None,
        {
            "benchmark": [f"beir:path={data}", f"beir:path={data},relevant=2,exclude_self=true,label=without self"],
            "retriever": ["bm25", "flat", "close"],
            "plugin": [str(place / "scorers.py")],
            "k": "1,2,5,10",
        },
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = run(suite, place / "run", "icr-bench run", Silent(), fresh=False, retry_failed=False)
        for thread in set(threading.enumerate()) - {threading.current_thread()}:
            thread.join(5)
    assert [record["status"] for record in outcome.records] == ["ok"] * 6
    return place / "run", [str(warning.message) for warning in caught]


@pytest.fixture(scope="module")
def folder(made: tuple[Path, list[str]]) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def trec(folder: Path) -> Path:
    out = folder.parent / "trec"
    export(folder, out)
    return out


def cells(folder: Path) -> Iterator[Record]:
    return iter(latest(folder))


def find(folder: Path, benchmark: str, retriever: str) -> Record:
    return next(r for r in cells(folder) if (r["benchmark"], r["retriever"]) == (benchmark, retriever))


CELLS = list(itertools.product(["beir", "without self"], ["bm25", "flat", "close"]))


@pytest.mark.parametrize(("benchmark", "retriever"), CELLS)
def test_ir_measures_reads_back_what_was_ranked(folder: Path, trec: Path, benchmark: str, retriever: str) -> None:
    record = find(folder, benchmark, retriever)
    found: dict[str, list[str]] = {}
    for row in ir_measures.read_trec_run(str(trec / f"run.{file_name(record)}.trec")):
        found.setdefault(unquote(row.query_id), []).append(unquote(row.doc_id))
    kept = {line["query"]: line["documents"] for line in read_lines(folder, record["rankings"])}
    assert found == {query: documents for query, documents in kept.items() if documents}


@pytest.mark.parametrize(("benchmark", "retriever"), CELLS)
def test_ir_measures_reads_back_what_was_judged(folder: Path, trec: Path, benchmark: str, retriever: str) -> None:
    record = find(folder, benchmark, retriever)
    found: dict[str, dict[str, int]] = {}
    for row in ir_measures.read_trec_qrels(str(trec / f"qrels.{file_name(record)}.trec")):
        found.setdefault(unquote(row.query_id), {})[unquote(row.doc_id)] = row.relevance
    assert found == {line["query"]: line["judgments"] for line in read_lines(folder, record["judgments"])}


@pytest.mark.parametrize(("benchmark", "retriever"), CELLS)
def test_ir_measures_gives_the_figures_of_the_record(folder: Path, trec: Path, benchmark: str, retriever: str) -> None:
    record = find(folder, benchmark, retriever)
    relevant = record["config"]["benchmark"]["resolved"]["relevant"]
    measures = {"hit": Success(rel=relevant), "recall": R(rel=relevant), "mrr": RR(rel=relevant), "ndcg": nDCG}
    asked = {f"{name}@{k}": measure @ k for name, measure in measures.items() for k in (1, 2, 5, 10)}
    found = ir_measures.calc_aggregate(
        asked.values(),
        ir_measures.read_trec_qrels(str(trec / f"qrels.{file_name(record)}.trec")),
        ir_measures.read_trec_run(str(trec / f"run.{file_name(record)}.trec")),
    )
    ours = {name: record["metrics"][name]["value"] for name in asked}
    assert ours == pytest.approx({name: found[measure] for name, measure in asked.items()}, rel=0, abs=1e-9)


def test_run_warns_of_nothing(made: tuple[Path, list[str]]) -> None:
    assert made[1] == []


def test_the_run_has_ties_and_unanswered_queries(folder: Path) -> None:
    assert find(folder, "beir", "flat")["tie_rate"] == 1.0
    assert find(folder, "beir", "close")["tie_rate"] == 0.0
    assert 0 < find(folder, "beir", "bm25")["tie_rate"] < 1
    assert find(folder, "beir", "bm25")["queries"]["empty"] > 0


def test_float32_would_have_tied_the_close_scores(folder: Path) -> None:
    line = read_lines(folder, find(folder, "beir", "close")["rankings"])[0]
    assert len(set(line["scores"])) == 10
    assert len({float(np.float32(score)) for score in line["scores"]}) == 1


RANX = """
import json, sys, ranx
runs = [ranx.Run.from_file(file, kind="trec") for file in sys.argv[1::2]]
qrels = [ranx.Qrels.from_file(file, kind="trec") for file in sys.argv[2::2]]
metrics = [f"{name}@{k}" for name in ("hit_rate", "recall", "mrr", "ndcg") for k in (1, 2, 5, 10)]
found = [
    {
        "ranked": run.to_dict(),
        "judged": judged.to_dict(),
        "figures": ranx.evaluate(judged, run, metrics, make_comparable=True),
    }
    for run, judged in zip(runs, qrels)
]
print(json.dumps(found, default=int))
"""


@pytest.fixture(scope="module")
def ranx(folder: Path, trec: Path) -> dict[str, Any]:
    """What ranx reads and computes; uncompiled, which takes seconds instead of a minute."""
    if find_spec("ranx") is None:
        pytest.skip("ranx is not installed")
    records = [record for record in cells(folder) if record["benchmark"] == "beir"]
    files = [str(trec / f"{kind}.{file_name(record)}.trec") for record in records for kind in ("run", "qrels")]
    output = subprocess.run(
        [sys.executable, "-c", RANX, *files],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONUTF8": "1"},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    return dict(zip((record["retriever"] for record in records), json.loads(output), strict=True))


@pytest.mark.parametrize("retriever", ["bm25", "flat", "close"])
def test_ranx_reads_back_what_was_written(folder: Path, ranx: dict[str, Any], retriever: str) -> None:
    record, found = find(folder, "beir", retriever), ranx[retriever]
    ranked = {
        unquote(q): [unquote(d) for d in sorted(row, key=lambda d: -row[d])] for q, row in found["ranked"].items()
    }
    judged = {unquote(q): {unquote(d): grade for d, grade in row.items()} for q, row in found["judged"].items()}
    kept = {line["query"]: line["documents"] for line in read_lines(folder, record["rankings"])}
    assert {query: documents for query, documents in ranked.items() if documents} == {
        q: d for q, d in kept.items() if d
    }
    assert judged == {line["query"]: line["judgments"] for line in read_lines(folder, record["judgments"])}


@pytest.mark.parametrize("retriever", ["bm25", "flat", "close"])
def test_ranx_gives_the_figures_of_the_record(folder: Path, ranx: dict[str, Any], retriever: str) -> None:
    metrics = find(folder, "beir", retriever)["metrics"]
    figures = {name.replace("hit_rate", "hit"): value for name, value in ranx[retriever]["figures"].items()}
    assert {name: metrics[name]["value"] for name in figures} == pytest.approx(figures, rel=0, abs=1e-9)


@pytest.mark.parametrize("identifier", IDS)
def test_quoted_id_is_one_field_and_reversible(identifier: str) -> None:
    assert quote(identifier).split() == [quote(identifier)]
    assert unquote(quote(identifier)) == identifier


@given(identifier=st.text(min_size=1))
@settings(max_examples=80, deadline=None, database=None)
def test_any_id_is_one_field_and_reversible(identifier: str) -> None:
    assert quote(identifier).split() == [quote(identifier)]
    assert len(quote(identifier).splitlines()) == 1
    assert unquote(quote(identifier)) == identifier


def test_ordinary_ids_stay_as_they_are() -> None:
    assert quote("doc-12_é/日本語:3") == "doc-12_é/日本語:3"


def test_lone_surrogate_survives() -> None:
    identifier = json.loads('"\\ud800x"')
    assert unquote(quote(identifier).encode().decode(), errors="surrogatepass") == identifier


@given(scores=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30))
@settings(max_examples=100, deadline=None, database=None)
def test_exported_scores_fall_strictly_as_float32(scores: list[float]) -> None:
    kept = np.array(descending(sorted(scores, reverse=True)), dtype=np.float32)
    assert len(kept) == len(scores)
    assert np.isfinite(kept).all()
    assert (np.diff(kept) < 0).all()


def test_distinct_float32_scores_are_exported_unchanged() -> None:
    assert descending([2.5, 1.0, 0.125, -3.0]) == [2.5, 1.0, 0.125, -3.0]


def test_files_are_trec_lines(folder: Path, trec: Path) -> None:
    name = file_name(find(folder, "without self", "close"))
    ranks: dict[str, list[int]] = {}
    for line in (trec / f"run.{name}.trec").read_bytes().decode("utf-8").removesuffix("\n").split("\n"):
        query, zero, _, rank, _, tag = line.split(" ")
        assert (zero, tag) == ("Q0", "close")
        ranks.setdefault(query, []).append(int(rank))
    assert all(own == list(range(1, len(own) + 1)) for own in ranks.values())
    assert all(len(line.split(" ")) == 4 for line in (trec / f"qrels.{name}.trec").read_text("utf-8").splitlines())


def test_every_finished_cell_has_two_files(folder: Path, trec: Path) -> None:
    names = {f"{kind}.{file_name(record)}.trec" for record in cells(folder) for kind in ("run", "qrels")}
    assert {file.name for file in trec.iterdir()} == names
    assert len(names) == 12


def test_command_writes_beside_the_run_and_lists_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(folder)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert sorted(listed) == sorted(str(file) for file in (folder / "trec").iterdir())
    assert len(listed) == 12


def test_exporting_twice_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    first, second = ([file.read_bytes() for file in export(folder, tmp_path / "out")] for _ in range(2))
    assert first == second


RECORD = {
    "benchmark": "limit",
    "n": 46,
    "retriever": "bm25",
    "seed": 0,
    "status": "ok",
    "fingerprint": {"data": "0", "weights": {}, "code": "0"},
    "config": {
        "benchmark": {"name": "limit", "resolved": {"relevant": 1}},
        "retriever": {"name": "bm25", "resolved": {}},
        "k": [1],
        "depth": 1,
        "device": "cpu",
        "dtype": "float32",
    },
    "error": None,
    "key": "0",
    "command": "",
    "started": "",
    "queries": {"declared": 1, "scored": 0, "empty": 0, "failed": 1},
    "memory": {"peak_rss_bytes": 1},
    "environment": {
        "icr_bench": "0",
        "python": "3",
        "machine": {"id": "0", "processor": "", "threads": 1, "memory_bytes": 1},
        "packages": {},
        "git": None,
    },
}


def test_file_names_are_plain() -> None:
    assert file_name({**RECORD, "benchmark": "my/corpus: one", "retriever": "../x"}) == (
        "my%2Fcorpus%3A%20one.n46.%2E%2E%2Fx.seed0"
    )


def test_file_names_tell_rows_apart() -> None:
    assert file_name({**RECORD, "retriever": "k1 1.2"}) != file_name({**RECORD, "retriever": "k1_1_2"})


def hand_made(folder: Path, record: Record) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"suite": "quick", "format": 1, "command": ""}))
    write_lines(folder / "cells.jsonl", [record])
    return folder


def test_run_without_a_finished_cell_is_refused(tmp_path: Path) -> None:
    folder = hand_made(tmp_path / "run", {**RECORD, "status": "oom"})
    with pytest.raises(UsageError, match="no finished cell"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run was found") as caught:
        export(tmp_path, tmp_path / "out")
    assert str(tmp_path) in str(caught.value)


def test_output_that_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="cannot be written") as caught:
        export(folder, tmp_path / "file" / "out")
    assert str(tmp_path / "file" / "out") in str(caught.value)
