"""Heads on the Hub: a folder is staged, shown, and sent as one commit.

Large files are sent before the commit and the server keeps them, so a push that was cut off goes on when it is called
again; a repository never shows half of one. Staged bytes depend on the folder alone, which is what makes that work.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

from selfspec._version import __version__
from selfspec.card import check_card, write_card
from selfspec.card_sources import BENCHES, CARD, CERTIFICATE, FACTS, TRAINING, Facts, read_facts, read_json
from selfspec.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, WEIGHTS, read_config, tensor_shapes, write_json
from selfspec.errors import CheckpointError, ConfigError, HubError
from selfspec.provenance import PROVENANCE, file_hash, from_training, redact, redacted

CODE = "custom_generate/generate.py"
REQUIREMENTS = "custom_generate/requirements.txt"
_RECORDS = (CERTIFICATE, TRAINING, PROVENANCE, "tune.json", "recipe.json")
_CODE_TEXT = '''"""Speculative decoding with the draft heads of this repository; needs the package `selfspec`."""

from selfspec.inference.custom import generate_with

HEADS = {repo!r}


def generate(model, **arguments):
    return generate_with(model, HEADS, __file__, **arguments)
'''


@dataclass(frozen=True)
class StagedFile:
    """A file that would go up."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Plan:
    """What a push would do.

    Args:
        repo: id of the repository.
        revision: branch that gets the commit.
        private: the repository is, or will be, private; None if it could not be asked.
        exists: it is there already; None if it could not be asked.
        files: in the order they are shown.
    """

    repo: str
    revision: str
    private: bool | None
    exists: bool | None
    files: tuple[StagedFile, ...]

    def __str__(self) -> str:
        sight = {True: "private", False: "PUBLIC", None: "visibility not asked"}[self.private]
        state = {True: "exists", False: "new", None: "not asked"}[self.exists]
        total = sum(file.size for file in self.files)
        lines = [f"{constants.ENDPOINT}/{self.repo} ({sight}, {state}), branch {self.revision}:"]
        lines += [f"  {file.size:>14,}  {file.sha256[:16]}  {file.name}" for file in self.files]
        return "\n".join([*lines, f"  {total:>14,}  bytes in {len(self.files)} files"])


def push(
    folder: str | Path,
    repo: str,
    *,
    private: bool = True,
    revision: str = "main",
    token: str | None = None,
    message: str | None = None,
    facts: Facts | None = None,
    dry_run: bool = False,
    confirm: Callable[[Plan], bool] | None = None,
) -> str | None:
    """Publish a folder of heads.

    Args:
        folder: `config.json`, `model.safetensors`, and what `bench`, `certify` and `train` wrote;
            nothing else goes up.
        repo: `owner/name`; made if it is not there.
        private: of a new repository; one that is public already is refused unless this is False.
        revision: branch; made if it is not there.
        token: Hub token; the one of `HF_TOKEN` or `hf auth login` if left out.
        message: of the commit.
        facts: for the card; those of the folder's `card.json` if left out.
        dry_run: only ask `confirm`, and send nothing.
        confirm: is shown the plan; False ends the push.

    Returns:
        The address of the commit; None if nothing was sent.

    Raises:
        CheckpointError: the folder holds no whole heads, or the card does not agree with its files.
        ConfigError: a wrong repository id, or a public repository where a private one was asked for.
        HubError: the Hub refused or could not be reached.
    """
    _check_repo(repo)
    with staged(folder, repo, facts) as work:
        files = _listed(work)
        if dry_run:
            plan = Plan(repo, revision, private, None, files)
            if confirm is not None:
                confirm(plan)
            return None
        with _told(repo):
            api = HfApi(token=token, library_name="selfspec", library_version=__version__)
            plan = _asked(api, Plan(repo, revision, private, False, files))
            if confirm is not None and not confirm(plan):
                return None
            return _send(api, plan, work, message or f"Heads by selfspec {__version__}")


def _asked(api: HfApi, plan: Plan) -> Plan:
    try:
        found = api.repo_info(plan.repo)
    except RepositoryNotFoundError:
        return plan
    if plan.private and found.private is False:
        raise ConfigError(f"{plan.repo} exists and is public; to publish there, say so with --public (private=False)")
    return replace(plan, private=found.private, exists=True)


def _send(api: HfApi, plan: Plan, work: Path, message: str) -> str:
    api.create_repo(plan.repo, private=plan.private, exist_ok=True)
    if plan.revision != "main":
        api.create_branch(plan.repo, branch=plan.revision, exist_ok=True)
    sent = api.upload_folder(repo_id=plan.repo, folder_path=work, revision=plan.revision, commit_message=message)
    return str(sent.commit_url)


