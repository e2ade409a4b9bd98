"""Package descriptions from a file in the form of apt's Translation-en."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
from pathlib import Path

import pytest

from icr_bench.benchmarks import packages as module
from icr_bench.benchmarks.base import DataError
from icr_bench.benchmarks.packages import packages, read_packages, split_of
from icr_bench.harness.cli import main

LONG = "This text says at some length what the package does, so that it is longer than a synopsis would be, by far."


def block(name: str, synopsis: str, *lines: str) -> str:
    body = "".join(f" {line}\n" for line in lines)
    return f"Package: {name}\nDescription-md5: 00\nDescription-en: {synopsis}\n{body}\n"


def write(folder: Path, *blocks: str) -> Path:
    file = folder / "Translation-en"
    file.write_text("".join(blocks))
    return file


def named(split: str, count: int) -> list[str]:
    """Names that fall into a split."""
    return [name for name in (f"tool-{i}" for i in range(3000)) if split_of(name) == split][:count]


def test_paragraphs_and_lists_become_one_text(tmp_path: Path) -> None:
    (name,) = named("test", 1)
    file = write(tmp_path, block(name, "does things", LONG, "second line", ".", "* a point", " deeper", ".", "end."))
    (row,) = read_packages(file, "test")
    assert (row.name, row.synopsis) == (name, "does things")
    assert row.text == f"{LONG} second line * a point deeper end."


def test_splits_are_disjoint_and_about_90_5_5(tmp_path: Path) -> None:
    file = write(tmp_path, *(block(f"tool-{i}", f"does {i}", f"{LONG} {i}") for i in range(2000)))
    names = {split: {row.name for row in read_packages(file, split)} for split in ("train", "development", "test")}
    assert sum(map(len, names.values())) == len(set().union(*names.values())) == 2000
    assert 0.87 < len(names["train"]) / 2000 < 0.93
    assert all(0.03 < len(names[split]) / 2000 < 0.07 for split in ("development", "test"))


def test_what_another_description_would_answer_is_left_out(tmp_path: Path) -> None:
    names = sorted(named("test", 6))
    file = write(
        tmp_path,
        block(names[0], "does things", f"{LONG} a"),
        block(names[1], "Does  things (data files)", f"{LONG} b"),  # the same synopsis
        block(names[2], "does more", f"{LONG} a", ".", "Another paragraph."),  # the same first paragraph
        block(names[3], "does less", "too short"),
        block(names[4], "does all", f"{LONG} c"),
        block(names[4], "an older version", f"{LONG} d"),
    )
    assert [row.name for row in read_packages(file, "test")] == [names[0], names[4]]


def test_benchmark_asks_every_synopsis(tmp_path: Path) -> None:
    names = sorted(named("test", 3))
    file = write(tmp_path, *(block(name, f"does {name}", f"{LONG} {name}") for name in names))
    made = packages(path=file)
    assert [query.text for query in made.queries] == [f"does {name}" for name in names]
    assert made.judgments == {f"synopsis of {name}": {name: 1} for name in names}
    assert main(["lint", f"packages:path={file}"]) == 0


@pytest.mark.parametrize(("ending", "opener"), [(".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)])
def test_packed_files_are_read(tmp_path: Path, ending: str, opener: object) -> None:
    names = named("test", 2)
    plain = write(tmp_path, *(block(name, f"does {name}", f"{LONG} {name}") for name in names))
    packed = tmp_path / f"Translation-en{ending}"
    with opener(packed, "wt") as file:  # type: ignore[operator]
        file.write(plain.read_text())
    assert read_packages(packed, "test") == read_packages(plain, "test")


BAD = {
    "missing": (None, "No such file"),
    "another kind of file": ("Name: x\nOther: y\n", ":1: no 'Package:' in this block"),
    "empty": ("", "holds no package of the split 'test'"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_of_another_kind_are_refused(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    file = tmp_path / "Translation-en"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        packages(path=file)
    assert str(file) in str(caught.value)


def test_damaged_archive_is_told(tmp_path: Path) -> None:
    file = tmp_path / "Translation-en.xz"
    file.write_bytes(lzma.compress(b"Package: x\n" * 1000)[:60])
    with pytest.raises(DataError, match="cannot be read"):
        packages(path=file)


def test_the_file_of_apt_is_found_and_its_snapshot_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTS", tmp_path)
    with pytest.raises(DataError, match=r"no Translation-en; on Debian, apt-get .* elsewhere give path="):
        packages()
    names = named("test", 3)
    for prefix, count in (("m_debian_dists_x", 3), ("m_debian_dists_x-updates", 1)):
        file = tmp_path / f"{prefix}_main_i18n_Translation-en"
        file.write_text("".join(block(name, f"does {name}", f"{LONG} {name}") for name in names[:count]))
    (tmp_path / "m_debian_dists_x_InRelease").write_text("Origin: Debian\nDate: Sat, 11 Jul 2026 09:00:00 UTC\n")
    made = packages()
    assert len(made.documents) == 3
    digest = hashlib.sha256((tmp_path / "m_debian_dists_x_main_i18n_Translation-en").read_bytes()).hexdigest()
    assert f"sha256 {digest}, archive of Sat, 11 Jul 2026 09:00:00 UTC" in made.source
