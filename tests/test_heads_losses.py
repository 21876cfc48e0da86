"""Limits of the losses: where they vanish, their bounds, what they reduce to, their gradients, extreme inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.draft import TopTokens, Verified
from selfspec.errors import ConfigError
from selfspec.head import DraftOutput
from selfspec.heads import losses
from selfspec.heads.losses import (
    LOSSES,
    TaughtConfig,
    Teacher,
    cross_entropy,
    denominator,
    feature_distance,
    forward_kl,
    learn,
    lk_alpha,
    reverse_kl,
    soft_cross_entropy,
    stored_teacher,
    taught_places,
    teach,
    teacher_of,
    total_variation,
)
from selfspec.vocab import DraftVocab

PLACES, COLUMNS = 6, 11
each_top_k = pytest.mark.parametrize("top_k", [0, 1, 4, COLUMNS])
SINGLE = [parts[0] for parts in LOSSES.values() if len(parts) == 1]
each_loss = pytest.mark.parametrize("loss", SINGLE, ids=lambda loss: loss.__name__)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def outcomes(logits: Tensor, columns: Tensor | None) -> Tensor:
    """Probabilities of the outcomes compared, from the definition."""
    probs = logits.softmax(-1)
    if columns is None:
        return probs
    named = probs.gather(1, columns)
    return torch.cat([named, 1 - named.sum(-1, keepdim=True)], -1)


DEFINITIONS: dict[Callable[[Tensor, Teacher], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    soft_cross_entropy: lambda p, q: -(p * q.log()).sum(-1),
    forward_kl: lambda p, q: (p * (p / q).log()).sum(-1),
    reverse_kl: lambda p, q: (q * (q / p).log()).sum(-1),
    total_variation: lambda p, q: (p - q).abs().sum(-1) / 2,
    lk_alpha: lambda p, q: -torch.minimum(p, q).sum(-1).log(),
}


@each_top_k
@pytest.mark.parametrize("loss", list(DEFINITIONS), ids=lambda loss: loss.__name__)
def test_values_and_gradients_are_those_of_the_definition(
    loss: Callable[[Tensor, Teacher], Tensor], top_k: int
) -> None:
    truth = random(PLACES, COLUMNS, seed=1, dtype=torch.float64) * 2
    teacher = teacher_of(truth, top_k)
    ours, theirs = (random(PLACES, COLUMNS, dtype=torch.float64).requires_grad_() for _ in range(2))
    value = loss(ours, teacher)
    wanted = DEFINITIONS[loss](outcomes(truth, teacher.columns), outcomes(theirs, teacher.columns))
    torch.testing.assert_close(value, wanted, atol=1e-10, rtol=1e-10)
    weights = random(PLACES, seed=2, dtype=torch.float64)
    (value * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-10, rtol=1e-10)


def stored(truth: Tensor, known: int) -> TopTokens:
    """What data hold of logits `[P, V]`, by sorting probabilities."""
    probs, ids = truth.softmax(-1).sort(-1, descending=True)
    return TopTokens(ids[:, :known].int(), probs[:, :known].log().float(), probs[:, known:].sum(-1).log().float())


@pytest.mark.parametrize("known", [1, 4, COLUMNS - 1, COLUMNS])
@pytest.mark.parametrize("fewer", [0, 1, 3])
@pytest.mark.parametrize("loss", list(DEFINITIONS), ids=lambda loss: loss.__name__)
def test_stored_likeliest_tokens_teach_the_definition(
    loss: Callable[[Tensor, Teacher], Tensor], known: int, fewer: int
) -> None:
    """The tokens told apart are the stored ones, or the likeliest of them; all others are one outcome."""
    truth = random(PLACES, COLUMNS, seed=1, dtype=torch.float64) * 2
    logits = random(PLACES, COLUMNS, dtype=torch.float64)
    kept = min(fewer, known) or known
    teacher = stored_teacher(DraftVocab(COLUMNS, COLUMNS), stored(truth, known), min(fewer, known))
    columns = None if kept == COLUMNS else truth.argsort(-1, descending=True)[:, :kept]
    assert teacher.columns is None if columns is None else torch.equal(teacher.columns, columns)
    wanted = DEFINITIONS[loss](outcomes(truth, columns), outcomes(logits, columns))
    torch.testing.assert_close(loss(logits.float(), teacher).double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(teacher.first, truth.argmax(-1))


def test_stored_tokens_that_do_not_say_what_is_asked_are_refused() -> None:
    top = stored(random(PLACES, COLUMNS), 4)
    with pytest.raises(ConfigError, match=r"teacher_top_k is 5, the data store 4 .* top_logits=5"):
        stored_teacher(DraftVocab(COLUMNS, COLUMNS), top, 5)
    with pytest.raises(ConfigError, match=r"4 likeliest of 11 .* among the 7 of the draft vocabulary"):
        stored_teacher(DraftVocab(7, COLUMNS), top)


@each_loss
@each_top_k
def test_gradients_are_the_slopes(loss: Callable[[Tensor, Teacher], Tensor], top_k: int) -> None:
    teacher = teacher_of(random(3, 5, seed=1, dtype=torch.float64), top_k)
    logits = random(3, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, teacher), logits)


@each_top_k
@pytest.mark.parametrize("loss", [forward_kl, reverse_kl, total_variation, lk_alpha], ids=lambda loss: loss.__name__)
def test_losses_vanish_at_the_teacher_and_only_there(loss: Callable[[Tensor, Teacher], Tensor], top_k: int) -> None:
    truth = random(PLACES, COLUMNS)
    teacher = teacher_of(truth, top_k)
    torch.testing.assert_close(loss(truth + 3.0, teacher), torch.zeros(PLACES), atol=2e-6, rtol=0)
    for seed in range(1, 6):
        assert bool((loss(truth + random(PLACES, COLUMNS, seed=seed), teacher) > 1e-5).all())


def test_soft_cross_entropy_at_the_teacher_is_the_entropy() -> None:
    truth = random(PLACES, COLUMNS)
    p = truth.softmax(-1)
    torch.testing.assert_close(soft_cross_entropy(truth, teacher_of(truth)), -(p * p.log()).sum(-1))


@each_top_k
def test_bounds_between_the_losses(top_k: int) -> None:
    """TV <= 1, TV <= -log A, and Pinsker's 2 TV^2 <= KL both ways."""
    for seed in range(1, 20):
        teacher, logits = teacher_of(3 * random(50, COLUMNS, seed=seed), top_k), 3 * random(50, COLUMNS, seed=-seed)
        tv = total_variation(logits, teacher)
        assert bool((tv >= 0).all()) and bool((tv <= 1).all())
        assert bool((tv <= lk_alpha(logits, teacher) + 1e-6).all())
        for divergence in (forward_kl, reverse_kl):
            assert bool((2 * tv**2 <= divergence(logits, teacher) + 1e-5).all())


