"""Prompts from a JSONL file: a text to go on from, or a conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELDS = ("prompt", "text", "turns", "messages")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        text: to be continued as it is; None for a conversation.
        messages: chat messages (`role`, `content`), rendered with the tokenizer's chat template where it has one.
    """

    text: str | None = None
    messages: tuple[dict[str, str], ...] = ()

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids, beginning-of-text token included where the model wants one.

        Raises:
            DataError: no token comes out.
        """
        call: Any = tokenizer
        if self.messages and tokenizer.chat_template:
            messages = [dict(message) for message in self.messages]
            ids = call.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            text = "\n\n".join(m["content"] for m in self.messages) if self.text is None else self.text
            ids = call(text)["input_ids"]
        if not ids:
            raise DataError("the prompt is empty; give at least one token")
        return list(ids)


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first prompts of a JSONL file.

    Each line is an object with `prompt` or `text` (a string to go on from), `turns` (user turns, of which the first is
    asked) or `messages` (a conversation that ends with the user).

    Raises:
        DataError: the file is missing, empty or not of this form; the message names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028 inside strings
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the prompts {str(path)!r} cannot be read: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            prompts.append(_parse(line, f"{path}, line {number}"))
    if not prompts:
        raise DataError(f'{path} holds no prompts; wanted lines like {{"prompt": "..."}}')
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: wanted an object with one of {', '.join(FIELDS)}, got {type(record).__name__}")
    for name in ("prompt", "text"):
        if isinstance(record.get(name), str):
            return _checked(Prompt(text=record[name]), where)
    turns, messages = record.get("turns"), record.get("messages")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return _checked(Prompt(messages=({"role": "user", "content": turns[0]},)), where)
    if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
        return _checked(Prompt(messages=tuple(messages)), where)
    raise DataError(f"{where}: wanted one of {', '.join(FIELDS)}, got the keys {sorted(record)}")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _checked(prompt: Prompt, where: str) -> Prompt:
    if not (prompt.text or "".join(message["content"] for message in prompt.messages)):
        raise DataError(f"{where}: the prompt is empty; give at least one character")
    return prompt
