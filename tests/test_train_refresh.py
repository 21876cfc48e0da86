"""Heads go on training on recorded text: `selfspec train --from-traffic`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from train_tools import tokenizer

from selfspec.errors import ConfigError
from selfspec.inference.patch import patch, unpatch
from selfspec.train.recipe import make_recipe
from selfspec.train.refresh import refreshed
from selfspec.train.run import train

torch.set_num_threads(1)


def test_heads_go_on_with_what_was_recorded_and_the_old_ones_stay(tmp_path: Path) -> None:
    source, out = tmp_path / "text.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"text": f"t{5 + i} t6 t7 " * 6}) + "\n" for i in range(40)))
    recipe = make_recipe(
        {
            "draft": {"kind": "medusa", "num_heads": 2},
            "data": [{"source": str(source), "length": 24}],
            "vocabulary": {"size": 40},
            "optimisation": {"lr": 1e-2, "batch_tokens": 256, "max_steps": 3, "epochs": None},
            "evaluation": {"every": 0, "tokens": 100, "prompts": 2, "prompt_tokens": 6, "max_new_tokens": 8},
            "output": str(out),
        }
    )
    model, words = tiny.model("llama"), tokenizer()
    train(recipe, model, words, progress=False)
    before = load_file(out / "model.safetensors")
    patch(model, out, record=tmp_path / "traffic")
    for start in range(30):
        model.generate(torch.tensor([[1, 5 + start, 6, 7]]), max_new_tokens=12, do_sample=False)
    unpatch(model)
    again = refreshed(recipe, tmp_path / "traffic")
    folder = train(again, model, words, progress=False)
    assert folder == Path(f"{out}-refreshed")
    after, kept = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in before.items())
    assert torch.equal(after["output.vocab.ids"], before["output.vocab.ids"])
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    record = json.loads((folder / "training.json").read_text())

    assert sum(sizes["rows"] for sizes in record["data"].values()) == 30
    assert record["forecast"]["steps"] == 3 and record["results"]["decoding"]["prompts"] >= 1
    with pytest.raises(ConfigError, match="init and output are both"):
        train(replace(again, output=again.init), model, words, progress=False)
    other = replace(again, draft={"kind": "eagle"}, output=str(tmp_path / "eagle"))
    with pytest.raises(ConfigError, match="holds 'medusa' heads, the recipe trains 'eagle'"):
        train(other, model, words, progress=False)
