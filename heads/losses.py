"""Losses of draft heads on places of text. All arithmetic is float32, whatever the heads compute in.

Letters: B rows, T places, P supervised places, D hidden size, Q draft vocabulary.
p is the target's distribution (the teacher), q the draft's.
Every function returns one value per place; the caller sums what it supervises and names the denominator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.draft import Verified


def taught_places(verified: Verified, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column (`[P]` each) of the places where the target teaches: text to learn from, not the first place.

    A guess for the token after place c that was made s + 1 places earlier belongs to column c - 1 - s, if there is one.

    Args:
        verified: whole sequences.
        mask: `[B, T]` bool; true where `next_tokens` is text to learn from.
    """
    columns = torch.arange(mask.shape[1], device=mask.device)
    row, column = (mask & (columns > 0) & (columns < verified.counts.unsqueeze(1))).nonzero(as_tuple=True)
    return row, column


def teacher_probs(logits: Tensor) -> Tensor:
    """p on the draft vocabulary, `[P, Q]` float32 without gradient.

    The softmax runs over the draft's columns only, so p is the target's distribution given that the token is one the
    draft can propose. Places whose own token lies outside the draft vocabulary still teach the rest of the ranking.
    """
    return logits.detach().float().softmax(-1)


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """`-sum_v p(v) log q(v)` per place (Hinton et al. 2015), `[P]`. Smallest, the entropy of p, where q = p.

    Args:
        logits: `[P, Q]` of the draft.
        probs: `[P, Q]` float32, p.
    """
    return F.cross_entropy(logits.float(), probs, reduction="none")


def feature_distance(guess: Tensor, truth: Tensor) -> Tensor:
    """Smooth L1 distance between features, mean over D, `[P]` (Li et al. 2024, EAGLE, section 3.2).

    Both are divided by the root mean square of the true feature first: final norms differ in scale by orders of
    magnitude between model families, and the turning point of smooth L1 is fixed at 1.

    Args:
        guess: `[P, D]`.
        truth: `[P, D]`.
    """
    truth = truth.detach().float()
    scale = truth.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return F.smooth_l1_loss(guess.float() / scale, truth / scale, reduction="none").mean(-1)


def agreement(logits: Tensor, probs: Tensor) -> Tensor:
    """Whether the draft's first choice is the target's among the draft vocabulary, `[P]` float32."""
    return (logits.argmax(-1) == probs.argmax(-1)).float()


def denominator(seen: Tensor, items: Tensor | None) -> Tensor:
    """What the sum over places is divided by: the caller's count, else this batch's own, never zero."""
    return (seen if items is None else items.to(seen)).clamp_min(1)
