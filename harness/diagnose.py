"""What was seen inside a model, summed up over queries: the records, tables and pictures of `icr-bench diagnose`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from icr_bench.benchmarks.base import Task
from icr_bench.harness import metrics
from icr_bench.harness.errors import UsageError
from icr_bench.harness.export import safe_name
from icr_bench.harness.folder import Record
from icr_bench.harness.plot import plot_heads, plot_layers
from icr_bench.harness.registry import Registry
from icr_bench.harness.tables import Cell, Table

if TYPE_CHECKING:
    from icr_bench.harness.prepare import Answering
    from icr_bench.harness.run import Grid
    from icr_bench.harness.suite import Suite
    from icr_bench.retrievers.lm.diagnose import Row

SHORTLISTS = (1, 4, 16, 64, 256, 1024)
"""Sizes of a shortlist at which routing's recall is told."""

BEST_HEADS = 3
"""Heads whose first documents are kept with ``--per-query``."""

SHARES = ("r_sum", "r_any", "digit", "digit_best", "digit_right")
"""Means over queries, a layer each, with bootstrap intervals."""

MEDIANS = ("norm", "norm_gold", "norm_rest", "share", "mass", "score", "gap")
"""Medians over queries (of medians over heads, where there is one a head), a layer each."""

OUTCOMES = {
    "right": "a document that was asked for",
    "first": "wrong from the first digit on",
    "later": "wrong from a later digit on",
    "none": "code of no document",
}

WRITTEN = {
    "norm_gold": "length written from golds",
    "norm_rest": "length written from all else",
    "norm": "length of both together",
    "share": "golds' share of the length",
    "mass": "golds' share of attention",
    "score": "golds' best score",
    "gap": "log-sum-exp, all else less golds",
}

_COMMON = ("layers", "heads", "chance")
"""What the record says for all rows."""

Interval = dict[str, float]
Rows = list[tuple[str, Callable[[Record], Cell | None]]]


def check(
    answering: Sequence[Answering], grid: Grid, suite: Suite, look: Mapping[str, Any]
) -> tuple[list[Answering], list[str]]:
    """The retrievers that can be looked into, and a line for each that is left out.

    Raises:
        UsageError: none can, a layer or head is not there, a corpus is too large, or a query has no gold left.
    """
    from icr_bench.retrievers.lm.diagnose import Look

    registry = Registry(suite.plugins)
    filled = {"device": suite.device, "dtype": suite.dtype, "seed": suite.seeds[0], "budget": suite.budget}
    kept, left = [], []
    for one in answering:
        ours = registry.is_own(one.spec)  # the constructor of another's runs in its cells alone, which check the look
        make = registry.get("retriever", one.spec.name)
        retriever: Any = registry.build("retriever", one.spec, filled) if ours else make
        if not hasattr(retriever, "diagnose") and (ours or isinstance(make, type)):
            left.append(one.spec.row)
            continue
        kept.append(one)
        if not ours:
            continue
        try:
            retriever.check_look(Look(**look), max(n for *_, n in grid))
        except (ValueError, MemoryError) as error:
            raise UsageError(f"retriever {one.spec.row}: {error}") from None
    if not kept:
        raise UsageError(
            f"retriever {', '.join(left)}: only blocksearch and its rows can be looked into; blocksearch:model=... "
            "takes any language model"
        )
    for asked, _, benchmark, n in grid:
        task = benchmark.at(n)
        own = golds(task, exclude=asked.common["exclude_self"])
        if bare := [query.id for query, one in zip(task.queries, own, strict=True) if not one]:
            raise UsageError(
                f"benchmark {asked.spec.row}: the only gold of query {bare[0]!r} may not be returned for it"
            )
    return kept, [f"{row}: only blocksearch and its rows can be looked into; left out" for row in left]


def golds(task: Task, *, exclude: bool) -> list[list[int]]:
    """The numbers of each query's relevant documents, without the one of the query's own id if it is excluded."""
    number = {identity: n for n, identity in enumerate(task.ids)}
    return [
        sorted(
            number[d]
            for d, grade in task.judgments[query.id].items()
            if grade >= task.relevant and d in number and not (exclude and d == query.id)
        )
        for query in task.queries
    ]


def hidden(task: Task) -> list[int | None]:
    """The number of the document that has each query's id, if there is one."""
    number = {identity: n for n, identity in enumerate(task.ids)}
    return [number.get(query.id) for query in task.queries]


