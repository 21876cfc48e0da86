"""Chat templates of the structures in use, written for these tests, and one conversation as each renders it.

In the renderings `⟦` and `⟧` stand around what the assistant writes when it is asked, to the token that ends it; they
are placed by hand. A template that rewrites earlier turns has one rendering per answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Add 2 and 2"},
    {"role": "assistant", "content": "It is four."},
]
PLAIN = TALK[1:]
THINKING = [
    *TALK[:4],
    {"role": "assistant", "content": "It is four.", "reasoning_content": "2+2=4"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL_TALK = [
    {"role": "user", "content": "Add 2 and 2"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "name": "add"},
    {"role": "assistant", "content": "It is four."},
]


@dataclass(frozen=True)
class Case:
    """One structure: template, special tokens, ids that end an answer, and what it makes of a conversation."""

    name: str
    template: str
    special: list[str]
    ends: list[str]
    rendered: list[str]
    messages: list[dict[str, Any]] = field(default_factory=lambda: TALK)
    tools: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def tokenizer(case: Case) -> PreTrainedTokenizerFast:
    """Bytes and the special tokens of a case."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in case.special])
    options = {"bos_token": case.special[0], "eos_token": case.ends[0]}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=case.template, **options)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA31 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ strftime_now('%d %b %Y') }}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|eot_id|>"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% elif m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ (m.reasoning_content or '') | trim }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content + '\n\n' %}{% else %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{% if ns.system and m.role == 'user' %}{{ ns.system }}"
    "{% set ns.system = '' %}{% endif %}{{ m.content | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (  # v0.3: tools stand before the last question only, so earlier text changes when more follows
    "{{ bos_token }}{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
