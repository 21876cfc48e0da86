"""Limits of the losses: where they vanish, what they reduce to, and that they survive extreme inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from selfspec.draft import Verified
from selfspec.heads.losses import (
    agreement,
    denominator,
    feature_distance,
    soft_cross_entropy,
    taught_places,
    teacher_probs,
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_cross_entropy_is_smallest_at_the_teacher_where_it_is_the_entropy() -> None:
    teacher = random(5, 11)
    p = teacher_probs(teacher)
    at_teacher = soft_cross_entropy(teacher + 3.0, p)
    torch.testing.assert_close(at_teacher, -(p * p.log()).sum(-1))
    for seed in range(1, 10):
        assert bool((soft_cross_entropy(teacher + random(5, 11, seed=seed), p) > at_teacher).all())


def test_cross_entropy_with_a_certain_teacher_is_the_hard_one() -> None:
    labels = torch.tensor([3, 0, 10])
    logits = random(3, 11)
    certain = teacher_probs(F.one_hot(labels, 11) * 1e4)
    torch.testing.assert_close(soft_cross_entropy(logits, certain), F.cross_entropy(logits, labels, reduction="none"))


def test_cross_entropy_gradient_is_q_minus_p() -> None:
    logits = random(4, 7).requires_grad_()
    p = teacher_probs(random(4, 7, seed=1))
    soft_cross_entropy(logits, p).sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - p)


def test_the_teacher_gets_no_gradient() -> None:
    assert not teacher_probs(random(2, 3).requires_grad_()).requires_grad
    truth, guess = random(2, 3).requires_grad_(), random(2, 3, seed=1).requires_grad_()
    feature_distance(guess, truth).sum().backward()
    assert truth.grad is None and guess.grad is not None


def test_feature_distance_vanishes_at_the_truth_and_ignores_the_scale() -> None:
    truth, guess = random(4, 16), random(4, 16, seed=1)
    assert not feature_distance(truth, truth).any()
    torch.testing.assert_close(feature_distance(guess, truth), feature_distance(guess * 1e4, truth * 1e4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_are_finite_float32_on_extreme_inputs(dtype: torch.dtype) -> None:
    large = (random(3, 8) * 1e4).to(dtype)
    zero = torch.zeros(3, 8, dtype=dtype)
    for value in (soft_cross_entropy(large, teacher_probs(-large)), feature_distance(zero, large)):
        assert value.dtype == torch.float32 and bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(feature_distance(zero, zero)).all())


def test_no_places_give_a_sum_of_zero_with_gradients() -> None:
    logits = random(4, 7).requires_grad_()
    nothing = torch.zeros(4, dtype=torch.bool)
    loss = soft_cross_entropy(logits[nothing], teacher_probs(random(4, 7)[nothing])).sum() / denominator(
        nothing.sum(), None
    )
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()


def test_agreement_counts_equal_first_choices() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 1.0, 0.0]])
    assert agreement(logits, torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.8, 0.1]])).tolist() == [1.0, 0.0]


def test_the_caller_may_name_the_denominator() -> None:
    assert denominator(torch.tensor(4.0), None).item() == 4
    assert denominator(torch.tensor(4.0), torch.tensor(9)).item() == 9
    assert denominator(torch.tensor(0.0), None).item() == 1


def test_taught_places_skip_masked_padded_and_first_ones() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    verified = Verified(ids, ids, torch.tensor([4, 2]))
    mask = torch.tensor([[True, True, False, True], [True, True, True, True]])
    row, column = taught_places(verified, mask)
    assert list(zip(row.tolist(), column.tolist(), strict=True)) == [(0, 1), (0, 3), (1, 1)]
