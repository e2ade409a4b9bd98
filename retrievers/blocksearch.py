"""BlockSearch: a language model holds the corpus in its KV cache and decodes the code of the relevant document.

arXiv 2607.01538. One class; the variants are rows of options (`BlockSearch` describes them), not subclasses.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from icr_bench.retrievers.base import Document, Estimate, Ranking, Retriever
from icr_bench.retrievers.lm.attend import kernel_name
from icr_bench.retrievers.lm.backbone import load_backbone, made_of, same_fraction, shape_of
from icr_bench.retrievers.lm.calibrate import estimate
from icr_bench.retrievers.lm.corpus import CACHE_GB, QUERIES, Corpus, ask_in_groups, spans
from icr_bench.retrievers.lm.decode import Beam, Codes, search
from icr_bench.retrievers.lm.diagnose import Diagnosis, Look, Row, along, at_once, untouched
from icr_bench.retrievers.lm.engine import Config, Engine, Queries, Readout, Routing, Tokens, check_heads, check_layer
from icr_bench.retrievers.lm.prompt import DIGITS, Block, Prompt, PromptSettings, check_digits, digits_for, with_given
from icr_bench.retrievers.rows import row
from icr_bench.retrievers.top import top_k
from icr_bench.retrievers.weights import CacheFolder, Model

ROUTING_LAYER = (16, 28)
"""The paper's routing layer and its model's depth; other depths route at the same fraction."""

BASE = Model("tiny-base")
"""What answers unless a model is named; it ships with this package, and so do those of the rows below."""

ROUTING_B = 256
"""Documents that routing keeps (section 5.1)."""

SSMAX_START, SINK_START = 0.43, 14.0
"""The learned scalars' initial values (facts 7.1, 7.2), which hold where the weights carry none."""

EXTRAS = "blocksearch.json"
"""What weights carry beside the model: ``prompt``, ``routing_layer``, ``routing_b``, ``blind``, ``ssmax`` and
``sink`` (a number a layer)."""


