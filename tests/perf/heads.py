"""Which heads of a language model rank documents, untrained: ``python tests/perf/heads.py --model M [--data FOLDER]``.

Without a folder (BEIR layout) on the generated text that `attention` is calibrated on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tabulate import tabulate

from icr_bench.benchmarks.beir import beir
from icr_bench.retrievers.attention import generated, score_heads
from icr_bench.retrievers.lm.backbone import load_backbone
from icr_bench.retrievers.lm.engine import finite
from icr_bench.retrievers.lm.prompt import PromptSettings


def hits(scores: torch.Tensor, golds: list[set[int]]) -> float:
    """Share of queries (Q, N) whose best document is a gold and has no equal."""
    best = finite(scores).topk(min(2, scores.shape[1])).values
    firsts = zip(scores.argmax(1).tolist(), best.tolist(), golds, strict=True)
    return sum(top in gold and values[0] > values[-1] for top, values, gold in firsts) / len(golds)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True, help="hub id, folder or .gguf file")
    options.add_argument("--data", type=Path, help="BEIR folder, in place of the generated text")
    options.add_argument("--split", default="test")
    options.add_argument("-n", type=int, help="documents; all by default")
    options.add_argument("--queries", type=int, default=100)
    given = options.parse_args()
    texts, questions, golds = generated()
    if given.data:
        whole = beir(path=given.data, split=given.split)
        task = whole.choose(seed=0, relevant=1, queries=given.queries).at(given.n or len(whole.documents))
        texts, questions = [document.text for document in task.documents], [query.text for query in task.queries]
        number = {identity: place for place, identity in enumerate(task.ids)}
        golds = [{number[d] for d, grade in task.judgments[q.id].items() if grade >= 1} for q in task.queries]
    backbone, tokenizer, _ = load_backbone(given.model)
    scores = score_heads(backbone, tokenizer, PromptSettings(), texts, questions)
    rows = [
        [layer, hits(own.sum(0), golds), *(hits(head, golds) for head in own)]
        for layer, own in enumerate(scores.unbind(0))
    ]
    print(f"hit@1 of {len(questions)} queries over {len(texts)} documents, by layer: all heads summed, and each alone")
    print(tabulate(rows, ["layer", "all", *range(backbone.heads)], tablefmt="github", floatfmt=".2f"))


if __name__ == "__main__":
    main()
