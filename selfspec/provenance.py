"""Where an artifact comes from: command, versions, commit, hardware, seeds, data; and no secrets in any of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from selfspec._version import __version__

FORMAT = 1
HIDDEN = "[redacted]"
PROVENANCE = "provenance.json"
_PACKAGES = ("torch", "transformers", "safetensors", "huggingface_hub", "accelerate", "datasets")
_SECRET_NAMES = r"(?:token|api[-_]?key|secret|password|passwd|credential|authorization)"
_SECRET_KEY = re.compile(rf"(?:^|[-_.]){_SECRET_NAMES}s?$", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"((?:^|[-_.\s&?])(?P<name>(?:[\w-]*[-_.])?{_SECRET_NAMES})\s*[=:]\s*)(?!\[|Bearer)\S+", re.IGNORECASE
)
_SHAPES = [
    re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{3,}\b"),
    re.compile(r"(?<=Bearer )[^\s\"']+", re.IGNORECASE),
    re.compile(r"(?<=://)[^/@\s]+(?=@)"),
]
# Counts and ids of tokens of text have names that end alike.
_NOT_SECRET = re.compile(
    r"(?:pad|eos|bos|unk|mask|sep|cls|image|max|min|num|new|total)[-_](?:new[-_])?token", re.IGNORECASE
)


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Text without tokens, keys, passwords and the name of the home folder.

    Args:
        text: any.
        environment: variables whose names end in TOKEN, KEY, SECRET or PASSWORD hold secrets; so may others, which
            are known by their form (`hf_...`, `Bearer ...`, `user:password@host`, `token=...`).
    """
    for name, value in environment.items():
        if len(value) >= 6 and re.search(r"(TOKEN|KEY|SECRET|PASSWORD)$", name.upper()):
            text = text.replace(value, HIDDEN)
    for shape in _SHAPES:
        text = shape.sub(HIDDEN, text)
    text = _ASSIGNED.sub(lambda found: found[0] if _NOT_SECRET.search(found["name"]) else found[1] + HIDDEN, text)
    home = environment.get("HOME", "")
    return re.sub(rf"{re.escape(home)}(?=/|$)", "~", text) if len(home) > 1 else text


def redact_command(command: Sequence[str]) -> list[str]:
    """The words of a command line; what follows `--token` and its like is hidden."""
    shown: list[str] = []
    hide = False
    for word in command:
        shown.append(HIDDEN if hide and not word.startswith("-") else redact(word))
        hide = word.startswith("-") and "=" not in word and _is_secret(word.lstrip("-"))
    return shown


def redacted(value: Any, name: str = "") -> Any:
    """JSON values with every string redacted, and what stands under the name of a secret hidden."""
    if isinstance(value, Mapping):
        return {key: redacted(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        words = [word for word in value if isinstance(word, str)]
        if len(words) == len(value) and name in ("argv", "command"):
            return redact_command(words)
        return [redacted(inner, name) for inner in value]
    if isinstance(value, str):
        return HIDDEN if value and _is_secret(name) else redact(value)
    return value


def _is_secret(name: str) -> bool:
    return bool(_SECRET_KEY.search(name)) and not _NOT_SECRET.search(name)


def provenance(
    command: Sequence[str], seeds: Mapping[str, int], data: Mapping[str, Any], device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """What `provenance.json` holds.

    Args:
        command: what was typed.
        seeds: by what they are for.
        data: by name: hashes and sizes of the training text.
        device: that the work was done on.
    """
    record = {
        "format": FORMAT,
        "command": redact_command(command),
        "versions": versions(),
        "commit": commit(),
        "hardware": hardware(torch.device(device)),
        "seeds": dict(seeds),
        "data": dict(data),
    }
    found: dict[str, Any] = redacted(record)
    return found


def from_training(training: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of heads that come with `training.json` only: what it does not hold is None, not guessed."""
    recipe = training.get("recipe", {})
    record = {
        "format": FORMAT,
        "command": redact_command(list(map(str, training.get("argv", [])))),
        "versions": training.get("versions", {}),
        "commit": None,
        "hardware": {"device": training.get("device"), "threads": training.get("threads")},
        "seeds": seeds_of(recipe),
        "data": training.get("data", {}),
    }
    found: dict[str, Any] = redacted(record)
    return found


def seeds_of(recipe: Mapping[str, Any]) -> dict[str, int]:
    """The seeds that a recipe names."""
    seeds = {"training": recipe.get("optimisation", {}).get("seed")}
    seeds |= {f"data.{place}": source.get("seed") for place, source in enumerate(recipe.get("data", []))}
    return {name: seed for name, seed in seeds.items() if seed is not None}


def versions() -> dict[str, str]:
    """Of this package, of those it stands on, and of Python."""
    found = {"selfspec": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str | None:
    """The commit of this package's source, marked `-dirty` if files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists():
        return None
    try:
        found = _git(folder, "rev-parse", "HEAD")
        return found + ("-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine: no host name, no user name."""
    found: dict[str, Any] = {
        "device": str(device),
        "platform": platform.system() + " " + platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
        found["accelerator_bytes"] = torch.cuda.get_device_properties(device).total_memory
    return found


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """The name of the accelerator, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def file_hash(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
