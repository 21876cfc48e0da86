"""Exported heads in a real vLLM: the same text as ours and as no speculation, and nearly every guess accepted.

Loading proves nothing, because vLLM drops tensors it does not know without a word. Needs the Python of a vLLM
installation (docs/formats.md says how to make one): SELFSPEC_VLLM_PYTHON=/path/to/python pytest -m nightly
tests/test_formats_vllm.py
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from selfspec import registry
from selfspec.draft import Verified
from selfspec.head import DraftHead
from selfspec.heads.formats import export_head
from selfspec.inference.patch import patch, unpatch
from selfspec.target import Target

VLLM = os.environ.get("SELFSPEC_VLLM_PYTHON")
GUESSES = 3
MODULUS, STRIDES = 13, (1, 2, 5)
NEW = 60

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(VLLM is None, reason="SELFSPEC_VLLM_PYTHON names no Python that has vLLM"),
]


def language(batch: int, length: int, generator: torch.Generator | None = None) -> Tensor:
    """Counting in strides around a circle: the next token follows from the last two, never from the last alone."""
    start = torch.randint(MODULUS, (batch, 1), generator=generator)
    stride = torch.tensor(STRIDES)[torch.randint(len(STRIDES), (batch, 1), generator=generator)]
    return 5 + (start + stride * torch.arange(length)) % MODULUS


def fit(parameters: Any, step: Callable[[], Tensor], steps: int, rate: float) -> None:
    optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    for _ in range(steps):
        optimiser.zero_grad()
        step().backward()
        optimiser.step()
        schedule.step()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that has learned the language; the head size is one that vLLM's CPU attention has."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)

    def step() -> Tensor:
        ids = language(8, 76, generator)
        logits = model(ids[:, :-1]).logits
        loss: Tensor = torch.nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), ids[:, 2:].flatten())
        return loss

    fit(model.parameters(), step, 250, 4e-3)
    folder = tmp_path_factory.mktemp("base")
    model.eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(base: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return language(4, 12, torch.Generator().manual_seed(5)).tolist()


def trained(model: PreTrainedModel, kind: str, **options: Any) -> DraftHead:
    target = Target(model)
    method = registry.method(kind)
    head: DraftHead = method.from_target(method.config_class(**options), target, torch.Generator().manual_seed(0))
    if head.output.vocab.size < model.config.vocab_size:
        head.output.set_vocab(torch.arange(2, 2 + head.output.vocab.size))
    generator = torch.Generator().manual_seed(1)

    def step() -> Tensor:
        ids = language(8, 76, generator)
        read = target.features(ids[:, :-1], None, head.needs)
        verified = Verified(ids[:, :-1], ids[:, 1:], torch.full((8,), 75), read.hidden, read.layers)
        mask = torch.arange(75).expand(8, -1) > 2
        return head.loss(verified, mask).loss

    fit(head.parameters(), step, 600 if kind == "medusa" else 250, 5e-3)
    return head.eval()


def serve(base: Path, prompts: list[list[int]], speculative: dict[str, Any] | None, work: Path) -> dict[str, Any]:
    """What a vLLM engine writes and how much of its drafts it accepted."""
    case = {"target": str(base), "prompts": prompts, "max_tokens": NEW, "speculative": speculative}
    (work / "case.json").write_text(json.dumps(case))
    done = subprocess.run(
        [str(VLLM), str(Path(__file__).with_name("vllm_case.py")), str(work / "case.json")],
        env={
            **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        cwd=work,
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


@pytest.fixture(scope="module")
def plain(base: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The engine's text without speculation."""
    texts: list[list[int]] = serve(base, prompts, None, tmp_path_factory.mktemp("plain"))["texts"]
    return texts


CHAIN = [[0] * depth for depth in range(1, GUESSES + 1)]  # what the engine drafts
MEDUSA = {"num_heads": GUESSES, "num_layers": 2, "head_decay": 1.0, "choices": CHAIN}
GROWN = {"tree_nodes": GUESSES + 1, "tree_depth": GUESSES, "tree_top_k": 1}
EAGLE3 = {**GROWN, "fc_norm": False, "own_output": True, "target_layers": [1, 2, 3], "draft_vocab_size": 64}
CASES = [
    ("vllm-medusa", "medusa", {**MEDUSA, "output_per_head": True}),
    ("vllm-eagle", "eagle", {**GROWN, "input_norms": False, "layer_norm": False, "output_norm": False}),
    ("vllm-eagle3", "eagle3", EAGLE3),
    ("speculators", "eagle3", {**EAGLE3, "norm_before_residual": True, "norm_output": True, "fc_norm": True}),
    ("vllm-medusa", "medusa", MEDUSA),
]


IDS = ["medusa", "eagle", "eagle3", "speculators", "medusa-one-output"]


@pytest.mark.parametrize(("name", "kind", "options"), CASES, ids=IDS)
def test_exported_heads_are_served(
    name: str,
    kind: str,
    options: dict[str, Any],
    base: Path,
    model: PreTrainedModel,
    prompts: list[list[int]],
    plain: list[list[int]],
    tmp_path: Path,
) -> None:
    head = trained(model, kind, **options)
    patch(model, head)
    try:
        ours = model.generate(torch.tensor(prompts), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        report = model.speculation.report()
    finally:
        unpatch(model)
    share = report["accepted"] / (GUESSES * report["rounds"])
    assert share > 0.9, f"the head did not learn the language: {report}"
    export_head(head, tmp_path / "export", name)
    method = {"vllm-medusa": "medusa", "vllm-eagle": "eagle"}.get(name, "eagle3")
    speculative = {"method": method, "model": str(tmp_path / "export"), "num_speculative_tokens": GUESSES}
    served = serve(base, prompts, speculative, tmp_path)
    assert served["texts"] == plain == ours[:, len(prompts[0]) :].tolist()
    assert abs(served["accepted_tokens"] / served["draft_tokens"] - share) < 0.05, (served, report)
