"""The parts of a card, each a pure function of its sources; a figure comes from a file, or there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from selfspec.card_sources import BENCH, CERTIFICATE, TRAINING, Sources
from selfspec.provenance import PROVENANCE

_UNKNOWN = "Not measured: there is no `{}` beside these weights."


def card_parts(sources: Sources) -> dict[str, str]:
    """The generated parts of a card, by name and in their order."""
    makers: dict[str, Callable[[Sources], str]] = {
        "what": _what,
        "use": _use,
        "acceptance": _acceptance,
        "speed": _speed,
        "certificate": _certificate,
        "training": _training,
        "repeat": _repeat,
    }
    return {name: make(sources).strip() for name, make in makers.items()}


def _what(sources: Sources) -> str:
    config, training = sources.config, sources.training or {}
    base = config.get("base_model") or "a base model that is not named"
    parameters = training.get("trained_parameters")
    return (
        f"`{config['kind']}` draft heads for **{base}**"
        + (f" (revision `{config['base_revision']}`)" if config.get("base_revision") else "")
        + (f", {parameters:,} trained parameters" if parameters else "")
        + ". They guess several tokens ahead; the base model checks the guesses, so its text stays its own: the same "
        "tokens when decoding greedily, the same distribution when sampling. The base model is not part of this "
        f"repository. Fingerprint of the base model: `{config.get('base_fingerprint') or 'not recorded'}`."
    )


def _use(sources: Sources) -> str:
    name = sources.name
    return f"""## Use

```python
import selfspec

model, tokenizer = selfspec.load("{name}")
print(tokenizer.decode(model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=64)[0]))
```