def summary(rows: Sequence[Row], golds: Sequence[Sequence[int]], n: int) -> dict[str, Any]:
    """What a record keeps of what was seen of its queries, in a corpus of n documents."""
    layers, heads = rows[0]["layers"], rows[0]["heads"]
    ranks = np.array([row["rank_sum"] for row in rows])  # (Q, layers); 0 where no document is seen
    each = np.array([row["rank_heads"] for row in rows])  # (Q, layers, heads)
    sees = ranks[0] > 0
    means = {
        "r_sum": ranks == 1,
        "r_any": (each == 1).any(2),
        "digit": np.array([row["digit"] for row in rows]),
        "digit_best": np.array([row["digit_best"] for row in rows]),
        "digit_right": np.array([row["digit_right"] for row in rows]),
    }
    found: dict[str, Any] = {"layers": list(layers), "heads": list(heads)}
    for name, values in means.items():
        told = metrics.intervals({str(i): column for i, column in enumerate(values.astype(float).T)})
        shown = sees if name.startswith("r_") else np.ones_like(sees)
        found[name] = [own if there else None for own, there in zip(told.values(), shown, strict=True)]
    # Where no gold is seen, its score is below any other and all else is ahead of it without bound.
    unseen = {"score": -math.inf, "gap": math.inf}
    seen = {
        name: [_over_heads(row[name], unseen.get(name, 0.0)) for row in rows] for name in MEDIANS if name != "share"
    }
    seen["share"] = [
        [gold / whole if whole else 0.0 for gold, whole in zip(row["norm_gold"], row["norm"], strict=True)]
        for row in rows
    ]
    for name in MEDIANS:
        columns = np.array(seen[name], float).T
        found[name] = [median(own) if there else None for own, there in zip(columns, sees, strict=True)]
    found["r_head"] = [
        [float(x) for x in layer] if there else None for layer, there in zip((each == 1).mean(0), sees, strict=True)
    ]
    found["shortlist"] = {}
    for b in (size for size in SHORTLISTS if size < n):
        told = metrics.intervals({str(i): column for i, column in enumerate((ranks <= b).astype(float).T)})
        found["shortlist"][str(b)] = [own if there else None for own, there in zip(told.values(), sees, strict=True)]
    found["readout"] = readouts(ranks, each)
    found["outcomes"] = {
        beam: metrics.intervals({kind: np.array([float(row[beam] == kind) for row in rows]) for kind in OUTCOMES})
        for beam in ("constrained", "free")
    }
    shares = np.array([len(own) / n for own in golds])
    found["chance"] = {
        "r_sum": float(shares.mean()),
        "r_any": float((1 - (1 - shares) ** len(heads)).mean()),
        "digit_right": float(np.mean([row["chance"] for row in rows])),
    }
    return found


def _over_heads(layers: Sequence[Any], unseen: float) -> list[float]:
    """A value a layer: the median over heads where there is one a head, of which None counts as ``unseen``."""
    told = []
    for own in layers:
        values = own if isinstance(own, list) else [own]
        told.append(float(np.median([unseen if value is None else value for value in values])))
    return told


def median(values: metrics.Floats) -> Interval:
    """The median, and a 95% interval from order statistics, which takes no assumption about the values; without bounds
    where there are fewer than six."""
    ordered, below = np.sort(values), _below(len(values))
    low, high = (ordered[below - 1], ordered[-below]) if below else (-math.inf, math.inf)
    return {"value": float(np.median(ordered)), "low": float(low), "high": float(high)}


@cache
def _below(count: int) -> int:
    """The largest rank that a median of so many values lies below with a probability of 2.5% or less."""
    rank, total = 0, Fraction(1, 2**count)
    while total <= Fraction(25, 1000):
        rank += 1
        total += Fraction(math.comb(count, rank), 2**count)
    return rank


def readouts(ranks: Any, each: Any) -> dict[str, Interval]:
    """The share of queries whose gold the best layer's heads rank first, together (``sum``) or the best one (``head``).

    Which layer or head that is, is chosen on every other query and measured on the rest, and the other way round, so
    that no query has a say in what it is measured with.
    """
    told = {}
    for name, hits in (("sum", ranks == 1), ("head", (each == 1).reshape(len(each), -1))):
        own = np.zeros(len(hits))
        for part in (0, 1):
            best = int(hits[1 - part :: 2].mean(0).argmax()) if len(hits) > 1 else 0
            own[part::2] = hits[part::2, best]
        told[name] = own
    return metrics.intervals(told)


