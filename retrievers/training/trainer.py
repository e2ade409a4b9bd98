"""The loop: steps under a schedule, checkpoints that a crash cannot tear, a log, and gates that stop what is stuck."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as distributed
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from icr_bench.retrievers.lm.backbone import Backbone, load_backbone
from icr_bench.retrievers.lm.cache import CorpusCache, prefill
from icr_bench.retrievers.lm.decode import Beam, Codes, search
from icr_bench.retrievers.lm.engine import Config, Engine, check_layer
from icr_bench.retrievers.lm.lora import add_lora, round_bases, save_lora
from icr_bench.retrievers.lm.prompt import DIGITS, Prompt, Tokenizer
from icr_bench.retrievers.training.card import HELD_OUT, model_card
from icr_bench.retrievers.training.dense import DenseLearner, sentence_transformer
from icr_bench.retrievers.training.learner import Asked, Learner, Weights
from icr_bench.retrievers.training.optim import Muon
from icr_bench.retrievers.training.recipe import Recipe, Stage
from icr_bench.retrievers.training.scratch import new_backbone, new_tokenizer
from icr_bench.retrievers.weights import identify

SINK_LR, SINK_N0, SINK_MOST = 1e-3, 128.0, 5000.0
"""The sink's own learning rate, and the range of N_eff (facts 7.1)."""

CHECKPOINT, LOG, MODEL = "checkpoint.safetensors", "log.jsonl", "model"


class Stopped(Exception):
    """A training that cannot go on; the message says why and what is left."""


Report = Callable[[Mapping[str, Any]], None]

Taken = tuple[Asked, Sequence[int], Mapping[str, Tensor]]
"""A batch with its codes and losses."""


class Source(Protocol):
    """Makes the batch of a step from its number alone, so that training can resume anywhere."""

    def batch(self, step: int, queries: int, documents: int) -> Asked: ...


class Data(Protocol):
    """What a recipe's sources stand for."""

    def source(self, told: Mapping[str, Any]) -> Source:
        """The source with these options."""

    def held_out(self, queries: int, documents: int) -> Asked:
        """A batch of what is never trained on."""

    def texts(self) -> Iterable[str]:
        """What a new tokenizer is made from."""

    def identity(self) -> list[str]:
        """What tells the sources made so far from any others."""

    def summary(self) -> list[str]:
        """What they hold and what was kept out of them, a line each."""


