"""What was seen inside a model, summed up over queries: the records, tables and pictures of `icr-bench diagnose`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    from icr_bench.harness.suite import Suite
    from icr_bench.retrievers.lm.diagnose import Row

SHORTLISTS = (1, 4, 16, 64, 256, 1024)
"""Sizes of a shortlist at which routing's recall is told."""

BEST_HEADS = 3
"""Heads whose first documents are kept with ``--per-query``."""

SHARES = ("r_sum", "r_any", "digit", "digit_right")
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

_AS_NUMBERS = ("layers", "heads", "top_heads", "top_sum")
"""What a row is kept without: the record says it for all, or in other words."""

Interval = dict[str, float]
Rows = list[tuple[str, Callable[[Record], Cell | None]]]


def check(answering: Sequence[Answering], suite: Suite) -> tuple[list[Answering], list[str]]:
    """The retrievers that can be looked into, and a line for each that is left out.

    Raises:
        UsageError: none has attention over documents.
    """
    registry = Registry(suite.plugins)
    filled = {"device": suite.device, "dtype": suite.dtype, "seed": suite.seeds[0], "budget": suite.budget}
    kept, left = [], []
    for one in answering:
        if hasattr(registry.build("retriever", one.spec, filled), "diagnose"):
            kept.append(one)
        else:
            left.append(f"{one.spec.row}: has no attention over documents to look into")
    if not kept:
        raise UsageError(
            f"retriever {left[0]}; take blocksearch or one of its rows, or blocksearch:model=... for any language model"
        )
    return kept, [f"{line}, left out" for line in left]


def golds(task: Task) -> list[list[int]]:
    """The numbers of each query's relevant documents."""
    number = {identity: n for n, identity in enumerate(task.ids)}
    return [
        sorted(number[d] for d, grade in task.judgments[query.id].items() if grade >= task.relevant and d in number)
        for query in task.queries
    ]


def summary(rows: Sequence[Row], task: Task) -> dict[str, Any]:
    """What a record keeps of what was seen of its queries."""
    layers, heads = rows[0]["layers"], rows[0]["heads"]
    ranks = np.array([row["rank_sum"] for row in rows])  # (Q, layers); 0 where no document is seen
    each = np.array([row["rank_heads"] for row in rows])  # (Q, layers, heads)
    sees = ranks[0] > 0
    means = {
        "r_sum": ranks == 1,
        "r_any": (each == 1).any(2),
        "digit": np.array([row["digit"] for row in rows]),
        "digit_right": np.array([row["digit_right"] for row in rows]),
    }
    found: dict[str, Any] = {"layers": list(layers), "heads": list(heads)}
    for name, values in means.items():
        told = metrics.intervals({str(i): column for i, column in enumerate(values.astype(float).T)})
        shown = sees if name.startswith("r_") else np.ones_like(sees)
        found[name] = [own if there else None for own, there in zip(told.values(), shown, strict=True)]
    seen = {name: [_over_heads(row[name]) for row in rows] for name in MEDIANS if name != "share"}
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
    found["shortlist"] = {
        str(b): [float((own <= b).mean()) if there else None for own, there in zip(ranks.T, sees, strict=True)]
        for b in SHORTLISTS
        if b < len(task.documents)
    }
    found["readout"] = readouts(ranks, each)
    found["outcomes"] = {
        beam: metrics.intervals({kind: np.array([float(row[beam] == kind) for row in rows]) for kind in OUTCOMES})
        for beam in ("constrained", "free")
    }
    one = np.mean([len(own) / len(task.documents) for own in golds(task)])
    found["chance"] = {
        "r_sum": float(one),
        "r_any": float(np.mean([1 - (1 - len(g) / len(task.documents)) ** len(heads) for g in golds(task)])),
        "digit_right": float(np.mean([row["chance"] for row in rows])),
    }
    return found


def _over_heads(layers: Sequence[Any]) -> list[float]:
    """A value a layer: the median over heads where there is one a head, and infinite where there is none."""
    told = []
    for own in layers:
        values = own if isinstance(own, list) else [own]
        told.append(float(np.median([math.inf if value is None else value for value in values])))
    return told


