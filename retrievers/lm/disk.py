"""Keys and values kept on disk between runs: one safetensors file a shard, found again document by document."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from icr_bench.retrievers.lm.cache import Shard

TENSORS = ("keys", "values", "documents", "starts", "ends", "text_starts", "text_ends")


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
        key: identifies what all files here have in common (weights, prompt, type).
        limit: bytes that the whole folder may take; files used least recently give way.
    """

    def __init__(self, folder: Path, key: str, limit: int) -> None:
        self.folder, self._root, self._key, self._limit = folder / key, folder, key, limit
        self._used: set[Path] = set()

    def find(self) -> dict[str, Held]:
        """All documents that the folder holds, by the keys they were stored under."""
        found: dict[str, Held] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(file, "pt") as stream:
                    told = stream.metadata() or {}
                if told.get("key") != self._key:
                    raise ValueError("made for another model, prompt or type")
                documents, codes = json.loads(told["documents"]), json.loads(told["codes"])
                found |= {d: Held(file, i, c) for i, (d, c) in enumerate(zip(documents, codes, strict=True))}
            except (SafetensorError, OSError, ValueError, KeyError) as error:
                warnings.warn(f"{file}: not used, its documents are computed again: {error}", stacklevel=2)
        return found

    def load(self, wanted: Iterable[tuple[int, Held]]) -> Iterator[Shard]:
        """The shards of documents, given with their numbers; a file whose content is damaged gives none of its own.

        A shard that is wanted whole is mapped into memory, of others the documents wanted are copied.
        """
        files: dict[Path, list[tuple[int, Held]]] = {}
        for number, held in wanted:
            files.setdefault(held.file, []).append((number, held))
        for file, members in files.items():
            try:
                shard = self._read(file)
            except (SafetensorError, OSError, ValueError, KeyError) as error:
                warnings.warn(f"{file}: not used, its documents are computed again: {error}", stacklevel=2)
                continue
            self._used.add(file)
            os.utime(file)
            members = sorted(members, key=lambda member: member[1].place)
            if len(members) < len(shard.documents):
                shard = shard.select(torch.tensor([held.place for _, held in members]))
            yield shard.numbered([number for number, _ in members])

    def _read(self, file: Path) -> Shard:
        with safe_open(file, "pt") as stream:
            told = stream.metadata()
            tensors = {name: stream.get_tensor(name) for name in TENSORS}
        if told["checksum"] != checksum(tensors):
            raise ValueError("its checksum does not match")
        return Shard(**tensors)

    def store(self, shard: Shard, keys: Sequence[str], codes: Sequence[int]) -> Path | None:
        """Keep a shard of documents with their keys and codes, whole or not at all; None if there is no room."""
        tensors = {name: getattr(shard, name).cpu().contiguous() for name in TENSORS}
        size = sum(tensor.nbytes for tensor in tensors.values())
        if not self._make_room(size):
            warnings.warn(f"{self._root}: no room for {size:,} bytes more within {self._limit:,}", stacklevel=2)
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        told = {
            "key": self._key,
            "documents": json.dumps(list(keys)),
            "codes": json.dumps(list(codes)),
            "checksum": checksum(tensors),
        }
        with tempfile.TemporaryDirectory(dir=self._root) as work:
            made = Path(work) / "shard.safetensors"
            save_file(tensors, made, told)
            with made.open("rb") as stream:
                os.fsync(stream.fileno())
            target = self.folder / f"{told['checksum']}-{len(keys)}.safetensors"
            made.replace(target)
        self._used.add(target)
        return target

    def _make_room(self, size: int) -> bool:
        files = {file: file.stat() for file in self._root.glob("*/*.safetensors")}
        held = sum(stat.st_size for stat in files.values())
        for file in sorted(files, key=lambda file: files[file].st_mtime):
            if held + size <= self._limit:
                break
            if file not in self._used:
                held -= files[file].st_size
                file.unlink(missing_ok=True)
        return held + size <= self._limit


def checksum(tensors: dict[str, Tensor]) -> str:
    """CRC-32 over the bytes of all tensors: it finds damage, and reads as fast as a disk does."""
    value = 0
    for name in TENSORS:
        value = zlib.crc32(tensors[name].view(torch.uint8).numpy().reshape(-1).data, value)
    return f"{value:08x}"
