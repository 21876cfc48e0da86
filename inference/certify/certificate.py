"""`certify`: checks that a draft leaves a target's output as it is, and a record of what was checked.

Five parts. Greedy: text against plain decoding and transformers' own `generate`, in float32 and in the target's dtype.
Screened: tokens drawn without all logits, in the target's dtype, against the softmax. Rule: the accept rule by
enumeration on trees shaped as this draft's. Draws: that nodes were drawn from the q that the draft hands over. Sampled:
rounds and whole calls on the real model against the exact probabilities.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.accept import AcceptRule
from selfspec.changes import changed, changes_target
from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.certify.draws import draws_check
from selfspec.inference.certify.greedy import greedy_check
from selfspec.inference.certify.record import circumstances, draft_record, target_record
from selfspec.inference.certify.rule import rule_check, shape_of
from selfspec.inference.certify.sampled import Rounds, sampled_check
from selfspec.inference.certify.screened import screened_check
from selfspec.inference.runs import prepare
from selfspec.resolve import resolve_draft
from selfspec.target import Target

GREEDY, SCREENED, RULE, DRAWS, SAMPLED = "greedy", "screened", "rule", "draws", "sampled"
_TESTS_PER_CONTEXT = 7
_TREES_FOR_SHAPES = 3


@dataclass(frozen=True)
class CertifySettings:
    """How much is checked.

    Args:
        max_new_tokens: of greedy texts.
        sampled_prompts: in how many of the prompts sampling is tested.
        prompt_tokens: prompts of the sampled part keep their last tokens only, so that a pass is cheap.
        samples: rounds per prompt.
        engine_samples: whole calls per prompt.
        trees: trees per prompt to test q on.
        screened_draws: tokens to draw without all logits, at each of two nodes per prompt, in two ways of sampling.
        temperature: of the sampled part.
        top_k: of the sampled part; 0 is all.
        top_p: of the sampled part.
        alpha: chance of a false alarm over all tests of the sampled part together (the screened part has its own).
        seed: of everything drawn.
        float32: also check a float32 copy of a target that comes in another dtype; sampling is tested on it.
        rule: the accept rule in use.
    """

    max_new_tokens: int = 48
    sampled_prompts: int = 2
    prompt_tokens: int = 32
    samples: int = 400
    engine_samples: int = 32
    trees: int = 100
    screened_draws: int = 500
    temperature: float = 0.9
    top_k: int = 30
    top_p: float = 1.0
    alpha: float = 1e-3
    seed: int = 0
    float32: bool = True
    rule: AcceptRule = field(default_factory=AcceptRule)

    def __post_init__(self) -> None:
        least = {"max_new_tokens": 4, "sampled_prompts": 1, "prompt_tokens": 2, "samples": 50, "trees": 1}
        for name, bound in {**least, "engine_samples": 1, "screened_draws": 50, "top_k": 0}.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name}={getattr(self, name)} is too few; give at least {bound}")
        if not (self.temperature > 0 and 0 < self.top_p <= 1 and 0 < self.alpha < 0.5):
            raise ConfigError(
                f"temperature={self.temperature}, top_p={self.top_p} and alpha={self.alpha} must lie above 0, in "
                "(0, 1] and in (0, 0.5)"
            )
        if self.rule.lossy:
            raise ConfigError(
                f"the accept rule {self.rule.name!r} changes the distribution of the text, there is nothing to "
                "certify; use 'lossless'"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `generate` for the sampled part."""
        shape = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {"do_sample": True, "max_new_tokens": 4, **shape}


QUICK = {"max_new_tokens": 24, "sampled_prompts": 1, "samples": 120, "engine_samples": 16, "trees": 30}
QUICK |= {"screened_draws": 200}
"""Settings of a short look: the same checks, less power."""


