"""The public reference's schedules, re-implemented from their recorded behaviour, to count what they spend.

Static: one forward per denoising step, plus one per block that stores its keys and values. Speculative: per block a
seed forward, then rounds of K drafts (K - 1 head passes), one verifying forward over the known state and the K drafted
ones, and a bonus pick; the next round drafts from the logits of the state *before* the bonus. The head sees only the
current block. Counters are checked against `tests/data/golden` in `tests/test_reference_schedule.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MASKED = -1


@dataclass
class ScheduleCounts:
    """Backbone forwards by purpose, head passes, drafts, and the finished canvas `[prompt + new]`."""

    ids: Tensor
    denoising: int = 0
    seeds: int = 0
    stores: int = 0
    head_passes: int = 0
    rounds: int = 0
    accepted: int = 0
    bonus: int = 0

    @property
    def forwards(self) -> int:
        return self.denoising + self.stores


class _SharedPrefix:
    """The prefix's keys and values, seen by any number of candidate states at once."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.storing = False

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            key, value = (
                torch.cat([stored.expand(new.shape[0], -1, -1, -1), new], dim=2)
                for stored, new in zip(self.layers[layer], (key, value), strict=True)
            )
        if self.storing:
            self.layers[layer] = (key, value)
        return key, value


class ReferenceSchedule:
    """Decodes one row greedily, one token per pick.

    Args:
        model: an `MRPForCausalLM`.
        block: block length.
        steps: drafts per round K; 0 for the static schedule.
    """

    def __init__(self, model: Any, block: int, steps: int):
        self.model, self.block, self.steps = model, block, steps
        self.mask = model.config.mask_token_id
        self.prefix = _SharedPrefix()

    @torch.no_grad()
    def decode(self, prompt: Tensor, max_new_tokens: int, eos: tuple[int, ...] = ()) -> ScheduleCounts:
        """Decodes `prompt` `[n]` until a finished block holds an end token, or to the canvas' end."""
        total = -(-(prompt.numel() + max_new_tokens) // self.block) * self.block
        ids = torch.full((total,), MASKED)
        ids[: prompt.numel()] = prompt
        counts = ScheduleCounts(ids)
        for start in range(0, prompt.numel() // self.block * self.block, self.block):
            self._store(ids[start : start + self.block], start)
        for start in range(prompt.numel() // self.block * self.block, total, self.block):
            span = slice(start, start + self.block)
            decode = self._speculate if self.steps else self._static
            ids[span] = decode(ids[span].clone(), start, counts)
            self._store(ids[span], start)
            counts.stores += 1
            new = ids[max(start, prompt.numel()) : span.stop].tolist()
            if any(token in eos for token in new):
                counts.ids = ids[: span.stop]
                break
        return counts

    def _static(self, state: Tensor, start: int, counts: ScheduleCounts) -> Tensor:
        while bool((state == MASKED).any()):
            logits, _ = self._evaluate(state[None], start)
            counts.denoising += 1
            state = self._reveal(state, logits[0])
        return state

    def _speculate(self, state: Tensor, start: int, counts: ScheduleCounts) -> Tensor:
        logits, hidden = self._evaluate(state[None], start)
        counts.denoising += 1
        counts.seeds += 1
        while bool((state == MASKED).any()):
            states = [state, self._reveal(state, logits[0])]
            accumulated = hidden
            for _ in range(self.steps - 1):
                counts.head_passes += 1  # also with nothing left to draft
                if not bool((states[-1] == MASKED).any()):
                    states.append(states[-1])
                    continue
                positions = start + torch.arange(self.block)[None]
                _, accumulated = self.model.head(self._filled(states[-1][None]), accumulated, positions, None)
                states.append(self._reveal(states[-1], self.model.lm_head(accumulated)[0]))
            logits_all, hidden_all = self._evaluate(torch.stack(states), start)
            counts.denoising += 1
            counts.rounds += 1
            at = 0
            while at < self.steps and bool((self._reveal(states[at], logits_all[at]) == states[at + 1]).all()):
                at += 1
            counts.accepted += at
            counts.bonus += bool((states[at] == MASKED).any())
            state = self._reveal(states[at], logits_all[at])
            logits, hidden = logits_all[at : at + 1], hidden_all[at : at + 1]
        return state

    def _evaluate(self, states: Tensor, start: int) -> tuple[Tensor, Tensor]:
        positions = (start + torch.arange(self.block)).expand(states.shape[0], -1)
        hidden = self.model.backbone(self._filled(states), positions, None, self.prefix)
        return self.model.lm_head(hidden), hidden

    def _reveal(self, state: Tensor, logits: Tensor) -> Tensor:
        """The state with its most confident masked position revealed; a finished state stays."""
        masked = state == MASKED
        if not bool(masked.any()):
            return state
        logits = logits.float().clone()
        total = logits.logsumexp(dim=-1)
        logits[:, self.mask] = -torch.inf
        best, token = logits.max(dim=-1)
        at = (best - total).masked_fill(~masked, -torch.inf).argmax()
        state = state.clone()
        state[at] = token[at]
        return state

    def _store(self, ids: Tensor, start: int) -> None:
        self.prefix.storing = True
        self._evaluate(ids[None], start)
        self.prefix.storing = False

    def _filled(self, states: Tensor) -> Tensor:
        return states.masked_fill(states == MASKED, self.mask)
