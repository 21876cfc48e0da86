"""Plain decoding, transformers' `generate` and drafts side by side, and what is shown of it."""

from selfspec.inference.bench.measure import (
    BenchSettings,
    bench,
    bench_with_progress,
    check_prompts,
    resolve_drafts,
)

__all__ = ["BenchSettings", "bench", "bench_with_progress", "check_prompts", "resolve_drafts"]
