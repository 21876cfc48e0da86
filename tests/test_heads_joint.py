"""Drafts made of drafts: the text stays the target's, budgets are shared, every part sees what it asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import oracle
import pytest
import tiny
import tiny_folder
import torch
from scipy.stats import chisquare
from test_accept import FALSE_ALARM, SAMPLING, _first_tokens_of, _Force, _merged
from torch import Tensor
from transformers import LogitsProcessorList

import selfspec
from selfspec.checkpoint import save_head
from selfspec.draft import Budget, Needs, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.compose import Compose
from selfspec.heads.draft_model import DraftModel
from selfspec.heads.lookup import Lookup
from selfspec.heads.medusa import Medusa, MedusaConfig
from selfspec.heads.spec_infer import SpecInfer
from selfspec.target import Target
from selfspec.tree import DraftTree, Drawn, TreeShape

torch.set_num_threads(1)


def prompts() -> tuple[Tensor, Tensor]:
    loop = tiny.text(1, 6)[0].tolist() * 4
    return oracle.left_padded([loop, tiny.text(1, 5, seed=2)[0].tolist(), tiny.text(1, 13, seed=3)[0].tolist()])


@pytest.mark.parametrize("name", tiny.NAMES)
def test_lookup_beside_heads_beside_a_model_writes_what_the_target_writes(name: str) -> None:
    model = tiny.model(name)
    ids, mask = prompts()
    wanted = oracle.plain(model, ids, attention_mask=mask, max_new_tokens=16)
    medusa = Medusa.from_target(MedusaConfig(num_heads=2), Target(model), torch.Generator().manual_seed(0))
    parts = [Lookup(), medusa, DraftModel.from_model(tiny.model(name, seed=5), depth=2, nodes=4)]
    with oracle.patched(model, Compose(parts)):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=16), wanted)
        assert model.speculation.report()["draft"] == "compose(lookup,medusa,draft-model)"
        model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=True)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_several_models_write_what_the_target_writes(name: str) -> None:
    model = tiny.model(name)
    ids, mask = prompts()
    wanted = oracle.plain(model, ids, attention_mask=mask, max_new_tokens=13)
    models = [DraftModel.from_model(tiny.model(name, seed=seed), depth=3, top_k=1) for seed in (5, 0)]
    with oracle.patched(model, SpecInfer(models)):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=13), wanted)
        assert model.speculation.report()["tokens_per_round"] == 4.0  # one of them is the target itself


def test_sampled_text_of_three_models_passes_a_chi_square_test() -> None:
    model = tiny.model("llama", seed=4)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.35)
    smalls = [tiny.model("llama", seed=seed) for seed in (4, 8, 9)]
    for small in smalls:
        with torch.no_grad():
            small.lm_head.weight.mul_(0.3)
    draft = SpecInfer(
        [DraftModel.from_model(s, depth=2, nodes=4, top_k=k) for s, k in zip(smalls, (2, 1, 2), strict=True)]
    )
    prompt, samples = tiny.text(1, 5, seed=9), 500
    start = oracle.plain(model, prompt, max_new_tokens=1)
    wanted = _first_tokens_of(model, start)
    force = LogitsProcessorList([_Force(prompt.shape[1], int(start[0, -1]))])
    with oracle.patched(model, draft):
        torch.manual_seed(12)
        rows = model.generate(
            prompt, max_new_tokens=4, num_return_sequences=samples, logits_processor=force, **SAMPLING
        )
        assert model.speculation.last.accepted > 100
    counts = dict.fromkeys(wanted, 0)
    for row in rows[:, prompt.shape[1] + 1 :][:, :2].tolist():
        counts[tuple(row)] += 1  # a KeyError is a token of probability 0
    seen, hoped = _merged([counts[k] for k in wanted], [samples * wanted[k] for k in wanted])
    assert chisquare(seen, hoped).pvalue > FALSE_ALARM


# What the parts see


@dataclass
class Part(oracle.Scripted):
    """Proposes `size` children of the root and notes what it was given."""

    size: int
    first: int
    needs: Needs = field(default_factory=Needs)
    draws: bool = False
    kind: str = "part"
    budgets: list[Budget] = field(default_factory=list)
    seen: list[Verified] = field(default_factory=list)

    def begin(self, verified: Verified) -> Any:
        self.seen.append(verified)
        return super().begin(verified)

    def observe(self, state: Any, verified: Verified) -> Any:
        self.seen.append(verified)
        return super().observe(state, verified)

    def propose(self, state: Any, budget: Budget, sampling: Sampling, generator: Any) -> DraftTree:
        self.budgets.append(budget)
        size = self.size if budget.nodes is None else min(self.size, budget.nodes - 1)
        batch = len(state.tokens)
        roots = torch.tensor([tokens[-1:] for tokens in state.tokens])
        tokens = torch.cat([roots, torch.arange(self.first, self.first + size).expand(batch, -1)], 1)
        probs = torch.full((batch, size + 1, tiny.VOCAB), 1 / tiny.VOCAB)
        shape = TreeShape(torch.tensor([[-1] + [0] * size]))
        return DraftTree(tokens, shape, Drawn(probs, None, False) if self.draws else None)


def verified(batch: int = 1, **more: Any) -> Verified:
    text = tiny.text(batch, 6)
    return Verified(text[:, :-1], text[:, 1:], torch.full((batch,), 5), **more)


def shares(parts: list[Part], nodes: int, **options: Any) -> list[int | None]:
    draft = Compose(parts, **options)
    tree = draft.propose(draft.begin(verified()), Budget(nodes=nodes), Sampling(True), None)
    assert tree.nodes <= nodes
    return [part.budgets[0].nodes for part in parts]


def test_nodes_are_shared_out_by_weight_and_what_is_left_goes_on() -> None:
    assert shares([Part(9, 1), Part(9, 20)], 13) == [7, 7]
    assert shares([Part(9, 1), Part(9, 20)], 13, weights=[1, 3]) == [4, 10]
    assert shares([Part(2, 1), Part(9, 20)], 13) == [7, 11]
    assert shares([Part(0, 1), Part(1, 20), Part(9, 40)], 10) == [4, 5, 9]
    assert shares([Part(9, 1), Part(9, 20)], 1) == [1, 1]


def test_what_a_part_that_draws_leaves_is_not_passed_on() -> None:
    assert shares([Part(2, 1, draws=True), Part(9, 20)], 13) == [7, 7]


def test_every_part_sees_the_features_it_asked_for() -> None:
    parts = [Part(1, 1, Needs(layers=(2,))), Part(1, 2, Needs(hidden=True)), Part(1, 3, Needs(layers=(3, 0)))]
    draft = Compose(parts)
    assert draft.needs == Needs(hidden=True, layers=(0, 2, 3))
    layers = tuple(torch.full((1, 5, 4), float(k)) for k in (0, 2, 3))
    draft.begin(verified(hidden=torch.ones(1, 5, 4), layers=layers))
    assert [p.seen[0].hidden is not None for p in parts] == [False, True, False]
    assert [[int(x[0, 0, 0]) for x in p.seen[0].layers] for p in parts] == [[2], [], [3, 0]]


def test_accepted_nodes_come_back_by_the_numbers_of_the_parts_own_tree() -> None:
    parts = [Part(2, 1), Part(3, 2)]  # tokens 1 2 and 2 3 4
    draft = Compose(parts)
    state = draft.begin(verified())
    tree = draft.propose(state, Budget(), Sampling(), None)
    assert tree.tokens[0, 1:].tolist() == [1, 2, 3, 4]
    root = int(tree.tokens[0, 0])

    def after(node: int) -> list[Any]:
        nodes = torch.tensor([[0, node]])
        path = Verified(torch.tensor([[root, node]]), torch.tensor([[node, 9]]), torch.tensor([2]), nodes=nodes)
        draft.propose(state, Budget(), Sampling(), None)
        draft.observe(state, path)
        return [None if p.seen[-1].nodes is None else p.seen[-1].nodes.tolist() for p in parts]

    assert after(2) == [[[0, 2]], [[0, 1]]]
    assert after(3) == [None, [[0, 2]]]
    assert state.accepted == [1, 1]


def test_lists_and_names_make_combinations(tmp_path: Any) -> None:
    model = tiny.model("llama")
    target = Target(model)
    folder = save_head(Medusa.from_target(MedusaConfig(num_heads=2), target, torch.Generator()), tmp_path / "heads")
    small = tiny_folder.small()
    given = {
        "compose(medusa,lookup)": [[folder, "lookup"], f"compose:{folder},lookup"],
        "compose(lookup,draft-model)": [f"compose:lookup,draft-model:{small}"],
        "spec-infer(draft-model,draft-model)": [
            f"spec-infer:{small},{small}",
            {"kind": "spec-infer", "drafts": [small, {"kind": "draft-model", "model": small}], "nodes": 8},
        ],
    }
    for name, drafts in given.items():
        for draft in drafts:
            with oracle.patched(model, draft):
                assert model.speculation.report()["draft"] == name
                assert model.generate(tiny.text(1, 5), max_new_tokens=4).shape == (1, 9)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ([], "at least one draft"),
        ("compose", "compose:lookup,FOLDER"),
        ("spec-infer:", "spec-infer:FOLDER"),
        ({"kind": "compose", "parts": ["lookup"], "weights": [1, 2]}, "one weight"),
        ({"kind": "compose", "parts": ["lookup"], "nodes": 0}, "no room"),
        (["lookup", "no-such-folder/x/y"], "no-such-folder"),
    ],
    ids=str,
)
def test_impossible_combinations_are_refused(draft: Any, message: str) -> None:
    with pytest.raises((ConfigError, selfspec.errors.CheckpointError), match=message):
        selfspec.patch(tiny.model("llama"), draft)
