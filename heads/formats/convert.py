"""Import, export and description of folders of heads, whatever their format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from selfspec._version import __version__
from selfspec.checkpoint import CONFIG, heads_folder, replacing, write_files, write_json
from selfspec.errors import CheckpointError, ConfigError
from selfspec.fingerprint import fingerprint, matches
from selfspec.head import DraftHead, HeadConfig
from selfspec.heads.formats.base import SETTINGS, Converted, Format, Written, detect, format_named, formats
from selfspec.heads.formats.source import PICKLES, Note, Source
from selfspec.registry import method
from selfspec.target import Target

FILES = ("*.json", "*.safetensors", *(f"*{suffix}" for suffix in PICKLES))
"""What is fetched of a repository on the Hub."""


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    Args:
        format: the other project's format.
        kind: draft method.
        parameters: of the head.
        notes: what was left out or assumed.
    """

    format: str
    kind: str
    parameters: int
    notes: list[Note]

    def __str__(self) -> str:
        lines = [f"{self.kind} heads, format {self.format}, {self.parameters:,} parameters"]
        return "\n".join(lines + [f"  {note}" for note in self.notes])


def import_head(
    source: str | Path,
    target: Target,
    *,
    format: str | None = None,
    lossy: bool = False,
    dtype: torch.dtype | None = None,
    check_base: bool = True,
    revision: str | None = None,
    token: str | None = None,
) -> tuple[DraftHead, Report]:
    """Load another project's checkpoint as a head on a target.

    Args:
        source: folder or Hub id.
        target: the base model the heads were trained on.
        format: by name; looked for if left out.
        lossy: go on where drafts differ from what the checkpoint describes.
        dtype: of the loaded weights; the target's by default.
        check_base: compare the target with the fingerprint, if the folder holds one.
        revision: commit, branch or tag of a Hub repository.
        token: Hub token for private repositories.

    Raises:
        CheckpointError: unknown or damaged format, another base model, something left out that makes a difference.
    """
    folder = heads_folder(source, revision, token, FILES)
    converted, report = _read(folder, target, format, lossy)
    head = _build(folder, converted, target, check_base)
    return head.to(device=target.device, dtype=dtype or target.dtype).eval(), report


def import_folder(
    source: str | Path,
    out: str | Path,
    target: Target | None = None,
    *,
    format: str | None = None,
    lossy: bool = False,
    base_model: str = "",
    revision: str | None = None,
    token: str | None = None,
) -> Report:
    """Convert another project's checkpoint into a folder that `selfspec.patch` takes; weights keep their dtype.

    Args:
        source: folder or Hub id.
        out: folder to write.
        target: base model; with it sizes are checked, copies of its tensors are compared, and its fingerprint is
            written.
        format: by name; looked for if left out.
        lossy: go on where drafts differ from what the checkpoint describes.
        base_model: name to write where the checkpoint names none.
        revision: commit, branch or tag of a Hub repository.
        token: Hub token for private repositories.

    Raises:
        CheckpointError: as `import_head`.
    """
    folder = heads_folder(source, revision, token, FILES)
    if Path(out).exists() and Path(out).resolve() == folder.resolve():
        raise CheckpointError(f"{out} is the folder that is imported; choose another one to write")
    converted, report = _read(folder, target, format, lossy)
    config = converted.config
    if target is not None:
        config = _build(folder, converted, target, True).config
        config.base_fingerprint = fingerprint(target)
        config.base_model = config.base_model or str(target.model.config._name_or_path)
    config.base_model = config.base_model or base_model
    tensors = {name: value.contiguous().clone() for name, value in converted.tensors.items()}
    write_files(Path(out), config, tensors)
    return report


def _read(folder: Path, target: Target | None, name: str | None, lossy: bool) -> tuple[Converted, Report]:
    source = Source.open(folder)
    if isinstance(source.config.values.get("kind"), str):
        raise CheckpointError(f"{folder} is a selfspec head already; use it as it is")
    known = detect(source) if name is None else format_named(name)
    if target is not None and SETTINGS in source.config:
        stored = source.config.inner(SETTINGS).take("base_fingerprint", str, "")
        if stored and not matches(stored, found := fingerprint(target)):
            raise CheckpointError(f"{folder} was trained on a model with fingerprint {stored}, this one has {found}")
    try:
        converted = known.read(source, target)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    notes = source.close()
    _permit(notes, lossy, f"{folder} cannot become a head here without a difference")
    parameters = sum(value.numel() for value in converted.tensors.values() if value.is_floating_point())
    return converted, Report(known.name, converted.config.kind, parameters, notes)


def _permit(notes: list[Note], lossy: bool, what: str) -> None:
    fatal = [note for note in notes if note.effect == "fatal"]
    if fatal:
        raise CheckpointError(f"{what}: {'; '.join(map(str, fatal))}")
    lost = [note for note in notes if note.effect == "lossy"]
    if lost and not lossy:
        raise CheckpointError(f"{what}: {'; '.join(map(str, lost))}. Allow it with --lossy (lossy=True)")