@pytest.mark.parametrize("loss", [forward_kl, reverse_kl, total_variation, lk_alpha], ids=lambda loss: loss.__name__)
def test_telling_fewer_tokens_apart_only_lowers_the_loss(loss: Callable[[Tensor, Teacher], Tensor]) -> None:
    """Data processing: merging outcomes brings distributions closer; with every token named nothing is merged."""
    truth, logits = random(40, COLUMNS, seed=1), random(40, COLUMNS)
    whole = loss(logits, teacher_of(truth))
    by_k = [loss(logits, teacher_of(truth, k)) for k in (1, 2, 5, COLUMNS - 1, COLUMNS)]
    for fewer, more in itertools.pairwise(by_k):
        assert bool((fewer <= more + 1e-6).all())
    torch.testing.assert_close(by_k[-1], whole)
    torch.testing.assert_close(by_k[-2], whole)  # one token left over is told apart by itself


def test_a_certain_teacher_makes_every_cross_entropy_hard() -> None:
    labels = torch.tensor([3, 0, 10])
    logits = random(3, COLUMNS)
    certain = teacher_of(F.one_hot(labels, COLUMNS) * 1e4)
    hard = F.cross_entropy(logits, labels, reduction="none")
    for loss in (cross_entropy, soft_cross_entropy, forward_kl, lk_alpha):
        torch.testing.assert_close(loss(logits, certain), hard)
    torch.testing.assert_close(total_variation(logits, certain), 1 - torch.exp(-hard))


def test_cross_entropy_asks_for_the_teachers_first_choice() -> None:
    truth, logits = random(PLACES, COLUMNS, seed=1), random(PLACES, COLUMNS)
    wanted = F.cross_entropy(logits, truth.argmax(-1), reduction="none")
    for top_k in (0, 3):
        torch.testing.assert_close(cross_entropy(logits, teacher_of(truth, top_k)), wanted)


def test_where_nothing_is_accepted_lk_alpha_still_pulls_and_total_variation_does_not() -> None:
    teacher = teacher_of(torch.tensor([[40.0, 0.0, 0.0]]))
    slopes = []
    for loss in (total_variation, lk_alpha):
        logits = torch.tensor([[0.0, 40.0, 0.0]], requires_grad=True)
        loss(logits, teacher).sum().backward()
        slopes.append(float(logits.grad.abs().max()))
    assert slopes[0] < 1e-6 and slopes[1] > 0.4


# The blend, and how heads use the losses


@pytest.fixture(scope="module")
def output() -> DraftOutput:
    return DraftOutput(tiny.selfspec_target("llama"), 40, own=False)


def scores(output: DraftOutput, guess: Tensor, truth: Tensor, real: Tensor, **fields: float | str) -> Tensor:
    config = TaughtConfig(**fields)
    return learn(output, guess, teach(output, truth, config.teacher_top_k), real, config).loss