def certify(
    model: PreTrainedModel,
    draft: str | Path | Draft,
    prompts: Sequence[list[int]],
    settings: CertifySettings | None = None,
    command: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
    allow_target_change: bool = False,
) -> dict[str, Any]:
    """Check and return the certificate; `record["passed"]` is the verdict.

    Args:
        model: the target, not patched, in its own dtype.
        draft: a folder or Hub id of heads, the name of a method that needs no training, or a Draft.
        prompts: token ids of each prompt.
        settings: how much is checked.
        command: what was typed, for the record.
        progress: called with the name of a part before it starts.
        allow_target_change: certify a method that trains the target along with its heads, against the changed target.

    Raises:
        ConfigError: a lossy rule, no prompts, a patched model.
        UnsupportedModel: the target cannot be served exactly.
        CheckpointError: the heads are damaged or of another base model.
    """
    settings = settings or CertifySettings()
    if "speculation" in vars(model):
        raise ConfigError("the model is patched; call selfspec.unpatch(model) first")
    if not prompts or min(map(len, prompts)) < 2:
        raise ConfigError("certify wants prompts of at least two tokens each")
    begun, tell = time.monotonic(), progress or (lambda part: None)
    parts: dict[str, Any] = {GREEDY: []}
    with _door(model) as target, ExitStack() as stack:
        found = resolve_draft(draft, target)
        stack.enter_context(changed(found, allow_target_change))
        who = {"target": target_record(target), "draft": draft_record(draft, found)}
        who["target"]["changed"] = changes_target(found)
        tell(f"greedy, {who['target']['dtype']}")
        parts[GREEDY].append(greedy_check(target, found, prompts, settings.max_new_tokens))
        tell("draws without all logits")
        parts[SCREENED] = screened_part(target, _chosen(prompts, settings), settings)
        if not settings.float32 or target.dtype == torch.float32:
            parts |= sampling_parts(target, found, prompts, settings, tell)
    if SAMPLED not in parts:
        with _door(copy.deepcopy(model).float()) as target, ExitStack() as stack:
            found = resolve_draft(draft, target)
            stack.enter_context(changed(found, allow_target_change))
            tell("greedy, float32")
            parts[GREEDY].append(greedy_check(target, found, prompts, settings.max_new_tokens))
            parts |= sampling_parts(target, found, prompts, settings, tell)
    return {
        **circumstances(),
        **who,
        "command": list(command),
        "settings": asdict(settings),
        "parts": parts,
        "seconds": round(time.monotonic() - begun, 1),
        "passed": all(passed for _, passed in verdicts(parts)),
    }


def sampling_parts(
    target: Target,
    draft: Draft,
    prompts: Sequence[list[int]],
    settings: CertifySettings,
    tell: Callable[[str], None] = lambda part: None,
) -> dict[str, Any]:
    """The parts on sampling: the rule, the draws, the real model."""
    chosen = _chosen(prompts, settings)
    tell("accept rule")
    return {
        RULE: rule_part(target, draft, chosen, settings),
        DRAWS: _told(tell, "draws", draws_part, target, draft, chosen, settings),
        SAMPLED: _told(tell, "sampled text", sampled_part, target, draft, chosen, settings),
    }


def _chosen(prompts: Sequence[list[int]], settings: CertifySettings) -> list[list[int]]:
    return [prompt[-settings.prompt_tokens :] for prompt in prompts[: settings.sampled_prompts]]


def _told(tell: Callable[[str], None], name: str, part: Callable[..., Any], *given: Any) -> Any:
    tell(name)
    return part(*given)


def screened_part(target: Target, prompts: Sequence[list[int]], settings: CertifySettings) -> dict[str, Any]:
    """Tokens drawn without all logits, where this target's are; see `selfspec.inference.certify.screened`."""
    return screened_check(target, prompts, settings.arguments, settings.screened_draws, settings.seed + 29)


def rule_part(target: Target, draft: Draft, prompts: Sequence[list[int]], settings: CertifySettings) -> dict[str, Any]:
    """The accept rule on the standard trees and on trees this draft proposes."""
    shapes = []
    for rounds, generator in _places(target, draft, prompts, settings):
        shapes += [shape_of(rounds.propose(generator)) for _ in range(_TREES_FOR_SHAPES)]
    return rule_check(shapes[: 2 * _TREES_FOR_SHAPES], settings.rule, settings.seed + 1)


