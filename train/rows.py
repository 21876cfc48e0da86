"""From documents to rows of token ids: pieces of text to label, or prompts to continue."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.documents import Document
from selfspec.errors import ConfigError, DataError
from selfspec.train.chat import ChatFormat, Encoded
from selfspec.train.corpus import STDLIB, stable_fraction, stdlib_snippets
from selfspec.train.dialogue import Dialogue
from selfspec.train.prompts import encode_prompt, encode_text, prefix_ids, read_documents
from selfspec.train.settings import DistillConfig
from selfspec.train.traffic import TRAFFIC, traffic_rows

_SHORTEST = 8


@dataclass
class Row:
    """One sequence. `ids` and `learn` have one length.

    Args:
        ids: token ids, the prefix included.
        learn: true for tokens to learn from.
        seed: of what is written behind it.
        dialogue: the conversation whose first prompt this is; None for a single answer.
        features: what the target thinks of it, `[len(ids), ..]` by column.
    """

    ids: list[int]
    learn: list[bool]
    seed: int = 0
    dialogue: Dialogue | None = None
    features: dict[str, Tensor] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        """How many answers will be written."""
        return 1 if self.dialogue is None else self.dialogue.answers


@dataclass
class Plan:
    """Rows to label or to go on from.

    Args:
        rows: in the order in which they are made.
        dropped: how many were left out, because they hold nothing to learn from or leave no room to write.
        cut: how many were cut at the longest length.
        cut_tokens: how many tokens were cut off.
    """

    rows: list[Row] = field(default_factory=list)
    dropped: int = 0
    cut: int = 0
    cut_tokens: int = 0

    def notes(self) -> dict[str, int]:
        """For the manifest."""
        return {"dropped_rows": self.dropped, "cut_rows": self.cut, "cut_tokens": self.cut_tokens}


def plan_rows(tokenizer: PreTrainedTokenizerBase, config: DistillConfig, ends: tuple[int, ...] = ()) -> Plan:
    """The rows of a dataset, up to `max_tokens`.

    Args:
        tokenizer: the target's.
        config: what to make.
        ends: ids that end an answer; empty takes the tokenizer's own.
    """
    own = tokenizer.eos_token_id
    form = ChatFormat(tokenizer, ends or (() if own is None else (own,)), config.template, config.today)
    return (_prompt_rows if config.mode == "write" else _label_rows)(form, config)


def _label_rows(form: ChatFormat, config: DistillConfig) -> Plan:
    """Rows of at most `length` tokens, cut from documents in an order shuffled by the seed, up to `max_tokens`."""
    plan, total = Plan(), 0
    for encoded, cuttable in _texts(form, config):
        for ids, learn in _pieces(encoded, form.tokenizer, config.length, cuttable, plan):
            keep = config.max_tokens - total
            ids, learn = ids[:keep], learn[:keep]
            if not any(learn[1:]) or len(ids) < min(_SHORTEST, config.length):
                plan.dropped += bool(ids)
                continue
            plan.rows.append(Row(ids, learn))
            total += len(ids)
        if total >= config.max_tokens:
            break
    return plan


def _texts(form: ChatFormat, config: DistillConfig) -> Iterator[tuple[Encoded, bool]]:
    """Token ids, and whether they may be cut into pieces."""
    if config.source.startswith(TRAFFIC):
        for ids, prompt in traffic_rows(config.source.removeprefix(TRAFFIC), config.split, config.split_seed):
            yield Encoded(ids, [place >= prompt for place in range(len(ids))]), False
        return
    for document in _shuffled(config):
        for encoded in encode_text(document, form, config.answers):
            yield encoded, document.kind != "messages"


def _shuffled(config: DistillConfig) -> list[Document]:
    documents = list(read_documents(config.source, config.split, config.turn, config.column, config.split_seed))
    return sorted(documents, key=lambda document: stable_fraction(f"{config.seed}:{document.digest().hex()}"))


def _pieces(
    encoded: Encoded, tokenizer: PreTrainedTokenizerBase, length: int, cuttable: bool, plan: Plan
) -> Iterator[tuple[list[int], list[bool]]]:
    if not cuttable:  # a template writes its own prefix, and half a conversation is no conversation
        if len(encoded.ids) > length:
            plan.cut += 1
            plan.cut_tokens += len(encoded.ids) - length
        yield encoded.ids[:length], encoded.learn[:length]
        return
    prefix = prefix_ids(tokenizer)
    room = length - len(prefix)
    if room < 1:
        raise ConfigError(f"length {length} leaves no room behind the tokenizer's {len(prefix)} first tokens")
    for start in range(0, len(encoded.ids), room):
        piece, learn = encoded.ids[start : start + room], encoded.learn[start : start + room]
        yield prefix + piece, [False] * len(prefix) + learn


def _prompt_rows(form: ChatFormat, config: DistillConfig) -> Plan:
    """Prompts to continue, each `samples` times, until prompts and continuations reach `max_tokens`."""
    plan = Plan()
    total = place = 0
    for ids, dialogue in _prompts(form, config):
        if not ids or len(ids) >= config.length:
            plan.dropped += 1
            continue
        for _ in range(config.samples):
            if total + len(ids) >= config.max_tokens:
                return plan
            seed = derived_seed(config.seed, place)
            plan.rows.append(Row(ids, [config.learn_prompt] * len(ids), seed, dialogue))
            total += len(ids) + planned_tokens(plan.rows[-1], config)
            place += 1
    return plan


def room(row_tokens: int, config: DistillConfig) -> int:
    """How many tokens may be written behind so many."""
    return min(config.max_new_tokens, config.length - row_tokens) if config.mode == "write" else 0


def planned_tokens(row: Row, config: DistillConfig) -> int:
    """How many tokens may be written behind a row, over all its answers."""
    return room(len(row.ids), config) * row.answers


def derived_seed(seed: int, place: int) -> int:
    """A seed of its own for each place."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{place}".encode()).digest()[:7], "big")


