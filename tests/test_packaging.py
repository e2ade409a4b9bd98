"""What is installed is what is on the disk."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("benchmarks", "harness", "retrievers")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_on_the_disk_is_listed() -> None:
    """A package that is not listed works in an editable install and is missing from the wheel."""
    on_disk = {file.parent.relative_to(ROOT) for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    names = {f"icr_bench.{'.'.join(p.parts)}" for p in on_disk} | {"icr_bench.reference"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names


def test_published_numbers_are_installed_from_their_folder() -> None:
    settings, folder = PROJECT["tool"]["setuptools"], ROOT / "results" / "reference"
    assert settings["package-dir"]["icr_bench.reference"] == "results/reference"
    held = {file for pattern in settings["package-data"]["icr_bench.reference"] for file in folder.glob(pattern)}
    assert {file for file in folder.iterdir() if file.is_file()} == held | {folder / "__init__.py"}


def test_every_file_that_is_no_code_is_package_data() -> None:
    for room in ROOMS:
        data = PROJECT["tool"]["setuptools"]["package-data"]
        packages = {name: "/".join(name.split(".")[1:]) for name in data if name.split(".")[1] == room}
        found = (file for name, folder in packages.items() for one in data[name] for file in (ROOT / folder).glob(one))
        held = {file for file in found if file.is_file()}
        others = {f for f in (ROOT / room).rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
        assert others == held


def test_one_constraints_file_pins_every_dependency() -> None:
    assert [file.name for file in ROOT.glob("**/*constraints*.txt") if ".tox" not in file.parts] == ["constraints.txt"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    assert all("==" in line for line in lines)
    project = PROJECT["project"]
    extras = [one for extra in project["optional-dependencies"].values() for one in extra]
    for dependency in [*project["dependencies"], *extras]:
        name = dependency.split(">")[0].split("[")[0].strip().lower().replace("_", "-")
        assert name in pinned | {"icr-bench"}


def imported(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_rooms_import_in_one_direction() -> None:
    allowed = {"benchmarks": {"benchmarks"}, "retrievers": {"retrievers", "benchmarks"}, "harness": set(ROOMS)}
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            own = {module.split(".")[1] for module in imported(file) if module.startswith("icr_bench.")}
            assert own <= allowed[room], file


def test_retrievers_know_only_document_and_generated_text_of_benchmarks() -> None:
    for file in (ROOT / "retrievers").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("icr_bench.benchmarks"):
                assert [name.name for name in node.names] in (["Document"], ["limit"]), file
