"""Patching and unpatching, and the models that are refused or served with care."""

from __future__ import annotations

import warnings
from typing import Any

import oracle
import pytest
import tiny
import torch
from generate_tools import NEW, knows
from oracle import Oracle, patched, plain
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

import selfspec
from selfspec.errors import CheckpointError, ConfigError, UnsupportedGeneration, UnsupportedModel

# Patching and unpatching


def _marks(model: PreTrainedModel) -> dict[str, Any]:
    hooks = {
        (name, kind): len(getattr(module, kind))
        for name, module in model.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks")
    }
    return {
        "attributes": set(vars(model)),
        "hooks": hooks,
        "generate": model.generate.__func__,
        "keys": set(model.state_dict()),
    }


@pytest.mark.parametrize("kind", ["medusa", "eagle", "lookup", "oracle chain"])
def test_unpatch_leaves_the_model_as_it_was(kind: str, prompt: Tensor) -> None:
    from test_exactness import DRAFTS

    own = tiny.model("llama")
    weights = {name: value.clone() for name, value in own.state_dict().items()}
    draft = DRAFTS[kind](own, [[0]], 2)
    before = _marks(own)
    selfspec.patch(own, draft)
    own.generate(prompt, max_new_tokens=6)
    assert set(own.state_dict()) == before["keys"], "the draft is no part of the model"
    selfspec.unpatch(own)
    assert _marks(own) == before
    assert all(torch.equal(value, weights[name]) for name, value in own.state_dict().items())
    selfspec.unpatch(own)
    assert _marks(own) == before


def test_a_model_without_a_decoder_of_its_own_is_refused() -> None:
    """transformers then calls the whole model its base: its logits would be taken for hidden states."""
    whole = tiny.model("gpt_neox")
    whole.base_model_prefix = "nothing"
    with pytest.raises(UnsupportedModel, match="no decoder apart"):
        selfspec.patch(whole, "lookup")


def test_a_class_is_no_draft(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="Scripted is a class"):
        selfspec.patch(model, oracle.Scripted)  # type: ignore[arg-type]


def test_patching_twice_replaces_the_draft(model: PreTrainedModel, prompt: Tensor, reference: list[int]) -> None:
    before = _marks(model)
    selfspec.patch(model, "lookup")
    selfspec.patch(model, knows(model, prompt))
    assert model.speculation.draft.kind == "oracle"
    assert model.generate(prompt, max_new_tokens=NEW)[0, prompt.shape[1] :].tolist() == reference
    selfspec.unpatch(model)
    assert _marks(model) == before


def test_a_patch_that_fails_leaves_the_earlier_one_in_place(model: PreTrainedModel) -> None:
    before = _marks(model)
    selfspec.patch(model, "lookup")
    earlier = model.speculation
    for wrong in ("no/such-folder/at/all", object(), "medusa"):
        with pytest.raises(ValueError):
            selfspec.patch(model, wrong)
        assert model.speculation is earlier
    selfspec.unpatch(model)
    assert _marks(model) == before


def test_a_generate_that_others_put_on_the_model_is_given_back() -> None:
    own = tiny.model("llama")

    def other(*args: Any, **kwargs: Any) -> str:
        return "other"

    own.generate = other
    selfspec.patch(own, "lookup")
    selfspec.unpatch(own)
    assert own.generate is other


def test_what_is_no_draft_is_refused_by_what_it_lacks(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="observe"):
        selfspec.patch(model, object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="trained first"):
        selfspec.patch(model, "medusa")
    with pytest.raises(ConfigError, match="nodes=0"):
        selfspec.patch(model, "lookup", nodes=0)
    assert "generate" not in vars(model)


def test_heads_of_another_base_model_are_refused(tmp_path: Any, model: PreTrainedModel) -> None:
    from test_exactness import DRAFTS

    from selfspec.checkpoint import save_head

    save_head(DRAFTS["medusa"](tiny.model("llama", seed=9), [], 3), tmp_path / "heads")
    with pytest.raises(CheckpointError, match="trained on"):
        selfspec.patch(model, tmp_path / "heads")
    assert "generate" not in vars(model)


def test_a_head_object_of_another_base_model_is_refused(model: PreTrainedModel) -> None:
    from test_exactness import DRAFTS

    with pytest.raises(ConfigError, match="another model"):
        selfspec.patch(model, DRAFTS["medusa"](tiny.model("llama", seed=9), [], 3))


