"""What the recipes for published models are about, and how long they should take: by formula, never measured.

    python -m selfspec.recipes.forecast            # all of them
    python -m selfspec.recipes.forecast NAME ...   # some

The formula, for N tokens of training text, W of them written by the target, E passes over the text, a target with A
active parameters, and a head with H trained ones that is run S times per place:

    writing     2 A W / (p u)     or, where reading the weights binds, 2 A W / (b rows)    whichever is longer
    features    2 A N E / (g p u)
    head        6 H S N E / (g p u)

g GPUs of p dense bfloat16 operations and b bytes of memory bandwidth per second; u = 0.35 of p is reached; `rows` texts
are written side by side, by the first process alone; 2 bytes per parameter; 2 operations per parameter and token
forwards, 6 with the way back.
Left out: attention over long texts, loading, evaluation, and whatever makes a machine slower than its data sheet.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

UTILISATION = 0.35
_BILLION = 1e9


@dataclass(frozen=True)
class Gpu:
    """From the maker's data sheet: dense bfloat16 operations and bytes per second, and bytes of memory."""

    operations: float
    bandwidth: float
    memory: float


GPUS = {
    "A100-80GB": Gpu(312e12, 2.04e12, 80e9),
    "H100-80GB": Gpu(989e12, 3.35e12, 80e9),
    "H200-141GB": Gpu(989e12, 4.8e12, 141e9),
    "B200-180GB": Gpu(2250e12, 8.0e12, 180e9),
}


@dataclass(frozen=True)
class Model:
    """A published target, as its `config.json` describes it. Parameters in billions; `active` of them per token."""

    hub: str
    model_type: str
    total: float
    active: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gpu: str = "H100-80GB"
    gpus: int = 8

    def eagle3_parameters(self, draft_vocab: int) -> int:
        """Trained parameters of one EAGLE-3 layer of the target's own width, with an output head of its own."""
        size, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        fused = 3 * size * size
        attention = 2 * size * (queries + 2 * keys) + queries * size
        norms = 4 * size
        return fused + attention + 3 * size * self.intermediate + norms + draft_vocab * size

    @property
    def taps(self) -> tuple[int, int, int]:
        """The hidden states an EAGLE-3 head reads unless told otherwise."""
        return 2, self.layers // 2, self.layers - 3


MODELS = {
    "gemma-3-12b": Model("google/gemma-3-12b-it", "gemma3", 12.2, 12.2, 48, 3840, 16, 8, 256, 15360, 262208),
    "gemma-3-27b": Model("google/gemma-3-27b-it", "gemma3", 27.4, 27.4, 62, 5376, 32, 16, 128, 21504, 262208),
    "gemma-3-4b": Model("google/gemma-3-4b-it", "gemma3", 4.3, 4.3, 34, 2560, 8, 4, 256, 10240, 262208),
    "gpt-oss-20b": Model("openai/gpt-oss-20b", "gpt_oss", 20.9, 3.6, 24, 2880, 64, 8, 64, 2880, 201088),
    "llama-3.1-8b": Model("meta-llama/Llama-3.1-8B-Instruct", "llama", 8.03, 8.03, 32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3.3-70b": Model(
        "meta-llama/Llama-3.3-70B-Instruct", "llama", 70.6, 70.6, 80, 8192, 64, 8, 128, 28672, 128256, "B200-180GB"
    ),
    "mistral-small-24b": Model(
        "mistralai/Mistral-Small-24B-Instruct-2501", "mistral", 23.6, 23.6, 40, 5120, 32, 8, 128, 32768, 131072
    ),
    "phi-4": Model("microsoft/phi-4", "phi3", 14.7, 14.7, 40, 5120, 40, 10, 128, 17920, 100352),
    "qwen3-0.6b": Model("Qwen/Qwen3-0.6B", "qwen3", 0.6, 0.6, 28, 1024, 16, 8, 128, 3072, 151936, gpus=1),
    "qwen3-30b-a3b": Model("Qwen/Qwen3-30B-A3B", "qwen3_moe", 30.5, 3.3, 48, 2048, 32, 4, 128, 6144, 151936),
    "qwen3-32b": Model("Qwen/Qwen3-32B", "qwen3", 32.8, 32.8, 64, 5120, 64, 8, 128, 25600, 151936),
    "qwen3-8b": Model("Qwen/Qwen3-8B", "qwen3", 8.19, 8.19, 36, 4096, 32, 8, 128, 12288, 151936),
    "smollm3-3b": Model("HuggingFaceTB/SmolLM3-3B", "smollm3", 3.08, 3.08, 36, 2048, 16, 4, 128, 11008, 128256),
}
"""By the name of the recipe without `-eagle3`."""


@dataclass(frozen=True)
class Work:
    """What a recipe does: tokens of text and of these written by the target, passes, runs of the head per place."""

    tokens: float
    written: float
    epochs: float
    steps: int
    rows: int


def hours(model: Model, head: int, work: Work, gpu: str, gpus: int) -> float:
    """The formula above, in hours."""
    device, active = GPUS[gpu], model.active * _BILLION
    rate = gpus * device.operations * UTILISATION
    writing = 2 * active * work.written * max(gpus / rate, 1 / (device.bandwidth * work.rows))
    features = 2 * active * work.tokens * work.epochs / rate
    training = 6 * head * work.steps * work.tokens * work.epochs / rate
    return (writing + features + training) / 3600


def header(name: str, draft_vocab: int, work: Work) -> list[str]:
    """The lines of a recipe's header that follow from the model and the formula."""
    model = MODELS[name]
    head = model.eagle3_parameters(draft_vocab)
    low, middle, high = model.taps
    fitting = [gpu for gpu, device in GPUS.items() if device.memory > 2.1 * model.total * _BILLION]
    told = ", ".join(f"{hours(model, head, work, gpu, model.gpus):.1f} h on {model.gpus} {gpu}" for gpu in fitting)
    return [
        f"head: reads hidden states {low}, {middle}, {high} of {model.layers} layers; 1 layer of width {model.hidden}, "
        f"{model.heads} heads; {head / _BILLION:.2f} B trained parameters",
        f"forecast: {told} (formula of selfspec.recipes.forecast, not measured)",
    ]


def main(names: list[str]) -> None:
    """Print the headers of recipes."""
    from selfspec.recipes import work_of

    for name in names or sorted(MODELS):
        draft_vocab, work = work_of(f"{name}-eagle3")
        print(name, *header(name, draft_vocab, work), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