def draws_part(
    target: Target, draft: Draft, prompts: Sequence[list[int]], settings: CertifySettings
) -> list[dict[str, Any]]:
    """Whether nodes come from the q that is handed over, per prompt."""
    alpha = settings.alpha / len(prompts)
    return [
        draws_check(draft, rounds.verified, rounds.sampling, settings.trees, settings.seed + 17 * index, alpha)
        for index, (rounds, _) in enumerate(_places(target, draft, prompts, settings))
    ]


def sampled_part(
    target: Target, draft: Draft, prompts: Sequence[list[int]], settings: CertifySettings
) -> list[dict[str, Any]]:
    """Rounds and whole calls against the exact probabilities, per prompt; Bonferroni over all tests."""
    alpha = settings.alpha / (_TESTS_PER_CONTEXT * len(prompts))
    return [
        sampled_check(
            target,
            draft,
            prompt,
            settings.arguments,
            settings.rule,
            settings.samples,
            settings.engine_samples,
            settings.seed + 101 * index,
            alpha,
        )
        for index, prompt in enumerate(prompts)
    ]


def _places(target: Target, draft: Draft, prompts: Sequence[list[int]], settings: CertifySettings) -> Any:
    for index, prompt in enumerate(prompts):
        request = prepare(target, prompt, settings.arguments)
        generator = torch.Generator(target.device).manual_seed(settings.seed + index)
        yield Rounds(target, draft, request, settings.rule), generator


@contextmanager
def _door(model: PreTrainedModel) -> Any:
    target = Target(model)
    try:
        yield target
    finally:
        target.release()


def verdicts(parts: dict[str, Any]) -> list[tuple[str, bool]]:
    """One line per part that was run: what was checked, and whether it held."""
    found = []
    for greedy in parts.get(GREEDY, []):
        line = (
            f"greedy, {greedy['dtype']}: {len(greedy['texts'])} texts, {greedy['compared_tokens']} tokens, "
            f"{greedy['real_differences']} real differences, {greedy['ties']} ties "
            f"(noise floor of a logit {greedy['noise_floor']:.2g})"
        )
        found.append((line, greedy["passed"]))
    if SCREENED in parts:
        found.append(_screened_verdict(parts[SCREENED]))
    if RULE in parts:
        rule = parts[RULE]
        line = (
            f"accept rule {rule['rule']}, enumerated: {len(rule['trees'])} trees, "
            f"largest distance {rule['largest_distance']:.1e}"
        )
        found.append((line, rule["passed"]))
    for draws in parts.get(DRAWS, []):
        tests = [p for p in (draws["uniform_p_value"], draws["first_child_p_value"]) if p is not None]
        what = f"smallest p-value {min(tests):.2g}" if tests else "nothing is drawn by this draft"
        found.append((f"draws: {draws['drawn_nodes']} nodes drawn, {what}", draws["passed"]))
    for sampled in parts.get(SAMPLED, []):
        first = sampled["drafted"]["first_token"]
        odds = first["seen_with_90_percent_odds_from"]
        line = (
            f"sampled: {sampled['drafted']['samples']} rounds, total variation {first['total_variation']:.3f} "
            f"(plain sampling {sampled['plain']['first_token']['total_variation']:.3f}), "
            + ("one token has nearly all probability" if odds is None else f"would see {odds:.3f} with 90% odds")
        )
        found.append((line, sampled["passed"]))
    return found


def _screened_verdict(screened: dict[str, Any]) -> tuple[str, bool]:
    if not screened["used"]:
        return f"draws without all logits: not used here, since {screened['reason']}", screened["passed"]
    ways, wrong = [], [] if screened["same_logits"] else ["the pass has other logits"]
    wrong += [] if screened["within_bounds"] else ["logits lie outside the bounds of the screen"]
    for way in screened["ways"]:
        seen = way["seen_with_90_percent_odds_from"]
        ways.append(
            f"{way['way']}: smallest p-value {way['smallest_p_value']:.2g}"
            + (f", {way['impossible_tokens']} impossible tokens" if way["impossible_tokens"] else "")
            + ("" if seen is None else f", would see {seen:.3f} with 90% odds")
        )
    samples = sum(way["samples"] for way in screened["ways"])
    return f"draws without all logits: {samples} at {screened['nodes']} nodes; {'; '.join(wrong + ways)}", screened[
        "passed"
    ]
