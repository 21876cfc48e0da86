"""DFlash: a whole block of guesses in one pass, with DDTree's best-first trees.

Chen et al. 2026, "DFlash" (arXiv 2602.06036). Trees from the block's marginals: see `heads/best_first.py`.

Letters: B rows, T places, A anchors, S slots of a block, K = S - 1 guesses, D hidden size, Q draft vocabulary,
C ranks considered, N tree nodes.
The context is one vector per committed token, `norm(fc([h_1; ..; h_n]))` of the tapped layers. A block is the newest
committed token (not in the context yet) followed by S - 1 mask tokens, at the positions behind the context. In every
layer the context enters as keys and values only, before those of the block; all slots of a block see each other. Slot
j >= 1 says what the token at its own position may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.cache import SlotCache
from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified
from selfspec.head import DraftHead, HeadLoss
from selfspec.heads.anchors import Anchors, choose_anchors
from selfspec.heads.best_first import likeliest_tree
from selfspec.heads.context_layers import ContextLayer
from selfspec.heads.dflash_config import DFlashConfig, check, fill_from_target, layer_shape
from selfspec.heads.layers import RMSNorm, StepStore, draw_weights
from selfspec.heads.losses import HeadScore, Teacher, denominator, learn, taught_places, teach_at
from selfspec.heads.rotary import Rotary
from selfspec.registry import register
from selfspec.target import Target
from selfspec.tree import DraftTree, Drawn, TreeShape

_ROOM = 512
_PROBE = (8, 64)


@dataclass(eq=False)
class BlockState(DraftState):
    """Keys and values of the context, one entry per committed token but the newest, which is `root` `[B]`."""

    cache: SlotCache
    root: Tensor

    def select(self, rows: Tensor) -> BlockState:
        """The state of some rows."""
        self.cache.select(rows.tolist())
        return BlockState(self.cache, self.root[rows])

    @property
    def joins(self) -> bool:
        """See `DraftState.joins`."""
        return True

    def join(self, other: BlockState) -> BlockState:
        """See `DraftState.join`."""
        self.cache.join(other.cache)
        return BlockState(self.cache, torch.cat([self.root, other.root]))


@register("dflash")
class DFlash(DraftHead):
    """A few decoder layers over a block of masks, and the target's output head on the draft vocabulary."""

    config_class = DFlashConfig
    config: DFlashConfig

    def __init__(self, config: DFlashConfig, target: Target) -> None:
        super().__init__(config, target)
        fill_from_target(config, target)
        check(config, target)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(ContextLayer(layer_shape(config)) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, eps)

    @property
    def needs(self) -> Needs:
        """The tapped layers, and the last hidden state, from which training takes the teacher."""
        return Needs(hidden=True, layers=tuple(self.config.taps))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Normal weights of deviation 0.02, with every channel at the size it has in the target.

        Channels of tapped layers differ a hundredfold; `fc` undoes that, and the last norm restores the sizes that the
        target's output head is used to.
        """
        draw_weights(self, generator)
        tokens = torch.randint(self.target.vocab_size, _PROBE, generator=generator).to(self.target.device)
        read = self.target.features(tokens, None, self.needs)
        assert read.hidden is not None
        with torch.no_grad():
            sizes = torch.cat([_sizes(layer) for layer in read.layers]).to(self.fc.weight)
            nn.init.normal_(self.fc.weight, std=self.fc.in_features**-0.5, generator=generator)
            self.fc.weight.div_(sizes)
            self.norm.weight.copy_(_sizes(read.hidden))

    # What decoding and training share

    def _context(self, layers: Sequence[Tensor]) -> Tensor:
        """Tapped layers, `[B, T, D]` each, to the context `[B, T, D]`."""
        weight = self.fc.weight  # layers of a spread-out target may be on other devices
        return self.hidden_norm(self.fc(torch.cat([layer.to(weight) for layer in layers], -1)))

    def _read(self, context: Tensor, positions: Tensor, stores: Sequence[Any]) -> None:
        """Put the context's keys and values into one `KeyStore` per layer."""
        turn = self.rotary(positions)
        for layer, store in zip(self.layers, stores, strict=True):
            assert isinstance(layer, ContextLayer)
            layer.read(context, turn, store)

    def _blocks(self, roots: Tensor, positions: Tensor, mask: Tensor, stores: Sequence[Any]) -> Tensor:
        """What the slots of blocks say, `[B, A * S, D]`.

        Args:
            roots: `[B, A]`, the token that each block starts with.
            positions: `[B, A * S]`.
            mask: `[B or 1, 1, A * S, places in the stores + A * S]` bool.
            stores: the context, one `KeyStore` per layer.
        """
        tokens = roots.unsqueeze(-1).repeat(1, 1, positions.shape[1] // roots.shape[1])
        tokens[..., 1:] = self.config.mask_token_id
        x = self.target.embed(tokens.flatten(1)).detach().to(self.fc.weight)
        turn = self.rotary(positions)
        for layer, store in zip(self.layers, stores, strict=True):
            x = layer(x, turn, mask, store)
        return self.norm(x)

    # Decoding

    @torch.no_grad()
    def begin(self, verified: Verified) -> BlockState:
        """Read the prompt."""
        batch, places = verified.tokens.shape
        cache = SlotCache([None] * self.config.num_layers, batch, places + _ROOM, verified.tokens.device)
        return self.observe(BlockState(cache, verified.root), verified)

    @torch.no_grad()
    def observe(self, state: BlockState, verified: Verified) -> BlockState:
        """Read the accepted tokens' features; those of the block itself were never kept."""
        positions = state.cache.slots.index(verified.tokens.shape[1])
        self._read(self._context(verified.layers), positions, state.cache.layers)
        state.cache.commit(verified.count_list)
        return BlockState(state.cache, verified.root)

    def _draft(self, state: BlockState, depth: int) -> Tensor:
        """What the first guessing slots say, `[B, depth, D]`; a causal block is run no further than that."""
        slots = state.cache.slots
        size = depth + 1 if self.config.causal else self.config.block_size
        positions = slots.index(size)
        _, end = slots.view(None, size)
        last = positions if self.config.causal else positions[:, -1:]
        mask = (torch.arange(end, device=positions.device) <= last.unsqueeze(-1)).unsqueeze(1)
        said = self._blocks(state.root.unsqueeze(1), positions, mask.expand(-1, -1, size, -1), state.cache.layers)
        return said[:, 1 : depth + 1]

    @torch.no_grad()
    def propose(
        self, state: BlockState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """The best tree under the budget from one pass over the block, or a drawn chain."""
        guesses = budget.guesses(self.config.tree_nodes)
        depth = min(self._depths, budget.depth, guesses)
        if depth < 1:
            return DraftTree.root_only(state.root)
        said = self._draft(state, depth)
        if sampling.do_sample and self.config.draw:
            return self._drawn(state.root, said, sampling, generator)
        return self._chosen(state.root, said, guesses)

    def _chosen(self, root: Tensor, said: Tensor, guesses: int) -> DraftTree:
        return likeliest_tree(root, self.output(said), self.output.vocab, self.config.tree_top_k, guesses)

    def _drawn(self, root: Tensor, said: Tensor, sampling: Sampling, generator: torch.Generator | None) -> DraftTree:
        """A chain; depth j is drawn from its own marginal, whatever was drawn before."""
        q = sampling.probs(self.output(said))
        columns = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(q.shape[:2])
        return self._chain(root, columns, q)

    def _chain(self, root: Tensor, columns: Tensor, q: Tensor) -> DraftTree:
        """Tokens `[B, K]` (draft columns) drawn from `[B, K, Q]`, one after the other."""
        vocab = self.output.vocab
        probs = torch.cat([q, torch.zeros_like(q[:, :1])], 1)
        tokens = torch.cat([root.unsqueeze(1), vocab.to_target(columns)], 1)
        return DraftTree(tokens, TreeShape.chain(columns.shape[1], tokens.device), Drawn(probs, token_ids=vocab.ids))

    # Training

    def loss(self, verified: Verified, mask: Tensor, items: Tensor | None = None) -> HeadLoss:
        """The configured loss over the slots of many blocks, later slots counting less.

        It estimates the sum over all anchors, however many were chosen. The teacher of slot j is the target at the
        place before, given a token of the draft vocabulary. `correct` counts where a slot's first choice is the
        teacher's first choice.
        """
        assert verified.hidden is not None
        row, column = taught_places(verified, mask)
        taught = torch.full_like(verified.tokens, -1)
        taught[row, column] = torch.arange(row.numel(), device=row.device)
        teacher = teach_at(self.output, verified, row, column, self.config.teacher_top_k)
        anchors = choose_anchors(verified, taught >= 0, self._depths, self.config.anchors, self.hidden_norm.weight)
        said = self._train_blocks(verified, anchors)
        loss, correct, seen = said.new_zeros((), dtype=torch.float32), [], []
        for depth in range(1, self.config.block_size):
            place = anchors.places + depth - 1
            inside = (place < mask.shape[1]) & (anchors.weight > 0)
            lesson = taught.gather(1, place.clamp_max(mask.shape[1] - 1)).where(inside, -1)
            b, a = (lesson >= 0).nonzero(as_tuple=True)
            weight = anchors.weight[b, a]
            before = verified.next_tokens[b, place[b, a] - 1]
            score = self._learn(said[b, a, depth], before, depth, teacher.pick(lesson[b, a]), weight)
            loss = loss + self._weight(depth) * score.loss
            correct.append(score.correct)
            seen.append(weight.sum())
        counts = torch.stack(seen)
        return HeadLoss(loss / denominator(counts[0], items), torch.stack(correct), counts)

    @property
    def _depths(self) -> int:
        return self.config.block_size - 1

    def _weight(self, depth: int) -> float:
        decay = self.config.position_decay
        return math.exp(-(2 / self.config.block_size if decay < 0 else decay) * (depth - 1))

    def _train_blocks(self, verified: Verified, anchors: Anchors) -> Tensor:
        """What the slots of all blocks say, `[B, A, S, D]`."""
        places, slots = verified.tokens.shape[1], self.config.block_size
        stores = [StepStore() for _ in self.layers]
        line = torch.arange(places, device=verified.tokens.device).unsqueeze(0)
        self._read(self._context(verified.layers), line, stores)
        roots = verified.next_tokens.gather(1, anchors.places - 1)
        mask = anchors.mask(places, slots, self.config.causal)
        said = self._blocks(roots, anchors.positions(slots), mask, stores)
        return said.unflatten(1, (-1, slots))

    def _learn(self, said: Tensor, before: Tensor, depth: int, teacher: Teacher, weight: Tensor) -> HeadScore:
        """Compare slots with their teacher.

        Args:
            said: `[P, D]`, output of slots at `depth`.
            before: `[P]`, the text's token at the slot before.
            depth: from 1.
            teacher: at the same places.
            weight: `[P]` float32, how much each counts.
        """
        return learn(self.output, said, teacher, weight, self.config)


def _sizes(features: Tensor) -> Tensor:
    """`[D]` float32, the root mean square of each channel; none is taken for smaller than a thousandth of the mean."""
    sizes = features[:, 1:].float().flatten(0, 1).pow(2).mean(0).sqrt()
    return sizes.clamp_min(1e-3 * float(sizes.mean()))
