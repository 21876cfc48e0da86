"""Reading hidden states in the middle of a model's pass.

Hooks stay in place; a context variable says who listens, so concurrent passes do not mix. Letters: B rows, N tokens, D
hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec import hf
from selfspec.draft import Needs
from selfspec.errors import UnsupportedModel


@dataclass
class Tap:
    """Hidden states `[B, N, D]` caught during one pass: after the final norm, and what goes into some layers."""

    owner: Taps
    hidden: Tensor | None = None
    layers: dict[int, Tensor] = field(default_factory=dict)


_TAP: ContextVar[Tap | None] = ContextVar("selfspec_tap", default=None)


class Taps:
    """The hooks of one target on its model.

    Args:
        model: gets a hook now, and one more for each layer that is listened to.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._handles: list[Any] = [hf.decoder_of(model).register_forward_hook(self._catch_hidden)]
        self._tapped: set[int] = set()

    @contextmanager
    def listen(self, needs: Needs) -> Iterator[Tap]:
        """Passes in this block leave what is needed in the tap that is given."""
        for layer in needs.layers:
            self._watch(layer)
        tap = Tap(self)
        if not needs.hidden and not needs.layers:
            yield tap
            return
        token = _TAP.set(tap)
        try:
            yield tap
        finally:
            _TAP.reset(token)
            if not needs.hidden:
                tap.hidden = None

    def _catch_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        tap = _TAP.get()
        if tap is not None and tap.owner is self:
            tap.hidden = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]

    def _watch(self, layer: int) -> None:
        if layer in self._tapped:
            return
        blocks = hf.blocks_of(self._model)
        if not 0 <= layer < len(blocks):
            raise UnsupportedModel(f"layer {layer} to read from is not in 0..{len(blocks) - 1} of this target")
        catch = partial(self._catch_layer, layer)
        self._handles.append(blocks[layer].register_forward_pre_hook(catch, with_kwargs=True))
        self._tapped.add(layer)

    def _catch_layer(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap = _TAP.get()
        if tap is not None and tap.owner is self:
            tap.layers[layer] = args[0] if args else kwargs["hidden_states"]

    def release(self) -> None:
        """Take the hooks off the model again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._tapped.clear()
