"""`selfspec chat`: the answers of plain decoding, nothing read twice, and Ctrl-C that stops the answer only."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch
from generate_tools import Counter
from oracle import plain
from transformers.utils import logging

import selfspec
from selfspec import cli
from selfspec.errors import ConfigError
from selfspec.inference.chat import Chat, stopped_by_ctrl_c
from selfspec.models import load_target

FAITHFUL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{{ m.content }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair(folder: Path) -> Iterator[Any]:
    model, tokenizer = load_target(folder, torch.float32)
    yield model, tokenizer
    selfspec.unpatch(model)


def offline(pair: Any, ids: list[int], most: int) -> list[int]:
    model, _ = pair
    text = torch.tensor([ids])
    return plain(model, text, attention_mask=torch.ones_like(text), max_new_tokens=most)[0, len(ids) :].tolist()


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_turns_are_those_of_plain_decoding_and_read_only_what_is_new(pair: Any, draft: str | None) -> None:
    model, tokenizer = pair
    if draft is not None:
        selfspec.patch(model, draft)
    pieces: list[tuple[str, int]] = []
    chat = Chat(model, tokenizer, lambda text, depth: pieces.append((text, depth)), None, {"max_new_tokens": 16})
    text: list[int] = []
    for turn, words in enumerate(("hello hello ", "and again and again ", "once more")):
        counter, before = Counter(model), len(text)
        answer = chat.say(words)
        counter.handle.remove()
        text += tokenizer(words)["input_ids"]
        written = offline(pair, text, 16)
        # The newest token of the turn before was not read yet.
        assert counter.widths[0] == len(text) - before + (turn > 0)
        text += written
        assert chat.tokens == text
        assert "".join(piece for piece, _ in pieces) == answer
        pieces.clear()
    chat.reset()
    chat.say("hello hello ")
    assert chat.tokens == text[: len(chat.tokens)]


def test_a_template_is_used_and_what_it_writes_otherwise_is_read_anew(pair: Any) -> None:
    model, tokenizer = pair
    tokenizer.chat_template = FAITHFUL
    selfspec.patch(model, "lookup")
    chat = Chat(model, tokenizer, lambda *_: None, "be brief", {"max_new_tokens": 12})
    messages = [{"role": "system", "content": "be brief"}]
    for words in ("one", "two", "three"):
        counter = Counter(model)
        answer = chat.say(words)
        counter.handle.remove()
        messages.append({"role": "user", "content": words})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert chat.tokens == ids + offline(pair, ids, 12)
        assert (counter.widths[0] < len(ids)) == (len(messages) > 2), "what agrees is not read again"
        messages.append({"role": "assistant", "content": answer})
    assert chat.messages == messages


def test_ctrl_c_stops_the_answer_and_the_next_one_is_right(pair: Any) -> None:
    model, tokenizer = pair
    selfspec.patch(model, "lookup")
    heard: list[str] = []

    def write(text: str, depth: int) -> None:
        heard.append(text)
        if len(heard) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    chat = Chat(model, tokenizer, write, None, {"max_new_tokens": 200})
    before = signal.getsignal(signal.SIGINT)
    with stopped_by_ctrl_c(chat):
        chat.say("go on ")
    assert signal.getsignal(signal.SIGINT) is before
    first = tokenizer("go on ")["input_ids"]
    cut = chat.tokens[len(first) :]
    assert 2 < len(cut) < 100 and offline(pair, first, 200)[: len(cut)] == cut
    chat._arguments["max_new_tokens"] = 10
    ids = chat.tokens + tokenizer("next ")["input_ids"]
    chat.say("next ")
    assert chat.tokens == ids + offline(pair, ids, 10)


def test_a_conversation_that_is_too_long_and_a_system_message_without_a_place_are_refused(pair: Any) -> None:
    model, tokenizer = pair
    chat = Chat(model, tokenizer, lambda *_: None)
    with pytest.raises(ConfigError, match="600 tokens"):
        chat.say("x" * 600)
    with pytest.raises(ConfigError, match="no chat template"):
        Chat(model, tokenizer, lambda *_: None, "be brief")


def test_the_command_talks_until_it_is_told_to_leave(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    level = logging.get_verbosity()
    given = ["chat", folder, "--draft", "lookup", "--dtype", "float32", "--max-new-tokens", "40", "--color", "--report"]
    monkeypatch.setattr(sys, "argv", ["selfspec", *map(str, given)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("aaaa\n/reset\naaaa\n/what\n/exit\nnever\n"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    logging.set_verbosity(level)
    logging.enable_progress_bar()
    out, err = capsys.readouterr()
    assert not ended.value.code
    assert "no chat template" in err and "there is no command /what" in err and "draft lookup" in err
    model, tokenizer = load_target(folder, torch.float32)
    ids = tokenizer("aaaa")["input_ids"]
    answer = tokenizer.decode(offline((model, tokenizer), ids, 40), skip_special_tokens=True)
    shown = out.replace("\x1b[0m", "")
    for colour in ("32", "36", "34", "35"):
        shown = shown.replace(f"\x1b[{colour}m", "")
    assert shown == f"{answer}\n{answer}\n"
