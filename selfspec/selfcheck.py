"""A check of unknown model families before their first use: does a pass over guesses give the model's own logits?

Models differ in how they number positions, build masks and keep their cache, and code from outside transformers may do
anything. A wrong mask shows as slightly different text, so it is looked for before the first text is written.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.draft import Needs
from selfspec.errors import UnsupportedModel
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape
from selfspec.wrapped import is_wrapped, why_coarse, why_inexact

# fmt: off
CHECKED_BY_TESTS = frozenset(
    {
        "bamba", "bart", "biogpt", "bloom", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3",
        "ernie4_5", "exaone4", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
        "gemma4_text", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj",
        "granite", "granitemoe", "granitemoehybrid", "hunyuan_v1_dense", "lfm2", "lfm2_moe", "llama",
        "llama4_text", "mamba2", "minicpm3", "ministral", "mistral", "mixtral", "mpt", "nemotron", "nemotron_h",
        "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2",
        "qwen2_5_vl_text", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss",
        "smollm3", "stablelm", "starcoder2", "xglm", "zamba2",
    }
)
# fmt: on
"""`model_type`s whose tree or chain passes the tests of this package compare with plain passes."""

_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
_PROMPTS = (6, 4)
_PARENTS = (-1, 0, 0, 1, 2)
_KEPT = [0, 2]
_EXACT_DTYPES = (torch.float32, torch.float64)
_TOLERANCE, _TOLERANCE_ON_ACCELERATORS, _TOLERANCE_LOW_PRECISION = 1e-4, 2e-3, 0.05


def checked_target(model: PreTrainedModel, check: bool | None = None) -> Target:
    """A target that can be served exactly, as far as is known or can be seen.

    Args:
        model: see `Target`.
        check: compare passes (`check_passes`); None does so for families that no test covers and for models that are
            more than their own code and weights. False takes also what is known to be inexact.

    Raises:
        UnsupportedModel: the model cannot be served exactly; the message says why.
    """
    inexact = None if check is False else why_inexact(model)
    if inexact is not None:
        raise UnsupportedModel(
            f"{inexact}, so guesses change the tokens before them and the text would differ; quantise weights alone "
            "(int8 or 4 bits), or take it as it is with patch(..., self_check=False)"
        )
    coarse = why_coarse(model)
    if coarse is not None:
        warnings.warn(
            f"selfspec: {coarse}, which makes the rounding of a pass over several tokens visible: where two tokens are "
            "close, text may differ from plain decoding. `selfspec certify` measures it",
            UserWarning,
            stacklevel=4,
        )
    target = Target(model)
    try:
        if check or (check is None and (target.model_type not in CHECKED_BY_TESTS or is_wrapped(model))):
            check_passes(target)
    except Exception:
        target.release()
        raise
    return target


def check_passes(target: Target) -> None:
    """Compare passes over guesses with fresh passes over the same text: two trees with a roll-back between them,
    in two rows of different lengths.

    A model that fails on a tree is tried on a chain, and limited to chains when that is exact. Costs a handful of
    passes over a dozen tokens.

    Raises:
        UnsupportedModel: neither gives the model's own logits; the message says by how much they differ.
    """
    allowed = _allowed(target)
    found = _difference(target)
    if found > allowed and target.chain_only is None:
        target.chain_only = (
            f"{type(target.model).__name__} gives other logits on a tree of guesses than on plain text (by {found:.2g} "
            "of the largest)"
        )
        found = _difference(target)
    if found > allowed:
        raise UnsupportedModel(
            f"{type(target.model).__name__} ({target.model_type!r}) gives other logits for several new tokens at once "
            f"than for the same text read anew: they differ by {found:.2g} of the largest, at most {allowed} is "
            "rounding. Its text would change, so it is refused; patch(..., self_check=False) skips this check"
        )


def _allowed(target: Target) -> float:
    """How far rounding may part logits; accelerators may multiply float32 in fewer bits (TF32)."""
    if target.dtype not in _EXACT_DTYPES or why_coarse(target.model) is not None:
        return _TOLERANCE_LOW_PRECISION
    return _TOLERANCE if target.device.type == "cpu" else _TOLERANCE_ON_ACCELERATORS


@torch.no_grad()
def _difference(target: Target) -> float:
    """The largest difference of logits over all nodes, relative to the largest logit."""
    shape = TreeShape(torch.tensor([_PARENTS], device=target.device))
    prompts = _PROMPTS[:1] if target.chain_only else _PROMPTS
    generator = torch.Generator().manual_seed(0)
    size = (len(prompts), max(prompts) + 2 * len(_PARENTS))
    tokens = torch.randint(target.vocab_size, size, generator=generator).to(target.device)
    prompt, *guesses = tokens.split([max(prompts), len(_PARENTS), len(_PARENTS)], 1)
    texts = [prompt[row : row + 1, :count] for row, count in enumerate(prompts)]
    worst = 0.0
    try:
        cache = target.new_cache(len(prompts), 64)
        target.prefill(prompt, list(prompts), cache, Needs())
        for guess in guesses:
            tree = DraftTree(guess, shape)
            tree = tree.trunk() if target.chain_only else tree
            logits = target.verify(tree, cache, Needs()).logits
            for row, text in enumerate(texts):
                mine = tree.tokens[row : row + 1]
                for path in tree.shape.paths():
                    worst = max(worst, _apart(target, torch.cat([text, mine[:, path]], 1), logits[row, path]))
            kept = [0] if target.chain_only else _KEPT
            cache.keep([kept] * len(prompts))
            texts = [torch.cat([text, tree.tokens[row : row + 1, kept]], 1) for row, text in enumerate(texts)]
    except _FAULTS as error:
        raise UnsupportedModel(
            f"{type(target.model).__name__} ({target.model_type!r}) cannot read several new tokens behind a cache: "
            f"{type(error).__name__}: {error}"
        ) from error
    return worst


def _apart(target: Target, text: Tensor, found: Tensor) -> float:
    wanted = target.model(input_ids=text, use_cache=False).logits[0, -found.shape[0] :].float()
    apart = float((wanted - found.float().to(wanted.device)).abs().max() / wanted.abs().max())
    return apart if apart == apart else float("inf")
