"""One prepared call of `generate`: speculate, or decode plainly and say why."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from selfspec import hf
from selfspec.accept import TOKEN_WISE, AcceptRule
from selfspec.errors import UnsupportedGeneration
from selfspec.inference.engine import decode
from selfspec.inference.obstacles import columns, obstacles, refuse, taken_cache
from selfspec.inference.request import Request, Result
from selfspec.inference.speculation import Speculation
from selfspec.scoring import may_keep_state
from selfspec.target import Target


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


class Call:
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
        refuse(self.config)
        if (size := speculation.target.vocab_size) < speculation.vocab_size:
            raise UnsupportedGeneration(
                f"the model has a vocabulary of {size} tokens, it had {speculation.vocab_size} when it was patched; "
                "patch it again with a draft made for it as it is now"
            )
        reasons = obstacles(self, speculation.target, model_kwargs)
        if speculation.accept.lossy and self.config.do_sample:
            reasons += [f"processor {name} under a lossy rule" for name in may_keep_state(self.processors)]
        if reasons:
            warnings.warn(
                f"selfspec: decoding without speculation, because of {'; '.join(reasons)}", UserWarning, stacklevel=4
            )
            return self._plain(speculation.target.model, model_kwargs)
        request = self._request(speculation, model_kwargs)
        width = columns(self, model_kwargs)
        told = self._say_if_too_long(speculation.target, width)
        guard = None if speculation.guarding is None else speculation.guarding.start(request)
        result = decode(speculation.target, speculation.draft, request, guard)
        if speculation.guarding is not None and guard is not None:
            speculation.guarding.finish(guard, request.do_sample)
        speculation.record(result.stats, None if guard is None else guard.stats)
        if speculation.recorder is not None and width == self.input_ids.shape[1]:  # not behind a cache of unseen text
            written = [len(origins) for origins in result.origins]
            speculation.recorder.add(result.sequences, width, model_kwargs.get("attention_mask"), written)
        if not told:
            self._say_if_too_long(speculation.target, width + result.sequences.shape[1] - self.input_ids.shape[1] - 1)
        return self._output(speculation.target, result, model_kwargs)

    def _say_if_too_long(self, target: Target, length: int) -> bool:
        """Warn, once per call, of a text that has been read past what the model is made for."""
        limit = target.max_positions
        if limit is None or length <= limit:
            return False
        if target.has_position_table:
            if self.streamer is not None:
                self.streamer.end()
            raise UnsupportedGeneration(
                f"the prompt has {length} tokens, the model has positions for {limit}; shorten the prompt"
            )
        warnings.warn(
            f"selfspec: a text of {length} tokens, where the model is made for {limit}; as in plain decoding, it may "
            "lose its thread",
            UserWarning,
            stacklevel=5,
        )
        return True

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

    def _rule(self, rule: AcceptRule) -> AcceptRule:
        """Rules that look beyond the accepted path would show a processor with state text that is never committed."""
        return AcceptRule(TOKEN_WISE) if may_keep_state(self.processors) else rule

    def _request(self, speculation: Speculation, model_kwargs: dict[str, Any]) -> Request:
        config, device = self.config, speculation.target.device
        pad, cache = config._pad_token_tensor, taken_cache(model_kwargs)
        returned = bool(config.return_dict_in_generate)
        mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
        if mask is None and cache is not None and cache.get_seq_length() > 0:
            mask = torch.ones(self.input_ids.shape[0], columns(self, model_kwargs), dtype=torch.long)
        return Request(
            self.input_ids.to(device, torch.long),
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
            accept=self._rule(speculation.accept),
            embeds=None if embeds is None else embeds.to(device),
            cache=cache,
            keep_cache=(returned or cache is not None) and not any(speculation.target.states),
            chunk=config.prefill_chunk_size,
        )

    def _output(
        self, target: Target, result: Result, model_kwargs: dict[str, Any]
    ) -> GenerateDecoderOnlyOutput | Tensor:
        sequences = result.sequences.to(self.input_ids.device)
        given, config = taken_cache(model_kwargs), target.config
        cache = given
        if result.cache is not None:
            cache = hf.dynamic_cache(config, result.cache) if given is None else hf.refill(given, config, result.cache)
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=result.scores,  # type: ignore[arg-type]
            logits=result.logits,  # type: ignore[arg-type]
            cache=cache,
        )
