"""Tiny random models of every decoder family in transformers, built in code, and the check that each must pass.

Letters: B rows, N tree nodes.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle, left_padded, patched, plain, random_trees
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from selfspec.draft import Needs
from selfspec.errors import UnsupportedModel
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape
from selfspec.walk import TorchChance

VOCAB = 97
WINDOW = 8
_MOST_PARAMETERS = 3_000_000

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_conv", "mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("ssm_state_size", "state_size", "mamba_d_state", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout"), 0.0),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "lru_width": 32,
    "mamba_d_ssm": 64,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "use_cache": True,
}
_LINEAR = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_MLA = {"num_key_value_heads": 4, "v_head_dim": 12}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu"), _MLA),
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "granitemoehybrid": {"layer_types": _LINEAR, "shared_intermediate_size": 32},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "falcon-alibi": {"alibi": True},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma3": {"vision_config": _VISION},
    "qwen2_5_vl": {"vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32}},
    "llava": {"vision_config": _VISION},
}
_MROPE = ("qwen2_5_vl",)
VARIANTS = {"falcon-alibi": "falcon"}
_AUTO: dict[str, Any] = {
    **dict.fromkeys(("gemma3", "qwen2_5_vl", "llava"), AutoModelForImageTextToText),
    "t5": AutoModelForSeq2SeqLM,
}


class TooLarge(Exception):
    """The generic sizes do not reach the parts that make this model large."""


def config_options(cls: type, special: dict[str, Any]) -> dict[str, Any]:
    """Small values for all fields of a configuration class that we know."""
    names = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    options = {name: value for name, value in _SIZES.items() if name in names}
    inner = getattr(cls, "sub_configs", {}).get("text_config")
    if inspect.isclass(inner):
        inner = CONFIG_MAPPING["llama"] if inner is AutoConfig else inner
        options["text_config"] = {"model_type": inner.model_type, **config_options(inner, {})}
    if cls.model_type in _MROPE:
        options["text_config"]["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [1, 1, 2],
        }
    return {**options, **special}


def build(kind: str, attention: str | None = None, seed: int = 0, **special: Any) -> PreTrainedModel:
    """A random model of one `model_type`, float32, in evaluation mode.

    Raises:
        TooLarge: the known fields do not make it small.
    """
    cls = CONFIG_MAPPING[VARIANTS.get(kind, kind)]
    auto = _AUTO.get(kind, AutoModelForCausalLM)
    options = config_options(cls, {**_SPECIAL.get(kind, {}), **special})

    def make() -> PreTrainedModel:
        return auto.from_config(cls(**options), attn_implementation=attention, dtype=torch.float32)

    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            size = make().num_parameters()
        if size > _MOST_PARAMETERS:
            raise TooLarge(f"{size} parameters")
        torch.manual_seed(seed)
        model = make().eval().requires_grad_(False)
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return model


def tree_error(model: PreTrainedModel, rows: int = 2, rounds: int = 4, seed: int = 0, target: Any = None) -> float:
    """The largest difference between logits of tree passes and of fresh forward passes over every path.

    Between the rounds a random path is accepted, so that roll-back, moves and states are part of it. Relative to the
    largest logit. Chain-only targets get chains of one row.
    """
    target = Target(model) if target is None else target
    rows = 1 if target.chain_only else rows
    chance = random.Random(seed)
    texts = [[chance.randrange(3, VOCAB) for _ in range(12 - 5 * row)] for row in range(rows)]
    cache = target.new_cache(rows, 64)
    longest = max(map(len, texts))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    worst, scale = 0.0, 0.0
    with torch.no_grad():
        target.prefill(padded, [len(text) for text in texts], cache, Needs())
        for _ in range(rounds):
            tree = _random_tree(chance, rows, 7)
            tree = tree.trunk() if target.chain_only else tree
            logits = target.verify(tree, cache, Needs()).logits
            for row in range(rows):
                for path in tree.shape.paths(row):
                    ids = torch.tensor([texts[row] + [tree.token_lists[row][node] for node in path]])
                    wanted = model(input_ids=ids, use_cache=False).logits[0, -len(path) :]
                    worst = max(worst, float((wanted - logits[row, path]).abs().max()))
                    scale = max(scale, float(wanted.abs().max()))
            kept = [_some_path(chance, tree, row) for row in range(rows)]
            for row, path in enumerate(kept):
                texts[row] += [tree.token_lists[row][node] for node in path]
            cache.keep(kept)
    target.release()
    return worst / scale


def _random_tree(chance: random.Random, rows: int, nodes: int) -> DraftTree:
    parents = [[-1] + [chance.randrange(max(0, i - 2), i) for i in range(1, nodes)] for _ in range(rows)]
    tokens = [[chance.randrange(3, VOCAB) for _ in range(nodes)] for _ in range(rows)]
    return DraftTree(torch.tensor(tokens), TreeShape(torch.tensor(parents)))


def _some_path(chance: random.Random, tree: DraftTree, row: int) -> list[int]:
    path = chance.choice(tree.shape.paths(row))
    return path[: chance.randint(1, len(path))]


# The table in docs/models.md

TABLE: dict[str, str] = {
    "llama": "Llama",
    "llama4_text": "Llama 4 (chunked attention)",
    "mistral": "Mistral (window)",
    "ministral": "Ministral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma3n_text": "Gemma 3n (shared keys)",
    "gemma4_text": "Gemma 4",
    "phi": "Phi",
    "phi3": "Phi-3",
    "phimoe": "Phi-MoE",
    "gpt2": "GPT-2",
    "gpt_bigcode": "GPT-BigCode",
    "gpt_neox": "GPT-NeoX",
    "gptj": "GPT-J",
    "gpt_oss": "gpt-oss (sinks)",
    "codegen": "CodeGen",
    "opt": "OPT",
    "xglm": "XGLM",
    "biogpt": "BioGPT",
    "falcon": "Falcon (rotary)",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder2",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "smollm3": "SmolLM3",
    "granite": "Granite",
    "granitemoe": "Granite-MoE",
    "cohere": "Cohere",
    "cohere2": "Cohere 2",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4-MoE",
    "ernie4_5": "ERNIE 4.5",
    "exaone4": "EXAONE 4",
    "minicpm3": "MiniCPM3 (MLA)",
    "deepseek_v2": "DeepSeek-V2 (MLA)",
    "deepseek_v3": "DeepSeek-V3 (MLA)",
    "hunyuan_v1_dense": "Hunyuan",
    "nemotron": "Nemotron",
    "seed_oss": "Seed-OSS",
    "gemma3": "Gemma 3 with vision, text alone",
    "qwen2_5_vl": "Qwen2.5-VL, text alone",
    "llava": "LLaVA, text alone",
    "bloom": "BLOOM (ALiBi)",
    "mpt": "MPT (ALiBi)",
    "falcon-alibi": "Falcon (ALiBi)",
    "gpt_neo": "GPT-Neo (local attention)",
    "bart": "BART decoder",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5",
    "mamba2": "Mamba-2",
    "bamba": "Bamba",
    "falcon_h1": "Falcon-H1",
    "granitemoehybrid": "Granite 4 hybrid",
    "nemotron_h": "Nemotron-H",
    "zamba2": "Zamba2",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "olmo_hybrid": "OLMo hybrid",
    "mamba": "Mamba",
    "jamba": "Jamba",
    "falcon_mamba": "Falcon-Mamba",
    "recurrent_gemma": "RecurrentGemma",
    "deepseek_v32": "DeepSeek-V3.2 (indexed keys)",
    "openai-gpt": "GPT",
    "t5": "T5",
}

COLUMNS = ("guesses", "logits", "eager", "sdpa", "past the window", "greedy", "batch of 4", "sampled")
EXACT = 2e-5
_BEGIN, _END = "<!-- table: python tests/families.py -->", "<!-- end of table -->"
_NEW = 24


def row(kind: str) -> dict[str, str]:
    """One row of the table, measured: COLUMNS to cells, or the single cell "refused" with the reason."""
    model = build(kind)
    try:
        target = Target(model)
    except UnsupportedModel as refusal:
        return {"refused": str(refusal)}
    windowed = any(isinstance(window, int) for window in target.windows)
    errors = {name: _error_under(kind, name) for name in ("eager", "sdpa")}
    measured = [error for error in errors.values() if error is not None]
    cells = {
        "guesses": "chain" if target.chain_only else "tree",
        "logits": f"{max(measured):.0e}",
        **{name: "–" if error is None else _yes(error < EXACT) for name, error in errors.items()},
        "past the window": _yes(max(measured) < EXACT) if windowed else "–",
        "greedy": _yes(same_text(model)),
        "batch of 4": "plain" if target.chain_only else _yes(same_text(model, rows=4)),
        "sampled": _yes(same_text(model, do_sample=True)),
    }
    target.release()
    return cells


def cells(kind: str, measured: dict[str, str]) -> list[str]:
    """One row of the documented table: the family, its `model_type`, then COLUMNS or the reason of a refusal."""
    if "refused" in measured:
        return [TABLE[kind], f"`{kind}`", "refused", measured["refused"], *[""] * (len(COLUMNS) - 2)]
    return [TABLE[kind], f"`{kind}`", *measured.values()]


def _yes(passed: bool) -> str:
    return "exact" if passed else "**wrong**"


def _error_under(kind: str, attention: str) -> float | None:
    try:
        model = build(kind, attention)
    except ValueError:  # transformers has no such attention for this model
        return None
    return tree_error(model)


def same_text(model: PreTrainedModel, rows: int = 1, do_sample: bool = False) -> bool:
    """Whether `generate` writes the same with guesses, half of them right, as without; same seed when sampled.

    Nodes are chosen without chance, so one number is drawn per token in both ways and the texts can be compared.
    """
    chance = random.Random(5)
    prompts = [[chance.randrange(3, VOCAB) for _ in range(12 - 3 * row)] for row in range(rows)]
    ids, mask = left_padded(prompts)
    options = {
        "attention_mask": mask,
        "max_new_tokens": _NEW,
        "do_sample": do_sample,
        "top_k": 20 if do_sample else None,
    }
    torch.manual_seed(7)
    wanted = plain(model, ids, **options)
    references = [prompt + text[ids.shape[1] :].tolist() for prompt, text in zip(prompts, wanted, strict=True)]
    torch.manual_seed(7)
    with patched(model, Oracle(references, random_trees(3, 6, 0.7)), self_check=False), _drawing_as_transformers():
        found = model.generate(ids, **options)
        assert model.speculation.last.rounds < _NEW * rows, "no guess was ever accepted"
    return torch.equal(found, wanted)


@contextmanager
def _drawing_as_transformers() -> Iterator[None]:
    """Tokens are drawn with `torch.multinomial`, so that one seed means one text here and there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchChance, "token", lambda self, probs: torch.multinomial(probs, 1).squeeze(1))
        yield


def document(path: Path) -> None:
    """Measure all rows and write them into the page, between its markers."""
    lines = ["| family | `model_type` | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    lines += ["| " + " | ".join(cells(kind, row(kind))) + " |" for kind in TABLE]
    before, rest = path.read_text(encoding="utf-8").split(_BEGIN)
    after = rest.split(_END)[1]
    path.write_text(f"{before}{_BEGIN}\n" + "\n".join(lines) + f"\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    document(Path(__file__).parent.parent / "docs" / "models.md")
