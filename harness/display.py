"""What a run shows: a progress display on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from icr_bench.harness.folder import Record


def reason(record: Record) -> str:
    """The first line of a failed cell's error; its log holds the rest."""
    return (record["error"] or "").partition("\n")[0][:300]


def title(record: Record) -> str:
    """A cell's name."""
    return f"{record['benchmark']} n={record['n']:,} {record['retriever']} seed {record['seed']}"


class Lines:
    """One plain line a cell, on standard error."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._title = ""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, emoji=False)

    def cell_started(self, record: Record, number: int, total: int) -> None:
        self._title = f"[{number}/{total}] {title(record)}"

    def cell_progress(self, stage: str, done: int, total: int) -> None:
        pass

    def cell_ended(self, record: Record) -> None:
        if record["status"] == "ok":
            time, first = record["time"], next(iter(record["metrics"]))
            index = "reused" if time["index_s"] is None else f"{time['index_s']:.2g} s"
            what = f"{first} {record['metrics'][first]['value']:.3f}, index {index}"
        else:
            what = f"{record['status']}: {reason(record)}"
        self.say(f"{self._title}: {what}")


class Bars(Lines):
    """The cell being computed as a bar, finished cells as lines above it."""

    def __enter__(self) -> Bars:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task("reading data", total=None, stage="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def cell_started(self, record: Record, number: int, total: int) -> None:
        super().cell_started(record, number, total)
        self._progress.reset(self._task, description=self._title, total=None, stage="start")

    def cell_progress(self, stage: str, done: int, total: int) -> None:
        known = total if total > 1 else None
        text = f"{stage} {done:,}/{total:,}" if known else stage
        self._progress.update(self._task, completed=done, total=known, stage=text)


def display() -> Lines:
    """Bars if standard error is a terminal, else lines."""
    return Bars() if Console(stderr=True).is_terminal else Lines()
