"""The readable decode loop: one row, one state at a time. It is the specification that the engine is tested against.

Every mode is written as DESIGN section 1 says it, with a plain prefix cache and one extra pass that stores a finished
block. Nothing here is fast. Lossless speculation has, by definition, the result of mode `none`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .generation_config_mrp import DecodingOptions
from .remask_rules import keep_by_confidence, keep_by_cross, keep_by_veto
from .reveal_policies import make_policy, rank_of
from .reveal_rule import MASKED
from .token_statistics import DrawKey, TokenStatistics, raise_if_broken, token_statistics


class PrefixCache:
    """Keys and values of the committed prefix; a pass sees them, and adds its own only while `storing`."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.storing = False

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            key = torch.cat([self.layers[layer][0], key], dim=2)
            value = torch.cat([self.layers[layer][1], value], dim=2)
        if self.storing:
            self.layers[layer] = (key, value)
        return key, value


@dataclass
class ReferenceRow:
    """What the reference loop returns for one row.

    Attributes:
        ids: `[prompt + new]` int64, up to and with the end token.
        reveal_forward, reveal_source: `[prompt + new]` int64, the denoising forward (from 0) and the head step (0 =
            backbone) that revealed each token; -1 at the prompt.
        denoising_forwards, store_forwards, head_passes, taken_back: counters.
    """

    ids: Tensor
    reveal_forward: Tensor
    reveal_source: Tensor
    denoising_forwards: int = 0
    store_forwards: int = 0
    head_passes: int = 0
    taken_back: int = 0
    states: list[Tensor] = field(default_factory=list)


