"""The examples of docs/generate.md and docs/own-drafts.md run, and the table names every argument it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
from transformers import GenerationConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Arguments of a generation configuration that choose no way of decoding.
NO_WAY_OF_DECODING = {
    "assistant_confidence_threshold",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "diversity_penalty",
    "disable_compile",
    "early_stopping",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "pad_token_id",
    "remove_invalid_values",
    "speculation_type",
    "target_lookbehind",
    "token_healing",
    "transformers_version",
}
ALIASES = {
    "encoder_no_repeat_ngram_size": "encoder_*",
    "encoder_repetition_penalty": "encoder_*",
    "forced_bos_token_id": "forced tokens",
    "forced_eos_token_id": "forced tokens",
    "begin_suppress_tokens": "suppress_tokens",
}


@pytest.mark.parametrize("name", ["generate.md", "own-drafts.md"])
def test_the_examples_run_as_written(name: str, tmp_path: Path) -> None:
    tiny.model("llama").save_pretrained(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), {"folder": str(tmp_path)})


def test_every_argument_of_a_generation_configuration_has_its_row() -> None:
    text = (DOCS / "generate.md").read_text()
    names = {name for name in GenerationConfig().to_dict() if not name.startswith("_")} - NO_WAY_OF_DECODING
    missing = [name for name in sorted(names) if ALIASES.get(name, f"`{name}") not in text]
    assert not missing, missing
