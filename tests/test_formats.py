"""Other projects' checkpoints: what is read, what is refused, and what comes back from a round trip."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.checkpoint import load_head, save_head
from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import CheckpointError
from selfspec.head import DraftHead
from selfspec.heads.dflash import DFlash
from selfspec.heads.dflash_config import DFlashConfig
from selfspec.heads.eagle import Eagle, EagleConfig
from selfspec.heads.eagle3 import Eagle3, Eagle3Config
from selfspec.heads.formats import describe, export_head, exports, formats, import_folder, import_head
from selfspec.heads.formats.source import Source
from selfspec.heads.hydra import Hydra, HydraConfig, HydraCross, HydraCrossConfig
from selfspec.heads.medusa import Medusa, MedusaConfig
from selfspec.inference.patch import patch
from selfspec.target import Target

torch.set_num_threads(1)
BARE = {"input_norms": False, "layer_norm": False, "output_norm": False}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.selfspec_target("llama")


def randomised(head: DraftHead) -> DraftHead:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    if head.output.vocab.size < head.output.vocab.target_size:
        head.output.vocab.set_ids(torch.arange(head.output.vocab.size) * 2 + 1)
        head.output.refresh(rows=False)
    return head


def medusa(target: Target, **options: Any) -> DraftHead:
    return randomised(Medusa.from_target(MedusaConfig(**{"num_heads": 2, **options}), target))


def eagle(target: Target, **options: Any) -> DraftHead:
    return randomised(Eagle.from_target(EagleConfig(**{**BARE, **options}), target))


def eagle3(target: Target, **options: Any) -> DraftHead:
    settings = {"own_output": True, "fc_norm": False, "draft_vocab_size": 40, **options}
    return randomised(Eagle3.from_target(Eagle3Config(**settings), target))


def dflash(target: Target, **options: Any) -> DraftHead:
    return randomised(DFlash.from_target(DFlashConfig(**{"block_size": 4, "num_layers": 1, **options}), target))


def hydra(target: Target, **options: Any) -> DraftHead:
    settings = {"num_heads": 2, "output_per_head": True, "output_bias": True, "embedding_norm": False, **options}
    return randomised(Hydra.from_target(HydraConfig(**settings), target))


def hydra_cross(target: Target) -> DraftHead:
    return randomised(HydraCross.from_target(HydraCrossConfig(), target))


BUILDERS = {"hydra": hydra, "medusa": medusa, "eagle": eagle, "eagle3": eagle3, "dflash": dflash}


def tree(target: Target, head: DraftHead) -> Tensor:
    """What the head proposes after a fixed text."""
    ids = tiny.text(2, 9)
    output = target.features(ids[:, :-1], None, head.needs)
    verified = Verified(ids[:, :-1], ids[:, 1:], torch.tensor([8, 8]), output.hidden, output.layers)
    return head.propose(head.begin(verified), Budget(nodes=9), Sampling(), None).tokens


def eight_layers() -> Target:
    """A target with room for the default layers of EAGLE-3."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Target(LlamaForCausalLM(config).eval())


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 12,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}


def spelled(value: Any) -> str:
    """A parameter in the name of a test: the same in every process, which addresses of functions are not."""
    return str(getattr(value, "__name__", value))[:60]