class Trainer:
    """One training in one folder: begins, or goes on from the folder's checkpoint.

    Args:
        data: where batches come from.
        report: told of every logged step what the log holds.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Data,
        out: Path,
        device: str = "cpu",
        report: Report = lambda told: None,
    ) -> None:
        self.recipe, self.data, self.out, self.report = recipe, data, out, report
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        backbone, words, self.started = _begin(recipe, data)
        self.words = words
        if not 0 <= recipe.blind < backbone.depth:
            raise ValueError(f"blind: {recipe.blind} of {backbone.depth} layers; at least the last must see documents")
        if recipe.routing_layer is not None:
            check_layer("routing_layer:", recipe.routing_layer, backbone.depth)
        backbone.to(device).requires_grad_(recipe.lora is None)
        if recipe.lora:
            if not (adapted := self._adapted(backbone)):
                raise ValueError(f"lora: layers {recipe.lora.layers}: the model has layers 0 to {backbone.depth - 1}")
            add_lora(adapted.values(), recipe.lora.rank, recipe.lora.alpha, recipe.seed)
            if recipe.lora.base == "bfloat16":
                round_bases(backbone.stack())
        prompt = Prompt(words, recipe.prompt, DIGITS)
        self.learner: Learner | DenseLearner
        if recipe.method == "dense":
            uneven = any(stage.jitter != 1 or any("documents" in one for one in stage.data) for stage in recipe.stages)
            if self.world > 1 and uneven:
                raise ValueError(
                    "method dense on several processes takes as many documents on each: no jitter, and no "
                    "documents of a source"
                )
            self.learner = DenseLearner(backbone, prompt, recipe.kl)
        else:
            if aids := recipe.supervision:
                named = aids.layer, *aids.probes, aids.own, aids.gather, *aids.maxsim
                for layer in (layer for layer in named if layer is not None):
                    check_layer("supervision: layer", layer, backbone.depth)
            self.learner = Learner(
                backbone,
                prompt,
                ssmax=recipe.ssmax,
                sink=recipe.sink,
                aids=recipe.supervision,
                tau=recipe.tau,
                blind=recipe.blind,
            )
            self._carry(self.started)
        self.step = 0
        self.spent = 0.0  # seconds in earlier parts of this training
        self.means: dict[str, float] = {}
        self.optimizers = _optimizers(self.learner, recipe)
        self._sources: dict[str, Source] = {}
        for one in (one for stage in recipe.stages for one in stage.data):
            if _key(one) not in self._sources:
                self._sources[_key(one)] = data.source(_own(one))
        self._try_sources()
        begun = replace(recipe, start=identify(recipe.start)) if recipe.start else recipe
        told = [repr(begun), *data.identity()]
        self.identity = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
        out.mkdir(parents=True, exist_ok=True)
        if (out / CHECKPOINT).is_file():
            self._load()

    def _try_sources(self) -> None:
        """Ask every source for the smallest and the largest batch that the recipe will ask it for, so that what cannot
        be had is told before the first step."""
        for stage in self.recipe.stages:
            for one in stage.data:
                for most in (stage.documents.least() / stage.jitter, stage.documents.most()):
                    count = max(round(min(most, one.get("documents", math.inf))), 2)
                    _check(self._sources[_key(one)].batch(0, _queries(stage, count), count))

    def _adapted(self, backbone: Backbone) -> dict[int, nn.Module]:
        """The layers that LoRA adds to, by number."""
        assert self.recipe.lora
        first, last = self.recipe.lora.layers
        return {number: layer for number, layer in enumerate(backbone.stack()) if first <= number <= last}

    def _carry(self, started: Mapping[str, Tensor]) -> None:
        """Scalars that the model to start from has learned already."""
        for name in ("ssmax", "sink"):
            own = getattr(self.learner, name, None)
            if own is not None and name in started:
                own.data.copy_(started[name])

    def run(self) -> None:
        """Train to the last step, or to a stop.

        Raises:
            Stopped: a loss that is not a number, a gate that was not passed, or a disk that is full.
        """
        began, tokens = time.monotonic(), 0
        module = self._module()
        while self.step < self.recipe.steps:
            stage, local = self.recipe.stage(self.step)
            told, seen = self._one(module, stage, local)
            tokens += seen
            self.step += 1
            self.means = {name: value + 0.95 * (self.means.get(name, value) - value) for name, value in told.items()}
            last = self.step == self.recipe.steps
            line: dict[str, Any] = {}
            if self.step % self.recipe.log_every == 0 or last:
                elapsed = time.monotonic() - began
                line = {"step": self.step, **{k: round(v, 5) for k, v in self.means.items()}}
                line |= {"documents": stage.documents.at(local), "lr": stage.lr.at(local)}
                line |= {"tokens_per_s": round(tokens / elapsed), "seconds": round(self.spent + elapsed, 1)}
                line["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if self.step % self.recipe.check_every == 0 or last:
                try:
                    line |= {"step": self.step, "held_out_hit@1": self.held_out()}
                except FloatingPointError as error:
                    raise Stopped(f"step {self.step}, held-out queries: {error}; the checkpoint is whole") from None
            if line and self.rank == 0:
                self._log(line)
                self.report(line)
            self._gate(stage, local + 1)
            if self.step % self.recipe.save_every == 0 or last:
                self.save(self.spent + time.monotonic() - began)

    def _module(self) -> Any:
        """The learner, alone or as one of several processes (`torchrun`), each with batches of its own."""
        if self.world == 1:
            return self.learner
        if self.learner.backbone.device.type == "cuda":
            torch.cuda.set_device(self.learner.backbone.device)
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if self.learner.backbone.device.type == "cuda" else "gloo")
        return nn.parallel.DistributedDataParallel(self.learner, find_unused_parameters=True)

    def _together(self, told: dict[str, float]) -> dict[str, float]:
        """The mean over all processes, so that all log the same and stop together."""
        if self.world == 1:
            return told
        values = torch.tensor(list(told.values()), device=self.learner.backbone.device)
        distributed.all_reduce(values)
        return dict(zip(told, (values / self.world).tolist(), strict=True))

    def _one(self, module: Any, stage: Stage, local: int) -> tuple[dict[str, float], int]:
        """One step: the gradients' mean over all batches of all processes, then the optimisers."""
        recipe = self.recipe
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.get("fixed") or stage.lr.at(local)
        told: dict[str, float] = {}
        taken: list[Taken] = []
        for part in range(recipe.accumulate):
            index = (self.step * self.world + self.rank) * recipe.accumulate + part
            rng = random.Random(f"icr-bench step {recipe.seed} {index}")
            batch, codes = self.batch(stage, local, index, rng)
            weights = Weights(*(getattr(stage, name).at(local) for name in ("onpolicy", "attention", "probes")))
            n_eff = math.exp(rng.uniform(math.log(SINK_N0), math.log(SINK_MOST)))
            config = Config(sink_n=n_eff, sink_strength=stage.sink.at(local))
            whole = part == recipe.accumulate - 1 or self.world == 1
            with nullcontext() if whole else module.no_sync():
                loss, shown = module(batch, codes, weights, config, rng, stage.recompute)
                taken.append((batch, codes, shown))
                if not torch.isfinite(loss):
                    raise Stopped(self._saved(taken))
                (loss / recipe.accumulate).backward()
            for name, value in shown.items():
                told[name] = told.get(name, 0.0) + float(value) / recipe.accumulate
        tokens = int(told.pop("tokens") * recipe.accumulate * self.world)
        told = self._together(told)
        norm = nn.utils.clip_grad_norm_(self.learner.parameters(), recipe.clip)
        if not torch.isfinite(norm):
            raise Stopped(self._saved(taken))
        told["gradient"] = float(norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return told, tokens

    def batch(self, stage: Stage, local: int, index: int, rng: random.Random) -> tuple[Asked, list[int]]:
        """Queries, documents and codes of one batch."""
        chosen = rng.choices(stage.data, [one.get("weight", 1) for one in stage.data])[0]
        most = min(stage.documents.at(local), chosen.get("documents", math.inf))
        count = max(round(most * stage.jitter ** -rng.random()), 2)
        batch = self._sources[_key(chosen)].batch(index, _queries(stage, count), count)
        _check(batch)
        if self.recipe.codes == "position":
            codes = list(range(len(batch.documents)))
        elif rng.random() < stage.alphabets:
            codes = small_codes(rng, len(batch.documents))
        else:
            codes = some_codes(rng, len(batch.documents))
        if len(set(codes)) < len(codes):
            raise Stopped("two documents of a batch have the same code")
        return batch, codes

    @torch.no_grad()
    def held_out(self, queries: int = HELD_OUT) -> float:
        """hit@1 among few biographies, whose attributes training never sees."""
        learner = self.learner
        backbone, prompt = learner.backbone, learner.prompt
        rng = random.Random("icr-bench held out")
        batch = self.data.held_out(queries, self.recipe.held_out)
        if isinstance(learner, DenseLearner):
            first = (learner.vectors(batch.queries) @ learner.vectors(batch.documents).T).argmax(1).tolist()
            return _hits(first, batch)
        codes = list(range(len(batch.documents)))
        if self.recipe.codes == "random":
            codes = some_codes(rng, len(batch.documents))
        documents = list(prompt.documents(batch.documents, codes))
        cache = CorpusCache(list(prefill(backbone, documents, range(len(documents)))), codes, prompt.digits)
        engine = Engine(backbone, Config(ssmax=learner.ssmax, blind=learner.blind), prompt.settings.offset)
        state = engine.query_pass(cache, [prompt.query(query) for query in batch.queries])
        tree = Codes(codes, prompt.digits, backbone.device)
        found, *_ = search(engine, cache, tree, state, prompt.tokenizer.digits, Beam(5))
        return _hits(found[:, 0].tolist(), batch)

    def _gate(self, stage: Stage, local: int) -> None:
        for gate in stage.gates:
            if gate["by"] == local:
                for name, least in gate.items():
                    if name != "by" and not self.means.get(name, -math.inf) >= least:
                        raise Stopped(
                            f"stuck: {name} is {self.means.get(name, math.nan):.3f} at step {self.step}, "
                            f"and the recipe asks for {least} by then; start again with another seed"
                        )

    def finish(self, made: str, begun: Sequence[str], warm: Recipe | None = None) -> Path:
        """Write the model as any other loads: config.json, model.safetensors in bfloat16, its tokenizer, a card, and
        what `BlockSearch` reads beside them. The folder is there as a whole or not at all.

        Args:
            made: the command, for the card.
            begun: what the card says of the start.
            warm: the recipe that the start was trained by.

        Raises:
            Stopped: a disk that is full.
        """
        folder = self.out / MODEL
        if self.rank == 0:
            new = self.out / f"{MODEL}.new"
            shutil.rmtree(new, ignore_errors=True)
            try:
                new.mkdir()
                self._write(new, made, begun, warm)
                shutil.rmtree(folder, ignore_errors=True)
                new.replace(folder)
            except (OSError, SafetensorError) as error:
                raise Stopped(f"{new}: the model cannot be written ({error}); the last checkpoint is whole") from error
        if self.world > 1:
            distributed.barrier()  # who starts from this model finds it
        return folder

    def _write(self, folder: Path, made: str, begun: Sequence[str], warm: Recipe | None) -> None:
        backbone, recipe = self.learner.backbone, self.recipe
        if recipe.lora:
            assert recipe.start
            save_lora(folder, self._adapted(backbone), recipe.base or recipe.start, recipe.lora.rank, recipe.lora.alpha)
        else:
            self._save_model(folder)
        log = _lines(self.out / LOG)
        kept = [p for name, p in self.learner.named_parameters() if p.requires_grad and "probe" not in name]
        card = model_card(recipe, made, begun, self.data.summary(), sum(p.numel() for p in kept), warm, log)
        (folder / "README.md").write_text(card, encoding="utf-8")
        if isinstance(self.learner, DenseLearner):
            sentence_transformer(folder, backbone.embed_tokens.embedding_dim, recipe.prompt.cap)
            return
        told: dict[str, Any] = {"prompt": asdict(recipe.prompt)}
        for key in ("routing_layer", "routing_b", "blind"):
            if (value := getattr(recipe, key)) is not None:
                told[key] = value
        for name in ("ssmax", "sink"):
            scalars = getattr(self.learner, name)
            if scalars is not None:
                told[name] = [round(value, 6) for value in scalars.tolist()]
        (folder / "blocksearch.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    def _save_model(self, folder: Path) -> None:
        backbone = self.learner.backbone
        tensors = {f"model.{name}": t.to(torch.bfloat16).contiguous() for name, t in backbone.state_dict().items()}
        tensors["lm_head.weight"] = tensors.pop("model.lm_head.weight")
        if backbone.lm_head.weight is backbone.embed_tokens.weight:
            del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[backbone.config.model_type]
        config = backbone.config.to_dict() | {"architectures": [f"{name}ForCausalLM"], "dtype": "bfloat16"}
        del config["_name_or_path"]  # a folder of this machine
        (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        self.words.save(folder, ended=self.recipe.method == "dense")

    def _saved(self, taken: Sequence[Taken]) -> str:
        """Keep the batches of the step that went wrong, and say so."""
        file = self.out / f"batch-{self.step}{f'-process{self.rank}' if self.world > 1 else ''}.json"
        told = [
            {"queries": batch.queries, "documents": batch.documents, "golds": batch.golds, "codes": list(codes)}
            | {name: float(value) for name, value in shown.items()}
            for batch, codes, shown in taken
        ]
        try:
            file.write_text(json.dumps(told), encoding="utf-8")
            kept = f"its batches are in {file}"
        except OSError as error:
            kept = f"its batches could not be kept in {file} ({error})"
        return (
            f"the loss or its gradient is not a finite number at step {self.step}; {kept}, and the last checkpoint is "
            f"whole; lower lr"
        )

    def _log(self, line: Mapping[str, Any]) -> None:
        file = self.out / LOG
        try:
            with file.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        except OSError as error:
            raise Stopped(f"{file}: cannot be written ({error}); the last checkpoint is whole") from error

    def save(self, seconds: float) -> None:
        """Write the checkpoint beside the old one and put it in its place: whole, or not at all."""
        if self.rank:
            return
        learned = {name: p for name, p in self.learner.named_parameters() if p.requires_grad}
        names = {id(parameter): name for name, parameter in learned.items()}
        tensors = {f"model.{name}": parameter.detach() for name, parameter in learned.items()}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    tensors[f"optimizer.{key}.{names[id(parameter)]}"] = torch.as_tensor(value)
        told = {"step": self.step, "seconds": seconds, "means": self.means}
        told |= {"identity": self.identity, "processes": self.world}
        if wrong := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
            raise Stopped(f"{wrong[0]} is not finite at step {self.step}; the last checkpoint is whole; lower lr")
        new = self.out / f"{CHECKPOINT}.new"
        try:
            save_file({k: v.contiguous() for k, v in tensors.items()}, new, {"icr-bench": json.dumps(told)})
            with new.open("rb+") as file:
                os.fsync(file.fileno())
            new.replace(self.out / CHECKPOINT)
        except (OSError, SafetensorError) as error:
            new.unlink(missing_ok=True)
            told_step = f"{self.out}: the checkpoint of step {self.step} cannot be written ({error})"
            raise Stopped(f"{told_step}; the last one is whole") from error

    def _load(self) -> None:
        path = self.out / CHECKPOINT
        with safe_open(path, "pt") as file:
            told = json.loads(file.metadata()["icr-bench"])
            if told["identity"] != self.identity:
                raise Stopped(
                    f"{path} is of another recipe, start or data; give another folder, or remove it to begin again"
                )
            if told["processes"] != self.world:
                raise Stopped(f"{path} is of {told['processes']} processes, not {self.world}; their batches differ")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        names = {id(parameter): name for name, parameter in self.learner.named_parameters()}
        states: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if key.startswith("optimizer."):
                _, kind, name = key.split(".", 2)
                states.setdefault(name, {})[kind] = tensor
        for optimizer in self.optimizers:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                name = names[id(parameter)]
                parameter.data.copy_(tensors[f"model.{name}"])
                if name in states:  # AdamW keeps the count of its steps on the CPU
                    own = {kind: x if kind == "step" else x.to(parameter.device) for kind, x in states[name].items()}
                    optimizer.state[parameter] = own
        self.step, self.spent, self.means = told["step"], told["seconds"], told["means"]
        if self.rank == 0 and (self.out / LOG).is_file():  # what came after the checkpoint comes again
            kept = [line for line in _lines(self.out / LOG) if line["step"] <= self.step]
            new = self.out / f"{LOG}.new"
            new.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            new.replace(self.out / LOG)


def _lines(log: Path) -> list[dict[str, Any]]:
    """What a log holds, but for a last line that a crash has torn."""
    found = []
    for line in log.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def _queries(stage: Stage, documents: int) -> int:
    """Queries of a batch of so many documents, at most."""
    return max(1, min(stage.queries, int(documents * stage.per_document)))


def _own(source: Mapping[str, Any]) -> dict[str, Any]:
    """What of a source's entry is its own: not how often it is drawn, nor how many documents of it a batch may hold."""
    return {key: value for key, value in source.items() if key not in ("weight", "documents")}


def _key(source: Mapping[str, Any]) -> str:
    return json.dumps(_own(source), sort_keys=True)


def _check(batch: Asked) -> None:
    """Refuse a batch that cannot teach: no gold, an unknown document, or equal documents."""
    for query, golds in zip(batch.queries, batch.golds, strict=True):
        if not golds:
            raise Stopped(f"no document of the batch answers {query!r}")
        if not all(0 <= gold < len(batch.documents) for gold in golds):
            raise Stopped(f"golds {golds} of {query!r}: the batch has {len(batch.documents)} documents")
    if len(set(batch.documents)) < len(batch.documents):
        raise Stopped("two documents of a batch are equal, so that a code would name either")


def _hits(first: Sequence[int], batch: Asked) -> float:
    right = sum(number in golds for number, golds in zip(first, batch.golds, strict=True))
    return right / len(batch.queries)


def some_codes(rng: random.Random, count: int, digits: int = DIGITS) -> list[int]:
    """Distinct codes, uniformly."""
    return rng.sample(range(10**digits), count)


def small_codes(rng: random.Random, count: int, digits: int = DIGITS) -> list[int]:
    """Distinct codes of a small alphabet at each position, so that many documents share prefixes."""
    sizes = [1] * digits
    while math.prod(sizes) < 2 * count and min(sizes) < 10:
        place = rng.randrange(digits)
        sizes[place] = min(sizes[place] + 1, 10)
    if math.prod(sizes) < 2 * count:
        return some_codes(rng, count, digits)
    alphabets = [rng.sample(range(10), size) for size in sizes]
    codes: dict[int, None] = {}
    while len(codes) < count:
        codes[int("".join(str(rng.choice(alphabet)) for alphabet in alphabets))] = None
    return list(codes)


def _begin(recipe: Recipe, data: Data) -> tuple[Backbone, Tokenizer, dict[str, Tensor]]:
    """The model to train, its tokenizer, and what else the weights to start from carry."""
    if recipe.shape:
        serialized = new_tokenizer(data.texts(), recipe.shape.vocabulary)
        return *new_backbone(recipe.shape, serialized, recipe.seed), {}
    assert recipe.start
    backbone, words, path = load_backbone(recipe.start)
    extras = path / "blocksearch.json"
    told = json.loads(extras.read_text(encoding="utf-8")) if extras.is_file() else {}
    return backbone, words, {k: torch.tensor(told[k]) for k in ("ssmax", "sink") if k in told}


def _optimizers(learner: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices, rest, sink = list[Tensor](), list[Tensor](), list[Tensor]()
    for name, parameter in learner.named_parameters():
        if not parameter.requires_grad:
            continue
        if name == "sink":
            sink.append(parameter)
        elif parameter.ndim == 2 and name.startswith("backbone.layers"):
            matrices.append(parameter)
        else:
            rest.append(parameter)
    groups: list[dict[str, Any]] = [{"params": rest, "weight_decay": 0.0}]
    if sink:
        groups.append({"params": sink, "weight_decay": 0.0, "fixed": SINK_LR})
    if recipe.optimizer == "muon":
        adam = torch.optim.AdamW(groups, lr=0.0, betas=recipe.betas)
        return [Muon(matrices, 0.0, weight_decay=recipe.weight_decay), adam]
    groups.append({"params": matrices, "weight_decay": recipe.weight_decay})
    return [torch.optim.AdamW(groups, lr=0.0, betas=recipe.betas)]
