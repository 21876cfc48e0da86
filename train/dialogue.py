"""Conversations whose answers the target writes, turn by turn, each on top of its own earlier ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec.documents import Document
from selfspec.train.chat import ChatFormat

_CHANNEL = re.compile(
    r"<\|channel\|>\s*(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|$)", re.S
)


@dataclass(frozen=True)
class Dialogue:
    """A conversation to be answered anew.

    Its own answers are replaced by the target's. Answers that call tools stay as they are, because the tools' replies
    belong to them; they are read and not learned.
    """

    document: Document
    form: ChatFormat

    def begin(self) -> DialogueState:
        """Nothing answered yet."""
        return DialogueState(self, list(self.document.messages))

    @property
    def answers(self) -> int:
        """How many answers are due, more or less."""
        roles = [message["role"] for message in self.document.messages]
        return max(roles.count("user"), 1)


@dataclass
class DialogueState:
    """How far the target has come."""

    dialogue: Dialogue
    pending: list[dict[str, Any]]
    done: list[dict[str, Any]] = field(default_factory=list)

    def prompt(self) -> list[int] | None:
        """Token ids that ask for the next answer; None when all are given."""
        while self.pending:
            message = self.pending[0]
            if message["role"] == "assistant" and not message.get("tool_calls"):
                self.pending.pop(0)
                break
            if message["role"] == "user" and self.done and self.done[-1]["role"] == "user":
                break
            self.done.append(self.pending.pop(0))
        if not self.done or self.done[-1]["role"] == "assistant":
            return None
        return self.dialogue.form.prompt(self.dialogue.document, self.done)

    def answer(self, ids: Sequence[int]) -> None:
        """Take in what the target wrote."""
        self.done.append(as_message(ids, self.dialogue.form))


def as_message(ids: Sequence[int], form: ChatFormat) -> dict[str, Any]:
    """Written tokens as a message that the template takes: thoughts apart from the words.

    A tokenizer that says how its answers are read (`response_template`) is believed; otherwise `<think>` blocks and
    the channels of gpt-oss are known.
    """
    call: Any = form.tokenizer
    ids = [token for token in ids if token not in form.ends]
    if getattr(call, "response_template", None) is not None:
        return {"role": "assistant", "content": "", **call.parse_response(call.decode(ids), prefix="")}
    channels = _CHANNEL.findall(call.decode(ids, skip_special_tokens=False))
    if channels:
        thoughts = "".join(text for name, text in channels if name == "analysis")
        return _message("".join(text for name, text in channels if name == "final"), thoughts)
    before, thought, text = call.decode(ids, skip_special_tokens=True).rpartition("</think>")
    return _message(text.strip("\n"), before.partition("<think>")[2] or before if thought else "")


def _message(content: str, thoughts: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        message |= {"reasoning_content": thoughts.strip("\n"), "thinking": thoughts.strip("\n")}
    return message