class BlockSearch(Retriever):
    """A language model reads every document once into its KV cache and answers with the code of one.

    Args:
        model: a model of the Llama, Mistral or Qwen family: a hub id (``org/name`` or ``org/name@revision``), a local
            folder, a ``.gguf`` file, or a name that `icr-bench list models` prints.
        base: the model that an adapter adds to (hub id, folder or ``.gguf`` file); the one that it names by default.
        codes: ``random``, or ``position`` for the document's number (the ablation).
        digits: digits of a code; by default four, or as many as the corpus takes. Corpora share what a ``cache`` holds
            if their codes are of one length: with 5 from the start, all of up to 100,000 documents.
        cap: tokens of a document with its wrapper; 300 unless the weights say otherwise.
        offset: position of a query's first token; 300 unless the weights say otherwise.
        ssmax: multiply attention scores by s_L log N.
        ssmax_n: what N counts, ``documents`` or attended ``tokens``.
        sink_gate: apply the learned sink at evaluation too; the paper leaves it off.
        routing: keep the documents that score best at one layer by the query's ``last`` token (the paper) or by the
            tokens of its own text (``content``); ``none`` for no routing.
        routing_layer: the layer that scores; 16 of 28 or the same fraction, unless the weights say otherwise.
        routing_b: documents kept; 256 unless the weights say otherwise.
        routing_reach: in digit passes the shortlist holds in ``every`` layer, or only in those ``upper`` than the
            routing layer.
        readout: ``decode`` digits, or rank all documents by ``attention`` at one layer.
        readout_layer: the layer that ranks; the routing layer by default.
        readout_heads: its heads, all by default.
        readout_tokens: the query's tokens that rank, ``last`` or ``content``.
        beam: width of the search; a larger k widens it.
        per_step: digits that each beam continues with.
        existing: take only codes of the corpus.
        cache: folder to keep keys and values in between runs.
        cache_gb: size that they may have there, in 10^9 bytes.
    """

    tokenizer = "model"

    def __init__(
        self,
        *,
        model: Model = BASE,
        base: Model | None = None,
        codes: Literal["random", "position"] = "random",
        digits: int | None = None,
        cap: int | None = None,
        offset: int | None = None,
        ssmax: bool = False,
        ssmax_n: Literal["documents", "tokens"] = "documents",
        sink_gate: bool = False,
        routing: Literal["none", "last", "content"] = "none",
        routing_layer: int | None = None,
        routing_b: int | None = None,
        routing_reach: Literal["every", "upper"] = "every",
        readout: Literal["decode", "attention"] = "decode",
        readout_layer: int | None = None,
        readout_heads: tuple[int, ...] | None = None,
        readout_tokens: Tokens = "last",
        beam: int = 25,
        per_step: int = 5,
        existing: bool = True,
        cache: CacheFolder | None = None,
        cache_gb: float = CACHE_GB,
        device: str = "cpu",
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        if not model:
            raise ValueError("model is empty; give a hub id, a local folder or a .gguf file")
        if routing_b is not None and routing_b < 1:
            raise ValueError(f"routing_b must be 1 or more, got {routing_b}")
        if digits is not None and not 1 <= digits <= 7:
            raise ValueError(f"digits must be 1 to 7, got {digits}")
        with_given(PromptSettings(), cap=cap, offset=offset)
        self._model, self._base = model, base
        self._device, self._dtype, self._seed = device, dtype, seed
        self._codes_kind, self._digits = codes, digits
        self._given = {"cap": cap, "offset": offset}
        self._ssmax, self._n_is, self._sink_gate = ssmax, ssmax_n, sink_gate
        self._routing, self._routing_layer = routing, routing_layer
        self._routing_b, self._routing_reach = routing_b, routing_reach
        self._readout, self._readout_layer = readout, readout_layer
        self._readout_heads, self._readout_tokens = readout_heads, readout_tokens
        self._beam, self._width = Beam(beam, per_step, existing), beam
        self._corpus = Corpus(lambda: made_of(model, base), codes, seed, cache, cache_gb)
        decoding, routed = readout == "decode", routing != "none"
        for given, switch, on in (
            ({"ssmax_n": ssmax_n}, "ssmax=true", ssmax),
            ({"routing_b": routing_b, "routing_reach": routing_reach}, "routing=last or content", routed),
            ({"routing_layer": routing_layer}, "routing=last or content, or readout=attention", routed or not decoding),
            ({"beam": beam, "per_step": per_step, "existing": existing}, "readout=decode", decoding),
            (
                {"readout_layer": readout_layer, "readout_heads": readout_heads, "readout_tokens": readout_tokens},
                "readout=attention",
                not decoding,
            ),
        ):
            _check_effect(given, switch, on)
        self._engine: Engine | None = None
        self._tree: Codes | None = None

    def load(self) -> None:
        backbone, self._words, path = load_backbone(self._model, self._device, self._dtype, self._base)
        self._corpus.load()
        carried = _carried(path)
        self._settings = with_given(PromptSettings(**carried.get("prompt", {})), **self._given)
        depth = backbone.depth
        given = (self._routing_layer, carried.get("routing_layer"), same_fraction(*ROUTING_LAYER, depth))
        middle: int = next(layer for layer in given if layer is not None)
        check_layer("routing_layer", middle, depth)
        routing = None
        if self._routing != "none":
            kept = self._routing_b or carried.get("routing_b", ROUTING_B)
            routing = Routing(middle, kept, self._routing, self._routing_reach)
        self._scalars: dict[str, tuple[float, ...]] = {}
        for name, wanted, start in (("ssmax", self._ssmax, SSMAX_START), ("sink", self._sink_gate, SINK_START)):
            if wanted:
                self._scalars[name] = tuple(carried.get(name, [start] * depth))
        ssmax, sink = self._scalars.get("ssmax"), self._scalars.get("sink")
        config = Config(ssmax, self._n_is, sink, routing=routing, blind=carried.get("blind", 0))
        try:
            self._engine = Engine(backbone, config, self._settings.offset)
        except ValueError as error:  # it is about what the file holds
            raise ValueError(f"{path / EXTRAS}: {error}") from None
        self._untrained = sorted(name for name in self._scalars if name not in carried)
        self._layer = middle if self._readout_layer is None else self._readout_layer
        check_layer("readout_layer", self._layer, depth)
        self._heads = tuple(range(backbone.heads)) if self._readout_heads is None else self._readout_heads
        check_heads("readout_heads", self._heads, backbone.heads)
        self._prompt = Prompt(self._words, self._settings, self._digits or DIGITS)

    def estimate(self, documents: Sequence[Document], queries: Sequence[str]) -> Estimate | None:
        engine = self._loaded()
        texts = [document.text for document in documents]
        digits = self._digits or digits_for(len(texts))
        check_digits(len(texts), digits)
        prompt = Prompt(self._words, self._settings, digits)
        blocks = list(prompt.documents(texts, [0] * len(texts)))
        asked = [prompt.query(query) for query in queries]
        beams = [min(self._beam.per_step**length, self._beam.width, len(texts)) for length in range(1, digits)]
        first, readout = self._first(engine), None
        if self._readout == "attention":
            beams, readout = [], Readout(self._layer, self._readout_tokens, self._heads)
        return estimate(engine.backbone, engine.config, blocks, asked, beams, len(prompt.opening), first, readout)

    def _first(self, engine: Engine) -> int:
        """The first layer whose keys and values are read."""
        return min(engine.first, self._layer) if self._readout == "attention" else engine.first

    def index(self, documents: Sequence[Document]) -> None:
        engine = self._loaded()
        self._tree = None  # of an earlier corpus
        if self._digits is not None:
            check_digits(len(documents), self._digits)
        self._prompt = self._corpus.fill(
            engine.backbone, self._words, self._settings, self._digits, documents, self.progress, self._first(engine)
        )
        self.index_reused = self._corpus.reused > 0
        self.max_tokens = self._prompt.text_tokens
        cache = self._corpus.cache
        self._tree = Codes(cache.codes, cache.digits, engine.backbone.device)
        self._opening = engine.opening_pass(cache, self._prompt.opening)

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        if self._tree is None:
            raise RuntimeError("search before index")
        return ask_in_groups([self._prompt.query(query) for query in queries], lambda blocks: self._ask(blocks, k))

    def _ask(self, blocks: Sequence[Block], k: int) -> list[Ranking]:
        engine, tree, cache = self._loaded(), self._tree, self._corpus.cache
        assert tree is not None
        if self._readout == "attention":
            readout = Readout(self._layer, self._readout_tokens, self._heads)
            state = engine.query_pass(cache, blocks, readout, opening=self._opening)
            assert state.scores is not None
            return [top_k(row, k) for row in state.scores.cpu().numpy()]
        return self._rankings(*self._decode(engine.query_pass(cache, blocks, opening=self._opening), k)[:2], k)

    def _decode(self, state: Queries, k: int, beam: Beam | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """What `decode.search` finds for a ranking of k."""
        assert self._tree is not None
        # As many as the beam holds, so that of two k within its width the smaller gives the head of the larger.
        self._width = max(self._beam.width, k)
        cache, ids = self._corpus.cache, self._words.digits
        return search(self._loaded(), cache, self._tree, state, ids, beam or self._beam, self._width)

    def _rankings(self, found: Tensor, scores: Tensor, k: int) -> list[Ranking]:
        rankings = []
        for numbers, logs in zip(found.tolist(), scores.tolist(), strict=True):
            named = [(number, log) for number, log in zip(numbers, logs, strict=True) if number >= 0][:k]
            rankings.append(Ranking([number for number, _ in named], [log for _, log in named]))
        return rankings

    def check_look(self, look: Look, documents: int) -> None:
        """Refuse what `diagnose` could not do with a corpus of that size. Before `load`, layers and heads are those
        of a model that is there already.

        Raises:
            ValueError: a layer or head that is not there, or answers that are not decoded.
            NoRoom: too many documents to look at.
        """
        if self._readout == "attention":
            raise ValueError("readout=attention decodes no digits; diagnose tells both, so leave it out")
        backbone = self._engine.backbone if self._engine else None
        shape = (backbone.depth, backbone.heads) if backbone else shape_of(self._model, self._base)
        if shape:
            at_once(documents, look, *shape)

    def diagnose(
        self,
        queries: Sequence[str],
        golds: Sequence[Sequence[int]],
        k: int,
        look: Look,
        hidden: Sequence[int | None] | None = None,
    ) -> tuple[list[Ranking], list[Row]]:
        """What `search` gives, and what was seen of each query meanwhile.

        Args:
            golds: document numbers of each query, one or more.
            hidden: the document that may not be returned for a query; it is no rival of the golds either.
        """
        tree, engine, cache = self._tree, self._loaded(), self._corpus.cache
        if tree is None:
            raise RuntimeError("diagnose before index")
        ids = self._words.digits
        hidden = [None] * len(queries) if hidden is None else hidden
        rankings, rows = list[Ranking](), list[Row]()

        def ask(blocks: Sequence[Block]) -> list[Ranking]:
            asked = slice(len(rows), len(rows) + len(blocks))
            diagnosis = Diagnosis(engine, cache, golds[asked], ids, look, hidden[asked])
            state = engine.query_pass(cache, blocks, opening=self._opening, look=diagnosis)
            seen = diagnosis.rows()
            if look.per_query:
                for one, shares in zip(seen, along(engine, cache, state, golds[asked], ids), strict=True):
                    one["digits"] = shares
            other = self._decode(untouched(state), k, replace(self._beam, existing=not self._beam.existing))
            own = self._decode(state, k)
            kinds = ("constrained", "free") if self._beam.existing else ("free", "constrained")
            for name, (documents, scores, codes) in zip(kinds, (own, other), strict=True):
                for one, outcome in zip(seen, diagnosis.outcomes(documents, scores, codes), strict=True):
                    one[name] = outcome
            rows.extend(seen)
            return self._rankings(*own[:2], k)

        blocks = [self._prompt.query(query) for query in queries]
        size = min(at_once(len(cache), look, engine.backbone.depth, engine.backbone.heads), QUERIES)
        for begin in range(0, len(blocks), size):
            rankings += ask_in_groups(blocks[begin : begin + size], ask)
        return rankings, rows

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("index or search before load")
        return self._engine

    def index_bytes(self) -> int:
        return self._corpus.nbytes()

    def settings(self) -> dict[str, Any]:
        engine = self._loaded()
        settings: dict[str, Any] = {
            "model": engine.backbone.config.model_type,
            "layers": engine.backbone.depth,
            "prompt": asdict(self._settings) | self._prompt.shown(),
            "digits": self._prompt.digits,
            "dtype": str(engine.backbone.dtype).removeprefix("torch."),
            "attention": kernel_name(engine.backbone.head_dim, engine.backbone.dtype, engine.backbone.device.type),
            **self._corpus.settings(),
        }
        for name, values in self._scalars.items():
            source = "initial value, not trained" if name in self._untrained else "weights"
            settings[name] = {"values": list(values), "from": source}
        if engine.config.blind:
            settings["blind_layers"] = engine.config.blind
        if engine.config.routing:
            settings["routing"] = asdict(engine.config.routing)
        if self._readout == "attention":
            settings["readout"] = {"layer": self._layer, "heads": list(self._heads), "tokens": self._readout_tokens}
        else:
            settings["beam"] = asdict(self._beam) | {"width": self._width}
        return settings

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        return spans(self._words, texts)


def _check_effect(given: dict[str, Any], switch: str, on: bool) -> None:
    """Refuse options that change nothing: whoever gives one expects that it does."""
    defaults = inspect.signature(BlockSearch).parameters
    idle = [name for name, value in given.items() if value != defaults[name].default]
    if idle and not on:
        raise ValueError(f"{' and '.join(idle)} would change nothing; give {switch} too")


def _carried(path: Path) -> dict[str, Any]:
    """What the weights' folder says in `EXTRAS`; empty where there is no such file."""
    file = path / EXTRAS
    if not file.is_file():
        return {}
    try:
        carried: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for name, value in carried.items():
            if name == "prompt":
                PromptSettings(**value)
                fine = all(
                    type(value[field.name]).__name__ == field.type
                    for field in fields(PromptSettings)
                    if field.name in value
                )
            elif name in ("routing_layer", "routing_b", "blind"):
                fine = type(value) is int
            elif name in ("ssmax", "sink"):
                fine = all(type(scalar) in (int, float) and math.isfinite(scalar) for scalar in value)
            else:
                raise ValueError(
                    f"{name!r} is not known; expected prompt, routing_layer, routing_b, blind, ssmax or sink"
                )
            if not fine:
                raise ValueError(f"{name} is {value!r:.80}")
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{file}: {error}") from None
    return carried


position = row(
    BlockSearch, "BlockSearch with codes by position (ablation, section 3.3).", model="tiny-position", codes="position"
)
offpolicy = row(BlockSearch, "BlockSearch trained without the on-policy loss (section 3.3).", model="tiny-offpolicy")
sink = row(
    BlockSearch, "BlockSearch trained with an additive sink (section 5.1), off at evaluation.", model="tiny-sink"
)
ssmax = row(BlockSearch, "BlockSearch with SSMax (section 5.1).", model="tiny-ssmax", ssmax=True)
routing = row(BlockSearch, "BlockSearch with routing (section 5.1).", routing="last")
ssmax_routing = row(
    BlockSearch, "BlockSearch with SSMax and routing (section 5.2).", model="tiny-ssmax", ssmax=True, routing="last"
)
