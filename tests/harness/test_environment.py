"""What a record says of the machine, and `icr-bench doctor` shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from icr_bench.harness import environment as module
from icr_bench.harness.cli import main
from icr_bench.harness.environment import doctor, environment, gpus, machine_id, matrix_units, missing_extras

CPUINFO = """processor : 0
model name : Fast One
flags : fpu avx2 fma {more}
"""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Nothing that one test makes up is remembered in another."""
    yield
    environment.cache_clear()
    machine_id.cache_clear()
    gpus.cache_clear()


def with_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_json_is_the_environment_of_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(environment()))
    assert environment()["machine"]["usable_threads"] >= 1
    assert 0 < environment()["machine"]["free_bytes"] < environment()["machine"]["memory_bytes"]


def test_matrix_units_are_read_from_the_processors_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cpuinfo", lambda: CPUINFO.format(more="amx_bf16"))
    assert matrix_units() == ["amx_bf16", "avx2"]
    assert "none for bfloat16" not in doctor(environment())
    environment.cache_clear()
    monkeypatch.setattr(module, "_cpuinfo", lambda: CPUINFO.format(more=""))
    assert "processor: Fast One" in doctor(environment())
    assert "matrix units: avx2; none for bfloat16" in doctor(environment())
    environment.cache_clear()
    monkeypatch.setattr(module, "_cpuinfo", lambda: "")
    assert "matrix units: unknown\n" in doctor(environment())


def test_gpus_are_asked_of_nvidia_smi_and_tell_machines_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpus", list)
    without = machine_id()
    monkeypatch.setattr(module, "gpus", gpus)
    lines = ("WARNING: a memory is worn", "Card A, 144384, 570.1", "Card B, [N/A], 570.1")
    with_gpus(tmp_path, monkeypatch, *lines)
    assert gpus() == [
        {"name": "Card A", "memory_bytes": 144384 * 2**20, "driver": "570.1"},
        {"name": "Card B", "memory_bytes": None, "driver": "570.1"},
    ]
    assert "GPUs: Card A, 151 GB; Card B" in doctor(environment())
    machine_id.cache_clear()
    assert machine_id() != without


def test_no_gpu_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []
    for lines in ((), ("No devices were found",)):
        gpus.cache_clear()
        with_gpus(tmp_path, monkeypatch, *lines)
        assert gpus() == []


def test_a_missing_extra_comes_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    there = module._version
    monkeypatch.setattr(module, "_version", lambda name: None if name in ("plotly", "PyStemmer") else there(name))
    missing = missing_extras()
    assert missing["report"] == ["plotly"]
    assert missing["stem"] == ["PyStemmer"]
    assert "hub" not in missing
    told = doctor(environment())
    assert "extra report: without plotly; pip install 'icr-bench[report]'\n" in told
