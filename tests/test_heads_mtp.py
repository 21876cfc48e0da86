"""MTP: layers read from a checkpoint that transformers would drop, judged by the equations written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny import chunk
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    MaxLengthCriteria,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)

from selfspec.checkpoint import load_head, save_head
from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import UnsupportedModel
from selfspec.heads.mtp import Mtp, MtpConfig
from selfspec.inference.engine import decode
from selfspec.inference.request import Request
from selfspec.target import Target

torch.set_num_threads(1)
LAYERS = 2
_MOE: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def _deepseek() -> PreTrainedConfig:
    return DeepseekV3Config(
        **_MOE,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )


def _glm() -> PreTrainedConfig:
    return Glm4MoeConfig(**_MOE, num_key_value_heads=2, head_dim=8, use_qk_norm=True)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {"deepseek": _deepseek, "glm": _glm}


class Made:
    """A checkpoint with one MTP layer behind the last, and the parts it was made from."""

    def __init__(self, family: str, folder: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.whole: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
        self.whole.eval().requires_grad_(False)
        self.whole.save_pretrained(folder)
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.extra = {
            "enorm.weight": 1 + 0.2 * noise(32),
            "hnorm.weight": 1 + 0.2 * noise(32),
            "eh_proj.weight": 0.3 * noise(32, 64),
            "shared_head.norm.weight": 1 + 0.2 * noise(32),
        }
        tensors = load_file(folder / "model.safetensors")
        tensors |= {f"model.layers.{LAYERS}.{name}": value for name, value in self.extra.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((folder / "config.json").read_text())
        values.update(num_hidden_layers=LAYERS, num_nextn_predict_layers=1, num_mtp_layers=1)
        values.pop("mlp_layer_types", None)
        (folder / "config.json").write_text(json.dumps(values))
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.target = Target(loaded.eval().requires_grad_(False))

    def straight(self, features: Tensor, following: Tensor) -> Tensor:
        """g of every place, written out: `[B, T, D]`."""

        def norm(x: Tensor, name: str) -> Tensor:
            eps = self.whole.config.rms_norm_eps
            return self.extra[name] * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()

        decoder = self.whole.get_decoder()
        embedded = F.embedding(following, decoder.embed_tokens.weight)
        x = torch.cat([norm(embedded, "enorm.weight"), norm(features, "hnorm.weight")], -1)
        x = x @ self.extra["eh_proj.weight"].T
        places = x.shape[1]
        turn = decoder.rotary_emb(x, position_ids=torch.arange(places).unsqueeze(0))
        seen = torch.full((places, places), -torch.inf).triu(1)[None, None]
        x = decoder.layers[LAYERS](x, attention_mask=seen, position_embeddings=turn)
        return norm(x[0] if isinstance(x, tuple) else x, "shared_head.norm.weight")


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(request.param, tmp_path_factory.mktemp(request.param))


def head_of(made: Made, **options: Any) -> Mtp:
    head = Mtp.from_target(MtpConfig(**options), made.target)
    assert isinstance(head, Mtp)
    return head.eval()


def read(made: Made, ids: Tensor) -> Verified:
    output = made.target.features(ids[:, :-1], None, head_of(made).needs)
    return Verified(ids[:, :-1], ids[:, 1:], torch.full((len(ids),), ids.shape[1] - 1), output.hidden)


@torch.no_grad()
def test_the_first_guess_is_what_the_equations_say(made: Made) -> None:
    head, whole = head_of(made), read(made, tiny.text(2, 14))
    assert whole.hidden is not None
    wanted = made.straight(whole.hidden, whole.next_tokens)
    torch.testing.assert_close(next(head._passes(whole)), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.begin(whole).guess, wanted[:, -1], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_deeper_guesses_read_the_layers_own_output(made: Made) -> None:
    """A chain of three, each step the equations on the text so far with g for the features that are not there yet."""
    head, whole = head_of(made, tree_top_k=1, tree_depth=3, tree_nodes=4), read(made, tiny.text(1, 14))
    assert whole.hidden is not None
    tree = head.propose(head.begin(whole), Budget(), Sampling(), None)
    features, following, wanted = whole.hidden, whole.next_tokens, []
    for _ in range(3):
        g = made.straight(features, following)[:, -1:]
        wanted.append(int(made.target.model.lm_head(g).argmax()))
        features = torch.cat([features, g], 1)
        following = torch.cat([following, torch.tensor([wanted[-1:]])], 1)
    assert tree.tokens[0, 1:].tolist() == wanted


@torch.no_grad()
def test_rows_roll_on_as_if_begun_anew(made: Made) -> None:
    head, whole = head_of(made), read(made, tiny.text(2, 21))
    state = head.begin(chunk(whole, 0, 12))
    for start, stop in [(12, 13), (13, 17), (17, 20)]:
        head.propose(state, Budget(), Sampling(), None)
        state = head.observe(state, chunk(whole, start, stop))
    fresh = head.begin(whole)
    torch.testing.assert_close(state.guess, fresh.guess, atol=1e-5, rtol=1e-5)
    one, two = (head.propose(s, Budget(), Sampling(), None) for s in (state, fresh))
    assert torch.equal(one.tokens, two.tokens) and torch.equal(one.parents, two.parents)


def test_text_is_that_of_generate(made: Made) -> None:
    ids = tiny.text(2, 9)
    wanted = made.target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    limit = StoppingCriteriaList([MaxLengthCriteria(max_length=33)])
    assert torch.equal(decode(made.target, head_of(made), Request(ids, stopping=limit)).sequences, wanted)


def test_fine_tuning_changes_the_head_and_nothing_of_the_target(made: Made) -> None:
    head, whole = head_of(made), read(made, tiny.text(2, 14))
    before = {name: value.clone() for name, value in made.target.model.state_dict().items()}
    mask = torch.ones(2, 13, dtype=torch.bool)
    optimizer = torch.optim.Adam(head.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        loss = head.loss(whole, mask).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(value, before[name]) for name, value in made.target.model.state_dict().items())
    assert not {id(p) for p in head.parameters()} & {id(p) for p in made.target.model.parameters()}


@torch.no_grad()
def test_saved_heads_draft_the_same_tree(made: Made, tmp_path: Path) -> None:
    head, whole = head_of(made), read(made, tiny.text(2, 14))
    head.layer.eh_proj.weight.mul_(1.1)
    loaded = load_head(save_head(head, tmp_path / "head"), made.target)
    trees = [h.propose(h.begin(whole), Budget(), Sampling(), None) for h in (head, loaded)]
    assert torch.equal(trees[0].tokens, trees[1].tokens) and torch.equal(trees[0].parents, trees[1].parents)


def test_targets_without_such_layers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has no multi-token-prediction layers"):
        Mtp.from_target(MtpConfig(), tiny.selfspec_target("llama"))


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    target = Made("glm", tmp_path).target
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.{LAYERS}.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="eh_proj"):
        Mtp.from_target(MtpConfig(), target)
