"""Logits processors along tree paths: each node's scores are processed with that node's own past.

Letters: B rows, N nodes, V vocabulary, K rows asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from selfspec.draft import Sampling
from selfspec.host import on_device
from selfspec.target_output import TargetOutput
from selfspec.walk import Chance

_IGNORE_THE_PAST = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.TopHLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.LogitNormalization,
    lp.InfNanRemoveLogitsProcessor,
    lp.SuppressTokensLogitsProcessor,
)
_READ_THE_PATH = (
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    lp.SuppressTokensAtBeginLogitsProcessor,
    lp.WatermarkLogitsProcessor,
)
_KEEP_SOMETHING_PER_ROW = (
    lp.PrefixConstrainedLogitsProcessor,
    lp.EncoderRepetitionPenaltyLogitsProcessor,
    lp.EncoderNoRepeatNGramLogitsProcessor,
    lp.SynthIDTextWatermarkLogitsProcessor,
    lp.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
PLAIN_PROCESSORS = (
    lp.ClassifierFreeGuidanceLogitsProcessor,
    lp.WhisperTimeStampLogitsProcessor,
    lp.WhisperNoSpeechDetection,
    lp.AlternatingCodebooksLogitsProcessor,
    lp.BarkEosPrioritizerLogitsProcessor,
    lp.DiaClassifierFreeGuidanceLogitsProcessor,
    lp.DiaEOSChannelFilterLogitsProcessor,
    lp.DiaEOSDelayPatternLogitsProcessor,
)
"""Processors of transformers that speculation leaves to plain decoding: speech models and codebooks build them."""
EXACT_PROCESSORS = _IGNORE_THE_PAST + _READ_THE_PATH + _KEEP_SOMETHING_PER_ROW
"""Processors of transformers that act on every token of a run as in plain decoding, for any number of prompts."""

HOW_TO_DECLARE = "if it treats every row alone and keeps no state, give its class `row_independent = True`"


def declares_row_independence(thing: object) -> bool:
    """Whether a caller's own processor or criterion says that it may be called row by row."""
    return bool(getattr(thing, "row_independent", False))


def unsupported_processors(processors: LogitsProcessorList, batch: int) -> list[str]:
    """Names of processors that could not act as in plain decoding.

    A processor that transformers does not know is called once per committed prefix, in order, as plain decoding calls
    it, so with one prompt it may even keep state. With several it would see rows one by one, which only its author
    can know to be right.
    """
    found = [f"processor {type(p).__name__}" for p in processors if type(p) in PLAIN_PROCESSORS]
    known = EXACT_PROCESSORS + PLAIN_PROCESSORS
    own = [p for p in processors if type(p) not in known and not declares_row_independence(p)]
    if batch > 1:
        found += [f"processor {type(p).__name__} on several prompts ({HOW_TO_DECLARE})" for p in own]
    return found


def may_keep_state(processors: LogitsProcessorList) -> list[str]:
    """Names of processors that must see each committed prefix once and nothing else."""
    stateless = _IGNORE_THE_PAST + _READ_THE_PATH + _KEEP_SOMETHING_PER_ROW[:3]
    return [type(p).__name__ for p in processors if type(p) not in stateless and not declares_row_independence(p)]


def sampling_of(processors: LogitsProcessorList, do_sample: bool, temperature: float = 1.0) -> Sampling:
    """What drafts may know of the processors; `temperature` counts where no processor applies one."""
    found: dict[str, Any] = {"temperature": temperature}
    for processor in processors:
        if type(processor) is lp.TemperatureLogitsWarper:
            found["temperature"] = float(processor.temperature)
        elif type(processor) is lp.TopKLogitsWarper:
            found["top_k"] = int(processor.top_k)
        elif type(processor) is lp.TopPLogitsWarper:
            found["top_p"] = float(processor.top_p)
        elif type(processor) is lp.MinPLogitsWarper:
            found["min_p"] = float(processor.min_p)
    return Sampling(do_sample, **found)


