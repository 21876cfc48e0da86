"""Every logits processor of transformers is sorted, and each of those called exact acts as in plain decoding."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import oracle
import pytest
import tiny
import torch
from oracle import Oracle, patched, plain
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, SynthIDTextWatermarkingConfig
from transformers import WatermarkingConfig as Greenlist
from transformers.generation import logits_process

from selfspec.scoring import EXACT_PROCESSORS, PLAIN_PROCESSORS

SYNTH = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836], context_history_size=8)
NEGATIVE = torch.tensor([[5, 9, 13, 2], [5, 9, 13, 2], [80, 7, 7, 6]])
# What makes transformers build each class; `rows` slices what has a row per prompt.
GIVEN: dict[str, dict[str, Any]] = {
    "MinLengthLogitsProcessor": {"min_length": 22, "eos_token_id": list(range(30, 60))},
    "MinNewTokensLengthLogitsProcessor": {"min_new_tokens": 9, "eos_token_id": list(range(30, 60))},
    "TemperatureLogitsWarper": {"temperature": 1e-4, "do_sample": True},
    "RepetitionPenaltyLogitsProcessor": {"repetition_penalty": 1.8},
    "EncoderRepetitionPenaltyLogitsProcessor": {"encoder_repetition_penalty": 1.7},
    "TopPLogitsWarper": {"top_p": 1e-4, "do_sample": True},
    "TopKLogitsWarper": {"top_k": 1, "do_sample": True},
    "TopHLogitsWarper": {"top_h": 0.01, "temperature": 1e-4, "do_sample": True},
    "MinPLogitsWarper": {"min_p": 0.9999, "do_sample": True},
    "TypicalLogitsWarper": {"typical_p": 1e-4, "do_sample": True},
    "EpsilonLogitsWarper": {"epsilon_cutoff": 0.9, "temperature": 1e-4, "do_sample": True},
    "EtaLogitsWarper": {"eta_cutoff": 0.9, "temperature": 1e-4, "do_sample": True},
    "NoRepeatNGramLogitsProcessor": {"no_repeat_ngram_size": 2},
    "EncoderNoRepeatNGramLogitsProcessor": {"encoder_no_repeat_ngram_size": 1},
    "SequenceBiasLogitsProcessor": {"sequence_bias": [[[9], -4.0], [[20, 21], 3.0]]},
    "NoBadWordsLogitsProcessor": {"bad_words_ids": [[5], [7, 11]]},
    "PrefixConstrainedLogitsProcessor": {
        "prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) * 7 + k + 13 * row) % 97 for k in range(9)]
    },
    "ForcedBOSTokenLogitsProcessor": {"forced_bos_token_id": 7},
    "ForcedEOSTokenLogitsProcessor": {"forced_eos_token_id": 9},
    "InfNanRemoveLogitsProcessor": {"remove_invalid_values": True},
    "ExponentialDecayLengthPenalty": {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 96},
    "LogitNormalization": {"renormalize_logits": True},
    "SuppressTokensAtBeginLogitsProcessor": {"begin_suppress_tokens": [3, 4]},
    "SuppressTokensLogitsProcessor": {"suppress_tokens": list(range(40))},
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": {"guidance_scale": 1.5, "negative_prompt_ids": NEGATIVE},
    "WatermarkLogitsProcessor": {"watermarking_config": Greenlist(bias=4.0, seeding_scheme="selfhash")},
    "SynthIDTextWatermarkLogitsProcessor": {"watermarking_config": SYNTH, "do_sample": True, "top_k": 1},
}


def classes() -> set[type]:
    """All processor classes that transformers has."""
    found = inspect.getmembers(logits_process, inspect.isclass)
    return {cls for _, cls in found if issubclass(cls, LogitsProcessor) and cls is not LogitsProcessor}


def test_every_processor_of_transformers_is_either_exact_or_left_to_plain_decoding() -> None:
    sorted_in = [*EXACT_PROCESSORS, *PLAIN_PROCESSORS]
    assert len(sorted_in) == len(set(sorted_in)), "a class is sorted twice"
    assert set(sorted_in) == classes(), "transformers has other processors than those sorted in selfspec/scoring.py"
    assert set(GIVEN) == {cls.__name__ for cls in EXACT_PROCESSORS}, "each exact one is tested below"


def arguments(name: str, rows: int) -> dict[str, Any]:
    given = {"max_new_tokens": 14, "pad_token_id": 0, **GIVEN[name]}
    return {k: v[:rows] if isinstance(v, torch.Tensor) else v for k, v in given.items()}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", GIVEN)
def test_an_exact_processor_acts_on_every_token_of_every_row(
    name: str, rows: int, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    get = type(model)._get_logits_processor

    def note(*args: Any, **kwargs: Any) -> Any:
        processors = get(*args, **kwargs)
        built.extend(type(p).__name__ for p in processors)
        return processors

    monkeypatch.setattr(type(model), "_get_logits_processor", note)
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (9, 5, 8)[:rows]])
    given = {"attention_mask": mask, **arguments(name, rows)}
    if given.get("do_sample"):
        torch.manual_seed(0)
    wanted = plain(model, ids, **given)
    assert name in built, "the argument does not lead to this class"
    for make in (oracle.chain(4, lambda row, turn: (row + turn) % 5), oracle.bushy(3, 2)):
        with patched(model, Oracle(oracle.unpadded(wanted, mask), make)):
            found = model.generate(ids, **given)
            assert model.speculation.last is not None and model.speculation.last.accepted > 0
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["SynthIDTextWatermarkLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor"])
def test_scores_are_recorded_without_asking_a_processor_twice(name: str, model: PreTrainedModel) -> None:
    ids = tiny.text(2, 8)
    given = {**arguments(name, 2), "return_dict_in_generate": True, "output_scores": True}
    wanted = plain(model, ids, **given)
    with patched(model, Oracle(wanted.sequences.tolist(), oracle.bushy(3, 2))):
        found = model.generate(ids, **given)
    assert torch.equal(found.sequences, wanted.sequences)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(found.scores, wanted.scores, strict=True))


class CountsCalls(LogitsProcessor):
    """Keeps state: what it forbids depends on how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.arange(self.calls % 50), float("-inf"))


