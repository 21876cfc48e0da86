"""Vectors made by other projects' own code; they lie beside the repository and are not part of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from selfspec.target import Target

ROOT = Path(__file__).resolve().parents[2] / "shared" / "golden"


def folder(name: str) -> Path:
    """The vectors of one peer, or skip the test."""
    path = ROOT / name
    if not path.is_dir():
        pytest.skip(f"no golden vectors at {path}")
    return path


def target(name: str) -> Target:
    """The target the vectors were made with, float32."""
    return Target(AutoModelForCausalLM.from_pretrained(folder(name) / "target", dtype=torch.float32).eval())


def weights(path: Path) -> dict[str, Tensor]:
    """A peer's pickled state dict, tensors only."""
    return torch.load(path, weights_only=True)


def tensors(name: str) -> dict[str, Tensor]:
    """The recorded inputs and outputs."""
    return load_file(folder(name) / "golden.safetensors")


def notes(name: str) -> dict[str, Any]:
    """What was run, with ids and lists."""
    return json.loads((folder(name) / "golden.json").read_text())
