"""Training a head from a recipe to a folder, on tiny targets built in code."""

from __future__ import annotations

import copy
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset
from train_tools import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, TrainerCallback

from selfspec import recipes, registry
from selfspec.checkpoint import load_head
from selfspec.errors import ConfigError, DataError, TrainingError
from selfspec.head import DraftHead
from selfspec.target import Target
from selfspec.train import run
from selfspec.train.__main__ import main
from selfspec.train.arguments import training_arguments
from selfspec.train.callbacks import GradientGuard
from selfspec.train.data import collate, to_verified
from selfspec.train.distributed import connect
from selfspec.train.evaluate import evaluate
from selfspec.train.recipe import Optimisation, Recipe, load_recipe, make_recipe
from selfspec.train.resume import newest_checkpoint
from selfspec.train.run import Interrupted, train
from selfspec.train.schedule import Progress
from selfspec.train.steps import Begun, Steps, steps_of_run
from selfspec.train.trainer import HeadTrainer

torch.set_num_threads(1)
ELSEWHERE = {"mtp"}
"""Trained from layers that only some targets have; see test_heads_mtp.py."""
METHODS = [k for k in registry.kinds() if hasattr(registry.method(k), "config_class")
           and issubclass(registry.method(k), DraftHead) and k not in ELSEWHERE]  # fmt: skip
STEPWISE = [k for k in METHODS if not hasattr(registry.method(k).config_class, "block_size")]
"""Heads that read the newest places only; block drafters learn from longer text, in test_block_drafters_learn.py."""
ONE = "medusa"
"""The head of tests that are about the trainer: small and quick."""
each_method = pytest.mark.parametrize("kind", METHODS)


class Rows(Dataset[dict[str, Tensor]]):
    """Sequences in memory, where trainers want TrainingRows."""

    def __init__(self, ids: Tensor, learn: Tensor | None = None) -> None:
        self.ids, self.learn = ids, torch.ones_like(ids, dtype=torch.bool) if learn is None else learn
        self.lengths = [ids.shape[1]] * len(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[place], "learn": self.learn[place]}


def new_head(kind: str, target: Target, **options: Any) -> DraftHead:
    cls = registry.method(kind)
    head: DraftHead = cls.from_target(cls.config_class(**options), target, torch.Generator().manual_seed(0))
    return head


def trainer_of(
    head: DraftHead, rows: Any, folder: Path, held_out: Any = None, steps: Steps | None = None, **options: Any
) -> HeadTrainer:
    options = {"lr": 3e-3, "batch_tokens": 96, "epochs": 1.0, "precision": "float32", **options}
    settings = Optimisation(**options)
    args = training_arguments(settings, folder, torch.device("cpu"), 5, 4, 4 if held_out else 0, steps=steps)
    return HeadTrainer(head, rows, held_out, settings, args, show=False, steps=steps)


def digest(model: PreTrainedModel) -> float:
    return float(sum(p.detach().double().abs().sum() for p in model.parameters()))


# The trainer


@each_method
def test_only_the_head_trains(kind: str, tmp_path: Path) -> None:
    target = tiny.selfspec_target("gemma3")
    target.model.requires_grad_(True).train()
    before = digest(target.model)
    head = new_head(kind, target)
    start = {name: p.clone() for name, p in head.named_parameters()}
    trainer = trainer_of(head, Rows(tiny.text(16, 24)), tmp_path)
    trainer.train()
    assert digest(target.model) == before
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())
    assert not any(p.grad is not None for p in target.model.parameters())
    unchanged = [name for name, p in head.named_parameters() if torch.equal(p, start[name])]
    assert not unchanged
    saved = newest_checkpoint(tmp_path)
    assert saved is not None
    sizes = {p.name: p.stat().st_size for p in saved.iterdir()}
    own = sum(t.numel() * t.element_size() for t in head.owned_state().values())
    assert sizes["model.safetensors"] < own + 4096
    assert sizes["optimizer.pt"] < 2 * own + 65536
    loaded = load_head(saved, target)
    assert all(torch.equal(v, loaded.owned_state()[k]) for k, v in head.owned_state().items())