def trimmed(rows: Sequence[Row], found: Mapping[str, Any], ids: Sequence[str]) -> list[Row]:
    """Rows as they are kept: without what the record says for all, and of heads the best one's rank; with ``per_query``
    every head's numbers, and what the best heads and the best layer rank first, as ids."""
    if "top_heads" not in rows[0]:
        return [
            {key: value for key, value in row.items() if key not in (*_COMMON, "rank_heads", "mass", "score", "gap")}
            | {"rank_any": [min(layer) for layer in row["rank_heads"]]}
            for row in rows
        ]
    shares = np.array([own or [-1.0] * len(found["heads"]) for own in found["r_head"]])
    order = np.argsort(-shares, axis=None, kind="stable")[:BEST_HEADS]
    best = [tuple(map(int, np.unravel_index(at, shares.shape))) for at in order]
    layer = int(np.argmax([_value(own) for own in found["r_sum"]]))
    kept = []
    for row in rows:
        tops = {
            f"layer {found['layers'][at]} head {found['heads'][head]}": row["top_heads"][at][head] for at, head in best
        }
        tops[f"layer {found['layers'][layer]} all heads"] = row["top_sum"][layer]
        rest = {key: value for key, value in row.items() if key not in (*_COMMON, "top_heads", "top_sum")}
        kept.append(rest | {"top": {name: [ids[number] for number in own] for name, own in tops.items()}})
    return kept


def tables(records: Iterable[Record], command: str) -> list[Table]:
    """Of every benchmark, retriever and seed: each layer, what attention writes, readouts, shortlists and failures."""
    return [table for own in grouped(records) for table in _tables(own, command)]


def grouped(records: Iterable[Record]) -> list[list[Record]]:
    """Finished cells of each benchmark, retriever, seed and way to look, in the order of N."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record["status"] == "ok":
            key = (record["benchmark"], record["retriever"], record["seed"], _way(record["config"]["look"]))
            groups.setdefault(key, []).append(record | {"diagnosis": _numbers(record["diagnosis"])})
    return [sorted(own, key=lambda one: int(one["n"])) for own in groups.values()]


def same_look(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two diagnoses measured the same things."""
    return _way(one) == _way(other)


def _way(look: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in look.items() if key != "per_query"}, sort_keys=True)


def _numbers(value: Any) -> Any:
    """The same with infinities, which records hold as text, as numbers."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if value in ("inf", "-inf") else value


def draw(records: Iterable[Record], folder: Path) -> list[Path]:
    """Draw what was seen, two pictures a benchmark, retriever and seed.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    made = []
    for own in grouped(records):
        record = own[0]
        name = ".".join(safe_name(part) for part in (record["benchmark"], record["retriever"], f"seed{record['seed']}"))
        for what, plot in (("layers", plot_layers), ("heads", plot_heads)):
            plot(own, folder / f"{name}-{what}.png")
            made.append(folder / f"{name}-{what}.png")
    return made


@dataclass(frozen=True)
class _Group:
    """Finished cells of one retriever on one benchmark, in the order of N."""

    records: Sequence[Record]
    command: str

    def table(self, slug: str, name: str, heading: str, rows: Rows, *notes: str) -> Table:
        one = self.records[0]
        label = one["retriever"] + (f" (seed {one['seed']})" if one["seed"] else "")
        cells = [(row, [cell(record) for record in self.records]) for row, cell in rows]
        asked = f"queries: {one['queries']['declared']}; at the last token before the first digit"
        sizes = [record["n"] for record in self.records]
        told = [*notes, asked, f"made by: {self.command}"]
        file = f"{one['retriever']}-seed{one['seed']}-{slug}"
        shown = [(row, own) for row, own in cells if any(own)]
        return Table(one["benchmark"], f"{label}, {name}", sizes, shown, told, heading, file)

    def chances(self, name: str) -> str:
        return ", ".join(f"{record['diagnosis']['chance'][name]:.2g}" for record in self.records)


