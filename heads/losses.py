"""Losses of draft heads on places of text. All arithmetic is float32, whatever the heads compute in.

Letters: B rows, T places, P supervised places, D hidden size, Q draft vocabulary, K outcomes compared.
p is the target's distribution (the teacher), q the draft's. A = sum_v min(p(v), q(v)) is the chance that lossless
sampling accepts a token drawn from q (Leviathan et al. 2023, theorem 3.5).

| `loss` | per place | source |
|---|---|---|
| `cross_entropy` | `-log q(v)`, v the teacher's first choice | Cai et al. 2024 (Medusa) |
| `soft_cross_entropy` | `-sum p log q` | Hinton et al. 2015 |
| `forward_kl` | `sum p log(p/q)`: the same gradient, zero at q = p | |
| `reverse_kl` | `sum q log(q/p)` | Gu et al. 2024 (MiniLLM) |
| `total_variation` | `1 - A` | Zhou et al. 2024 (DistillSpec) |
| `ce_tv` | `0.1 (-sum p log q) + 0.9 (1 - A)` | arXiv 2607.05147 (DSpark) |
| `lk_alpha` | `-log A` | arXiv 2602.23881 (LK losses) |
| `lk_hybrid` | `w KL + (1 - w)(1 - A)`, `w = exp(-lk_decay * mean A)` without gradient | the same |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from selfspec.draft import TopTokens, Verified
from selfspec.draft_output import DraftOutput
from selfspec.errors import ConfigError
from selfspec.head import HeadConfig
from selfspec.vocab import DraftVocab

_MOST_LOGITS = 1 << 26
"""Logits kept for the backward pass at once (256 MB); beyond it they are made again there, part by part."""


@dataclass(kw_only=True)
class TaughtConfig(HeadConfig):
    """Fields of heads that learn the target's distribution.

    Args:
        loss: one of `LOSSES`.
        teacher_top_k: compare the teacher's likeliest tokens one by one and all others as one outcome; 0 compares
            every token, or all that training data store of it (`top_logits`). Saves memory and time where the draft
            vocabulary is large.
        lk_decay: how fast `lk_hybrid` turns from KL to acceptance as the acceptance grows.
    """

    loss: str = "soft_cross_entropy"
    teacher_top_k: int = 0
    lk_decay: float = 3.0

    def __post_init__(self) -> None:
        """Refuse what no loss is called."""
        if self.loss not in LOSSES:
            raise ConfigError(f"loss is {self.loss!r}, wanted one of {', '.join(LOSSES)}")
        if self.teacher_top_k < 0 or self.lk_decay < 0:
            raise ConfigError(f"teacher_top_k {self.teacher_top_k} and lk_decay {self.lk_decay} must not be negative")


@dataclass(frozen=True, eq=False)
class Teacher:
    """What the target says at P places, without gradient.

    Args:
        log_p: `[P, K]` float32, log p of the outcomes compared.
        first: `[P]` int64, the first choice as a draft column.
        columns: `[P, K - 1]` int64, the draft columns of the outcomes but the last, which is every other token; None
            when the outcomes are the Q draft columns.
    """

    log_p: Tensor
    first: Tensor
    columns: Tensor | None = None

    def pick(self, places: Tensor) -> Teacher:
        """The teacher at some of the places (`[M]` int64, in any order, repeats allowed)."""
        columns = None if self.columns is None else self.columns[places]
        return Teacher(self.log_p[places], self.first[places], columns)


@dataclass(frozen=True, eq=False)
class HeadScore:
    """Scalars float32: the loss summed over the places that count, and how often the first choice was right."""

    loss: Tensor
    correct: Tensor


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


@torch.no_grad()
def teach_at(output: DraftOutput, verified: Verified, row: Tensor, column: Tensor, top_k: int = 0) -> Teacher:
    """The teacher at some places: what is stored of the target's distribution, else `teach` on its hidden states.

    Args:
        output: of the head.
        verified: with `top`, or `hidden`.
        row: `[P]` int64.
        column: `[P]` int64.
        top_k: see `TaughtConfig.teacher_top_k`; of what is stored, 0 takes all.

    Raises:
        ConfigError: what is stored does not say what is asked.
    """
    if verified.top is not None:
        top = verified.top
        return stored_teacher(output.vocab, TopTokens(*(t[row, column] for t in (top.ids, top.log_p, top.rest))), top_k)
    assert verified.hidden is not None
    return teach(output, verified.hidden[row, column].to(output.rows.dtype), top_k)


def stored_teacher(vocab: DraftVocab, top: TopTokens, top_k: int = 0) -> Teacher:
    """The teacher at P places, from the K likeliest tokens at each (`[P, K]`, `[P, K]` and `[P]`).

    All other tokens are one outcome, as with `teacher_top_k`.

    Raises:
        ConfigError: a reduced draft vocabulary, or fewer tokens than `top_k`.
    """
    known, size = top.ids.shape[-1], vocab.size
    if size < vocab.target_size:
        raise ConfigError(
            f"the data store the target's {known} likeliest of {vocab.target_size} tokens (top_logits), which does not "
            f"say how likely each is among the {size} of the draft vocabulary; set vocabulary.size=0, or make the data "
            "without top_logits and with store_features=true"
        )
    kept = min(top_k or known, size)
    if kept > known:
        raise ConfigError(
            f"draft.teacher_top_k is {top_k}, the data store {known} tokens (top_logits) at each place; lower it to "
            f"{known}, set it to 0 to use all that is stored, or make the data with top_logits={top_k}"
        )
    ids, log_p = top.ids.long(), top.log_p.float()
    if kept == size:
        return Teacher(torch.empty_like(log_p).scatter_(1, ids, log_p), ids[:, 0])
    others = torch.cat([log_p[:, kept:], top.rest.float().unsqueeze(-1)], -1).logsumexp(-1, keepdim=True)
    return Teacher(torch.cat([log_p[:, :kept], others], -1), ids[:, 0], ids[:, :kept])


@torch.no_grad()
def teach(output: DraftOutput, hidden: Tensor, top_k: int = 0) -> Teacher:
    """The teacher at `[P, D]` hidden states of the target.

    p is the target's distribution given that the token is one the draft can propose. Places whose own token lies
    outside the draft vocabulary still teach the ranking of the others.
    """
    parts = [teacher_of(output.teach(part), top_k) for part in hidden.split(_rows(output.vocab.size))]
    if len(parts) == 1:
        return parts[0]
    columns = [part.columns for part in parts if part.columns is not None]
    first = torch.cat([part.first for part in parts])
    return Teacher(torch.cat([part.log_p for part in parts]), first, torch.cat(columns) if columns else None)


def teacher_of(logits: Tensor, top_k: int = 0) -> Teacher:
    """The teacher whose logits over the draft vocabulary are `[P, Q]`."""
    logits = _wide(logits.detach())
    if not 0 < top_k < logits.shape[-1]:
        return Teacher(logits.log_softmax(-1), logits.argmax(-1))
    columns = logits.topk(top_k).indices
    return Teacher(_log_outcomes(logits, columns), columns[:, 0], columns)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _log_outcomes(logits: Tensor, columns: Tensor | None) -> Tensor:
    logits = _wide(logits)
    if columns is None:
        return logits.log_softmax(-1)
    others = logits.scatter(1, columns, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(1, columns), others], -1).log_softmax(-1)


def cross_entropy(logits: Tensor, teacher: Teacher) -> Tensor:
    """`-log q` of the teacher's first choice, `[P]`."""
    return F.cross_entropy(_wide(logits), teacher.first, reduction="none")