def test_a_head_that_holds_the_target_is_refused(tmp_path: Path) -> None:
    target = tiny.selfspec_target("llama")
    head = new_head(ONE, target)
    head.stolen = target.model.lm_head
    with pytest.raises(TrainingError, match=r"stolen\.weight"):
        trainer_of(head, Rows(tiny.text(4, 24)), tmp_path)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("stop", [3, 6, 9])
def test_resuming_repeats_bit_for_bit(stop: int, tmp_path: Path) -> None:
    """6 steps per epoch: stopped inside an epoch, at its end, and in the second one."""
    target, rows = tiny.selfspec_target("llama"), Rows(tiny.text(24, 24))
    options: dict[str, Any] = {"epochs": 2.0, "micro_tokens": 64, "batch_tokens": 128}
    whole = new_head(ONE, target)
    one = trainer_of(whole, rows, tmp_path / "whole", **options)
    one.train()
    assert one.state.global_step == 12
    parted = new_head(ONE, target)
    other = trainer_of(parted, rows, tmp_path / "parted", **options)
    other.add_callback(StopAt(stop))
    other.train()
    # The flag is looked at once a step, so the step after the signal is still done.
    assert other.stopping.interrupted and stop <= other.state.global_step <= stop + 1
    found = newest_checkpoint(tmp_path / "parted")
    assert found is not None
    again = new_head(ONE, target)
    trainer_of(again, rows, tmp_path / "parted", **options).train(resume_from_checkpoint=str(found))
    for name, value in whole.owned_state().items():
        assert torch.equal(value, again.owned_state()[name]), name


def test_one_process_goes_on_with_the_batches_of_two(tmp_path: Path) -> None:
    """Two processes share 128 tokens as two batches of 64; one alone would read one batch of 128."""
    target, rows = tiny.selfspec_target("llama"), Rows(tiny.text(24, 24))
    options: dict[str, Any] = {"batch_tokens": 128}
    whole = new_head(ONE, target)
    trainer_of(whole, rows, tmp_path / "whole", micro_tokens=64, **options).train()
    head = new_head(ONE, target)
    begun = trainer_of(head, rows, tmp_path / "parted", steps=Steps.of(Optimisation(batch_tokens=128), 2), **options)
    begun.add_callback(StopAt(3))
    begun.train()
    found = newest_checkpoint(tmp_path / "parted")
    assert found is not None
    with pytest.raises(
        TrainingError, match=r"Steps\(tokens=64, batches=2\), this one has Steps\(tokens=128, batches=1\)"
    ):
        trainer_of(new_head(ONE, target), rows, tmp_path / "other", **options).train(resume_from_checkpoint=str(found))
    again = new_head(ONE, target)
    steps = steps_of_run(found, begun.settings, 1, "single")
    trainer = trainer_of(again, rows, tmp_path / "parted", steps=steps, **options)
    trainer.train(resume_from_checkpoint=str(found))
    assert trainer.state.global_step == 6
    for name, value in whole.owned_state().items():
        assert torch.equal(value, again.owned_state()[name]), name


def left_by(folder: Path, processes: int, strategy: str) -> Path:
    begun = Begun(1.5, processes, strategy, Steps(1000, 4))
    (folder / "progress.json").write_text(json.dumps(begun.to_dict()))
    return folder


