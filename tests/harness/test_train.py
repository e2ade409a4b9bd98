"""``icr-bench train`` from a recipe to a model: resumed, killed, stuck, diverging, and on two processes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from icr_bench.harness import train as recipes
from icr_bench.harness.cli import main
from icr_bench.harness.errors import UsageError
from icr_bench.harness.sources import Data
from icr_bench.retrievers.base import Document
from icr_bench.retrievers.blocksearch import BlockSearch
from icr_bench.retrievers.dense import Dense
from icr_bench.retrievers.training import trainer
from icr_bench.retrievers.training.recipe import LOGGED, Stage
from icr_bench.retrievers.training.trainer import CHECKPOINT

RECIPE: dict[str, Any] = {
    "shape": {"layers": 3, "width": 32, "heads": 2, "mlp": 48, "vocabulary": 400},
    "prompt": {"cap": 200, "offset": 200, "before": "", "after": " "},
    "optimizer": "muon",
    "supervision": {"layer": 1, "own": 0, "gather": 0, "probes": [2], "maxsim": [1, 2]},
    "sink": 3.0,
    "log_every": 1,
    "save_every": 2,
    "check_every": 4,
    "held_out": 8,
    "stages": [
        {
            "steps": 4,
            "lr": [[0, 0.001], [4, 0.002]],
            "documents": 6,
            "jitter": 2,
            "queries": 4,
            "alphabets": 0.5,
            "attention": 0.5,
            "probes": 0.5,
            "data": [{"source": "biographies", "likes": [3, 6]}],
        },
        {
            "steps": 2,
            "lr": 0.001,
            "documents": [[0, 6], [2, 8]],
            "queries": 4,
            "onpolicy": [[0, 0], [2, 0.5]],
            "sink": 1.0,
            "data": [{"source": "biographies", "likes": [3, 6]}],
        },
    ],
}

DENSE: dict[str, Any] = {"supervision": None, "sink": None}
DENSE_STAGE: dict[str, Any] = {"attention": 0, "probes": 0, "alphabets": 0, "sink": 0}
"""What a dense model has no use for, left out."""


def recipe(folder: Path, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump({**RECIPE, **changes}))
    return str(file)


def stage(**changes: Any) -> list[dict[str, Any]]:
    return [{**RECIPE["stages"][0], "sink": 1.0, **changes}]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / CHECKPOINT)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of several threads differ in their last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A recipe with everything in it, and the folder of its undisturbed training."""
    folder = tmp_path_factory.mktemp("trained")
    told = recipe(folder, ssmax=0.3, routing_layer=1, blind=1)
    assert main(["train", told, "-o", str(folder / "out")]) == 0
    return told, folder / "out"


def test_trained_model_answers(trained: tuple[str, Path]) -> None:
    model = trained[1] / "model"
    told = json.loads((model / "blocksearch.json").read_text())
    assert (told["routing_layer"], told["blind"], len(told["ssmax"]), len(told["sink"])) == (1, 1, 3, 3)
    retriever = BlockSearch(model=str(model), ssmax=True, routing="last", routing_b=2)  # type: ignore[arg-type]
    retriever.load()
    retriever.index([Document(i, f"Ada likes {word}.") for i, word in enumerate(("Oboes", "Kites", "Plums"))])
    (ranking,) = retriever.search(["Who likes Kites?"], 3)
    assert sorted(ranking.numbers) == [0, 1, 2]
    assert retriever.settings()["ssmax"]["from"] == "weights"