def test_an_attention_without_masks_is_refused_by_name() -> None:
    own = tiny.model("llama")
    own.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModel, match="flex_attention"):
        selfspec.patch(own, "lookup")


def _small(kind: str, **options: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **{"vocab_size": 97, "hidden_size": 32, "eos_token_id": None, **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


STATEFUL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize("new", [8, 30])
def test_text_that_crosses_the_switch_of_longrope_equals_plain_decoding(new: int, prompt: Tensor) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    own = _small(
        "phi3",
        **STATEFUL,
        pad_token_id=0,
        initializer_range=0.3,
        max_position_embeddings=128,
        original_max_position_embeddings=24,
        rope_parameters={**rope, "original_max_position_embeddings": 24},
    )
    wanted = plain(own, prompt, max_new_tokens=new)
    with patched(own, Oracle(wanted.tolist(), oracle.bushy(5, 2))), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert torch.equal(own.generate(prompt, max_new_tokens=new), wanted)
    assert any("longrope" in str(w.message) for w in said) == (prompt.shape[1] + new > 24)


def test_an_output_head_with_packed_weights(prompt: Tensor) -> None:
    """One token per pass: dynamic quantisation scales all tokens of a pass together, so wider passes round apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = torch.ao.quantization.quantize_dynamic(tiny.model("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    wanted = plain(own, prompt, max_new_tokens=NEW)
    with patched(own, "lookup", nodes=1, self_check=False):
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), wanted)


def test_adapters_on_the_target_count_in_every_state(prompt: Tensor) -> None:
    peft = pytest.importorskip("peft")
    own = tiny.model("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(own, config)
    with patched(own, "lookup"):
        on = wrapped.generate(input_ids=prompt, max_new_tokens=NEW)
        assert torch.equal(on, plain(own, prompt, max_new_tokens=NEW))
        with wrapped.disable_adapter():
            off = wrapped.generate(input_ids=prompt, max_new_tokens=NEW)
            assert torch.equal(off, plain(own, prompt, max_new_tokens=NEW))
    assert not torch.equal(on, off)


def test_a_saved_model_holds_nothing_of_the_patch(tmp_path: Any, prompt: Tensor) -> None:
    own = tiny.model("llama")
    with patched(own, "lookup"):
        own.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.generate(prompt, max_new_tokens=9), plain(own, prompt, max_new_tokens=9))
    assert not hasattr(again, "speculation")


def test_a_copy_of_a_patched_model_speaks_for_itself(prompt: Tensor) -> None:
    import copy

    own = tiny.model("llama")
    with patched(own, "lookup"):
        twin = copy.deepcopy(own)
        with torch.no_grad():
            twin.lm_head.weight.copy_(twin.lm_head.weight.roll(1, 0))
        assert torch.equal(twin.generate(prompt, max_new_tokens=NEW), plain(twin, prompt, max_new_tokens=NEW))
        assert own.speculation.last is None, "the copy counts for itself"
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), plain(own, prompt, max_new_tokens=NEW))
        selfspec.unpatch(twin)
        assert "generate" not in vars(twin)


def test_a_peft_model_is_patched_through_its_wrapper(prompt: Tensor) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny.model("llama"), config)
    wanted = plain(wrapped.get_base_model(), prompt, max_new_tokens=NEW)
    assert selfspec.patch(wrapped, "lookup") is wrapped
    assert torch.equal(wrapped.generate(input_ids=prompt, max_new_tokens=NEW), wanted)
    assert wrapped.speculation.last.rounds > 0
    selfspec.unpatch(wrapped)
    assert "generate" not in vars(wrapped.get_base_model())


def test_prompt_tuning_is_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedModel, match="PROMPT_TUNING"):
        selfspec.patch(peft.get_peft_model(tiny.model("llama"), config), "lookup")


def test_a_wrapper_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="Sequential is no transformers model"):
        selfspec.patch(torch.nn.Sequential(tiny.model("llama")), "lookup")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["DeepSpeed ZeRO-3", "FSDP"])
def test_ranks_that_gather_weights_together_are_refused_by_name(
    kind: str, model: PreTrainedModel, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selfspec import hf

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(hf, "is_deepspeed_zero3_enabled", lambda: kind == "DeepSpeed ZeRO-3")
    monkeypatch.setattr(hf, "is_fsdp_managed_module", lambda module: kind == "FSDP")
    with patched(model, "lookup"), pytest.raises(UnsupportedGeneration, match=kind):
        model.generate(prompt, max_new_tokens=4)