@pytest.mark.parametrize(
    ("processes", "strategy", "now", "under", "says"),
    [
        (4, "ddp", 1, "single", ""),
        (1, "single", 8, "ddp", ""),
        (4, "fsdp", 2, "fsdp", ""),
        (4, "zero2", 4, "zero2", ""),
        (4, "ddp", 3, "ddp", "which 3 processes cannot share"),
        (4, "zero2", 2, "zero2", "go on as it was begun"),
        (4, "fsdp", 4, "ddp", r"4 process\(es\) under the strategy fsdp, and 4 under ddp"),
    ],
)
def test_who_may_go_on_with_a_checkpoint(
    processes: int, strategy: str, now: int, under: str, says: str, tmp_path: Path
) -> None:
    checkpoint = left_by(tmp_path, processes, strategy)
    if not says:
        assert steps_of_run(checkpoint, Optimisation(), now, under) == Steps(1000, 4)
        return
    with pytest.raises(ConfigError, match=says):
        steps_of_run(checkpoint, Optimisation(), now, under)


@pytest.mark.parametrize("held", ['{"seconds": 1.5}', "", "null", '{"cut', None])
def test_a_checkpoint_of_another_version_or_without_its_progress_is_refused(held: str | None, tmp_path: Path) -> None:
    if held is not None:
        (tmp_path / "progress.json").write_text(held)
    with pytest.raises(ConfigError, match="another version of selfspec"):
        steps_of_run(tmp_path, Optimisation(), 1, "single")


def test_broken_checkpoints_are_passed_over(tmp_path: Path) -> None:
    for step, state in ((4, "{}"), (8, '{"cut'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").touch()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-4"


@each_method
def test_accumulation_weighs_by_tokens(kind: str, tmp_path: Path) -> None:
    """Rows with little to learn count little: four small passes give the gradient of one big one."""
    target, ids = tiny.selfspec_target("llama"), tiny.text(4, 24)
    learn = torch.arange(24) < torch.tensor([[24], [3], [10], [0]])
    heads = [new_head(kind, target) for _ in range(2)]
    for place, (head, micro) in enumerate(zip(heads, (0, 32), strict=True)):
        options = {"batch_tokens": 128, "micro_tokens": micro, "lr": 1.0, "warmup": 0.0, "grad_clip": 0.0}
        trainer = trainer_of(head, Rows(ids, learn), tmp_path / str(place), **options)
        trainer.optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        trainer.train()
        assert trainer.state.global_step == 1
    for (name, one), other in zip(heads[0].named_parameters(), heads[1].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), name


@each_method
def test_nothing_to_learn_is_no_loss(kind: str, tmp_path: Path) -> None:
    target, ids = tiny.selfspec_target("llama"), tiny.text(4, 24)
    head = new_head(kind, target)
    before = head.owned_state()
    trainer = trainer_of(head, Rows(ids, torch.zeros_like(ids, dtype=torch.bool)), tmp_path, batch_tokens=96)
    result = trainer.train()
    assert result.training_loss == 0
    assert all(torch.equal(v, before[k]) for k, v in head.owned_state().items())


def test_a_loss_that_is_no_number_stops(tmp_path: Path) -> None:
    target = tiny.selfspec_target("llama")
    head = new_head(ONE, target)
    honest, calls = head.loss, []

    def breaks(*args: Any) -> Any:
        calls.append(1)
        result = honest(*args)
        return result if len(calls) < 7 else not_a_number(result)

    head.loss = breaks  # type: ignore[method-assign]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(TrainingError, match="loss is not finite at step 7"):
        trainer_of(head, Rows(tiny.text(40, 24)), tmp_path).train()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.name == "checkpoint-6"
    assert all(
        torch.isfinite(v).all() for v in load_head(found, target).owned_state().values() if v.is_floating_point()
    )


def not_a_number(result: Any) -> Any:
    return type(result)(result.loss * float("nan"), result.correct, result.seen)


def test_a_gradient_that_is_no_number_stops(tmp_path: Path) -> None:
    target = tiny.selfspec_target("llama")
    head = new_head(ONE, target)
    first = next(p for p in head.parameters() if p.requires_grad)
    first.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(TrainingError, match="gradient is not finite at step 1"):
        trainer_of(head, Rows(tiny.text(4, 24)), tmp_path).train()
    assert all(torch.isfinite(p).all() for p in head.parameters())


def test_gradients_out_of_sight_are_not_judged(tmp_path: Path) -> None:
    """DeepSpeed leaves no gradients on the parameters."""
    trainer = trainer_of(new_head(ONE, tiny.selfspec_target("llama")), Rows(tiny.text(4, 24)), tmp_path)
    GradientGuard(trainer).on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)


def test_held_out_numbers_do_not_depend_on_batches(tmp_path: Path) -> None:
    target, rows = tiny.selfspec_target("llama"), Rows(tiny.text(12, 24))
    head = new_head(ONE, target)
    numbers = [trainer_of(head, rows, tmp_path, rows, batch_tokens=size).measure() for size in (32, 400)]
    assert numbers[0].keys() >= {"eval_loss", "eval_accuracy_1"}
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


# The schedule


def test_schedule_by_steps() -> None:
    progress = Progress(Optimisation(warmup=0.1, min_lr=0.1, schedule="cosine"), 100)
    factors = [progress.factor(step) for step in range(101)]
    assert 0 < factors[0] < factors[9] < 1 and factors[10] == pytest.approx(1.0)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0.1)
    assert factors[55] == pytest.approx(0.55)
    assert Progress(Optimisation(warmup=0.0, schedule="constant"), 10).factor(9) == 1
    assert Progress(Optimisation(warmup=0.0, min_lr=0.0, schedule="linear"), 10).factor(5) == pytest.approx(0.5)


