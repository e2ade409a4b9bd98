"""Zero-shot retrieval by attention: which documents a language model's own heads look at, without any training."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icr_bench.benchmarks import limit
from icr_bench.retrievers.base import Document, Estimate, Ranking, Retriever
from icr_bench.retrievers.lm.attend import cache_folder, kernel_name
from icr_bench.retrievers.lm.backbone import Backbone, load_backbone, made_of
from icr_bench.retrievers.lm.cache import CorpusCache, Progress, prefill
from icr_bench.retrievers.lm.calibrate import estimate
from icr_bench.retrievers.lm.corpus import CACHE_GB, Corpus, ask_in_groups, spans
from icr_bench.retrievers.lm.engine import (
    Config,
    Engine,
    Readout,
    check_heads,
    check_layer,
    finite,
    head_scores,
    scoring_rows,
)
from icr_bench.retrievers.lm.prompt import (
    DIGITS,
    Block,
    Prompt,
    PromptSettings,
    Tokenizer,
    digits_for,
    draw_codes,
    with_given,
)
from icr_bench.retrievers.top import top_k
from icr_bench.retrievers.weights import CacheFolder, Model, identify

SHIPPED = {("llama", 30, 576, 9, 3, 49_152, 100_000.0): ("SmolLM2-135M-Instruct", 8, (0,))}
"""Shape of a model -> what `calibrate` chose for it: whose weights, layer, heads.

