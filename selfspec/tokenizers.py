"""Whether two models write with the same tokens."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import ConfigError
from selfspec.models import DEMO, demo_folder


def tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a model on this machine; None if there is none (a model built in code)."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    if not name:
        return None
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(demo_folder()) if name == DEMO else name, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError):
        return None
    return found


def check_same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, sizes: str) -> None:
    """Raise ConfigError, naming a token, unless both give every token the same id.

    Models of the same size may have different tokenizers, and padded models of one tokenizer different sizes.
    """
    mine, theirs = one.get_vocab(), other.get_vocab()
    if mine == theirs:
        return
    example = next(token for token in [*theirs, *mine] if mine.get(token) != theirs.get(token))
    raise ConfigError(
        f"the draft model has another tokenizer than the target: {example!r} is {mine.get(example, 'no token')} there "
        f"and {theirs.get(example, 'no token')} here ({sizes}); use a draft model with the target's tokenizer"
    )
