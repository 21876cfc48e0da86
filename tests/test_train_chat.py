"""Which tokens of a conversation are learned, for the chat templates in use; the judge is `⟦..⟧`, placed by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import chat_templates as templates
import pytest
import torch
from chat_templates import CASES, TALK, Case, tokenizer
from transformers import PreTrainedTokenizerFast

from selfspec.documents import Document, read_source
from selfspec.errors import DataError
from selfspec.prompting import read_prompts
from selfspec.train.chat import ChatFormat, encode_conversation
from selfspec.train.dialogue import Dialogue, as_message
from selfspec.train.prompts import encode_prompt, read_documents

torch.set_num_threads(1)


def form_of(case: Case, words: PreTrainedTokenizerFast) -> ChatFormat:
    ends: Any = words.convert_tokens_to_ids(case.ends)
    return ChatFormat(words, tuple(ends), case.options)


def by_hand(text: str, words: PreTrainedTokenizerFast) -> tuple[list[int], list[bool]]:
    """Ids and mask of a rendering, piece by piece: what stands within the brackets is learned."""
    ids: list[int] = []
    learn: list[bool] = []
    for place, piece in enumerate(text.replace("⟧", "⟦").split("⟦")):
        new = words(piece, add_special_tokens=False)["input_ids"]
        ids += new
        learn += [place % 2 == 1] * len(new)
    return ids, learn


def document(case: Case) -> Document:
    lines = json.dumps({"messages": case.messages, "tools": case.tools})
    return parsed(lines)


def parsed(line: str) -> Document:
    from selfspec.documents import parse_record

    return parse_record(json.loads(line), "in.jsonl:1")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_learned_tokens_are_exactly_the_assistants(case: Case) -> None:
    words = tokenizer(case)
    rows = encode_conversation(document(case), form_of(case, words))
    assert [(row.ids, row.learn) for row in rows] == [by_hand(text, words) for text in case.rendered]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_comes_before_an_answer_is_the_prompt_of_decoding(case: Case) -> None:
    """The prompt that inference would render is what the row holds before the last answer."""
    words = tokenizer(case)
    asked, form = document(case), form_of(case, words)
    (row,) = encode_conversation(asked, form, "last")
    first = row.learn.index(True)
    prompt = encode_prompt(asked, form)
    assert row.ids[:first] == prompt
    assert all(row.learn[first : first + sum(row.learn)])


def test_a_prompt_that_the_rendering_contradicts_is_refused_by_name() -> None:
    """Published reasoning templates open a thought in the prompt and strip it from every answer."""
    case = next(c for c in CASES if c.name == "deepseek")
    case = dataclasses.replace(case, template=templates.DEEPSEEK_R1)
    with pytest.raises(DataError, match=r"in\.jsonl:1: .* message 3 goes on with '<think>.*mode 'write'"):
        encode_conversation(document(case), form_of(case, tokenizer(case)))


BLIND = "{% for m in messages %}{% if m.role == 'user' %}user {{ m.content }}\n{% endif %}{% endfor %}"
SHOUTS = templates.CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
EMPTY_TAG = templates.CHATML.replace("{{ m.content }}", "{{ m.content }}{% generation %}{% endgeneration %}")
BARE = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "part"),
    [
        (BLIND, "leaves the words of message 3 out"),
        (SHOUTS, "leaves the words of message 3 out or changes them"),
        (EMPTY_TAG, r"marks 0 of \d+ tokens"),
        (BARE, r"marks (\d+) of \1 tokens"),
    ],
)
def test_masks_that_cannot_be_right_are_refused(template: str, part: str) -> None:
    case = dataclasses.replace(CASES[-2], template=template)
    assert case.name == "chatml"
    messages = [*case.messages[:3]] if template == BARE else case.messages
    with pytest.raises(DataError, match="in.jsonl:1.*" + part):
        encode_conversation(document(dataclasses.replace(case, messages=messages)), form_of(case, tokenizer(case)))


def test_a_template_that_raises_is_named() -> None:
    case = dataclasses.replace(CASES[0], template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"in\.jsonl:1.*roles must alternate"):
        encode_conversation(document(case), form_of(case, tokenizer(case)))


def test_the_text_does_not_depend_on_the_day() -> None:
    case = next(c for c in CASES if c.name == "gpt-oss harmony")
    words = tokenizer(case)
    asked, form = document(case), form_of(case, words)
    other = dataclasses.replace(form, today="2020-02-02")
    assert "Current date: 2026-01-01" in words.decode(encode_prompt(asked, form))
    assert "Current date: 2020-02-02" in words.decode(encode_prompt(asked, other))


# Answers written anew


@pytest.mark.parametrize(
    ("name", "written", "content", "thoughts"),
    [
        ("qwen3 thinking", "<think>\nhm\n</think>\n\nFour.<|im_end|>", "Four.", "hm"),
        ("qwen3 thinking", "hm</think>Four.<|im_end|>", "Four.", "hm"),
        ("chatml", "Four.<|im_end|>", "Four.", None),
        (
            "gpt-oss harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
            "Four.",
            "hm",
        ),
    ],
)
def test_written_answers_become_messages(name: str, written: str, content: str, thoughts: str | None) -> None:
    case = next(c for c in CASES if c.name == name)
    words = tokenizer(case)
    message = as_message(words(written, add_special_tokens=False)["input_ids"], form_of(case, words))
    assert (message["content"], message.get("reasoning_content")) == (content, thoughts)


def test_a_dialogue_asks_on_top_of_the_written_answers() -> None:
    case = next(c for c in CASES if c.name == "qwen3 thinking")
    words = tokenizer(case)
    state = Dialogue(document(case), form_of(case, words)).begin()
    first = state.prompt()
    assert first is not None and words.decode(first).endswith("Hi there<|im_end|>\n<|im_start|>assistant\n")
    state.answer(words("<think>\nx\n</think>\n\nWelcome!<|im_end|>", add_special_tokens=False)["input_ids"])
    second = words.decode(state.prompt() or [])
    assert "assistant\nWelcome!<|im_end|>\n<|im_start|>user\nAdd 2 and 2<|im_end|>" in second
    assert "Hello." not in second
    state.answer(words("Four.<|im_end|>", add_special_tokens=False)["input_ids"])
    assert state.prompt() is None


def test_calls_of_tools_are_kept_and_their_replies_read() -> None:
    case = next(c for c in CASES if c.name == "llama-3.1 tools")
    words = tokenizer(case)
    state = Dialogue(document(case), form_of(case, words)).begin()
    asked = words.decode(state.prompt() or [])
    assert '{"name": "add", "parameters": {"a": 2}}' in asked and "ipython" in asked and "It is four." not in asked
    state.answer([])
    assert state.prompt() is None


# Records


def test_conversations_of_other_forms_are_read_alike() -> None:
    sharegpt = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}], "system": "S"}
    parts = {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Yes", "tool_calls": None},
        ]
    }
    one, other = parsed(json.dumps(sharegpt)), parsed(json.dumps(parts))
    assert one.messages == other.messages
    assert one.messages[0] == {"role": "system", "content": "S"}
    with pytest.raises(DataError, match="only text can be read"):
        parsed(json.dumps({"messages": [{"role": "user", "content": [{"type": "image"}]}]}))


def test_parquet_saved_datasets_and_jsonl_hold_the_same_documents(tmp_path: Path) -> None:
    from datasets import Dataset

    records = [{"messages": TALK, "id": 1}, {"messages": TALK[1:3], "id": 2}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    table = Dataset.from_list(records)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    sources = ["a.jsonl", "a.parquet", "saved"]
    read = [[doc for _, doc in read_source(str(tmp_path / name))] for name in sources]
    read.append([doc for _, doc in read_source(f"dataset:{tmp_path / 'saved'}")])
    assert len(read[0]) == 2
    assert all([doc.messages for doc in docs] == [doc.messages for doc in read[0]] for docs in read)
    assert [p.messages for p in read_prompts(tmp_path / "a.parquet")] == [
        p.messages for p in read_prompts(tmp_path / "a.jsonl")
    ]
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        list(read_source(str(tmp_path / "bad.parquet")))


def test_several_fields_need_a_choice(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "p", "messages": TALK}) + "\n")
    with pytest.raises(DataError, match="choose one with `column`"):
        list(read_documents(str(tmp_path / "a.jsonl")))
    (one,) = read_documents(str(tmp_path / "a.jsonl"), choose="messages")
    assert len(one.messages) == 5


def test_near_copies_stand_on_one_side_of_a_split(tmp_path: Path) -> None:
    """Two hundred questions, each as one turn, as the beginning of a longer talk, and in other spelling."""
    lines = []
    for number in range(200):
        ask = f"What is the answer to question {number}?"
        lines += [
            {"turns": [ask]},
            {"turns": [ask, "And then?"]},
            {"turns": [f"  what IS the answer, to question {number}"]},
        ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for seed in (0, 1):
        sides = {
            split: {doc.split_key() for doc in read_documents(str(tmp_path / "a.jsonl"), split, split_seed=seed)}
            for split in ("train", "held-out")
        }
        assert not sides["train"] & sides["held-out"]
        counts = [len(list(read_documents(str(tmp_path / "a.jsonl"), s, split_seed=seed))) for s in sides]
        assert sum(counts) == 600 and all(count % 3 == 0 for count in counts) and 15 < counts[1] < 150
