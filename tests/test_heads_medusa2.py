"""Medusa-2: the target changes only when told to, is put back, and is learned in two stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from oracle import plain
from test_overfit import speaker
from test_overfit import text as language
from test_train_run import Rows, trainer_of
from torch import Tensor

import selfspec
from selfspec.changes import changed
from selfspec.checkpoint import save_head
from selfspec.draft import Verified
from selfspec.errors import ConfigError
from selfspec.heads.medusa import Medusa, MedusaConfig
from selfspec.heads.medusa2 import Medusa2, Medusa2Config
from selfspec.inference.bench import resolve_drafts
from selfspec.inference.certify import QUICK, CertifySettings, certify
from selfspec.target import Target

torch.set_num_threads(1)


def made(target: Target, noise: float = 0.1, **options: Any) -> Medusa2:
    config = Medusa2Config(**{"num_heads": 2, "rank": 2, "alpha": 4, **options})
    head = Medusa2.from_target(config, target, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    assert isinstance(head, Medusa2)
    return head


def saved(model: Any, folder: Path) -> Path:
    target = Target(model)
    written = save_head(made(target), folder / "heads")
    target.release()
    return written


def test_patch_wants_to_be_told_and_unpatch_puts_the_target_back(tmp_path: Path) -> None:
    model, prompt = tiny.model("llama"), tiny.text(2, 9)
    folder = saved(model, tmp_path)
    before, modules = model(prompt).logits, dict(model.named_modules())
    with pytest.raises(ConfigError, match="allow_target_change=True"):
        selfspec.patch(model, folder)
    assert torch.equal(model(prompt).logits, before)
    with pytest.warns(UserWarning, match="medusa-2 has changed the target"):
        selfspec.patch(model, folder, allow_target_change=True)
    merged = peft.PeftModel.from_pretrained(tiny.model("llama"), str(folder)).merge_and_unload()
    torch.testing.assert_close(model(prompt).logits, merged(prompt).logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(model(prompt).logits, before, atol=1e-2)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), plain(model, prompt, **options))
    assert torch.equal(model.generate(prompt, **options), merged.generate(prompt, **options))
    assert model.speculation.report()["rounds"] > 0
    selfspec.unpatch(model)
    assert torch.equal(model(prompt).logits, before)
    assert {name: id(m) for name, m in model.named_modules()} == {name: id(m) for name, m in modules.items()}
    assert not hasattr(model, "peft_config")


def test_a_model_with_adapters_and_joint_drafts_and_bench_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny.model("llama")
    folder = saved(model, tmp_path)
    with pytest.raises(ConfigError, match="cannot be joined"):
        selfspec.patch(model, [folder, "lookup"], allow_target_change=True)
    with pytest.raises(ConfigError, match="allow_target_change"):
        resolve_drafts([str(folder)], Target(model))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="merge yours first"):
        selfspec.patch(wrapped, folder, allow_target_change=True)


def features(target: Target, head: Medusa2, ids: Tensor) -> Verified:
    hidden = target.features(ids[:, :-1], None, head.needs).hidden
    counts = torch.full((len(ids),), ids.shape[1] - 1)
    return Verified(ids[:, :-1], ids[:, 1:], counts, hidden)


def test_the_heads_learn_alone_first_and_are_medusas_then() -> None:
    target = tiny.selfspec_target("llama")
    head = made(target, warmup=0.5)
    alike = Medusa(MedusaConfig(num_heads=2), target).to(torch.float32)
    alike.blocks.load_state_dict(head.blocks.state_dict())
    verified, mask = features(target, head, tiny.text(2, 20)), torch.ones(2, 19, dtype=torch.bool)
    head.at(0.2)
    result = head.loss(verified, mask)
    assert torch.equal(result.loss, alike.loss(verified, mask).loss)
    result.loss.backward()
    assert all(not bool(p.grad.any()) for p in head.peft.parameters() if p.grad is not None)
    assert bool(head.blocks.weight.grad.any())


def test_the_second_stage_holds_the_backbone_to_what_it_was_and_lets_the_heads_in_slowly() -> None:
    target = tiny.selfspec_target("llama")
    head = made(target, noise=0.0, warmup=0.4, joint_warmup=0.2, head_weight=0.2)
    verified, mask = features(target, head, tiny.text(2, 20)), torch.ones(2, 19, dtype=torch.bool)
    head.at(0.4)
    assert head.loss(verified, mask).loss.abs().item() < 1e-5, "B is zero: the backbone is the target"
    alone = Medusa.loss(head, verified, mask).loss
    for share, weight in ((0.5, 0.2 * 2**-0.5), (0.6, 0.2), (1.0, 0.2)):
        head.at(share)
        torch.testing.assert_close(head.loss(verified, mask).loss, weight * alone, atol=1e-4, rtol=1e-4)


def test_the_backbone_learns_at_its_own_rate_and_the_target_stays(tmp_path: Path) -> None:
    target = speaker("llama")
    ids = language(2, 24, 1)
    before = target.model(ids).logits
    head = made(target, noise=0.0, backbone_lr=0.25)
    trainer = trainer_of(head, Rows(language(12, 24, 3)), tmp_path, lr=1e-2, epochs=3.0)
    trainer.train()
    rates = {group["initial_lr"] for group in trainer.optimizer.param_groups if group["params"]}
    assert rates == {1e-2, 2.5e-3}
    assert torch.equal(target.model(ids).logits, before)
    assert any(bool(p.any()) for name, p in head.named_parameters() if "lora_B" in name)
    with changed(head, allowed=True):
        assert not torch.equal(target.model(ids).logits, before)
    assert torch.equal(target.model(ids).logits, before)


@pytest.mark.nightly
def test_its_certificate_is_about_the_changed_target(tmp_path: Path) -> None:
    model = tiny.model("llama")
    folder = saved(model, tmp_path)
    prompts = [tiny.text(1, 12, seed=seed)[0].tolist() for seed in range(2)]
    settings = CertifySettings(**QUICK)
    with pytest.raises(ConfigError, match="allow_target_change"):
        certify(model, folder, prompts, settings)
    record = certify(model, folder, prompts, settings, allow_target_change=True)
    assert record["passed"] and record["target"]["changed"]
    assert "adapter_model.safetensors" in record["draft"]["files"]
