"""`patch` makes `model.generate` speculative; `unpatch` takes it back.

It goes through transformers' own extension point (`generate(custom_generate=...)`), so arguments, processors and
stopping criteria are prepared by transformers as ever.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from selfspec import hf
from selfspec.accept import LOSSLESS, AcceptRule
from selfspec.errors import ConfigError, UnsupportedGeneration
from selfspec.inference.engine import decode
from selfspec.inference.request import Request, Result
from selfspec.inference.speculation import Speculation
from selfspec.inference.stopping import Stopper
from selfspec.resolve import DraftLike, resolve_draft
from selfspec.scoring import unsupported_processors
from selfspec.target import Target

_HANDLE = "speculation"
_HANDLED_KWARGS = {
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}


def patch(
    model: PreTrainedModel,
    draft: DraftLike,
    *,
    nodes: int | None = None,
    accept: str | AcceptRule = LOSSLESS,
    revision: str | None = None,
    token: str | None = None,
    check_base: bool = True,
) -> PreTrainedModel:
    """Make `model.generate` draft and verify. Its arguments and its output stay what they were.

    Args:
        model: a causal language model; its weights and its code are not touched.
        draft: a folder or Hub id of trained heads, the name of a method that needs no training (with what it works on
            after a colon where it wants something, as `draft-model:FOLDER`) or its configuration as a dict, any object
            that implements `selfspec.draft.Draft`, or a list of these, which draft together.
        nodes: the most nodes of a tree, the root included; None leaves it to the draft.
        accept: the rule for sampled text, see `selfspec.accept.AcceptRule`. Rules with "lossy" in their name change the
            distribution of the text, and the report says so.
        revision: Hub revision of the heads.
        token: Hub token.
        check_base: compare the heads' fingerprint of their base model with this one.

    Returns:
        The same model. `model.speculation` holds the statistics.

    Raises:
        UnsupportedModel: the model cannot be served exactly.
        CheckpointError: the heads are damaged or of another base model.
        ConfigError: no such method or accept rule, or a method that needs training.
    """
    rule = AcceptRule(accept) if isinstance(accept, str) else accept
    if nodes is not None and nodes < 1:
        raise ConfigError(f"nodes={nodes} leaves no room for the root; give at least 1")
    target = Target(model)
    try:
        speculation = Speculation(target, resolve_draft(draft, target, revision, token, check_base), nodes, rule)
    except Exception:
        target.release()
        raise
    unpatch(model)
    speculation.replaced = vars(model).get("generate")
    model.__dict__[_HANDLE] = speculation
    model.__dict__["generate"] = _Generate(model, speculation)
    return model


def unpatch(model: PreTrainedModel) -> PreTrainedModel:
    """Leave the model as `patch` found it. Does nothing to a model that is not patched."""
    speculation = model.__dict__.pop(_HANDLE, None)
    if speculation is not None:
        model.__dict__.pop("generate", None)
        if speculation.replaced is not None:
            model.__dict__["generate"] = speculation.replaced
        speculation.target.release()
    return model


class _Generate:
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
        if kwargs.get("synced_gpus"):
            raise UnsupportedGeneration("synced_gpus: ranks would not stay in step; call selfspec.unpatch(model) first")
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
            call = _Call(input_ids, logits_processor, stopping_criteria, generation_config, streamer, generator)
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


@contextmanager
def _drawing_from(generator: torch.Generator | None) -> Iterator[None]:
    """Let torch's default generator go on from this one, and give both their due afterwards."""
    if generator is None:
        yield
        return
    default = torch.default_generator
    if generator.device.type == "cuda":
        default = torch.cuda.default_generators[generator.device.index or 0]
    state = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(state)


