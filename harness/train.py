"""``icr-bench train``: a recipe with its data, its progress, and the folder of a model at the end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from icr_bench.harness import strict
from icr_bench.harness.errors import FAILED, OK, UsageError, unknown
from icr_bench.harness.prepare import place
from icr_bench.retrievers.weights import identify

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


def parse(recipe: str, changes: Sequence[str] = ()) -> Recipe:
    """A recipe by name, or of a file, with keys changed.

    Args:
        changes: ``KEY=VALUE``, where the key may be a path (``prompt.cap``) and ``stages.KEY`` is of all stages.
    """
    from icr_bench.retrievers.training.recipe import RecipeError, parse_recipe

    path = Path(recipe)
    try:
        written = path.read_text(encoding="utf-8") if path.suffix in (".yaml", ".yml") else text(recipe)
        told = strict.parse(written, recipe)
        for change in changes:
            _change(told, change)
        return parse_recipe(told, recipe)
    except RecipeError as error:
        raise UsageError(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{recipe}: the recipe cannot be read: {error}") from None


def _change(told: Any, change: str) -> None:
    """Set one key of what a recipe's YAML holds."""
    key, equals, value = change.partition("=")
    *above, last = key.split(".")
    if not equals or not all((*above, last)):
        raise UsageError(f"--set {change!r}: expected KEY=VALUE, such as blind=0, prompt.cap=300 or stages.lr=1e-4")
    held = [told]
    for name in above:
        held = [one.setdefault(name, {}) for one in held if isinstance(one, dict)]
        held = [inner for one in held for inner in (one if isinstance(one, list) else [one])]
    if not held or not all(isinstance(one, dict) for one in held):
        raise UsageError(f"--set {change!r}: {'.'.join(above)} holds no keys")
    for one in held:
        one[last] = strict.parse(value, f"--set {change!r}")


def train(
    recipe: str, out: Path, *, seed: int | None, start: str | None, device: str, changes: Sequence[str] = ()
) -> int:
    """Train to the end, or say why not; returns the exit code.

    A recipe that starts from another recipe of the package has that trained first, in a folder beside ``out`` that
    carries its name and the seed; one that is finished is taken as it is.

    Args:
        seed, start: in place of the recipe's.
        changes: keys of the recipe, as `parse` takes them.
    """
    from icr_bench.harness.sources import Data
    from icr_bench.retrievers.training.card import drawn
    from icr_bench.retrievers.training.trainer import MODEL, Stopped, Trainer

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    first_process = os.environ.get("RANK", "0") == "0"

    def say(told: str) -> None:
        if first_process:
            console.print(told, markup=False)

    read = parse(recipe, changes)
    if seed is not None:
        read = replace(read, seed=seed)
    if start is not None:
        read = replace(read, start=start, shape=None)
    made = ["icr-bench", "train", Path(recipe).stem, "--seed", str(read.seed)]
    made += [part for change in changes for part in ("--set", change)]
    warm = None
    try:
        if read.start in names():
            first = out.absolute().parent / f"{read.start}-seed{read.seed}"
            warm = replace(parse(read.start), seed=read.seed)
            if not (first / MODEL).is_dir():
                say(f"{recipe} starts from {read.start}, which is trained first, in {first}")
            if code := train(read.start, first, seed=read.seed, start=None, device=device):
                return code
            begun = [f"{read.start}, seed {read.seed}, {_spent(first)}"]
            begun += [f"data of the start's stage {at}: {drawn(stage)}" for at, stage in enumerate(warm.stages, 1)]
            read = replace(read, start=str(first / MODEL))
        elif read.start:
            known = Path(read.start).name if Path(read.start).exists() else read.start
            begun = [f"{known} ({identify(read.start)})"]
            made += ["--start", known] if start is not None else []
        else:
            begun = ["new weights"]
        _keep_memory()
        placed = _device(device)
        data = Data(read.seed, out / "data", read.exclude, say, placed)
        trainer = Trainer(read, data, out, placed, _shown(console, read.steps))
        if trainer.step == read.steps and (out / MODEL).is_dir():
            say(f"{out / MODEL}: the trained model is there already")
            return OK
        trainer.run()
        say(f"{trainer.finish(shlex.join(made), begun, warm)}: the trained model")
    except ValueError as error:  # what the recipe asks for does not fit its model or its data
        raise UsageError(f"{recipe}: {error}") from None
    except Stopped as error:
        console.print(f"icr-bench: stopped: {error}", markup=False)
        return FAILED
    return OK


def _device(asked: str) -> str:
    """Where this process trains; of several on one machine (`torchrun`) each takes a GPU of its own."""
    placed = place(asked, "float32")[0]
    if placed == "cuda" and (local := os.environ.get("LOCAL_RANK")):
        placed = place(f"cuda:{local}", "float32")[0]
    return placed


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
        if "seconds" in told:
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
