"""Descriptions of Debian packages: which description belongs to a synopsis? Real text that any Debian mirror serves."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from icr_bench.benchmarks.base import Benchmark, DataError, Judgment, Passage, Query

Split = Literal["train", "development", "test"]

SHARES: tuple[tuple[Split, int], ...] = (("train", 90), ("development", 95), ("test", 100))
"""Splits by the upper end of their share of names, in percent."""

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

LISTS = Path("/var/lib/apt/lists")

SHORTEST = 100
"""Characters of a description; shorter ones say what the synopsis says."""


@dataclass(frozen=True)
class Package:
    """One package: its synopsis asks for its description."""

    name: str
    synopsis: str
    text: str


def packages(*, path: Path | None = None, split: Split = "test") -> Benchmark:
    """A query is a package's synopsis, its gold the package's description.

    Packages are split by name. Of those with equal synopses or equal first paragraphs only the first is kept, since
    either description would answer.

    Args:
        path: apt's ``Translation-en``, plain or .gz, .bz2 or .xz; every mirror has it at dists/<release>/main/i18n.
            By default the one that ``apt-get -o Acquire::Languages=en update`` leaves in /var/lib/apt/lists.
        split: ``train``, ``development`` or ``test``.

    Raises:
        DataError: no such file, or not what it should be.
    """
    if path is None:
        path = _of_apt()
    rows = read_packages(path, split)
    made = Benchmark.of(
        [Passage(row.name, row.text) for row in rows],
        [Query(f"synopsis of {row.name}", row.synopsis) for row in rows],
        [Judgment(f"synopsis of {row.name}", row.name, 1) for row in rows],
    )
    return replace(made, source=f"{path} ({snapshot(path)})")


def snapshot(path: Path) -> str:
    """What tells this file from any other: its SHA-256, and the date of its archive where apt keeps that beside it."""
    with path.open("rb") as file:
        told = f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    release = path.with_name(path.name.partition("_main_i18n")[0] + "_InRelease")
    if release.is_file():
        dates = [line for line in release.read_text(errors="replace").splitlines() if line.startswith("Date: ")]
        told += f", archive of {dates[0].removeprefix('Date: ')}" if dates else ""
    return told


def _of_apt() -> Path:
    """The largest file of apt's lists: that of a release, not of its updates."""
    found = [file for file in LISTS.glob("*_main_i18n_Translation-en") if file.is_file()]
    if not found:
        raise DataError(
            f"{LISTS}: no Translation-en; on Debian, apt-get -o Acquire::Languages=en -o Acquire::GzipIndexes=false "
            "update brings it, elsewhere give path="
        )
    return max(found, key=lambda file: file.stat().st_size)


def read_packages(path: Path, split: Split) -> list[Package]:
    """The packages of one split, by name."""
    kept, synopses, openings = list[Package](), set[str](), set[str]()
    for row, opening in sorted(_packages(path), key=lambda pair: pair[0].name):
        synopsis = _folded(row.synopsis)
        if len(row.text) < SHORTEST or synopsis in synopses or opening in openings:
            continue
        synopses.add(synopsis)
        openings.add(opening)
        if split_of(row.name) == split:
            kept.append(row)
    if not kept:
        raise DataError(f"{path}: holds no package of the split {split!r}; expected apt's Translation-en")
    return kept


def split_of(name: str) -> Split:
    """The split of a package, by its name alone."""
    percent = int.from_bytes(hashlib.sha256(f"icr-bench package {name}".encode()).digest()[:8], "big") % 100
    return next(split for split, end in SHARES if percent < end)


def _folded(synopsis: str) -> str:
    """Without case and what stands in brackets, such as "(data files)"."""
    return " ".join(re.sub(r"\([^)]*\)|\[[^]]*\]", " ", synopsis).casefold().split())


def _packages(path: Path) -> Iterator[tuple[Package, str]]:
    """Every package and its first paragraph; the newest of one name comes first in apt's files and is the one taken."""
    seen: set[str] = set()
    for line, block in _blocks(path):
        fields = {key: value for key, _, value in (first.partition(": ") for first in block if first[:1] != " ")}
        name, synopsis = fields.get("Package", ""), fields.get("Description-en", "").strip()
        if not name:
            raise DataError(f"{path}:{line}: no 'Package:' in this block; expected apt's Translation-en")
        if name in seen or not synopsis:
            continue
        seen.add(name)
        body = " ".join(text[1:] for text in block if text[:1] == " ")
        paragraphs = [" ".join(part.split()) for part in re.split(r"(?:^| )\.(?: |$)", body)]
        text = " ".join(part for part in paragraphs if part)
        yield Package(name, synopsis, text), paragraphs[0]


def _blocks(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Blocks of lines between empty lines, with the number of their first line."""
    opener = OPENERS.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            block: list[str] = []
            begin = 1
            for number, line in enumerate(file, 1):
                if line.strip():
                    block.append(line.rstrip("\n"))
                elif block:
                    yield begin, block
                    block = []
                if not block:
                    begin = number + 1
            if block:
                yield begin, block
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
