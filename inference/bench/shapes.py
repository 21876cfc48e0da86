"""Random models of real shapes with a draft whose acceptance is set beforehand, to measure the engine without weights.

The cost of a pass hangs on the shape of a model, not on what its weights say. The draft reads off the target's own
greedy text, written down before, and errs at a set rate; it costs next to nothing. What is left is the engine.

Letters: B rows, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.host import on_device
from selfspec.inference.plain import decode_plain
from selfspec.inference.runs import prepare
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "hidden": 64, "inner": 128, "heads": 4, "kv_heads": 2, "vocab": 512},
    "1B": {"layers": 16, "hidden": 2048, "inner": 8192, "heads": 32, "kv_heads": 8, "vocab": 128_256},
    "8B": {"layers": 32, "hidden": 4096, "inner": 14_336, "heads": 32, "kv_heads": 8, "vocab": 128_256},
    "70B": {"layers": 80, "hidden": 8192, "inner": 28_672, "heads": 64, "kv_heads": 8, "vocab": 128_256},
}
"""Those of Llama 3, by the number of their weights, and one for tests."""


def random_model(shape: str, dtype: torch.dtype, device: str | torch.device, seed: int = 0) -> PreTrainedModel:
    """A Llama of this shape with random weights, made on the device; it never ends a text by itself.

    Raises:
        ConfigError: no such shape.
    """
    if shape not in SHAPES:
        raise ConfigError(f"no shape is called {shape!r}; use one of {', '.join(SHAPES)}")
    size = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=shape in ("1B", "tiny"),
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    config._name_or_path = f"random-{shape}"
    where = torch.device(device)
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []), where:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def rate_for(tokens_per_round: float, depth: int) -> float:
    """The chance of each guess of a chain to be right that gives so many tokens per round: 1 + a + a^2 + .. + a^depth.

    Raises:
        ConfigError: more than the chain could give, or less than 1.
    """
    if not 1 <= tokens_per_round <= depth + 1:
        raise ConfigError(f"a chain of {depth} guesses gives 1 to {depth + 1} tokens per round, not {tokens_per_round}")

    def excess(rate: float) -> float:
        return sum(rate**d for d in range(depth + 1)) - tokens_per_round

    return 0.0 if tokens_per_round == 1 else 1.0 if tokens_per_round == depth + 1 else float(brentq(excess, 0.0, 1.0))


@dataclass(eq=False)
class ScriptState(DraftState):
    """Per row its script, how many of its tokens are committed (-1 once the text has left it), and the newest token."""

    scripts: list[int]
    places: list[int]
    roots: list[int]
    device: torch.device

    def select(self, rows: Tensor) -> ScriptState:
        """Some rows."""
        kept = rows.tolist()
        scripts, places, roots = ([part[row] for row in kept] for part in (self.scripts, self.places, self.roots))
        return ScriptState(scripts, places, roots, self.device)


class ScriptedDraft:
    """Guesses a chain from texts written down before, each guess wrong with a set chance.

    Args:
        texts: prompts with their greedy continuations.
        depth: guesses per round.
        rate: chance of a guess to be right; see `rate_for`.
        vocab_size: V.
        seed: of the errors, which belong to places of the texts and are the same in every run.
    """

    kind = "scripted"
    needs = Needs()

    def __init__(self, texts: Sequence[Sequence[int]], depth: int, rate: float, vocab_size: int, seed: int = 0) -> None:
        self.texts = [list(text) for text in texts]
        self.depth = depth
        generator = torch.Generator().manual_seed(seed)
        self.guesses: list[list[int]] = []
        for text in self.texts:
            wrong = (torch.rand(len(text), generator=generator) >= rate).tolist()
            self.guesses.append([(t + 1) % vocab_size if w else t for t, w in zip(text, wrong, strict=True)])

    def begin(self, verified: Verified) -> ScriptState:
        """Find each row's script."""
        scripts, places = [], []
        roots = verified.root.tolist()
        for tokens, root, count in zip(verified.tokens.tolist(), roots, verified.count_list, strict=True):
            read = [*tokens[:count], root]
            found = next((i for i, text in enumerate(self.texts) if text[: len(read)] == read), None)
            scripts.append(0 if found is None else found)
            places.append(-1 if found is None else len(read))
        return ScriptState(scripts, places, roots, verified.tokens.device)

    def propose(
        self, state: ScriptState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """The next guesses of every script, as one chain."""
        depth = min(self.depth, budget.depth, (budget.nodes or self.depth + 1) - 1)
        rows = []
        for script, place, root in zip(state.scripts, state.places, state.roots, strict=True):
            ahead = self.guesses[script][place : place + depth] if place >= 0 else []
            rows.append([root, *ahead, *[0] * (depth - len(ahead))])
        return DraftTree(on_device(rows, state.device), TreeShape.chain(depth, state.device))

    def observe(self, state: ScriptState, verified: Verified) -> ScriptState:
        """Move on, and leave the script where the text does (a near-tie in low precision)."""
        read = zip(verified.next_lists, verified.count_list, strict=True)
        for row, (tokens, count) in enumerate(read):
            script, place = self.texts[state.scripts[row]], state.places[row]
            state.roots[row] = tokens[count - 1]
            if place >= 0:
                state.places[row] = place + count if script[place : place + count] == tokens[:count] else -1
        return state


def scripted_texts(target: Target, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Greedy texts of the target, by plain decoding, one prompt at a time."""
    arguments = {"do_sample": False, "max_new_tokens": new_tokens}
    requests = [prepare(target, list(prompt), arguments) for prompt in prompts]
    return [decode_plain(target, request).sequences[0].tolist() for request in requests]
