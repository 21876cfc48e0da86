"""Targets that are more than their own code and weights: adapters, packed weights, offloading, `torch.compile`.

The judge is transformers' own `generate` on the same wrapped model.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import oracle
import pytest
import tiny
import torch
from oracle import Oracle, patched, plain
from torch import Tensor, nn
from transformers import PreTrainedModel

import selfspec
from selfspec.checkpoint import save_head
from selfspec.errors import ConfigError, UnsupportedModel
from selfspec.fingerprint import fingerprint
from selfspec.heads.medusa import Medusa, MedusaConfig
from selfspec.inference.bench import BenchSettings, check_prompts
from selfspec.selfcheck import checked_target
from selfspec.target import Target
from selfspec.wrapped import unwrapped

NEW = 20
IDS = torch.tensor([3, 50, 96])


def assert_exact(model: Any, calls: Any = None) -> None:
    """Two prompts of different lengths with guesses of which half are right, against plain decoding."""
    calls, inner = calls or model, unwrapped(model)
    ids, mask = oracle.left_padded([tiny.text(1, 9)[0].tolist(), tiny.text(1, 5, seed=3)[0].tolist()])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    wanted = plain(inner, ids, **options)
    texts = oracle.unpadded(wanted, mask)
    with patched(model, Oracle(texts, oracle.random_trees(3, 6, 0.7))):
        found = calls.generate(input_ids=ids, **options)
        assert inner.speculation.last.rounds < 2 * NEW, "no guess was ever accepted"
    assert torch.equal(found, wanted)


def adapted(*names: str, **options: Any) -> Any:
    """A tiny Llama with LoRA adapters of these names, the first active."""
    peft = pytest.importorskip("peft")
    chosen = {"r": 4, "target_modules": ["q_proj", "down_proj", "lm_head"], "init_lora_weights": False, **options}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(tiny.model("llama"), peft.LoraConfig(**chosen), adapter_name=names[0])
        for name in names[1:]:
            wrapped.add_adapter(name, peft.LoraConfig(**chosen))
    return wrapped.eval()


def test_an_adapter_switched_between_calls_counts_from_the_next_call(prompt: Tensor) -> None:
    model = adapted("one", "two")
    inner = unwrapped(model)
    texts = []
    with patched(model, "lookup"):
        for name in ("one", "two", "one"):
            model.set_adapter(name)
            texts.append(model.generate(input_ids=prompt, max_new_tokens=NEW))
            assert torch.equal(texts[-1], plain(inner, prompt, max_new_tokens=NEW))
    assert torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0], texts[1])


def test_guesses_pass_through_active_and_merged_adapters_and_saved_modules() -> None:
    assert_exact(adapted("one", "two"))
    assert_exact(adapted("one", target_modules=["v_proj"], modules_to_save=["lm_head"]))
    merged = adapted("one")
    merged.merge_adapter()
    assert_exact(merged)


def test_adapters_named_for_each_row_are_served_plainly(prompt: Tensor) -> None:
    model = adapted("one", "two", target_modules=["q_proj", "down_proj"])
    ids = prompt.expand(2, -1)
    given = {"max_new_tokens": NEW, "adapter_names": ["one", "two"], "attention_mask": torch.ones_like(ids)}
    wanted = model.generate(input_ids=ids, **given)
    assert not torch.equal(wanted[0], wanted[1])
    with patched(model, "lookup"), pytest.warns(UserWarning, match="adapters named for each row"):
        assert torch.equal(model.generate(input_ids=ids, **given), wanted)


def test_adapters_that_count_from_a_place_in_the_text_are_served_plainly(prompt: Tensor) -> None:
    """aLoRA adapts the last tokens of a pass, from its invocation on; a tree of guesses is longer than that."""
    counted = {"alora_invocation_tokens": prompt[0, 6:8].tolist(), "task_type": "CAUSAL_LM"}
    model = adapted("one", target_modules=["q_proj", "v_proj", "o_proj"], **counted)
    given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW}
    wanted = model.generate(**given)
    with model.disable_adapter():
        assert not torch.equal(model.generate(**given), wanted)
    with patched(model, "lookup"), pytest.warns(UserWarning, match="aLoRA"):
        assert torch.equal(model.generate(**given), wanted)


def test_adapters_mixed_by_what_a_pass_reads_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft")

    class Mixed(nn.Module):
        active_peft_config = peft.XLoraConfig(hidden_size=32, adapters={}, task_type="CAUSAL_LM")

        def get_base_model(self) -> PreTrainedModel:
            return tiny.model("llama")

    with pytest.raises(UnsupportedModel, match="XLORA"):
        selfspec.patch(Mixed(), "lookup")  # type: ignore[arg-type]


# Offloaded weights: accelerate keeps them on the meta device and brings them for each pass


def _on_cpu(model: PreTrainedModel, folder: Path) -> None:
    pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))


def _on_disk(model: PreTrainedModel, folder: Path) -> None:
    pytest.importorskip("accelerate").disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def _split(model: PreTrainedModel, folder: Path) -> None:
    here, away = ("embed_tokens", "rotary_emb", "layers.0", "norm"), ("layers.1", "layers.2")
    places = {f"model.{part}": "cpu" for part in here} | {f"model.{part}": "disk" for part in away}
    pytest.importorskip("accelerate").dispatch_model(
        model, {**places, "lm_head": "disk"}, main_device="cpu", offload_dir=str(folder), force_hooks=True
    )


@pytest.mark.parametrize("offload", [_on_cpu, _on_disk, _split])
def test_offloaded_targets_are_exact_and_lend_what_drafts_borrow(
    offload: Callable[[PreTrainedModel, Path], None], tmp_path: Path
) -> None:
    model = tiny.model("llama")
    weight = model.lm_head.weight.detach().clone()
    offload(model, tmp_path)
    assert model.lm_head.weight.is_meta
    assert_exact(model)
    target = checked_target(model)
    assert target.device == torch.device("cpu")
    rows, bias = target.output_rows(IDS)
    assert torch.allclose(rows, weight[IDS], atol=1e-6)
    assert bias is None
    assert fingerprint(target).startswith("config:"), "no weights were there to be looked at"
    assert model.lm_head.weight.is_meta
    target.release()


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = tiny.model("llama")
    with pytest.raises(UnsupportedModel, match="load it with its weights"):
        _ = Target(model).device


# Packed and quantised weights


class Packed(nn.Module):
    """A linear layer whose weight is bytes, as those of GPTQ and AWQ are."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.scale = layer.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (layer.weight / self.scale).round().to(torch.int8))
        self.bias = nn.Parameter(torch.linspace(-1, 1, layer.out_features), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.qweight * self.scale, self.bias)


