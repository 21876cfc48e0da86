"""What a run says of itself while it trains, when it ends early, and what launchers get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_train_run import Rows, cyclic_recipe, cyclic_target, new_head, trainer_of
from train_tools import tokenizer

from selfspec.errors import ConfigError, TrainingError
from selfspec.head import DraftHead
from selfspec.train.arguments import precise, trackers
from selfspec.train.decoding import Decoding, figures
from selfspec.train.distributed import chosen_strategy, connect, deepspeed_config, launched_world
from selfspec.train.measure import measure
from selfspec.train.recipe import Optimisation
from selfspec.train.run import train

torch.set_num_threads(1)


def cyclic_text(folder: Path) -> str:
    path = folder / "text.jsonl"
    lines = [" ".join(f"t{2 + (start + place) % 20}" for place in range(16)) for start in range(60)]
    path.write_text("".join(json.dumps({"text": f"{line} t{30 + n}"}) + "\n" for n, line in enumerate(lines)))
    return str(path)


def test_acceptance_is_decoded_while_training(tmp_path: Path) -> None:
    recipe = cyclic_recipe(
        "eagle", cyclic_text(tmp_path), tmp_path / "out",
        optimisation={"lr": 1e-2, "batch_tokens": 256, "max_steps": 6, "epochs": None},
        evaluation={"every": 0, "tokens": 200, "prompts": 2, "prompt_tokens": 8, "max_new_tokens": 12,
                    "decode_every": 2},
    )  # fmt: skip
    output = train(recipe, cyclic_target(), tokenizer(), progress=False)
    record = json.loads((output / "training.json").read_text())
    found = [entry for entry in record["history"] if "eval_tokens_per_round" in entry]
    assert [entry["step"] for entry in found] == [2, 4, 6]
    assert all(entry["eval_tokens_per_round"] == pytest.approx(1 + entry["eval_accepted_per_round"]) for entry in found)
    assert all("eval_accepted_1" in entry for entry in found)
    best = max(entry["eval_tokens_per_round"] for entry in found)
    assert record["results"]["decoding"]["tokens_per_round"] == pytest.approx(best), "the best head is the one kept"


class Figures:
    """Stands in for decoding: the figures of a run that gets worse."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.weights: list[dict[str, torch.Tensor]] = []

    def __call__(self, head: DraftHead) -> dict[str, Any]:
        self.weights.append(head.owned_state())
        value = self.values[len(self.weights) - 1]
        return {"tokens_per_round": value, "accepted_per_round": value - 1, "accepted_by_depth": [value - 1]}


def test_training_ends_when_tokens_per_round_no_longer_rise(tmp_path: Path) -> None:
    target = tiny.selfspec_target("llama")
    trainer = trainer_of(new_head("eagle", target), Rows(tiny.text(40, 24)), tmp_path)
    measured = Figures(1.5, 1.9, 1.8, 1.7, 3.0)
    trainer.add_callback(Decoding(trainer, measured, 2, 2, False))
    trainer.train()
    assert trainer.state.global_step == 8 and figures(trainer.state) == [1.5, 1.9, 1.8, 1.7]
    best = load_file(tmp_path / "best" / "model.safetensors")
    assert all(torch.equal(value, measured.weights[1][name]) for name, value in best.items())
    trainer.take(tmp_path / "best")
    assert all(torch.equal(value, trainer.head.owned_state()[name]) for name, value in best.items())


def test_a_run_that_diverges_stops(tmp_path: Path) -> None:
    head = new_head("eagle", tiny.selfspec_target("llama"))
    honest, calls = head.loss, []

    def rises(*args: Any) -> Any:
        calls.append(1)
        result = honest(*args)
        return type(result)(result.loss * (1 if len(calls) < 12 else 100), result.correct, result.seen)

    head.loss = rises  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"training diverges.*last good weights are in .*checkpoint-"):
        trainer_of(head, Rows(tiny.text(160, 24)), tmp_path).train()