def test_the_hybrid_goes_from_kl_to_total_variation(output: DraftOutput) -> None:
    guess, truth, real = random(9, 32), random(9, 32, seed=1), torch.tensor([1.0] * 7 + [0.0] * 2)
    kl, tv = (scores(output, guess, truth, real, loss=name) for name in ("forward_kl", "total_variation"))
    torch.testing.assert_close(scores(output, guess, truth, real, loss="lk_hybrid", lk_decay=0.0), kl)
    torch.testing.assert_close(scores(output, guess, truth, real, loss="lk_hybrid", lk_decay=1e9), tv)
    weight = math.exp(-3.0 * (1 - float(tv) / 7))
    torch.testing.assert_close(scores(output, guess, truth, real, loss="lk_hybrid"), weight * kl + (1 - weight) * tv)


def test_the_hybrids_weight_has_no_gradient(output: DraftOutput) -> None:
    truth, real = random(9, 32, seed=1), torch.ones(9)
    grads, values = [], []
    for name in ("forward_kl", "total_variation", "lk_hybrid"):
        guess = random(9, 32).requires_grad_()
        value = scores(output, guess, truth, real, loss=name)
        value.backward()
        grads.append(guess.grad)
        values.append(float(value.detach()))
    weight = math.exp(-3.0 * (1 - values[1] / 9))
    torch.testing.assert_close(grads[2], weight * grads[0] + (1 - weight) * grads[1])


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("top_k", [0, 5])
def test_large_vocabularies_in_parts_give_the_same(
    output: DraftOutput, monkeypatch: pytest.MonkeyPatch, name: str, top_k: int
) -> None:
    truth, real = random(10, 32, seed=1), (random(10, seed=2) > 0).float()
    results = []
    for most in (1 << 26, 3 * 40):
        monkeypatch.setattr(losses, "_MOST_LOGITS", most)
        guess = random(10, 32).requires_grad_()
        config = TaughtConfig(loss=name, teacher_top_k=top_k)
        score = learn(output, guess, teach(output, truth, top_k), real, config)
        score.loss.backward()
        results.append((score.loss.detach(), score.correct, guess.grad))
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(whole, parts)


def test_places_that_do_not_count_add_nothing(output: DraftOutput) -> None:
    guess, truth, real = random(6, 32), random(6, 32, seed=1), torch.tensor([1.0, 0, 1, 0, 0, 1])
    kept = real.bool()
    for name in LOSSES:
        torch.testing.assert_close(
            scores(output, guess, truth, real, loss=name),
            scores(output, guess[kept], truth[kept], torch.ones(3), loss=name),
        )


@pytest.mark.parametrize("name", list(LOSSES))
def test_no_places_give_zero_with_gradients(output: DraftOutput, name: str) -> None:
    guess = random(4, 32).requires_grad_()
    config = TaughtConfig(loss=name)
    nothing = guess[torch.zeros(4, dtype=torch.bool)]
    score = learn(output, nothing, teach(output, nothing.detach()), torch.zeros(0), config)
    (score.loss / denominator(torch.zeros(()), None)).backward()
    assert score.loss.item() == 0 and not guess.grad.any()


def test_correct_counts_equal_first_choices(output: DraftOutput) -> None:
    truth = random(8, 32)
    guess = torch.cat([truth[:5], -truth[5:]])
    real = torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 1])
    assert learn(output, guess, teach(output, truth), real, TaughtConfig()).correct.item() == 4


@pytest.mark.parametrize("fields", [{"loss": "kl"}, {"teacher_top_k": -1}, {"lk_decay": -1.0}], ids=str)
def test_losses_that_do_not_exist_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        TaughtConfig(**fields)


def test_the_teacher_gets_no_gradient() -> None:
    assert not teacher_of(random(2, 3).requires_grad_()).log_p.requires_grad
    truth, guess = random(2, 3).requires_grad_(), random(2, 3, seed=1).requires_grad_()
    feature_distance(guess, truth).sum().backward()
    assert truth.grad is None and guess.grad is not None


def test_feature_distance_vanishes_at_the_truth_and_ignores_the_scale() -> None:
    truth, guess = random(4, 16), random(4, 16, seed=1)
    assert not feature_distance(truth, truth).any()
    torch.testing.assert_close(feature_distance(guess, truth), feature_distance(guess * 1e4, truth * 1e4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("top_k", [0, 3])
def test_losses_are_finite_float32_on_extreme_inputs(dtype: torch.dtype, top_k: int) -> None:
    large = (random(3, 8) * 1e4).to(dtype)
    zero = torch.zeros(3, 8, dtype=dtype)
    for loss in SINGLE:
        logits = (-large).requires_grad_()
        value = loss(logits, teacher_of(large, top_k))
        value.sum().backward()
        assert value.dtype == torch.float32 and bool(torch.isfinite(value).all()), loss
        assert bool(torch.isfinite(logits.grad).all()), loss
    assert bool(torch.isfinite(feature_distance(zero, large)).all())
    assert bool(torch.isfinite(feature_distance(zero, zero)).all())


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
