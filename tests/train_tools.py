"""A tokenizer built in code for tests of training: one word, one token; the vocabulary of the tiny targets."""

from __future__ import annotations

import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %} user {{ m['content'] }}{% else %} bot {{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} bot{% endif %}"
)
TAGGED_CHAT = CHAT.replace(" bot {{ m['content'] }}", " bot{% generation %} {{ m['content'] }}{% endgeneration %}")


def tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Words `t2` .. `t92` are the ids 2 .. 92; unknown words are id 93."""
    words = {
        "<pad>": 0,
        "<bos>": 1,
        **{f"t{i}": i for i in range(2, 93)},
        "<unk>": 93,
        "user": 94,
        "bot": 95,
        "<eos>": 96,
    }
    assert len(words) == tiny.VOCAB
    built = Tokenizer(WordLevel(words, unk_token="<unk>"))
    built.pre_tokenizer = WhitespaceSplit()
    built.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=chat_template,
    )
