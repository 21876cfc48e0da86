"""Which tokens of a conversation are the assistant's, by the target's own chat template.

An answer is what the rendering adds to the prompt that asks for it, up to the token that ends it. Where the template
marks answers itself (`{% generation %}`), its marks must agree. Templates that render a turn differently once more
follow (most strip earlier thinking) give one row per answer, each as the target read it when it was asked.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.documents import Document
from selfspec.errors import DataError
from selfspec.prompting import render_chat

ANSWERS = ("each", "last")

_CLOCK = re.compile(r"strftime_now\(\s*['\"]([^'\"]*)['\"]")
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN = 24


@dataclass(frozen=True)
class Encoded:
    """Token ids and, for each, whether it is text to learn from. Both lists have one length."""

    ids: list[int]
    learn: list[bool]


@dataclass(frozen=True)
class ChatFormat:
    """How conversations are written down.

    Args:
        tokenizer: the target's.
        ends: ids that end an answer, as in `generate`.
        options: for the chat template, as `enable_thinking`; those of a document come first.
        today: the date that templates write into the system prompt, so that the text is the same every day.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    today: str = "2026-01-01"

    def render(self, document: Document, messages: Sequence[Mapping[str, Any]], ask: bool) -> str:
        """Text of the first messages of a document.

        Raises:
            DataError: no chat template, or it refuses the conversation.
        """
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{document.name} is a conversation, but the target's tokenizer has no chat template (a base model?); "
                "give `prompt` or `text` instead, or a target that was trained to chat"
            )
        try:
            return render_chat(self.tokenizer, messages, ask, document.tools, self._all_options(document))
        except (ValueError, TypeError, KeyError, _template_error()) as error:
            raise DataError(f"{document.name}: the chat template refuses the conversation: {error}") from error

    def _all_options(self, document: Document) -> dict[str, Any]:
        return {"chat_template": self._template(document), **self.options, **document.options}

    def _template(self, document: Document) -> str:
        """The chat template, with its clock stopped."""
        call: Any = self.tokenizer
        template = str(call.get_chat_template(None, list(document.tools) or None))
        formats = set(_CLOCK.findall(template))
        if not formats:
            return template
        day = datetime.date.fromisoformat(self.today)
        table = json.dumps({form: day.strftime(form) for form in sorted(formats)})
        return "{%- macro strftime_now(format) -%}{{- " + table + "[format] -}}{%- endmacro -%}" + template

    def prompt(self, document: Document, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids that ask for the answer after these messages."""
        text = self.render(document, messages, ask=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def marks(self, document: Document, messages: Sequence[Mapping[str, Any]]) -> list[bool] | None:
        """What the template itself marks as answers, per token; None if it marks nothing."""
        if not _TAG.search(self._template(document)):
            return None
        call: Any = self.tokenizer
        found = call.apply_chat_template(
            [dict(m) for m in messages],
            tools=list(document.tools) or None,
            return_assistant_tokens_mask=True,
            return_dict=True,
            **self._all_options(document),
        )
        return [bool(flag) for flag in found["assistant_masks"]]


def _template_error() -> type[Exception]:
    from jinja2 import TemplateError

    return TemplateError


@dataclass
class _Rendered:
    """A conversation up to an answer, and where the answers stand in the text."""

    messages: Sequence[Mapping[str, Any]]
    text: str
    spans: list[tuple[int, int]]


def encode_conversation(document: Document, form: ChatFormat, answers: str = "each") -> list[Encoded]:
    """Rows of a conversation with the assistant's tokens marked, the token that ends an answer included.

    Args:
        document: a conversation with an answer.
        form: how it is written down.
        answers: `each` or `last`.

    Returns:
        One row, or one per answer where the template rewrites earlier turns.

    Raises:
        DataError: no answer, a template whose prompt is not the beginning of what it makes of the answer, or a mask
            with nothing or everything in it; the message names the conversation.
    """
    messages = list(document.messages)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise DataError(f"{document.name}: the conversation has no assistant message to learn from; use mode 'write'")
    rows: list[_Rendered] = []
    for place in places if answers == "each" else places[-1:]:
        row = _until(document, form, place)
        if rows and _goes_on(rows[-1], row):
            row.spans = rows.pop().spans + row.spans
        rows.append(row)
    return [_encoded(document, form, row) for row in rows]


def _until(document: Document, form: ChatFormat, place: int) -> _Rendered:
    messages = document.messages[: place + 1]
    before = form.render(document, messages[:-1], ask=True)
    after = form.render(document, messages, ask=False)
    if after.startswith(before):
        start = len(before)
        _demand_content(document, messages[-1], after[start:], place)
        return _Rendered(messages, after, [(start, _end(form, after, start))])
    if form.marks(document, messages) is not None:
        return _Rendered(messages, after, [])
    common = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    raise DataError(
        f"{document.name}: the chat template's prompt for message {place + 1} goes on with "
        f"{before[common : common + _SHOWN]!r} where its rendering of the answer goes on with "
        f"{after[common : common + _SHOWN]!r}, so the answer's tokens cannot be told; use mode 'write', in which the "
        "target answers itself, or set what the template takes in `template` (for instance enable_thinking)"
    )


def _end(form: ChatFormat, text: str, start: int) -> int:
    """Where the answer ends: behind its first end token, or its last character that is no space."""
    tokens: Any = form.tokenizer.convert_ids_to_tokens(list(form.ends))
    found = [(text.find(end, start), len(end)) for end in tokens if end]
    places = [place + size for place, size in found if place >= 0]
    return min(places, default=max(start, len(text.rstrip())))


def _demand_content(document: Document, message: Mapping[str, Any], answer: str, place: int) -> None:
    said = str(message["content"]).rpartition("</think>")[2].strip()
    if said not in answer:
        raise DataError(
            f"{document.name}: the chat template leaves the words of message {place + 1} out or changes them "
            f"({said[:_SHOWN]!r} became {answer[:_SHOWN]!r}), so its tokens cannot be told; use mode 'write'"
        )


def _goes_on(row: _Rendered, longer: _Rendered) -> bool:
    """Whether a longer rendering leaves the shorter one, up to the end of its last answer, as it was."""
    if not row.spans or not longer.spans:
        return not row.spans and not longer.spans  # the template's own marks tell them all
    end = row.spans[-1][1]
    return end <= longer.spans[-1][0] and row.text[:end] == longer.text[:end]


def _encoded(document: Document, form: ChatFormat, row: _Rendered) -> Encoded:
    if not form.tokenizer.is_fast:
        raise DataError(f"{type(form.tokenizer).__name__} cannot tell where tokens stand; load a fast tokenizer")
    encoded = form.tokenizer(row.text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    marks = form.marks(document, row.messages)
    if row.spans:
        learn = [
            start < end and any(first <= start < stop for first, stop in row.spans)
            for start, end in encoded["offset_mapping"]
        ]
        if marks is not None and len(marks) == len(learn):
            learn = [here and mark for here, mark in zip(learn, marks, strict=True)]
    else:
        learn = list(marks or [])
    if len(learn) != len(ids) or not any(learn) or all(learn):
        share = f"{sum(learn)} of {len(ids)} tokens"
        raise DataError(
            f"{document.name}: the chat template marks {share} as the assistant's, so the mask cannot be right; mend "
            "the template, or use mode 'write'"
        )
    return Encoded(ids, learn)