The shape is type, layers, width, query heads, key/value heads, vocabulary and the base of the rotary embedding: it is
the same in all formats of the weights, and in their fine-tunings, which mostly keep what their heads do.
"""

PEOPLE, LIKES, QUESTIONS = 64, 45, 128
"""Biographies, attributes of each and questions of a calibration."""


class Attention(Retriever):
    """MaxSim between a query's queries and a document's keys in some heads of one layer, summed over both.

    The query is put as BlockSearch puts it, after the whole corpus, and its own tokens score the documents; wrapper
    tokens do not count on either side. Layers above the chosen one are neither computed nor kept.

    Args:
        model: hub id (``org/name`` or ``org/name@revision``), a local folder or a ``.gguf`` file; a model of the Llama,
            Mistral or Qwen family.
        layer: the layer whose heads score; by default the best one on generated text (LIMIT's form, from the training
            words), found once for a model and kept in the user's cache.
        heads: the heads that score; all of a given layer.
        cap: tokens of a document with its wrapper, at most.
        offset: position of a query's first token.
        cache: folder to keep keys and values in between runs.
        cache_gb: size that they may have there, in 10^9 bytes.
    """

    tokenizer = "model"

    def __init__(
        self,
        *,
        model: Model,
        layer: int | None = None,
        heads: tuple[int, ...] | None = None,
        cap: int | None = None,
        offset: int | None = None,
        cache: CacheFolder | None = None,
        cache_gb: float = CACHE_GB,
        device: str = "cpu",
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        if not model:
            raise ValueError("model is empty; give a hub id, a local folder or a .gguf file")
        if heads is not None and layer is None:
            raise ValueError("heads are those of a layer; give layer= too")
        self._settings = with_given(PromptSettings(), cap=cap, offset=offset)
        self._model, self._device, self._dtype = model, device, dtype
        self._layer, self._heads = layer, heads
        self._corpus = Corpus(lambda: made_of(model), "random", seed, cache, cache_gb)
        self._engine: Engine | None = None

    def load(self) -> None:
        backbone, self._words, _ = load_backbone(self._model, self._device, self._dtype)
        self._corpus.load()
        if self._layer is None:
            self._chosen_by, layer, heads = self._choose(backbone)
        else:
            check_layer("layer", self._layer, backbone.depth)
            self._chosen_by, layer = "given", self._layer
            heads = tuple(range(backbone.heads)) if self._heads is None else self._heads
            check_heads("heads", heads, backbone.heads)
        backbone.cut(layer + 1)
        self._readout = layer, heads
        self._engine = Engine(backbone, Config(), self._settings.offset)
        self._prompt = Prompt(self._words, self._settings, DIGITS)

    def _choose(self, backbone: Backbone) -> tuple[str, int, tuple[int, ...]]:
        if shipped := SHIPPED.get(shape(backbone)):
            return f"calibrated defaults of {shipped[0]}", shipped[1], shipped[2]
        texts, questions, golds = generated()
        told = [*map(identify, made_of(self._model)), asdict(self._settings), texts, questions, [*map(sorted, golds)]]
        name = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:24]
        try:
            file = cache_folder() / "attention" / f"{name}.json"
        except OSError as error:
            layer, heads, _ = calibrate(backbone, self._words, self._settings, self.progress)
            return f"calibration that could not be kept: {error}", layer, heads
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            return f"calibration in {file}", int(known["layer"]), tuple(map(int, known["heads"]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{file}: not used, the model is calibrated again: {error}", stacklevel=2)
        layer, heads, reached = calibrate(backbone, self._words, self._settings, self.progress)
        kept = {"model": self._model, "layer": layer, "heads": heads, "reciprocal_rank": reached}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent) as work:
                made = Path(work) / file.name
                made.write_text(json.dumps(kept) + "\n", encoding="utf-8")
                made.replace(file)
        except OSError as error:
            return f"calibration that could not be kept: {error}", layer, heads
        return f"calibration kept in {file}", layer, heads

    def estimate(self, documents: Sequence[Document], queries: Sequence[str]) -> Estimate | None:
        backbone = self._loaded().backbone
        prompt = Prompt(self._words, self._settings, digits_for(len(documents)))
        blocks = list(prompt.documents([document.text for document in documents], [0] * len(documents)))
        asked = [prompt.query(query) for query in queries]
        readout = Readout(self._readout[0], "content", self._readout[1])
        return estimate(backbone, Config(), blocks, asked, (), len(prompt.opening), readout=readout)

    def index(self, documents: Sequence[Document]) -> None:
        backbone = self._loaded().backbone
        self._prompt = self._corpus.fill(backbone, self._words, self._settings, None, documents, self.progress)
        self.index_reused = self._corpus.reused > 0
        self.max_tokens = self._prompt.text_tokens
        self._opening = self._loaded().opening_pass(self._corpus.cache, self._prompt.opening)

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        if not len(self._corpus.cache):
            raise RuntimeError("search before index")
        return ask_in_groups([self._prompt.query(query) for query in queries], lambda blocks: self._ask(blocks, k))

    def _ask(self, blocks: Sequence[Block], k: int) -> list[Ranking]:
        readout = Readout(self._readout[0], "content", self._readout[1])
        state = self._loaded().query_pass(self._corpus.cache, blocks, readout, opening=self._opening)
        assert state.scores is not None
        return [top_k(row, k) for row in state.scores.cpu().numpy()]

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("index or search before load")
        return self._engine

    def index_bytes(self) -> int:
        return self._corpus.nbytes()

    def settings(self) -> dict[str, Any]:
        backbone = self._loaded().backbone
        return {
            "model": backbone.config.model_type,
            "layer": self._readout[0],
            "heads": list(self._readout[1]),
            "chosen_by": self._chosen_by,
            "prompt": asdict(self._settings) | self._prompt.shown(),
            "digits": self._prompt.digits,
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "attention": kernel_name(backbone.head_dim, backbone.dtype, backbone.device.type),
            **self._corpus.settings(),
        }

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        return spans(self._words, texts)


def shape(backbone: Backbone) -> tuple[str, int, int, int, int, int, float]:
    config = backbone.config
    kind, base = str(config.model_type), float(config.rope_parameters["rope_theta"])
    return kind, backbone.depth, config.hidden_size, backbone.heads, backbone.kv_heads, config.vocab_size, base


def calibrate(
    backbone: Backbone,
    tokenizer: Tokenizer,
    settings: PromptSettings,
    progress: Progress = lambda done, total: None,
) -> tuple[int, tuple[int, ...], float]:
    """The layer and heads that rank generated biographies best, and the mean reciprocal rank that they reach.

    The text has LIMIT's form but no word of its benchmark, and no test query is seen. In each layer the heads are
    added in the order of what each reaches alone; the best such set of all layers is chosen.
    """
    texts, questions, golds = generated()
    scores = score_heads(backbone, tokenizer, settings, texts, questions, progress)
    every = range(backbone.heads)
    best: tuple[float, int, tuple[int, ...]] = (0.0, 0, (0,))
    for layer in range(backbone.depth):
        alone = [reciprocal_rank(scores[layer, head], golds) for head in every]
        order = sorted(every, key=lambda head: -alone[head])
        for count in range(1, len(order) + 1):
            heads = tuple(sorted(order[:count]))
            reached = reciprocal_rank(scores[layer, list(heads)].sum(0), golds)
            if reached > best[0]:
                best = reached, layer, heads
    return best[1], best[2], best[0]


def score_heads(
    backbone: Backbone,
    tokenizer: Tokenizer,
    settings: PromptSettings,
    texts: Sequence[str],
    questions: Sequence[str],
    progress: Progress = lambda done, total: None,
) -> Tensor:
    """The scores that each head of each layer gives, (layers, heads, questions, texts)."""
    prompt = Prompt(tokenizer, settings, digits_for(len(texts)))
    codes = draw_codes(texts, prompt.digits, 0)
    blocks = list(prompt.documents(texts, codes))
    cache = CorpusCache(list(prefill(backbone, blocks, range(len(blocks)), progress)), codes, prompt.digits)
    engine = Engine(backbone, Config(), settings.offset)
    every = range(backbone.heads)
    scores = torch.zeros(backbone.depth, backbone.heads, len(questions), len(texts))
    for begin in range(0, len(questions), 32):
        asked = [prompt.query(question) for question in questions[begin : begin + 32]]

        def observe(layer: int, hidden: Tensor, q: Tensor, asked: Sequence[Block] = asked, begin: int = begin) -> None:
            rows, owner = scoring_rows(asked, "content", q)
            backbone.check_finite(rows)  # no gold would be beaten in a layer without numbers
            for shard in cache.shards:
                found = head_scores(backbone, shard, layer, rows, every)  # (n, R, H)
                summed = found.new_zeros(len(asked), len(found), len(every)).index_add_(0, owner, found.transpose(0, 1))
                ours = scores[layer, :, begin : begin + len(asked)]
                ours[:, :, shard.documents] = summed.permute(2, 0, 1).cpu()

        engine.query_pass(cache, asked, observe=observe)
    return scores


def generated() -> tuple[list[str], list[str], list[set[int]]]:
    """Biographies from the training words, questions about them and the two people whom each question is about."""
    rng = random.Random("icr-bench attention calibration")
    names = limit.people(PEOPLE, "training", 0)
    words = rng.sample(limit.words("attributes", "training"), len(limit.words("attributes", "training")))
    asked, others = words[:QUESTIONS], words[QUESTIONS:]
    likes: list[list[str]] = [[] for _ in names]
    golds = [set(rng.sample(range(PEOPLE), 2)) for _ in asked]
    for attribute, gold in zip(asked, golds, strict=True):
        for person in gold:
            likes[person].append(attribute)
    for own in likes:
        own += rng.sample(others, max(LIKES - len(own), 0))
        rng.shuffle(own)
    texts = [limit.biography(name, own) for name, own in zip(names, likes, strict=True)]
    return texts, [f"Who likes {attribute}?" for attribute in asked], golds


def reciprocal_rank(scores: Tensor, golds: Sequence[set[int]]) -> float:
    """Mean over questions (Q, N) of 1 / the rank of the best gold; a tie counts as the worse rank."""
    scores = finite(scores)
    total = 0.0
    for row, gold in zip(scores, golds, strict=True):
        others = torch.ones(len(row), dtype=torch.bool)
        others[list(gold)] = False
        total += 1 / (1 + int((row[others] >= row[list(gold)].max()).sum()))
    return total / len(golds)
