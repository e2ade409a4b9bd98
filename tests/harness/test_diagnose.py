"""`icr-bench diagnose`: cells, records, tables and pictures, and what it refuses before anything is computed."""

from __future__ import annotations

import json
import math
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
    assert "bm25: only blocksearch and its rows can be looked into; left out" in shown.err
    titles = [line for line in shown.out.splitlines() if line.startswith("### ")]
    names = ["R_sum", "R_any", "first digit", "the first", "what layer", "decoding and", "shortlists", "what came"]
    assert [title.startswith(f"### beir: blocksearch, {name}") for title, name in zip(titles, names, strict=True)]
    records = latest(out)
    assert [(one["retriever"], one["n"]) for one in records] == [("blocksearch", 6), ("blocksearch", 12)]
    seen = records[0]["diagnosis"]
    assert seen["layers"] == [0, 1, 2]
    assert [len(seen[name]) for name in (*diagnose.SHARES, *diagnose.MEDIANS, "r_head")] == [3] * 13
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
    slugs = ["codes", "digit", "digit_right", "r_any", "r_sum", "readout", "shortlists", "written"]
    assert sorted(file.name for file in (out / "tables").glob("*.csv")) == [
        f"beir-blocksearch-seed0-{slug}.csv" for slug in slugs
    ]

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
    only = "only blocksearch and its rows can be looked into"
    assert f"retriever bm25: {only}" in refused("-b", f"beir:path={data}", "-r", "bm25")
    assert "--layers: '-1' is not a whole number" in refused(*asked, "--layers", "-1")
    assert "layers 9: the model has layers 0 to 2" in refused(*asked, "--layers", "0,9")
    assert "heads 9: expected" in refused(*asked, "--heads", "9")
    assert "readout=attention decodes no digits" in refused(*asked[:3], f"{asked[3]},readout=attention")


