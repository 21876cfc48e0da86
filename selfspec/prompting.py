"""Prompts to go on from: a text, or a conversation through the tokenizer's chat template."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.documents import FIELDS, read_source
from selfspec.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Args:
        text: to be continued as it is; None for a conversation.
        messages: chat messages (`role`, `content`), rendered with the tokenizer's chat template where it has one.
        tools: descriptions of tools, for the chat template.
        options: more for the chat template.
        category: the kind of task, where the source says.
    """

    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    category: str | None = None

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids, beginning-of-text token included where the model wants one.

        Raises:
            DataError: no token comes out.
        """
        if self.messages and tokenizer.chat_template:
            text = render_chat(tokenizer, self.messages, ask=True, tools=self.tools, options=self.options)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            text = "\n\n".join(m["content"] for m in self.messages) if self.text is None else self.text
            ids = tokenizer(text)["input_ids"]
        if not ids:
            raise DataError("the prompt is empty; give at least one token")
        return list(ids)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    ask: bool,
    tools: Sequence[Any] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """A conversation as its target reads it. It is tokenised without special tokens: templates write theirs.

    Args:
        tokenizer: with a chat template.
        messages: the conversation.
        ask: end with what stands before an answer.
        tools: descriptions of tools.
        options: more for the template, as `enable_thinking`.
    """
    call: Any = tokenizer
    given = [dict(message) for message in messages]
    wanted = {"tokenize": False, "add_generation_prompt": ask, "tools": list(tools) or None, **(options or {})}
    return str(call.apply_chat_template(given, **wanted))


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first prompts of a source.

    Of `turns` the first is asked; an answer at the end of a conversation is left out.

    Args:
        path: JSONL, Parquet, text, or another source that `selfspec.documents` reads.
        limit: the most prompts.

    Raises:
        DataError: the file is missing, empty or not of this form; the message names the line.
    """
    prompts = []
    for _, document in itertools.islice(read_source(str(path), turn=0), limit):
        if document.kind != "messages":
            prompts.append(Prompt(document.text, category=document.category))
            continue
        messages = list(document.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise DataError(f"{document.name}: the conversation holds nothing to answer")
        prompts.append(Prompt(None, tuple(messages), document.tools, document.options, document.category))
    if not prompts:
        raise DataError(f"{path} holds no prompts; wanted records with one of {', '.join(FIELDS)}")
    return prompts
