"""Draft heads on disk: `config.json` and `model.safetensors`, written whole or not at all, loaded strictly."""

from __future__ import annotations

import difflib
import json
import math
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec import registry
from selfspec._version import __version__
from selfspec.allocation import AllocationLimit, TooLarge
from selfspec.draft import Draft
from selfspec.errors import CheckpointError, ConfigError
from selfspec.fingerprint import fingerprint, matches
from selfspec.head import DraftConfig, DraftHead, HeadConfig
from selfspec.outputs import whole_file
from selfspec.target import Target
from selfspec.wrapped import UNPACKED, quantisation

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_MOST_CONFIG, _MOST_JSON = 16 << 20, 64 << 20
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADAPTER = "peft."
"""Tensors of a PEFT adapter that a head owns; they are written under PEFT's own names, in PEFT's own files."""


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to write into; its files become those of `folder` when the block succeeds.

    It lies inside `folder`, which may be a mount of its own: beside it there may be another disk, or no right to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    try:
        yield draft
        mode = _usual_mode(draft)
        for path in sorted(draft.iterdir(), key=lambda p: p.name == CONFIG):
            path.chmod(mode)
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _usual_mode(folder: Path) -> int:
    """The mode that files get here by default; safetensors and temporary files are private to their owner."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    return mode


def write_json(path: Path, values: Any) -> None:
    """Write JSON under a temporary name, then rename."""
    with whole_file(path) as work:
        work.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def json_object(path: Path, remedy: str, most: int = _MOST_JSON) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        CheckpointError: it is longer than `most` bytes, no JSON, or another value; the message ends with the remedy.
    """
    if path.stat().st_size > most:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, wanted at most {most}; {remedy}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, wanted a JSON object; {remedy}")
    return values


def save_head(head: DraftHead, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Save a head's own weights and its config.

    Args:
        head: any trainable draft.
        folder: created if needed; files in it are replaced only once the new ones are complete.
        dtype: cast floating-point weights first (for instance bfloat16 to halve the file).
    """
    _name_base(head.config, head.target)
    tensors = head.owned_state()
    if dtype is not None:
        tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}
    return write_files(Path(folder), head.config, tensors, head.peft_config())


def save_draft(draft: Any, folder: str | Path) -> Path:
    """Save a draft that has settings for its base model but no weights (as tuned layer skipping): `config.json` alone.

    Args:
        draft: with a `config` of its method and the `target` it is made for.
        folder: as for `save_head`.
    """
    _name_base(draft.config, draft.target)
    folder = Path(folder)
    with replacing(folder) as work:
        write_json(work / CONFIG, draft.config.to_dict())
    return folder


def _name_base(config: DraftConfig, target: Target) -> None:
    config.base_fingerprint = config.base_fingerprint or fingerprint(target)
    config.base_quantization = config.base_quantization or quantisation(target.model)
    if not config.base_model:
        base = target.model.config
        config.base_model, config.base_revision = str(base._name_or_path), getattr(base, "_commit_hash", None)


def write_files(
    folder: Path, config: HeadConfig, tensors: dict[str, Tensor], adapter: dict[str, Any] | None = None
) -> Path:
    """Write a heads folder from its parts: tensors by the names of the head's state dict, contiguous, on the CPU.

    `adapter` is the configuration of the PEFT adapter that the tensors under `peft.` make; the folder is then one of
    PEFT's, too.
    """
    files = {WEIGHTS: {k: v for k, v in tensors.items() if not k.startswith(_ADAPTER)}}
    if adapter is not None:
        files[ADAPTER_WEIGHTS] = {k.removeprefix(_ADAPTER): v for k, v in tensors.items() if k.startswith(_ADAPTER)}
    with replacing(folder) as draft:
        for name, part in files.items():
            save_file(part, str(draft / name), metadata={"format": "pt", "selfspec": __version__})
        if adapter is not None:
            write_json(draft / ADAPTER_CONFIG, adapter)
        write_json(draft / CONFIG, config.to_dict())
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a heads folder."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {CONFIG}; give a folder written by `selfspec train`")
    values = json_object(path, "restore it from a backup or train again", _MOST_CONFIG)
    if not isinstance(values.get("kind"), str):
        raise CheckpointError(
            f"{path} names no `kind`, so it is not a selfspec head; a checkpoint of another project becomes one with: "
            f"selfspec import {folder} NEW_FOLDER --target BASE_MODEL"
        )
    return values


def load_head(name_or_path: str | Path, target: Target, **options: Any) -> DraftHead:
    """Load heads with weights; arguments and errors are those of `load_draft`.

    Raises:
        CheckpointError: the folder holds a draft without weights.
    """
    head = load_draft(name_or_path, target, **options)
    if not isinstance(head, DraftHead):
        raise CheckpointError(f"{name_or_path} holds a {head.kind} draft, which has no weights; use load_draft")
    return head


def load_draft(
    name_or_path: str | Path,
    target: Target,
    *,
    revision: str | None = None,
    token: str | None = None,
    dtype: torch.dtype | None = None,
    check_base: bool = True,
) -> Draft:
    """Load heads, or a draft saved by `save_draft`, from a folder or the Hub onto a target.

    Args:
        name_or_path: folder, or repository id on the Hub.
        target: the base model they were made for.
        revision: commit, branch or tag of a Hub repository.
        token: Hub token for private repositories.
        dtype: of the loaded weights; the target's by default.
        check_base: compare the fingerprint of the target with the saved one.

    Raises:
        CheckpointError: damaged file, missing or unexpected tensors, or heads of another base model.
    """
    folder = heads_folder(name_or_path, revision, token)
    values = read_config(folder)
    try:
        cls = registry.method(values["kind"])
        if not issubclass(cls.config_class, DraftConfig):
            raise ConfigError(f"{values['kind']!r} has no weights; use it by its name")
        config = cls.config_class.from_dict(values)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error
    if check_base and config.base_fingerprint and not matches(config.base_fingerprint, found := fingerprint(target)):
        raise CheckpointError(
            f"{folder} was trained on {config.base_model!r} (fingerprint {config.base_fingerprint}), the model at hand "
            f"has {found}; load that base model, or train heads for this one"
        )
    if check_base:
        _warn_of_other_packing(folder, config, target)
    if not issubclass(cls, DraftHead):
        made: Draft = cls.from_target(config, target)
        return made
    head = _built(cls, config, target, folder)
    fill(head, folder)
    head.to(device=target.device, dtype=dtype or target.dtype)
    return head.eval()


def _warn_of_other_packing(folder: Path, config: DraftConfig, target: Target) -> None:
    """Heads read hidden states, and those of packed weights are others; the text stays that of the target."""
    trained, here = config.base_quantization, quantisation(target.model)
    if trained is None and config.base_fingerprint.startswith("weights:") and fingerprint(target).startswith("config:"):
        trained = UNPACKED  # written by an earlier version; an output head in plain numbers says so too
    if trained is not None and trained != here:
        warnings.warn(
            f"selfspec: {folder} was trained on {config.base_model!r} with quantisation {trained}, the model at hand "
            f"has {here}; fewer guesses may be accepted, the text stays exact. Train on the model as it is used",
            UserWarning,
            stacklevel=3,
        )


def heads_folder(
    name_or_path: str | Path,
    revision: str | None = None,
    token: str | None = None,
    files: Sequence[str] = (CONFIG, WEIGHTS, ADAPTER_CONFIG, ADAPTER_WEIGHTS),
) -> Path:
    """The local folder of heads given by folder or Hub id (files of these names or patterns are fetched if need be).

    Raises:
        CheckpointError: neither a folder nor a repository that can be reached.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.exists() or str(name_or_path).count("/") > 1 or str(name_or_path).startswith((".", "~", "/")):
        raise CheckpointError(f"{name_or_path} is not a folder of draft heads")
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name_or_path), revision=revision, token=token, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, LocalEntryNotFoundError):  # offline: what loading fetched is there, other records are not
            cached = try_to_load_from_cache(str(name_or_path), CONFIG, revision=revision)
            if isinstance(cached, str):
                return Path(cached).parent
        near = difflib.get_close_matches(str(name_or_path), registry.kinds(), 1)
        hint = f"did you mean the method {near[0]!r}?" if near else "check the path"
        raise CheckpointError(
            f"{name_or_path!r} is neither a folder here nor a repository that could be fetched from the Hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); {hint}"
        ) from error


