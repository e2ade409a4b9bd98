"""The gate on real runs: it catches what was made worse, and keeps still where nothing was."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from icr_bench.harness.cli import main

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "results" / "baselines" / "quick.json"
DATA = Path(os.environ.get("ICR_BENCH_DATA", "nowhere"))

PLUGIN = """
import time

from icr_bench.retrievers.bm25 import BM25


class Costly(BM25):
    '''BM25 that takes longer, or more memory, than it needs.'''

    def __init__(self, *, wait: float = 0.002, hold: int = 1) -> None:
        super().__init__()
        self.wait, self.hold = wait, hold

    def index(self, documents):
        super().index(documents)
        self.held = bytearray(self.hold * 10**6)

    def search(self, queries, k):
        time.sleep(self.wait * len(queries))
        return super().search(queries, k)


RETRIEVERS = {"costly": Costly}
"""

Compare = Callable[..., tuple[int, str]]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Compare:
    def call(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        return main(["compare", *map(str, arguments)]), capsys.readouterr().out

    return call


def test_the_committed_baseline_holds(tmp_path: Path, compare: Compare) -> None:
    assert main(["run", "quick", "-o", str(tmp_path / "new")]) == 0
    code, out = compare(BASELINE, tmp_path / "new")
    assert code == 0
    assert out.startswith("**No cell is worse** (3 cells).\n")


def test_the_workflow_that_the_readme_shows_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [
        part.partition("```")[0] for part in readme.split("```yaml\n")[1:] if part.startswith("name: retrieval")
    ]
    lines = [step["run"] for step in yaml.safe_load(block)["jobs"]["gate"]["steps"] if "run" in step]
    (tmp_path / "results" / "baselines").mkdir(parents=True)
    (tmp_path / "results" / "baselines" / "quick.json").write_bytes(BASELINE.read_bytes())
    monkeypatch.chdir(tmp_path)
    for line in lines:
        if line.startswith("icr-bench"):
            assert main(shlex.split(line)[1:]) == 0
    assert (tmp_path / "gate.md").read_text().startswith("**No cell is worse**")
    assert "<testsuite" in (tmp_path / "gate.xml").read_text()


@pytest.mark.skipif(not (DATA / "msmarco").is_dir(), reason="ICR_BENCH_DATA holds no msmarco")
def test_a_worse_bm25_on_real_text_is_caught_and_a_harmless_change_is_not(tmp_path: Path, compare: Compare) -> None:
    for name, spec in {
        "base": "bm25",
        "worse": "bm25:k1=20,b=0,label=bm25",
        "harmless": "bm25:k1=1,label=bm25",
    }.items():
        run = ["run", "-b", f"beir:path={DATA}/msmarco,split=dev,label=msmarco", "-n", "500,2.5k", "-r", spec]
        assert main([*run, "-o", str(tmp_path / name)]) == 0
    code, out = compare(tmp_path / "base", tmp_path / "worse")
    assert code == 1
    assert out.startswith("**2 of 2 cells are worse.**\n")
    for n in ("500", "2,500"):
        assert f"- msmarco, N={n}, bm25: hit@1 " in out
    code, out = compare(tmp_path / "base", tmp_path / "harmless")
    assert code == 0
    assert "k1=0.9 -> 1.0" in out


def test_worse_latency_and_memory_are_caught(tmp_path: Path, compare: Compare) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    for name, spec in {"base": "costly", "slow": "costly:wait=0.03", "large": "costly:hold=300"}.items():
        run = ["run", "-r", f"{spec},label=costly" if ":" in spec else spec, "-n", "46,250", "--queries", "20"]
        run += ["--latency-queries", "20", "--plugin", str(tmp_path / "plugin.py"), "-o", str(tmp_path / name)]
        assert main(run) == 0
    limits = ["--tolerance", "latency=300%", "--tolerance", "memory=50%"]
    code, out = compare(tmp_path / "base", tmp_path / "slow", *limits)
    assert code == 1
    assert "costly: latency x" in out
    code, out = compare(tmp_path / "base", tmp_path / "large", *limits)
    assert code == 1
    assert "costly: memory x" in out
    assert compare(tmp_path / "base", tmp_path / "slow")[0] == 0  # no tolerance names them


@pytest.mark.slow
def test_the_gate_keeps_still_over_ten_equal_runs(tmp_path: Path, compare: Compare) -> None:
    run = ["run", "quick", "-r", "bm25", "-r", "blocksearch:beam=5", "-n", "46", "--queries", "60"]
    limits = ["--tolerance", "latency=300%", "--tolerance", "memory=50%"]
    assert main([*run, "-o", str(tmp_path / "base")]) == 0
    for number in range(10):
        assert main([*run, "-o", str(tmp_path / str(number))]) == 0
        code, out = compare(tmp_path / "base", tmp_path / str(number), *limits)
        assert code == 0, out