MISTRAL_SMALL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
PHI3 = (  # writes an end of text behind every conversation that is not asked on
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
PHI4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>{% for m in messages %}"
    "{% if m.role == 'system' %}<|start|>developer<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif loop.last and not add_generation_prompt %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
DEEPSEEK_R1 = DEEPSEEK.replace("<｜Assistant｜>{% endif %}", "<｜Assistant｜><think>\n{% endif %}")
SMOLLM3 = (  # marks answers, header and all
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_COMMAND_R_TURN = (
    "<|START_OF_TURN_TOKEN|><|{{ {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] }}_TOKEN|>"
)
COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}" + _COMMAND_R_TURN + "{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)

_IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
_A, _U, _S = (_HEADER.format(role) for role in ("assistant", "user", "system"))
_BRIEF = "<|im_start|>system\nBe brief.<|im_end|>\n"
_HI = "<|im_start|>user\nHi there<|im_end|>\n"
_ADD = "<|im_start|>user\nAdd 2 and 2<|im_end|>\n"
_BOT = "<|im_start|>assistant\n"
_HARMONY_TOKENS = ["<|startoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
_HARMONY_START = (
    "<|start|>system<|message|>Current date: 2026-01-01<|end|><|start|>developer<|message|>Be brief.<|end|>"
    "<|start|>user<|message|>Hi there<|end|><|start|>assistant"
)
_HARMONY_ADD = "<|start|>user<|message|>Add 2 and 2<|end|><|start|>assistant"
_HELLO = "<|channel|>final<|message|>Hello."
_TOOLS_SHOWN = json.dumps(TOOLS)
_COMMAND_R = [f"<|{name}_TOKEN|>" for name in ("START_OF_TURN", "END_OF_TURN", "USER", "CHATBOT", "SYSTEM")]

CASES = [
    Case(
        "llama-3", LLAMA3, _LLAMA, ["<|eot_id|>"],
        [f"<|begin_of_text|>{_S}Be brief.<|eot_id|>{_U}Hi there<|eot_id|>{_A}⟦Hello.<|eot_id|>⟧"
         f"{_U}Add 2 and 2<|eot_id|>{_A}⟦It is four.<|eot_id|>⟧"],
    ),
    Case(
        "llama-3.1 tools", LLAMA31, _LLAMA, ["<|eot_id|>"],
        [f"<|begin_of_text|>{_S}Today Date: 01 Jan 2026\n{_TOOLS_SHOWN}<|eot_id|>{_U}Add 2 and 2<|eot_id|>"
         f'{_A}⟦{{"name": "add", "parameters": {{"a": 2}}}}<|eot_id|>⟧{_HEADER.format("ipython")}"4"<|eot_id|>'
         f"{_A}⟦It is four.<|eot_id|>⟧"],
        TOOL_TALK, TOOLS,
    ),
    Case(
        "qwen2.5", QWEN25, _IM, ["<|im_end|>", "<|endoftext|>"],
        [f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{_HI}{_BOT}⟦Hello.<|im_end|>⟧\n"
         f"{_ADD}{_BOT}⟦It is four.<|im_end|>⟧\n"],
        PLAIN,
    ),
    Case(
        "qwen3 thinking", QWEN3, _IM, ["<|im_end|>", "<|endoftext|>"],
        [f"{_BRIEF}{_HI}{_BOT}⟦<think>\n\n</think>\n\nHello.<|im_end|>⟧\n",
         f"{_BRIEF}{_HI}{_BOT}Hello.<|im_end|>\n{_ADD}{_BOT}⟦<think>\n2+2=4\n</think>\n\nIt is four.<|im_end|>⟧\n"],
        THINKING,
    ),
    Case(
        "qwen3 without thinking", QWEN3, _IM, ["<|im_end|>", "<|endoftext|>"],
        [f"{_BRIEF}{_HI}{_BOT}<think>\n\n</think>\n\n⟦Hello.<|im_end|>⟧\n",
         f"{_BRIEF}{_HI}{_BOT}Hello.<|im_end|>\n{_ADD}{_BOT}<think>\n\n</think>\n\n⟦It is four.<|im_end|>⟧\n"],
        TALK, options={"enable_thinking": False},
    ),
    Case(
        "gemma-3", GEMMA3, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], ["<eos>", "<end_of_turn>"],
        ["<bos><start_of_turn>user\nBe brief.\n\nHi there<end_of_turn>\n<start_of_turn>model\n⟦Hello.<end_of_turn>⟧\n"
         "<start_of_turn>user\nAdd 2 and 2<end_of_turn>\n<start_of_turn>model\n⟦It is four.<end_of_turn>⟧\n"],
    ),
    Case(
        "mistral v0.3", MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], ["</s>"],
        ["<s>[INST] Hi there[/INST]⟦ Hello.</s>⟧[INST] Add 2 and 2[/INST]⟦ It is four.</s>⟧"],
    ),
    Case(
        "mistral v0.3 tools", MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
        ["</s>"],
        [f"<s>[AVAILABLE_TOOLS] {_TOOLS_SHOWN}[/AVAILABLE_TOOLS][INST] Hi there[/INST]⟦ Hello.</s>⟧",
         f"<s>[INST] Hi there[/INST] Hello.</s>[AVAILABLE_TOOLS] {_TOOLS_SHOWN}[/AVAILABLE_TOOLS]"
         "[INST] Add 2 and 2[/INST]⟦ It is four.</s>⟧"],
        PLAIN, TOOLS,
    ),
    Case(
        "mistral-small", MISTRAL_SMALL, ["<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
        ["</s>"],
        ["<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi there[/INST]⟦Hello.</s>⟧[INST]Add 2 and 2[/INST]"
         "⟦It is four.</s>⟧"],
    ),
    Case(
        "phi-3", PHI3, ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        ["<|endoftext|>", "<|end|>"],
        ["<|system|>\nBe brief.<|end|>\n<|user|>\nHi there<|end|>\n<|assistant|>\n⟦Hello.<|end|>⟧\n"
         "<|user|>\nAdd 2 and 2<|end|>\n<|assistant|>\n⟦It is four.<|end|>⟧\n<|endoftext|>"],
    ),
    Case(
        "phi-4", PHI4, [*_IM, "<|im_sep|>"], ["<|im_end|>"],
        ["<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi there<|im_end|>"
         "<|im_start|>assistant<|im_sep|>⟦Hello.<|im_end|>⟧<|im_start|>user<|im_sep|>Add 2 and 2<|im_end|>"
         "<|im_start|>assistant<|im_sep|>⟦It is four.<|im_end|>⟧"],
    ),
    Case(
        "gpt-oss harmony", HARMONY, _HARMONY_TOKENS, ["<|return|>", "<|call|>"],
        [f"{_HARMONY_START}⟦{_HELLO}<|return|>⟧",
         f"{_HARMONY_START}{_HELLO}<|end|>{_HARMONY_ADD}⟦<|channel|>analysis<|message|>2+2=4<|end|>"
         "<|start|>assistant<|channel|>final<|message|>It is four.<|return|>⟧"],
        THINKING,
    ),
    Case(
        "deepseek", DEEPSEEK, ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        ["<｜end▁of▁sentence｜>"],
        ["<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi there<｜Assistant｜>⟦Hello.<｜end▁of▁sentence｜>⟧"
         "<｜User｜>Add 2 and 2<｜Assistant｜>⟦It is four.<｜end▁of▁sentence｜>⟧"],
    ),
    Case(
        "smollm3", SMOLLM3, _IM, ["<|im_end|>"],
        [f"{_BRIEF}{_HI}{_BOT}⟦Hello.<|im_end|>⟧\n{_ADD}{_BOT}⟦It is four.<|im_end|>⟧\n"],
    ),
    Case(
        "smollm3 without thinking", SMOLLM3, _IM, ["<|im_end|>"],
        [f"{_BRIEF}{_HI}{_BOT}<think>\n\n</think>\n⟦Hello.<|im_end|>⟧\n"
         f"{_ADD}{_BOT}<think>\n\n</think>\n⟦It is four.<|im_end|>⟧\n"],
        options={"enable_thinking": False},
    ),
    Case(
        "zephyr", ZEPHYR, ["<s>", "</s>"], ["</s>"],
        ["<|system|>\nBe brief.</s>\n<|user|>\nHi there</s>\n<|assistant|>\n⟦Hello.</s>⟧\n"
         "<|user|>\nAdd 2 and 2</s>\n<|assistant|>\n⟦It is four.</s>⟧\n"],
    ),
    Case(
        "chatml", CHATML, _IM, ["<|im_end|>"],
        [f"{_BRIEF}{_HI}{_BOT}⟦Hello.<|im_end|>⟧\n{_ADD}{_BOT}⟦It is four.<|im_end|>⟧\n"],
    ),
    Case(
        "command-r", COMMAND_R, ["<BOS_TOKEN>", *_COMMAND_R], ["<|END_OF_TURN_TOKEN|>"],
        ["<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
         "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi there<|END_OF_TURN_TOKEN|>"
         "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦Hello.<|END_OF_TURN_TOKEN|>⟧"
         "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Add 2 and 2<|END_OF_TURN_TOKEN|>"
         "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦It is four.<|END_OF_TURN_TOKEN|>⟧"],
    ),
]  # fmt: skip
