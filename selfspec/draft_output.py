"""A head's own output head: rows of the target's, borrowed, or a weight of its own.

Letters: D hidden size, P places, Q draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.light import LightProduct, is_light, packs
from selfspec.output_head import FewRowsHead
from selfspec.target import Target
from selfspec.vocab import DraftVocab


class DraftOutput(nn.Module):
    """Hidden states to logits over the draft vocabulary.

    Borrows rows of the target's output head (kept as a buffer that is never saved), or owns its weight and keeps the
    borrowed rows beside it for the teacher.

    Args:
        target: lends its rows.
        size: Q; 0 is the whole vocabulary.
        own: own the weight.
        stacks: own this many weights, `[stacks, Q, D]`, one for each of the draft's heads; 0 is one for all.
        width: of the hidden states read, where it is not the target's; such a weight starts at zero.
        own_bias: own a bias beside the weight, `[Q]` or `[stacks, 1, Q]`.
    """

    rows: Tensor
    teacher_rows: Tensor
    teacher_bias: Tensor | None

    def __init__(
        self, target: Target, size: int, own: bool, stacks: int = 0, width: int = 0, own_bias: bool = False
    ) -> None:
        super().__init__()
        self.target = target
        self.own = own or stacks > 0
        self.vocab = DraftVocab(size or target.vocab_size, target.vocab_size)
        weight, bias = target.output_rows(self.vocab.ids)
        self.follows = width in (0, target.hidden_size)
        """Whether owned rows start as the target's."""
        if self.own:
            own_rows = weight if self.follows else weight.new_zeros(weight.shape[0], width)
            self.rows = nn.Parameter(own_rows.expand(stacks, -1, -1).clone() if stacks else own_rows.clone())
            self.register_buffer("teacher_rows", weight, persistent=False)
        else:
            self.register_buffer("rows", weight, persistent=False)
        self.register_buffer("teacher_bias", bias, persistent=False)
        self.own_bias: nn.Parameter | None = None
        if own_bias:
            start = weight.new_zeros(weight.shape[0]) if bias is None else bias
            self.own_bias = nn.Parameter(start.expand(stacks, 1, -1).clone() if stacks else start.clone())
        self._few_rows: FewRowsHead | None = None
        self._light: list[LightProduct] = []

    def lighten(self) -> None:
        """Compute logits for drafting in 8 bits a weight, see `selfspec.light`."""
        if packs(self.rows):
            self._light = [LightProduct() for _ in range(self.rows.shape[0] if self.rows.ndim == 3 else 1)]

    def set_vocab(self, ids: Tensor) -> None:
        """Choose the draft vocabulary (`[Q]` target ids) and take over the target's rows for it."""
        self.vocab.set_ids(ids)
        self.refresh(rows=True)

    def refresh(self, rows: bool) -> None:
        """Borrow again after `vocab.ids` changed; `rows=False` leaves owned rows alone (they come from a file)."""
        weight, bias = self.target.output_rows(self.vocab.ids)
        with torch.no_grad():
            if (rows and self.follows) or not self.own:
                self.rows.copy_(weight)
            if self.own:
                self.teacher_rows.copy_(weight)
            if self.teacher_bias is not None and bias is not None:
                self.teacher_bias.copy_(bias)
                if rows and self.own_bias is not None:
                    self.own_bias.copy_(bias)

    @torch.no_grad()
    def teach(self, hidden: Tensor) -> Tensor:
        """The target's own logits over the draft vocabulary, `[..., D]` to `[..., Q]`, whoever owns the rows."""
        rows = self.teacher_rows if self.own else self.rows
        return self.target.finish_logits(F.linear(hidden, rows, self.teacher_bias))

    def forward(self, hidden: Tensor, stack: int | None = None) -> Tensor:
        """`[..., D]` to logits `[..., Q]`, scaled and capped as the target's own.

        Where every head has a weight of its own, `hidden` is `[stacks, P, D]`, or belongs to head number `stack`.
        """
        bias = self.teacher_bias if self.own_bias is None else self.own_bias
        if self.rows.ndim == 2:
            raw = self._one(hidden, self.rows, bias, 0)
        elif stack is not None:
            raw = self._one(hidden, self.rows[stack], _of_stack(bias, stack), stack)
        elif self._light and is_light(hidden):
            raw = torch.stack([self._one(h, self.rows[i], _of_stack(bias, i), i) for i, h in enumerate(hidden)])
        else:
            raw = hidden @ self.rows.transpose(-1, -2)
            raw = raw if bias is None else raw + bias
        return self.target.finish_logits(raw)

    def _one(self, hidden: Tensor, rows: Tensor, bias: Tensor | None, stack: int) -> Tensor:
        """`[..., D]`, `[Q, D]` and `[Q]` to `[..., Q]`."""
        if self._light and is_light(hidden):
            return self._light[stack](hidden, rows, bias)
        if torch.is_grad_enabled() or hidden.ndim != 3 or rows is not self.rows or not FewRowsHead.applies(rows):
            return F.linear(hidden, rows, bias)
        if self._few_rows is None or self._few_rows.weight is not rows:
            self._few_rows = FewRowsHead(rows, bias)
        return self._few_rows(hidden)


def _of_stack(bias: Tensor | None, stack: int) -> Tensor | None:
    """The `[Q]` bias of one head, out of one for all or `[stacks, 1, Q]`."""
    return bias if bias is None or bias.ndim == 1 else bias[stack, 0]
