"""Hidden states as they are stored: bfloat16, or float8 with one scale per token.

Letters: T tokens, D hidden size, V vocabulary, K stored logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.target import Target

SCALE = ".scale"
_LARGEST = 448.0  # of float8 e4m3


def stored(name: str, values: Tensor, dtype: str) -> dict[str, Tensor]:
    """`[T, D]` as tensors to write, by name.

    float8 has three bits of mantissa: a value is off by at most a sixteenth of itself, or by 2**-10 of the scale where
    it is small beside the largest of its token.
    """
    values = values.detach().to("cpu")
    if dtype == "bfloat16":
        return {name: values.to(torch.bfloat16).contiguous()}
    scale = values.float().abs().amax(-1) / _LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return {name: (values.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), name + SCALE: scale}


def restored(values: Tensor, scale: Tensor | None) -> Tensor:
    """What `stored` wrote, `[T, D]` bfloat16."""
    if scale is None:
        return values
    return (values.float() * scale.unsqueeze(-1)).to(torch.bfloat16)


def thoughts(target: Target, hidden: Tensor, top: int, chunk: int = 256) -> dict[str, Tensor]:
    """The target's first choice after each token, and its `top` highest logits, `[T, V]` never being in memory at once.

    Args:
        target: whose output head reads.
        hidden: `[T, D]`, last hidden states.
        top: K; 0 stores no logits.

    Returns:
        `predictions` [T] int32 and, with `top`, `top_ids` [T, K] int32, `top_logits` [T, K] float32 less the logarithm
        of the whole sum of exponentials, so that they are log-probabilities of the target, and `top_rest` [T] float32,
        the log-probability of all other tokens together.
    """
    first, ids, values, rest = [], [], [], []
    with torch.no_grad():
        for part in hidden.split(chunk):
            logits = target.head(part).float()
            first.append(logits.argmax(-1))
            if top:
                best = logits.topk(min(top, logits.shape[-1]), dim=-1)
                ids.append(best.indices)
                whole = logits.logsumexp(-1, keepdim=True)
                values.append(best.values - whole)
                rest.append(
                    (logits.scatter(-1, best.indices, -torch.inf).logsumexp(-1, keepdim=True) - whole).squeeze(-1)
                )
    found = {"predictions": torch.cat(first).to("cpu", torch.int32)}
    if top:
        found["top_ids"] = torch.cat(ids).to("cpu", torch.int32)
        found["top_logits"] = torch.cat(values).to("cpu", torch.float32)
        found["top_rest"] = torch.cat(rest).to("cpu", torch.float32)
    return found
