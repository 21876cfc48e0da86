"""Run by the Python of a vLLM installation, not by ours: one engine, a few prompts, its own acceptance metrics.

Usage: python vllm_case.py CASE.json; CASE has `target`, `prompts` (token ids), `max_tokens`, and `speculative` (vLLM's
speculative_config) or null. Prints one JSON line: the new tokens of each prompt, how many were drafted and accepted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    case = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(
        model=case["target"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        disable_log_stats=False,
        speculative_config=case["speculative"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=case["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in case["prompts"]], sampling)
    counts = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    for metric in engine.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name in counts:
            counts[name] += metric.value
    print("RESULT " + json.dumps({"texts": [list(o.outputs[0].token_ids) for o in outputs], **counts}), flush=True)


if __name__ == "__main__":
    main()
