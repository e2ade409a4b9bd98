"""The README of a trained model: what made it, how long it took, and where it departs from the paper."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from icr_bench.retrievers.lm.prompt import DIGITS
from icr_bench.retrievers.training.recipe import Recipe


def model_card(recipe: Recipe, name: str, begun: str, parameters: int, log: Sequence[Mapping[str, Any]]) -> str:
    """Markdown.

    Args:
        name: of the recipe.
        begun: what the training started from.
        log: the lines of the training's log.
    """
    last = log[-1]
    peak = max(line.get("peak_bytes", 0) for line in log)  # the log of a training that was resumed has all its parts
    shown = [line for line in log if "held_out_hit@1" in line]
    lines = [
        f"# {name}, seed {recipe.seed}",
        "",
        f"Made by `icr-bench train {name} --seed {recipe.seed}`: {_what(recipe)}.",
        "",
        f"- start: {begun}; trained parameters: {parameters:,}",
        f"- steps: {recipe.steps:,}; {last['seconds'] / 60:.0f} minutes; peak memory {peak / 1e9:.1f} GB",
        f"- documents in a batch: up to {max(_most(stage.documents.points) for stage in recipe.stages):.0f}; "
        f"queries: up to {max(stage.queries for stage in recipe.stages)}",
        f"- data: {'; '.join(dict.fromkeys(json.dumps(dict(one)) for stage in recipe.stages for one in stage.data))}",
        f"- excluded from training: the words of the `limit` benchmark and of its development form, the attributes of "
        f"the published LIMIT{''.join(f', {spec}' for spec in recipe.exclude)}",
    ]
    lines.append(
        f"- limits: made for texts like the data above; documents are cut to {recipe.prompt.cap} tokens"
        + ("" if recipe.method == "dense" else f", codes name at most {10**DIGITS:,} documents")
    )
    if shown:
        lines.append(
            f"- hit@1 on held-out biographies among {recipe.held_out} documents: {shown[-1]['held_out_hit@1']:.2f}"
        )
    departures = _departures(recipe)
    if departures:
        lines += ["", "Departures from the paper (arXiv 2607.01538), each a key of the recipe:", ""]
        lines += [f"- {line}" for line in departures]
    return "\n".join(lines) + "\n"


def _what(recipe: Recipe) -> str:
    if recipe.method == "dense":
        return "a dense bi-encoder (InfoNCE over the documents of a batch)"
    parts = ["cross-entropy of the code's digits"]
    if any(stage.onpolicy.ever() for stage in recipe.stages):
        parts.append("the on-policy loss")
    if recipe.ssmax is not None:
        parts.append("SSMax")
    if recipe.sink is not None:
        parts.append("the additive sink")
    return f"in-context retrieval with {recipe.codes} codes, trained by {', '.join(parts)}"


def _departures(recipe: Recipe) -> list[str]:
    found = []
    if recipe.blind:
        found.append(f"`blind: {recipe.blind}`: in the first {recipe.blind} layers queries see no documents")
    if aids := recipe.supervision:
        found.append(
            f"`supervision`: attention at layer {aids.layer} is told the golds"
            + (f"; at layer {aids.own} an answer's tokens are told to look at what is asked for" if aids.own else "")
            + (f"; at layer {aids.gather} a document's text is told to look at its code" if aids.gather else "")
            + (
                f"; linear probes before layers {', '.join(map(str, aids.probes))} are told codes"
                if aids.probes
                else ""
            )
            + "; `attention: 0` and `probes: 0` of a stage switch it off"
        )
    if any(stage.alphabets for stage in recipe.stages):
        found.append("`alphabets`: some steps draw codes from few digits a position")
    if recipe.lora:
        found.append(f"`lora`: rank {recipe.lora.rank} in layers {recipe.lora.layers[0]} to {recipe.lora.layers[1]}")
    if recipe.optimizer == "muon":
        found.append("`optimizer: muon` for matrices, AdamW for the rest")
    if recipe.prompt.cap != 300 or recipe.prompt.offset != 300:
        cap, offset = recipe.prompt.cap, recipe.prompt.offset
        found.append(f"`prompt`: documents of up to {cap} tokens, queries from position {offset}")
    return found


def _most(points: Sequence[tuple[float, float]]) -> float:
    return max((height for _, height in points), default=math.nan)
