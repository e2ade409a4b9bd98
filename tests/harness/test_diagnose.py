"""`icr-bench diagnose`: cells, records, tables and pictures, and what it refuses before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from icr_bench.harness import diagnose
from icr_bench.harness.cli import main
from icr_bench.harness.folder import latest, read_lines, texts

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", layers=3, seed=5)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve documents in BEIR layout and four queries, of which the last has only a document of grade 1."""
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": f"d{n}", "title": "", "text": f"Person {n} likes {'abcdefghijkl'[n]}."} for n in range(12)]
    queries = [{"_id": f"q{n}", "text": f"Who likes {'abcd'[n]}?"} for n in range(4)]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = ["q0\td0\t2", "q1\td1\t2", "q1\td5\t2", "q2\td2\t2", "q3\td3\t1"]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(judged) + "\n")
    return folder


def run(*arguments: Any) -> int:
    return main(["diagnose", *map(str, arguments)])


def test_cells_records_tables_and_pictures(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = ["-b", f"beir:path={data}", "-n", "6,12", "-r", f"blocksearch:model={model}", "-r", "bm25", "-o", out]
    assert run(*asked, "--per-query") == 0
    shown = capsys.readouterr()
    assert "bm25: has no attention over documents to look into, left out" in shown.err
    titles = [line for line in shown.out.splitlines() if line.startswith("### ")]
    names = ["R_sum", "R_any", "first digit", "what layer", "decoding and", "shortlists", "what came"]
    assert [title.startswith(f"### beir: blocksearch, {name}") for title, name in zip(titles, names, strict=True)]
    records = latest(out)
    assert [(one["retriever"], one["n"]) for one in records] == [("blocksearch", 6), ("blocksearch", 12)]
    seen = records[0]["diagnosis"]
    assert seen["layers"] == [0, 1, 2]
    assert [len(seen[name]) for name in (*diagnose.SHARES, *diagnose.MEDIANS, "r_head")] == [3] * 12
    assert all(own["low"] <= own["value"] <= own["high"] for name in diagnose.SHARES for own in seen[name])
    lines = read_lines(out, records[1]["rankings"])
    assert [line["query"] for line in lines] == ["q0", "q1", "q2", "q3"]
    kept = texts(out, records[1]["documents"])
    for line in lines:
        tops = line["seen"]["top"]
        assert len(tops) == diagnose.BEST_HEADS + 1
        assert all(len(top) == 10 and set(top) <= kept.keys() for top in tops.values())
        assert [len(shares) for shares in line["seen"]["digits"]] == [10] * 4
    assert len(list((out / "pictures").glob("*.png"))) == 2
    assert len(list((out / "tables").glob("*.csv"))) == 7

    # The same answers as a run gives, and nothing is computed again unless something else is looked at.
    assert main(["run", *map(str, asked[:-2]), "-o", str(tmp_path / "plain")]) == 0
    plain = {one["n"]: one for one in latest(tmp_path / "plain") if one["retriever"] == "blocksearch"}
    for record in records:
        assert record["metrics"] == plain[record["n"]]["metrics"]
        told = [(line["documents"], line["scores"]) for line in read_lines(out, record["rankings"])]
        lines = read_lines(tmp_path / "plain", plain[record["n"]]["rankings"])
        assert told == [(line["documents"], line["scores"]) for line in lines]
    capsys.readouterr()
    assert run(*asked, "--per-query") == 0
    assert "0 cells computed, 2 there already" in capsys.readouterr().out
    assert run(*asked, "--ties", "hit") == 0
    assert "2 cells computed, 0 there already" in capsys.readouterr().out
    assert main(["table", str(out)]) == 0
    assert "not timed" in capsys.readouterr().out
    assert main(["run", *map(str, asked)]) == 2
    assert "holds cells of the suite 'custom (diagnosis)', not 'custom'" in capsys.readouterr().err


def test_refused_before_anything_is_computed(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def refused(*arguments: Any) -> str:
        assert run("-o", out, *arguments) == 2
        assert not (out / "cells.jsonl").exists()
        return capsys.readouterr().err

    asked = ["-b", f"beir:path={data}", "-r", f"blocksearch:model={model}"]
    assert "retriever bm25: has no attention over documents" in refused("-b", f"beir:path={data}", "-r", "bm25")
    assert "--layers: '-1' is not a whole number" in refused(*asked, "--layers", "-1")
    for flag, problem in (("--layers", "layers 9: the model has layers 0 to 2"), ("--heads", "heads 9: expected")):
        assert run(*asked, flag, "9", "-o", out, "--fresh") == 1
        (record,) = latest(out)
        assert record["status"] == "error"
        assert problem in record["error"]


def test_a_query_without_gold_is_left_out_and_named(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["-b", f"beir:path={data},relevant=2", "-r", f"blocksearch:model={model}", "-o", tmp_path / "out"]
    assert run(*asked, "--layers", "1", "--heads", "0") == 0
    assert "query 'q3' has no gold and is not scored" in capsys.readouterr().err
    (record,) = latest(tmp_path / "out")
    assert record["queries"]["declared"] == 3
    assert (record["diagnosis"]["layers"], record["diagnosis"]["heads"]) == ([1], [0])


def test_readout_is_chosen_on_the_other_half() -> None:
    """Each half's own best layer would be right for all; the other half's choice is right for none."""
    ranks = np.array([[1, 2], [2, 1]] * 10)  # even queries: layer 0 is right; odd ones: layer 1
    told = diagnose.readouts(ranks, np.stack((ranks, ranks), 2))
    assert told["sum"]["value"] == told["head"]["value"] == 0.0
    same = np.array([[2, 1]] * 20)
    assert diagnose.readouts(same, np.stack((same, same), 2))["sum"]["value"] == 1.0


def test_median_interval_covers() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        told = diagnose.median(rng.exponential(size=60))
        assert told["low"] <= told["value"] <= told["high"]
        covered += told["low"] <= np.log(2) <= told["high"]
    assert 930 <= covered <= 990
    assert diagnose.median(np.array([3.0])) == {"value": 3.0, "low": 3.0, "high": 3.0}
