"""What the demo is to run, and how much of everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Scale:
    """How much of everything.

    Args:
        minutes: of training, shared by the heads; a recipe that asks for less gets less.
        label_tokens: the most tokens that the target reads, per source.
        write_tokens: tokens that the target writes, prompts included.
        held_out_tokens: for the loss on held-out text.
        evaluation_prompts: decoded at the end of each training.
        check_prompts: decoded through the patched `generate` and compared with plain decoding.
        size_prompts: of the training text, on which the size of each draft's trees is chosen; 0 keeps their own sizes.
        size_tokens: written per prompt and size.
        bench_prompts: on which speeds are compared.
        bench_minutes: compare on fewer prompts (three at least) where that takes longer.
        prompt_tokens: the most tokens of a prompt.
        max_new_tokens: per prompt.
    """

    minutes: float = 4.0
    label_tokens: int = 60_000
    write_tokens: int = 6_000
    held_out_tokens: int = 4_096
    evaluation_prompts: int = 2
    check_prompts: int = 2
    size_prompts: int = 2
    size_tokens: int = 40
    bench_prompts: int = 8
    bench_minutes: float = 2.5
    prompt_tokens: int = 200
    max_new_tokens: int = 128


FULL = Scale()
SMALL = Scale(
    minutes=0.5,
    label_tokens=4_000,
    write_tokens=400,
    held_out_tokens=512,
    evaluation_prompts=1,
    check_prompts=1,
    size_prompts=1,
    size_tokens=12,
    bench_prompts=2,
    bench_minutes=0.5,
    prompt_tokens=80,
    max_new_tokens=24,
)


@dataclass(frozen=True)
class DemoSettings:
    """What to run.

    Args:
        target: folder, Hub id, or `demo`.
        out: folder of everything that is made.
        drafts: methods to train; empty is all that have a recipe.
        scale: how much of everything.
        seed: of everything drawn.
        dtype: of the target, see `load_target`.
        device: of the target.
        restart: use nothing that an earlier run left.
    """

    target: str = "demo"
    out: Path = Path("demo-output")
    drafts: tuple[str, ...] = ()
    scale: Scale = field(default_factory=Scale)
    seed: int = 0
    dtype: str = "auto"
    device: str = "cpu"
    restart: bool = False
