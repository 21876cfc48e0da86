"""The certificate: what was certified, with what, and whether a certificate belongs to a target and a draft at hand."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from selfspec import registry
from selfspec._version import __version__
from selfspec.checkpoint import ADAPTER_WEIGHTS, CONFIG, WEIGHTS, heads_folder
from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.fingerprint import fingerprint
from selfspec.provenance import file_hash
from selfspec.target import Target

FORMAT = 1


def target_record(target: Target) -> dict[str, Any]:
    """Name and fingerprint of the target."""
    name = str(target.config._name_or_path or target.model_type)
    dtype = str(target.dtype).removeprefix("torch.")
    return {"name": name, "fingerprint": fingerprint(target), "dtype": dtype, "device": str(target.device)}


def draft_record(given: str | Path | Draft, draft: Draft) -> dict[str, Any]:
    """Kind, configuration and, for heads in files, the SHA-256 of their config and weights."""
    files: dict[str, str] = {}
    if isinstance(given, (str, Path)) and not _is_method(given):
        folder = heads_folder(given)
        names = (CONFIG, WEIGHTS, ADAPTER_WEIGHTS)
        files = {name: file_hash(folder / name) for name in names if (folder / name).is_file()}
    config: Any = getattr(draft, "config", None)
    values = asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}
    name = str(given) if isinstance(given, (str, Path)) else type(draft).__name__
    return {"name": name, "kind": draft.kind, "config": values, "files": files}


def _is_method(given: str | Path) -> bool:
    return str(given) in registry.kinds() and not Path(given).is_dir()


def circumstances() -> dict[str, Any]:
    """Versions and machine."""
    return {
        "format": FORMAT,
        "versions": {
            "selfspec": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        },
    }


def read_certificate(path: str | Path) -> dict[str, Any]:
    """A certificate from its file.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a certificate: {error}") from error
    if not isinstance(record, dict) or not {"target", "draft", "parts", "passed"} <= record.keys():
        raise ConfigError(f"{path} is no certificate; give the file that `selfspec certify` wrote")
    if record.get("format") != FORMAT:
        raise ConfigError(f"{path} has format {record.get('format')}, this selfspec reads {FORMAT}; certify again")
    return record


def mismatches(record: dict[str, Any], target: Target, given: str | Path | Draft, draft: Draft) -> list[str]:
    """What in a certificate does not belong to this target and draft, or does not hold; empty when all is well."""
    found = []
    if not record["passed"]:
        found.append("the certificate says that the checks failed")
    print_now = fingerprint(target)
    if record["target"]["fingerprint"] != print_now:
        found.append(f"it is for a target with fingerprint {record['target']['fingerprint']}, this one has {print_now}")
    mine = draft_record(given, draft)
    for field in ("kind", "config", "files"):
        if _plain(record["draft"][field]) != _plain(mine[field]):
            found.append(f"its draft has other {field}: {_differing(record['draft'][field], mine[field])}")
    return found


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _differing(one: Any, other: Any) -> str:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return f"{one!r}, this one {other!r}"
    one, other = _plain(one), _plain(other)
    return ", ".join(sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)))
