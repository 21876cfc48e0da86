"""The card (README.md) of published heads: written from JSON files, and checked against them.

Each part made here stands between two comments. What a person writes around them is kept when the card is written
again; a figure there that no file vouches for makes the check fail.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from selfspec.card_parts import card_parts
from selfspec.card_sources import CARD, CERTIFICATE, FACTS, Facts, Sources, read_sources
from selfspec.checkpoint import CONFIG, WEIGHTS, write_json
from selfspec.errors import CheckpointError
from selfspec.fingerprint import matches
from selfspec.outputs import whole_file
from selfspec.provenance import file_hash

_FIGURE = re.compile(
    r"\d+(?:\.\d+)?(?=\s*(?:[x×]\b|×|%|(?:\w+ )?tokens? per (?:round|second|pass)|tok(?:en)?s?/s))", re.IGNORECASE
)

_MEASURED = ("base_model", "base_model_relation", "model_name", "model-index")
"""Metadata that only files may give."""


def write_card(folder: str | Path, facts: Facts | None = None) -> Path:
    """Write `README.md` (and `card.json`, if facts are given); what others wrote around the parts made here is kept.

    Raises:
        CheckpointError: see `read_sources`.
        ConfigError: the bench files hold several drafts and nothing says which one is meant.
    """
    folder = Path(folder)
    if facts is not None:
        write_json(folder / FACTS, asdict(facts))
    path = folder / CARD
    text = render(read_sources(folder), path.read_text(encoding="utf-8") if path.is_file() else None)
    with whole_file(path) as work:
        work.write_text(text, encoding="utf-8")
    return path


def check_card(folder: str | Path) -> list[str]:
    """What in a card is not what its files say; empty when all is well.

    Raises:
        CheckpointError: no card, or see `read_sources`.
    """
    sources = read_sources(folder)
    path = sources.folder / CARD
    if not path.is_file():
        raise CheckpointError(f"{sources.folder} holds no {CARD}; write one with: selfspec card {sources.folder}")
    text = path.read_text(encoding="utf-8")
    parts = card_parts(sources)
    wrong = _wrong_files(sources) + _wrong_metadata(sources, text)
    for name, wanted in parts.items():
        found = _between(name).search(text)
        if found is None:
            wrong.append(f"the part {name!r} is missing")
        elif found[1].strip() != wanted:
            wrong += [f"{name}: {line}" for line in _difference(found[1].strip(), wanted)]
    return wrong + _unsourced(text, parts)


def render(sources: Sources, existing: str | None = None) -> str:
    """A card, or an existing one with its generated parts and metadata renewed."""
    parts = card_parts(sources)
    body = ModelCard(existing, ignore_metadata_errors=True).text.strip() if existing else f"# {sources.name}"
    for name, text in parts.items():
        block = f"<!-- selfspec:{name} -->\n{text}\n<!-- /selfspec:{name} -->"
        if _between(name).search(body):
            body = _between(name).sub(block.replace("\\", r"\\"), body, count=1)
        else:
            body += "\n\n" + block
    found = ModelCard(existing, ignore_metadata_errors=True).data.to_dict() if existing else {}
    kept = {name: value for name, value in found.items() if name not in _MEASURED}
    data = ModelCardData(**{**kept, **metadata(sources)}, ignore_metadata_errors=True)
    return f"---\n{data.to_yaml()}\n---\n\n{body}\n"


def metadata(sources: Sources) -> dict[str, Any]:
    """The Hub's own fields, as plain values."""
    facts, config = sources.facts, sources.config
    base = hub_id(config.get("base_model", ""))
    results = [result for domain, bench in sources.benches.items() for result in _results(sources, domain, bench)]
    given: dict[str, Any] = {
        "base_model": base,
        "base_model_relation": "adapter" if base else None,
        "license": facts.license or None,
        "datasets": facts.datasets or None,
        "language": facts.language or None,
    }
    data = ModelCardData(
        **{name: value for name, value in given.items() if value is not None},
        library_name="selfspec",
        pipeline_tag="text-generation",
        tags=["selfspec", "speculative-decoding", "custom_generate", str(config["kind"])],
        model_name=sources.name.split("/")[-1],
        eval_results=results or None,
    )
    return dict(data.to_dict())


def hub_id(name: str) -> str | None:
    """The name if it can be a repository's id with an owner; folders and short names are none."""
    fine = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not Path(name).exists()
    return name if fine else None


def _results(sources: Sources, domain: str, bench: dict[str, Any]) -> list[EvalResult]:
    run = sources.own_run(bench)
    names = {
        "tokens_per_round": "tokens per round (the target's own included)",
        "accepted_per_round": "accepted draft tokens per round",
        "speedup": f"speed-up over {run.get('baseline', 'plain')} decoding (median)",
    }
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=f"selfspec-{domain}",
            dataset_name=f"prompts: {domain}",
            metric_type=key,
            metric_name=text,
            metric_value=round(run[key], 4),
        )
        for key, text in names.items()
        if run.get(key) is not None
    ]


# Checks


def _wrong_files(sources: Sources) -> list[str]:
    """A certificate of other files, or of another base model."""
    record, wrong = sources.certificate, []
    if record is None:
        return []
    for name, recorded in record["draft"].get("files", {}).items():
        path = sources.folder / name
        if name in (CONFIG, WEIGHTS) and (not path.is_file() or file_hash(path) != recorded):
            wrong.append(f"{CERTIFICATE} is for another {name}")
    mine, theirs = sources.config.get("base_fingerprint"), record["target"]["fingerprint"]
    if mine and not matches(mine, theirs):
        wrong.append(f"{CERTIFICATE} is for a base model with fingerprint {theirs}, the heads are for {mine}")
    return wrong


def _wrong_metadata(sources: Sources, text: str) -> list[str]:
    wanted, found = metadata(sources), ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    names = dict.fromkeys([*wanted, *_MEASURED])
    return [
        f"metadata {name}: {found.get(name)!r}, the files say {wanted.get(name)!r}"
        for name in names
        if _plain(found.get(name)) != _plain(wanted.get(name))
    ]


def _unsourced(text: str, parts: dict[str, str]) -> list[str]:
    """Figures of speed and acceptance outside of the generated parts that occur in none of them."""
    known = {figure for part in parts.values() for figure in re.findall(r"\d+(?:\.\d+)?", part)}
    outside = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    for name in parts:
        outside = _between(name).sub("", outside)
    return [
        f"the figure {found} outside of the generated parts is in no file"
        for found in _FIGURE.findall(outside)
        if found not in known
    ]


def _difference(found: str, wanted: str) -> list[str]:
    lines = list(difflib.ndiff(found.splitlines(), wanted.splitlines()))
    told = {"- ": "the card says ", "+ ": "the files say "}
    return [told[line[:2]] + repr(line[2:]) for line in lines if line[:2] in told]


def _between(name: str) -> re.Pattern[str]:
    return re.compile(rf"<!-- selfspec:{name} -->\n(.*?)<!-- /selfspec:{name} -->", re.DOTALL)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
