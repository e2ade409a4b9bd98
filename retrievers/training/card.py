"""The README of a trained model: what made it, how long it took, and where it departs from the paper."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from icr_bench.retrievers.lm.prompt import DIGITS
from icr_bench.retrievers.training.recipe import Recipe, Stage

HELD_OUT = 64
"""Queries of the check on held-out biographies."""


def model_card(
    recipe: Recipe,
    made: str,
    begun: Sequence[str],
    data: Sequence[str],
    parameters: int,
    warm: Recipe | None,
    log: Sequence[Mapping[str, Any]],
) -> str:
    """Markdown.

    Args:
        made: the command.
        begun: what the training started from, a line each.
        data: what its sources hold and what was kept out of them, a line each.
        parameters: how many were trained.
        warm: the recipe of the model that it started from, if that was trained by one.
        log: the lines of the training's log.
    """
    last = log[-1]
    peak = max(line.get("peak_bytes", 0) for line in log)  # the log of a training that was resumed has all its parts
    shown = [line for line in log if "held_out_hit@1" in line]
    lines = [
        f"# {made.split()[2]}, seed {recipe.seed}",
        "",
        f"Made by `{made}`: {_what(recipe)}.",
        "",
        *(f"- start: {line}" for line in begun),
        f"- trained parameters: {parameters:,}",
        f"- steps: {recipe.steps:,}; {last['seconds'] / 60:.0f} minutes; peak memory {peak / 1e9:.1f} GB",
        f"- documents in a batch: up to {max(stage.documents.most() for stage in recipe.stages):.0f}; "
        f"queries: up to {max(stage.queries for stage in recipe.stages)}",
        *(f"- data of stage {at}: {drawn(stage)}" for at, stage in enumerate(recipe.stages, 1)),
        *(f"- {line}" for line in data),
        f"- limits: made for texts like the data above; documents are cut to {recipe.prompt.cap} tokens"
        + ("" if recipe.method == "dense" else f", codes name at most {10**DIGITS:,} documents"),
    ]
    if shown:
        value = shown[-1]["held_out_hit@1"]
        low, high = wilson(value, HELD_OUT)
        lines.append(
            f"- hit@1 of {HELD_OUT} queries on held-out biographies among {recipe.held_out} documents: {value:.2f} "
            f"[{low:.2f}, {high:.2f}] (95%, Wilson); another seed is to land in it"
        )
    departures = _departures(recipe)
    if warm is not None:
        departures.append("a start that was trained before, as said above (not with `--start MODEL`)")
        departures += [f"in the start's training: {line}" for line in _departures(warm) if line not in departures]
    if departures:
        lines += ["", "Departures from the paper (arXiv 2607.01538), each with the flag that leaves it out:", ""]
        lines += [f"- {line}" for line in departures]
    return "\n".join(lines) + "\n"


def drawn(stage: Stage) -> str:
    """The sources of a stage, as the recipe names them."""
    return "; ".join(json.dumps(dict(one)) for one in stage.data)


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of so many (Wilson)."""
    z = 1.96
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)


def _what(recipe: Recipe) -> str:
    if recipe.method == "dense":
        return "a dense bi-encoder (InfoNCE over the documents of a batch)"
    parts = ["cross-entropy of the code's digits"]
    if any(stage.onpolicy.most() > 0 for stage in recipe.stages):
        parts.append("the on-policy loss")
    if recipe.ssmax is not None:
        parts.append("SSMax")
    if recipe.sink is not None:
        parts.append("the additive sink")
    return f"in-context retrieval with {recipe.codes} codes, trained by {', '.join(parts)}"


def _departures(recipe: Recipe) -> list[str]:
    """What a recipe does that the paper does not, and how `icr-bench train` is told not to."""
    found = list[tuple[str, str]]()
    if shape := recipe.shape:
        found.append((f"a new model of {shape.layers} layers", "--start MODEL"))
        if shape.match:
            found.append(("weights that begin with W_q = W_k and W_o = W_v^T / 2", "--set shape.match=false"))
    if recipe.blind:
        told = f"in the first {recipe.blind} layers queries see no documents"
        found.append((told, "--set blind=0"))
    if aids := recipe.supervision:
        told = f"attention at layer {aids.layer} is told the golds"
        if aids.maxsim:
            told += f"; MaxSim at layers {', '.join(map(str, aids.maxsim))} too, of last and content tokens"
        if aids.own is not None:
            told += f"; at layer {aids.own} an answer's tokens are told to look at what is asked for"
        if aids.gather is not None:
            told += f"; at layer {aids.gather} a document's text is told to look at its code"
        if aids.probes:
            told += f"; linear probes before layers {', '.join(map(str, aids.probes))} are told codes"
        found.append((told, "--set stages.attention=0 --set stages.probes=0"))
    if any(stage.alphabets for stage in recipe.stages):
        found.append(("some steps draw codes from few digits a position", "--set stages.alphabets=0"))
    if any(stage.jitter > 1 for stage in recipe.stages):
        found.append(("N changes from step to step", "--set stages.jitter=1"))
    if recipe.lora:
        first, last = recipe.lora.layers
        told = f"only additions of rank {recipe.lora.rank} to layers {first} to {last} learn; the matrices that stay "
        told += f"multiply in {recipe.lora.base}"
        found.append((told, "--set lora=null"))
    if recipe.optimizer == "muon":
        found.append(("Muon for matrices, AdamW for the rest", "--set optimizer=adamw"))
    if recipe.prompt.cap != 300 or recipe.prompt.offset != 300:
        told = f"documents of up to {recipe.prompt.cap} tokens, queries from position {recipe.prompt.offset}"
        found.append((told, "--set prompt.cap=300 --set prompt.offset=300"))
    return [f"{told} (not with `{flag}`)" for told, flag in found]