def test_weights_that_are_no_numbers_are_not_saved_as_good(tmp_path: Path) -> None:
    trainer = trainer_of(new_head("eagle", tiny.selfspec_target("llama")), Rows(tiny.text(40, 24)), tmp_path)
    trainer.train()
    before = sorted(path.name for path in tmp_path.iterdir())
    with torch.no_grad():
        next(p for p in trainer.head.parameters() if p.requires_grad).fill_(float("nan"))
    trainer.state.global_step += 1
    with pytest.raises(TrainingError, match="last good weights are in"):
        trainer.stop_for_good("for a test")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_trackers_that_are_not_there_are_named() -> None:
    assert trackers([]) == ["none"]
    with pytest.raises(ConfigError, match="abacus is unknown or not installed"):
        trackers(["abacus"])


# What launchers get wrong


def test_strategies_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_strategy("auto", 1) == "single" and chosen_strategy("auto", 2) == "ddp"
    assert chosen_strategy("fsdp", 2) == "fsdp" and chosen_strategy("zero3", 1) == "zero3"
    with pytest.raises(ConfigError, match=r"fsdp, which needs several processes.*torchrun"):
        chosen_strategy("fsdp", 1)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert chosen_strategy("auto", 2) == "zero3"
    with pytest.raises(ConfigError, match="strategy is ddp, accelerate's configuration says zero3"):
        chosen_strategy("ddp", 2)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match=r"mixed_precision: 'no'"):
        chosen_strategy("auto", 2)


def test_deepspeed_that_would_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ConfigError, match=r"would ignore DeepSpeed; set use_cpu: false"):
        connect("cpu")


def test_accelerates_fsdp_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"optimisation\.strategy=fsdp"):
        connect("cpu")


def test_processes_without_an_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match=r"OMPI_COMM_WORLD_SIZE is 2.*each would train alone"):
        launched_world()


def test_deepspeed_settings_name_the_stage() -> None:
    assert [deepspeed_config(stage)["zero_optimization"]["stage"] for stage in (1, 2, 3)] == [1, 2, 3]


def test_measuring_counts_the_tokens_of_the_steps_it_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"batch_tokens": 128, "precision": "float32"}
    recipe = cyclic_recipe("eagle", cyclic_text(tmp_path), tmp_path / "out", optimisation=settings)
    with caplog.at_level("INFO", "selfspec"):
        found = measure(recipe, cyclic_target(), tokenizer(), steps=2, repeats=3)
    assert (found["kind"], found["precision"], found["dtype"], found["repeats"]) == ("eagle", "float32", "float32", 3)
    assert found["runs"].keys() == {"floor", "online", "offline"}
    for run in found["runs"].values():
        assert 0 < run["tokens"] <= 3 * 2 * 128 and run["peak_bytes"] > 0 and run["seconds"] > 0
        assert run["slowest"] <= run["tokens_per_s"] <= run["fastest"]
        assert run["slowest"] <= run["tokens"] / run["seconds"] <= run["fastest"], "a mean lies between its parts"
    assert found["runs"]["online"]["tokens"] == found["runs"]["offline"]["tokens"]
    assert not caplog.records, "the rows are made to be timed, and nobody asked for them"


def test_measuring_nothing_is_refused(tmp_path: Path) -> None:
    recipe = cyclic_recipe("eagle", cyclic_text(tmp_path), tmp_path / "out")
    with pytest.raises(ConfigError, match="0 x 8 steps"):
        measure(recipe, cyclic_target(), tokenizer(), repeats=0)


@pytest.mark.parametrize("amx", [True, False])
def test_precision_is_bfloat16_where_the_processor_multiplies_it(amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.train.arguments.cpu_has", lambda *names: amx and names == ("amx_bf16",))
    cpu = torch.device("cpu")
    assert precise(Optimisation(precision="auto"), cpu) is amx
    assert not precise(Optimisation(precision="float32"), cpu)
    assert precise(Optimisation(precision="bfloat16"), cpu)
