"""Scaling curves, losses and what was seen inside a model, as pictures for a paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from icr_bench.benchmarks.base import DataError
from icr_bench.harness import metrics
from icr_bench.harness.errors import UsageError
from icr_bench.harness.folder import Record, expect
from icr_bench.harness.tables import Table
from icr_bench.retrievers.base import MissingExtra

ENDINGS = (".png", ".svg", ".pdf")

LOG = "log.jsonl"
"""What `icr-bench train` writes into its folder."""

LAYER_PANELS = (
    ("gold first, heads summed (R_sum)", "r_sum"),
    ("gold first in any head (R_any)", "r_any"),
    ("first digit right", "digit_right"),
    ("golds' share of attention (median)", "mass"),
    ("golds' share of the output (median)", "share"),
)

PANELS = (
    ("cross-entropy, digit 1", ("digit1",)),
    ("cross-entropy, digits 2 to 4", ("digit2", "digit3", "digit4")),
    ("InfoNCE of a dense model", ("infonce",)),
    ("hit@1 on held-out queries", ("held_out_hit@1",)),
)


def plot(tables: Sequence[Table], file: Path) -> None:
    """Draw one panel a benchmark: a metric against N, one curve a retriever, its interval as a band.

    Args:
        tables: tables of one metric.
        file: where to write; its ending chooses PNG, SVG or PDF.

    Raises:
        UsageError: the ending is another.
        MissingExtra: matplotlib is not installed.
    """
    _check(file)
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    columns = min(len(tables), 3)
    rows = -(-len(tables) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    panels = list(grid.flat)
    for spare in panels[len(tables) :]:
        spare.set_axis_off()
    labels = list(dict.fromkeys(label for table in tables for label, _ in table.rows))
    for panel, table in zip(panels, tables, strict=False):
        for label, cells in table.rows:
            points = [
                (n, *(cell.numbers[kind] for kind in ("value", "low", "high")))
                for n, cell in zip(table.sizes, cells, strict=True)
                if cell and cell.numbers
            ]
            if points:
                sizes, values, lows, highs = (list(column) for column in zip(*points, strict=True))
                colour = f"C{labels.index(label) % 10}"
                panel.plot(sizes, values, marker="o", markersize=4, color=colour, label=label)
                panel.fill_between(sizes, lows, highs, color=colour, alpha=0.2, linewidth=0)
        panel.set_xscale("log")
        panel.set_xticks(table.sizes)
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.tick_params(axis="x", labelrotation=45)
        panel.set_ylim(-0.02, 1.02)
        panel.set_title(table.benchmark)
        panel.set_xlabel("documents N")
        panel.grid(alpha=0.3)
    for row in grid:
        row[0].set_ylabel(tables[0].name)
    drawn = [pair for panel in panels for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
    by_name = {name: handle for handle, name in drawn}
    names, handles = list(by_name), list(by_name.values())
    legend = "band: 95% bootstrap interval over queries"
    figure.legend(handles, names, title=legend, loc="outside lower center", ncols=min(len(names), 2 * columns, 5) or 1)
    _save(figure, file, metrics.definition(tables[0].name))


def plot_training(folders: Sequence[Path], file: Path) -> None:
    """Draw what trainings logged, one curve a folder: cross-entropy of the first and of the later digits, or a dense
    model's loss, and hit@1 on held-out queries, against the step.

    Args:
        folders: of `icr-bench train`.
        file: where to write; its ending chooses PNG, SVG or PDF.

    Raises:
        UsageError: the ending is another, or nothing was logged.
        DataError: a log is damaged.
        MissingExtra: matplotlib is not installed.
    """
    _check(file)
    from matplotlib.figure import Figure

    logs = {folder.name: _logged(folder / LOG) for folder in folders}
    known = {key for lines in logs.values() for line in lines for key in line}
    panels = [(title, keys) for title, keys in PANELS if known & set(keys)]
    if not panels:
        raise UsageError(f"{', '.join(map(str, folders))}: nothing was logged yet")
    figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained")
    for panel, (title, keys) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, (name, lines) in enumerate(logs.items()):
            points = [(one["step"], sum(one[k] for k in keys) / len(keys)) for one in lines if set(keys) <= one.keys()]
            panel.plot(*zip(*points, strict=True), color=f"C{number % 10}", label=name)
        panel.set_title(title)
        panel.set_xlabel("step")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 2 * len(panels)))
    _save(figure, file, "training")


def _logged(file: Path) -> list[Record]:
    """The lines of a training's log.

    Raises:
        DataError: a line is none.
    """
    drawn = {key for _, keys in PANELS for key in keys}
    found = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 ({error.reason} at byte {error.start})") from None
    for number, line in enumerate(lines, 1):
        try:
            told = json.loads(line)
            expect(told, {"step": int})
            expect(told, dict.fromkeys(drawn & told.keys(), int | float))
        except ValueError as error:
            raise DataError(f"{file}:{number}: not a line of a training's log ({error})") from None
        found.append(told)
    return found


def plot_layers(records: Sequence[Record], file: Path) -> None:
    """Draw what a diagnosis saw of one retriever, layer by layer, one curve for each N with its interval as a band: the
    golds' rank by MaxSim, the first digit, and the golds' share of attention and of what it writes (the paper's figures
    2 and 3).

    Args:
        records: finished cells of one retriever on one benchmark, in the order of N.
        file: where to write; its ending chooses PNG, SVG or PDF.

    Raises:
        UsageError: the ending is another.
        MissingExtra: matplotlib is not installed.
    """
    _check(file)
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    colours = matplotlib.colormaps["viridis"]
    *panels, spare = figure.subplots(2, 3, sharey=True).flat
    for panel, (title, name) in zip(panels, LAYER_PANELS, strict=True):
        for number, record in enumerate(records):
            seen = record["diagnosis"]
            points = [(layer, own) for layer, own in zip(seen["layers"], seen[name], strict=True) if own]
            layers = [layer for layer, _ in points]
            value, low, high = ([own[kind] for _, own in points] for kind in ("value", "low", "high"))
            colour = colours(0.9 * number / max(len(records) - 1, 1))
            panel.plot(layers, value, marker="o", markersize=3, color=colour, label=f"N={record['n']:,}")
            panel.fill_between(layers, low, high, color=colour, alpha=0.2, linewidth=0)
        panel.set_title(title)
        panel.set_xlabel("layer")
        panel.set_xlim(seen["layers"][0] - 0.5, seen["layers"][-1] + 0.5)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_ylim(-0.02, 1.02)
        panel.grid(alpha=0.3)
    spare.set_axis_off()
    spare.legend(*panel.get_legend_handles_labels(), title="bands: 95% intervals", loc="center")
    figure.suptitle(_whose(records))
    _save(figure, file, "diagnosis")


def plot_heads(records: Sequence[Record], file: Path) -> None:
    """Draw the share of queries whose gold a head ranks first, layers against heads, one map for each N.

    Args, raises: as `plot_layers`.
    """
    _check(file)
    from matplotlib.figure import Figure

    seen = records[0]["diagnosis"]
    layers, heads = len(seen["layers"]), len(seen["heads"])
    size = (max(1.8, 0.22 * heads + 1.2) * len(records) + 0.8, max(2.6, 0.16 * layers + 1.6))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(records), squeeze=False, sharey=True)[0]
    for panel, record in zip(panels, records, strict=True):
        rows = [own or [float("nan")] * heads for own in record["diagnosis"]["r_head"]]
        image = panel.imshow(rows, vmin=0, vmax=1, aspect="auto", origin="lower", interpolation="nearest")
        panel.set_title(f"N={record['n']:,}")
        panel.set_xlabel("head")
        panel.set_xticks(_few(heads), [str(seen["heads"][at]) for at in _few(heads)])
        panel.set_yticks(_few(layers), [str(seen["layers"][at]) for at in _few(layers)])
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=list(panels), label="share of queries with a gold first")
    figure.suptitle(_whose(records))
    _save(figure, file, "diagnosis")


def _few(count: int) -> list[int]:
    """Places of at most ten labels."""
    return list(range(0, count, -(-count // 10)))


def _whose(records: Sequence[Record]) -> str:
    return f"{records[0]['retriever']} on {records[0]['benchmark']}, {records[0]['queries']['declared']} queries"


def _check(file: Path) -> None:
    if file.suffix.lower() not in ENDINGS:
        raise UsageError(f"{file}: expected a file name that ends in {', '.join(ENDINGS)}")
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "report")


def _save(figure: Any, file: Path, title: str) -> None:
    try:
        figure.savefig(file, dpi=150, metadata={"Title": title})
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
