"""The losses against a slow computation of their own, and their gradients against finite differences."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import Reference, hugging_face
from torch import Tensor

from icr_bench.benchmarks.examples import Batch
from icr_bench.retrievers.lm.backbone import load_backbone
from icr_bench.retrievers.lm.engine import Config
from icr_bench.retrievers.lm.prompt import Prompt, PromptSettings
from icr_bench.retrievers.training.dense import TEMPERATURE, DenseLearner
from icr_bench.retrievers.training.learner import Aids, Learner, Weights, targets

TinyModel = Callable[..., Path]

DOCUMENTS = [
    "Ada Fox likes Rivers and Oboes.",
    "Ben Gray likes Oboes.",
    "Cy Hill likes Kites, Rivers and Plums.",
    "Di Ives likes Plums.",
    "Ed Jay likes Kites and Looms.",
]
CODES = [1234, 1299, 570, 1254, 8000]
"""Of which three share a digit or two."""

BATCH = Batch(
    ["Who likes Rivers?", "Who likes Plums?", "Who likes Looms?"],
    DOCUMENTS,
    [[0, 2], [2, 3], [4]],
    [(10, 16), (10, 15), (10, 15)],
)
SCORES = np.array([[0.9, 0.2, 0.8, np.nan, 0.1], [0.1, np.nan, 0.7, 0.8, 0.3], [0.5, 0.4, np.nan, 0.1, 0.6]])
SCORED = replace(BATCH, scores=SCORES)
SETTINGS = PromptSettings(cap=80, offset=300, before="", after=" ")
TAU = 0.3


def make(model: Path, dtype: str = "float32", **options: Any) -> Learner:
    backbone, words, _ = load_backbone(str(model), dtype=dtype)
    torch.manual_seed(0)
    learner = Learner(backbone.requires_grad_(True), Prompt(words, SETTINGS, 4), tau=TAU, **options)
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if "probe" in name:
                parameter.normal_()
        for name in ("ssmax", "sink"):
            if (scalars := getattr(learner, name)) is not None:
                scalars.add_(torch.arange(len(scalars)) * 0.1)  # another one in every layer, so that a wrong one shows
    return learner


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", seed=3)


def digits_of(code: int) -> list[int]:
    return [int(digit) for digit in f"{code:04d}"]


def teacher(weights: list[float], path: list[int]) -> list[list[float]]:
    """The next digits that the documents on the path would take, by weight; none where none is on it."""
    found = []
    for place in range(4):
        shares, on = [0.0] * 10, 0.0
        for code, weight in zip(CODES, weights, strict=True):
            if digits_of(code)[:place] == path[:place]:
                shares[digits_of(code)[place]] += weight
                on += weight
        found.append([share / on for share in shares] if on else [])
    return found


def cross_entropy(wanted: list[list[float]], logs: Tensor) -> list[float]:
    """Of the digits that something is wanted of; logs are (4, 10)."""
    return [
        -sum(w * float(p) for w, p in zip(row, log, strict=True)) for row, log in zip(wanted, logs, strict=True) if row
    ]


class Slow:
    """One query at a time through the Hugging Face model, sums written out."""

    def __init__(self, learner: Learner, model: Path, config: Config) -> None:
        prompt, scalars = learner.prompt, {}
        for name in ("ssmax", "sink"):
            if (own := getattr(learner, name)) is not None:
                scalars[name] = tuple(own.tolist())
        self.learner, self.prompt = learner, prompt
        self.blocks = list(prompt.documents(DOCUMENTS, CODES))
        self.reference = Reference(hugging_face(model), self.blocks, replace(config, **scalars, blind=learner.blind))

    def logs(self, query: str, path: list[int]) -> Tensor:
        """(4, 10) log-probabilities of the digits before each of a path."""
        ids = self.prompt.tokenizer.digits
        return self.reference.run(self.prompt.query(query), [[ids[d] for d in path]])[0, :4, ids]

    def rollout(self, query: str) -> list[int]:
        path: list[int] = []
        for place in range(4):
            path.append(int(self.logs(query, path + [0] * (4 - place))[place].argmax()))
        return path

    def digits(self, rng: random.Random, batch: Batch) -> tuple[float, list[int]]:
        chosen = [rng.choice(golds) for golds in batch.golds]
        total = 0.0
        for query, golds, gold in zip(batch.queries, batch.golds, chosen, strict=True):
            path = digits_of(CODES[gold])
            wanted = teacher([float(number in golds) for number in range(5)], path)
            total += sum(cross_entropy(wanted, self.logs(query, path))) / 4 / 3
        return total, chosen

    def onpolicy(self, batch: Batch) -> float:
        total = 0.0
        for number, (query, golds) in enumerate(zip(batch.queries, batch.golds, strict=True)):
            given = [float(d in golds) for d in range(5)] if batch.scores is None else list(batch.scores[number])
            path = self.rollout(query)
            each = cross_entropy(
                teacher([0.0 if math.isnan(r) else math.exp(r / TAU) for r in given], path), self.logs(query, path)
            )
            total += sum(each) / len(each) / 3
        return total

    def aids(self, batch: Batch, chosen: list[int], aids: Aids) -> tuple[float, float]:
        """What attention and what codes cost."""
        reference, prompt = self.reference, self.prompt
        parts: dict[str, list[float]] = {}
        probed: list[list[float]] = [[], *([] for _ in aids.probes)]
        text = [
            (start + place, number)
            for number, (start, block) in enumerate(zip(reference.starts.tolist(), self.blocks, strict=True))
            for place in range(block.text, block.after)
        ]
        for query, golds, gold, (start, end) in zip(batch.queries, batch.golds, chosen, batch.focus, strict=True):
            block, path = prompt.query(query), digits_of(CODES[gold])
            reference.run(block, [[prompt.tokenizer.digits[digit] for digit in path]])
            offsets = prompt.tokenizer.encode_batch([query])[0].offsets
            focus = [block.text + i for i, (a, b) in enumerate(offsets) if a < end and b > start]
            rows = [("focus", place, golds, list[int]()) for place in focus] + [("last", len(block) - 1, golds, [])]
            for place in range(3):
                begun = [d for d in range(5) if digits_of(CODES[d])[: place + 1] == path[: place + 1]]
                rows.append(("digits", len(block) + place, [d for d in begun if d in golds], begun))
            q, k = (x[0] for x in reference.seen[aids.layer])
            k = k.repeat_interleave(len(q) // len(k), 0)
            scale = q.shape[-1] ** -0.5
            if reference.config.ssmax is not None:
                scale *= float(reference.config.ssmax[aids.layer]) * math.log(5)
            for name, row, right, begun in rows:
                products = torch.stack([q[h, len(reference.owner) + row] @ k[h].T for h in range(len(q))]) * scale
                soft = products[:, [t for t, _ in text]].softmax(-1).mean(0)
                of = [sum(float(s) for s, (_, d) in zip(soft, text, strict=True) if d == number) for number in range(5)]
                mass, among = sum(of[d] for d in right), sum(of[d] for d in begun)
                parts.setdefault(name, []).append(-math.log(mass + 1e-6))
                if len(begun) > len(right):  # others begin so too
                    told = -math.log(mass + 1e-6) + math.log(among + 1e-6)
                    parts.setdefault("rivals", []).append(told)
            q, k = (x[0, :, len(reference.owner) :] for x in reference.seen[aids.own or 0])  # of the query alone
            k = k.repeat_interleave(len(q) // len(k), 0)
            for place in range(len(block) - 1, len(block) + 3):
                soft = (q[:, place : place + 1] @ k[:, : place + 1].mT * q.shape[-1] ** -0.5).softmax(-1).mean(0)[0]
                parts.setdefault("looking", []).append(-math.log(float(soft[focus].sum()) + 1e-6))
            for layer in aids.maxsim:
                q, k = (x[0] for x in reference.seen[layer])
                k = k.repeat_interleave(len(q) // len(k), 0)
                for name, tokens in (("last", [len(block) - 1]), ("content", range(block.text, block.after))):
                    ranks = []
                    for number in range(5):
                        own = [t for t, d in text if d == number]
                        best = [
                            float((k[h, own] @ q[h, len(reference.owner) + token]).max())
                            for token in tokens
                            for h in range(len(q))
                        ]
                        ranks.append(sum(best) / len(tokens) * q.shape[-1] ** -0.5)
                    total = sum(math.exp(score) for score in ranks)
                    share = sum(math.exp(ranks[d]) for d in golds) / total
                    parts.setdefault(f"maxsim {name} {layer}", []).append(-math.log(share) / len(aids.maxsim))
            hidden = [state[0] for state in reference.hidden]
            for at, layer in enumerate(aids.probes):
                logs = self.learner.query_probes[at](hidden[layer][len(reference.owner) + focus[-1]])
                logs = logs.unflatten(0, (4, 10)).log_softmax(-1)
                probed[at + 1] += [-float(logs[place, digit]) for place, digit in enumerate(path)]
        assert self.learner.document_probe
        q, k = (x[0] for x in reference.seen[aids.gather or 0])
        k = k.repeat_interleave(len(q) // len(k), 0)
        for token, number in text:
            start = int(reference.starts[number])
            soft = (q[:, token : token + 1] @ k[:, start : token + 1].mT * q.shape[-1] ** -0.5).softmax(-1)[:, 0]
            code = [int(token_) for token_ in prompt.code(CODES[number])]
            at = self.blocks[number].ids.index(code[0])
            assert self.blocks[number].ids[at : at + 4] == code
            looked = [-math.log(float(soft[head, at + head % 4]) + 1e-6) for head in range(len(q))]
            parts.setdefault("gathering", []).append(sum(looked) / len(looked))
        for token, number in text:  # the documents' states are the same under every query
            logs = self.learner.document_probe(hidden[aids.layer][token]).unflatten(0, (4, 10)).log_softmax(-1)
            probed[0] += [-float(logs[place, digit]) for place, digit in enumerate(digits_of(CODES[number]))]
        means = {key: sum(values) / len(values) for key, values in parts.items()}
        digits = aids.digits * (means["digits"] + means["rivals"])
        attention = (means["focus"] + means["last"] + digits) / (2 + aids.digits)
        codes = sum(sum(values) / len(values) for values in probed) / len(probed)
        maxsim = sum(value for key, value in means.items() if key.startswith("maxsim"))
        looking = means["looking"] if aids.own is not None else 0
        gathering = means["gathering"] if aids.gather is not None else 0
        return attention + maxsim + looking, codes + gathering


AIDS = Aids(2, (3,), own=1, gather=1, digits=0.7)
MAXSIM = Aids(2, maxsim=(1, 3))

VARIANTS: dict[str, tuple[dict[str, Any], Weights, Config, Batch]] = {
    "offpolicy": ({}, Weights(), Config(), BATCH),
    "base": ({}, Weights(onpolicy=0.5), Config(), BATCH),
    "base, teacher scores": ({}, Weights(onpolicy=0.5), Config(), SCORED),
    "sink": ({"sink": 3.0}, Weights(onpolicy=0.5), Config(sink_n=700.0, sink_strength=0.6), BATCH),
    "ssmax": ({"ssmax": 0.43}, Weights(onpolicy=0.5), Config(), BATCH),
    "aids": ({"aids": AIDS, "blind": 2}, Weights(attention=0.7, probes=0.3), Config(), BATCH),
    "maxsim": ({"aids": MAXSIM, "ssmax": 0.43}, Weights(attention=0.7, probes=0.3), Config(), BATCH),
    "aids, ssmax": ({"aids": AIDS, "ssmax": 0.3}, Weights(0.5, 0.7, 0.3), Config(), SCORED),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_equals_a_slow_computation(model: Path, name: str) -> None:
    options, weights, config, batch = VARIANTS[name]
    learner = make(model, **options)
    with torch.no_grad():
        loss, told = learner(batch, CODES, weights, config, random.Random(5))
        slow = Slow(learner, model, config)
        expected, chosen = slow.digits(random.Random(5), batch)
        if weights.onpolicy:
            policy = slow.onpolicy(batch)
            assert float(told["onpolicy"]) == pytest.approx(policy, abs=1e-4)
            expected += weights.onpolicy * policy
        if learner.aids:
            attention, probes = slow.aids(batch, chosen, learner.aids)
            found = sum(float(told.get(name, 0)) for name in ("attention", "looking", "maxsim_last", "maxsim_content"))
            assert found == pytest.approx(attention, abs=1e-4)
            expected += weights.attention * attention
            if weights.probes:
                assert float(told["probes"] + told.get("gathering", 0)) == pytest.approx(probes, abs=1e-4)
                expected += weights.probes * probes
    assert float(loss) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(
    ("name", "recompute"), [*((name, False) for name in VARIANTS if name != "base"), ("aids, ssmax", True)]
)
def test_gradients_equal_finite_differences(model: Path, name: str, recompute: bool) -> None:
    """In float64, along a random direction through all parameters of each layer, and of everything else."""
    options, weights, config, batch = VARIANTS[name]
    learner = make(model, "float64", **options)

    def loss() -> Tensor:
        found: Tensor = learner(batch, CODES, weights, config, random.Random(5), recompute)[0]
        return found

    loss().backward()
    groups: dict[str, list[torch.nn.Parameter]] = {}
    for path, parameter in learner.named_parameters():
        groups.setdefault(".".join(path.split(".")[:3]), []).append(parameter)
    assert len(groups) >= 6
    generator = torch.Generator().manual_seed(1)
    for parameters in groups.values():
        ways = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
        gradients = [p.grad for p in parameters]
        expected = sum(float((g * way).sum()) for g, way in zip(gradients, ways, strict=True) if g is not None)
        step = 1e-6 / math.sqrt(sum(float(way.square().sum()) for way in ways))
        with torch.no_grad():
            values = []
            for sign in (1, -2, 1):
                values.append(float(loss()))
                for parameter, way in zip(parameters, ways, strict=True):
                    parameter.add_(way, alpha=sign * step)
        assert abs(expected) > 1e-4
        assert (values[1] - values[2]) / (2 * step) == pytest.approx(expected, rel=2e-4, abs=2e-4)


@pytest.mark.parametrize("name", ["base, teacher scores", "aids, ssmax"])
def test_order_of_documents_changes_nothing(model: Path, name: str) -> None:
    options, weights, config, batch = VARIANTS[name]
    learner = make(model, "float64", **options)
    order = [3, 0, 4, 2, 1]
    assert batch.scores is not None
    moved = replace(
        batch,
        documents=[DOCUMENTS[number] for number in order],
        golds=[[order.index(number) for number in golds] for golds in batch.golds],
        scores=batch.scores[:, order],
    )
    gradients = []
    for one, codes in ((batch, CODES), (moved, [CODES[number] for number in order])):
        learner.zero_grad()
        learner(one, codes, weights, config, random.Random(5))[0].backward()
        gradients.append([p.grad.clone() for p in learner.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(*gradients, strict=True))


def test_targets_of_a_prefix_that_no_document_has() -> None:
    digits = torch.tensor([digits_of(code) for code in CODES])
    shares, there = targets(torch.ones(1, 5), digits, torch.tensor([[1, 2, 7, 0]]))
    assert there.tolist() == [[True, True, True, False]]
    assert shares[0, 0].tolist() == pytest.approx([0.2, 0.6, 0, 0, 0, 0, 0, 0, 0.2, 0])
    assert shares[0, 2].tolist() == pytest.approx([0, 0, 0, 1 / 3, 0, 1 / 3, 0, 0, 0, 1 / 3])
    assert shares[0, 3].sum() == 0


def test_dense_gradients_are_the_same_when_layers_are_computed_again(model: Path) -> None:
    found = []
    for recompute in (False, True):
        backbone, words, _ = load_backbone(str(model))
        learner = DenseLearner(backbone.requires_grad_(True), Prompt(words, SETTINGS, 4), kl=0.5)
        learner(SCORED, CODES, Weights(), Config(), random.Random(5), recompute)[0].backward()
        found.append({name: p.grad for name, p in learner.named_parameters() if p.grad is not None})
    assert len(found[0]) > 20
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])


def test_dense_loss_equals_a_slow_computation(model: Path) -> None:
    backbone, words, _ = load_backbone(str(model))
    learner = DenseLearner(backbone, Prompt(words, SETTINGS, 4), kl=0.5)
    loss, told = learner(SCORED, CODES, Weights(), Config(), random.Random(5))

    reference = hugging_face(model)
    reference.set_attn_implementation("eager")

    def vector(text: str) -> Tensor:
        ids = torch.tensor([[*words.encode(text)[: SETTINGS.cap - 1], words.end]])
        with torch.no_grad():
            last = reference.model(ids).last_hidden_state[0, -1]
        return last / last.norm()

    vectors = [vector(text) for text in DOCUMENTS]
    rng = random.Random(5)
    chosen = [rng.choice(golds) for golds in SCORED.golds]
    infonce = kl = 0.0
    for query, golds, gold, given in zip(SCORED.queries, SCORED.golds, chosen, SCORES, strict=True):
        scores = [float(vector(query) @ one) / TEMPERATURE for one in vectors]
        against = [math.exp(s) for d, s in enumerate(scores) if d == gold or d not in golds]
        infonce -= (scores[gold] - math.log(sum(against))) / 3
        known = [d for d in range(5) if not math.isnan(given[d])]
        teacher_total = sum(math.exp(given[d] / TEMPERATURE) for d in known)
        student_total = sum(math.exp(scores[d]) for d in known)
        for d in known:
            share = math.exp(given[d] / TEMPERATURE) / teacher_total
            kl += share * (math.log(share) - scores[d] + math.log(student_total)) / 3
    assert float(told["infonce"]) == pytest.approx(infonce, abs=1e-3)
    assert float(told["kl"]) == pytest.approx(kl, abs=1e-3)
    assert float(loss) == pytest.approx(infonce + 0.5 * kl, abs=2e-3)
