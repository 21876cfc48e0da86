"""`patch` makes `model.generate` speculative; `unpatch` takes it back.

It goes through transformers' own extension point (`generate(custom_generate=...)`), so arguments, processors and
stopping criteria are prepared by transformers as ever.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria

from selfspec import hf
from selfspec.accept import LOSSLESS, AcceptRule
from selfspec.changes import change, refuse_change
from selfspec.draft import Draft
from selfspec.errors import ConfigError, UnsupportedGeneration
from selfspec.inference.call import Call
from selfspec.inference.drafting import Pick
from selfspec.inference.guard.setup import Guarding, guard_by_default, known_chances
from selfspec.inference.record import recorder
from selfspec.inference.speculation import Speculation
from selfspec.resolve import DraftLike, resolve_draft
from selfspec.selfcheck import checked_target
from selfspec.target import Target
from selfspec.wrapped import unwrapped

_HANDLE = "speculation"
KEPT = "selfspec_heads"
"""Where a model keeps heads that were named in a call of `generate`."""


def patch(
    model: PreTrainedModel,
    draft: DraftLike,
    *,
    nodes: int | None = None,
    guard: bool | None = None,
    combine: Literal["compose", "pick"] = "compose",
    accept: str | AcceptRule = LOSSLESS,
    revision: str | None = None,
    token: str | None = None,
    check_base: bool = True,
    light: bool = True,
    self_check: bool | None = None,
    record: str | Path | None = None,
    allow_target_change: bool = False,
) -> PreTrainedModel:
    """Make `model.generate` draft and verify. Its arguments and its output stay what they were.

    Args:
        model: a causal language model, or what PEFT or `torch.compile` made of one; its weights and its code are not
            touched.
        draft: a folder or Hub id of trained heads, the name of a method that needs no training (with what it works on
            after a colon where it wants something, as `METHOD:FOLDER`) or its configuration as a dict, any object
            that implements `selfspec.draft.Draft`, or a list of these.
        nodes: the most nodes of a tree, the root included; None leaves it to the guard, or without one to the draft.
        guard: before every round, choose the size of the tree that promises the most tokens per second on this machine,
            or none at all; costs are measured at the first `generate` and kept on disk. Greedy text is the same with
            any choice, sampled text has the same distribution. False asks the draft in every round; None is True,
            unless the environment says `SELFSPEC_GUARD=0`.
        combine: what several drafts do: "compose" puts their guesses into one tree, "pick" lets the guard ask one of
            them in each round.
        accept: the rule for sampled text, see `selfspec.accept.AcceptRule`. Rules with "lossy" in their name change the
            distribution of the text, and the report says so.
        revision: Hub revision of the heads.
        token: Hub token.
        check_base: compare the heads' fingerprint of their base model with this one.
        light: let heads that are loaded here draft in 8 bits a weight on CPUs, where reading weights is what drafting
            costs. The text is as exact as ever, since the target judges every guess.
        self_check: compare logits of guesses with those of plain passes first; None does so for model families that
            this package's own tests do not cover, and for quantised and offloaded models and those with adapters.
            False takes any model, even one whose rounding depends on the width of a pass.
        record: a folder to write the token ids of prompts and answers to, for training on them (see
            `selfspec.inference.record`, also about privacy). None records nothing.
        allow_target_change: let a method that trains the target along with its heads put its adapter into the model,
            until `unpatch`; the text is then that of the changed model, and a warning says so.

    Returns:
        The same model. `model.speculation` holds the statistics.

    Raises:
        UnsupportedModel: the model cannot be served exactly.
        CheckpointError: the heads are damaged or of another base model.
        ConfigError: no such method or accept rule, a method that needs training, or one that would change the target.
    """
    recording = recorder(record)
    wrapper, model = model, unwrapped(model)
    made = prepared(
        model,
        draft,
        nodes=nodes,
        guard=guard,
        combine=combine,
        accept=accept,
        revision=revision,
        token=token,
        check_base=check_base,
        light=light,
        self_check=self_check,
        allow_target_change=allow_target_change,
    )
    unpatch(model)
    made.speculation.recorder = recording
    _change_target(made.speculation)
    made.speculation.replaced = vars(model).get("generate")
    model.__dict__[_HANDLE] = made.speculation
    model.__dict__["generate"] = made
    return wrapper


def _change_target(speculation: Speculation) -> None:
    """Put the adapter of a method that changes the target into it, and say so; other drafts change nothing."""
    try:
        speculation.undo = change(speculation.draft)
    except ConfigError:
        speculation.target.release()
        raise
    if speculation.undo is not None:
        warnings.warn(
            f"selfspec: {speculation.draft.kind} has changed the target; its text is that of the model with the "
            "adapter, not that of the base model, until unpatch takes it out",
            UserWarning,
            stacklevel=3,
        )


def prepared(
    model: PreTrainedModel,
    draft: DraftLike,
    *,
    nodes: int | None = None,
    guard: bool | None = None,
    combine: Literal["compose", "pick"] = "compose",
    accept: str | AcceptRule = LOSSLESS,
    revision: str | None = None,
    token: str | None = None,
    check_base: bool = True,
    light: bool = True,
    self_check: bool | None = None,
    allow_target_change: bool = False,
) -> PreparedGenerate:
    """A speculative `generate` for a model whose own one stays in place; arguments and errors are those of `patch`."""
    rule = AcceptRule(accept) if isinstance(accept, str) else accept
    if nodes is not None and nodes < 1:
        raise ConfigError(f"nodes={nodes} leaves no room for the root; give at least 1")
    guarded = guard_by_default() if guard is None else guard
    if combine == "pick" and not guarded:
        raise ConfigError("combine='pick' leaves the choice of a draft to the guard; give guard=True or 'compose'")
    model = unwrapped(model)
    target = checked_target(model, self_check)
    try:
        found, known = _drafts(draft, target, revision, token, check_base, light, combine)
        refuse_change(found, allow_target_change)
        guarding = Guarding(target, found, nodes, known) if guarded else None
        speculation = Speculation(target, found, nodes, rule, guarding)
    except Exception:
        target.release()
        raise
    return PreparedGenerate(model, speculation)


def _drafts(
    draft: DraftLike,
    target: Target,
    revision: str | None,
    token: str | None,
    check_base: bool,
    light: bool,
    combine: str,
) -> tuple[Draft | Pick, list[list[float]]]:
    """The draft, or those to pick from, and what is known of the acceptance of each."""
    if combine not in ("compose", "pick"):
        raise ConfigError(f"combine={combine!r} is not known; give 'compose' or 'pick'")
    listed = isinstance(draft, (list, tuple))
    if combine == "pick" and listed:
        found = [resolve_draft(part, target, revision, token, check_base, light) for part in draft]  # type: ignore[union-attr]
        return Pick(found), [known_chances(part, revision, token) for part in draft]  # type: ignore[union-attr]
    return resolve_draft(draft, target, revision, token, check_base, light), [known_chances(draft, revision, token)]


def unpatch(model: PreTrainedModel) -> PreTrainedModel:
    """Leave the model as `patch` found it, and let go of heads that it keeps. Otherwise does nothing."""
    inner = unwrapped(model)
    speculation = inner.__dict__.pop(_HANDLE, None)
    if speculation is not None:
        inner.__dict__.pop("generate", None)
        if speculation.replaced is not None:
            inner.__dict__["generate"] = speculation.replaced
        speculation.target.release()
        if speculation.undo is not None:
            speculation.undo()
    for made in inner.__dict__.pop(KEPT, {}).values():
        made.speculation.target.release()
    return model


class PreparedGenerate:
    """`generate` of a patched model. An object and not a closure, so that a copy of the model speaks for itself."""

    def __init__(self, model: PreTrainedModel, speculation: Speculation) -> None:
        self.model = model
        self.speculation = speculation
        self.original: Callable[..., Any] = type(model).generate  # type: ignore[attr-defined]
        self.__doc__ = self.original.__doc__

    def __call__(self, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        original = self.original
        kwargs.update(zip(list(inspect.signature(original).parameters)[1:], args, strict=False))
        if kwargs.get("custom_generate") is not None:
            return original(self.model, **kwargs)
        if kwargs.get("assistant_model") is not None:
            raise UnsupportedGeneration("assistant_model: this model already drafts for itself; call unpatch first")
        together = "synced_gpus" if kwargs.get("synced_gpus") else hf.ranks_share_weights(self.model)
        if together and kwargs.get("synced_gpus") is not False:
            raise UnsupportedGeneration(
                f"{together}: ranks accept different numbers of tokens, so they would not stay in step; call "
                "selfspec.unpatch(model) first"
            )
        _take_stop_strings(self.model, kwargs)
        streamer = kwargs.get("streamer")

        def speculate(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> GenerateDecoderOnlyOutput | Tensor:
            call = Call(input_ids, logits_processor, stopping_criteria, generation_config, streamer, generator)
            return call.run(self.speculation, model_kwargs)

        return original(self.model, custom_generate=speculate, **kwargs)


def _take_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Turn stop strings into a criterion here: `generate` drops the tokenizer before a custom method sees it."""
    config = kwargs.get("generation_config") or model.generation_config
    strings = kwargs.pop("stop_strings", None) or config.stop_strings or model.generation_config.stop_strings
    tokenizer = kwargs.pop("tokenizer", None)
    if strings is None:
        return
    if tokenizer is None:
        raise UnsupportedGeneration("stop strings need the model's tokenizer: pass tokenizer=... to generate")
    if kwargs.get("generation_config") is not None and config.stop_strings is not None:
        kwargs["generation_config"] = GenerationConfig.from_dict({**config.to_dict(), "stop_strings": None})
    if model.generation_config.stop_strings is not None:
        kwargs["stop_strings"] = None  # or `generate` would fill it in again from the model's own defaults
    criteria = [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
    kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
