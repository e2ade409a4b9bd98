"""``icr-bench train``: a recipe, its progress, and the folder of a model at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from icr_bench.harness.errors import FAILED, OK, UsageError
from icr_bench.harness.prepare import place


def train(recipe: str, out: Path, *, seed: int | None, start: str | None, device: str) -> int:
    """Train to the end, or say why not; returns the exit code."""
    from icr_bench.retrievers.training.recipe import RecipeError, read_recipe
    from icr_bench.retrievers.training.trainer import Stopped, Trainer

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        path = Path(recipe)
        read = read_recipe(path)
        if seed is not None:
            read = replace(read, seed=seed)
        if start is not None:
            read = replace(read, start=str(Path(start).absolute()) if Path(start).exists() else start)
        trainer = Trainer(read, path.absolute().parent, out, place(device, "float32")[0], _shown(console, read.steps))
    except RecipeError as error:
        raise UsageError(str(error)) from None
    try:
        trainer.run()
        folder = trainer.finish()
    except Stopped as error:
        console.print(f"icr-bench: stopped: {error}", markup=False)
        return FAILED
    console.print(f"{folder}: the trained model", markup=False)
    return OK


def _shown(console: Console, steps: int) -> Any:
    def show(told: Mapping[str, Any]) -> None:
        left = ""
        if told.get("seconds"):
            left = f"{told['seconds'] / told['step'] * (steps - told['step']) / 60:.0f} min left, "
            left += f"{told['tokens_per_s']:,} tokens/s"
        shown = {k: v for k, v in told.items() if k not in ("step", "seconds", "tokens_per_s", "lr", "documents")}
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in shown.items())
        console.print(f"step {told['step']:,}/{steps:,}: {numbers}; {left}", markup=False)

    return show
