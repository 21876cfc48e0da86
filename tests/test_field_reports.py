"""Faults that users of other libraries met, where no other test here would show them. The map is in tests/README.md.

The judge is transformers: its `generate`, its hidden states, its hooks.
"""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tiny
import torch
import transformers
from generate_tools import NEW, knows
from oracle import Scripted, patched, plain
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast, TextIteratorStreamer

from selfspec.draft import Budget, Needs, Verified
from selfspec.errors import UnsupportedGeneration
from selfspec.target import Target
from selfspec.tree import DraftTree

# What heads read


class Reader(Scripted):
    """Writes down what it is shown of every committed place: the token, the next one, and the hidden states."""

    needs = Needs(hidden=True, layers=(0, 1, 2))

    def __init__(self, inner: oracle.Oracle) -> None:
        self.inner = inner
        self.read: list[tuple[int, int, list[Tensor]]] = []

    def begin(self, verified: Verified) -> oracle.Rows:
        self._note(verified)
        return self.inner.begin(verified)

    def observe(self, state: oracle.Rows, verified: Verified) -> oracle.Rows:
        self._note(verified)
        return self.inner.observe(state, verified)

    def _note(self, verified: Verified) -> None:
        assert verified.hidden is not None
        for place in range(int(verified.counts[0])):
            states = [part[0, place].clone() for part in (*verified.layers, verified.hidden)]
            self.read.append((int(verified.tokens[0, place]), int(verified.next_tokens[0, place]), states))

    def tree(self, state: oracle.Rows, budget: Any, generator: Any) -> Any:
        return self.inner.tree(state, budget, generator)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_heads_read_in_training_and_decoding_what_transformers_calls_the_hidden_states(name: str) -> None:
    """Each committed place once, beside the token that follows; layer k goes into block k, the last one is normed."""
    model, ids = tiny.model(name), tiny.text(1, 12)
    text = plain(model, ids, max_new_tokens=NEW)
    reader = Reader(knows(model, ids, make=oracle.chain(4, lambda row, turn: turn % 5)))
    reader.needs = needs = Needs(hidden=True, layers=(0, 1, min(2, model.config.num_hidden_layers - 1)))
    with patched(model, reader):
        assert torch.equal(model.generate(ids, max_new_tokens=NEW), text)
    count = len(reader.read)
    assert count >= 12 + NEW - 6, "what is committed is shown, but for what comes after the end"
    assert [token for token, _, _ in reader.read] == text[0, :count].tolist()
    assert [after for _, after, _ in reader.read][:-1] == text[0, 1:count].tolist()
    states = model(text, output_hidden_states=True).hidden_states
    wanted = [*(states[layer] for layer in needs.layers), states[-1]]
    target = Target(model)
    trained = target.features(text, None, needs)
    for part, (true, train) in enumerate(zip(wanted, (*trained.layers, trained.hidden), strict=True)):
        assert train is not None
        decoded = torch.stack([found[part] for _, _, found in reader.read])
        assert torch.allclose(train, true, atol=1e-5)
        assert torch.allclose(decoded, true[0, :count], atol=1e-5)
    assert trained.hidden is not None
    assert torch.allclose(target.head(trained.hidden), model(text).logits, atol=1e-4)
    target.release()


# Streams


