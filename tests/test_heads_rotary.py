"""Rotary positions of heads against transformers' own module, and that every head which has them takes the scaling."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.rotary import Rotary
from selfspec.registry import method
from selfspec.target import Target

SIZE = 16
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(SIZE // 2)],
    "long_factor": [1.0 + i for i in range(SIZE // 2)],
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, every number": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    },
    "longrope": LONG,
    "longrope, attention factor": {**LONG, "attention_factor": 0.8},
}


def llamas(scaling: dict[str, Any] | None, theta: float, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    config = LlamaConfig(head_dim=SIZE, max_position_embeddings=256, rope_parameters=parameters)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    return cos.unsqueeze(1), sin.unsqueeze(1)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_cosine_and_sine_are_those_of_transformers(scaling: dict[str, Any] | None, theta: float) -> None:
    """Below and beyond the trained length; `longrope` within passes that stay on one side of its switch."""
    ours = Rotary(SIZE, theta, scaling)
    ragged = torch.stack([torch.arange(0, 40), torch.arange(24, 64)])
    for positions in (ragged, ragged + 64, ragged + 130):
        for found, wanted in zip(ours(positions), llamas(scaling, theta, positions), strict=True):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


def test_longrope_of_a_place_does_not_depend_on_the_rest_of_the_pass() -> None:
    ours, places = Rotary(SIZE, 1e4, LONG), torch.arange(50, 80).unsqueeze(0)
    together = torch.cat(ours(places))
    alone = torch.cat([torch.cat(ours(places[:, i : i + 1])) for i in range(30)], 2)
    torch.testing.assert_close(together, alone, atol=0, rtol=0)


WRONG: dict[str, tuple[Any, str]] = {
    "another kind": ({"rope_type": "dynamic", "factor": 2.0}, "wanted nothing or a dict.*llama3"),
    "no dict": ("llama3", "wanted nothing or a dict"),
    "a number missing": ({"rope_type": "linear"}, "lacks factor"),
    "a number too many": ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "has beta_fast; known: factor"),
    "a part of the head": ({**LLAMA3, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "no number": ({"rope_type": "linear", "factor": "2"}, "factor is '2', wanted a positive number"),
    "a list of another size": ({**LONG, "long_factor": [1.0]}, "long_factor .*wanted 8 positive numbers"),
}


@pytest.mark.parametrize(("scaling", "named"), WRONG.values(), ids=WRONG)
def test_scaling_that_cannot_be_is_refused_by_name(scaling: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Rotary(SIZE, 1e4, scaling)


HEADS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {},
    "hydra": {"num_heads": 2},
    "hydra-cross": {},
    "kangaroo": {"exit_layer": 1},
    "dflash": {},
    "dspark": {},
    "jetspec": {},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny.model("llama"))


def read(target: Target, head: Any) -> Verified:
    ids = tiny.text(2, 19)
    output = target.features(ids[:, :-1], None, head.needs)
    return Verified(ids[:, :-1], ids[:, 1:], torch.tensor([18, 18]), output.hidden, output.layers)


@pytest.mark.parametrize("kind", HEADS)
def test_every_head_with_rotary_positions_takes_the_scaling(kind: str, target: Target) -> None:
    """Linear scaling by 1 is no scaling, by 8 is another head; the loss sees positions everywhere."""
    cls = method(kind)

    @torch.no_grad()
    def loss(scaling: dict[str, Any] | None) -> float:
        head = cls.from_target(cls.config_class(**HEADS[kind], rope_scaling=scaling), target)
        generator = torch.Generator().manual_seed(3)
        head.reset_parameters(generator)
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        assert head.config.to_dict()["rope_scaling"] == scaling
        return float(head.loss(read(target, head), torch.ones(2, 18, dtype=torch.bool)).loss)

    plain = loss(None)
    assert loss({"rope_type": "linear", "factor": 1.0}) == pytest.approx(plain, rel=1e-5)
    assert abs(loss({"rope_type": "linear", "factor": 8.0}) - plain) > 1e-4 * plain


@torch.no_grad()
def test_a_scaled_head_reads_text_in_rounds_as_at_once(target: Target) -> None:
    """Across the switch of longrope, where remembered keys could go wrong."""
    cls = method("eagle3")
    half = target.hidden_size // target.config.num_attention_heads // 2
    scaling = {**LONG, "original_max_position_embeddings": 10}
    scaling |= {"short_factor": [1.0] * half, "long_factor": [1.0 + i for i in range(half)]}
    head = cls.from_target(cls.config_class(rope_scaling=scaling), target)
    verified = read(target, head)
    whole, rounds = head.begin(verified), head.begin(tiny.chunk(verified, 0, 7))
    for first, last in ((7, 9), (9, 12), (12, 18)):
        rounds = head.observe(rounds, tiny.chunk(verified, first, last))
    torch.testing.assert_close(whole.guess, rounds.guess, atol=1e-5, rtol=1e-5)
    trees = [head.propose(state, Budget(nodes=8, depth=3), Sampling(), None) for state in (whole, rounds)]
    assert torch.equal(trees[0].tokens, trees[1].tokens)