def median(values: metrics.Floats) -> Interval:
    """The median, and a 95% interval from order statistics, which takes no assumption about the values."""
    ordered = np.sort(values)
    half = 0.98 * math.sqrt(len(ordered))
    low, high = math.floor(len(ordered) / 2 - half), math.ceil(len(ordered) / 2 + half)
    last = len(ordered) - 1
    return {
        "value": float(np.median(ordered)),
        "low": float(ordered[min(max(low, 0), last)]),
        "high": float(ordered[min(max(high - 1, 0), last)]),
    }


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
    """Rows as they are kept: of what heads rank first, the best heads' and the best layer's sum, as ids."""
    rest = [{key: value for key, value in row.items() if key not in _AS_NUMBERS} for row in rows]
    if "top_heads" not in rows[0]:
        return rest
    shares = np.array([own or [-1.0] * len(found["heads"]) for own in found["r_head"]])
    order = np.argsort(-shares, axis=None, kind="stable")[:BEST_HEADS]
    best = [tuple(map(int, np.unravel_index(at, shares.shape))) for at in order]
    layer = int(np.argmax([_value(own) for own in found["r_sum"]]))
    kept = []
    for row, others in zip(rows, rest, strict=True):
        tops = {
            f"layer {found['layers'][at]} head {found['heads'][head]}": row["top_heads"][at][head] for at, head in best
        }
        tops[f"layer {found['layers'][layer]} all heads"] = row["top_sum"][layer]
        kept.append(others | {"top": {name: [ids[number] for number in own] for name, own in tops.items()}})
    return kept


def tables(records: Iterable[Record], command: str) -> list[Table]:
    """Of every benchmark, retriever and seed: each layer, what attention writes, readouts, shortlists and failures."""
    return [table for own in grouped(records) for table in _tables(own, command)]


def grouped(records: Iterable[Record]) -> list[list[Record]]:
    """Finished cells of each benchmark, retriever and seed, in the order of N."""
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        if record["status"] == "ok":
            groups.setdefault((record["benchmark"], record["retriever"], record["seed"]), []).append(record)
    return [sorted(own, key=lambda one: int(one["n"])) for own in groups.values()]


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

    def table(self, name: str, heading: str, rows: Rows, *notes: str) -> Table:
        one = self.records[0]
        label = one["retriever"] + (f" (seed {one['seed']})" if one["seed"] else "")
        cells = [(row, [cell(record) for record in self.records]) for row, cell in rows]
        asked = f"queries: {one['queries']['declared']}; at the last token before the first digit"
        sizes = [record["n"] for record in self.records]
        told = [*notes, asked, f"made by: {self.command}"]
        return Table(one["benchmark"], f"{label}, {name}", sizes, cells, told, heading)

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
    shares = {
        "R_sum": ("r_sum", "a gold first, heads summed", ranking),
        "R_any": ("r_any", "a gold first in any head, which is likelier in one of many", ranking),
        "first digit": ("digit_right", "their likeliest digit a gold's first, through the final norm and the head", ""),
    }
    by_layer = [
        group.table(
            title,
            "layer",
            [(str(layer), _get(name, at)) for at, layer in enumerate(first["layers"])],
            f"share of queries with {what}; chance at each N: {group.chances(name)}",
            *filter(None, [note]),
            mean,
        )
        for title, (name, what, note) in shares.items()
    ]
    return [
        *by_layer,
        group.table(
            f"what layer {written} writes",
            "of the attention's output",
            [(text, _get(name, first["layers"].index(written))) for name, text in WRITTEN.items()],
            f"layer {written} is the one in which golds have the largest share at the smallest N; medians over queries "
            "(attention and scores: of medians over heads)",
            "[low, high]: 95% interval of the median, from order statistics",
        ),
        group.table(
            "decoding and reading attention",
            "read by",
            [
                ("decoding", lambda record: _share(record["metrics"]["hit@1"])),
                ("all heads of the best layer", lambda record: _share(record["diagnosis"]["readout"]["sum"])),
                ("the best head", lambda record: _share(record["diagnosis"]["readout"]["head"])),
            ],
            "share of queries with a gold first; layer and head are chosen on the other half of the queries",
            ranking,
            mean,
        ),
        group.table(
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
        ),
        group.table(
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
        return Cell(f"{layers[at]:.3f}", {"value": layers[at]}) if layers else None

    return cell


def _outcome(beam: str, kind: str) -> Callable[[Record], Cell | None]:
    return lambda record: _share(record["diagnosis"]["outcomes"][beam][kind])
