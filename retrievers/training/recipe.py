"""A recipe: all that decides what a training makes, read from one YAML file."""

from __future__ import annotations

import contextlib
import itertools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from icr_bench.retrievers.lm.prompt import DIGITS, PromptSettings
from icr_bench.retrievers.training.learner import Aids

LOGGED = {
    "blocksearch": (
        *(f"{name}{place + 1}" for name in ("digit", "right") for place in range(DIGITS)),
        *("onpolicy", "attention", "mass", "mass_focus", "mass_digits", "mass_rivals", "looking", "gathering"),
        *("maxsim_last", "maxsim_content"),
        *("probes", "loss", "gradient"),
    ),
    "dense": ("infonce", "right", "kl", "loss", "gradient"),
}
"""What a log may hold of each step, by method; a gate may ask for any of it."""


class Ramp:
    """A number that may change over the steps of a stage: ``0.5``, or points ``[[0, 6], [400, 6], [1000, 0]]`` with
    straight lines between them, constant before the first and after the last."""

    def __init__(self, value: Any) -> None:
        points = value if isinstance(value, list) else [[0, value]]
        try:
            self.points = [(float(step), float(height)) for step, height in points]
        except (TypeError, ValueError):
            raise ValueError(f"is {value!r:.60}; expected a number, or points [[step, value], ...]") from None
        steps = [step for step, _ in self.points]
        if not self.points or any(b <= a for a, b in itertools.pairwise(steps)):
            raise ValueError(f"is {value!r:.60}; the steps of its points must grow")
        if not all(math.isfinite(height) for _, height in self.points):
            raise ValueError(f"is {value!r:.60}; expected finite numbers")

    def at(self, step: float) -> float:
        before = self.points[0]
        for point in self.points:
            if step < point[0]:
                share = (step - before[0]) / (point[0] - before[0]) if point is not self.points[0] else 0.0
                return before[1] + share * (point[1] - before[1])
            before = point
        return before[1]

    def least(self) -> float:
        return min(height for _, height in self.points)

    def most(self) -> float:
        return max(height for _, height in self.points)

    def __repr__(self) -> str:
        return f"Ramp({self.points})"


@dataclass(frozen=True)
class Shape:
    """A model of the Qwen3 architecture from scratch, with a byte-level BPE tokenizer that splits digits."""

    layers: int = 6
    width: int = 128
    heads: int = 4
    mlp: int = 384
    vocabulary: int = 3072
    theta: float = 1e6
    qk_norm: float = 1.4  # initial weight of the norms of queries and keys: how sharp attention starts
    match: bool = True  # begin with W_q = W_k and W_o = W_v^T / 2: look for equal keys, copy what is found


@dataclass(frozen=True)
class Lora:
    """Low-rank additions to the matrices of some layers; everything else stays as it is."""

    rank: int = 16
    layers: tuple[int, int] = (0, 1_000)  # the first and the last
    alpha: float = 16.0
    base: Literal["float32", "bfloat16"] = "float32"  # in what the matrices that stay multiply


@dataclass(frozen=True)
class Stage:
    """Consecutive steps under one schedule."""

    steps: int
    lr: Ramp
    documents: Ramp  # N
    queries: int  # at most
    data: tuple[Mapping[str, Any], ...]  # sources: options, ``weight``, and ``documents`` of a batch, at most
    jitter: float = 1.0  # N is drawn log-uniformly from N / jitter to N
    per_document: float = 1e9  # queries for each document, at most
    onpolicy: Ramp = field(default_factory=lambda: Ramp(0))
    attention: Ramp = field(default_factory=lambda: Ramp(0))
    probes: Ramp = field(default_factory=lambda: Ramp(0))
    alphabets: float = 0.0  # share of steps whose codes come from few digits a position
    sink: Ramp = field(default_factory=lambda: Ramp(0))  # strength of the gate
    gates: tuple[Mapping[str, float], ...] = ()  # ``{by: step, mass: at least}``
    recompute: bool = False  # documents' layers once more on the way back: a third slower, memory of one layer


