"""Files from the Hugging Face hub or from any web server: resumed, verified, and whole or not there at all."""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icr_bench.harness.errors import UsageError

TRIES = 6
"""Of one file, each going on where the last one ended."""

STALL_S = 60.0
"""Seconds without a byte after which a connection is given up."""

PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
"""Answers that may be another one later."""

LONGEST_WAIT_S = 120.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Fetched:
    """A file on the disk, and what tells its content."""

    path: Path
    sha256: str


class NotReachable(UsageError):
    """No network, no such file, or a server that does not answer; the message says what to do instead."""


def digest(path: Path, kind: str = "sha256") -> str:
    """The digest of a file, as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, kind).hexdigest()


def fetch(url: str, target: Path, *, md5: str | None = None, say: Say = lambda text: None) -> Fetched:
    """Bring a file by HTTP; one that is there and passes its check is taken as it is.

    Args:
        md5: what the whole file must have.

    Raises:
        NotReachable: offline, or the server does not give the file.
        UsageError: the file is not what it should be.
    """
    if target.is_file() and (md5 is None or digest(target, "md5") == md5):
        return Fetched(target, digest(target))
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise NotReachable(f"{url}: HF_HUB_OFFLINE is set")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    for attempt in range(1, TRIES + 1):
        try:
            _append(url, part, say)
            break
        except urllib.error.HTTPError as error:
            if error.code == 416 and part.exists():  # nothing is left to bring, or another file's rest
                break
            if error.code not in PASSING or attempt == TRIES:
                raise NotReachable(f"{url}: HTTP {error.code} {error.reason}") from None
            _wait(attempt, error.headers.get("Retry-After"), say, f"HTTP {error.code}")
        except (OSError, ValueError) as error:  # a broken or silent connection, or one that ended early
            reason = getattr(error, "reason", None) or error
            if attempt == TRIES:
                raise NotReachable(f"{url}: {reason}") from None
            _wait(attempt, None, say, str(reason))
    if md5 is not None and (found := digest(part, "md5")) != md5:
        part.unlink()
        raise UsageError(f"{url}: the file has the MD5 {found}, expected {md5}; it was deleted, try again")
    _place(part, target)
    return Fetched(target, digest(target))


def _append(url: str, part: Path, say: Say) -> None:
    """Bring what is missing of a file."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=STALL_S) as answer:
        if have and answer.status != 206:  # the server sends it all again
            have = 0
        told = answer.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes \d+-\d+/(\d+)", told)
        length = answer.headers.get("Content-Length")
        whole = int(match[1]) if match else have + int(length) if length else None
        shown = have
        with part.open("ab" if have else "wb") as stream:
            while block := answer.read(1 << 20):
                stream.write(block)
                have += len(block)
                if have - shown > 1 << 28:
                    say(f"{url}: {have / 1e9:.1f}" + (f" of {whole / 1e9:.1f} GB" if whole else " GB"))
                    shown = have
            stream.flush()
            os.fsync(stream.fileno())
    if whole is not None and have != whole:
        raise ValueError(f"ended after {have:,} of {whole:,} bytes")


def _wait(attempt: int, after: str | None, say: Say, why: str) -> None:
    seconds = min(2.0 ** (attempt - 1), 30.0) * random.uniform(0.75, 1.0)
    if after and re.fullmatch(r"\d+(\.\d+)?", after):
        seconds = min(float(after), LONGEST_WAIT_S)
    say(f"{why}; trying again in {seconds:.0f} s")
    time.sleep(seconds)


def _place(part: Path, target: Path) -> None:
    os.replace(part, target)
    folder = os.open(target.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def hub_files(repo: str, revision: str | None) -> tuple[str, dict[str, str | None]]:
    """The commit of a data set on the hub, and its files with the SHA-256 that the hub tells of those it keeps apart.

    Raises:
        NotReachable: the hub does not answer, or has no such data set.
    """
    from huggingface_hub import HfApi

    info = _asked(repo, lambda: HfApi().dataset_info(repo, revision=revision, files_metadata=True))
    found = {}
    for file in info.siblings or ():
        lfs: Any = file.lfs
        found[file.rfilename] = getattr(lfs, "sha256", None) if lfs else None
    return str(info.sha), found


def hub_file(repo: str, name: str, revision: str, sha256: str | None, say: Say = lambda text: None) -> Fetched:
    """One file of a data set on the hub, from its cache where it is there.

    Raises:
        NotReachable: the hub does not give it.
        UsageError: it is not what the hub says it is.
    """
    from huggingface_hub import hf_hub_download

    say(f"{repo}: {name}")
    told = _asked(repo, lambda: hf_hub_download(repo, name, repo_type="dataset", revision=revision))
    found = digest(Path(told))
    if sha256 is not None and found != sha256:
        Path(told).resolve().unlink(missing_ok=True)
        raise UsageError(f"{repo}: {name} has the SHA-256 {found}, expected {sha256}; it was deleted, try again")
    return Fetched(Path(told), found)


def _asked(repo: str, what: Callable[[], Any]) -> Any:
    """What the hub answers, asked again where its answer may be another one later."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for attempt in range(1, TRIES + 1):
        try:
            return what()
        except OfflineModeIsEnabled:
            raise NotReachable(f"{repo}: HF_HUB_OFFLINE is set") from None
        except HfHubHTTPError as error:
            code = error.response.status_code if error.response is not None else None
            if code not in PASSING or attempt == TRIES:
                raise NotReachable(f"{repo}: the hub answers {' '.join(str(error).split())[:200]}") from None
            _wait(attempt, error.response.headers.get("Retry-After"), lambda text: None, f"HTTP {code}")
        except Exception as error:  # of the hub's client, which raises many kinds
            if attempt == TRIES:
                raise NotReachable(f"{repo}: {' '.join(str(error).split())[:200]}") from None
            _wait(attempt, None, lambda text: None, type(error).__name__)
    raise AssertionError