def _build(folder: Path, converted: Converted, target: Target, check_base: bool) -> DraftHead:
    """The head itself: sizes are checked against the target's, names and shapes against the method's own."""
    config = converted.config
    if not check_base:
        config.base_fingerprint = ""
    try:
        head: DraftHead = method(config.kind)(config, target)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    wanted = {name: list(value.shape) for name, value in head.state_dict().items()}
    found = {name: list(value.shape) for name, value in converted.tensors.items()}
    if wanted != found:
        wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        told = ", ".join(f"{name} {found.get(name, 'missing')} for {wanted.get(name, 'nothing')}" for name in wrong[:4])
        raise CheckpointError(f"{folder} does not make a {config.kind} head of this target: {told}")
    head.load_state_dict(converted.tensors, strict=True)
    try:
        head.output.vocab.set_ids(head.output.vocab.ids)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    head.after_load()
    return head


def export_head(
    head: DraftHead, out: str | Path, format: str, *, lossy: bool = False, dtype: torch.dtype | None = None
) -> Report:
    """Write a head as another project's folder.

    Args:
        head: a trained head on its target.
        out: folder to write.
        format: name of the format, see `formats`.
        lossy: go on where the format has no place for something that makes a difference.
        dtype: of the floating-point weights; as they are by default.

    Raises:
        CheckpointError: the format cannot hold this head; the message says what is in the way.
    """
    known = format_named(format)
    config = head.config
    fits(known, config)
    notes = known.obstacles(config)
    _permit(notes, lossy, f"format {format} cannot hold this head without a difference")
    config.base_fingerprint = config.base_fingerprint or fingerprint(head.target)
    config.base_model = config.base_model or str(head.target.model.config._name_or_path)
    written = known.write(head)
    tensors = {name: _portable(value, dtype) for name, value in written.tensors.items()}
    if dtype is not None and "torch_dtype" in written.config:
        written.config["torch_dtype"] = str(dtype).removeprefix("torch.")
    _save(Path(out), written, tensors)
    parameters = sum(value.numel() for value in tensors.values() if value.is_floating_point())
    return Report(format, config.kind, parameters, notes)


def fits(known: Format, config: HeadConfig) -> None:
    """Raise unless a format is written and holds this method."""
    if not known.writes:
        raise CheckpointError(f"{known.name} is read only")
    if config.kind not in known.kinds:
        able = [name for name, one in formats().items() if one.writes and config.kind in one.kinds]
        raise CheckpointError(
            f"format {known.name} holds {', '.join(known.kinds)} heads, this one is {config.kind}; formats for it: "
            f"{', '.join(able) or 'none'}"
        )


def _portable(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    value = value.detach().cpu()
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    return value.contiguous().clone()


def _save(folder: Path, written: Written, tensors: dict[str, Tensor]) -> None:
    with replacing(folder) as work:
        if written.file.endswith(".safetensors"):
            save_file(tensors, str(work / written.file), metadata={"format": "pt", "selfspec": __version__})
        else:
            torch.save(tensors, work / written.file)
        for name, numbers in written.beside.items():
            torch.save(numbers, work / name)
        write_json(work / CONFIG, written.config)


def exports(config: HeadConfig) -> dict[str, str]:
    """Formats that can hold a head, each with what is lost on the way ("" where nothing is)."""
    found = {}
    for name, known in formats().items():
        if known.writes and config.kind in known.kinds:
            notes = known.obstacles(config)
            if not any(note.effect == "fatal" for note in notes):
                found[name] = "; ".join(str(note) for note in notes if note.effect == "lossy")
    return found


def config_of(values: dict[str, Any]) -> HeadConfig:
    """The typed config of a heads folder of ours."""
    try:
        config: HeadConfig = method(values["kind"]).config_class.from_dict(values)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{CONFIG}: {error}") from error
    return config


def is_foreign(folder: Path) -> bool:
    """Whether a folder's config is not one of ours; without a config, whether the tensors are of a known format."""
    try:
        source = Source.open(folder)
        if not source.config.values:
            detect(source)
    except CheckpointError:
        return False
    return not isinstance(source.config.values.get("kind"), str)


def describe(folder: Path) -> dict[str, Any]:
    """Figures of another project's folder: format, kind, sizes, what an import would leave out.

    Raises:
        CheckpointError: unknown format, or damaged.
    """
    source = Source.open(folder)
    known = detect(source)
    files = {entry.file for entry in source.entries.values()}
    figures: dict[str, Any] = {
        "format": known.name,
        "parameters": sum(
            _size(one.shape) for one in source.entries.values() if one.dtype.lower().startswith(("f", "bf"))
        ),
        "dtype": ", ".join(sorted({entry.dtype for entry in source.entries.values()})),
        "bytes": sum(file.stat().st_size for file in files),
    }
    try:
        config = known.read(source, None).config
        notes = source.close()
    except CheckpointError as error:
        return figures | {"kind": ", ".join(known.kinds), "import": str(error)}
    told = {f"note {number}": str(note) for number, note in enumerate(notes, 1)}
    return {"kind": config.kind} | figures | config.to_dict() | told | {"import": "selfspec import"}


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
