"""Curves as pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from icr_bench.harness.cli import main
from icr_bench.harness.errors import UsageError
from icr_bench.harness.plot import plot
from icr_bench.harness.tables import Cell, Table
from icr_bench.retrievers.base import MissingExtra


def table(benchmark: str = "limit") -> Table:
    points = [Cell("", {"value": v, "low": v - 0.1, "high": v + 0.1}) for v in (0.9, 0.5)]
    rows = [("bm25", [points[0], points[1]]), ("dense <b>", [points[1], Cell("oom")]), ("late", [None, points[0]])]
    return Table(benchmark, "hit@1", [46, 1000], rows, [])


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_chooses_the_format(ending: str, start: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"curves.{ending}"
    plot([table(name) for name in "abcd"], file)
    assert file.read_bytes().startswith(start)


def test_a_picture_names_every_benchmark_row_and_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"
    plot([table("limit"), table("nq")], tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    for part in ("limit", "nq", "bm25", "dense &lt;b&gt;", "late", "1,000", "hit@1", "95% bootstrap"):
        assert part in text


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"curves.gif: expected a file name that ends in .png, .svg, .pdf"):
        plot([table()], tmp_path / "curves.gif")


def test_without_matplotlib_the_pip_line_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icr_bench.harness.plot.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'icr-bench\[report\]'"):
        plot([table()], tmp_path / "curves.png")


def test_losses_of_trainings_are_drawn_and_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"
    for name in ("base", "ssmax"):
        (tmp_path / name).mkdir()
        lines = [{"step": i, **{f"digit{d}": 3 / i for d in range(1, 5)}, "loss": 1} for i in range(1, 6)]
        lines[-1]["held_out_hit@1"] = 0.5
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["plot", str(tmp_path / "base"), str(tmp_path / "ssmax"), "-o", str(tmp_path / "losses.svg")]) == 0
    text = (tmp_path / "losses.svg").read_text()
    for part in ("base", "ssmax", "cross-entropy, digit 1", "hit@1 on held-out queries", "step"):
        assert part in text
    assert "InfoNCE" not in text


@pytest.mark.parametrize(
    ("line", "code", "part"),
    [
        ("{", 3, "log.jsonl:1: not a line of a training's log (Expecting"),
        ('{"loss": 1}', 3, "log.jsonl:1: not a line of a training's log (step is missing)"),
        ('{"step": 1, "digit1": "x"}', 3, "digit1: expected a number, got 'x'"),
        ("", 2, "nothing was logged yet"),
    ],
)
def test_a_damaged_log_is_told(
    line: str, code: int, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "log.jsonl").write_text(f"{line}\n" if line else "")
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "losses.svg")]) == code
    assert part in capsys.readouterr().err
