"""Shared layers against transformers' own, and the ragged cache against whole passes."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from selfspec.cache import SlotCache
from selfspec.heads.layers import DecoderLayer, LayerShape, ResidualBlocks, RMSNorm, rotary

SHAPE = LayerShape(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer() -> DecoderLayer:
    built = DecoderLayer(SHAPE)
    with torch.no_grad():
        for index, parameter in enumerate(built.parameters()):
            parameter.copy_(0.3 * random(*parameter.shape, seed=index))
    return built


@torch.no_grad()
def test_the_decoder_layer_is_llamas() -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        attn_implementation="sdpa",
    )
    ours, theirs = layer(), LlamaDecoderLayer(config, 0)
    theirs.load_state_dict(ours.state_dict())
    x, positions = random(2, 9, 32), torch.arange(9).unsqueeze(0) + 700
    expected = theirs(x, position_embeddings=LlamaRotaryEmbedding(config)(x, positions), attention_mask=None)
    torch.testing.assert_close(ours(x, rotary(positions, 16, 10000.0), None), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_ragged_cache_gives_what_whole_passes_give() -> None:
    built, x = layer(), random(2, 12, 32)
    whole = built(x, rotary(torch.arange(12).unsqueeze(0), 16, 10000.0), None)
    cache = SlotCache([None], 2, 4, torch.device("cpu"))
    read = [0, 0]
    for counts in ([5, 3], [1, 4], [4, 1]):
        longest = max(counts)
        places = torch.tensor(read).unsqueeze(1) + torch.arange(longest)
        positions = cache.slots.index(longest)
        assert torch.equal(positions, places)
        end = max(read) + longest
        mask = (torch.arange(end) <= positions.unsqueeze(-1)).unsqueeze(1)
        part = torch.stack([x[b, places[b].clamp_max(11)] for b in range(2)])
        out = built(part, rotary(positions, 16, 10000.0), mask, cache.layers[0])
        for b, count in enumerate(counts):
            torch.testing.assert_close(out[b, :count], whole[b, read[b] : read[b] + count], atol=1e-5, rtol=1e-5)
        cache.commit(counts)
        read = [r + c for r, c in zip(read, counts, strict=True)]


def test_rotary_positions_are_relative_and_unlimited() -> None:
    from selfspec.heads.layers import rotate

    query, key = random(1, 1, 1, 16), random(1, 1, 1, 16, seed=1)

    def score(at: int, to: int) -> torch.Tensor:
        turned = [rotate(v, *rotary(torch.tensor([[p]]), 16, 10000.0)) for v, p in ((query, at), (key, to))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(100_007, 100_003), atol=2e-2, rtol=0)
    torch.testing.assert_close(score(7, 7), (query * key).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_keep_the_dtype_and_give_unit_scale(dtype: torch.dtype) -> None:
    out = RMSNorm(64, 1e-6)(random(3, 64).to(dtype) * 1000)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float().pow(2).mean(-1), torch.ones(3), atol=1e-2, rtol=0)


def test_residual_blocks_start_as_the_identity_and_run_side_by_side() -> None:
    blocks, x = ResidualBlocks(3, 2, 8), random(5, 8)
    assert torch.equal(blocks(x), x.expand(3, 5, 8))
    with torch.no_grad():
        blocks.weight.copy_(random(2, 3, 8, 8))
        blocks.bias.copy_(random(2, 3, 1, 8, seed=1))
    by_hand = x
    for n in range(2):
        by_hand = by_hand + torch.nn.functional.silu(by_hand @ blocks.weight[n, 1].T + blocks.bias[n, 1])
    torch.testing.assert_close(blocks(x)[1], by_hand)