def bytes_as_tokens() -> PreTrainedTokenizerFast:
    """A token for every byte, so that a letter outside ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={"<pad>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_letters_of_several_tokens_are_streamed_whole_wherever_a_run_cuts_them(length: int) -> None:
    words, tokenizer = "Příliš žluťoučký kůň 🐎 ₿", bytes_as_tokens()
    ids = tokenizer(words)["input_ids"]
    assert len(ids) > len(words)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.tensor([tokenizer("Text: ")["input_ids"]])

    def say(input_ids: Tensor, scores: Tensor) -> Tensor:
        """The next byte of the words, by the length of the path."""
        forced = torch.full_like(scores, -1e4)
        forced[:, ids[input_ids.shape[1] - prompt.shape[1]]] = 0
        return forced

    given: dict[str, Any] = {"max_new_tokens": len(ids), "logits_processor": [say]}
    text = plain(model, prompt, **given)
    stream = TextIteratorStreamer(tokenizer, skip_prompt=True)
    with patched(model, oracle.Oracle(text.tolist(), oracle.chain(length))):
        found = model.generate(prompt, streamer=stream, **given)
        assert model.speculation.last.rounds <= -(-len(ids) // (length + 1))
    pieces = list(stream)
    assert "".join(pieces) == tokenizer.decode(found[0, prompt.shape[1] :]) == words
    assert not any("�" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 3


# Turns, sizes


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_cache_that_its_owner_cut_is_gone_on_from(name: str) -> None:
    """The user takes back the last tokens of a turn and asks something else."""
    model = tiny.model(name)

    def talk(generate: Any) -> tuple[Tensor, DynamicCache]:
        first = generate(tiny.text(1, 12), max_new_tokens=9, return_dict_in_generate=True)
        first.cache.crop(-6)
        kept = first.sequences[:, : first.cache.get_seq_length()]
        again = torch.cat([kept, tiny.text(1, 4, seed=5)], 1)
        found = generate(again, cache=first.cache, max_new_tokens=9)
        return found, first.cache

    wanted, theirs = talk(lambda *a, **k: plain(model, *a, **k))
    with patched(model, oracle.Oracle(wanted.tolist(), oracle.bushy(4, 2))):
        found, mine = talk(model.generate)
    assert torch.equal(found, wanted)
    assert mine.get_seq_length() == theirs.get_seq_length() == found.shape[1] - 1


class Asked(oracle.Oracle):
    """Notes how many nodes it may propose."""

    def propose(self, state: Any, budget: Budget, sampling: Any, generator: Any) -> DraftTree:
        self.nodes = max(getattr(self, "nodes", 0), budget.nodes or 0)
        return super().propose(state, budget, sampling, generator)


def test_the_size_of_trees_is_that_of_the_newest_patch(model: PreTrainedModel, prompt: Tensor) -> None:
    before, sizes, proposed = model.generation_config.to_dict(), [], []
    text = plain(model, prompt, max_new_tokens=NEW).tolist()
    for nodes in (3, 9, None):
        draft = Asked(text, oracle.chain(11, 0))
        with patched(model, draft, nodes=nodes):
            model.generate(prompt, max_new_tokens=NEW)
            proposed.append(model.speculation.last.proposed)
        sizes.append(draft.nodes)
    assert model.generation_config.to_dict() == before
    assert sizes == [3, 9, 0], "without a limit nobody is told one"
    assert proposed[0] < proposed[1] < proposed[2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int64])
@pytest.mark.parametrize("sample", [False, True])
def test_prompts_of_any_whole_numbers_give_the_text_of_plain_decoding(
    model: PreTrainedModel, prompt: Tensor, dtype: torch.dtype, sample: bool
) -> None:
    """transformers joins them with new tokens of int64, and so returns int64."""
    wanted = plain(model, prompt.to(torch.int32), max_new_tokens=NEW)
    with patched(model, knows(model, prompt)):
        found = model.generate(prompt.to(dtype), max_new_tokens=NEW, do_sample=sample, top_k=1)
    assert found.dtype == wanted.dtype == torch.int64
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_prompts_of_other_numbers_are_refused(model: PreTrainedModel, prompt: Tensor, dtype: torch.dtype) -> None:
    with patched(model, "lookup"), pytest.raises(UnsupportedGeneration, match=f"prompt is of {dtype}"):
        model.generate(prompt.to(dtype), max_new_tokens=NEW, pad_token_id=0)


@pytest.mark.parametrize("kind", ["lookup", "layer-skip"])
def test_a_model_of_nan_says_what_it_says_in_plain_decoding(kind: str, prompt: Tensor) -> None:
    broken = tiny.model("llama")
    with patched(broken, kind):
        broken.model.norm.weight.fill_(torch.nan)
        assert torch.equal(broken.generate(prompt, max_new_tokens=9), plain(broken, prompt, max_new_tokens=9))