On a model at hand: `selfspec.patch(model, "{name}")`. Without patching, with `selfspec` installed:
`model.generate(**inputs, custom_generate="{name}", trust_remote_code=True)`."""


def _acceptance(sources: Sources) -> str:
    head = "## Acceptance\n\n"
    if not sources.benches:
        return head + _UNKNOWN.format(BENCH)
    lines = [
        "Tokens per round: tokens per pass of the base model, its own included (plain decoding: 1). Accepted per",
        "round: those of them that were guessed. Accepted at depth d: share of all rounds in which d guesses held.",
        "",
        "| prompts | tokens per round | accepted per round | accepted at depth 1, 2, ... |",
        "|---|---|---|---|",
    ]
    for domain, bench in sources.benches.items():
        run = sources.own_run(bench)
        depths = " ".join(f"{share:.2f}" for share in run["accepted_by_depth"])
        lines.append(f"| {domain} | {run['tokens_per_round']:.2f} | {run['accepted_per_round']:.2f} | {depths} |")
    return head + "\n".join(lines)


def _speed(sources: Sources) -> str:
    head = "## Speed\n\n"
    if not sources.benches:
        return head + _UNKNOWN.format(BENCH)
    lines = [
        "Speed-up: median over prompts of the ratio to plain decoding of the same prompt, with its 95% interval; then",
        "against the faster of plain decoding and transformers' own. Prefill left out.",
        "",
        "| prompts | run | tokens/s | over plain | over the best baseline | same text |",
        "|---|---|---|---|---|---|",
    ]
    for domain, bench in sources.benches.items():
        for run in bench["runs"]:
            best = _times(run.get("speedup_best_baseline"), run.get("speedup_best_baseline_interval"))
            lines.append(
                f"| {domain} | {run['name']} | {run['tokens_per_s']:.1f} | "
                f"{_times(run.get('speedup'), run.get('speedup_interval'))} | {best} | {_same(run.get('identical'))} |"
            )
    lines += ["", *(f"{domain}: {_circumstances(bench)}" for domain, bench in sources.benches.items())]
    return head + "\n".join(lines)


def _times(value: float | None, interval: list[float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}x" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else "")


def _same(identical: bool | str | None) -> str:
    return identical if isinstance(identical, str) else {True: "yes", False: "NO", None: "-"}[identical]


def _circumstances(bench: dict[str, Any]) -> str:
    way = "greedy" if not bench["temperature"] else f"temperature {bench['temperature']:g}"
    versions = ", ".join(f"{name} {number}" for name, number in bench.get("versions", {}).items())
    return (
        f"{bench['prompts']} prompts, {bench['max_new_tokens']} new tokens each, {way}, seed {bench['seed']}; "
        f"{bench['dtype']} on {bench.get('machine', bench['device'])}, {bench['threads']} threads; {versions}."
    )


def _certificate(sources: Sources) -> str:
    head, record = "## Certificate\n\n", sources.certificate
    if record is None:
        return head + _UNKNOWN.format(CERTIFICATE)
    verdict = "passed" if record["passed"] else "FAILED"
    lines = [
        f"`selfspec certify` **{verdict}** on {record['target']['dtype']} weights ([{CERTIFICATE}]({CERTIFICATE})):",
        "",
    ]
    for greedy in record["parts"].get("greedy", []):
        lines.append(
            f"- greedy, {greedy['dtype']}: {greedy['compared_tokens']} tokens of {len(greedy['texts'])} texts, "
            f"{greedy['real_differences']} real differences, {greedy['ties']} near-ties"
        )
    if (screened := record["parts"].get("screened")) and screened["used"]:
        samples = sum(way["samples"] for way in screened["ways"])
        least = min(way["smallest_p_value"] for way in screened["ways"])
        lines.append(
            f"- draws without all logits, {samples} at {screened['nodes']} nodes of text: smallest p-value {least:.2g}"
        )
    if rule := record["parts"].get("rule"):
        lines.append(
            f"- accept rule, enumerated on {len(rule['trees'])} trees: largest distance {rule['largest_distance']:.1e}"
        )
    for sampled in record["parts"].get("sampled", []):
        drafted, plain = (sampled[way]["first_token"]["total_variation"] for way in ("drafted", "plain"))
        lines.append(
            f"- sampled, {sampled['drafted']['samples']} rounds: total variation {drafted:.3f} (plain sampling "
            f"{plain:.3f})"
        )
    return head + "\n".join(lines)


def _training(sources: Sources) -> str:
    head, record = "## Training\n\n", sources.training
    facts = sources.facts
    terms = [
        f"Licence of the heads: {facts.license or 'not stated'}.",
        f"Licence of the training text: {facts.data_license or 'not stated'}.",
    ]
    if record is None:
        return head + f"There is no `{TRAINING}` beside these weights. " + " ".join(terms)
    lines = [
        f"{record['steps']} steps on {record['device']}. " + " ".join(terms),
        "",
        "| text | rows | tokens | learned from |",
    ]
    lines.append("|---|---|---|---|")
    for name, sizes in record.get("data", {}).items():
        lines.append(f"| {name} | {sizes['rows']} | {sizes['tokens']} | {sizes['learned']} |")
    sources_of = sorted({str(s.get("source") or "the model's own") for s in record.get("recipe", {}).get("data", [])})
    lines += ["", f"Sources: {', '.join(sources_of) or 'not recorded'}. Hashes, seeds and versions: `{PROVENANCE}`."]
    return head + "\n".join(lines)


def _repeat(sources: Sources) -> str:
    head = "## Measure it again\n\n"
    if not sources.benches:
        return head + _UNKNOWN.format(BENCH)
    commands = [_command(sources, bench) for bench in sources.benches.values()]
    return head + "```\n" + "\n".join(commands) + "\n```"


def _command(sources: Sources, bench: dict[str, Any]) -> str:
    words = [
        "selfspec bench",
        f"--target {sources.config.get('base_model') or 'BASE_MODEL'}",
        f"--draft {sources.name}",
    ]
    if prompts := bench.get("prompts_file"):
        words.append(f"--prompts {prompts}")
    words.append(f"--limit {bench['prompts']} --max-new-tokens {bench['max_new_tokens']}")
    words.append(f"--temperature {bench['temperature']:g} --dtype {bench['dtype']} --threads {bench['threads']}")
    if nodes := sources.own_run(bench).get("nodes"):
        words.append(f"--nodes {nodes}")
    return " ".join([*words, f"--seed {bench['seed']}"])
