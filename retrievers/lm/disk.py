"""Keys and values kept on disk between runs: one safetensors file a shard, found again document by document."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from icr_bench.retrievers.lm.cache import Shard

TENSORS = ("keys", "values", "documents", "starts", "ends", "text_starts", "text_ends")

OWN = re.compile(r"[0-9a-f]{24}/[0-9a-f]{8}-\d+\.safetensors")
"""Files that are kept here, by folder and name: whatever else a user's folder holds is neither counted nor removed."""

UNFINISHED = "icr-bench-"
"""How the names of folders begin in which files are being written."""

Broken = (SafetensorError, OSError, ValueError, KeyError, TypeError)
"""What reading a file raises that is not as it was written."""


@dataclass(frozen=True)
class Held:
    """Where a document's keys and values lie, and the code they were made with."""

    file: Path
    place: int
    code: int


class DiskCache:
    """The files of one model, prompt and seed below a folder.

    Args:
        folder: the user's cache folder, shared by all models.
        key: 24 hexadecimal digits that identify what all files here have in common (weights, prompt, type).
        limit: bytes that the files of all keys may take; those used least recently give way.
    """

    def __init__(self, folder: Path, key: str, limit: int) -> None:
        self.folder, self._root, self._key, self._limit = folder / key, folder, key, limit
        self._used: set[Path] = set()

    def find(self) -> dict[str, list[Held]]:
        """All documents that the folder holds, by the keys they were stored under; the newest entry comes first."""
        files = []
        for file in sorted(own_files(self._root, self._key)):
            try:
                with safe_open(file, "pt") as stream:
                    told = stream.metadata() or {}
                if told["key"] != self._key:
                    raise ValueError("made for another model, prompt or type")
                documents, codes = json.loads(told["documents"]), json.loads(told["codes"])
                entries = [
                    (str(d), Held(file, i, int(c))) for i, (d, c) in enumerate(zip(documents, codes, strict=True))
                ]
                files.append((int(told["made"]), entries))
            except Broken as error:
                _warn(file, error)
        found: dict[str, list[Held]] = {}
        for _, entries in sorted(files, key=lambda file: -file[0]):
            for document, held in entries:
                found.setdefault(document, []).append(held)
        return found

    def load(
        self, wanted: Iterable[tuple[int, Held]], copying: Callable[[int, int], None] = lambda documents, tokens: None
    ) -> Iterator[Shard]:
        """The shards of documents, given with their numbers; a file whose content is damaged gives none of its own.

        A shard that is wanted whole is mapped into memory, of others the documents wanted are copied. They come in the
        order in which they were made.

        Args:
            copying: told how many documents and tokens are about to be copied; it may refuse by raising.
        """
        files: dict[Path, list[tuple[int, Held]]] = {}
        for number, held in wanted:
            files.setdefault(held.file, []).append((number, held))
        shards = []
        for file, members in files.items():
            try:
                made, shard = self._read(file)
            except Broken as error:
                _warn(file, error)
                continue
            self._used.add(file)
            with suppress(OSError):  # somebody else's file, one that gave way meanwhile, or a disk only to be read
                os.utime(file)
            members = sorted(members, key=lambda member: member[1].place)
            if len(members) < len(shard.documents):
                places = [held.place for _, held in members]
                copying(len(places), int((shard.ends - shard.starts)[places].sum()))
                shard = shard.select(places)
            shards.append((made, shard.numbered([number for number, _ in members])))
        for _, shard in sorted(shards, key=lambda one: one[0]):
            yield shard

    def _read(self, file: Path) -> tuple[int, Shard]:
        with safe_open(file, "pt") as stream:
            told = stream.metadata()
            tensors = {name: stream.get_tensor(name) for name in TENSORS}
        if told["checksum"] != checksum(tensors, told):
            with suppress(OSError):  # it is this folder's own, and would be found before the one that replaces it
                file.unlink()
            raise ValueError("its checksum does not match; removed")
        return int(told["made"]), Shard(**tensors)

    def prepare(self) -> None:
        """Make the folder, and clear away what killed processes left half written.

        Raises:
            OSError: it cannot be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK):
            raise PermissionError(f"{self.folder}: cannot be written to; give another folder as cache=")
        for work in self._root.glob(f"{'[0-9a-f]' * 24}/{UNFINISHED}*.partial"):
            with suppress(OSError), _locked(work):  # not while somebody still writes there
                shutil.rmtree(work)

    def store(self, shard: Shard, keys: Sequence[str], codes: Sequence[int]) -> Path | None:
        """Keep a shard of documents with their keys and codes, whole or not at all; None if there is no room."""
        tensors = {name: getattr(shard, name).cpu().contiguous() for name in TENSORS}
        told = {
            "key": self._key,
            "made": str(time.time_ns()),
            "documents": json.dumps(list(keys)),
            "codes": json.dumps(list(codes)),
        }
        told["checksum"] = checksum(tensors, told)
        header = 2 * sum(map(len, told.values())) + 4096  # quotes are escaped in it; names and shapes take the rest
        size = sum(tensor.nbytes for tensor in tensors.values()) + header
        if not self._make_room(size):
            warnings.warn(f"{self._root}: no room for {size:,} bytes more within {self._limit:,}", stacklevel=2)
            return None
        target = self.folder / f"{told['checksum']}-{told['made']}.safetensors"
        try:
            with ExitStack() as stack:
                work = Path(tempfile.mkdtemp(".partial", UNFINISHED, self.folder))
                stack.callback(shutil.rmtree, work, ignore_errors=True)
                with suppress(OSError):  # a file system without locks
                    stack.enter_context(_locked(work))
                work.mkdir(exist_ok=True)  # somebody may have cleared it away before it was locked
                made = work / target.name
                save_file(tensors, made, told)
                with made.open("rb") as stream:
                    os.fsync(stream.fileno())
                made.chmod(0o666 & ~_umask())
                made.replace(target)
        except (OSError, SafetensorError) as error:
            warnings.warn(f"{target}: not kept: {error}", stacklevel=2)
            return None
        self._used.add(target)
        return target

    def _make_room(self, size: int) -> bool:
        files: dict[Path, os.stat_result] = {}
        for file in own_files(self._root):
            with suppress(OSError):  # another process makes room too
                files[file] = file.stat()
        held = sum(stat.st_size for stat in files.values())
        idle = sorted((file for file in files if file not in self._used), key=lambda file: files[file].st_mtime)
        if held - sum(files[file].st_size for file in idle) + size > self._limit:
            return False
        for file in idle:
            if held + size <= self._limit:
                break
            with suppress(OSError):  # in somebody else's folder
                file.unlink(missing_ok=True)
                held -= files[file].st_size
        return held + size <= self._limit


def room(root: Path, limit: int) -> int:
    """Bytes that files below a user's folder could take, at most: those that are there, and what is free within the
    limit and on the disk once all others have given way."""
    held = 0
    for file in own_files(root):
        with suppress(OSError):
            held += file.stat().st_size
    there = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    return min(max(limit, held), held + shutil.disk_usage(there).free)


def own_files(root: Path, key: str = "*") -> Iterator[Path]:
    """The files that are kept below a user's folder, of one key or all."""
    for file in root.glob(f"{key}/*.safetensors"):
        if OWN.fullmatch(f"{file.parent.name}/{file.name}"):
            yield file


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder that is written to; OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _umask() -> int:
    """Which permissions new files lack; safetensors gives its files to nobody else."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _warn(file: Path, error: BaseException) -> None:
    warnings.warn(f"{file}: not used, its documents are computed again: {error}", stacklevel=3)


def checksum(tensors: dict[str, Tensor], told: dict[str, str]) -> str:
    """CRC-32 over the bytes of all tensors and over documents and codes: it finds damage as fast as a disk reads."""
    value = zlib.crc32((told["documents"] + told["codes"] + told["made"]).encode())
    for name in TENSORS:
        value = zlib.crc32(tensors[name].view(uint8).numpy().reshape(-1).data, value)
    return f"{value:08x}"