@contextmanager
def _told(repo: str) -> Iterator[None]:
    """Errors of the Hub in one line, without secrets."""
    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise HubError(f"{repo}: {_line(error)}; check the name, the branch and the rights of your token") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        hint = "log in with `hf auth login`, or set HF_TOKEN" if status in (401, 403) else "call it again to go on"
        raise HubError(f"{repo}: the Hub refused ({_line(error)}); {hint}") from error
    except (OSError, RuntimeError) as error:
        if isinstance(error, (CheckpointError, ConfigError, HubError)):
            raise
        raise HubError(f"{repo}: the upload was cut off ({_line(error)}); call it again to go on") from error


def _line(error: BaseException) -> str:
    lines = [line for line in redact(str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _check_repo(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"{repo!r} is no repository id ({error}); give OWNER/NAME") from error
    if repo.count("/") != 1:
        raise ConfigError(f"{repo!r} names no owner; give OWNER/NAME")


# Staging


@contextmanager
def staged(folder: str | Path, repo: str, facts: Facts | None = None) -> Iterator[Path]:
    """A temporary folder with exactly what goes up; records are redacted, the card and the code are written anew.

    Raises:
        CheckpointError: see `push`.
    """
    folder = Path(folder)
    config = read_config(folder)
    _check_base(folder, config)
    with tempfile.TemporaryDirectory(prefix="selfspec-push-") as name:
        work = Path(name)
        _copy_heads(folder, work)
        for path in _records(folder):
            write_json(work / path.name, redacted(read_json(path)))
        training = read_json(work / TRAINING)
        if training is not None and not (work / PROVENANCE).is_file():
            write_json(work / PROVENANCE, from_training(training))
        for prompts in _prompt_files(work):
            _copy_prompts(folder / prompts, work)
        if (folder / CARD).is_file():
            shutil.copyfile(folder / CARD, work / CARD)
        write_card(work, replace(facts or read_facts(folder), repo=repo))
        write_code(work, repo)
        if wrong := check_card(work):
            raise CheckpointError(f"the card of {folder} does not agree with its files: {'; '.join(wrong)}")
        yield work


def write_code(folder: Path, repo: str) -> None:
    """The `custom_generate` folder of a repository, by which transformers finds selfspec."""
    (folder / CODE).parent.mkdir(exist_ok=True)
    (folder / CODE).write_text(_CODE_TEXT.format(repo=repo), encoding="utf-8")
    (folder / REQUIREMENTS).write_text("selfspec\n", encoding="utf-8")


def _check_base(folder: Path, config: dict[str, Any]) -> None:
    base = config.get("base_model") or ""
    if Path(base).is_absolute() or Path(base).is_dir() or base.startswith((".", "~")) or base.count("/") > 1:
        raise CheckpointError(
            f"{folder / CONFIG} names the base model {base!r}, a folder of this machine, where nobody else will find "
            "it; put its Hub id there (`base_model`), and certify again"
        )


def _copy_heads(folder: Path, work: Path) -> None:
    shutil.copyfile(folder / CONFIG, work / CONFIG)
    if (folder / WEIGHTS).is_file():
        tensor_shapes(folder / WEIGHTS)
        shutil.copyfile(folder / WEIGHTS, work / WEIGHTS)
        if (folder / ADAPTER_WEIGHTS).is_file():
            tensor_shapes(folder / ADAPTER_WEIGHTS)
            shutil.copyfile(folder / ADAPTER_WEIGHTS, work / ADAPTER_WEIGHTS)
            shutil.copyfile(folder / ADAPTER_CONFIG, work / ADAPTER_CONFIG)
    elif _has_weights(read_config(folder)["kind"]):
        raise CheckpointError(f"{folder / WEIGHTS} is missing; the heads' weights belong there")


def _has_weights(kind: str) -> bool:
    from selfspec import registry
    from selfspec.head import DraftHead

    return issubclass(registry.method(kind), DraftHead)


def _records(folder: Path) -> list[Path]:
    """JSON files about these heads; whatever else lies in the folder stays at home."""
    known = [folder / name for name in (*_RECORDS, FACTS)]
    return [path for path in known if path.is_file()] + sorted(
        path for path in folder.glob("bench*.json") if BENCHES.fullmatch(path.name)
    )


def _prompt_files(work: Path) -> list[str]:
    named = {(read_json(path) or {}).get("prompts_file") for path in work.glob("bench*.json")}
    return sorted(name for name in named if isinstance(name, str) and Path(name).name == name)


def _copy_prompts(source: Path, work: Path) -> None:
    """Prompts go up only as JSON lines, so that a name in a bench file cannot publish anything else."""
    if not source.is_file():
        return
    try:
        for line in source.read_text(encoding="utf-8").splitlines():
            if line.strip():
                json.loads(line)
    except ValueError as error:
        raise CheckpointError(f"{source} is named as prompts, but is not JSON lines ({error})") from error
    shutil.copyfile(source, work / source.name)


def _listed(work: Path) -> tuple[StagedFile, ...]:
    paths = sorted(path for path in work.rglob("*") if path.is_file())
    return tuple(StagedFile(path.relative_to(work).as_posix(), path.stat().st_size, file_hash(path)) for path in paths)