def test_a_packed_output_head_is_exact_and_its_rows_are_read_off_its_outputs() -> None:
    model = tiny.model("llama")
    model.lm_head = Packed(model.lm_head)
    assert_exact(model)
    target = checked_target(model)
    assert target.output_weight() is None
    assert target.vocab_size == tiny.VOCAB
    rows, bias = target.output_rows(IDS)
    assert torch.allclose(rows, (model.lm_head.qweight * model.lm_head.scale)[IDS], atol=1e-5)
    assert bias is not None
    assert torch.allclose(bias, model.lm_head.bias[IDS])
    assert fingerprint(target).startswith("config:")
    target.release()


def test_rows_of_a_head_that_is_no_linear_map_are_refused() -> None:
    model = tiny.model("llama")
    model.lm_head = nn.Sequential(model.lm_head, nn.Tanh())  # type: ignore[assignment]
    with pytest.raises(UnsupportedModel, match="Sequential is no linear map"):
        Target(model).output_rows(IDS)


def test_activations_scaled_over_a_whole_pass_are_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(tiny.model("llama"), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModel, match=r"q_proj \(torch\.ao's dynamic quantisation\)"):
        selfspec.patch(model, "lookup")


def quantized(config: str, granularity: str | None = None) -> PreTrainedModel:
    """A tiny Llama quantised by torchao."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao import quantization

    options = {} if granularity is None else {"granularity": getattr(quantization, granularity)()}
    model = tiny.model("llama")
    quantization.quantize_(model, getattr(quantization, config)(**options))
    return model


def test_int8_weights_of_torchao_are_exact_and_lend_rows() -> None:
    model = quantized("Int8WeightOnlyConfig")
    assert_exact(model)
    target = checked_target(model)
    rows, _ = target.output_rows(IDS)
    assert torch.allclose(rows, tiny.model("llama").lm_head.weight[IDS], atol=0.02)
    assert fingerprint(target).startswith("config:")
    target.release()


def test_int8_activations_of_torchao_are_named_in_a_warning() -> None:
    model = quantized("Int8DynamicActivationInt8WeightConfig")
    with pytest.warns(UserWarning, match="rounds the activations of each token"):
        selfspec.patch(model, "lookup")
    selfspec.unpatch(model)


def test_int8_activations_of_torchao_with_one_scale_per_pass_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"\(torchao\) scales the activations of a whole pass"):
        selfspec.patch(quantized("Int8DynamicActivationInt8WeightConfig", "PerTensor"), "lookup")


@pytest.mark.parametrize("options", [{}, {"llm_int8_skip_modules": []}], ids=["plain head", "packed head"])
def test_4_bit_weights_of_bitsandbytes_are_exact_and_lend_rows(options: dict[str, Any], tmp_path: Path) -> None:
    model = by_bitsandbytes(tmp_path, load_in_4bit=True, **options)
    assert_exact(model)
    target = checked_target(model)
    assert target.vocab_size == families.VOCAB
    assert target.output_rows(IDS)[0].shape == (3, 64)
    target.release()


def test_llm_int8_of_bitsandbytes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"LLM\.int8"):
        selfspec.patch(by_bitsandbytes(tmp_path, load_in_8bit=True), "lookup")


def stub_of_bitsandbytes() -> PreTrainedModel:
    """A model that says of itself what bitsandbytes' do; its weights are plain."""
    from transformers import BitsAndBytesConfig

    model = tiny.model("llama")
    model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    return model