def _prompts(form: ChatFormat, config: DistillConfig) -> Iterator[tuple[list[int], Dialogue | None]]:
    tokenizer = form.tokenizer
    prefix = prefix_ids(tokenizer)
    if not config.source:
        yield from ((ids, None) for ids in _from_nothing(tokenizer, prefix))
    elif config.source == STDLIB:
        count = 1 + config.max_tokens // (config.samples * config.max_new_tokens)
        low = min(60, max(config.prompt_tokens // 2, 1))
        for snippet in stdlib_snippets(config.split, count, config.seed, tokenizer, low, config.prompt_tokens):
            yield prefix + tokenizer(snippet.text, add_special_tokens=False)["input_ids"], None
    else:
        for document in _shuffled(config):
            if document.kind == "text":
                yield from ((ids, None) for ids in _openings(document, form, prefix, config))
            elif document.kind == "messages" and config.answers == "each":
                dialogue = Dialogue(document, form)
                first = dialogue.begin().prompt()
                if first is None:
                    raise DataError(f"{document.name}: the conversation holds nothing to answer")
                yield first, dialogue
            else:
                yield encode_prompt(document, form), None


def _from_nothing(tokenizer: PreTrainedTokenizerBase, prefix: list[int]) -> Iterator[list[int]]:
    start = prefix or [t for t in (tokenizer.bos_token_id, tokenizer.eos_token_id) if t is not None][:1]
    if not start:
        raise ConfigError("the tokenizer has no beginning-of-text token to start from; give a source of prompts")
    while True:
        yield start


def _openings(document: Document, form: ChatFormat, prefix: list[int], config: DistillConfig) -> Iterator[list[int]]:
    """The beginnings of stretches of a text, as far apart as prompt and continuation are long."""
    ids = encode_text(document, form)[0].ids
    stride = config.prompt_tokens + config.max_new_tokens
    for start in range(0, max(len(ids) - config.prompt_tokens // 2, 1), stride):
        piece = ids[start : start + config.prompt_tokens]
        if len(piece) >= min(_SHORTEST, config.prompt_tokens):
            yield prefix + piece