class History:
    """All tokens of each row as `generate` shows them to processors (left padding included), in a growing buffer."""

    def __init__(self, input_ids: Tensor, room: int) -> None:
        self.buffer = input_ids.new_zeros(input_ids.shape[0], input_ids.shape[1] + room)
        self.buffer[:, : input_ids.shape[1]] = input_ids
        self.lengths = [input_ids.shape[1]] * input_ids.shape[0]
        self.prompts = list(range(input_ids.shape[0]))
        """Which prompt each row belongs to."""

    def write(self, row: int, at: int, tokens: Sequence[int]) -> None:
        """Put tokens at a place of a row, without committing them."""
        if at + len(tokens) > self.buffer.shape[1]:
            self.buffer = torch.nn.functional.pad(self.buffer, (0, self.buffer.shape[1] + len(tokens)))
        self.buffer[row, at : at + len(tokens)] = on_device(tokens, self.buffer.device)

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Commit tokens to a row."""
        self.write(row, self.lengths[row], tokens)
        self.lengths[row] += len(tokens)

    def past(self, row: int, extra: Sequence[int] = ()) -> Any:
        """`[1, S]` int64: the committed tokens of a row and these after them."""
        if extra:
            self.write(row, self.lengths[row], extra)
        return self.buffer[row : row + 1, : self.lengths[row] + len(extra)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.buffer = self.buffer[list(rows)]
        self.lengths = [self.lengths[row] for row in rows]
        self.prompts = [self.prompts[row] for row in rows]


class Processors:
    """A list of logits processors, called in as few batches as their look at the past allows."""

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.processors = processors
        self.read_the_past = any(type(p) not in _IGNORE_THE_PAST for p in processors)
        self._of_prompt: dict[int, LogitsProcessorList] = {}

    def _for(self, prompt: int) -> LogitsProcessorList:
        """The processors as they treat one row of the batch that `generate` was given."""
        if prompt not in self._of_prompt:
            self._of_prompt[prompt] = LogitsProcessorList([_for_prompt(p, prompt) for p in self.processors])
        return self._of_prompt[prompt]

    def __call__(self, history: History, rows: Sequence[int], extras: Sequence[Sequence[int]], raw: Tensor) -> Tensor:
        """Processed scores `[K, V]` float32, on the device of the tokens (a model may be spread over several).

        Args:
            history: the committed tokens.
            rows: K rows of `history`.
            extras: per row the tokens of the path after the committed ones.
            raw: `[K, V]` logits in any dtype; not changed.
        """
        scores: Any = raw.to(history.buffer.device, torch.float32, copy=True)
        if not self.processors:
            return scores
        if not self.read_the_past:
            nothing: Any = history.buffer[:1, :1].expand(len(rows), 1)
            return self.processors(nothing, scores)
        done = [
            self._for(history.prompts[row])(history.past(row, extra), scores[i : i + 1])
            for i, (row, extra) in enumerate(zip(rows, extras, strict=True))
        ]
        return done[0] if len(done) == 1 else torch.cat(done)


def _for_prompt(processor: Any, prompt: int) -> Any:
    """The processor itself, or a copy with this row's share of what it keeps per row."""
    if type(processor) is lp.SynthIDTextWatermarkLogitsProcessor:
        return copy.deepcopy(processor)
    if type(processor) is lp.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return lp.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids), 1)
    alone = copy.copy(processor)
    if type(processor) is lp.RepetitionPenaltyLogitsProcessor:
        alone.prompt_ignore_length = _row_of(getattr(processor, "prompt_ignore_length", None), prompt)
    elif type(processor) is lp.EncoderRepetitionPenaltyLogitsProcessor:
        alone.encoder_input_ids = _row_of(processor.encoder_input_ids, prompt)
    elif type(processor) is lp.EncoderNoRepeatNGramLogitsProcessor:
        alone.batch_size, alone.generated_ngrams = 1, [processor.generated_ngrams[prompt % processor.batch_size]]
    elif type(processor) is lp.UnbatchedClassifierFreeGuidanceLogitsProcessor:
        context = processor.unconditional_context
        alone.unconditional_context = {key: _row_of(value, prompt) for key, value in context.items()}
    else:
        return processor
    return alone


def _row_of(value: Any, row: int) -> Any:
    """One row of a tensor that has a row per prompt; anything else as it is."""
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] == 1:
        return value
    return value[row : row + 1]


def picked_everywhere(logits: Tensor, history: History, processors: Processors, chance: Chance | None) -> Tensor:
    """The target's own token at every node, `[B, N]` int64: the argmax, or with `chance` a draw from p.

    Nothing waits for the device.

    Args:
        logits: `[B, N, V]` in any dtype.
        history: the committed tokens.
        processors: none that reads the past.
        chance: where randomness comes from; None when greedy.
    """
    batch, nodes, size = logits.shape
    if chance is None and not processors.processors:
        return logits.argmax(-1)
    found = processors(history, [0] * (batch * nodes), [], logits.reshape(batch * nodes, size))
    picked = found.argmax(-1) if chance is None else chance.token(found.softmax(-1))
    return picked.view(batch, nodes)


class TreeScores:
    """The target's processed scores at nodes of one tree, made when the walk asks; see `accept.NodeScores`."""

    def __init__(
        self,
        out: TargetOutput,
        tokens: list[list[int]],
        history: History,
        processors: Processors,
        keep: bool = False,
    ) -> None:
        self.out = out
        self.tokens = tokens
        self.history = history
        self.processors = processors
        self.kept: dict[tuple[int, int], Tensor] | None = {} if keep else None
        """Scores `[V]` by row and node, of all that were asked for: a processor with state must be asked only once."""

    @property
    def logits(self) -> Tensor:
        """The target's own, `[B, N, V]`."""
        return self.out.logits

    def __call__(self, rows: list[int], paths: list[list[int]]) -> Tensor:
        """Scores `[K, V]` float32 at the last node of each path."""
        if len(rows) == 1:
            raw = self.logits[rows[0], paths[0][-1]].unsqueeze(0)
        else:
            raw = self.logits[rows, [path[-1] for path in paths]]
        extras = [[self.tokens[row][node] for node in path[1:]] for row, path in zip(rows, paths, strict=True)]
        found = self.processors(self.history, rows, extras, raw)
        if self.kept is not None:
            self.kept.update({(row, path[-1]): found[i] for i, (row, path) in enumerate(zip(rows, paths, strict=True))})
        return found
