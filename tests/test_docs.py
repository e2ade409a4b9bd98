"""What the documents tell a reader to do works as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from icr_bench.harness import cli

ROOT = Path(__file__).parents[1]


def blocks(file: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / file).read_text(encoding="utf-8"), re.M | re.S)


def saved(block: str, folder: Path) -> Path:
    """Save a plug-in under the name that it registers."""
    names = re.findall(r'^(?:RETRIEVERS|BENCHMARKS) = {"(\w+)":', block, re.M)
    assert len(names) == 1
    file = folder / f"{names[0]}.py"
    file.write_text(block)
    return file


def test_the_set_up_is_two_blocks_of_commands_only() -> None:
    install, test = blocks("README.md", "sh")[:2]
    for block in (install, test):
        assert "-c constraints.txt" in block
        assert all(re.match(r"(python -m|icr-bench) ", line) for line in block.splitlines())
    assert install.endswith("\nicr-bench run\n")
    assert test.endswith("\npython -m pytest\n")


def test_the_readmes_retriever_works_when_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("README.md", "python")
    assert len(block.splitlines()) <= 30
    plugin = saved(block, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["validate", "overlap", "--plugin", plugin.name]) == 0
    run = ["run", "-r", "bm25", "-r", "overlap", "-n", "46", "--queries", "20", "--plugin", plugin.name]
    assert cli.main(run) == 0
    assert "| overlap " in capsys.readouterr().out


@pytest.mark.parametrize("number", [0, 1])
def test_what_contributing_adds_works_as_written(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(blocks("CONTRIBUTING.md", "python")[number], tmp_path)
    monkeypatch.chdir(tmp_path)
    for line in blocks("CONTRIBUTING.md", "sh")[1 + number].splitlines():
        assert cli.main(shlex.split(line)[1:]) == 0


def test_every_command_that_the_readme_shows_is_one() -> None:
    shown = re.findall(r"`(icr-bench [^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(shown) > 8
    for line in shown:
        words = shlex.split(re.sub(r" \(.*", "", line))
        if len(words) > 2:
            assert cli.parser().parse_args(words[1:]).command == words[1]