@dataclass(frozen=True)
class Recipe:
    """What `icr-bench train` reads."""

    stages: tuple[Stage, ...]
    method: Literal["blocksearch", "dense"] = "blocksearch"
    start: str | None = None  # a model to start from, or another recipe of this package to train first
    base: str | None = None  # hub id of the model that an adapter adds to, where start is a copy of it
    shape: Shape | None = None  # or a new one
    lora: Lora | None = None
    prompt: PromptSettings = field(default_factory=PromptSettings)
    codes: Literal["random", "position"] = "random"
    ssmax: float | None = None  # initial value of the scalars
    sink: float | None = None
    blind: int = 0  # first layers in which queries see no documents (not in the paper)
    supervision: Aids | None = None
    routing_layer: int | None = None  # told to whoever loads the weights, as is the next
    routing_b: int | None = None
    tau: float = 0.05  # temperature of the on-policy loss's teacher
    kl: float = 0.5  # weight of the dense method's teacher
    optimizer: Literal["adamw", "muon"] = "adamw"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    exclude: tuple[str, ...] = ()  # benchmarks, as specs, of which no query or document may be trained on
    accumulate: int = 1  # batches a step
    seed: int = 0
    log_every: int = 10
    check_every: int = 100  # steps between two checks of hit@1 on held-out queries
    save_every: int = 100
    held_out: int = 64  # documents of that check

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage(self, step: int) -> tuple[Stage, int]:
        """The stage of a step, and the step's number in it."""
        for stage in self.stages:
            if step < stage.steps:
                return stage, step
            step -= stage.steps
        raise IndexError(step)


class RecipeError(ValueError):
    """A recipe that cannot be trained; the message names the file and the key."""


def parse_recipe(told: Any, name: str) -> Recipe:
    """Check a recipe, given as what its YAML holds.

    Raises:
        RecipeError: keys that are unknown, missing or contradict each other; the message begins with ``name``.
    """
    try:
        recipe: Recipe = _build(Recipe, told, "recipe")
        _check(recipe)
    except ValueError as error:
        raise RecipeError(f"{name}: {' '.join(str(error).split())}") from None
    return recipe


