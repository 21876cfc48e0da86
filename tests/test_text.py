"""Text that is said token by token is the text of all tokens, without half characters and parts of stop strings."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from selfspec.inference.text import UNFINISHED, Detokenizer, TextStream


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_folder.save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def pieces() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama's: pieces that carry their space, and bytes for the rest."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "lo", "▁"]
    core = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def said(stream: TextStream, tokens: list[int]) -> list[str]:
    """What is said after each token, and at the end."""
    parts = ["".join(text for text, _ in stream.add(token)) for token in tokens]
    return [*parts, "".join(text for text, _ in stream.finish())]


@settings(max_examples=40, deadline=None)
@given(text=st.text(min_size=0, max_size=30), before=st.text(max_size=12))
def test_whole_text_comes_out_whole(tokenizer: Any, text: str, before: str) -> None:
    parts = said(TextStream(tokenizer, tokenizer(before)["input_ids"]), tokenizer(text)["input_ids"])
    assert "".join(parts) == text
    assert UNFINISHED in text or not any(UNFINISHED in part for part in parts)


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 257), max_size=80))
def test_any_bytes_come_out_as_they_are_decoded_together(tokenizer: Any, tokens: list[int]) -> None:
    wanted = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(said(TextStream(tokenizer), tokens)) == wanted


def test_spaces_of_pieces_are_kept_behind_a_prompt(pieces: Any) -> None:
    hello, world, low = (pieces.convert_tokens_to_ids(w) for w in ("▁Hello", "▁world", "lo"))
    euro = [pieces.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert said(TextStream(pieces, [hello]), [world, low, *euro, world]) == [" world", "lo", "", "", "€", " world", ""]
    assert said(TextStream(pieces), [hello, *euro[:2]]) == ["Hello", "", "", UNFINISHED * 2]


def test_characters_that_never_end_do_not_hold_the_text_for_ever(tokenizer: Any) -> None:
    stray = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("é"))[1]
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.add(stray) for _ in range(200))
    assert len(text) > 100 and len(detokenizer.window) <= 64
    assert text + detokenizer.finish() == UNFINISHED * 200


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_part_of_a_stop_string_is_said(tokenizer: Any, text: str, stops: list[str]) -> None:
    stream = TextStream(tokenizer, (), stops)
    heard, begun = "", ""
    for token in tokenizer(text)["input_ids"]:
        begun += tokenizer.decode([token])
        heard += "".join(part for part, _ in stream.add(token))
        assert begun.startswith(heard)
        if stream.stopped:
            break
    ends = [begun.find(stop) for stop in stops if stop in begun]
    assert stream.stopped == bool(ends)
    heard += "".join(part for part, _ in stream.finish())
    assert heard == (begun[: min(ends)] if ends else text)


def test_held_text_keeps_its_origin(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, (), ["abd"])
    a, b, c = tokenizer("abc")["input_ids"]
    assert stream.add(a, 1) == [] and stream.add(b, 2) == []
    assert stream.add(c, 0) == [("a", 1), ("b", 2), ("c", 0)]
