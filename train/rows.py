"""From documents to rows of token ids: pieces of text to label, or prompts to continue."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from selfspec.errors import ConfigError
from selfspec.train.corpus import STDLIB, stable_fraction, stdlib_snippets
from selfspec.train.prompts import Document, encode_prompt, encode_text, prefix_ids, read_documents
from selfspec.train.settings import DistillConfig

_SHORTEST = 8


@dataclass
class Row:
    """One sequence. `ids` and `learn` have one length.

    Args:
        ids: token ids, the prefix included.
        learn: true for tokens to learn from.
        seed: of what is written behind it.
        predictions: the target's first choice after each token.
        features: columns of bfloat16 bytes.
    """

    ids: list[int]
    learn: list[bool]
    seed: int = 0
    predictions: list[int] = field(default_factory=list)
    features: dict[str, bytes] = field(default_factory=dict)


def label_rows(tokenizer: PreTrainedTokenizerBase, config: DistillConfig) -> tuple[list[Row], int]:
    """Rows of at most `length` tokens, cut from documents in an order shuffled by the seed, up to `max_tokens`.

    Returns:
        The rows, and how many were dropped because they held nothing to learn from.
    """
    prefix = prefix_ids(tokenizer)
    rows: list[Row] = []
    dropped = total = 0
    for document in _shuffled(config):
        for ids, learn in _pieces(document, tokenizer, prefix, config.length):
            keep = config.max_tokens - total
            ids, learn = ids[:keep], learn[:keep]
            if not any(learn[1:]) or len(ids) < min(_SHORTEST, config.length):
                dropped += bool(ids)
                continue
            rows.append(Row(ids, learn))
            total += len(ids)
        if total >= config.max_tokens:
            break
    return rows, dropped


def _shuffled(config: DistillConfig) -> list[Document]:
    documents = list(read_documents(config.source, config.split, config.turn))
    return sorted(documents, key=lambda document: stable_fraction(f"{config.seed}:{document.digest().hex()}"))


def _pieces(
    document: Document, tokenizer: PreTrainedTokenizerBase, prefix: list[int], length: int
) -> Iterator[tuple[list[int], list[bool]]]:
    encoded = encode_text(document, tokenizer)
    if document.kind == "messages":  # a template writes its own prefix, and half a conversation is no conversation
        yield encoded.ids[:length], encoded.learn[:length]
        return
    room = length - len(prefix)
    if room < 1:
        raise ConfigError(f"length {length} leaves no room behind the tokenizer's {len(prefix)} first tokens")
    for start in range(0, len(encoded.ids), room):
        piece, learn = encoded.ids[start : start + room], encoded.learn[start : start + room]
        yield prefix + piece, [False] * len(prefix) + learn


def prompt_rows(tokenizer: PreTrainedTokenizerBase, config: DistillConfig) -> tuple[list[Row], int]:
    """Prompts to continue, each `samples` times, until prompts and continuations reach `max_tokens`.

    Returns:
        The rows, and how many prompts were dropped because they leave no room within `length`.
    """
    rows: list[Row] = []
    dropped = total = place = 0
    for ids in _prompts(tokenizer, config):
        if not ids or len(ids) >= config.length:
            dropped += 1
            continue
        for _ in range(config.samples):
            room = min(config.max_new_tokens, config.length - len(ids))
            if total + len(ids) >= config.max_tokens:
                return rows, dropped
            rows.append(Row(ids, [config.learn_prompt] * len(ids), _seed(config.seed, place)))
            total += len(ids) + room
            place += 1
    return rows, dropped


def _seed(seed: int, place: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{place}".encode()).digest()[:7], "big")


def _prompts(tokenizer: PreTrainedTokenizerBase, config: DistillConfig) -> Iterator[list[int]]:
    prefix = prefix_ids(tokenizer)
    if not config.source:
        yield from _from_nothing(tokenizer, prefix)
    elif config.source == STDLIB:
        count = 1 + config.max_tokens // (config.samples * config.max_new_tokens)
        low = min(60, max(config.prompt_tokens // 2, 1))
        for snippet in stdlib_snippets(config.split, count, config.seed, tokenizer, low, config.prompt_tokens):
            yield prefix + tokenizer(snippet.text, add_special_tokens=False)["input_ids"]
    else:
        for document in _shuffled(config):
            if document.kind == "text":
                yield from _openings(document, tokenizer, prefix, config)
            else:
                yield encode_prompt(document, tokenizer)


def _from_nothing(tokenizer: PreTrainedTokenizerBase, prefix: list[int]) -> Iterator[list[int]]:
    start = prefix or [t for t in (tokenizer.bos_token_id, tokenizer.eos_token_id) if t is not None][:1]
    if not start:
        raise ConfigError("the tokenizer has no beginning-of-text token to start from; give a source of prompts")
    while True:
        yield start


def _openings(
    document: Document, tokenizer: PreTrainedTokenizerBase, prefix: list[int], config: DistillConfig
) -> Iterator[list[int]]:
    """The beginnings of stretches of a text, as far apart as prompt and continuation are long."""
    ids = encode_text(document, tokenizer).ids
    stride = config.prompt_tokens + config.max_new_tokens
    for start in range(0, max(len(ids) - config.prompt_tokens // 2, 1), stride):
        piece = ids[start : start + config.prompt_tokens]
        if len(piece) >= min(_SHORTEST, config.prompt_tokens):
            yield prefix + piece