@pytest.mark.parametrize("sample", [False, True])
def test_a_users_processor_may_keep_state_where_there_is_one_prompt(sample: bool, model: PreTrainedModel) -> None:
    """Drawn chains too: a rule that judges whole blocks would show it text that is never committed."""
    prompt = tiny.text(1, 8)
    given: dict[str, Any] = {"max_new_tokens": 14, "do_sample": sample}
    if sample:
        given["top_k"] = 1
    wanted = plain(model, prompt, logits_processor=LogitsProcessorList([CountsCalls()]), **given)
    flat = torch.full((tiny.VOCAB, tiny.VOCAB), 1 / tiny.VOCAB)
    sharp = flat.clone()
    text = wanted[0].tolist()
    for one, other in itertools.pairwise(text):
        sharp[one] = 0.5 / (tiny.VOCAB - 1)
        sharp[one, other] = 0.5
    for draft in (Oracle(wanted.tolist(), oracle.bushy(3, 2)), oracle.DrawnTree(sharp, (1, 1, 1), True)):
        with patched(model, draft):
            own = LogitsProcessorList([CountsCalls()])
            assert torch.equal(model.generate(prompt, logits_processor=own, **given), wanted)
            assert model.speculation.last.rounds > 0


@pytest.mark.parametrize("kind", ["processor", "criterion"])
def test_a_thing_of_the_users_own_on_several_prompts_is_left_to_plain_decoding_unless_it_says_otherwise(
    kind: str, model: PreTrainedModel
) -> None:
    ids = tiny.text(2, 8)
    given: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": 96, "pad_token_id": 0}

    class Own(LogitsProcessor):
        """Reads a table by the number of the row."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
            if kind == "criterion":
                return torch.tensor([input_ids.shape[1] > 10 + row for row in range(input_ids.shape[0])])
            return scores + torch.arange(input_ids.shape[0]).unsqueeze(1) * torch.arange(tiny.VOCAB)

    key = "logits_processor" if kind == "processor" else "stopping_criteria"
    wanted = plain(model, ids, **given, **{key: [Own()]})
    with patched(model, "lookup"), pytest.warns(UserWarning, match=f"{kind} Own on several prompts"):
        assert torch.equal(model.generate(ids, **given, **{key: [Own()]}), wanted)