class ReferenceDecoder:
    """Decodes one row under `options`.

    Args:
        model: an `MRPForCausalLM`.
        options: resolved options; `mode` speculative decodes as `none`, which it must equal.
        seed, row: of the sampling noise.
    """

    def __init__(self, model: Any, options: DecodingOptions, seed: int = 0, row: int = 0):
        self.model, self.options = model, options
        self.policy = make_policy(options)
        self.seed, self.row = seed, row
        self.cache, self.head_cache = PrefixCache(), PrefixCache()

    @torch.no_grad()
    def decode(self, prompt: Tensor, max_new_tokens: int) -> ReferenceRow:
        """Decodes `prompt` `[n]`; stops at the first end token or after `max_new_tokens`."""
        length, limit = self.options.block_length, prompt.numel() + max_new_tokens
        blocks = -(-limit // length)
        ids = torch.full((blocks * length,), MASKED, device=prompt.device)
        ids[: prompt.numel()] = prompt
        self.result = ReferenceRow(ids, torch.full_like(ids, -1), torch.full_like(ids, -1))
        self.prompt_length, self.limit = prompt.numel(), limit
        first = prompt.numel() // length
        for block in range(first):
            self._store(block)
        for block in range(first, blocks):
            if self._denoise(block):
                break
            self._store(block)
            self.result.store_forwards += 1
        return self._trimmed()

    def _denoise(self, block: int) -> bool:
        """Reveals one block, step by step; True once the row has ended."""
        length, result = self.options.block_length, self.result
        span = slice(block * length, (block + 1) * length)
        step = 0
        while bool((result.ids[span] == MASKED).any()):
            ids = result.ids[span]
            result.states.append(ids.clone())
            hidden = self._backbone(ids, span.start)
            logits = self.model.lm_head(hidden)
            statistics = self._statistics(logits, span.start, step)
            revealed = self.policy.select(statistics.choice, ids == MASKED, torch.tensor(step, device=ids.device))
            if self.options.mode == "remask":
                kept = self._remask(ids, revealed, statistics, logits, hidden, span.start)
                result.taken_back += int((revealed & ~kept).sum())
                revealed = kept
            self._reveal(span, revealed, statistics, source=0)
            if self.options.mode == "direct":
                self._extra_picks(span, hidden, step)
            step += 1
            result.denoising_forwards += 1
            if self._ended():
                return True
        return False

    def _extra_picks(self, span: slice, hidden: Tensor, step: int) -> None:
        """Direct mode: K further picks from the head's chain, unverified."""
        accumulated = hidden
        for k in range(1, self.options.steps + 1):
            ids = self.result.ids[span]
            masked = ids == MASKED
            if not bool(masked.any()):
                return
            if self.options.drafter == "head":
                _, accumulated = self._head(ids[None], accumulated, span.start)
            statistics = self._statistics(self.model.lm_head(accumulated), span.start, step + k)
            key = self.policy.order_key(statistics.choice).masked_fill(~masked, -torch.inf)
            self._reveal(span, (rank_of(key) < self.options.direct_tokens) & masked, statistics, source=k)

    def _remask(
        self, before: Tensor, revealed: Tensor, statistics: TokenStatistics, logits: Tensor, hidden: Tensor, start: int
    ) -> Tensor:
        """The reveals that the remask rule keeps."""
        options, token = self.options, statistics.choice.token

        def head_pass(states: Tensor) -> Tensor:
            chain = [self._head(state[None], hidden, start)[1] for state in states[0]]
            return self.model.lm_head(torch.stack(chain))[None]

        rows = (before[None], revealed[None], token[None])
        if options.remask_rule == "veto":
            return keep_by_veto(*rows, logits[None], head_pass, options.remask_delta)[0]
        if options.remask_rule == "confidence":
            return keep_by_confidence(*rows, head_pass, options.threshold)[0]
        key = self.policy.order_key(statistics.choice)[None]
        return keep_by_cross(*rows, key, head_pass, options.threshold)[0]

    def _backbone(self, ids: Tensor, start: int) -> Tensor:
        """Hidden states `[block, hidden]` of one block over the prefix."""
        positions = start + torch.arange(ids.numel(), device=ids.device)
        return self.model.backbone(self._filled(ids)[None], positions[None], None, self.cache)[0]

    def _head(self, ids: Tensor, accumulated: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """One head step `[block, hidden]` on the block's state; with or without the prefix, as `context` says."""
        self.result.head_passes += 1
        positions = start + torch.arange(ids.shape[1], device=ids.device)
        cache = self.head_cache if self.options.context == "prefix" else None
        residual, after = self.model.head(self._filled(ids), accumulated[None], positions[None], None, cache)
        return residual[0], after[0]

    def _store(self, block: int) -> None:
        """Adds a finished block to the caches of backbone and head."""
        span = slice(block * self.options.block_length, (block + 1) * self.options.block_length)
        self.cache.storing = self.head_cache.storing = True
        hidden = self._backbone(self.result.ids[span], span.start)
        if self.options.mode in ("direct", "remask"):
            positions = torch.arange(span.start, span.stop, device=hidden.device)
            self.model.head(self.result.ids[span][None], hidden[None], positions[None], None, self.head_cache)
        self.cache.storing = self.head_cache.storing = False

    def _statistics(self, logits: Tensor, start: int, step: int) -> TokenStatistics:
        positions = start + torch.arange(logits.shape[0], device=logits.device)
        key = DrawKey(self.seed, positions.new_tensor(self.row), positions, positions.new_tensor(step))
        statistics = token_statistics(logits, self.options, key, entropy=self.policy.uses_entropy)
        raise_if_broken(statistics.log_sum_exp)
        return statistics

    def _filled(self, ids: Tensor) -> Tensor:
        return torch.where(ids == MASKED, self.options.mask_token_id, ids)

    def _reveal(self, span: slice, revealed: Tensor, statistics: TokenStatistics, source: int) -> None:
        result = self.result
        result.ids[span] = torch.where(revealed, statistics.choice.token, result.ids[span])
        result.reveal_forward[span][revealed] = result.denoising_forwards
        result.reveal_source[span][revealed] = source

    def _end(self) -> int:
        """Length of the row's output so far, if it has ended, else 0: prompt + tokens up to the end, all revealed."""
        new = self.result.ids[self.prompt_length : self.limit].tolist()
        for index, token in enumerate(new):
            if token == MASKED:
                return 0
            if token in self.options.eos_token_ids:
                return self.prompt_length + index + 1
        return self.limit

    def _ended(self) -> bool:
        return self._end() > 0

    def _trimmed(self) -> ReferenceRow:
        end, result = self._end(), self.result
        result.ids, result.reveal_forward = result.ids[:end], result.reveal_forward[:end]
        result.reveal_source = result.reveal_source[:end]
        return result
