"""Blockwise heads: what each of them guesses, and that they can learn it."""

from __future__ import annotations

import oracle
import pytest
import tiny
import torch

from selfspec.draft import Budget, Needs, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.blockwise import Blockwise, BlockwiseConfig
from selfspec.target import Target

torch.set_num_threads(1)


def features(target: Target, text: torch.Tensor) -> Verified:
    hidden = target.features(text[:, :-1], None, Needs(hidden=True)).hidden
    counts = torch.full((text.shape[0],), text.shape[1] - 1)
    return Verified(text[:, :-1], text[:, 1:], counts, hidden)


def test_every_head_guesses_its_own_place_once_it_has_learned_a_text() -> None:
    """Trained on what the target writes, the heads guess it: head j the token j + 2 places on."""
    model = tiny.model("llama")
    target = Target(model)
    text = oracle.plain(model, tiny.text(4, 4), max_new_tokens=20)
    head = Blockwise.from_target(BlockwiseConfig(num_heads=3), target, torch.Generator().manual_seed(0))
    verified = features(target, text)
    mask = torch.ones_like(verified.tokens, dtype=torch.bool)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    first = head.loss(verified, mask).loss.item()
    for _ in range(60):
        optimizer.zero_grad()
        found = head.loss(verified, mask)
        found.loss.backward()
        optimizer.step()
    assert found.loss.item() < first
    places, right = range(6, 18), torch.zeros(3)
    for place in places:
        state = head.begin(features(target, text[:, : place + 1]))
        tree = head.propose(state, Budget(), Sampling(), None)
        right += (tree.tokens[:, 1:] == text[:, place + 1 : place + 4]).float().mean(0) / len(places)
    assert bool((right > 0.8).all()), right
    with oracle.patched(model, head):
        assert torch.equal(model.generate(text[:, :4], max_new_tokens=20), text)
        assert model.speculation.report()["tokens_per_round"] > 2.5


@pytest.mark.parametrize("name", tiny.NAMES)
def test_untrained_heads_leave_the_text_of_ragged_rows_alone(name: str) -> None:
    model = tiny.model(name)
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (3, 21, 10)])
    wanted = oracle.plain(model, ids, attention_mask=mask, max_new_tokens=12)
    head = Blockwise.from_target(BlockwiseConfig(), Target(model), torch.Generator().manual_seed(0))
    with oracle.patched(model, head):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=12), wanted)


def test_at_first_every_head_repeats_the_targets_next_token() -> None:
    target = tiny.selfspec_target("gemma3")
    head = Blockwise.from_target(BlockwiseConfig(num_heads=2), target, torch.Generator().manual_seed(0))
    text = tiny.text(2, 9)
    tree = head.propose(head.begin(features(target, text)), Budget(), Sampling(), None)
    own = target.model(text[:, :-1]).logits[:, -1].argmax(-1)
    assert torch.equal(tree.tokens[:, 1:], own.unsqueeze(1).expand(-1, 2))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError):
        Blockwise.from_target(BlockwiseConfig(num_heads=0), tiny.selfspec_target("llama"))
