"""Cheap passes of the target for drafts: sub-layers left out, an early exit, other weights.

No modelling code is copied: the `forward` of blocks, of their attention and of their MLP is wrapped once (see
`selfspec.switches`). `release` takes the wrappers off again.

Letters: B rows, n new nodes, W nodes written before them, D hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec import hf
from selfspec.cache import SlotCache, SlotLayer
from selfspec.errors import ConfigError, UnsupportedModel
from selfspec.hf import Cache
from selfspec.masks import tree_positions
from selfspec.switches import ATTENTION, BLOCK, MATRIX, MLP, Plan, Running, Switch, running
from selfspec.tree import Computed, TreeShape

if TYPE_CHECKING:
    from selfspec.target import Target

_LOCK = threading.Lock()
_NO_DRIFT = 1e-3


class DraftPasses:
    """The draft passes of one target.

    Args:
        target: any supported target.

    Raises:
        UnsupportedModel: layers with recurrent state, or one block that serves as several layers.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.blocks = hf.blocks_of(target.model)
        self._refuse_unsupported()
        self._switches: dict[int, Switch] = {}
        self._lacking: list[str] = []
        self._drift = 0.0
        for layer, block in enumerate(self.blocks):
            self._wrap(block, BLOCK, layer)
            for part, found in ((ATTENTION, hf.attention_of(block)), (MLP, hf.mlp_of(block))):
                if found is None:
                    self._lacking.append(f"{part} of layer {layer}")
                else:
                    self._wrap(found, part, layer)
        self._probe()

    def _refuse_unsupported(self) -> None:
        kept = (SlotLayer, hf.DummyLayer)
        kinds = {type(layer).__name__ for layer in self.target.new_cache(1, 1).layers if not isinstance(layer, kept)}
        if kinds:
            raise UnsupportedModel(
                f"{self.target.model_type!r} keeps recurrent state ({', '.join(sorted(kinds))}), which a draft pass of "
                "the model itself would overwrite; use another draft"
            )
        if len(set(map(id, self.blocks))) < len(self.blocks):
            raise UnsupportedModel(f"{self.target.model_type!r} uses one block as several layers; none can be left out")

    # Wrappers

    def _wrap(self, module: nn.Module, part: str, layer: int, name: str = "") -> None:
        if id(module) in self._switches:
            return
        with _LOCK:
            switch = vars(module).get("forward")
            if not isinstance(switch, Switch):
                switch = Switch(module, part, layer, name)
                module.forward = switch
            switch.users += 1
        self._switches[id(module)] = switch

    def release(self) -> None:
        """Take the wrappers off the model again."""
        with _LOCK:
            for switch in self._switches.values():
                switch.users -= 1
                if switch.users or vars(switch.module).get("forward") is not switch:
                    continue  # another target needs it, or someone wrapped it since: by itself it does nothing
                if switch.own:
                    switch.module.forward = switch.__wrapped__
                else:
                    del switch.module.forward
            self._switches.clear()

    @torch.no_grad()
    def _probe(self) -> None:
        """Learn from one token what the modules return, and whether a block of which all is left out does nothing."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.target.device)
        handles = [switch.module.register_forward_hook(switch.learn) for switch in self._switches.values()]
        decoder = hf.decoder_of(self.target.model)
        try:
            decoder(input_ids=token, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        layers = frozenset(range(len(self.blocks)))
        with running(Running(Plan(layers, layers), drift=0.0)) as probe:
            decoder(input_ids=token, use_cache=False)
        assert probe.drift is not None
        self._drift = probe.drift

    # Plans

    def check(self, plan: Plan) -> Plan:
        """The plan, when the target can run it; draft methods call this once.

        Raises:
            ConfigError: a layer that the target does not have.
            UnsupportedModel: a part that cannot be left out of this model; the message says why.
        """
        layers = len(self.blocks)
        wrong = sorted(k for k in plan.attention | plan.mlp if not 0 <= k < layers)
        if wrong:
            raise ConfigError(f"layers {wrong} cannot be left out: the target's layers are 0..{layers - 1}")
        if plan.stop is not None and not 0 < plan.stop < layers:
            raise ConfigError(f"an exit after layer {plan.stop} makes no draft; the target has {layers} layers")
        self._refuse_lost_keys(plan)
        if plan.attention != plan.mlp:
            self._refuse_single_parts()
        for name in [*plan.factors, *plan.added]:
            self._wrap(hf.decoder_of(self.target.model).get_submodule(name), MATRIX, -1, name)
        return plan

    def _refuse_lost_keys(self, plan: Plan) -> None:
        borrowing = [k for k, window in enumerate(self.target.windows) if isinstance(window, type)]
        if borrowing and (plan.stop is not None or any(k < borrowing[0] for k in plan.attention)):
            raise UnsupportedModel(
                f"in {self.target.model_type!r} layers {borrowing[0]} and up read the keys of layers below them, so "
                "only the attention of these upper layers can be left out, and there is no early exit"
            )

    def parts_apart(self) -> bool:
        """Whether attention and MLP of a layer can be left out one without the other."""
        return not self._lacking and self._drift <= _NO_DRIFT

    def _refuse_single_parts(self) -> None:
        if self._lacking:
            raise UnsupportedModel(
                f"{self.target.model_type!r} has no module of its own for {self._lacking[0]}; leave out whole layers "
                "(the same layers for attention and MLP)"
            )
        if self._drift > _NO_DRIFT:
            raise UnsupportedModel(
                f"a layer of {self.target.model_type!r} does more than add the output of its attention and its MLP, so "
                "they cannot be left out one by one; leave out whole layers (the same ones for attention and MLP)"
            )

    # Passes

    def run(self, shape: TreeShape, tokens: Tensor, cache: SlotCache, plan: Plan) -> tuple[Tensor, Tensor | None]:
        """Run the last n nodes of a tree; those before them must have been run since the last commit.

        Nothing is committed; keys and values go behind the committed slots, and only to layers that run.

        Args:
            shape: of W + n nodes.
            tokens: `[B, n]` int64, of the last n.
            cache: the target's.
            plan: a checked one.

        Returns:
            The last hidden state `[B, n, D]` after the final norm, and the one at the exit (None without `plan.stop`).
        """
        new = tokens.shape[1]
        mask = self.target.tree_mask(shape, cache.slots, new)
        positions = tree_positions(shape, cache.slots)[:, -new:].expand_as(tokens)
        with cache.drafting(shape.nodes - new), self.target.few_rows():
            return self._forward(tokens, mask, positions, cache, plan)

    def read_again(self, tokens: Tensor, cache: SlotCache, plan: Plan) -> Tensor:
        """Run the last T committed tokens as the plan says, to see how it would have drafted after each of them.

        Args:
            tokens: `[B, T]` int64, the newest tokens in the cache.
            cache: the target's; nothing is committed. Windowed layers do not see beyond their view of the next pass.
            plan: a checked one.

        Returns:
            The last hidden state `[B, T, D]` after the final norm.
        """
        count = tokens.shape[1]
        positions = cache.slots.lengths_tensor().unsqueeze(1) - count + torch.arange(count, device=tokens.device)
        mask = self.target.reading_mask(count, cache.slots)
        return self._forward(tokens, mask, positions, cache, plan)[0]

    def learn(self, tokens: Tensor, mask: Any, positions: Tensor, cache: Cache | None, plan: Plan) -> Tensor:
        """A pass with gradients to what the plan adds; the last hidden state `[B, T, D]` after the final norm.

        Args:
            tokens: `[B, T]` int64.
            mask: what the decoder takes.
            positions: `[B or 1, T]` int64.
            cache: shown to the attention layers as it is; None for a pass over the T tokens alone.
            plan: a checked one.
        """
        with torch.enable_grad():
            return self._pass(tokens, mask, positions, cache, plan)[0]

    def _forward(
        self, tokens: Tensor, mask: Any, positions: Tensor, cache: SlotCache, plan: Plan
    ) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            return self._pass(tokens, mask, positions, cache, plan)

    def _pass(
        self, tokens: Tensor, mask: Any, positions: Tensor, cache: Cache | None, plan: Plan
    ) -> tuple[Tensor, Tensor | None]:
        options = {"position_ids": positions, "cache": cache, "use_cache": cache is not None}
        with running(Running(plan)) as now:
            output = hf.decoder_of(self.target.model)(input_ids=tokens, attention_mask=mask, **options)
        return output.last_hidden_state, now.exit

    def finish(self, shape: TreeShape, tokens: Tensor, cache: SlotCache, computed: Computed) -> Computed:
        """Bring the nodes that the draft has not run to the exit layer, too.

        Args:
            shape: of all N nodes.
            tokens: `[B, N]`.
            cache: the target's.
            computed: of the first M nodes.
        """
        known = computed.hidden.shape[1]
        if known == shape.nodes:
            return computed
        _, rest = self.run(shape, tokens[:, known:], cache, Plan(stop=computed.layer))
        assert rest is not None
        return Computed(computed.layer, torch.cat([computed.hidden, rest], 1))


@contextmanager
def resume(computed: Computed | None) -> Iterator[None]:
    """Passes in this block start from the hidden states at `computed.layer` (all nodes of the pass); None: in full."""
    if computed is None:
        yield
        return
    with running(Running(Plan(), computed)):
        yield
