"""Recipes for published models: each trains a head on a tiny random model of the same architecture."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import tiny
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from families import VOCAB, build
from train_tools import tokenizer

from selfspec import recipes
from selfspec.checkpoint import load_head
from selfspec.heads.formats import export_head, formats, import_head
from selfspec.recipes import forecast, work_of
from selfspec.target import Target
from selfspec.train.recipe import Recipe, load_recipe, make_recipe
from selfspec.train.run import train

torch.set_num_threads(1)
DEFAULT = "qwen3-0.6b"
NAMES = [pytest.param(name, marks=[] if name == DEFAULT else [pytest.mark.nightly]) for name in forecast.MODELS]


def scaled_down(recipe: Recipe, text: Path, output: Path) -> Recipe:
    """The recipe with less text, shorter rows and a small vocabulary; the head is made as ever.

    Sources that are written read `text`, others `texts.jsonl` beside it.
    """
    values = recipe.to_dict() | {"output": str(output), "save_every": 1, "log_every": 1}
    for source in values["data"]:
        source |= {
            "source": str(text if source["mode"] == "write" else text.with_name("texts.jsonl")),
            "max_tokens": 700,
            "length": 40,
            "prompt_tokens": 8,
            "max_new_tokens": 16,
        }
        source |= {"batch_rows": 16, "batch_tokens": 2048}
    values["data_folder"] = str(output.with_name("data"))
    values["vocabulary"]["size"] = min(40, values["vocabulary"]["size"])
    values["optimisation"] |= {"batch_tokens": 128, "micro_tokens": 64, "max_steps": 2, "precision": "float32"}
    values["optimisation"]["max_minutes"] = None
    values["evaluation"] |= {"every": 1, "tokens": 64, "prompts": 1, "prompt_tokens": 8, "max_new_tokens": 6}
    return make_recipe(values | {"dtype": "float32", "device": "cpu"})


def prompts(folder: Path) -> Path:
    words = [" ".join(f"t{i}" for i in row) for row in tiny.text(80, 6).clamp(max=92).tolist()]
    text = folder / "prompts.jsonl"
    text.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in words))
    texts = (" ".join(words[i : i + 10]) for i in range(len(words)))
    text.with_name("texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in texts))
    return text


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_a_head_that_drafts_on_its_architecture(name: str, tmp_path: Path) -> None:
    text = prompts(tmp_path)
    assert VOCAB == tiny.VOCAB
    recipe = load_recipe(f"{name}-eagle3")
    assert recipe.target == forecast.MODELS[name].hub
    model = build(forecast.MODELS[name].model_type)
    folder = train(scaled_down(recipe, text, tmp_path / "heads"), model, tokenizer(), progress=False)
    target = Target(model)
    head = load_head(folder, target)
    assert head.kind == recipe.draft["kind"] and head.output.vocab.size == 40
    assert all(bool(torch.isfinite(p).all()) for p in head.parameters())


@cache
def loaded(name: str) -> Recipe:
    return load_recipe(name)


def exported_to(name: str) -> list[str]:
    """The formats that the header of a recipe names."""
    found = re.search(r"^# exports: (.*)$", recipes.path(name).read_text(), re.MULTILINE)
    return [] if found is None else [one for one in formats() if re.search(rf"(?<![\w-]){one}(?![\w-])", found[1])]


EXPORTED = [
    pytest.param(name, marks=[pytest.mark.nightly] if "/" in loaded(name).target else [])
    for name in recipes.names()
    if exported_to(name)
]


@pytest.mark.parametrize("name", EXPORTED)
def test_a_head_trained_by_a_recipe_goes_without_loss_to_the_formats_its_header_names(
    name: str, tmp_path: Path
) -> None:
    model = tiny.model("llama")
    values = scaled_down(loaded(name), prompts(tmp_path), tmp_path / "heads").to_dict()
    values["optimisation"] |= {"lr": 0.01, "warmup": 0.0}  # two steps take the output head away from the target's
    recipe = make_recipe(values)
    target = Target(model)
    head = load_head(train(recipe, model, tokenizer(), progress=False), target)
    for one in exported_to(name):
        report = export_head(head, tmp_path / one, one)
        assert not [note for note in report.notes if note.effect != "told"]
        back, _ = import_head(tmp_path / one, target)
        assert back.config.to_dict() == head.config.to_dict()
        state = back.state_dict()
        assert all(torch.equal(state[key], value) for key, value in head.state_dict().items())


def test_recipes_for_engines_name_a_format_of_each() -> None:
    named = {one for name in recipes.names() for one in exported_to(name)}
    assert {"vllm-eagle", "sglang-eagle", "vllm-eagle3", "sglang-eagle3", "speculators", "vllm-dflash"} <= named
    assert all(exported_to(name) for name in recipes.names() if loaded(name).draft["kind"] == "eagle3")


def header_field(name: str, field: str) -> str:
    """What the header of a recipe says there; empty if nothing."""
    lines = recipes.path(name).read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix(f"# {field}: ") for line in lines if line.startswith(f"# {field}: ")), "")


@pytest.mark.parametrize("name", recipes.names())
def test_the_command_of_a_recipe_is_one(name: str) -> None:
    words = shlex.split(header_field(name, "command"))
    assert words[:3] == ["selfspec", "train", name]
    load_recipe(words[2], words[3:])


LAUNCHED = [name for name in recipes.names() if header_field(name, "launch")]


def test_recipes_for_several_gpus_say_how_to_launch_them() -> None:
    several = [name for name in recipes.names() if re.match(r"(?!1 )\d+ GPUs? ", header_field(name, "hardware"))]
    assert several and several == LAUNCHED


@pytest.mark.parametrize("name", LAUNCHED)
def test_launch_lines_name_a_shipped_configuration_and_parse(name: str) -> None:
    words = shlex.split(header_field(name, "launch"))
    assert words[:2] == ["accelerate", "launch"]
    found = launch_command_parser().parse_args(words[2:])
    file = Path(found.config_file)
    assert file == Path("recipes") / "accelerate" / file.name and recipes.configuration(file.stem).is_file()
    assert found.module and found.training_script == "selfspec.train" and found.training_script_args[0] == name
    recipe = load_recipe(name, found.training_script_args[1:])
    said = re.match(r"(\d+) GPUs? ", header_field(name, "hardware"))
    assert said is not None and int(said[1]) == found.num_processes
    configured = load_config_from_file(str(recipes.configuration(file.stem)))
    assert configured.num_processes == found.num_processes and not configured.use_cpu
    sharded = file.stem == "fsdp" or recipe.optimisation.strategy == "fsdp"
    assert sharded == (file.stem == "fsdp" and recipe.optimisation.strategy == "fsdp"), "the recipe shards, or neither"
    assert (configured.distributed_type == "DEEPSPEED") == file.stem.startswith("zero")


def test_every_shipped_configuration_is_one_of_accelerates() -> None:
    files = sorted(recipes.configuration("x").parent.glob("*.yaml"))
    assert [file.stem for file in files] == ["ddp", "fsdp", "zero2", "zero3"]
    for file in files:
        line = next(line for line in file.read_text(encoding="utf-8").splitlines() if "accelerate launch" in line)
        found = launch_command_parser().parse_args(shlex.split(line.removeprefix("# "))[2:])
        assert (found.config_file, found.training_script) == (file.name, "selfspec.train")
        assert load_config_from_file(str(file)).mixed_precision == "no", "the recipe says it"


@pytest.mark.parametrize("name", forecast.MODELS)
def test_a_recipes_header_says_what_the_formula_says(name: str) -> None:
    draft_vocab, work = work_of(f"{name}-eagle3")
    text = recipes.path(f"{name}-eagle3").read_text()
    comment = re.sub(r"\s+", " ", text.partition("target:")[0].replace("#", ""))
    for line in forecast.header(name, draft_vocab, work):
        assert line in comment
    assert "not measured" in comment


def test_every_recipe_for_a_published_model_is_one_of_these() -> None:
    published = {name for name in recipes.names() if "/" in loaded(name).target}
    assert published == {f"{name}-eagle3" for name in forecast.MODELS}


def test_the_formula_counts_a_heads_parameters_as_they_are() -> None:
    from selfspec.heads.eagle3 import Eagle3, Eagle3Config

    target = tiny.selfspec_target("llama")
    base = target.config
    model = forecast.Model("", "llama", 1, 1, 3, base.hidden_size, 4, 2, 8, base.intermediate_size, base.vocab_size)
    config = Eagle3Config(own_output=True, fc_norm=False, draft_vocab_size=40, target_layers=[0, 1, 2])
    head = Eagle3.from_target(config, target, torch.Generator())
    assert model.eagle3_parameters(40) == sum(p.numel() for p in head.parameters())


def test_the_forecast_grows_with_work_and_shrinks_with_machines() -> None:
    model = forecast.MODELS["llama-3.1-8b"]
    work = forecast.Work(tokens=1e8, written=0, epochs=1, steps=7, rows=64)
    one = forecast.hours(model, 0, work, "H100-80GB", 1)
    assert one == pytest.approx(2 * 8.03e9 * 1e8 / (989e12 * 0.35) / 3600)
    assert forecast.hours(model, 0, work, "H100-80GB", 8) == pytest.approx(one / 8)
    writing = forecast.Work(tokens=1e8, written=1e8, epochs=0, steps=7, rows=1)
    assert forecast.hours(model, 0, writing, "H100-80GB", 8) == pytest.approx(2 * 8.03e9 * 1e8 / 3.35e12 / 3600)
