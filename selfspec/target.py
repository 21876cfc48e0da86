"""The one door to the Hugging Face model: prefill, tree passes, hidden states of whole texts.

Letters: B rows, P prompt tokens, N tree nodes, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec import hf
from selfspec.cache import SlotCache, Slots
from selfspec.draft import Needs
from selfspec.draft_pass import DraftPasses, resume
from selfspec.errors import UnsupportedGeneration, UnsupportedModel
from selfspec.few_rows import INSTALLING, FewRowsLayers
from selfspec.masks import as_attention_mask, block_diagonal, tree_positions, visible, visible_again, visible_line
from selfspec.output_head import FewRowsHead, same_product
from selfspec.support import refuse_unsupported, takes_positions, why_chain_only
from selfspec.taps import Taps
from selfspec.target_output import TargetOutput, Unscored, joined
from selfspec.target_parts import TargetParts
from selfspec.tree import Computed, DraftTree, TreeShape
from selfspec.versions import check_version
from selfspec.wrapped import is_compiled

_PROBE = (8, 64)


class Target(TargetParts):
    """A decoder-only transformers model, unchanged, with what drafting and verifying need of it.

    Args:
        model: any model with a causal language-model head whose layers can be rolled back.

    `chain_only` says why the model can follow nothing wider than a chain of guesses of one row; None when it can.

    Raises:
        UnsupportedModel: the model has a part that cannot be served exactly; the message names it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_version()
        refuse_unsupported(model)
        super().__init__(model)
        self.windows = hf.layer_windows(self.config)
        self.states = hf.layer_states(self.config)
        self._takes_positions = takes_positions(model)
        self.chain_only = why_chain_only(model)
        self.mask_kinds = {} if self.chain_only else hf.mask_kinds(self.config, self.windows)
        self._trims_logits = hf.supports_logits_to_keep(model)
        self._taps = Taps(model)
        self._few_rows: FewRowsHead | None = None
        self._layers: FewRowsLayers | None = None
        self._passes: DraftPasses | None = None
        self.known_fingerprint: str | None = None
        """Kept where the weights are spread over processes, because all of them must take part in making it."""

    def hidden_scale(self, generator: torch.Generator | None = None) -> Tensor:
        """`[D]` float32: the size of each channel of the last hidden state (root mean square over random tokens).

        Channels differ a hundredfold, and no weight of the model says how; heads that start with the right scales
        learn several times faster.
        """
        tokens = torch.randint(self.vocab_size, _PROBE, generator=generator).to(self.device)
        hidden = self.features(tokens, None, Needs(hidden=True)).hidden
        assert hidden is not None
        return hidden[:, 1:].float().flatten(0, 1).pow(2).mean(0).sqrt()

    def begin(self) -> None:
        """A text begins: what it uses that was derived from weights which have changed since is made anew."""
        if self._few_rows is not None:
            self._few_rows.begin()

    @property
    def _tree_head(self) -> FewRowsHead | None:
        """What `verify` makes logits with; None where the model makes them itself."""
        return None if self.chain_only else self._head_for_few_rows()

    @property
    def screens(self) -> bool:
        """Whether the likeliest tokens may be had without all logits, see `TargetOutput.likeliest`."""
        head = self._tree_head
        return head is not None and head.screens

    @property
    def draws(self) -> bool:
        """Whether tokens may be drawn without all logits, see `TargetOutput.screened`."""
        head = self._tree_head
        return head is not None and head.draws

    def screen(self, text: Sequence[int] = ()) -> None:
        """Do so from now on, where it is faster, and not only once a text is long enough to pay for it.

        Args:
            text: tokens to prepare with at once; without them the next pass does it.
        """
        head = self._tree_head
        if head is not None:
            head.prepare()
        if text and head is not None and head.draws:
            tokens = torch.tensor([list(text[: _PROBE[1]])], device=self.device)
            hidden = self.features(tokens, None, Needs(hidden=True)).hidden
            assert hidden is not None
            head.screened(hidden)

    def new_cache(self, batch: int, capacity: int) -> SlotCache:
        """An empty cache for `batch` rows with `capacity` slots allocated ahead."""
        if batch > 1 and self.chain_only:
            raise UnsupportedGeneration(f"{batch} rows at once: {self.chain_only}; give one prompt at a time")
        return SlotCache(self.windows, batch, capacity, self.device, self.states)

    def prefill(
        self,
        tokens: Tensor,
        counts: list[int],
        cache: SlotCache,
        needs: Needs,
        *,
        embeds: Tensor | None = None,
        chunk: int | None = None,
    ) -> TargetOutput:
        """Read prompts behind what the cache holds (nothing, as a rule) and commit them.

        Args:
            tokens: `[B, P]` int64, each row padded on the right. Causality hides the padding from real tokens.
            counts: real tokens of each row; rows with 0 are left alone.
            cache: whose rows go on.
            needs: which hidden states to return.
            embeds: `[B, P, D]`, read instead of the tokens.
            chunk: read so many tokens in one pass, to save memory; None reads all at once.
        """
        step = chunk or tokens.shape[1]
        parts, last = [], []
        for start in range(0, tokens.shape[1], step):
            part = tokens[:, start : start + step]
            here = [min(max(count - start, 0), part.shape[1]) for count in counts]
            read = None if embeds is None else embeds[:, start : start + step]
            parts.append(self._read(part, here, cache, needs, read))
            last.append([start < count <= start + step for count in counts])
        return parts[0] if len(parts) == 1 else joined(parts, torch.tensor(last, device=tokens.device))

    def _read(
        self, tokens: Tensor, counts: list[int], cache: SlotCache, needs: Needs, embeds: Tensor | None
    ) -> TargetOutput:
        positions, mask = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), None
        if max(cache.lengths):
            slots = cache.slots
            positions = slots.index(tokens.shape[1])
            if not self.chain_only:  # their own causal masks are right for one row
                mask = self.masks(lambda window: visible_line(tokens.shape[1], slots, window))
        last: int | Tensor = 1
        if min(counts) != tokens.shape[1]:
            last = (torch.tensor(counts, device=tokens.device).unsqueeze(1) - 1).clamp_min(0)
        output = self._forward(tokens, cache, mask, positions, last, needs, embeds)
        cache.commit(counts)
        return output

    def masks(self, seen: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
        """What `forward` takes as mask: one, or one per layer type; `seen` gives the slots seen under a window."""
        masks = {
            kind: as_attention_mask(seen(window), self.attention, self.dtype)
            for kind, window in self.mask_kinds.items()
        }
        return masks[None] if None in masks else {str(kind): mask for kind, mask in masks.items()}

    def verify(self, tree: DraftTree, cache: SlotCache, needs: Needs, written: int = 0) -> TargetOutput:
        """One pass over the nodes of a tree. They stay uncommitted until `cache.keep`.

        Args:
            tree: N nodes.
            cache: holds what was committed.
            needs: which hidden states to return.
            written: how many nodes earlier passes over the same tree have read since the last commit; this pass reads
                the others, and its output is about them.
        """
        if self.chain_only:
            return self._verify_chain(tree, cache, needs)
        slots = cache.slots
        mask: Tensor | dict[str, Tensor] | None = None
        if tree.nodes > 1 or not slots.uniform:
            mask = self.tree_mask(tree.shape, slots, tree.nodes - written)
        tokens = tree.tokens[:, written:]
        positions = tree_positions(tree.shape, slots)[:, written:].expand_as(tokens)
        head = self._head_for_few_rows()
        computed = self._finish(tree, cache, needs)
        if head is None:
            with resume(computed), cache.drafting(written), self.few_rows():
                return self._forward(tokens, cache, mask, positions, 0, needs)
        with self._taps.listen(needs) as tap, resume(computed), cache.drafting(written), self.few_rows():
            hidden = self._last_hidden(tokens, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)
        layers = tuple(tap.layers[k] for k in needs.layers)
        return TargetOutput(Unscored(hidden, head, self.finish_logits), hidden if needs.hidden else None, layers)

    def few_rows(self) -> AbstractContextManager[None]:
        """Passes in this block are over few tokens and may use faster forms of the same products."""
        with INSTALLING:
            if self._layers is None:
                self._layers = FewRowsLayers([] if is_compiled(self.model) else hf.decoder_of(self.model).modules())
            return self._layers.used()

    def _finish(self, tree: DraftTree, cache: SlotCache, needs: Needs) -> Computed | None:
        """What the draft has computed of the tree, for all nodes; None when it must be computed in full."""
        if tree.computed is None or any(layer < tree.computed.layer for layer in needs.layers):
            return None
        return self.passes.finish(tree.shape, tree.tokens, cache, tree.computed)

    def tree_mask(self, shape: TreeShape, slots: Slots, new: int) -> Tensor | dict[str, Tensor]:
        """What `forward` takes as attention mask for the last `new` nodes of a tree, `[B or 1, 1, new, S]` each."""
        return self.masks(lambda window: visible(shape, slots, window)[:, -new:])

    def reading_mask(self, count: int, slots: Slots) -> Tensor | dict[str, Tensor]:
        """The same for the last `count` committed tokens, read anew (see `masks.visible_again`)."""
        return self.masks(lambda window: visible_again(count, slots, window))

    @property
    def passes(self) -> DraftPasses:
        """Cheap passes of this model, for drafts; the first use wraps parts of it, `release` unwraps them."""
        if self.chain_only:
            raise UnsupportedModel(f"drafts made of the target's own layers need trees: {self.chain_only}")
        if self._passes is None:
            self._passes = DraftPasses(self)
        return self._passes

    def _verify_chain(self, tree: DraftTree, cache: SlotCache, needs: Needs) -> TargetOutput:
        """The same for a chain of one row, under the model's own causal mask."""
        if not tree.shape.is_chain:
            raise UnsupportedGeneration(f"a tree of guesses: {self.chain_only}; cut it with DraftTree.trunk()")
        tokens = tree.tokens
        if cache.record is not None:
            pending = torch.tensor([cache.record.pending], dtype=torch.long, device=tokens.device)
            cache.record.start(tree.token_lists[0])
            tokens = torch.cat([pending, tokens], 1)
        first = cache.slots.lengths[0]
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device).unsqueeze(0)
        output = self._forward(tokens, cache, None, positions, tree.nodes, needs)
        hidden = None if output.hidden is None else output.hidden[:, -tree.nodes :]
        return TargetOutput(output.logits, hidden, tuple(layer[:, -tree.nodes :] for layer in output.layers))

    def _last_hidden(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        output = hf.decoder_of(self.model)(input_ids=tokens, return_dict=True, **kwargs)
        hidden: Tensor = output.last_hidden_state
        return hidden

    @torch.no_grad()
    def _head_for_few_rows(self) -> FewRowsHead | None:
        """A faster output head, where there is one and it gives the model's own logits."""
        weight = self.output_weight()
        if not FewRowsHead.applies(weight) or not self._calls_nothing_else():
            return None
        bias = getattr(self._output_head(), "bias", None)
        if self._few_rows is None or self._few_rows.weight is not weight or self._few_rows.bias is not bias:
            assert weight is not None
            head = FewRowsHead(weight, bias, screened=self.keeps_order)
            probe = torch.zeros(1, 1, dtype=torch.long)
            wanted = self.model(input_ids=probe, use_cache=False).logits
            hidden = self._last_hidden(probe, use_cache=False)
            if hidden.shape[-1] == weight.shape[-1]:  # some models have a layer between the two
                head.trusted = same_product(self.finish_logits(head(hidden)), wanted)
            self._few_rows = head
        return self._few_rows if self._few_rows.trusted else None

    def _calls_nothing_else(self) -> bool:
        """Whether the output head is a plain product: no adapter, no hook, no replaced `forward` on it or the model."""
        head = self._output_head()
        hooked = any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in (head, self.model))
        return type(head) is nn.Linear and not hooked

    def features(
        self, tokens: Tensor, attention_mask: Tensor | None, needs: Needs, blocks: Sequence[int] | None = None
    ) -> TargetOutput:
        """Hidden states of whole sequences, without cache and without logits: what heads are trained on.

        Args:
            tokens: `[B, P]` int64, padded on the right.
            attention_mask: `[B, P]`, 1 for real tokens; None when all are.
            needs: which hidden states to return.
            blocks: lengths of independent texts that follow each other in one row of tokens; they do not see each
                other, and each begins at position 0. Not for targets that are `chain_only`.
        """
        options: dict[str, Any] = {"attention_mask": attention_mask}
        if blocks is not None:
            options["attention_mask"] = self.masks(lambda window: block_diagonal(blocks, window, tokens.device))
            options["position_ids"] = (
                torch.cat([torch.arange(count) for count in blocks]).to(tokens.device).unsqueeze(0)
            )
        with self._taps.listen(needs) as tap, torch.no_grad():
            hidden = self._last_hidden(tokens, use_cache=False, **options)
        return TargetOutput(
            tokens.new_empty(0), hidden if needs.hidden else None, tuple(tap.layers[k] for k in needs.layers)
        )

    def _forward(
        self,
        tokens: Tensor,
        cache: SlotCache,
        mask: Tensor | dict[str, Tensor] | None,
        positions: Tensor,
        last: int | Tensor,
        needs: Needs,
        embeds: Tensor | None = None,
    ) -> TargetOutput:
        given = {"input_ids": tokens} if embeds is None else {"inputs_embeds": embeds}
        options: dict[str, Any] = {"logits_to_keep": last} if self._trims_logits else {}
        if self._takes_positions:
            options["position_ids"] = positions
        with self._taps.listen(needs) as tap:
            output = self.model(
                **given,
                attention_mask=mask,
                cache=cache,
                use_cache=True,
                return_dict=True,
                **options,
            )
        logits = output.logits
        if not self._trims_logits and not (isinstance(last, int) and last == 0):
            where = slice(-last, None) if isinstance(last, int) else last.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
            logits = logits[:, where] if isinstance(where, slice) else logits.gather(1, where)
        return TargetOutput(logits, tap.hidden, tuple(tap.layers[k] for k in needs.layers))

    def release(self) -> None:
        """Take the hooks off the model again."""
        self._taps.release()
        if self._layers is not None:
            self._layers.release()
            self._layers = None
        if self._passes is not None:
            self._passes.release()
            self._passes = None