def test_card_and_files_tell_what_was_done_and_nothing_of_the_machine(trained: tuple[str, Path]) -> None:
    model = trained[1] / "model"
    card = (model / "README.md").read_text()
    lines = [json.loads(line) for line in (trained[1] / "log.jsonl").read_text().splitlines()]
    assert f"peak memory {max(line['peak_bytes'] for line in lines) / 1e9:.1f} GB" in card
    for told in ("# recipe, seed 0", "start: new weights", "steps: 6; ", '"biographies"', "cut to 200 tokens"):
        assert told in card
    assert "`icr-bench train recipe --seed 0`" in card
    assert "the on-policy loss, SSMax, the additive sink" in card
    assert "at layer 0 an answer's tokens" in card
    assert "at layer 0 a document's text" in card
    assert "MaxSim at layers 1, 2 too" in card
    for flag in ("blind=0", "stages.attention=0", "stages.alphabets=0", "optimizer=adamw", "prompt.cap=300"):
        assert f"--set {flag}" in card
    for flag in ("shape.match=false", "stages.jitter=1"):
        assert f"--set {flag}" in card
    for file in ("README.md", "config.json", "blocksearch.json", "tokenizer_config.json"):
        assert str(trained[1].parent) not in (model / file).read_text()


def test_log_tells_every_step_and_the_losses_of_its_digits(trained: tuple[str, Path]) -> None:
    lines = [json.loads(line) for line in (trained[1] / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all({"digit1", "digit4", "right1", "loss", "lr", "tokens_per_s", "seconds"} <= line.keys() for line in lines)
    assert ["held_out_hit@1" in line for line in lines] == [False, False, False, True, False, True]
    assert all(0 <= line["held_out_hit@1"] <= 1 for line in lines if "held_out_hit@1" in line)


def test_resumed_training_equals_the_undisturbed_one_bit_by_bit(
    trained: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, whole = trained
    real = trainer.Trainer._one

    def interrupted(self: Any, *arguments: Any) -> Any:
        if self.step == 5:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(trainer.Trainer, "_one", interrupted)
    assert main(["train", told, "-o", str(tmp_path)]) == 130
    assert not same(weights(tmp_path), weights(whole))
    monkeypatch.undo()
    assert main(["train", told, "-o", str(tmp_path)]) == 0
    assert same(weights(tmp_path), weights(whole))
    for name in ("model.safetensors", "blocksearch.json", "tokenizer.json"):
        assert (tmp_path / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


KILLED = """
import os, signal, sys
from icr_bench.harness.cli import main
from icr_bench.retrievers.training import trainer

real, moment, calls = os.fsync, sys.argv[1], 0

def fsync(number):
    global calls
    calls += 1
    if calls == 2 and moment == "written":
        os.kill(os.getpid(), signal.SIGKILL)
    real(number)

def save_file(tensors, file, told):
    written(tensors, file, told)
    if calls == 1 and moment == "half":
        os.truncate(file, os.path.getsize(file) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

written, trainer.save_file, os.fsync = trainer.save_file, save_file, fsync
main(sys.argv[2:])
"""


@pytest.mark.parametrize("moment", ["half", "written"])
def test_killed_during_a_save_it_goes_on_as_if_nothing_had_happened(
    moment: str, trained: tuple[str, Path], tmp_path: Path
) -> None:
    """kill -9 while the second checkpoint is half written, and just before it takes the place of the first."""
    told, whole = trained
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, moment, "train", told, "-o", str(tmp_path)]
    assert subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    with safe_open(tmp_path / CHECKPOINT, "pt") as file:
        assert json.loads(file.metadata()["icr-bench"])["step"] == 2
    assert main(["train", told, "-o", str(tmp_path)]) == 0
    assert same(weights(tmp_path), weights(whole))


def test_save_that_fails_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = trainer.save_file, 0

    def full(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            arguments[1].write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        real(*arguments)

    monkeypatch.setattr(trainer, "save_file", full)
    told = recipe(tmp_path)
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(file.name for file in (tmp_path / "out").iterdir() if file.is_file()) == [CHECKPOINT, "log.jsonl"]
    calls = -1  # two checkpoints, then the model
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 1
    assert "the model cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "out" / "model").exists()
    monkeypatch.undo()
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 0
    assert load_file(tmp_path / "out" / "model" / "model.safetensors")


def test_log_that_cannot_be_written_stops_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = recipe(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "log.jsonl").symlink_to("/dev/full")
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path / 'out' / 'log.jsonl'}: cannot be written ([Errno 28]" in error


def test_log_whose_last_line_is_torn_is_gone_on_with(trained: tuple[str, Path], tmp_path: Path) -> None:
    shutil.copytree(trained[1], tmp_path / "out")
    log = tmp_path / "out" / "log.jsonl"
    log.write_text(log.read_text() + '{"step": 7, "los')
    shutil.rmtree(tmp_path / "out" / "model")
    assert main(["train", trained[0], "-o", str(tmp_path / "out")]) == 0
    assert log.read_bytes() == (trained[1] / "log.jsonl").read_bytes()


def test_diverging_training_stops_and_keeps_the_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = recipe(tmp_path, optimizer="adamw", stages=stage(lr=[[0, 0.001], [1, 0.001], [2, 1e30]]))
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "not a finite number at step" in error
    (file,) = (tmp_path / "out").glob("batch-*.json")
    assert str(file) in error.replace("\n", "")
    (batch,) = json.loads(file.read_text())
    assert {"queries", "documents", "golds", "codes", "loss"} <= batch.keys()
    assert all(x.isfinite().all() for x in weights(tmp_path / "out").values())


def test_all_batches_of_a_step_that_diverges_are_kept(tmp_path: Path) -> None:
    """One of several may have spoilt the sum of their gradients."""
    rates = [[0, 0.001], [1, 0.001], [2, 1e30]]
    told = recipe(tmp_path, optimizer="adamw", accumulate=3, stages=stage(lr=rates))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(torch.nan))
        assert main(["train", told, "-o", str(tmp_path / "out")]) == 1
    (file,) = (tmp_path / "out").glob("batch-*.json")
    assert len({json.dumps(batch["codes"]) for batch in json.loads(file.read_text())}) == 3


def test_steps_follow_the_schedules_of_their_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the losses, the gate, N_eff, and codes that are new every time."""
    seen: list[Any] = []
    real = trainer.Learner.forward

    def watched(self: Any, batch: Any, codes: Any, weights: Any, config: Any, *rest: Any) -> Any:
        seen.append((codes, weights, config))
        return real(self, batch, codes, weights, config, *rest)

    monkeypatch.setattr(trainer.Learner, "forward", watched)
    assert main(["train", recipe(tmp_path), "-o", str(tmp_path / "out")]) == 0
    assert [weights.onpolicy for _, weights, _ in seen] == [0, 0, 0, 0, 0, 0.25]
    assert [weights.attention for _, weights, _ in seen] == [0.5] * 4 + [0] * 2
    assert [config.sink_strength for *_, config in seen] == [0] * 4 + [1] * 2
    lengths = {config.sink_n for *_, config in seen}
    assert len(lengths) == 6
    assert all(128 <= length <= 5000 for length in lengths)
    assert len({tuple(sorted(codes)) for codes, *_ in seen}) == 6
    assert all(len(set(codes)) == len(codes) for codes, *_ in seen)


def test_codes_by_position_are_the_documents_numbers(tmp_path: Path) -> None:
    told = recipes.parse(recipe(tmp_path, codes="position", stages=stage(alphabets=0)))
    made = trainer.Trainer(told, Data(0, tmp_path, ()), tmp_path / "out")
    for step in range(3):
        batch, codes = made.batch(told.stages[0], step, step, random.Random(step))
        assert codes == list(range(len(batch.documents)))


def test_sink_learns_at_a_rate_of_its_own(tmp_path: Path) -> None:
    made = trainer.Trainer(recipes.parse(recipe(tmp_path)), Data(0, tmp_path, ()), tmp_path / "out")
    groups = [group for optimizer in made.optimizers for group in optimizer.param_groups]
    (own,) = (group for group in groups if group.get("fixed"))
    assert (own["fixed"], own["weight_decay"], len(own["params"])) == (1e-3, 0, 1)
    assert own["params"][0] is made.learner.sink  # type: ignore[union-attr]
    made.run()
    assert own["lr"] == 1e-3


def test_codes_given_twice_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "some_codes", lambda rng, count: [7] * count)
    assert main(["train", recipe(tmp_path, stages=stage(alphabets=0)), "-o", str(tmp_path / "out")]) == 1
    assert "two documents of a batch have the same code" in capsys.readouterr().err


def test_held_out_queries_whose_numbers_overflow_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def overflows(self: trainer.Trainer) -> float:
        raise FloatingPointError("keys are not finite")

    monkeypatch.setattr(trainer.Trainer, "held_out", overflows)
    assert main(["train", recipe(tmp_path), "-o", str(tmp_path / "out")]) == 1
    assert "step 4, held-out queries: keys are not finite" in capsys.readouterr().err
    assert weights(tmp_path / "out")


def test_progress_tells_the_time_that_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe(tmp_path), "-o", str(tmp_path / "out")]) == 0
    steps = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(steps) == 6
    assert all("min left, " in line and line.endswith(" tokens/s") for line in steps)


def test_logs_hold_only_what_gates_may_ask_for(trained: tuple[str, Path]) -> None:
    lines = [json.loads(line) for line in (trained[1] / "log.jsonl").read_text().splitlines()]
    about = {"step", "documents", "lr", "tokens_per_s", "seconds", "peak_bytes", "held_out_hit@1"}
    assert {name for line in lines for name in line} - about == set(LOGGED["blocksearch"])


def test_keys_of_a_recipe_can_be_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = recipe(tmp_path, exclude=[])
    changes = ["blind=1", "prompt.cap=100", "stages.jitter=1", "supervision=null", "stages.attention=0"]
    changes += ["stages.probes=0", "shape.match=false"]
    read = recipes.parse(told, changes)
    assert (read.blind, read.prompt.cap, read.prompt.offset, read.supervision) == (1, 100, 200, None)
    assert [one.jitter for one in read.stages] == [1, 1]
    flags = [flag for change in changes for flag in ("--set", change)]
    assert main(["train", told, "-o", str(tmp_path / "out"), *flags]) == 0
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "`icr-bench train recipe --seed 0 --set blind=1 --set prompt.cap=100 --set" in card
    assert "told the golds" not in card
    assert "W_q" not in card
    for change, problem in {
        "blind": "expected KEY=VALUE",
        "optimizer.kind=adamw": "holds no keys",
        "stages.steeps=3": "'steeps' is not known",
        "blind=[": "not YAML",
    }.items():
        assert main(["train", told, "-o", str(tmp_path / "out"), "--set", change]) == 2
        assert problem in capsys.readouterr().err


def test_every_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert recipes._device("auto") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert recipes._device("auto") == recipes._device("cuda") == "cuda:3"
    assert recipes._device("cuda:1") == "cuda:1"
    assert recipes._device("cpu") == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(UsageError, match="sees 4 CUDA devices"):
        recipes._device("auto")


def test_gate_stops_what_is_stuck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = recipe(tmp_path, stages=stage(gates=[{"by": 3, "right1": 1.1}]))
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 1
    assert "stuck: right1 is" in capsys.readouterr().err


def test_checkpoint_of_another_recipe_is_refused(
    trained: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe(tmp_path), "-o", str(trained[1])]) == 1
    assert "is of another recipe" in capsys.readouterr().err


def test_checkpoint_of_other_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = tmp_path / "examples.jsonl"

    def write(word: str) -> None:
        rows = [{"query": f"Which {word} is {i}?", "positives": [f"{word} {i}"], "negatives": []} for i in range(9)]
        examples.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("kite")
    data = [{"source": "examples", "path": str(examples)}]
    told = recipe(tmp_path, stages=stage(data=data, jitter=1, attention=0, probes=0), supervision=None)
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    write("plum")
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 1
    assert "is of another recipe, start or data" in capsys.readouterr().err


def test_checkpoint_of_other_weights_to_start_from_is_refused(
    trained: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = tmp_path / "start"
    shutil.copytree(trained[1] / "model", start)
    told = recipe(tmp_path, shape=None, start=str(start))
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 0
    moved = tmp_path / "moved"
    start.rename(moved)
    told = recipe(tmp_path, shape=None, start=str(moved))
    capsys.readouterr()
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 0
    assert "is there already" in capsys.readouterr().err
    extra = json.loads((moved / "blocksearch.json").read_text())
    (moved / "blocksearch.json").write_text(json.dumps(extra | {"sink": [1.0, 2.0, 3.0]}))
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 1
    assert "is of another recipe, start or data" in capsys.readouterr().err


def test_checkpoint_of_more_processes_is_refused(
    trained: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", trained[0], "-o", str(trained[1])]) == 1
    assert "is of 1 processes, not 2" in capsys.readouterr().err


def test_dense_training_makes_a_model_for_sentence_transformers(tmp_path: Path) -> None:
    told = recipe(tmp_path, method="dense", **DENSE, stages=stage(**DENSE_STAGE))
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 0
    made = trainer.Trainer(recipes.parse(told), Data(0, tmp_path, ()), tmp_path / "out")
    texts = ["Ada likes Oboes.", "Ben likes Kites, Plums and Rivers."]
    own = made.learner.vectors(texts)  # type: ignore[union-attr]
    dense = Dense(model=str(tmp_path / "out" / "model"))  # type: ignore[arg-type]
    dense.load()
    assert torch.allclose(torch.tensor(dense.encode(texts, "document")), own, atol=0.03)  # the file is in bfloat16


def test_lora_trains_an_adapter_that_adds_to_its_base(trained: tuple[str, Path], tmp_path: Path) -> None:
    base = trained[1] / "model"
    changes = {"shape": None, "start": str(base), "lora": {"rank": 4, "layers": [1, 2], "base": "bfloat16"}}
    told = recipe(tmp_path, **changes, stages=stage(lr=0.01))
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 0
    adapter = tmp_path / "out" / "model"
    assert not (adapter / "model.safetensors").exists()
    names = {name.split("lora_")[0] for name in load_file(adapter / "adapter_model.safetensors")}
    assert len(names) == 14
    assert all(".layers.1." in name or ".layers.2." in name for name in names)
    documents = [Document(i, f"Ada likes {word}.") for i, word in enumerate(("Oboes", "Kites", "Plums"))]

    def scores(**options: Any) -> list[float]:
        retriever = BlockSearch(**options)
        retriever.load()
        retriever.index(documents)
        return retriever.search(["Who likes Kites?"], 3)[0].scores

    alone = scores(model=str(base))
    assert scores(model=str(adapter)) != pytest.approx(alone, abs=1e-3)
    assert scores(model=str(adapter), base=str(base)) == scores(model=str(adapter))
    with pytest.raises(ValueError, match="is no adapter"):
        scores(model=str(base), base=str(base))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"learning_rate": 1}, "'learning_rate' is not known"),
    "unknown key of a stage": ({"stages": stage(steeps=3)}, "stages[0]: 'steeps' is not known"),
    "missing": ({"stages": [{"steps": 3}]}, "lr is missing"),
    "no number": ({"clip": "much"}, "clip is 'much'; expected float"),
    "ramp": ({"stages": stage(lr=[[3, 1], [1, 0]])}, "must grow"),
    "start and shape": ({"start": "org/model"}, "either start"),
    "neither": ({"shape": None}, "either start"),
    "ssmax without N": ({"ssmax": 0.4, "stages": stage(documents=2, jitter=2)}, "SSMax"),
    "sink that is not there": ({"sink": None}, "stages[1].sink needs"),
    "supervision that is not there": ({"supervision": None}, "needs supervision"),
    "routing": ({"routing": "last"}, "'routing' is not known"),
    "unknown source": ({"stages": stage(data=[{"source": "novels"}])}, "unknown source 'novels'"),
    "unknown option": ({"stages": stage(data=[{"source": "biographies", "liking": 3}])}, "unexpected keyword"),
    "lora from scratch": ({"lora": {"rank": 3}}, "nothing to add to"),
    "layer": ({"supervision": {"layer": 7}}, "layers 0 to 2"),
    "layer of MaxSim": ({"supervision": {"layer": 1, "maxsim": [1, 7]}}, "layers 0 to 2"),
    "routing layer": ({"routing_layer": 7}, "layers 0 to 2"),
    "blind layers": ({"blind": 3}, "blind: 3 of 3 layers"),
    "sink that never acts": ({"stages": stage(sink=0)}, "sink changes nothing"),
    "dense with codes": (
        {"method": "dense", **DENSE, "stages": stage(**DENSE_STAGE | {"alphabets": 0.5})},
        "no alphabets",
    ),
    "dense with SSMax": ({"method": "dense", **DENSE, "ssmax": 0.3}, "method dense has no ssmax"),
    "dense with the policy": (
        {"method": "dense", **DENSE, "stages": stage(**DENSE_STAGE, onpolicy=1)},
        "method dense has no onpolicy",
    ),
    "position with alphabets": ({"codes": "position"}, "alphabets draws random codes"),
    "negative rate": ({"stages": stage(lr=-1)}, "lr falls below 0"),
    "rate that is no number": ({"stages": stage(lr="high")}, "expected a number, or points"),
    "no queries": ({"stages": stage(queries=0)}, "queries must be 1 or more"),
    "one document": ({"stages": stage(documents=1)}, "documents falls to 1"),
    "jitter": ({"stages": stage(jitter=0)}, "jitter must be 1 or more"),
    "no data": ({"stages": stage(data=[])}, "data is empty"),
    "weight": ({"stages": stage(data=[{"source": "biographies", "weight": "much"}])}, "weight is 'much'"),
    "documents of a source": (
        {"stages": stage(data=[{"source": "biographies", "documents": "all"}])},
        "documents is 'all'; expected 2 or more",
    ),
    "gate without a step": ({"stages": stage(gates=[{"right1": 0.5}])}, "by must be a step of the stage, 1 to 4"),
    "gate after the end": ({"stages": stage(gates=[{"by": 5, "right1": 0.5}])}, "by must be a step of the stage"),
    "gate of nothing": ({"stages": stage(gates=[{"by": 2, "rihgt1": 0.5}])}, "'rihgt1' is not logged"),
    "no steps between logs": ({"log_every": 0}, "log_every must be 1 or more"),
    "no batch a step": ({"accumulate": 0}, "accumulate must be 1 or more"),
    "heads": ({"shape": {**RECIPE["shape"], "width": 30}}, "an even multiple of heads"),
    "likes that are no range": ({"stages": stage(data=[{"source": "biographies", "likes": 3}])}, "likes"),
    "likes of nothing": ({"stages": stage(data=[{"source": "biographies", "likes": [0, 0]}])}, "likes"),
}


@pytest.mark.parametrize("name", BAD)
def test_recipes_that_make_no_sense_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, message = BAD[name]
    assert main(["train", recipe(tmp_path, **changes), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out" / CHECKPOINT).exists()


def test_a_key_given_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(recipe(tmp_path))
    file.write_text(file.read_text() + "ssmax: 0.1\nssmax: 0.2\n")
    assert main(["train", str(file), "-o", str(tmp_path / "out")]) == 2
    assert f"recipe.yaml:{file.read_text().count(chr(10))}: not YAML: the key 'ssmax' is" in capsys.readouterr().err


def test_recipes_that_come_along_can_be_read_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "recipes"]) == 0
    names = capsys.readouterr().out.split()
    assert {"tiny-warm", "tiny-base", "tiny-ssmax", "dense-tiny", "qwen3-base"} <= set(names)
    for name in names:
        assert recipes.parse(name).steps > 0
        assert main(["describe", name]) == 0
        assert f"recipe {name}\n" in capsys.readouterr().out


def test_recipe_that_starts_from_another_has_it_trained_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes"
    recipe(folder, stages=stage(steps=2))
    (folder / "recipe.yaml").rename(folder / "first.yaml")
    recipe(folder, shape=None, start="first", stages=stage(steps=2))
    (folder / "recipe.yaml").rename(folder / "second.yaml")
    monkeypatch.setattr(recipes, "RECIPES", folder)
    assert main(["train", "second", "-o", str(tmp_path / "out"), "--seed", "3"]) == 0
    first = tmp_path / "first-seed3"
    assert (first / "model" / "model.safetensors").is_file()
    assert "first --seed 3" in (first / "model" / "README.md").read_text()
    second = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "- start: first, seed 3, 2 steps in 0 minutes\n" in second
    assert "- start: data of the start's stage 1: " in second
    assert "a start that was trained before" in second
    assert str(tmp_path) not in second + (tmp_path / "out" / "model" / "config.json").read_text()
    before = (first / CHECKPOINT).stat().st_mtime_ns
    assert main(["train", "second", "-o", str(tmp_path / "again"), "--seed", "3"]) == 0
    assert (first / CHECKPOINT).stat().st_mtime_ns == before  # taken as it is


def test_too_few_examples_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = tmp_path / "examples.jsonl"
    rows = [{"query": f"q{i}", "positives": [f"text {i}"], "negatives": []} for i in range(4)]
    examples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [{"source": "examples", "path": str(examples)}]
    told = recipe(tmp_path, stages=stage(data=data, queries=3, attention=0, probes=0))
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 2
    assert "4 distinct texts are too few for 6 documents" in capsys.readouterr().err


def test_more_queries_than_the_smallest_batch_has_documents_are_told_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch of examples has a document for each of its queries; only the last steps have too few."""
    examples = tmp_path / "examples.jsonl"
    rows = [{"query": f"q{i}", "positives": [f"text {i}"], "negatives": []} for i in range(20)]
    examples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [{"source": "examples", "path": str(examples)}]
    changes = {"data": data, "documents": [[0, 8], [4, 4]], "attention": 0, "probes": 0}
    told = recipe(tmp_path, stages=stage(**changes, jitter=1, queries=6))
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 2
    assert "4 documents are too few for 6 queries" in capsys.readouterr().err
    assert not (tmp_path / "out" / "log.jsonl").exists()


GRADIENTS = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from icr_bench.harness.sources import Data
from icr_bench.harness.train import parse
from icr_bench.retrievers.training.trainer import Trainer

told, out = parse(sys.argv[1]), Path(sys.argv[2])
trainer = Trainer(told, Data(told.seed, out, ()), out)
trainer.optimizers = []
kept = {}

def keep(parameters, most):
    kept.update({name: p.grad.clone() for name, p in trainer.learner.named_parameters() if p.grad is not None})
    return clip(trainer.learner.parameters(), most)

import torch.nn.utils as utils
clip, utils.clip_grad_norm_ = utils.clip_grad_norm_, keep
trainer._one(trainer._module(), *told.stage(5))
if trainer.rank == 0:
    save_file(kept, out / "gradients.safetensors")
"""


def test_two_processes_equal_one_that_accumulates(tmp_path: Path) -> None:
    """torch's data parallelism over gloo: the gradients of two processes with a batch each, and of one with both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    gradients = []
    for ranks, accumulate in ((1, 2), (2, 1)):
        told = recipe(tmp_path / f"{ranks}", accumulate=accumulate, ssmax=0.3)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", GRADIENTS, told, str(tmp_path / f"{ranks}")]
        environments = [{**os.environ, **shared, "WORLD_SIZE": f"{ranks}", "RANK": f"{rank}"} for rank in range(ranks)]
        processes = [subprocess.Popen(command, env=environment) for environment in environments]
        assert [process.wait(timeout=300) for process in processes] == [0] * ranks
        gradients.append(load_file(tmp_path / f"{ranks}" / "gradients.safetensors"))
    one, two = gradients
    assert len(one) > 30
    assert all(torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-6) for name in one)
    assert any(one[name].abs().max() > 1e-3 for name in one)


def processes(told: str, out: Path, program: str, ranks: int) -> dict[str, torch.Tensor]:
    """The gradients of the first of so many processes that train together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "WORLD_SIZE": f"{ranks}"}
    command = [sys.executable, "-c", program, told, str(out)]
    begun = [subprocess.Popen(command, env={**os.environ, **shared, "RANK": f"{rank}"}) for rank in range(ranks)]
    assert [process.wait(timeout=300) for process in begun] == [0] * ranks
    return load_file(out / "gradients.safetensors")


TOGETHER = """
from icr_bench.retrievers.training import dense

step = trainer.step * 2
pair = [trainer.batch(*told.stage(5), step + part, __import__("random").Random(0))[0] for part in (0, 1)]
asked = iter((pair[1], pair[0]))
dense._of_others = lambda vectors: trainer.learner.vectors(next(asked).documents)
trainer._one("""


def test_dense_models_of_two_processes_share_their_documents(tmp_path: Path) -> None:
    """Two processes with a batch each, and one that accumulates both and is given the other's documents each time."""
    changes = {"method": "dense", **DENSE}
    plain = {"jitter": 1, **DENSE_STAGE}
    alone, both = tmp_path / "alone", tmp_path / "both"
    stages = [RECIPE["stages"][0] | plain, RECIPE["stages"][1] | plain | {"onpolicy": 0}]
    one = processes(
        recipe(alone, **changes, stages=stages, accumulate=2), alone, GRADIENTS.replace("trainer._one(", TOGETHER), 1
    )
    two = processes(recipe(both, **changes, stages=stages), both, GRADIENTS, 2)
    assert len(one) > 20
    assert all(torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-6) for name in one)
    apart = processes(
        recipe(tmp_path / "apart", **changes, stages=stages, accumulate=2), tmp_path / "apart", GRADIENTS, 1
    )
    assert not all(torch.allclose(apart[name], two[name], rtol=1e-2, atol=1e-6) for name in apart)


def test_dense_models_of_several_processes_take_as_many_documents_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = recipe(tmp_path, method="dense", **DENSE, stages=stage(**DENSE_STAGE))
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 2
    assert "no jitter" in capsys.readouterr().err


@pytest.mark.slow
def test_dense_training_beats_its_start_on_held_out_queries_by_far(tmp_path: Path) -> None:
    """From a language model of Qwen3's architecture, on words that were never trained on."""
    from icr_bench.retrievers.training.dense import sentence_transformer
    from icr_bench.retrievers.weights import SHIPPED

    start = tmp_path / "start"
    shutil.copytree(SHIPPED / "tiny-base", start)
    sentence_transformer(start, 128, 400)
    stages = [
        {
            "steps": 200,
            "lr": [[0, 0.0], [20, 0.002], [200, 0.0001]],
            "documents": 48,
            "queries": 48,
            "recompute": True,
            "data": [{"source": "biographies", "likes": [3, 8]}],
        }
    ]
    changes = {"method": "dense", "shape": None, **DENSE, "start": str(start)}
    limits = {"prompt": {"cap": 200, "offset": 200, "before": "", "after": ""}, "save_every": 200, "check_every": 200}
    told = recipe(tmp_path, **changes, **limits, log_every=50, stages=stages)
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 0
    asked = Data(0, tmp_path, ()).held_out(64, 8)
    rights = []
    for model in (start, tmp_path / "out" / "model"):
        dense = Dense(model=str(model))  # type: ignore[arg-type]
        dense.load()
        dense.index([Document(number, text) for number, text in enumerate(asked.documents)])
        found = dense.search(asked.queries, 1)
        rights.append(sum(one.numbers[0] in golds for one, golds in zip(found, asked.golds, strict=True)))
    assert rights[0] < 24
    assert rights[1] > rights[0] + 16


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"golds": [[]] * 4}, "no document of the batch answers "),
        ({"golds": [[99]] * 4}, "golds [99] of "),
        ({"documents": ["the same"] * 6}, "two documents of a batch are equal"),
    ],
)
def test_a_batch_that_cannot_teach_stops_the_training(
    change: dict[str, Any],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the fourth step on; the checkpoint of the second is whole, and the training goes on from there."""
    take = trainer.Trainer.batch

    def spoilt(self: trainer.Trainer, stage: Stage, local: int, index: int, rng: random.Random) -> Any:
        if local == 3:
            source = self._sources[next(iter(self._sources))]
            monkeypatch.setattr(source, "batch", lambda *told: replace(type(source).batch(source, *told), **change))
        return take(self, stage, local, index, rng)

    told = recipe(tmp_path, stages=stage(jitter=1), check_every=100)
    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "batch", spoilt)
        assert main(["train", told, "-o", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert problem in error
    assert weights(tmp_path / "out")
    assert main(["train", told, "-o", str(tmp_path / "out")]) == 0
    assert "step 4/4" in capsys.readouterr().err