def _build(kind: Any, told: Any, where: str) -> Any:
    """A value of an annotated type from what YAML holds."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if told is None:
            return None
        (kind,) = (one for one in arguments if one is not type(None))
        return _build(kind, told, where)
    if origin is Literal:
        if told not in arguments:
            raise ValueError(f"{where} is {told!r}; expected {' or '.join(map(str, arguments))}")
        return told
    if origin is tuple:
        if not isinstance(told, list) or (arguments[-1] is not Ellipsis and len(told) != len(arguments)):
            raise ValueError(f"{where} is {told!r:.60}; expected a list")
        kinds = [arguments[0]] * len(told) if arguments[-1] is Ellipsis else arguments
        return tuple(
            _build(one, value, f"{where}[{at}]") for at, (one, value) in enumerate(zip(kinds, told, strict=True))
        )
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(told, dict):
            raise ValueError(f"{where} is {told!r:.60}; expected keys and values")
        return dict(told)
    if is_dataclass(kind):
        return _build_class(kind, told, where)
    if kind is Ramp:
        try:
            return Ramp(told)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None
    if kind is float and isinstance(told, int) and not isinstance(told, bool):
        told = float(told)
    if kind is float and isinstance(told, str):  # YAML reads 1e-3 as text
        with contextlib.suppress(ValueError):
            told = float(told)
    if type(told) is not kind:
        raise ValueError(f"{where} is {told!r:.60}; expected {kind.__name__}")
    return told


def _build_class(kind: Any, told: Any, where: str) -> Any:
    if not isinstance(told, dict):
        raise ValueError(f"{where} is {told!r:.60}; expected keys and values")
    hints = typing.get_type_hints(kind)
    known = {one.name: one for one in fields(kind)}
    if wrong := [key for key in told if key not in known]:
        raise ValueError(f"{where}: {wrong[0]!r} is not known; expected one of {', '.join(known)}")
    required = [name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    if missing := [name for name in required if name not in told]:
        raise ValueError(f"{where}: {missing[0]} is missing")
    return kind(**{key: _build(hints[key], value, f"{where}.{key}") for key, value in told.items()})


def _check(recipe: Recipe) -> None:
    """Refuse what contradicts itself."""
    if (recipe.start is None) == (recipe.shape is None):
        raise ValueError("give either start, a model to go on from, or shape, a new one")
    if shape := recipe.shape:
        if min(shape.layers, shape.width, shape.heads, shape.mlp, shape.vocabulary) < 1:
            raise ValueError("shape: all numbers must be 1 or more")
        if shape.width % (2 * shape.heads):
            raise ValueError(f"shape: width {shape.width} must be an even multiple of heads, {shape.heads}")
    if recipe.lora:
        if recipe.shape:
            raise ValueError("lora adds to a model that is there; a new shape has nothing to add to")
        first, last = recipe.lora.layers
        if recipe.lora.rank < 1 or not 0 <= first <= last:
            raise ValueError(f"lora: expected a rank of 1 or more and layers [first, last], got {recipe.lora}")
    for name in ("accumulate", "log_every", "check_every", "save_every"):
        if getattr(recipe, name) < 1:
            raise ValueError(f"{name} must be 1 or more")
    if recipe.held_out < 2:
        raise ValueError("held_out must be 2 documents or more")
    if recipe.tau <= 0 or recipe.clip <= 0:
        raise ValueError("tau and clip must be above 0")
    if recipe.method == "dense":
        _check_dense(recipe)
    if recipe.sink is not None and not any(stage.sink.most() > 0 for stage in recipe.stages):
        raise ValueError("sink changes nothing unless a stage's sink, the strength of its gate, is above 0")
    if not recipe.stages:
        raise ValueError("stages is empty")
    for number, stage in enumerate(recipe.stages):
        _check_stage(recipe, stage, f"stages[{number}]")


def _check_dense(recipe: Recipe) -> None:
    """Refuse what a dense model has no use for."""
    own = {one.name: one.default for one in fields(Recipe)}
    for name in ("codes", "ssmax", "sink", "blind", "supervision", "routing_layer", "routing_b", "tau"):
        if getattr(recipe, name) != own[name]:
            raise ValueError(f"method dense has no {name}")
    for number, stage in enumerate(recipe.stages):
        for name in ("onpolicy", "attention", "probes", "sink"):
            if getattr(stage, name).most() > 0:
                raise ValueError(f"stages[{number}]: method dense has no {name}")
        if stage.alphabets:
            raise ValueError(f"stages[{number}]: method dense has no codes, and no alphabets of them")


def _check_stage(recipe: Recipe, stage: Stage, where: str) -> None:
    for name in ("steps", "queries"):
        if getattr(stage, name) < 1:
            raise ValueError(f"{where}.{name} must be 1 or more")
    if stage.jitter < 1 or stage.per_document <= 0 or not 0 <= stage.alphabets <= 1:
        raise ValueError(f"{where}: jitter must be 1 or more, per_document above 0, alphabets from 0 to 1")
    for name in ("lr", "onpolicy", "attention", "probes", "sink"):
        if getattr(stage, name).least() < 0:
            raise ValueError(f"{where}.{name} falls below 0")
    for name in ("attention", "probes"):
        if getattr(stage, name).most() > 0 and recipe.supervision is None:
            raise ValueError(f"{where}.{name} needs supervision: {{layer: ...}}")
    if stage.sink.most() > 0 and recipe.sink is None:
        raise ValueError(f"{where}.sink needs the initial value sink: of the recipe")
    if stage.alphabets and recipe.codes == "position":
        raise ValueError(f"{where}.alphabets draws random codes, but codes: position asks for others")
    least = stage.documents.least()
    if least < 2:
        raise ValueError(f"{where}.documents falls to {least:g}; a batch has 2 documents or more")
    if least / stage.jitter < 2 and recipe.ssmax is not None:
        raise ValueError(f"{where}.documents falls below 2, where SSMax (log N) has no N to go by")
    if not stage.data:
        raise ValueError(f"{where}.data is empty")
    for at, one in enumerate(stage.data):
        for name, least, told in (("weight", 1e-9, "a number above 0"), ("documents", 2, "2 or more")):
            value = one.get(name, least)
            if type(value) not in (int, float) or not least <= value < math.inf:
                raise ValueError(f"{where}.data[{at}].{name} is {value!r:.60}; expected {told}")
    for at, gate in enumerate(stage.gates):
        if type(gate.get("by")) is not int or not 1 <= gate["by"] <= stage.steps:
            raise ValueError(f"{where}.gates[{at}]: by must be a step of the stage, 1 to {stage.steps}")
        if wrong := [name for name in gate if name != "by" and name not in LOGGED[recipe.method]]:
            raise ValueError(f"{where}.gates[{at}]: {wrong[0]!r} is not logged; {', '.join(LOGGED[recipe.method])} are")
        if not all(type(value) in (int, float) for value in gate.values()) or len(gate) < 2:
            raise ValueError(f"{where}.gates[{at}]: expected by: STEP, and the least that a logged number must be")
