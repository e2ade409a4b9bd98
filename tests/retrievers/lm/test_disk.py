"""Keys and values kept between runs: what is found again, what is not, and folders that are damaged, full or shared."""

from __future__ import annotations

import csv
import errno
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from icr_bench.harness.cell import Job, measure
from icr_bench.harness.cli import main
from icr_bench.harness.process import Limits, OnProgress
from icr_bench.retrievers.base import Document, Ranking
from icr_bench.retrievers.blocksearch import BlockSearch
from icr_bench.retrievers.lm import corpus
from icr_bench.retrievers.lm.backbone import load_backbone
from icr_bench.retrievers.lm.cache import prefill
from icr_bench.retrievers.lm.corpus import NoRoom, _read, batch_bytes
from icr_bench.retrievers.lm.disk import TENSORS, DiskCache, room
from icr_bench.retrievers.lm.prompt import Block, draw_codes

TEXTS = [f"text {i} " + "more words " * (i * 7 % 9) for i in range(24)]
QUERIES = ["text 3", "more words", "something else"]

SHARD_BYTES = 300_000
"""Makes four files or so of these documents."""


def use_small_shards() -> pytest.MonkeyPatch:
    """Several files of a small corpus, and no waiting for the disk."""
    patch = pytest.MonkeyPatch()
    small = functools.partial(prefill, shard_bytes=SHARD_BYTES)
    patch.setattr("icr_bench.retrievers.lm.corpus.prefill", small)
    patch.setattr("os.fsync", lambda file: None)
    return patch


@pytest.fixture(autouse=True)
def small_shards() -> Iterator[None]:
    patch = use_small_shards()
    yield
    patch.undo()


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model()


@dataclass
class Indexed:
    """A retriever after `index`, and the tokens that its prefill computed."""

    retriever: BlockSearch
    computed: int

    def answers(self) -> list[Ranking]:
        return self.retriever.search(QUERIES, 5)

    @property
    def reused(self) -> int:
        found = re.fullmatch(r"reused (\d+) of \d+ documents", self.retriever.settings()["prefill"])
        return int(found[1]) if found else 0

    @property
    def tokens(self) -> int:
        return int(self.retriever.settings()["corpus_tokens"])

    @property
    def codes(self) -> list[int]:
        return list(self.retriever._corpus.cache.codes)

    @property
    def whole(self) -> bool:
        """Whether shards hold every document once and codes are distinct."""
        cache = self.retriever._corpus.cache
        numbers = sorted(number for shard in cache.shards for number in shard.documents.tolist())
        return numbers == list(range(len(cache))) and len(set(cache.codes)) == len(cache)


