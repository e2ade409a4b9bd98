"""``icr-bench train``: a recipe with its data, its progress, and the folder of a model at the end."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from icr_bench.harness import strict
from icr_bench.harness.errors import FAILED, OK, UsageError, unknown
from icr_bench.harness.prepare import place

if TYPE_CHECKING:
    from icr_bench.retrievers.training.recipe import Recipe

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt in malloc.h."""


RECIPES = files("icr_bench.retrievers.training").joinpath("recipes")


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(file.name.removesuffix(".yaml") for file in RECIPES.iterdir() if file.name.endswith(".yaml"))


def text(name: str) -> str:
    """The YAML text of one of them."""
    if name not in names():
        raise unknown("recipe", name, names())
    return RECIPES.joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def parse(recipe: str) -> Recipe:
    """A recipe by name, or of a file."""
    from icr_bench.retrievers.training.recipe import RecipeError, parse_recipe

    path = Path(recipe)
    try:
        if path.suffix in (".yaml", ".yml"):
            return parse_recipe(strict.parse(path.read_text(encoding="utf-8"), recipe), recipe)
        return parse_recipe(strict.parse(text(recipe), recipe), recipe)
    except RecipeError as error:
        raise UsageError(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{recipe}: the recipe cannot be read: {error}") from None


def train(recipe: str, out: Path, *, seed: int | None, start: str | None, device: str) -> int:
    """Train to the end, or say why not; returns the exit code.

    A recipe that starts from another recipe of the package has that trained first, in a folder beside ``out`` that
    carries its name and the seed; one that is finished is taken as it is.
    """
    from icr_bench.harness.sources import Data
    from icr_bench.retrievers.training.trainer import Stopped, Trainer

    console = Console(stderr=True, soft_wrap=True, highlight=False)

    def say(told: str) -> None:
        console.print(told, markup=False)

    read = parse(recipe)
    if seed is not None:
        read = replace(read, seed=seed)
    if start is not None:
        read = replace(read, start=start, shape=None)
    begun = read.start
    if read.start in names():
        first = out.absolute().parent / f"{read.start}-seed{read.seed}"
        if not (first / "model" / "config.json").is_file():
            say(f"{recipe} starts from {read.start}, which is trained first, in {first}")
            if code := train(read.start, first, seed=read.seed, start=None, device=device):
                return code
        begun = f"{read.start}, seed {read.seed}, {_spent(first)}"
        read = replace(read, start=str(first / "model"))
    _keep_memory()
    try:
        data = Data(read.seed, out / "data", read.exclude, say)
        trainer = Trainer(read, data, out, place(device, "float32")[0], _shown(console, read.steps))
        trainer.run()
        say(f"{trainer.finish(Path(recipe).stem, begun)}: the trained model")
    except ValueError as error:  # what the recipe asks for does not fit its model or its data
        raise UsageError(f"{recipe}: {error}") from None
    except Stopped as error:
        say(f"icr-bench: stopped: {error}")
        return FAILED
    return OK


def _spent(folder: Path) -> str:
    """Steps and time of a training that is finished."""
    last = json.loads((folder / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return f"{last['step']:,} steps in {last['seconds'] / 60:.0f} minutes"


def _keep_memory() -> None:
    """Let the C library keep what is freed: a step asks for the same large blocks again and again, and the kernel would
    fill each with zeros."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _shown(console: Console, steps: int) -> Any:
    def show(told: Mapping[str, Any]) -> None:
        left = ""
        if told.get("seconds"):
            left = f"{told['seconds'] / told['step'] * (steps - told['step']) / 60:.0f} min left, "
            left += f"{told['tokens_per_s']:,} tokens/s"
        shown = {
            k: v
            for k, v in told.items()
            if k not in ("step", "seconds", "tokens_per_s", "lr", "documents", "peak_bytes")
        }
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in shown.items())
        console.print(f"step {told['step']:,}/{steps:,}: {numbers}; {left}", markup=False)

    return show