class _Call:
    """One prepared call of `generate`."""

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
        generator: torch.Generator | None,
    ) -> None:
        self.input_ids = input_ids
        self.processors = processors
        self.criteria = criteria
        self.config = config
        self.streamer = streamer
        self.generator = generator

    def run(self, speculation: Speculation, model_kwargs: dict[str, Any]) -> GenerateDecoderOnlyOutput | Tensor:
        """Speculate, or decode plainly with a warning that says why."""
        self._refuse()
        reasons = self._obstacles(model_kwargs) + self._rope_obstacles(speculation.target, model_kwargs)
        if reasons:
            warnings.warn(
                f"selfspec: decoding without speculation, because of {'; '.join(reasons)}", UserWarning, stacklevel=4
            )
            return self._plain(speculation.target.model, model_kwargs)
        result = decode(speculation.target, speculation.draft, self._request(speculation, model_kwargs))
        speculation.record(result.stats)
        return self._output(speculation.target, result)

    def _refuse(self) -> None:
        config = self.config
        wrong = {
            "num_beams": config.num_beams not in (None, 1),
            "penalty_alpha": bool(config.penalty_alpha),
            "dola_layers": getattr(config, "dola_layers", None) is not None,
            "constraints": getattr(config, "constraints", None) is not None,
            "force_words_ids": getattr(config, "force_words_ids", None) is not None,
            "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
            "assistant_early_exit": getattr(config, "assistant_early_exit", None) is not None,
        }
        named = [f"{name}={getattr(config, name)}" for name, found in wrong.items() if found]
        if named:
            raise UnsupportedGeneration(
                f"speculative decoding is greedy or samples, it cannot honour {', '.join(named)}; leave it out, or "
                "call selfspec.unpatch(model) first"
            )

    def _obstacles(self, model_kwargs: dict[str, Any]) -> list[str]:
        config, batch = self.config, self.input_ids.shape[0]
        found = [f"processor {name}" for name in unsupported_processors(self.processors, batch)]
        found += [f"argument {k}" for k, v in model_kwargs.items() if k not in _HANDLED_KWARGS and v is not None]
        cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
            found.append("a cache of the caller's own")
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name) and config.return_dict_in_generate:
                found.append(name)
        if config.use_cache is False:
            found.append("use_cache=False")
        if config.cache_implementation not in (None, "dynamic"):
            found.append(f"cache_implementation={config.cache_implementation!r}")
        if batch > 1 and self._stops_unevenly_without_end():
            found.append("several prompts with a stopping criterion but no end token")
        return found + self._padding_obstacles(model_kwargs)

    def _stops_unevenly_without_end(self) -> bool:
        stopper = Stopper(self.criteria)
        return bool(stopper.others) and not stopper.has_end_tokens

    def _rope_obstacles(self, target: Target, model_kwargs: dict[str, Any]) -> list[str]:
        switch, longest = hf.rope_switch(target.config), Stopper(self.criteria).max_length
        mask = model_kwargs.get("attention_mask")
        shortest = self.input_ids.shape[1] if mask is None else int(mask.sum(1).min())
        if switch is None or shortest > switch or (longest is not None and longest <= switch):
            return []
        return [f"longrope, whose frequencies change at {switch} tokens"]

    def _padding_obstacles(self, model_kwargs: dict[str, Any]) -> list[str]:
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        if model_kwargs.get("inputs_embeds") is not None:
            return []
        if self.input_ids.shape[1] == 0:
            raise UnsupportedGeneration("the prompt is empty; give at least one token")
        if mask is not None and (mask.shape != self.input_ids.shape or bool((mask[:, 1:] < mask[:, :-1]).any())):
            return ["padding that is not on the left"]
        wanted = torch.arange(self.input_ids.shape[1], device=self.input_ids.device).unsqueeze(0)
        if mask is not None:
            wanted = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        if positions is not None and not bool((positions.to(wanted.device) == wanted).all()):
            return ["position_ids of the caller's own"]
        return []

    def _plain(self, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> GenerateDecoderOnlyOutput | Tensor:
        with _drawing_from(self.generator):
            found: GenerateDecoderOnlyOutput | Tensor = hf.sample_plainly(
                model,
                self.input_ids,
                self.processors,
                self.criteria,
                self.config,
                streamer=self.streamer,
                **model_kwargs,
            )
        return found

    def _request(self, speculation: Speculation, model_kwargs: dict[str, Any]) -> Request:
        config = self.config
        pad = config._pad_token_tensor
        returned = bool(config.return_dict_in_generate)
        device = speculation.target.device
        mask = model_kwargs.get("attention_mask")
        return Request(
            self.input_ids.to(device),
            None if mask is None else mask.to(device),
            self.processors,
            self.criteria,
            do_sample=bool(config.do_sample),
            temperature=1.0 if config.temperature is None else float(config.temperature),
            pad_token_id=None if pad is None else int(pad),
            generator=self.generator,
            streamer=self.streamer,
            keep_scores=returned and bool(config.output_scores),
            keep_logits=returned and bool(config.output_logits),
            nodes=speculation.nodes,
            accept=speculation.accept,
        )

    def _output(self, target: Target, result: Result) -> GenerateDecoderOnlyOutput | Tensor:
        sequences = result.sequences.to(self.input_ids.device)
        if not self.config.return_dict_in_generate:
            return sequences
        cache = result.cache
        whole = cache is not None and cache.slots.uniform and cache.lengths[0] == sequences.shape[1] - 1
        return GenerateDecoderOnlyOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=result.scores,  # type: ignore[arg-type]
            logits=result.logits,  # type: ignore[arg-type]
            cache=cache.to_dynamic(target.config) if cache is not None and whole else None,
        )