@pytest.fixture
def plain_heads(tmp_path: Path) -> Path:
    target = Target(tiny.model("llama"))
    made = Medusa.from_target(MedusaConfig(num_heads=1), target, torch.Generator().manual_seed(0))
    target.release()
    return save_head(made, tmp_path / "heads")


def test_heads_of_a_plain_base_on_a_packed_one_are_warned_of(plain_heads: Path) -> None:
    model = stub_of_bitsandbytes()
    with pytest.warns(UserWarning, match=r"quantisation none, .* has bitsandbytes, 4 bits"):
        selfspec.patch(model, plain_heads, guard=False, self_check=False)
    selfspec.unpatch(model)
    model.config.quantization_config = {"quant_method": "gptq", "bits": 3}
    with pytest.warns(UserWarning, match="gptq, 3 bits"):
        selfspec.patch(model, plain_heads, guard=False, self_check=False)
    selfspec.unpatch(model)


def test_heads_on_a_base_packed_as_theirs_are_not_warned_of(tmp_path: Path, plain_heads: Path) -> None:
    model = stub_of_bitsandbytes()
    target = Target(model)
    made = Medusa.from_target(MedusaConfig(num_heads=1), target, torch.Generator().manual_seed(0))
    packed_heads = save_head(made, tmp_path / "packed")
    target.release()
    for heads, on in ((packed_heads, model), (plain_heads, tiny.model("llama"))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            selfspec.patch(on, heads, guard=False, self_check=False)
        selfspec.unpatch(on)


def test_heads_that_do_not_say_are_warned_of_where_their_fingerprint_does(
    plain_heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((plain_heads / "config.json").read_text())
    del config["base_quantization"]
    (plain_heads / "config.json").write_text(json.dumps(config))
    model = stub_of_bitsandbytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selfspec.patch(model, plain_heads, guard=False, self_check=False)  # its output head is plain: nothing is known
    selfspec.unpatch(model)
    monkeypatch.setattr("selfspec.fingerprint.holds_numbers", lambda weight: False)
    with pytest.warns(UserWarning, match="quantisation none"):
        selfspec.patch(model, plain_heads, guard=False, self_check=False)
    selfspec.unpatch(model)


def by_bitsandbytes(folder: Path, **options: Any) -> PreTrainedModel:
    """A tiny Llama saved, and loaded with its weights packed."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    families.build("llama", hidden_size=64, intermediate_size=128).save_pretrained(folder)
    packing = BitsAndBytesConfig(**options)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=packing, dtype=torch.float32, device_map="cpu"
    )


# torch.compile


def test_a_model_that_torch_compile_wrapped_is_patched_inside() -> None:
    compiled: Any = torch.compile(tiny.model("llama"), backend="eager")
    assert_exact(compiled)
    assert selfspec.patch(compiled, "lookup") is compiled
    assert compiled.speculation.last is None
    selfspec.unpatch(compiled)
    assert "generate" not in vars(compiled._orig_mod)


def _forward(model: PreTrainedModel) -> None:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]


def _in_place(model: PreTrainedModel) -> None:
    model.compile(backend="eager")


@pytest.mark.nightly
@pytest.mark.parametrize("compiling", [_forward, _in_place])
def test_compiled_passes_are_exact_and_compiled_a_bounded_number_of_times(
    compiling: Callable[[PreTrainedModel], None],
) -> None:
    """Traced and guarded as for any back end; only code generation is left out."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    model = tiny.model("llama")
    compiling(model)
    assert_exact(model)
    made = counters["stats"]["unique_graphs"]
    assert 0 < made <= 4 * dynamo.config.recompile_limit
    assert_exact(model)
    assert counters["stats"]["unique_graphs"] == made, "a second text of the same lengths compiles nothing"
    dynamo.reset()


# Lengths


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bench_goes_past_the_trained_length_as_generate_does_and_stops_at_a_table_of_positions(kind: str) -> None:
    target = Target(families.build(kind))
    settings = BenchSettings(max_new_tokens=9)
    check_prompts(target, [[3] * 248], settings)
    if kind == "llama":
        with pytest.warns(UserWarning, match="a text of 257 tokens, where the model is made for 256"):
            check_prompts(target, [[3] * 249], settings)
    else:
        with pytest.raises(ConfigError, match="257 tokens, where the model has positions for 256"):
            check_prompts(target, [[3] * 249], settings)
    target.release()


@pytest.fixture
def prompt() -> Tensor:
    """One prompt."""
    return tiny.text(1, 9)