def test_schedule_by_the_clock() -> None:
    progress = Progress(Optimisation(max_minutes=2.0, epochs=None, warmup=0.1, min_lr=0.0), None)
    progress.begin(seconds_before=60.0)
    assert progress.share(3) == pytest.approx(0.5, abs=0.01)
    assert Progress(Optimisation(max_minutes=2.0, epochs=None, warmup=0.1), None).factor(0) == pytest.approx(0.05)
    progress.clock_share = 1.2
    assert progress.share(3) == 1.0 and progress.factor(3) == pytest.approx(0.0)
    with pytest.raises(ConfigError, match="no end"):
        Progress(Optimisation(epochs=None), None)


def test_minutes_end_the_training(tmp_path: Path) -> None:
    head = new_head(ONE, tiny.selfspec_target("llama"))
    trainer = trainer_of(head, Rows(tiny.text(8, 24)), tmp_path, epochs=None, max_minutes=0.01)
    trainer.train()
    assert 0.6 <= trainer.progress.seconds < 5
    assert trainer.state.global_step > 1 and not trainer.stopping.interrupted


# Recipes


def test_recipe_errors_name_the_key(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("draft: {kind: eagle}\noptimisation: {lr: 1.0e-3}\n")
    assert load_recipe(path, ["optimisation.lr=3e-4", "data.0.max_tokens=7"]).data[0].max_tokens == 7
    for override, parts in {
        "optimisation.lrr=1": ["optimisation.lrr", "did you mean 'lr'"],
        "optimizer.lr=1": ["optimizer", "did you mean 'optimisation'"],
        "data.0.max_token=1": ["data.0.max_token", "did you mean 'max_tokens'"],
        "draft.hidden_sizes=2": ["draft.hidden_sizes", "did you mean 'hidden_size'"],
        "draft.draft_vocab_size=2": ["vocabulary.size"],
        "draft.kind=nothing": ["no draft method", ONE],
        "optimisation.lr=fast": ["optimisation.lr", "fast"],
        "optimisation.schedule=wavy": ["optimisation.schedule", "cosine"],
        "optimisation.epochs=null": ["no end"],
        "data=[]": ["no data"],
        "data.0.weight=0": ["weight"],
        "data.0.mode=read": ["'read'"],
        "evaluation.max_new_tokens=0": ["evaluation.max_new_tokens", "at least 1"],
        "evaluation.prompt_tokens=0": ["evaluation.prompt_tokens", "at least 1"],
        "evaluation.prompts=-1": ["evaluation.prompts", "at least 0"],
        "optimisation.max_steps=0": ["optimisation.max_steps", "at least 1"],
        "vocabulary.size=-1": ["vocabulary.size", "at least 0"],
        "log_every=0": ["log_every is 0"],
        "save_every=0": ["save_every is 0"],
        "lr": ["key=value"],
    }.items():
        with pytest.raises(ConfigError) as error:
            load_recipe(path, [override])
        assert all(part in str(error.value) for part in parts), f"{override}: {error.value}"


def test_recipe_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        load_recipe(recipes.names()[0][:-1])
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not a readable YAML"):
        load_recipe(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="keys and values"):
        load_recipe(tmp_path / "list.yaml")


def test_untrained_methods_have_no_recipe() -> None:
    for kind in set(registry.kinds()) - set(METHODS) - ELSEWHERE:
        with pytest.raises(ConfigError, match="no weights to train"):
            make_recipe({"draft": {"kind": kind}})


@pytest.mark.parametrize("name", recipes.names())
def test_shipped_recipes(name: str) -> None:
    recipe = load_recipe(name)
    header = [line for line in recipes.path(name).read_text().splitlines() if line.startswith("#")]
    for field in ("command:", "hardware:", "minutes:", "result:"):
        assert any(line.startswith(f"# {field}") for line in header), field
    assert f"selfspec train {name}" in "\n".join(header)
    assert recipe.draft["kind"] in METHODS
    assert make_recipe(recipe.to_dict()) == recipe


# The whole run


def cyclic_target() -> PreTrainedModel:
    """Knows one thing: token t is followed by t + 1 up to 21, then by 2."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            bos_token_id=1, eos_token_id=None, pad_token_id=0, max_position_embeddings=256,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(120):
            ids = cycle(8, 24, generator)
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    return model.eval()


def cycle(batch: int, length: int, generator: torch.Generator) -> Tensor:
    start = torch.randint(20, (batch, 1), generator=generator)
    ids = 2 + (start + torch.arange(length - 1)) % 20
    return torch.cat([torch.ones(batch, 1, dtype=torch.long), ids], 1)


@pytest.fixture(scope="module")
def cyclic() -> PreTrainedModel:
    return cyclic_target()


@pytest.fixture(scope="module")
def cyclic_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "cycle.jsonl"
    rows = cycle(200, 24, torch.Generator().manual_seed(1))[:, 1:]
    lines = {" ".join(f"t{t}" for t in row[: 12 + i % 11]) for i, row in enumerate(rows.tolist())}
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in sorted(lines)))
    return str(path)


def cyclic_recipe(kind: str, text: str, output: Path, **options: Any) -> Recipe:
    return make_recipe(
        {
            "draft": {"kind": kind},
            "data": [{"source": text, "length": 32, "max_tokens": 4000}],
            "store_features": True,
            "vocabulary": {"size": 40},
            "optimisation": {"lr": 1e-2, "batch_tokens": 512, "epochs": 15},
            "evaluation": {"every": 50, "tokens": 600, "prompts": 4, "prompt_tokens": 12, "max_new_tokens": 40},
            "output": str(output),
            **options,
        }
    )


@pytest.mark.parametrize("kind", [ONE, *(pytest.param(k, marks=pytest.mark.nightly) for k in STEPWISE if k != ONE)])
def test_a_head_learns_a_cyclic_language(kind: str, cyclic: PreTrainedModel, cyclic_text: str, tmp_path: Path) -> None:
    """Accuracy of each depth on text and acceptance at decoding agree: both nearly perfect."""
    output = train(cyclic_recipe(kind, cyclic_text, tmp_path / "out"), cyclic, tokenizer(), progress=False)
    record = json.loads((output / "training.json").read_text())
    assert min(v for k, v in record["results"].items() if k.startswith("eval_accuracy")) > 0.9
    target = Target(cyclic)
    head = load_head(output, target)
    texts = cycle(12, 30, torch.Generator().manual_seed(5))
    mask = (torch.arange(29) > 8).expand(12, -1)  # the first token of a cycle cannot be foreseen
    loss = head.loss(to_verified(collate([{"input_ids": t, "learn": t > 1} for t in texts]), head.needs, target), mask)
    assert (loss.correct / loss.seen).min() > 0.99, loss
    decoding = evaluate(cyclic, tokenizer(), head, texts[:, :12].tolist(), 200)
    trained = decoding["accepted_by_depth"][: len(loss.seen)]
    assert min(trained) > 0.94, decoding  # the last round of each prompt is cut short
    assert set(head.output.vocab.ids.tolist()) >= {*range(2, 22), 96}
    assert not (output / "checkpoints").exists()
    assert record["minutes"]["train"] > 0 and record["data"] and record["recipe"]["draft"]["kind"] == kind


def test_runs_are_reused_or_refused(cyclic: PreTrainedModel, cyclic_text: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimisation": {"max_steps": 3}, "evaluation": {"prompts": 0, "tokens": 300}}
    recipe = cyclic_recipe(ONE, cyclic_text, tmp_path / "out", **options)
    weights = train(recipe, cyclic, tokenizer(), progress=False) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    train(recipe, cyclic, tokenizer(), progress=False)
    assert weights.stat().st_mtime_ns == written
    options["optimisation"] = {"max_steps": 4}
    other = cyclic_recipe(ONE, cyclic_text, tmp_path / "out", **options)
    with pytest.raises(ConfigError, match=r"optimisation.max_steps is 3 there and 4 now"):
        train(other, cyclic, tokenizer(), progress=False)
    other.restart = True
    train(other, cyclic, tokenizer(), progress=False)
    assert weights.stat().st_mtime_ns != written


def test_a_recipe_learns_from_logits_that_it_stores(cyclic: PreTrainedModel, cyclic_text: str, tmp_path: Path) -> None:
    """Three stored tokens at each place give the losses of the output head with `teacher_top_k: 3`."""
    found = []
    for name, known, top_k in (("stored", 3, 0), ("asked", 0, 3)):
        recipe = cyclic_recipe(
            ONE, cyclic_text, tmp_path / name,
            draft={"kind": ONE, "loss": "reverse_kl", "teacher_top_k": top_k}, vocabulary={"size": 0},
            data=[{"source": cyclic_text, "length": 32, "max_tokens": 2000, "top_logits": known}],
            optimisation={"max_steps": 4, "batch_tokens": 512, "precision": "float32"}, store_features=False,
            evaluation={"prompts": 0, "tokens": 300}, log_every=1,
        )  # fmt: skip
        train(recipe, cyclic, tokenizer(), progress=False)
        record = json.loads((tmp_path / name / "training.json").read_text())
        found.append([entry["loss"] for entry in record["history"] if "loss" in entry])
    assert found[0] == pytest.approx(found[1], rel=1e-4) and len(found[0]) == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"among the 40 of a draft vocabulary; set vocabulary\.size=0"),
        ({"vocabulary": {"size": 0}, "draft": {"kind": "medusa-2"}}, "medusa-2 changes the target"),
        ({"data": [{"top_logits": 3}, {"top_logits": 4}]}, r"top_logits \[3, 4\]; set one for all"),
    ],
)
def test_logits_that_teach_nothing_are_refused_before_text_is_made(
    options: dict[str, Any], says: str, cyclic: PreTrainedModel, cyclic_text: str, tmp_path: Path
) -> None:
    data = [{"source": cyclic_text, "top_logits": 3}]
    recipe = cyclic_recipe(ONE, cyclic_text, tmp_path / "out", **{"data": data, **options})
    with pytest.raises(ConfigError, match=says):
        train(recipe, cyclic, tokenizer(), progress=False)
    assert not (tmp_path / "out" / "data").exists()


def test_text_of_another_dtype_does_not_stand_in_the_way(
    cyclic: PreTrainedModel, cyclic_text: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    for dtype in (torch.float32, torch.bfloat16):
        options: dict[str, Any] = {"optimisation": {"max_steps": 1}, "evaluation": {"prompts": 0, "tokens": 300}}
        recipe = cyclic_recipe(ONE, cyclic_text, tmp_path / str(dtype), data_folder=str(data), **options)
        train(recipe, copy.deepcopy(cyclic).to(dtype), tokenizer(), progress=False)
    assert len(list(data.iterdir())) == 4


def test_evaluation_leaves_no_hooks(cyclic: PreTrainedModel) -> None:
    hooks = len(cyclic.base_model._forward_hooks)
    evaluate(cyclic, tokenizer(), registry.method("lookup")(), [[2, 3, 4]], 4)
    assert len(cyclic.base_model._forward_hooks) == hooks


def test_interrupted_runs_go_on(
    cyclic: PreTrainedModel, cyclic_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"max_steps": 12, "batch_tokens": 256, "epochs": None, "precision": "float32"}
    options: dict[str, Any] = {"optimisation": steps, "evaluation": {"prompts": 0, "tokens": 300}}
    recipe = cyclic_recipe(ONE, cyclic_text, tmp_path / "whole", **options)
    whole = train(recipe, cyclic, tokenizer(), progress=False)
    recipe = cyclic_recipe(ONE, cyclic_text, tmp_path / "parted", **options)
    built = HeadTrainer.__init__

    def with_stop(self: HeadTrainer, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self.add_callback(StopAt(5))

    with monkeypatch.context() as patch:
        patch.setattr(HeadTrainer, "__init__", with_stop)
        with pytest.raises(Interrupted, match="same command goes on"):
            train(recipe, cyclic, tokenizer(), progress=False)
    assert not (tmp_path / "parted" / "model.safetensors").exists()
    parted = train(recipe, cyclic, tokenizer(), progress=False)
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, parted))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_processes_that_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    connect("cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="WORLD_SIZE is 2, but accelerate sees 1"):
        connect("cpu")


def test_command_line_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([recipes.names()[0], "optimisation.lrr=1", f"output={tmp_path}/o"]) == 1
    assert "did you mean 'lr'" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert main([]) == 2


def test_output_that_cannot_be_written(cyclic: PreTrainedModel, cyclic_text: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recipe = cyclic_recipe(ONE, cyclic_text, tmp_path / "file" / "out")
    with pytest.raises(ConfigError, match="nothing can be written"):
        train(recipe, cyclic, tokenizer(), progress=False)


def test_prompts_for_the_evaluation_are_found_before_training(
    cyclic: PreTrainedModel, cyclic_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: Any) -> Any:
        raise DataError("found fewer")

    monkeypatch.setattr(run, "held_out_prompts", none)
    monkeypatch.setattr(run, "_fit", lambda *args: pytest.fail("hours of training"))
    with pytest.raises(DataError, match="found fewer"):
        train(cyclic_recipe(ONE, cyclic_text, tmp_path / "out"), cyclic, tokenizer(), progress=False)


def test_training_stays_on_the_device_of_a_given_model(
    cyclic: PreTrainedModel, cyclic_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(run, "connect", lambda device, strategy: asked.append(device) or connect("cpu"))
    monkeypatch.setattr(Target, "device", torch.device("cuda:1"))
    with pytest.raises(ConfigError, match=r"cuda:1, training would run on cuda:0.*CUDA_VISIBLE_DEVICES"):
        train(cyclic_recipe(ONE, cyclic_text, tmp_path / "out"), cyclic, tokenizer(), progress=False)
    assert asked == ["cpu"]