def test_a_cell_looked_into_in_two_ways_stands_in_the_tables_of_each(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables hold the cells of the command at hand, and layers are found by their numbers."""
    asked = ["-b", f"beir:path={data}", "-r", f"blocksearch:model={model}", "-o", tmp_path / "out", "-k", "2"]
    assert run(*asked, "-n", "6,12") == 0
    whole = capsys.readouterr().out
    assert "N=6 " in whole
    assert run(*asked, "-n", "12", "--layers", "1") == 0
    part = capsys.readouterr().out
    assert "N=6 " not in part

    def row(shown: str, layer: str) -> list[str]:
        table = shown.partition("R_sum\n")[2].partition("- share")[0]
        return next(line.split("|")[2:-1] for line in table.splitlines() if line.startswith(f"| {layer} "))

    assert [cell.strip() for cell in row(part, "1")] == [row(whole, "1")[1].strip()]
    held = (tmp_path / "out" / "tables" / "beir-blocksearch-seed0-r_sum.csv").read_text()
    assert held.splitlines()[-1].startswith("1,")


def test_the_document_of_a_querys_own_id_is_no_rival(model: Path, data: Path, tmp_path: Path) -> None:
    """ArguAna's way: the corpus holds the queries, and a query's own text is never an answer."""
    corpus = (data / "corpus.jsonl").read_text()
    queries = [json.loads(line) for line in (data / "queries.jsonl").read_text().splitlines()]
    own = "".join(json.dumps({"_id": q["_id"], "title": "", "text": q["text"]}) + "\n" for q in queries)
    (data / "corpus.jsonl").write_text(corpus + own)
    asked = ["-b", f"beir:path={data},exclude_self=true", "-r", f"blocksearch:model={model}", "-o", tmp_path / "out"]
    assert run(*asked, "--per-query", "-k", "1,5") == 0
    (record,) = latest(tmp_path / "out")
    lines = read_lines(tmp_path / "out", record["rankings"])
    for line in lines:
        assert all(line["query"] not in top for top in line["seen"]["top"].values())
        assert line["query"] not in line["documents"]
    right = sum(line["seen"]["constrained"] == "right" for line in lines) / len(lines)
    assert record["metrics"]["hit@1"]["value"] == right


def test_a_query_without_gold_is_left_out_and_named(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["-b", f"beir:path={data},relevant=2", "-r", f"blocksearch:model={model}", "-o", tmp_path / "out"]
    assert run(*asked, "--layers", "1", "--heads", "0") == 0
    assert "query 'q3' has no gold and is not scored" in capsys.readouterr().err
    (record,) = latest(tmp_path / "out")
    assert record["queries"]["declared"] == 3
    assert (record["diagnosis"]["layers"], record["diagnosis"]["heads"]) == ([1], [0])


def seen(**changes: Any) -> dict[str, Any]:
    """A row of three layers, of which the first sees no document, and two heads."""
    row = {
        "layers": [0, 1, 2],
        "heads": [4, 7],
        "rank_sum": [0, 1, 5],
        "rank_heads": [[0, 0], [1, 9], [2, 3]],
        "score": [None, [1.0, 3.0], [None, None]],
        "gap": [None, [-1.0, 1.0], None],
        "mass": [[0.0, 0.0], [0.6, 0.8], [0.0, 0.0]],
        "norm": [1.0, 4.0, 2.0],
        "norm_gold": [0.0, 3.0, 0.0],
        "norm_rest": [1.0, 2.0, 2.0],
        "digit": [0.1, 0.2, 0.3],
        "digit_best": [0.4, 0.5, 0.6],
        "digit_right": [False, True, True],
        "chance": 0.15,
        "constrained": "right",
        "free": "none",
    }
    return row | changes


def test_a_summary_by_hand() -> None:
    rows = [seen()] * 3 + [
        seen(
            rank_sum=[0, 3, 20],
            rank_heads=[[0, 0], [2, 1], [4, 1]],
            score=[None, [0.0, 0.0], [2.0, 4.0]],
            gap=[None, [9.0, 9.0], [1.0, 2.0]],
            digit_right=[False, False, True],
            chance=0.35,
            constrained="first",
            free="later",
        )
    ]
    found = diagnose.summary(rows, [[1, 2], [1], [2], [3]], 20)

    def values(name: str) -> list[Any]:
        return [own and own["value"] for own in found[name]]

    assert (found["layers"], found["heads"]) == ([0, 1, 2], [4, 7])
    assert values("r_sum") == [None, 0.75, 0.0]
    assert values("r_any") == [None, 1.0, 0.25]
    assert found["r_head"] == [None, [0.75, 0.25], [0.0, 0.25]]
    assert values("digit") == pytest.approx([0.1, 0.2, 0.3])
    assert values("digit_best") == pytest.approx([0.4, 0.5, 0.6])
    assert values("digit_right") == [0.0, 0.75, 1.0]
    assert values("norm") == [None, 4.0, 2.0]
    assert values("share") == [None, 0.75, 0.0]
    assert values("mass")[1] == pytest.approx(0.7)
    assert values("score") == [None, 2.0, -np.inf]  # most queries' golds are not seen in the last layer
    assert values("gap") == [None, 0.0, np.inf]
    assert found["r_sum"][1]["low"] < 0.75 < found["r_sum"][1]["high"]
    assert {b: [own and own["value"] for own in layers] for b, layers in found["shortlist"].items()} == {
        "1": [None, 0.75, 0.0],
        "4": [None, 1.0, 0.0],
        "16": [None, 1.0, 0.75],
    }
    told = {beam: {kind: own["value"] for kind, own in kinds.items()} for beam, kinds in found["outcomes"].items()}
    assert told == {
        "constrained": {"right": 0.75, "first": 0.25, "later": 0.0, "none": 0.0},
        "free": {"right": 0.0, "first": 0.0, "later": 0.25, "none": 0.75},
    }
    shares = [0.1, 0.05, 0.05, 0.05]
    assert found["chance"]["r_sum"] == pytest.approx(np.mean(shares))
    assert found["chance"]["r_any"] == pytest.approx(np.mean([1 - (1 - share) ** 2 for share in shares]))
    assert found["chance"]["digit_right"] == pytest.approx(0.2)


def test_of_one_query_a_summary_has_no_interval_of_its_median() -> None:
    found = diagnose.summary([seen()], [[1]], 2)
    assert found["norm"][1] == {"value": 4.0, "low": -np.inf, "high": np.inf}
    assert found["readout"]["sum"]["value"] == 0.0
    assert found["shortlist"].keys() == {"1"}


def test_readout_is_chosen_on_the_other_half() -> None:
    """Each half's own best layer would be right for all; the other half's choice is right for none."""
    ranks = np.array([[1, 2], [2, 1]] * 10)  # even queries: layer 0 is right; odd ones: layer 1
    told = diagnose.readouts(ranks, np.stack((ranks, ranks), 2))
    assert told["sum"]["value"] == told["head"]["value"] == 0.0
    same = np.array([[2, 1]] * 20)
    assert diagnose.readouts(same, np.stack((same, same), 2))["sum"]["value"] == 1.0


def test_median_interval_covers() -> None:
    """By the binomial distribution: at least 95%, and less than that one rank further in."""
    for count in (6, 9, 21, 50, 200, 401):
        told = diagnose.median(np.arange(1.0, count + 1))
        low, high = int(told["low"]), int(told["high"])
        assert low + high == count + 1

        def outside(rank: int, count: int = count) -> float:
            return 2 * sum(math.comb(count, k) for k in range(rank)) / 2**count

        assert outside(low) <= 0.05 < outside(low + 1)
    assert diagnose.median(np.arange(5.0)) == {"value": 2.0, "low": -np.inf, "high": np.inf}
