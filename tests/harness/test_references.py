"""Published numbers beside measured ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from icr_bench.harness import references
from icr_bench.harness.cli import main
from icr_bench.harness.references import beside, published, wilson
from icr_bench.harness.tables import Cell, Table


def measured(benchmark: str, metric: str, sizes: list[int]) -> tuple[list[Table], list[dict[str, Any]]]:
    """A table of one row, and what it needs of its records."""
    cell = Cell("0.500 [0.400, 0.600]", {"value": 0.5, "low": 0.4, "high": 0.6})
    table = Table("mine", metric, sizes, [("own", [cell] * len(sizes))], ["first note"])
    return [table], [{"benchmark": "mine", "config": {"benchmark": {"name": benchmark}}}]


@pytest.mark.parametrize(("hits", "count"), [(0, 400), (1, 400), (200, 400), (383, 400), (400, 400), (354, 1000)])
def test_wilson_equals_scipy(hits: int, count: int) -> None:
    expected = binomtest(hits, count).proportion_ci(method="wilson")
    assert wilson(hits / count, count) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_every_number_says_where_it_is_from() -> None:
    assert references.names() == ["blocksearch", "intra", "unreal"]
    for name in references.names():
        rows = references.read(name)
        assert len(rows) > 200
        for row in rows:
            assert {"table", "source", "status", "metric", "dataset", "retriever", "n", "value", "unit"} <= row.keys()


def test_the_papers_collapse_stands_beside_measured_cells() -> None:
    (table,) = beside(*measured("msmarco", "hit@1", [500, 2500, 10_000]), "blocksearch")
    assert table.rows[0][0] == "own"
    rows = {label: [cell.text if cell else None for cell in cells] for label, cells in table.rows}
    base = rows["BlockSearch (Qwen3-0.6B) [published]"]
    assert base == ["0.958 [0.934, 0.974]", "0.438 [0.390, 0.487]", "0.002 [0.000, 0.013]"]
    assert rows["Gemini-3-flash [published]"] == ["0.950 [0.924, 0.967]", None, "0.162 [0.129, 0.201]"]
    assert "first note" in table.notes
    assert any("another set-up" in note for note in table.notes)
    assert any("v2 Table 2" in note for note in table.notes)


def test_of_several_numbers_for_a_cell_the_most_trusted_is_shown() -> None:
    """LIMIT, N=5,000, SSMax with routing: 0.149 in the first version, 0.202 in the second."""
    (table,) = beside(*measured("limit", "hit@1", [5000]), "blocksearch")
    rows = {label: cells[0].text for label, cells in table.rows if cells[0]}
    assert rows["BlockSearch-SSMax-routing (Qwen3-0.6B) [published]"].startswith("0.202 [")
    assert "changed in v2" in rows["BlockSearch-SSMax (Qwen3-0.6B) [published]"]
    assert "first version only" in rows["Qwen3-dense (Qwen3-0.6B) [published]"]


def test_superseded_numbers_are_not_shown() -> None:
    shown = {(one.retriever, one.n, one.metric): one for one in published("blocksearch") if one.benchmark == "msmarco"}
    assert shown["BlockSearch-SSMax (Qwen3-0.6B)", 10_000, "hit@1"].value == pytest.approx(0.178)
    superseded = [row for row in references.read("blocksearch") if row["status"].startswith("superseded")]
    assert superseded
    assert not any("R19_any" in one.retriever for one in published("blocksearch"))


def test_recall_of_all_golds_and_hit_of_any_are_kept_apart() -> None:
    found = {one.metric for one in published("blocksearch") if one.benchmark == "hotpotqa"}
    assert found == {"hit@1", "recall@2", "recall@5"}


def test_sizes_that_are_no_corpora_are_left_out() -> None:
    """UNREAL's and INTRA's numbers count retrieved chunks, not documents."""
    for name in ("unreal", "intra"):
        assert published(name) == []
        (table,) = beside(*measured("hotpotqa", "complete@10", [5, 10]), name)
        assert len(table.rows) == 1
        assert f"{name} has no published number for hotpotqa, complete@10 and these sizes" in table.notes


def test_latency_has_no_published_rows() -> None:
    tables, records = measured("msmarco", "latency", [500])
    assert beside(tables, records, "blocksearch") == tables


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], quick_run: Callable[[], Path]) -> None:
    out = quick_run()
    capsys.readouterr()
    assert main(["table", str(out), "--metric", "hit@1", "--reference", "blocksearch"]) == 0
    told = capsys.readouterr().out
    assert "| BlockSearch (Qwen3-0.6B) [published] " in told
    assert main(["table", str(out), "--reference", "blokcsearch"]) == 2
    assert "did you mean blocksearch?" in capsys.readouterr().err
    assert main(["list", "references"]) == 0
    assert capsys.readouterr().out.split() == references.names()
    assert main(["describe", "intra"]) == 0
    assert "reference intra: 279 published numbers" in capsys.readouterr().out


@pytest.fixture
def quick_run(tmp_path: Path) -> Callable[[], Path]:
    """A run of BM25 on the smallest LIMIT."""

    def make() -> Path:
        out = tmp_path / "run"
        assert main(["run", "-b", "limit", "-n", "46", "-r", "bm25", "-o", str(out), "--queries", "20"]) == 0
        return out

    return make