def soft_cross_entropy(logits: Tensor, teacher: Teacher) -> Tensor:
    """`-sum p log q`, `[P]`. Smallest, the entropy of p, where q = p."""
    if teacher.columns is None:
        return F.cross_entropy(_wide(logits), teacher.log_p.exp(), reduction="none")
    return -(teacher.log_p.exp() * _log_outcomes(logits, teacher.columns)).sum(-1)


def forward_kl(logits: Tensor, teacher: Teacher) -> Tensor:
    """`sum p log(p / q)`, `[P]`."""
    return soft_cross_entropy(logits, teacher) + (teacher.log_p.exp() * teacher.log_p).sum(-1)


def reverse_kl(logits: Tensor, teacher: Teacher) -> Tensor:
    """`sum q log(q / p)`, `[P]`."""
    log_q = _log_outcomes(logits, teacher.columns)
    return (log_q.exp() * (log_q - teacher.log_p)).sum(-1)


def total_variation(logits: Tensor, teacher: Teacher) -> Tensor:
    """`1 - A`, half the sum of `|p - q|` where both sum to one, `[P]`."""
    return 1 - torch.minimum(_log_outcomes(logits, teacher.columns), teacher.log_p).exp().sum(-1)


def ce_tv(logits: Tensor, teacher: Teacher) -> Tensor:
    """A tenth of the cross entropy keeps a gradient where nothing is accepted, `[P]`."""
    return 0.1 * soft_cross_entropy(logits, teacher) + 0.9 * total_variation(logits, teacher)