def _built(cls: type[DraftHead], config: HeadConfig, target: Target, folder: Path) -> DraftHead:
    """The head of a config, which may not allocate much more than the weights' files and the target's output head."""
    weights, adapter = folder / WEIGHTS, folder / ADAPTER_WEIGHTS
    files = [weights, adapter] if adapter.is_file() else [weights]
    stored = sum(math.prod(shape) for file in files for shape in tensor_shapes(file).values())
    limit = 4 * stored + 8 * target.vocab_size * target.hidden_size + (1 << 22)
    try:
        with AllocationLimit(limit):
            return cls(config, target)
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error
    except (TooLarge, OverflowError, TypeError, ZeroDivisionError) as error:
        reason = "asks for far more weights than that" if isinstance(error, TooLarge) else f"cannot be built ({error})"
        raise CheckpointError(
            f"{weights} holds {stored} numbers, its {CONFIG} {reason}; the two do not belong together"
        ) from error


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a safetensors file, from its header, which must fit the file's size.

    Raises:
        CheckpointError: it is missing, damaged or cut off.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the heads' weights belong there")
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut off ({error}); copy or download it again") from error


def fill(head: DraftHead, folder: Path) -> None:
    """Give a head the weights of a folder.

    Raises:
        CheckpointError: a damaged file, or tensors that are not those of the head.
    """
    wanted = head.state_dict()
    own = {name: value for name, value in wanted.items() if not name.startswith(_ADAPTER)}
    loaded = _read(folder / WEIGHTS, own)
    if len(own) < len(wanted):
        adapter = {k.removeprefix(_ADAPTER): v for k, v in wanted.items() if k.startswith(_ADAPTER)}
        loaded |= {_ADAPTER + name: value for name, value in _read(folder / ADAPTER_WEIGHTS, adapter).items()}
    head.load_state_dict(loaded, strict=True)
    try:
        head.output.vocab.set_ids(head.output.vocab.ids)
    except ConfigError as error:
        raise CheckpointError(f"{folder / WEIGHTS}: {error}; copy or download it again") from error
    head.after_load()


def _read(path: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the heads' weights belong there")
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            _compare(path, names, set(wanted))
            loaded = {}
            for name in names:
                shape = tuple(file.get_slice(name).get_shape())
                if shape != tuple(wanted[name].shape):
                    raise CheckpointError(f"{path}: {name} is {shape}, the config asks for {tuple(wanted[name].shape)}")
                loaded[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut off ({error}); copy or download it again") from error
    return loaded


def _compare(path: Path, found: set[str], wanted: set[str]) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{path} does not fit its config: missing {sorted(wanted - found)}, unexpected {sorted(found - wanted)}"
        )
