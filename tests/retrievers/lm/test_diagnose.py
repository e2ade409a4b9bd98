"""What is seen inside a model against the unmodified Hugging Face model under a mask, and against planted golds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import OFFSET, Reference, hugging_face
from torch import Tensor

from icr_bench.retrievers.base import Document
from icr_bench.retrievers.blocksearch import BlockSearch
from icr_bench.retrievers.lm import diagnose
from icr_bench.retrievers.lm.backbone import load_backbone
from icr_bench.retrievers.lm.cache import CorpusCache, prefill
from icr_bench.retrievers.lm.corpus import NoRoom
from icr_bench.retrievers.lm.diagnose import Diagnosis, Look, Row, at_once
from icr_bench.retrievers.lm.engine import Config, Engine, Reading, Routing
from icr_bench.retrievers.lm.prompt import Prompt, PromptSettings, draw_codes
from icr_bench.retrievers.weights import Model

TinyModel = Callable[..., Path]

TEXTS = [
    "Mira likes cellos and quince.",
    "a",
    "Plants turn light into chemical energy; the rest is eaten by others.",
    "",
    "Sourdough rises (Doc 1234).",
    "The reef lies off Queensland.",
    "酵母",
    "Tides follow the moon.",
]
QUERIES = ["who likes quince?", "reef", "how do leaves make food from light?"]
GOLDS = [[0], [5, 2], [2]]

CONFIGS: dict[str, Config] = {
    "plain": Config(),
    "ssmax": Config(ssmax=(0.43, 0.5, 0.3, 0.6)),
    "ssmax over tokens": Config(ssmax=(0.43, 0.5, 0.3, 0.6), n_is="tokens"),
    "sink": Config(sink=(1.0, 2.0, 3.0, 0.5), sink_n=400.0, sink_strength=0.7),
    "blind": Config(blind=2),
    "routing": Config(routing=Routing(1, 3)),
    "all": Config(ssmax=(0.43, 0.5, 0.3, 0.6), sink=(1.0, 2.0, 3.0, 0.5), routing=Routing(2, 4), blind=1),
}


class Seen:
    """A model, its cache of `TEXTS` in two shards, and what a diagnosis tells of `QUERIES`."""

    def __init__(
        self, model: Path, config: Config, look: Look | None = None, hidden: Sequence[int | None] = (None,) * 3
    ) -> None:
        self.backbone, self.tokenizer, _ = load_backbone(str(model))
        prompt = Prompt(self.tokenizer, PromptSettings(before="Query: "), 4)
        self.codes = draw_codes(TEXTS, 4, 0)
        self.documents = list(prompt.documents(TEXTS, self.codes))
        self.queries = [prompt.query(query) for query in QUERIES]
        limit = sum(map(len, self.documents)) * self.backbone.token_bytes() // 2
        shards = list(prefill(self.backbone, self.documents, range(len(TEXTS)), shard_bytes=limit))
        assert len(shards) > 1
        self.cache = CorpusCache(shards, self.codes, 4)
        self.engine = Engine(self.backbone, config, OFFSET)
        self.readings: list[Reading] = []
        diagnosis = Diagnosis(self.engine, self.cache, GOLDS, self.tokenizer.digits, look or Look(), hidden)

        def both(reading: Reading) -> None:
            self.readings.append(reading)
            diagnosis(reading)

        self.engine.query_pass(self.cache, self.queries, look=both)
        self.rows: list[Row] = diagnosis.rows()


class Parts(Reference):
    """Keeps what each layer's heads read at the last token, by token: (H, T, D) of the sequence that it saw."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
        # What heads read is linear in the values, so that values of 1 in one place tell the share of every token.
        shares = super().attend(layer, q, k, torch.eye(v.shape[2]).expand(*v.shape[:2], -1, -1), mask, scaling)
        self.last = getattr(self, "last", {})
        repeated = v.repeat_interleave(q.shape[1] // v.shape[1], 1)[0]
        self.last[layer] = shares[0, -1], repeated  # (H, T), (H, T, D)
        return (shares.transpose(1, 2) @ repeated).transpose(1, 2)


@pytest.fixture(scope="module")
def qwen(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", seed=3)


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_equal_the_masked_model(name: str, qwen: Path) -> None:
    seen = Seen(qwen, CONFIGS[name])
    truth = Parts(hugging_face(qwen), seen.documents, CONFIGS[name])
    for number, (query, golds) in enumerate(zip(seen.queries, GOLDS, strict=True)):
        kept = truth.shortlist(query)
        _force(truth)
        truth.run(query, [[]], kept)
        gold = torch.cat((torch.isin(truth.owner, torch.tensor(golds)), torch.zeros(len(query), dtype=torch.bool)))
        for layer in range(4):
            shares, values = truth.last[layer]
            matrix = truth.model.model.layers[layer].self_attn.o_proj.weight.detach()
            parts = [((shares * which).unsqueeze(1) @ values)[:, 0].flatten() @ matrix.T for which in (gold, ~gold)]
            lengths = [float(part.norm()) for part in (parts[0] + parts[1], *parts)]
            told = [seen.rows[number][key][layer] for key in ("norm", "norm_gold", "norm_rest")]
            assert told == pytest.approx(lengths, rel=2e-4, abs=1e-5)
            assert seen.rows[number]["mass"][layer] == pytest.approx(_mass(shares, gold), abs=2e-5)
            # Both parts, each from its own tokens, are the whole that the engine itself went on with.
            out = seen.readings[layer].out[number].flatten() @ matrix.T
            assert float((parts[0] + parts[1] - out).abs().max()) < 1e-5 * max(1.0, float(out.abs().max()))


def _mass(shares: Tensor, gold: Tensor) -> list[float]:
    """Golds' share of each head's attention, of which a sink may have taken a part."""
    return [float(own) for own in (shares * gold).sum(1) / shares.sum(1)]


def _force(truth: Reference) -> None:
    """Let the reference's rule run, of which it makes no use without a modification."""
    if truth.config == Config():
        truth.config = Config(sink=(0.0,) * 4, sink_strength=0.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_and_scores_equal_the_masked_model(name: str, qwen: Path) -> None:
    config = CONFIGS[name]
    seen = Seen(qwen, config)
    truth = Reference(hugging_face(qwen), seen.documents, config)
    for number, (query, golds) in enumerate(zip(seen.queries, GOLDS, strict=True)):
        kept = truth.shortlist(query)
        for layer in range(4):
            row = {key: seen.rows[number][key][layer] for key in ("rank_sum", "rank_heads", "score")}
            if layer < config.blind:
                assert row == {"rank_sum": 0, "rank_heads": [0] * 4, "score": None}
                continue
            routed = kept is not None and config.routing is not None and layer > config.routing.layer
            out = set(range(len(TEXTS))) - set(kept or ()) if routed else set()
            each = [_without(truth.products(query, layer, [head], "last", kept), out) for head in range(4)]
            summed = _without(truth.products(query, layer, range(4), "last", kept), out)
            assert row["rank_sum"] == _rank(summed, golds)
            assert row["rank_heads"] == [_rank(own, golds) for own in each]
            scale = float(seen.readings[layer].scale[number])
            for told, own in zip(row["score"], each, strict=True):
                best = max(own[gold] for gold in golds)
                assert (told is None) if best == -math.inf else told == pytest.approx(best * scale, rel=1e-3, abs=1e-4)


def _without(scores: Sequence[float], out: set[int]) -> list[float]:
    return [-math.inf if number in out else score for number, score in enumerate(scores)]


def _rank(scores: Sequence[float], golds: Sequence[int]) -> int:
    best = max(scores[gold] for gold in golds)
    return 1 + sum(score >= best for number, score in enumerate(scores) if number not in golds)


@pytest.mark.parametrize("name", CONFIGS)
def test_digits_equal_the_masked_model(name: str, qwen: Path) -> None:
    seen = Seen(qwen, CONFIGS[name])
    truth = Reference(hugging_face(qwen), seen.documents, CONFIGS[name])
    head, norm = truth.model.lm_head, truth.model.model.norm
    for number, (query, golds) in enumerate(zip(seen.queries, GOLDS, strict=True)):
        logs = truth.run(query, [[]], truth.shortlist(query))[0, -1]
        firsts = {seen.codes[gold] // 1000 for gold in golds}
        for layer in range(4):
            hidden = truth.hidden[layer + 1][0, -1]
            # The last of these has gone through the norm already.
            through = logs if layer == 3 else head(norm(hidden)).log_softmax(-1).detach()
            shares = through[seen.tokenizer.digits].exp()
            row = seen.rows[number]
            assert row["digit"][layer] == pytest.approx(sum(float(shares[f]) for f in firsts), rel=1e-3)
            assert row["digit_best"][layer] == pytest.approx(float(shares.max()), rel=1e-3)
            assert row["digit_right"][layer] == (int(shares.argmax()) in firsts)
        drawn = [code // 1000 for code in seen.codes]
        assert row["chance"] == pytest.approx(sum(digit in firsts for digit in drawn) / len(drawn))


@pytest.mark.parametrize("heads", [None, (1, 3)])
def test_a_planted_gold_is_first_in_every_head_and_takes_all_attention(heads: Any, qwen: Path) -> None:
    """Each head's query, copied and lengthened, stands as a key in the gold's text."""
    plain = Seen(qwen, Config())
    for layer in range(4):
        reading = plain.readings[layer]
        for query, gold in ((0, 0), (2, 2)):
            for shard in plain.cache.shards:
                for place in (shard.documents == gold).nonzero().flatten().tolist():
                    start = int(shard.text_starts[place])
                    for head in range(4):
                        shard.keys[layer, head // 2, start + head] = reading.q[query, head] * 30
    again = Diagnosis(plain.engine, plain.cache, GOLDS, plain.tokenizer.digits, Look(heads=heads), (None,) * 3)
    for reading in plain.readings:
        again(reading)  # the same queries; only what the golds' part is made of has changed
    for query in (0, 2):
        row = again.rows()[query]
        assert row["rank_sum"] == [1] * 4
        assert row["rank_heads"] == [[1] * (4 if heads is None else 2)] * 4
    state_rows = _rows_again(plain)
    for query in (0, 2):
        assert min(x for layer in state_rows[query]["mass"] for x in layer) > 0.999
        assert all(g / n > 0.99 for g, n in zip(state_rows[query]["norm_gold"], state_rows[query]["norm"], strict=True))


def _rows_again(seen: Seen) -> list[Row]:
    """What a layer reads of the changed keys with the queries that it had."""
    diagnosis = Diagnosis(seen.engine, seen.cache, GOLDS, seen.tokenizer.digits, Look(), (None,) * 3)
    rows_of = torch.arange(len(QUERIES))
    for reading in seen.readings:
        q = reading.q * reading.scale
        out, lse = seen.engine.read_corpus(seen.cache, q, reading.layer, rows_of, None)
        diagnosis(replace(reading, out=out, lse=lse))
    return diagnosis.rows()


def test_ties_are_misses_or_hits_as_said(qwen: Path) -> None:
    """In the first layer the tokens that open every block have the same keys in all, and win in some head."""
    firsts = {}
    for ties in ("miss", "hit"):
        rows = Seen(qwen, Config(), Look(ties=ties, tokens="block")).rows  # type: ignore[arg-type]
        firsts[ties] = [[rank == 1 for layer in row["rank_heads"] for rank in layer] for row in rows]
    assert sum(map(sum, firsts["hit"])) > sum(map(sum, firsts["miss"]))
    for miss, hit in zip(firsts["miss"], firsts["hit"], strict=True):
        assert all(h >= m for m, h in zip(miss, hit, strict=True))


def test_equal_documents_tie(qwen: Path) -> None:
    """In the first layer, where keys know nothing yet of the code before the text."""
    retriever = made(qwen, ["the same"] * 4)
    for ties, rank in (("miss", 4), ("hit", 1)):
        look = Look(layers=(0,), ties=ties)  # type: ignore[arg-type]
        _, (row,) = retriever.diagnose(["same?"], [[1]], 2, look)
        assert row["rank_sum"] == [rank]
        assert row["rank_heads"] == [[rank] * 4]


def test_wrapper_tokens_count_only_if_asked(qwen: Path) -> None:
    text, block = (Seen(qwen, Config(), Look(tokens=tokens)).rows for tokens in ("text", "block"))  # type: ignore[arg-type]
    pairs = [
        (one, other)
        for rows in zip(text, block, strict=True)
        for layers in zip(*(row["score"] for row in rows), strict=True)
        for one, other in zip(*layers, strict=True)
    ]
    assert all(other >= one for one, other in pairs)
    assert any(other > one for one, other in pairs)


def test_only_chosen_layers_and_heads(qwen: Path) -> None:
    whole, some = Seen(qwen, Config()).rows, Seen(qwen, Config(), Look(layers=(3, 1), heads=(2, 0))).rows
    for all_of, part in zip(whole, some, strict=True):
        assert part["layers"] == [1, 3]
        assert part["heads"] == [0, 2]
        assert part["norm"] == [all_of["norm"][1], all_of["norm"][3]]
        assert part["rank_heads"] == [[all_of["rank_heads"][layer][head] for head in (0, 2)] for layer in (1, 3)]
        assert part["mass"] == [[all_of["mass"][layer][head] for head in (0, 2)] for layer in (1, 3)]


def made(model: Path | str, texts: Sequence[str] = TEXTS, **options: Any) -> BlockSearch:
    retriever = BlockSearch(model=Model(str(model)), **options)
    retriever.load()
    retriever.index([Document(number, text) for number, text in enumerate(texts)])
    return retriever


OPTIONS: list[dict[str, Any]] = [
    {},
    {"ssmax": True, "ssmax_n": "tokens"},
    {"sink_gate": True},
    {"routing": "last", "routing_b": 3},
    {"routing": "content", "routing_b": 2, "routing_reach": "upper", "ssmax": True},
    {"existing": False, "digits": 2},
    {"codes": "position", "beam": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("per_query", [False, True])
def test_looking_changes_no_answer(options: dict[str, Any], per_query: bool, qwen: Path) -> None:
    retriever = made(qwen, **options)
    before = retriever.search(QUERIES, 4)
    seen, rows = retriever.diagnose(QUERIES, GOLDS, 4, Look(per_query=per_query))
    assert seen == before
    assert retriever.search(QUERIES, 4) == before
    kind = "constrained" if options.get("existing", True) else "free"
    for ranking, row, golds in zip(before, rows, GOLDS, strict=True):
        right = bool(ranking.numbers) and ranking.numbers[0] in golds and row[kind] != "none"
        assert (row[kind] == "right") == right
        assert row["constrained"] != "none"


def test_groups_do_not_matter(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = made(qwen)
    _, together = retriever.diagnose(QUERIES, GOLDS, 2, Look(per_query=True))
    monkeypatch.setattr(diagnose, "BYTES", len(TEXTS) * 4 * 4)  # the scores of one query
    _, alone = retriever.diagnose(QUERIES, GOLDS, 2, Look(per_query=True))
    for one, other in zip(together, alone, strict=True):
        assert one.keys() == other.keys()
        for key in ("rank_sum", "rank_heads", "top_sum", "top_heads", "constrained", "free", "digit_right"):
            assert one[key] == other[key]
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_failure(seed: int, qwen: Path) -> None:
    """With two digits and few documents, codes of no document are among the best when all codes may be taken."""
    texts = [f"text {number}" for number in range(30)]
    retriever = made(qwen, texts, digits=2, seed=seed, beam=100, per_step=10)
    cache, ids = retriever._corpus.cache, retriever._words.digits
    queries = [f"question {number}" for number in range(24)]
    golds = [[(7 * number) % 30] for number in range(24)]
    _, rows = retriever.diagnose(queries, golds, 3, Look(per_query=True))
    for row, own in zip(rows, golds, strict=True):
        code = cache.codes[own[0]]
        first = row["digits"][0]
        assert len(row["digits"]) == 2
        assert first[code // 10] == pytest.approx(row["digit"][-1], rel=1e-3)
        assert row["digit_right"][-1] == (max(range(10), key=lambda d: first[d]) == code // 10)
    kinds = set()
    for query, own, row in zip(queries, golds, rows, strict=True):
        best = _best_codes(retriever, query, ids)
        held = {code: number for number, code in enumerate(cache.codes)}
        for beam, code in (("constrained", next(c for c in best if c in held)), ("free", best[0])):
            if code not in held:
                kind = "none"
            elif held[code] in own:
                kind = "right"
            else:
                kind = "later" if code // 10 == cache.codes[own[0]] // 10 else "first"
            assert row[beam] == kind
            kinds.add((beam, kind))
    assert ("free", "none") in kinds


def _best_codes(retriever: BlockSearch, query: str, ids: Sequence[int]) -> list[int]:
    """All codes of two digits, best first, from the probabilities of every first and second digit."""
    from icr_bench.retrievers.lm.decode import digit_logs

    engine, cache = retriever._loaded(), retriever._corpus.cache
    state = engine.query_pass(cache, [retriever._prompt.query(query)])
    assert state.hidden is not None
    tokens = torch.tensor(ids)
    first = digit_logs(engine.backbone, state.hidden, tokens)[0]
    hidden = engine.digit_pass(cache, state, tokens.unsqueeze(0), torch.zeros(1, 10, dtype=torch.long))
    second = digit_logs(engine.backbone, hidden, tokens)[0]
    return [int(code) for code in (first.unsqueeze(1) + second).flatten().argsort(descending=True)]


def test_an_untrained_model_reads_chance(tiny_model: TinyModel) -> None:
    """Golds drawn at random: each head, and all together, find them as often as chance does; above the first layer,
    where equal tokens at equal places have the same keys in all documents."""
    count, asked = 8, 400
    texts = [f"text {number} " + "abcdefgh"[number] * (number % 3 + 1) for number in range(count)]
    retriever = made(tiny_model("qwen3", layers=2, seed=11), texts)
    rng = random.Random(0)
    golds = [[rng.randrange(count)] for _ in range(asked)]
    _, rows = retriever.diagnose([f"q{number}" for number in range(asked)], golds, 1, Look(layers=(1,)))
    expected = asked / count
    half = 3.5 * math.sqrt(expected * (1 - 1 / count))
    assert half < expected / 2
    assert abs(sum(row["rank_sum"] == [1] for row in rows) - expected) < half
    for head in range(4):
        assert abs(sum(row["rank_heads"][0][head] == 1 for row in rows) - expected) < half


def test_top_documents(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "TOP", 3)
    seen = Seen(qwen, Config(), Look(per_query=True))
    truth = Reference(hugging_face(qwen), seen.documents)
    for row, query in zip(seen.rows, seen.queries, strict=True):
        for layer in range(4):
            every = [truth.products(query, layer, [head], "last") for head in range(4)]
            for own, told in zip(every, row["top_heads"][layer], strict=True):
                assert told == sorted(range(len(own)), key=lambda n: -own[n])[:3]
            summed = [sum(values) for values in zip(*every, strict=True)]
            assert row["top_sum"][layer] == sorted(range(len(summed)), key=lambda n: -summed[n])[:3]


def test_a_document_that_may_not_be_returned_is_no_rival(qwen: Path) -> None:
    """The same ranks as if it were not there, and the best code is the next one's."""
    hidden = [3, 0, 7]
    seen = Seen(qwen, Config(), Look(per_query=True), hidden)
    truth = Reference(hugging_face(qwen), seen.documents)
    for row, query, golds, left in zip(seen.rows, seen.queries, GOLDS, hidden, strict=True):
        for layer in range(4):
            own = _without(truth.products(query, layer, range(4), "last"), {left})
            assert row["rank_sum"][layer] == _rank(own, golds)
            assert all(left not in top for top in (row["top_sum"][layer], *row["top_heads"][layer]))
    retriever = made(qwen, beam=8, per_step=10)
    (ranking,) = retriever.search(["reef"], 8)
    first, second = ranking.numbers[:2]
    for gold, left, outcome in ((second, first, "right"), (second, None, "wrong"), (first, None, "right")):
        _, (row,) = retriever.diagnose(["reef"], [[gold]], 8, Look(), [left])
        assert (row["constrained"] == "right") == (outcome == "right")


def test_the_outcome_is_that_of_the_answer_given(qwen: Path) -> None:
    """Also where k widens the search beyond the beam, which then may find a better code than the beam would."""
    texts = [f"text {number}" for number in range(40)]
    retriever = made(qwen, texts, beam=1, per_step=1)
    golds = [[number] for number in range(30)]
    queries = [f"q {number}" for number in range(30)]
    for k in (1, 20):
        rankings, rows = retriever.diagnose(queries, golds, k, Look())
        for ranking, row, own in zip(rankings, rows, golds, strict=True):
            assert (row["constrained"] == "right") == (ranking.numbers[0] in own)


def test_what_cannot_be_looked_at(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, bare = made(qwen), BlockSearch(model=Model(str(qwen)))
    for retriever in (loaded, bare):
        with pytest.raises(ValueError, match="layers 7: the model has layers 0 to 3"):
            retriever.check_look(Look(layers=(1, 7)), 8)
        with pytest.raises(ValueError, match=r"heads 0\+4: expected different ones of 0 to 3"):
            retriever.check_look(Look(heads=(0, 4)), 8)
        with pytest.raises(NoRoom, match=r"scores of 10,000,000,000 documents by each head, 160,000,000,000 bytes"):
            retriever.check_look(Look(), 10**10)
    with pytest.raises(ValueError, match="readout=attention decodes no digits"):
        BlockSearch(model=Model(str(qwen)), readout="attention").check_look(Look(), 8)
    BlockSearch(model=Model("org/not-here-yet")).check_look(Look(layers=(99,)), 8)
    monkeypatch.setattr(diagnose, "BYTES", 8 * 4 * 4 * 5)
    assert at_once(8, Look(), 4, 4) == 5
    assert at_once(8, Look(heads=(0,)), 4, 4) == 20


def test_scores_of_documents_are_held_for_one_layer_only(qwen: Path) -> None:
    """What is kept of a query does not depend on how many documents there are."""
    sizes = []
    for count in (20, 200):
        retriever = made(qwen, [f"text {number}" for number in range(count)])
        cache, engine = retriever._corpus.cache, retriever._loaded()
        readings: list[Reading] = []
        engine.query_pass(cache, [retriever._prompt.query("text")], look=readings.append)
        diagnosis = Diagnosis(engine, cache, [[1]], retriever._words.digits, Look(), [None])
        for reading in readings:
            diagnosis(reading)
            held = [value for layers in diagnosis._seen.values() for layer in layers for value in layer]
            held += vars(diagnosis).values()
            assert not [value for value in held if isinstance(value, Tensor) and value.numel() >= count]
        (row,) = diagnosis.rows()
        sizes.append(len(str({key: value for key, value in row.items() if "rank" not in key})))
    assert abs(sizes[1] - sizes[0]) < 0.2 * sizes[0]