ROUND_TRIPS: list[tuple[str, Callable[..., DraftHead], dict[str, Any]]] = [
    ("medusa", medusa, {}),
    ("medusa", medusa, {"num_layers": 2, "own_output": True}),
    ("medusa", medusa, {"num_heads": 3, "output_per_head": True}),
    ("vllm-medusa", medusa, {"num_layers": 2}),
    ("vllm-medusa", medusa, {"own_output": True}),
    ("vllm-medusa", medusa, {"output_per_head": True, "choices": [[0], [0, 0], [1]]}),
    ("safeai-eagle", eagle, {"fc_bias": True, "tree_nodes": 7}),
    ("safeai-eagle", eagle, {"num_layers": 2, "attention_bias": True}),
    ("vllm-eagle", eagle, {"head_dim": 6, "rope_theta": 5e5}),
    ("vllm-eagle", eagle, {"attention_bias": True}),
    ("sglang-eagle", eagle, {"draft_vocab_size": 40}),
    ("sglang-eagle", eagle, {"fc_bias": True}),
    ("vllm-eagle3", eagle3, {}),
    ("vllm-eagle3", eagle3, {"draft_vocab_size": 0, "own_output": False, "steps": 5}),
    ("vllm-eagle3", eagle3, {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "num_layers": 2}),
    ("vllm-eagle3", eagle3, {"norm_before_fc": True, "attention_bias": True, "target_layers": [1, 2]}),
    ("vllm-eagle3", eagle3, {"qk_norm": True, "head_dim": 6, "rope_theta": 5e5, "own_embedding": True}),
    ("vllm-eagle3", eagle3, {"draft_hidden_size": 48, "own_embedding": True}),
    ("sglang-eagle3", eagle3, {"fc_norm": True, "norm_output": True, "num_layers": 2}),
    (
        "sglang-eagle3",
        eagle3,
        {"fc_bias": True, "norm_before_fc": True, "draft_hidden_size": 48, "own_embedding": True},
    ),
    ("speculators", eagle3, {"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
    ("speculators", eagle3, {"norm_before_fc": True, "qk_norm": True, "num_layers": 2, "head_dim": 6}),
    ("hydra", hydra, {"prefix_attention": False}),
    ("hydra", hydra, {"mlp_blocks": 3, "tree_nodes": 8}),
    ("hydra", hydra, {"grounded": False, "hidden_state_offset": 1}),
    ("hydra", hydra_cross, {}),
    ("hydra", eagle, {"layer_norm": True, "fc_bias": True}),
    ("dflash", dflash, {}),
    ("dflash", dflash, {"num_layers": 2, "attention_bias": True, "head_dim": 6}),
    ("safeai-eagle", eagle, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("vllm-eagle", eagle, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5e5}),
    ("vllm-eagle", eagle, {"rope_scaling": LONGROPE}),
    ("vllm-eagle3", eagle3, {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
    ("sglang-eagle3", eagle3, {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
    ("speculators", eagle3, {"rope_scaling": YARN}),
    ("dflash", dflash, {"rope_scaling": YARN}),
    ("vllm-dflash", dflash, {"draft_vocab_size": 40}),
    ("vllm-dflash", dflash, {"draft_vocab_size": 40, "own_output": True, "causal": True, "position_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "build", "options"), ROUND_TRIPS, ids=spelled)
def test_a_round_trip_keeps_every_bit(
    name: str, build: Callable[..., DraftHead], options: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    head = build(target, **options)
    report = export_head(head, tmp_path / "there", name)
    assert not [note for note in report.notes if note.effect != "told"]
    back, _ = import_head(tmp_path / "there", target)
    if name == "medusa" and options.get("own_output"):  # the format repeats a shared matrix for each head
        assert torch.equal(back.output.rows, head.output.rows.expand(2, -1, -1))
    else:
        assert back.config.to_dict() == head.config.to_dict()
        state = back.state_dict()
        assert all(torch.equal(state[key], value) for key, value in head.state_dict().items())
    assert torch.equal(tree(target, back), tree(target, head))


@pytest.mark.parametrize(("name", "build", "options"), ROUND_TRIPS[3:9:5], ids=spelled)
def test_an_imported_folder_loads_as_any_other(
    name: str, build: Callable[..., DraftHead], options: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    head = build(target, **options)
    export_head(head, tmp_path / "there", name)
    for out, base in ((tmp_path / "with", target), (tmp_path / "without", None)):
        import_folder(tmp_path / "there", out, base)
        assert torch.equal(tree(target, load_head(out, target)), tree(target, head))
    assert json.loads((tmp_path / "with" / "config.json").read_text())["base_fingerprint"].startswith("weights:")


LOSSES = [
    ("vllm-medusa", medusa, {"draft_vocab_size": 40}, "draft vocabulary"),
    ("medusa", medusa, {"draft_vocab_size": 40}, "draft vocabulary"),
    ("safeai-eagle", eagle, {"draft_vocab_size": 40}, "draft vocabulary"),
    ("vllm-eagle", eagle, {"draft_vocab_size": 40}, "draft vocabulary"),
    ("vllm-eagle", eagle, {"fc_bias": True}, "fc.bias"),
    ("vllm-eagle3", eagle3, {"fc_bias": True}, "fc.bias"),
    ("sglang-eagle3", eagle3, {"own_embedding": True}, "own_embedding"),
    ("dflash", dflash, {"draft_vocab_size": 40}, "draft vocabulary"),
]


@pytest.mark.parametrize(("name", "build", "options", "lost"), LOSSES, ids=spelled)
def test_a_loss_is_named_and_must_be_asked_for(
    name: str, build: Callable[..., DraftHead], options: dict[str, Any], lost: str, target: Target, tmp_path: Path
) -> None:
    head = build(target, **options)
    with pytest.raises(CheckpointError, match=rf"{lost}.*--lossy"):
        export_head(head, tmp_path / "out", name)
    assert not (tmp_path / "out").exists()
    report = export_head(head, tmp_path / "out", name, lossy=True)
    assert [note.what for note in report.notes if note.effect == "lossy"] == [lost]
    assert lost in exports(head.config)[name]
    import_head(tmp_path / "out", target)


IMPOSSIBLE = [
    ("medusa", medusa, {"draft_vocab_size": 40, "own_output": True}, "draft vocabulary"),
    ("vllm-medusa", medusa, {"draft_vocab_size": 40, "output_per_head": True}, "draft vocabulary"),
    ("vllm-medusa", medusa, {"draft_vocab_size": 40, "own_output": True}, "draft vocabulary"),
    ("vllm-eagle", eagle, {"input_norms": True}, "input_norms=True"),
    ("safeai-eagle", eagle, {"output_norm": True}, "output_norm=True"),
    ("safeai-eagle", eagle, {"head_dim": 6}, "head_dim=6"),
    ("sglang-eagle", eagle, {"attention_bias": True}, "attention_bias=True"),
    ("vllm-eagle", eagle, {"own_output": True}, "own_output"),
    ("sglang-eagle3", eagle3, {"norm_before_residual": True}, "norm_before_residual=True"),
    ("sglang-eagle3", eagle3, {"target_layers": [2]}, "one layer"),
    ("vllm-eagle3", eagle3, {"target_layers": [0, 2]}, "layer 0"),
    ("safeai-eagle3", eagle3, {"fc_norm": True}, "fc_norm=True"),
    ("safeai-eagle3", eagle3, {"target_layers": [1, 2]}, r"reads layers \[2, 1, 0\]"),
    ("safeai-eagle3", eagle3, {"rope_scaling": LLAMA3}, "rope_scaling llama3"),
    ("safeai-eagle", eagle, {"rope_scaling": YARN}, "rope_scaling yarn"),
    (
        "safeai-eagle",
        eagle,
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5e5},
        "rope_theta=500000.0",
    ),
    ("hydra", hydra, {"rope_scaling": YARN}, "rope_scaling="),
    ("hydra", hydra, {"embedding_norm": True}, "embedding_norm=True"),
    ("hydra", hydra, {"draft_vocab_size": 40}, "draft vocabulary"),
    ("dflash", dflash, {"causal": True}, "causal=True"),
    ("dflash", dflash, {"taps": [0, 1]}, "tap 0"),
    ("vllm-eagle", medusa, {}, "vllm-medusa"),
    ("vllm-eagle9", medusa, {}, "no format is called 'vllm-eagle9'"),
]


@pytest.mark.parametrize(("name", "build", "options", "named"), IMPOSSIBLE, ids=spelled)
def test_what_a_format_cannot_hold_is_refused_whatever_is_allowed(
    name: str, build: Callable[..., DraftHead], options: dict[str, Any], named: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        export_head(build(target, **options), tmp_path / "out", name, lossy=True)
    assert not (tmp_path / "out").exists()


def test_targets_that_scale_their_embedding_hand_engines_the_bare_rows(tmp_path: Path) -> None:
    target = tiny.selfspec_target("gemma3")
    head = eagle(target)
    export_head(head, tmp_path / "out", "vllm-eagle")
    bare, ids = target.input_weight(), tiny.text(1, 4)
    assert bare is not None and not torch.equal(bare[ids], target.embed(ids))
    feature = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    fc = load_file(tmp_path / "out" / "model.safetensors")["fc.weight"]
    torch.testing.assert_close(torch.cat([bare[ids], feature], -1) @ fc.T, head._join(feature, ids))
    back, _ = import_head(tmp_path / "out", target)
    torch.testing.assert_close(back.fc.weight, head.fc.weight)


def test_a_bias_of_the_targets_output_head_has_no_place(tmp_path: Path) -> None:
    model = tiny.model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(tiny.VOCAB))
    with pytest.raises(CheckpointError, match="bias in its output head"):
        export_head(medusa(Target(model)), tmp_path / "out", "vllm-medusa")


def test_safeai_eagle3_folders_need_the_default_layers_and_then_lose_nothing(tmp_path: Path) -> None:
    target = eight_layers()
    head = eagle3(target)
    export_head(head, tmp_path, "safeai-eagle3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "selfspec"}))
    back, report = import_head(tmp_path, target)
    assert list(back.config.target_layers) == [2, 4, 5] and "not named, so the default" in str(report)
    assert torch.equal(tree(target, back), tree(target, head))


# Strict reading


def altered(target: Target, folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> Path:
    export_head(eagle(target), folder, "vllm-eagle")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


CHANGES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = {
    "a tensor is missing": (lambda c, t: t.pop("layers.0.mlp.up_proj.weight"), "lacks .*up_proj"),
    "one too many": (lambda c, t: t.update(extra=torch.ones(1)), "do.* not have: extra"),
    "a wrong shape": (lambda c, t: t.update({"layers.0.mlp.up_proj.weight": torch.ones(64, 33)}), r"\[64, 33\]"),
    "an unknown field": (lambda c, t: c.update(mystery=3), "mystery: not understood"),
    "another activation": (lambda c, t: c.update(hidden_act="gelu"), "'gelu'"),
    "a field of another type": (lambda c, t: c.update(rope_theta="many"), "rope_theta is 'many'"),
    "two rotary bases": (lambda c, t: c.update(rope_theta=5.0), "remove one"),
    "rotary scaling of a kind unknown here": (
        lambda c, t: c.update(rope_parameters={"rope_type": "dynamic", "factor": 2}),
        "dynamic.*wanted.*llama3",
    ),
    "rotary scaling without its numbers": (
        lambda c, t: c.update(rope_parameters={"rope_type": "llama3", "factor": 8}),
        "lacks low_freq_factor, high_freq_factor",
    ),
    "two rotary scalings": (lambda c, t: c.update(rope_scaling={"type": "linear", "factor": 2}), "contradict"),
    "an embedding of its own": (
        lambda c, t: t.update({"embed_tokens.weight": torch.randn(97, 32)}),
        "embed_tokens.weight: differs.*--lossy",
    ),
    "no sizes": (lambda c, t: c.pop("intermediate_size"), "no intermediate_size"),
    "an impossible size": (lambda c, t: c.update(num_attention_heads=0), "0 attention heads"),
    "another vocabulary": (lambda c, t: (c.update(vocab_size=98), c.pop("selfspec")), "vocabulary 98"),
    "another base model": (
        lambda c, t: c["selfspec"].update(base_fingerprint="weights:0:1"),
        "fingerprint weights:0:1",
    ),
}


@pytest.mark.parametrize(("change", "named"), CHANGES.values(), ids=CHANGES)
def test_whatever_is_not_understood_is_refused_by_name(
    change: Callable[[dict[str, Any], dict[str, Tensor]], Any], named: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        import_head(altered(target, tmp_path, change), target)


def test_copies_of_the_targets_tensors_may_be_there(target: Target, tmp_path: Path) -> None:
    weight = target.input_weight()
    assert weight is not None
    padded = torch.cat([weight, torch.zeros(31, 32)]).half()
    folder = altered(target, tmp_path, lambda c, t: t.update({"embed_tokens.weight": padded}))
    _, report = import_head(folder, target)
    assert [str(note) for note in report.notes] == [
        "embed_tokens.weight: a copy of the embedding, which is used instead"
    ]


def test_a_missing_rotary_base_is_said(target: Target, tmp_path: Path) -> None:
    folder = altered(target, tmp_path, lambda c, t: (c.pop("rope_theta"), c.pop("rope_parameters")))
    head, report = import_head(folder, target)
    assert head.config.rope_theta == 10000 and "whatever the target has" in str(report)


LLAMA_31 = {key: value for key, value in LLAMA3.items() if key != "rope_type"}


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_scaled_rotary_positions_as_published_llama_31_heads_write_them(
    kind: str, target: Target, tmp_path: Path
) -> None:
    """The old form beside a base at the top, as a config copied from Llama 3.1 has it."""
    scaling = {**LLAMA_31, kind: "llama3"}
    folder = altered(
        target, tmp_path, lambda c, t: (c.pop("rope_parameters"), c.update(rope_theta=5e5, rope_scaling=scaling))
    )
    head, report = import_head(folder, target)
    assert (head.config.rope_scaling, head.config.rope_theta) == (LLAMA3, 5e5)
    assert "rope_scaling: llama3, from the draft's own config" in str(report)


def test_what_transformers_takes_from_the_length_is_written_into_the_scaling(target: Target, tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
        config["rope_parameters"] |= {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
        config |= {"original_max_position_embeddings": 12, "max_position_embeddings": 48}

    head, _ = import_head(altered(target, tmp_path, change), target)
    assert head.config.rope_scaling == LONGROPE


def test_linear_scaling_in_safeai_folders_has_the_base_their_code_takes(target: Target, tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    folder = altered(
        target, tmp_path, lambda c, t: (c.pop("rope_parameters"), c.update(rope_theta=5e5, rope_scaling=scaling))
    )
    head, report = import_head(folder, target)
    assert head.config.rope_theta == 10000 and "rope_theta: 500000, but" in str(report)


def test_config_counts_of_medusa_heads_are_not_believed(target: Target, tmp_path: Path) -> None:
    export_head(medusa(target), tmp_path, "medusa")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "medusa_num_heads": 5}))
    head, report = import_head(tmp_path, target)
    assert head.config.num_heads == 2 and "says 5, the weights hold 2" in str(report)


def test_heads_inside_a_whole_model_come_out_of_it(target: Target, tmp_path: Path) -> None:
    head = medusa(target, output_per_head=True)
    export_head(head, tmp_path / "apart", "medusa")
    weights = torch.load(tmp_path / "apart" / "medusa_lm_head.pt", weights_only=True)
    whole = {f"medusa_head.{name}": value for name, value in weights.items()}
    whole |= {"model.norm.weight": torch.ones(32), "lm_head.weight": torch.ones(97, 32)}
    (tmp_path / "whole").mkdir()
    save_file(whole, tmp_path / "whole" / "model.safetensors")
    back, report = import_head(tmp_path / "whole", target)
    assert torch.equal(back.state_dict()["blocks.weight"], head.state_dict()["blocks.weight"])
    assert "backbone" in str(report)


def test_patch_says_that_a_foreign_folder_must_be_imported(target: Target, tmp_path: Path) -> None:
    export_head(eagle(target), tmp_path, "vllm-eagle")
    with pytest.raises(CheckpointError, match="selfspec import"):
        patch(target.model, tmp_path)


def test_own_folders_are_not_imported(target: Target, tmp_path: Path) -> None:
    save_head(eagle(target), tmp_path)
    with pytest.raises(CheckpointError, match="already"):
        import_head(tmp_path, target)


@pytest.mark.parametrize("name", sorted(formats()))
def test_foreign_folders_are_described_without_their_base_model(name: str, target: Target, tmp_path: Path) -> None:
    if name == "safeai-eagle3":
        target = eight_layers()
    options = {"prefix_attention": False} if name == "hydra" else {}  # its attention needs the base model's sizes
    head = BUILDERS[formats()[name].kinds[0]](target, **options)
    export_head(head, tmp_path, name)
    figures = describe(tmp_path)
    source = Source.open(tmp_path)
    taken = [source.take(key, *entry.shape) for key, entry in source.entries.items()]
    assert figures["parameters"] == sum(value.numel() for value in taken if value.is_floating_point())
    assert figures["kind"] == head.kind and figures["bytes"] > 0


def eagle3_folder(target: Target, folder: Path, name: str = "sglang-eagle3", **options: Any) -> tuple[Path, Any, Any]:
    export_head(eagle3(target, **options), folder, name)
    return folder, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def rewrite(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_layers_are_counted_by_inputs_at_the_top_and_by_outputs_inside(target: Target, tmp_path: Path) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    folder, config, tensors = eagle3_folder(target, tmp_path, target_layers=[1, 2])
    assert config["eagle_config"][key] == [0, 1]
    head, report = import_head(folder, target)
    assert head.config.target_layers == [1, 2] and "outputs of blocks" in str(report)
    head, report = import_head(rewrite(folder, {**config, key: [1, 2]}, tensors), target)
    assert head.config.target_layers == [1, 2] and "outputs of blocks" not in str(report)
    with pytest.raises(CheckpointError, match="contradict"):
        import_head(rewrite(folder, {**config, key: [0, 1]}, tensors), target)


MAPS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "cast to bfloat16": (lambda t: t.update(d2t=t["d2t"].bfloat16()), "bfloat16"),
    "absolute ids": (lambda t: t.update(d2t=t["d2t"] + torch.arange(40)), "offsets"),
    "a mask that disagrees": (lambda t: t.update(t2d=~t["t2d"]), "different tokens"),
    "missing": (lambda t: t.pop("d2t"), "no map"),
}


@pytest.mark.parametrize(("change", "named"), MAPS.values(), ids=MAPS)
def test_damaged_draft_vocabularies_are_refused(
    change: Callable[[dict[str, Tensor]], Any], named: str, target: Target, tmp_path: Path
) -> None:
    folder, config, tensors = eagle3_folder(target, tmp_path)
    change(tensors)
    with pytest.raises(CheckpointError, match=named):
        import_head(rewrite(folder, config, tensors), target)


def test_a_draft_vocabulary_in_any_order_gives_the_same_head(target: Target, tmp_path: Path) -> None:
    folder, config, tensors = eagle3_folder(target, tmp_path)
    before, _ = import_head(folder, target)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    ids = (tensors["d2t"] + torch.arange(40))[order]
    tensors |= {"d2t": ids - torch.arange(40), "lm_head.weight": tensors["lm_head.weight"][order]}
    after, _ = import_head(rewrite(folder, config, tensors), target)
    assert all(torch.equal(value, after.state_dict()[name]) for name, value in before.state_dict().items())


def test_norms_of_later_layers_may_come_under_either_name_but_not_differ(target: Target, tmp_path: Path) -> None:
    folder, config, tensors = eagle3_folder(target, tmp_path, num_layers=2)
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])
    only = {name: value for name, value in tensors.items() if name != "layers.1.input_layernorm.weight"}
    head, _ = import_head(rewrite(folder, config, only), target)
    assert torch.equal(head.layers[1].input_layernorm.weight, tensors["layers.1.hidden_norm.weight"])
    tensors["layers.1.hidden_norm.weight"] += 1
    with pytest.raises(CheckpointError, match="engines read either"):
        import_head(rewrite(folder, config, tensors), target)


# What engines find: names, shapes, dtypes and fields as their loaders want them


def test_what_sglang_finds_in_an_eagle3_folder(target: Target, tmp_path: Path) -> None:
    _, config, tensors = eagle3_folder(target, tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is False and config["draft_vocab_size"] == 40
    assert "target_hidden_size" not in config and "norm_before_residual" not in config
    assert (config["rope_theta"], config["head_dim"], config["num_hidden_layers"]) == (10000.0, 8, 1)
    assert not [key for key, value in config.items() if value is None]
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    assert shapes == {
        "fc.weight": (32, 64),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.mlp.gate_proj.weight": (64, 32),
        "midlayer.mlp.up_proj.weight": (64, 32),
        "midlayer.mlp.down_proj.weight": (32, 64),
        "norm.weight": (32,),
        "lm_head.weight": (40, 32),
        "d2t": (40,),
        "t2d": (97,),
    }
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)


def test_what_sglang_finds_in_an_eagle_folder(target: Target, tmp_path: Path) -> None:
    head = eagle(target, draft_vocab_size=40)
    export_head(head, tmp_path, "sglang-eagle", dtype=torch.bfloat16)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle"] and config["torch_dtype"] == "bfloat16"
    assert tensors["fc.bias"].tolist() == [0.0] * 32 and tensors["fc.weight"].shape == (32, 64)
    assert not {"lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight"} & set(tensors)
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert torch.load(tmp_path / "token_map.pt", weights_only=True) == head.output.vocab.ids.tolist()


def test_what_vllm_finds_in_its_folders(target: Target, tmp_path: Path) -> None:
    export_head(eagle(target), tmp_path / "1", "vllm-eagle")
    config = json.loads((tmp_path / "1" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and "bias" not in config
    _, config, tensors = eagle3_folder(target, tmp_path / "3", "vllm-eagle3", draft_vocab_size=0)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2] and config["num_aux_hidden_states"] == 2
    assert "eagle_config" not in config and not {"d2t", "t2d"} & set(tensors)  # it raises on maps it does not need
    _, config, _ = eagle3_folder(target, tmp_path / "s", "speculators")
    assert "model_type" not in config and config["norm_before_residual"] is False
    method = config["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] > 0 and "name_or_path" in config["speculators_config"]["verifier"]
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama" and layer["rope_parameters"]["rope_theta"] == 10000.0


# Hostile files


def folder_with(path: Path, name: str, content: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / name).write_bytes(content)
    return path


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    torch.save({"0.0.linear.weight": Hostile(tmp_path / "mark")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="more than tensors"):
        Source.open(tmp_path)
    assert not (tmp_path / "mark").exists()
    torch.load(tmp_path / "medusa_lm_head.pt", weights_only=False)
    assert (tmp_path / "mark").exists()


def test_pickles_outside_an_archive_are_not_opened(tmp_path: Path) -> None:
    folder_with(tmp_path, "pytorch_model.bin", pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="no archive"):
        Source.open(tmp_path)


def test_archives_that_unpack_to_more_than_they_are_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 16)}, tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as old, zipfile.ZipFile(tmp_path / "a.bin", "w") as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record), zipfile.ZIP_DEFLATED)
    (tmp_path / "plain").unlink()
    with pytest.raises(CheckpointError, match="claims more data"):
        Source.open(tmp_path)


def test_tensors_that_claim_more_than_the_file_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "a.bin")
    with pytest.raises(CheckpointError, match="more than the file holds"):
        Source.open(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "..\\outside.safetensors", "sub/a.safetensors"]
)
def test_an_index_names_files_of_its_own_folder_only(name: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    index = json.dumps({"weight_map": {"a": name}}).encode()
    with pytest.raises(CheckpointError, match="only name files beside it"):
        Source.open(folder_with(tmp_path / "in", "model.safetensors.index.json", index))


def test_shards_are_read_through_their_index(target: Target, tmp_path: Path) -> None:
    head = eagle(target)
    export_head(head, tmp_path, "vllm-eagle")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    back, _ = import_head(tmp_path, target)
    assert torch.equal(tree(target, back), tree(target, head))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("config.json", b"[1]", "wanted a JSON object"),
        ("config.json", b"[" * 100_000, "not valid JSON"),
        ("model.safetensors", b"\xff" * 8, "damaged"),
        ("a.txt", b"", "no weights"),
    ],
    ids=["a list", "deep", "cut off", "empty"],
)
def test_damaged_files_are_named(name: str, content: bytes, named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        Source.open(folder_with(tmp_path, name, content))
