"""Peak memory of mining hard negatives by BM25 from a stream of passages: ``python tests/perf/mine.py COUNT STATE``.

Passages of 61 words are made as they are read, and MS MARCO has 8,841,823. STATE is the file from which a mining that
was interrupted goes on.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from icr_bench.harness.cell import peak_rss
from icr_bench.harness.mine import Bm25Scorer, Row, chunks, mine
from icr_bench.retrievers.bm25 import BM25

QUERIES, NEGATIVES = 400, 60


def main(count: int, state: Path) -> None:
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(3, 9))) for _ in range(20_000)]
    texts = [" ".join(rng.choices(words, k=60)) for _ in range(1_000)]
    queries = [" ".join(rng.choices(words, k=6)) for _ in range(QUERIES)]

    def rows() -> Iterator[Row]:
        for number in range(count):
            yield Row(f"d{number}", f"{texts[number * 7919 % 1000]} {number}")

    scorer = Bm25Scorer(queries, BM25().analyse, 0.9, 0.4)
    for part in chunks(rows()):
        scorer.count([row.text for row in part])
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("mining", total=count)
        found = mine(rows(), scorer, QUERIES, NEGATIVES, state, lambda read: bar.advance(task, read))
    assert [len(own) for own in found] == [NEGATIVES] * QUERIES
    print(peak_rss())


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