def indexed(
    model: Path,
    cache: Path | None,
    texts: Sequence[str] = TEXTS,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Indexed:
    retriever = BlockSearch(model=str(model), cache=cache, **options)  # type: ignore[arg-type]
    retriever.load()
    told: list[int] = [0]

    def tell(done: int, total: int) -> None:
        progress(done, total)
        told.append(done)

    retriever.progress = tell  # type: ignore[method-assign]
    retriever.index([Document(number, text) for number, text in enumerate(texts)])
    return Indexed(retriever, told[-1])


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def same_answers(one: Indexed, other: Indexed) -> bool:
    """The same keys of the same documents, and so the same answers; rounding differs where batches differ."""
    held = [by_document(run) for run in (one, other)]
    alike = all(torch.allclose(held[0][number], held[1][number], atol=1e-4) for number in held[0] | held[1])
    pairs = list(zip(one.answers(), other.answers(), strict=True))
    close = all(x.scores == pytest.approx(y.scores, abs=1e-4) for x, y in pairs)
    return alike and close and all(x.numbers == y.numbers for x, y in pairs)


def by_document(run: Indexed) -> dict[int, torch.Tensor]:
    """Keys and values of each document, and where its text lies in them."""
    found = {}
    for shard in run.retriever._corpus.cache.shards:
        for place, number in enumerate(shard.documents.tolist()):
            start, end = shard.starts[place], shard.ends[place]
            text = torch.stack([shard.text_starts[place], shard.text_ends[place]]) - start
            parts = (shard.keys[:, :, start:end], shard.values[:, :, start:end], text)
            found[number] = torch.cat([part.flatten().float() for part in parts])
    return found


@pytest.fixture(scope="module")
def plain(model: Path) -> Indexed:
    """Without any cache on disk."""
    return indexed(model, None)


@pytest.fixture(scope="module")
def full(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the whole corpus; not to be changed."""
    folder = tmp_path_factory.mktemp("full") / "cache"
    patch = use_small_shards()
    indexed(model, folder)
    patch.undo()
    assert 3 <= len(files(folder)) <= 8
    return folder


@pytest.fixture
def copy(full: Path, tmp_path: Path) -> Path:
    """A copy of the folder, to damage."""
    return Path(shutil.copytree(full, tmp_path / "copy"))


# Found again


def test_a_second_index_computes_nothing_and_answers_the_same(model: Path, plain: Indexed, tmp_path: Path) -> None:
    cache = tmp_path / "not" / "there" / "yet"
    first = indexed(model, cache)
    assert not first.retriever.index_reused
    assert first.retriever.settings()["prefill"] == "measured"
    assert first.computed == first.tokens > 0
    assert first.whole
    kept = {file: file.stat().st_mtime_ns for file in files(cache)}
    second = indexed(model, cache)
    assert second.retriever.index_reused
    assert second.retriever.settings()["prefill"] == "reused 24 of 24 documents"
    assert second.computed == 0
    assert second.whole
    assert second.retriever.index_bytes() == first.retriever.index_bytes()
    assert same_answers(second, first)
    assert same_answers(second, plain)
    assert files(cache) == sorted(kept)


def test_a_corpus_from_disk_answers_the_same_to_the_last_bit(model: Path, full: Path) -> None:
    assert indexed(model, full).answers() == indexed(model, full).answers()


def test_a_corpus_from_disk_answers_to_the_last_bit_as_when_it_was_measured(model: Path, tmp_path: Path) -> None:
    first = indexed(model, tmp_path)
    assert indexed(model, tmp_path).answers() == first.answers()


def test_files_may_be_read_by_whom_the_umask_lets(full: Path) -> None:
    """A cache folder may be shared."""
    mask = os.umask(0)
    os.umask(mask)
    assert {file.stat().st_mode & 0o777 for file in files(full)} == {0o666 & ~mask}


def test_without_a_cache_nothing_is_reused(model: Path) -> None:
    assert [indexed(model, None).reused for _ in range(2)] == [0, 0]


def test_the_same_retriever_may_index_again(model: Path, full: Path) -> None:
    once = indexed(model, full, TEXTS[:5])
    assert once.reused == 5
    once.retriever.index([Document(number, text) for number, text in enumerate(TEXTS)])
    assert once.reused == 24
    assert once.whole


@pytest.mark.parametrize("kept", [range(8), range(5, 24, 3), [23, 0, 11]], ids=str)
def test_a_smaller_corpus_is_served_wholly(model: Path, full: Path, kept: Sequence[int]) -> None:
    texts = [TEXTS[number] for number in kept]
    smaller = indexed(model, full, texts)
    assert smaller.computed == 0
    assert smaller.reused == len(texts)
    assert smaller.whole
    assert same_answers(smaller, indexed(model, None, texts))


def test_a_smaller_corpus_has_the_codes_of_the_larger(model: Path, tmp_path: Path) -> None:
    """Where codes are scarce and documents would have drawn others among themselves."""
    larger = indexed(model, tmp_path, TEXTS, digits=2)
    kept = range(0, 24, 2)
    texts = [TEXTS[number] for number in kept]
    expected = [larger.codes[number] for number in kept]
    assert draw_codes(texts, 2, 0) != expected, "these texts say nothing"
    smaller = indexed(model, tmp_path, texts, digits=2)
    assert smaller.computed == 0
    assert smaller.codes == expected


def test_a_larger_corpus_computes_only_what_is_new(model: Path, plain: Indexed, tmp_path: Path) -> None:
    smaller = indexed(model, tmp_path, TEXTS[4:12])
    larger = indexed(model, tmp_path)
    assert larger.reused == 8
    assert larger.computed == larger.tokens - smaller.tokens
    assert larger.codes[4:12] == smaller.codes
    assert larger.whole
    assert same_answers(larger, plain)
    assert indexed(model, tmp_path).computed == 0


def test_documents_are_found_in_any_order(model: Path, full: Path) -> None:
    backwards = indexed(model, full, TEXTS[::-1])
    assert backwards.computed == 0
    expected = indexed(model, full).answers()
    for one, other in zip(backwards.answers(), expected, strict=True):
        assert [23 - number for number in one.numbers] == other.numbers


OTHERS: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "cap": {"cap": 200},
    "dtype": {"dtype": "bfloat16"},
    "digits": {"digits": 5},
    "codes": {"codes": "position"},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_nothing_is_shared_between_settings_that_change_keys(model: Path, copy: Path, kind: str) -> None:
    held = files(copy)
    other = indexed(model, copy, **OTHERS[kind])
    assert not other.retriever.index_reused
    assert other.computed == other.tokens
    assert set(held) < set(files(copy))  # and nothing is lost
    assert indexed(model, copy, **OTHERS[kind]).computed == 0
    assert indexed(model, copy).computed == 0


def other_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", f"{torch.__version__}.1")


def other_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(corpus, "made_by", lambda: "another version of this package")


@pytest.mark.parametrize("change", [other_torch, other_source])
def test_nothing_is_shared_between_versions_of_what_computes(
    model: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with monkeypatch.context() as patch:
        change(patch)
        other = indexed(model, copy)
        assert other.computed == other.tokens
        assert indexed(model, copy).computed == 0
    assert indexed(model, copy).computed == 0


def test_source_and_libraries_tell_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    digest, read = corpus.made_by.__wrapped__, Path.read_bytes
    assert digest() == digest() == corpus.made_by()
    found = {digest()}
    for changed in corpus.SOURCE:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda file, name=changed: read(file) + b"x" * (file.name == name))
            found.add(digest())
    for changed in corpus.LIBRARIES:
        with monkeypatch.context() as patch:
            patch.setattr(corpus, "version", lambda name, other=changed: "0" if name == other else version(name))
            found.add(digest())
    assert len(found) == 1 + len(corpus.SOURCE) + len(corpus.LIBRARIES)


def test_all_that_prefill_runs_tells_versions_apart() -> None:
    """Of this folder, found by what imports what."""
    folder = Path(corpus.__file__).parent
    reached, ahead = set[str](), ["cache", "prompt"]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            text = (folder / f"{name}.py").read_text()
            ahead += re.findall(r"^\s*from icr_bench\.retrievers\.lm\.(\w+) import", text, re.M)
    assert reached > {"cache", "backbone", "prompt", "gguf"}
    assert {f"{name}.py" for name in reached} <= set(corpus.SOURCE)


def test_corpora_whose_codes_are_of_one_length_share_keys(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger corpus takes more digits, unless the smaller one was given as many."""
    monkeypatch.setattr("icr_bench.retrievers.lm.prompt.DIGITS", 1)
    assert indexed(model, tmp_path, TEXTS[:10]).reused == 0
    assert indexed(model, tmp_path, TEXTS[:11]).reused == 0
    assert indexed(model, tmp_path, TEXTS[:12]).reused == 11
    assert indexed(model, tmp_path / "given", TEXTS[:10], digits=2).reused == 0
    assert indexed(model, tmp_path / "given", TEXTS[:11]).reused == 10


def test_nothing_is_shared_between_models(tiny_model: Callable[..., Path], copy: Path) -> None:
    assert indexed(tiny_model(seed=1), copy).reused == 0
    assert indexed(tiny_model("llama"), copy).reused == 0


@pytest.mark.parametrize(
    "options",
    [{"routing": "last", "routing_b": 4}, {"ssmax": True}, {"beam": 3}, {"readout": "attention"}, {"offset": 5}],
    ids=str,
)
def test_what_changes_queries_only_shares_the_cache(model: Path, full: Path, options: dict[str, Any]) -> None:
    assert indexed(model, full, **options).computed == 0


def test_codes_by_position_serve_documents_of_the_same_number(model: Path, tmp_path: Path) -> None:
    indexed(model, tmp_path, codes="position")
    swapped = list(TEXTS)
    swapped[3], swapped[5] = TEXTS[5], TEXTS[3]
    other = indexed(model, tmp_path, swapped, codes="position")
    assert other.reused == 22
    assert other.codes == list(range(24))
    assert same_answers(other, indexed(model, None, swapped, codes="position"))
    assert indexed(model, tmp_path, swapped, codes="position").computed == 0
    assert indexed(model, tmp_path, codes="position").computed == 0
    assert indexed(model, tmp_path, TEXTS[1:], codes="position").reused == 0


def test_equal_texts_are_documents_of_their_own(model: Path, tmp_path: Path) -> None:
    texts = [TEXTS[0], TEXTS[1], TEXTS[0], "", TEXTS[0], "", TEXTS[2]]
    first = indexed(model, tmp_path, texts)
    assert first.whole
    second = indexed(model, tmp_path, texts)
    assert second.computed == 0
    assert second.codes == first.codes
    assert second.whole
    assert second.answers() == first.answers()
    more = indexed(model, tmp_path, [*texts, TEXTS[0]])
    assert more.reused == 7
    assert more.whole


def test_documents_whose_codes_clash_are_computed_again(model: Path, tmp_path: Path) -> None:
    """Corpora that never met may have given one code to two documents."""
    for number in range(8):
        indexed(model, tmp_path, [TEXTS[number]], digits=1)
    together = indexed(model, tmp_path, TEXTS[:8], digits=1)
    assert 0 < together.reused < 8
    assert together.whole
    again = indexed(model, tmp_path, TEXTS[:8], digits=1)
    assert again.codes == together.codes
    assert again.whole
    assert same_answers(again, together)


def test_documents_whose_codes_clashed_are_found_afterwards(model: Path, tmp_path: Path) -> None:
    for number in range(8):
        indexed(model, tmp_path, [TEXTS[number]], digits=1)
    for number, file in enumerate(files(tmp_path)):
        file.rename(file.with_name(f"ffffffff-{number}.safetensors"))  # a checksum may come last
    assert indexed(model, tmp_path, TEXTS[:8], digits=1).computed > 0
    assert indexed(model, tmp_path, TEXTS[:8], digits=1).computed == 0


def test_an_older_entry_serves_where_the_newest_clashes(model: Path, tmp_path: Path) -> None:
    """Of two documents with one code in their newest files, one has another code in an older file."""
    (shard,) = prefill(load_backbone(str(model))[0], [Block([1, 2, 3], 0, 3)], [0])
    disk = DiskCache(tmp_path / "cache", "0" * 24, 1 << 20)
    disk.prepare()
    for key, code in (("b", 7), ("a", 5), ("b", 5)):
        assert disk.store(shard, [key], [code])
    found = [[held.code for held in disk.find()[key]] for key in ("a", "b")]
    assert found == [[5], [5, 7]]
    _, codes = _read(disk, ["a", "b"], load_backbone(str(model))[0], 0)
    assert codes == {0: 5, 1: 7}


# Memory


def mapped_at(address: int) -> str:
    """The file that this address of the process is mapped from; empty if it is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, rest = line.partition(" ")
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return rest.split(maxsplit=4)[4] if len(rest.split(maxsplit=4)) == 5 else ""
    return ""


on_linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")


@on_linux
def test_a_shard_wanted_whole_is_mapped_from_its_file(model: Path, tmp_path: Path) -> None:
    for _ in range(2):  # as it was stored, and as it was found
        run = indexed(model, tmp_path)
        found = set()
        for shard in run.retriever._corpus.cache.shards:
            places = {mapped_at(tensor.data_ptr()) for tensor in (shard.keys, shard.values)}
            assert len(places) == 1
            found |= places
        assert found == set(map(str, files(tmp_path)))


@on_linux
def test_a_shard_wanted_in_part_is_copied(model: Path, full: Path) -> None:
    run = indexed(model, full, TEXTS[::3])
    shards = run.retriever._corpus.cache.shards
    assert sum(len(shard.documents) for shard in shards) == 8
    assert {mapped_at(shard.keys.data_ptr()).endswith(".safetensors") for shard in shards} == {False}
    assert str(full) not in Path("/proc/self/maps").read_text()  # what is not wanted is let go


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_corpus_from_disk_lies_on_the_device_of_the_model(model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        run = indexed(model, tmp_path, device="cuda")
        assert {shard.keys.device.type for shard in run.retriever._corpus.cache.shards} == {"cuda"}


# Broken off


class Enough(Exception):
    pass


def stop_after(tokens: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done >= tokens:
            raise Enough

    return progress


def assert_only_whole_files(folder: Path) -> None:
    assert sorted(file for file in folder.rglob("*") if file.is_file()) == files(folder) != []
    for file in files(folder):
        with safe_open(file, "pt") as stream:
            assert all(stream.get_tensor(name).numel() for name in TENSORS)


def held_documents(folder: Path) -> int:
    found = 0
    for file in files(folder):
        with safe_open(file, "pt") as stream:
            found += len(json.loads(stream.metadata()["documents"]))
    return found


def test_a_crash_loses_one_shard_at_most(model: Path, plain: Indexed, tmp_path: Path) -> None:
    with pytest.raises(Enough):
        indexed(model, tmp_path, progress=stop_after(plain.tokens - 1))
    held = held_documents(tmp_path)
    assert 0 < held < 24
    assert_only_whole_files(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = indexed(model, tmp_path)
    assert second.reused == held
    assert second.retriever.index_reused  # the time that the rest takes is not that of the corpus
    assert 0 < second.computed < second.tokens
    assert second.computed * second.retriever.index_bytes() / second.tokens <= SHARD_BYTES
    assert same_answers(second, plain)
    assert indexed(model, tmp_path).computed == 0


def test_a_file_that_cannot_be_written_whole_is_not_there(
    model: Path, plain: Indexed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the disk is full."""
    calls = []

    def half(tensors: dict[str, torch.Tensor], file: Path, told: dict[str, str]) -> None:
        calls.append(file)
        save_file(tensors, file, told)
        if len(calls) == 3:
            os.truncate(file, file.stat().st_size // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    monkeypatch.setattr("icr_bench.retrievers.lm.disk.save_file", half)
    with pytest.warns(UserWarning, match="not kept: .*" + os.strerror(errno.ENOSPC)):
        first = indexed(model, tmp_path)
    assert same_answers(first, plain)
    assert_only_whole_files(tmp_path)
    assert len(files(tmp_path)) == len(calls) - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = indexed(model, tmp_path)
    assert 0 < second.reused < 24
    assert same_answers(second, plain)


CHILD = """
import functools, os, signal, sys
from pathlib import Path
import torch
from icr_bench.retrievers.base import Document
from icr_bench.retrievers.blocksearch import BlockSearch
from icr_bench.retrievers.lm import corpus, disk

torch.set_num_threads(1)
corpus.prefill = functools.partial(corpus.prefill, shard_bytes={shard_bytes})
{more}
retriever = BlockSearch(model={model!r}, cache=Path({cache!r}))
retriever.load()
retriever.index([Document(number, text) for number, text in enumerate({texts!r})])
print(retriever.settings()["prefill"])
print(retriever.search({queries!r}, 5)[0].numbers)
"""


def child(model: Path, cache: Path, more: str = "", texts: Sequence[str] = TEXTS) -> list[str]:
    told = {"model": str(model), "cache": str(cache), "texts": list(texts), "queries": QUERIES}
    return [sys.executable, "-W", "error::UserWarning", "-c", CHILD.format(shard_bytes=SHARD_BYTES, more=more, **told)]


KILLED = """
save_file, calls = disk.save_file, []

def half(tensors, file, told):
    calls.append(file)
    save_file(tensors, file, told)
    if len(calls) == 3:
        os.truncate(file, os.path.getsize(file) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

disk.save_file = half
"""


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which a process was killed while it wrote its third file."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(child(model, folder, KILLED), timeout=120)
    assert done.returncode == -signal.SIGKILL
    return folder


@pytest.mark.slow
def test_a_run_killed_while_it_writes_goes_on_where_it_was(model: Path, plain: Indexed, killed: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = indexed(model, killed)
    assert 0 < second.reused < 24
    assert 0 < second.computed < second.tokens
    assert same_answers(second, plain)
    assert indexed(model, killed).computed == 0


@pytest.mark.slow
def test_nothing_is_left_of_a_file_that_a_killed_run_was_writing(model: Path, killed: Path) -> None:
    indexed(model, killed)
    assert_only_whole_files(killed)


def test_what_is_left_half_written_goes_with_the_next_run_of_any_settings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes room and does not count, since its settings may never come again."""
    left: list[Path] = []

    def write(tensors: dict[str, torch.Tensor], file: Path, told: dict[str, str]) -> None:
        save_file(tensors, file, told)
        if not left:
            left.append(file.parent.with_name("icr-bench-left.partial") / file.name)
            left[0].parent.mkdir()
            shutil.copy(file, left[0])

    monkeypatch.setattr("icr_bench.retrievers.lm.disk.save_file", write)
    indexed(model, tmp_path)
    assert left[0].exists()
    indexed(model, tmp_path, seed=1)
    assert not left[0].exists()


# Damaged


def rewritten(change: Callable[[dict[str, str]], dict[str, str] | None]) -> Callable[[Path], None]:
    """Change what a file says of itself, and leave its tensors."""

    def damage(file: Path) -> None:
        with safe_open(file, "pt") as stream:
            told, tensors = stream.metadata(), {name: stream.get_tensor(name).clone() for name in TENSORS}
        file.unlink()
        save_file(tensors, file, change(told))

    return damage


def flip(file: Path, at: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 16
    file.write_bytes(data)


def with_one_missing(told: dict[str, str]) -> dict[str, str]:
    return told | {"documents": json.dumps(json.loads(told["documents"])[1:])}


def with_codes_moved(told: dict[str, str]) -> dict[str, str]:
    """The same codes, of which two have changed places."""
    first, second, *rest = json.loads(told["codes"])
    return told | {"codes": json.dumps([second, first, *rest])}


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit in the middle": lambda file: flip(file, 0.5),
    "a bit near the end": lambda file: flip(file, 0.9),
    "the last bit": lambda file: flip(file, 1),
    "cut in half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "cut by a byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "a byte too many": lambda file: file.write_bytes(file.read_bytes() + b"x") and None,
    "empty": lambda file: os.truncate(file, 0),
    "few bytes": lambda file: file.write_bytes(b"\x01\x02") and None,
    "garbage header": lambda file: file.write_bytes(b"\xff" * 200 + file.read_bytes()[200:]) and None,
    "header of nonsense": lambda file: file.write_bytes((90).to_bytes(8, "little") + b"x" * 90) and None,
    "text": lambda file: file.write_text("not at all\n" * 50) and None,
    "foreign key": rewritten(lambda told: told | {"key": "0" * 24}),
    "no metadata": rewritten(lambda told: None),
    "no key": rewritten(lambda told: {k: v for k, v in told.items() if k != "key"}),
    "no checksum": rewritten(lambda told: {k: v for k, v in told.items() if k != "checksum"}),
    "no documents": rewritten(lambda told: {k: v for k, v in told.items() if k != "documents"}),
    "documents that are no JSON": rewritten(lambda told: told | {"documents": "["}),
    "documents that are no list": rewritten(lambda told: told | {"documents": "7"}),
    "codes that are null": rewritten(lambda told: told | {"codes": "null"}),
    "fewer documents than codes": rewritten(with_one_missing),
    "codes that have moved": rewritten(with_codes_moved),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_told_and_computed_again(model: Path, plain: Indexed, copy: Path, kind: str) -> None:
    file = files(copy)[1]
    with safe_open(file, "pt") as stream:
        lost = len(json.loads(stream.metadata()["documents"]))
    DAMAGES[kind](file)
    with pytest.warns(UserWarning, match=re.escape(str(file))):
        second = indexed(model, copy)
    assert second.reused == 24 - lost
    assert 0 < second.computed < second.tokens
    assert second.whole
    assert same_answers(second, plain)


def test_all_files_damaged_are_all_computed_again(model: Path, plain: Indexed, copy: Path) -> None:
    for file in files(copy):
        flip(file, 0.7)
    with pytest.warns(UserWarning, match="computed again") as caught:
        second = indexed(model, copy)
    assert len(caught) == len(files(copy))
    assert not second.retriever.index_reused
    assert second.computed == second.tokens
    assert same_answers(second, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert indexed(model, copy).computed == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("00000000-0", "cut in half"),
        ("ffffffff-9", "cut in half"),
        ("00000000-0", "a bit in the middle"),
        ("ffffffff-9", "a bit in the middle"),
    ],
)
def test_a_damaged_file_costs_its_documents_only_once(model: Path, copy: Path, name: str, kind: str) -> None:
    """Wherever its name stands among those of files that hold the same documents, here of a smaller corpus."""
    chosen = max(files(copy), key=documents_in)  # of several, so that some are in the smaller corpus
    file = chosen.rename(chosen.with_name(f"{name}.safetensors"))
    DAMAGES[kind](file)
    with pytest.warns(UserWarning, match="computed again"):
        indexed(model, copy, TEXTS[::2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert indexed(model, copy, TEXTS[::2]).computed == 0


def documents_in(file: Path) -> int:
    with safe_open(file, "pt") as stream:
        return len(json.loads(stream.metadata()["documents"]))


FOREIGN = [
    "notes.txt",
    "{own}/notes.txt",
    "{own}/model.safetensors",
    "{own}/00000000-1.safetensors.partial",
    "{own}/download.partial/part",
    "{own}/icr-bench-notes.txt",
    "model.safetensors",
    "my-model/model.safetensors",
    "my-model/00000000-1.safetensors",
    "my-model/download.partial/part",
    "my-model/icr-bench-1.partial/part",
    "0123456789abcdef01234567/model-00001-of-00002.safetensors",
    "0123456789ABCDEF01234567/00000000-1.safetensors",
]


def test_other_files_in_the_folder_are_left_alone(model: Path, copy: Path) -> None:
    """Neither removed, also where everything gives way, nor counted: the files here would fill the folder alone."""
    (own,) = copy.iterdir()
    held, limit = files(copy), size(copy) + 20_000
    foreign = [copy / name.format(own=own.name) for name in FOREIGN]
    for file in foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine" * 100_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        indexed(model, copy, cache_gb=gigabytes(limit))
        assert indexed(model, copy, cache_gb=gigabytes(limit)).computed == 0
        other = indexed(model, copy, seed=1, cache_gb=gigabytes(limit))
        assert indexed(model, copy, seed=1, cache_gb=gigabytes(limit)).computed == 0
    assert other.computed == other.tokens
    assert not all(file.exists() for file in held)
    assert {file.read_text() for file in foreign} == {"mine" * 100_000}


# Full


def used_at(files: Sequence[Path], seconds: int) -> None:
    """As if they had been used that long after 1970."""
    for file in files:
        os.utime(file, (seconds, seconds))


def gigabytes(size: int) -> float:
    return size / 1e9


def test_files_used_least_recently_give_way(model: Path, tmp_path: Path) -> None:
    """Of four seeds, three have room; the second is used once more before the fourth comes."""
    of: dict[int, list[Path]] = {}
    for seed in range(3):
        held = set(files(tmp_path))
        indexed(model, tmp_path, seed=seed)
        of[seed] = sorted(set(files(tmp_path)) - held)
        used_at(of[seed], 1_000_000 * (seed + 1))
    limit = size(tmp_path) + 20_000  # less than any file, more than a header is reckoned at
    indexed(model, tmp_path, seed=0, cache_gb=gigabytes(limit))
    assert min(file.stat().st_mtime for file in of[0]) > 1_700_000_000
    indexed(model, tmp_path, seed=3, cache_gb=gigabytes(limit))
    assert all(file.exists() for file in of[0])
    assert not any(file.exists() for file in of[1])
    assert all(file.exists() for file in of[2])
    assert indexed(model, tmp_path, seed=3).computed == 0
    assert size(tmp_path) <= limit


def test_no_more_gives_way_than_is_needed(model: Path, copy: Path) -> None:
    held = files(copy)
    for place, file in enumerate(held):
        used_at([file], 1_000_000 * (place + 1))
    limit = size(copy) + 1000
    one = indexed(model, copy, TEXTS[:1], seed=1, cache_gb=gigabytes(limit))
    assert one.computed == one.tokens
    assert [file.exists() for file in held] == [False] + [True] * (len(held) - 1)


def test_the_folder_never_exceeds_its_size(model: Path, tmp_path: Path) -> None:
    indexed(model, tmp_path / "whole", seed=1)
    whole = size(tmp_path / "whole")
    seen: list[int] = []
    cache = tmp_path / "cache"

    def look(done: int, total: int) -> None:
        seen.append(size(cache) if cache.exists() else 0)

    indexed(model, cache)
    # One shard and a half of the two corpora have to go.
    limit = size(cache) + whole - 450_000
    indexed(model, cache, seed=1, cache_gb=gigabytes(limit), progress=look)
    seen.append(size(cache))
    assert len(seen) > 4
    assert max(seen) <= limit
    assert max(seen) > limit - 600_000


def test_what_a_file_says_of_itself_counts_too(model: Path, tmp_path: Path) -> None:
    """A file is some kilobytes larger than its tensors."""
    indexed(model, tmp_path / "whole", TEXTS[:3])
    (file,) = files(tmp_path / "whole")
    limit = file.stat().st_size - 100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        indexed(model, tmp_path / "cache", TEXTS[:3], cache_gb=gigabytes(limit))
    assert size(tmp_path / "cache") <= limit


def test_files_in_use_never_give_way_and_a_full_folder_stops_nothing(
    model: Path, plain: Indexed, tmp_path: Path
) -> None:
    """Half of the corpus has room; the rest lies in memory."""
    limit = plain.retriever.index_bytes() // 2
    with pytest.warns(UserWarning, match=re.escape(str(tmp_path)) + ".*no room"):
        first = indexed(model, tmp_path, cache_gb=gigabytes(limit))
    held = held_documents(tmp_path)
    assert 0 < held < 24
    assert size(tmp_path) <= limit
    assert same_answers(first, plain)
    with pytest.warns(UserWarning, match="no room"):
        second = indexed(model, tmp_path, cache_gb=gigabytes(limit))
    assert second.reused == held
    assert same_answers(second, plain)


def test_a_folder_too_small_for_anything_stops_nothing(model: Path, plain: Indexed, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no room for .* bytes more within 1,000"):
        run = indexed(model, tmp_path, cache_gb=1e-6)
    assert files(tmp_path) == []
    assert same_answers(run, plain)
    assert run.computed == run.tokens


def test_nothing_gives_way_to_what_has_no_room_at_all(model: Path, copy: Path) -> None:
    held = files(copy)
    with pytest.warns(UserWarning, match="no room"):
        indexed(model, copy, seed=1, cache_gb=gigabytes(SHARD_BYTES // 4))
    assert all(file.exists() for file in held)


def with_free(monkeypatch: pytest.MonkeyPatch, *memory: int, disk: int | None = None) -> None:
    """Free bytes of memory, at the first questions and at all that follow, and of the disk."""
    left = list(memory)
    free = lambda: SimpleNamespace(available=left.pop(0) if len(left) > 1 else left[0])  # noqa: E731
    monkeypatch.setattr("psutil.virtual_memory", free)
    if disk is not None:
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=disk))


def bytes_for(model: Path, run: Indexed) -> int:
    """What a corpus needs while it is prefilled."""
    return run.retriever.index_bytes() + batch_bytes(load_backbone(str(model))[0])


@pytest.mark.parametrize("short", ["cache_gb", "disk"])
def test_what_has_room_neither_on_disk_nor_in_memory_is_refused_before_prefill(
    model: Path, plain: Indexed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    needed, told, cache = bytes_for(model, plain), list[int](), tmp_path / "cache"
    memory = needed // 3
    rest = needed - memory
    for missing in (1, 0):
        size = rest - missing
        with_free(monkeypatch, memory, disk=size if short == "disk" else 10**12)
        limit = 50.0 if short == "disk" else gigabytes(size)
        if missing:
            with pytest.raises(NoRoom) as caught:
                indexed(model, cache, cache_gb=limit, progress=lambda done, total: told.append(done))
            assert told == []
            assert not cache.exists()
    assert f"keys and values of 24 documents ({plain.tokens:,} tokens) take {needed:,} bytes" in str(caught.value)
    assert f"but only {memory:,} are free and {rest - 1:,} on disk; use fewer documents" in str(caught.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same_answers(indexed(model, cache, cache_gb=limit), plain)


def test_what_can_give_way_counts_as_room(model: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 10**7, disk=0)
    other = indexed(model, copy, seed=1, cache_gb=gigabytes(size(copy) + 20_000))
    assert other.computed == other.tokens
    assert other.whole


@pytest.mark.parametrize(
    ("limit", "free", "expected"), [(100, 500, 100), (100, 50, 50), (10_000, 500, 2500), (2500, 10_000, 2500)]
)
def test_room_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, free: int, expected: int) -> None:
    """With what is there already, and must have had room, and without what is somebody else's."""
    with_free(monkeypatch, 0, disk=free)
    root = tmp_path / "not" / "there"
    if expected == 2500:
        held = root / ("a" * 24) / "00000000-1.safetensors"
        held.parent.mkdir(parents=True)
        held.write_bytes(bytes(2000))
        held.with_name("model.safetensors").write_bytes(bytes(10_000))
    assert room(root, limit) == expected
    assert room(root, 1) == (2000 if expected == 2500 else 1)


def test_what_is_left_without_room_is_told_by_its_own_numbers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory is taken by someone else meanwhile."""
    whole, told = indexed(model, None), list[int]()
    limit = gigabytes(whole.retriever.index_bytes() // 2)
    with_free(monkeypatch, 10**12, 1000)
    with pytest.warns(UserWarning, match="no room"), pytest.raises(NoRoom) as caught:
        indexed(model, tmp_path, cache_gb=limit, progress=lambda done, total: told.append(done))
    done, documents = 0, 24
    for shard in whole.retriever._corpus.cache.shards:
        if done < told[-1]:
            done, documents = done + shard.tokens, documents - len(shard.documents)
    assert done == told[-1]
    assert 0 < documents < 24
    assert f"values of {documents} documents ({whole.tokens - done:,} tokens) take " in str(caught.value)
    assert "but only 1,000 are free; use" in str(caught.value)


def test_the_last_shard_leaves_nothing_to_refuse(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = indexed(model, None)
    with_free(monkeypatch, 10**12, 1000)
    limit = whole.retriever.index_bytes() + 50_000 - whole.retriever._corpus.cache.shards[-1].nbytes()
    with pytest.warns(UserWarning, match="no room") as caught:
        run = indexed(model, tmp_path, cache_gb=gigabytes(limit))
    assert len(caught) == 1
    assert same_answers(run, whole)


def test_a_copy_of_a_part_needs_room_in_memory(model: Path, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(NoRoom, match=r"only 1,000 are free.*cache=DIR for this corpus alone") as caught:
        indexed(model, full, TEXTS[::3])
    (documents,) = re.findall(r"values of (\d+) documents", str(caught.value))
    assert 0 < int(documents) < 8  # of the first file, the others are not looked into yet
    assert indexed(model, full).computed == 0  # files that are mapped as they are need none


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_the_size_of_a_folder_is_above_0(model: Path, value: float) -> None:
    with pytest.raises(ValueError, match=f"cache_gb must be above 0, got {value:g}"):
        BlockSearch(model=str(model), cache_gb=value)  # type: ignore[arg-type]


# Not to be written to


def test_a_file_in_the_folders_place_is_one_clear_error(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("a file")
    with pytest.raises(OSError, match=re.escape(str(cache))):
        indexed(model, cache)
    assert cache.read_text() == "a file"


def test_a_folder_that_cannot_be_used_is_told_before_prefill(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("a file")
    told: list[int] = []
    with pytest.raises(OSError, match=re.escape(str(cache))):
        indexed(model, cache, progress=lambda done, total: told.append(done))
    assert sum(told) == 0


def test_a_folder_that_may_not_be_written_to_is_one_clear_error(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o555)
    if os.access(cache, os.W_OK):
        pytest.skip("root may write anywhere")
    with pytest.raises(OSError, match=re.escape(str(cache))):
        indexed(model, cache)


# Shared


WAIT_FOR_THE_OTHER = """
import time
def wait(done, total, here=Path({here!r})):
    if done:
        return
    (here / str(os.getpid())).touch()
    end = time.monotonic() + 60
    while len(list(here.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.01)
BlockSearch.progress = lambda self, done, total: wait(done, total)
"""


@pytest.mark.slow
def test_two_processes_may_fill_a_folder_at_once(model: Path, plain: Indexed, tmp_path: Path) -> None:
    cache, here = tmp_path / "cache", tmp_path / "waiting"
    here.mkdir()
    more = WAIT_FOR_THE_OTHER.format(here=str(here))
    processes = [
        subprocess.Popen(child(model, cache, more, texts), stdout=subprocess.PIPE, text=True)
        for texts in (TEXTS, TEXTS[::-1])
    ]
    (one, numbers), (other, backwards) = (p.communicate(timeout=120)[0].splitlines() for p in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert one == other == "measured"
    assert json.loads(numbers) == [23 - number for number in json.loads(backwards)] == plain.answers()[0].numbers
    again = indexed(model, cache)
    assert again.computed == 0
    assert again.whole
    assert same_answers(again, plain)


@pytest.mark.slow
def test_two_processes_that_take_each_others_room_answer_as_alone(model: Path, plain: Indexed, tmp_path: Path) -> None:
    """Both want more than half of it, so that files of the other, which it has mapped, have to give way."""
    cache, here = tmp_path / "cache", tmp_path / "waiting"
    here.mkdir()
    limit = plain.retriever.index_bytes() * 1.2
    more = (
        WAIT_FOR_THE_OTHER.format(here=str(here)) + "BlockSearch = functools.partial(BlockSearch, cache_gb={}, seed={})"
    )
    processes = []
    for seed in (0, 1):
        python, _, _, *rest = child(model, cache, more.replace("={}", f"={limit / 1e9}", 1).replace("={}", f"={seed}"))
        processes.append(subprocess.Popen([python, "-W", "ignore", *rest], stdout=subprocess.PIPE, text=True))
    answers = [process.communicate(timeout=120)[0].splitlines()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    expected = [plain.answers()[0].numbers, indexed(model, None, seed=1).answers()[0].numbers]
    assert [json.loads(numbers) for numbers in answers] == expected
    assert size(cache) <= limit + SHARD_BYTES  # each may have looked before the other wrote
    for file in files(cache):
        with safe_open(file, "pt") as stream:
            assert all(stream.get_tensor(name).numel() for name in TENSORS)


def test_a_file_that_another_process_removed_is_computed_again(
    model: Path, plain: Indexed, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking what is there and reading it."""
    find = DiskCache.find

    def find_and_lose(self: DiskCache) -> Any:
        found = find(self)
        files(copy)[0].unlink()
        return found

    monkeypatch.setattr(DiskCache, "find", find_and_lose)
    with pytest.warns(UserWarning, match="computed again"):
        run = indexed(model, copy)
    assert 0 < run.reused < 24
    assert run.whole
    assert same_answers(run, plain)


def test_a_new_file_that_another_process_removed_is_no_error(
    model: Path, plain: Indexed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make room for its own, between writing it and mapping it."""
    store = DiskCache.store

    def store_and_lose(self: DiskCache, *arguments: Any) -> Any:
        file = store(self, *arguments)
        if file is not None:
            file.unlink()
        return file

    monkeypatch.setattr(DiskCache, "store", store_and_lose)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = indexed(model, tmp_path)
    assert run.whole
    assert same_answers(run, plain)


def test_a_file_that_another_process_still_writes_is_left_to_it(
    model: Path, plain: Indexed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one makes room in the meantime, and nothing else is there to give way."""
    writes = []

    def write(tensors: dict[str, torch.Tensor], file: Path, told: dict[str, str]) -> None:
        save_file(tensors, file, told)
        writes.append(file)
        if len(writes) == 1:
            other = DiskCache(tmp_path, "0" * 24, SHARD_BYTES + 1000)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other.store(plain.retriever._corpus.cache.shards[0], ["a"], [1])

    monkeypatch.setattr("icr_bench.retrievers.lm.disk.save_file", write)
    run = indexed(model, tmp_path)
    assert run.whole
    assert same_answers(run, plain)


def test_a_run_that_starts_takes_no_file_from_one_that_writes(
    model: Path, plain: Indexed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what a killed one left half written."""
    writes = []

    def write(tensors: dict[str, torch.Tensor], file: Path, told: dict[str, str]) -> None:
        save_file(tensors, file, told)
        writes.append(file)
        if len(writes) == 1:
            indexed(model, tmp_path, TEXTS[:2])

    monkeypatch.setattr("icr_bench.retrievers.lm.disk.save_file", write)
    run = indexed(model, tmp_path)
    assert run.whole
    assert same_answers(run, plain)


def test_a_file_is_on_the_disk_before_it_has_its_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(os.fstat(file).st_ino))
    indexed(model, tmp_path)
    assert {file.stat().st_ino for file in files(tmp_path)} <= set(synced)


def test_a_file_that_vanishes_while_room_is_made_is_no_error(
    model: Path, plain: Indexed, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finishes a file, which moves it, after this one has listed it."""
    glob = Path.glob

    def glob_and_more(self: Path, pattern: str) -> Iterator[Path]:
        yield from glob(self, pattern)
        if pattern.startswith("*/"):
            yield self / ("0" * 24) / "00000000-0.safetensors"

    monkeypatch.setattr(Path, "glob", glob_and_more)
    run = indexed(model, copy, seed=1)
    assert run.computed == run.tokens
    assert run.whole


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EROFS], ids=errno.errorcode.get)
def test_a_file_that_may_only_be_read_is_read(
    model: Path, full: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As where a folder was filled by someone else, who owns its files, or lies on a disk that is only to be read."""

    def refuse(file: Path) -> None:
        raise OSError(number, os.strerror(number), str(file))

    monkeypatch.setattr("os.utime", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert indexed(model, full).computed == 0


def test_a_file_that_gives_way_while_it_is_read_is_used(
    model: Path, plain: Indexed, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is mapped stays, whoever removes its name."""
    read = DiskCache._read

    def read_and_lose(self: DiskCache, file: Path) -> Any:
        found = read(self, file)
        file.unlink()
        return found

    monkeypatch.setattr(DiskCache, "_read", read_and_lose)
    run = indexed(model, copy)
    assert files(copy) == []
    assert run.computed == 0
    assert run.whole
    assert same_answers(run, plain)


def test_what_somebody_elses_folder_holds_on_to_takes_its_room(
    model: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files may not be removed, no room is made, and nothing is kept beyond the limit."""
    held = files(copy)

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(f"{self}: not yours")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.warns(UserWarning, match="no room"):
        run = indexed(model, copy, TEXTS[:3], seed=1, cache_gb=gigabytes(size(copy)))
    assert run.computed == run.tokens
    assert files(copy) == held


# In a run


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells measured in this process: quicker."""

    def run_cell(job: Job, work: Path, log: Path, limits: Limits, progress: OnProgress) -> dict[str, Any]:
        log.touch()
        result: dict[str, Any] = json.loads(json.dumps(measure(json.loads(json.dumps(job)), progress)))
        result["memory"] |= {"peak_rss_bytes": 1, "device_peak_bytes": None}
        return result

    monkeypatch.setattr("icr_bench.harness.run.run_cell", run_cell)


def write_beir(folder: Path) -> Path:
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": f"d{i}", "text": f"word{i} and some more of the text {i}"} for i in range(12)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in corpus))
    (folder / "queries.jsonl").write_text("".join(f'{{"_id": "q{i}", "text": "word{i}"}}\n' for i in range(3)))
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(3))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return folder


@pytest.mark.usefixtures("in_process")
def test_a_run_tells_what_was_reused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, cache = write_beir(tmp_path / "data"), tmp_path / "cache"
    chosen = ["-b", f"beir:path={data}", "-r", f"blocksearch:model={model},cache={cache}", "-k", "1,5"]

    def run(out: str) -> tuple[dict[str, Any], str, str]:
        assert main(["run", *chosen, "--device", "cpu", "-o", str(tmp_path / out)]) == 0
        lines = (tmp_path / out / "cells.jsonl").read_text().splitlines()
        table = (tmp_path / out / "tables" / "beir-latency.md").read_text()
        return json.loads(lines[-1]), table, capsys.readouterr().out

    first, table, told = run("first")
    assert first["time"]["index_s"] > 0
    assert first["config"]["retriever"]["settings"]["prefill"] == "measured"
    assert "1 cells computed, 0 there already" in told
    second, reused_table, _ = run("second")
    assert second["time"]["index_s"] is None
    assert second["config"]["retriever"]["settings"]["prefill"] == "reused 12 of 12 documents"
    assert "/s, reused" not in table
    assert "/s, reused" in reused_table
    lines = (tmp_path / "second" / "tables" / "beir-latency.csv").read_text().splitlines()
    (row,) = csv.DictReader(line for line in lines if not line.startswith("#"))
    assert row["12 index_s"] == ""
    assert float(row["12 load_s"]) > 0
    assert second["metrics"] == first["metrics"]
    assert second["key"] == first["key"]
    again, _, told = run("first")
    assert "0 cells computed, 1 there already" in told
    assert again == first
    shutil.rmtree(cache)
    assert "0 cells computed, 1 there already" in run("first")[2]
    assert not cache.exists()