def lk_alpha(logits: Tensor, teacher: Teacher) -> Tensor:
    """`-log A`, `[P]`: the gradient of `1 - A` divided by A, so that it does not vanish where nothing is accepted."""
    return -torch.minimum(_log_outcomes(logits, teacher.columns), teacher.log_p).logsumexp(-1)


LOSSES: dict[str, tuple[Callable[[Tensor, Teacher], Tensor], ...]] = {
    "cross_entropy": (cross_entropy,),
    "soft_cross_entropy": (soft_cross_entropy,),
    "forward_kl": (forward_kl,),
    "reverse_kl": (reverse_kl,),
    "total_variation": (total_variation,),
    "ce_tv": (ce_tv,),
    "lk_alpha": (lk_alpha,),
    "lk_hybrid": (forward_kl, total_variation),
}
"""What is computed per place for each name; `lk_hybrid` weighs its two parts by the mean acceptance of the batch."""


class Scorer(Protocol):
    """What turns guesses into logits over a draft vocabulary."""

    vocab: DraftVocab

    def __call__(self, guess: Tensor, stack: int | None = None, /) -> Tensor:
        """`[P, ...]` to `[P, Q]`."""


@torch.no_grad()
def acceptance(output: Scorer, guess: Tensor, teacher: Teacher) -> Tensor:
    """A of each guess, `[P]` float32 without gradient."""
    places = torch.arange(guess.shape[0], device=guess.device).split(_rows(output.vocab.size))
    found = [1 - total_variation(output(guess[part]), teacher.pick(part)) for part in places]
    return torch.cat(found).clamp(0, 1)


def learn(
    output: Scorer,
    guess: Tensor,
    teacher: Teacher,
    real: Tensor,
    config: TaughtConfig,
    stack: int | None = None,
) -> HeadScore:
    """Compare guesses with the teacher; logits of large vocabularies are never held for all places at once.

    Args:
        output: of the head.
        guess: `[P, D]`, what the output head reads.
        teacher: at the same places.
        real: `[P]` float32, 1 where the guess counts, else 0.
        config: names the loss.
        stack: which output head, where there are several.
    """

    def score(part: Tensor, log_p: Tensor, first: Tensor, columns: Tensor | None) -> Tensor:
        logits, taught = output(part, stack), Teacher(log_p, first, columns)
        parts = [loss(logits, taught) for loss in LOSSES[config.loss]]
        right = (logits.detach().argmax(-1) == first).float()
        return torch.stack([*parts, right])

    rows = _rows(output.vocab.size)
    if guess.shape[0] <= rows:
        scores = score(guess, teacher.log_p, teacher.first, teacher.columns)
    else:
        scores = torch.cat([checkpoint(score, *part, use_reentrant=False) for part in _split(guess, teacher, rows)], 1)
    losses = _blend(scores[:-1], real, config)
    return HeadScore((losses * real).sum(), (scores[-1].detach() * real).sum())


def _rows(columns: int) -> int:
    return max(_MOST_LOGITS // columns, 1)


def _split(guess: Tensor, teacher: Teacher, rows: int) -> list[tuple[Tensor | None, ...]]:
    columns = [None] * -(-guess.shape[0] // rows) if teacher.columns is None else teacher.columns.split(rows)
    return list(zip(guess.split(rows), teacher.log_p.split(rows), teacher.first.split(rows), columns, strict=True))


def _blend(parts: Tensor, real: Tensor, config: TaughtConfig) -> Tensor:
    if config.loss != "lk_hybrid":
        return parts[0]
    divergence, rejection = parts
    acceptance = ((1 - rejection.detach()) * real).sum() / real.sum().clamp_min(1)
    weight = torch.exp(-config.lk_decay * acceptance)
    return weight * divergence + (1 - weight) * rejection


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


def denominator(seen: Tensor, items: Tensor | None) -> Tensor:
    """What the sum over places is divided by: the caller's count, else this batch's own, never zero."""
    return (seen if items is None else items.to(seen)).clamp_min(1)
