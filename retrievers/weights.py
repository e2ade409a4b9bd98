"""Where a model's weights are and what identifies them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NewType

Model = NewType("Model", str)
"""Annotation of an option that names weights: a hub id (``org/name@revision``), or a local file or folder.

A cell is computed again when the weights behind such an option change.
"""

CacheFolder = NewType("CacheFolder", Path)
"""Annotation of an option that names a folder to keep work in between runs; what it holds identifies nothing."""


SHIPPED = Path(__file__).with_name("models")
"""Models that come with this package, a folder each."""


def shipped() -> list[str]:
    """Their names."""
    return sorted(file.parent.name for file in SHIPPED.glob("*/README.md"))


def locate(model: str) -> tuple[str, str | None]:
    """Split ``org/name@revision``; a local path is returned as it is, without a revision, and the name of a model that
    ships with this package as its folder."""
    if model in shipped():
        return str(SHIPPED / model), None
    if Path(model).exists():
        return model, None
    name, _, revision = model.partition("@")
    return name, revision or None


def digest(path: Path) -> str:
    """SHA-256 of a file, or over the names and contents of all files below a folder."""
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    sha = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        sha.update(f"{file.relative_to(path).as_posix()}\0{digest(file)}\n".encode("utf-8", "surrogateescape"))
    return sha.hexdigest()


def identify(model: str) -> str:
    """What tells these weights from any others: a digest of local files, or the hub commit.

    Raises:
        OSError: the hub does not answer and its cache holds no such revision; the message says what to do.
    """
    name, revision = locate(model)
    if Path(name).exists():
        return f"sha256:{digest(Path(name))}"
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        if not constants.HF_HUB_OFFLINE:
            return f"hub:{HfApi().model_info(name, revision=revision).sha}"
    except HFValidationError:
        raise OSError(f"{model}: neither a local folder or file nor a hub id (org/name)") from None
    except Exception:  # the hub's client raises many kinds
        pass  # no network, or no such model: the cache decides
    cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    pointer = cached / "refs" / (revision or "main")
    if pointer.is_file():
        return f"hub:{pointer.read_text().strip()}"
    if revision and (cached / "snapshots" / revision).is_dir():
        return f"hub:{revision}"
    raise OSError(
        f"{model}: no such local folder, and the hub could not be asked; check the name and the network, "
        f"or download the model elsewhere and give its folder"
    )