def _tables(records: Sequence[Record], command: str) -> list[Table]:
    """Of one retriever on one benchmark."""
    group = _Group(records, command)
    first, last, look = records[0]["diagnosis"], records[-1]["diagnosis"], records[0]["config"]["look"]
    behind = "behind" if look["ties"] == "miss" else "before"
    token = "any token of its own text" if look["tokens"] == "text" else "any token of its block"
    ranking = (
        f"a document's score in a head is the best product of the query with {token}; a gold that shares its score "
        f"ranks {behind} the others"
    )
    mean = f"[low, high]: {metrics.INTERVAL}"
    written = most_written(first)
    best = max(range(len(last["layers"])), key=lambda at: _value(last["r_sum"][at]))
    routing = (records[0]["config"]["retriever"].get("settings") or {}).get("routing")
    routed = (
        f"layers above {routing['layer']} rank the shortlist only, so that chance is higher there" if routing else ""
    )
    some = f"only heads {', '.join(map(str, first['heads']))}; lengths are of all heads" if look["heads"] else ""
    always = [note for note in (routed, some) if note]
    shares = {
        "r_sum": ("R_sum", "share of queries with a gold first, heads summed", "r_sum", [ranking]),
        "r_any": (
            "R_any",
            "share of queries with a gold first in any head, which is likelier in one of many",
            "r_any",
            [ranking, "chance is that of independent heads"],
        ),
        "digit_right": (
            "first digit",
            "share of queries whose likeliest digit is a gold's first, through the final norm and the head",
            "digit_right",
            [],
        ),
        "digit": (
            "the first digit's probability",
            "probability of the golds' first digits, through the final norm and the head, mean over queries",
            "digit_right",
            [],
        ),
    }
    by_layer = [
        group.table(
            name,
            title,
            "layer",
            [(str(layer), _get(name, at)) for at, layer in enumerate(first["layers"])],
            f"{what}; chance at each N: {group.chances(chance)}",
            *notes,
            *always,
            mean,
        )
        for name, (title, what, chance, notes) in shares.items()
    ]
    return [
        *by_layer,
        group.table(
            "written",
            f"what layer {written} writes",
            "of the attention's output",
            [(text, _get(name, first["layers"].index(written))) for name, text in WRITTEN.items()],
            f"layer {written} is the one in which golds have the largest share at the smallest N; medians over queries "
            "(attention and scores: of medians over heads)",
            *always,
            "[low, high]: 95% interval of the median, from order statistics",
        ),
        group.table(
            "readout",
            "decoding and reading attention",
            "read by",
            [
                ("decoding", lambda record: _share(record["metrics"]["hit@1"])),
                ("all heads of the best layer", lambda record: _share(record["diagnosis"]["readout"]["sum"])),
                ("the best head", lambda record: _share(record["diagnosis"]["readout"]["head"])),
            ],
            "share of queries with a gold first; layer and head are chosen on the other half of the queries",
            ranking,
            *always,
            mean,
        ),
        group.table(
            "shortlists",
            "shortlists",
            "layer, B",
            [
                (f"layer {layer}, {b}", _shortlist(b, at))
                for at, layer in enumerate(last["layers"])
                for b in (SHORTLISTS if at == best else (256,))
                if last["r_sum"][at]
            ],
            "share of queries with a gold among the first B by all heads of a layer (routing's recall); every B for "
            f"layer {last['layers'][best]}, the best at the largest N; an empty cell: B is not below N",
            ranking,
            *always,
            mean,
        ),
        group.table(
            "codes",
            "what came of the best code",
            "beam",
            [
                (f"{beam}: {text}", _outcome(beam, kind))
                for beam in ("constrained", "free")
                for kind, text in OUTCOMES.items()
                if kind != "none" or beam == "free"
            ],
            "shares of all queries; constrained: only codes of the corpus; free: any code",
            mean,
        ),
    ]


def most_written(found: Mapping[str, Any]) -> int:
    """The layer in which golds have the largest share of what attention writes."""
    layer: int = found["layers"][int(np.argmax([_value(own) for own in found["share"]]))]
    return layer


def _value(own: Interval | None) -> float:
    """For a comparison of layers, one of which may see no document."""
    return own["value"] if own else -1.0


def _get(name: str, at: int) -> Callable[[Record], Cell | None]:
    def cell(record: Record) -> Cell | None:
        told = record["diagnosis"][name][at]
        if told is None or name in SHARES:
            return told and _share(told)
        value, low, high = (f"{float(told[kind]):.3g}" for kind in ("value", "low", "high"))
        return Cell(f"{value} [{low}, {high}]", told)

    return cell


def _share(told: Interval) -> Cell:
    return Cell(f"{told['value']:.3f} [{told['low']:.3f}, {told['high']:.3f}]", told)


def _shortlist(b: int, at: int) -> Callable[[Record], Cell | None]:
    def cell(record: Record) -> Cell | None:
        layers = record["diagnosis"]["shortlist"].get(str(b))
        return _share(layers[at]) if layers else None

    return cell


def _outcome(beam: str, kind: str) -> Callable[[Record], Cell | None]:
    return lambda record: _share(record["diagnosis"]["outcomes"][beam][kind])
