"""Documents of a source for training, split by hash into text to train on and text held out, and their token ids."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from selfspec.documents import Document, read_source
from selfspec.errors import DataError
from selfspec.train.chat import ChatFormat, Encoded, encode_conversation
from selfspec.train.corpus import STDLIB, in_split, stdlib_sources


def read_documents(
    source: str, split: str = "all", turn: int | None = None, choose: str = "", split_seed: int = 0
) -> Iterator[Document]:
    """Documents of a source, in a fixed order.

    Args:
        source: `stdlib`, or a source of `selfspec.documents`.
        split: `train`, `held-out` or `all`; by hash of a file's name, or of how a record begins.
        turn: which user turn of `turns` is used alone, counted from 0; None takes all.
        choose: the field to read where records hold several.
        split_seed: another seed, another split.

    Raises:
        DataError: nothing there, or bad input; the message names file and line.
    """
    if source == STDLIB:
        for name, text in stdlib_sources(split):
            yield Document(name, "text", text)
        return
    for key, document in read_source(source, choose, turn):
        if in_split(key, split, split_seed):
            yield document


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text: its beginning-of-text token, or nothing."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    return list(full[: full.index(bare[0])]) if bare and bare[0] in full else []


def encode_prompt(document: Document, form: ChatFormat) -> list[int]:
    """Token ids of a prompt, ready for the target to go on; an answer at the end of a conversation is left out.

    Raises:
        DataError: a conversation without a chat template.
    """
    if document.kind != "messages":
        ids = form.tokenizer(document.text, add_special_tokens=False)["input_ids"]
        return prefix_ids(form.tokenizer) + list(ids)
    messages = list(document.messages)
    roles = [message["role"] for message in messages]
    unanswered = [place for place in range(1, len(roles)) if roles[place - 1] == roles[place] == "user"]
    messages = messages[: unanswered[0]] if unanswered else messages  # the second of two questions waits for an answer
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{document.name}: the conversation holds nothing to answer")
    return form.prompt(document, messages)


def encode_text(document: Document, form: ChatFormat, answers: str = "each") -> list[Encoded]:
    """Token ids to learn from. In a conversation only the assistant's words count, in a text everything.

    The tokenizer's prefix (beginning of text) is left out of texts, so that pieces can be cut; templates write theirs.

    Raises:
        DataError: as `encode_conversation`, or a prompt with no text.
    """
    if document.kind == "prompt":
        raise DataError(f"{document.name} is a prompt, there is no text to label; use mode 'write', or give `text`")
    if document.kind == "messages":
        return encode_conversation(document, form, answers)
    ids = list(form.tokenizer(document.text, add_special_tokens=False)["input_ids"])
    return [Encoded(ids, [True] * len(ids))]
