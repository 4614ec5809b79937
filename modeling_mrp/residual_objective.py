"""The training objective: how well do the corrected logits match what the backbone says after the next reveals?

    acc_0 = h(ids_0),   r_k = head(ids_k, acc_{k-1}),   acc_k = acc_{k-1} + s r_k
    L_k   = sum over places still masked of w KL( softmax(W h(ids_k)) || softmax(W (sg(acc_{k-1}) + s r_k)) ) / N_k
    L     = mean over k = 1..K

(DESIGN section 1; arXiv 2605.18817.) A direct head (the MTP control) is fed its own last output and is compared by
itself, softmax(W r_k). The accumulator that the head reads is not detached, so later steps train earlier ones.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .noising import (
    CHOICE_STREAM,
    SUPERVISE_STREAM,
    BlockGrid,
    Noise,
    NoiseSource,
    block_grid,
    draw_noise,
    highest,
    place_scores,
    reveal_counts,
)
from .residual_kl import residual_kl
from .residual_kl_torch import ResidualKL, default_chunk
from .row_losses import certain_kl_rows, reverse_kl_rows
from .training_metrics import pick_tokens, step_metrics
from .training_objective import TrainingObjective
from .training_passes import LAYOUTS, TrainingPasses


def training_loss(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    block_length: int,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    objective: TrainingObjective | dict[str, Any] | None = None,
    sample_keys: Tensor | None = None,
    reveal_order: Tensor | None = None,
    noise_seed: int | None = None,
    noise_draw: int = 0,
    noise_mask: Tensor | None = None,
    noise_rate: Tensor | None = None,
    reveals: Tensor | None = None,
    record_rows: Tensor | None = None,
    recorded_states: Any = None,
    all_metrics: bool | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the metrics of one batch.

    Args:
        model: an `MRPForCausalLM`; its backbone is run in eval mode without gradients.
        input_ids, labels, attention_mask, position_ids, sample_keys: see `noising.block_grid`.
        block_length: positions per block.
        objective: what to train on.
        reveal_order: `[batch, tokens]` int64, see `noising.draw_noise`.
        noise_seed, noise_draw: of `NoiseSource`; the seed is drawn from torch's global generator by default.
        noise_mask, noise_rate: `[batch, tokens]` bool and float32: the first states, instead of drawn ones.
        reveals: `[steps, batch, tokens]` bool: true tokens to reveal in each step, instead of the reveal rule.
        record_rows: `[batch, tokens]` int64, each token's row in `recorded_states`, for `layout="recorded"`.
        recorded_states: `training.recorded_states.RecordedStates`, the backbone's hidden states of these samples.
        all_metrics: also compute the metrics that cost another product with the LM head. Default: in eval mode.

    Returns:
        the scalar loss, and a dict of detached float32 scalars.

    Raises:
        ValueError: an option or a shape is out of range, or states are given that a recording cannot hold.
    """
    objective = TrainingObjective.of(objective)
    if objective.layout == "recorded" and (noise_mask is not None or reveals is not None):
        raise ValueError(
            "noise_mask or reveals with layout='recorded': a recording holds the states of its own trajectories "
            "alone. Leave them out, or use layout='shared'."
        )
    if noise_seed is None:
        noise_seed = int(torch.randint(2**62, ()))
    source = NoiseSource(noise_seed, noise_draw)
    whole = objective.layout == "single"
    grid = block_grid(input_ids, labels, block_length, attention_mask, position_ids, sample_keys, all_blocks=whole)
    if noise_mask is None:
        noise = draw_noise(grid, source, objective.noise_level, objective.copies, reveal_order)
    else:
        rate = torch.ones_like(noise_mask, dtype=torch.float32) if noise_rate is None else noise_rate
        noise = Noise((grid.take(noise_mask, False) & grid.supervised)[None], grid.take(rate, 1.0)[None])
        objective = replace(objective, copies=1)
    was_training = model.model.training
    trains_backbone = objective.loss == "denoising"
    model.model.train(was_training and trains_backbone)
    try:
        extra = {"rows": record_rows, "states": recorded_states} if objective.layout == "recorded" else {}
        passes = LAYOUTS[objective.layout](
            model, grid, objective.head_prefix, objective.gradient_checkpointing, trains_backbone, **extra
        )
        chain = _Chain(model, grid, passes, objective, source, noise, reveals, reveal_order)
        if all_metrics is None:
            all_metrics = not model.training
        return chain.denoising() if trains_backbone else chain.run(all_metrics)
    finally:
        model.model.train(was_training)


class _Chain:
    """One noisy batch through K reveals."""

    def __init__(
        self,
        model: Any,
        grid: BlockGrid,
        passes: TrainingPasses,
        objective: TrainingObjective,
        source: NoiseSource,
        noise: Noise,
        reveals: Tensor | None,
        reveal_order: Tensor | None,
    ):
        self.model, self.grid, self.passes, self.objective = model, grid, passes, objective
        self.source, self.noise, self.reveals, self.reveal_order = source, noise, reveals, reveal_order
        self.truth = grid.take(grid.ids)
        self.masked = noise.masked
        self.ids = torch.where(noise.masked, model.config.mask_token_id, self.truth)
        inverse = objective.weighting == "inverse_rate"
        self.weight = 1 / noise.rate if inverse else torch.ones_like(noise.rate)
        self.answer_length = grid.supervised.sum() * objective.copies

    def denoising(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The backbone's masked cross-entropy on the first states."""
        hidden = self.passes.backbone(self.ids, self.masked)
        chosen = self.masked
        loss = self._cross_entropy(hidden[chosen], self.truth.expand_as(chosen)[chosen])
        total = self._normalized((loss * self.weight[chosen]).sum(), self.weight[chosen].sum(), self._length(chosen))
        return total + 0.0 * hidden.sum(), {"denoising": loss.detach().mean() if len(loss) else total.detach()}

    def run(self, all_metrics: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """The head's loss over the K steps."""
        objective = self.objective
        sequential = self.reveals is None and objective.reveal_rule in ("confident", "drafted")
        targets = None if sequential else self._targets_at_once()
        first = self.passes.backbone(self.ids, self.masked) if targets is None else targets[0][1]
        # The states' first hidden state is a constant: `backbone` runs without gradients.
        accumulated, before, total = first, first, first.new_zeros((), dtype=torch.float32)
        picks_from = first
        metrics: dict[str, Tensor] = {}
        weights = objective.step_weights or (1 / objective.steps,) * objective.steps
        for k in range(1, objective.steps + 1):
            if targets is None:
                fresh, tokens = self._choose(picks_from, k)
                self._reveal(fresh, tokens)
                target = self.passes.backbone(self.ids, self.masked)
            else:
                fresh, target, self.ids, self.masked = targets[k]
            residual, after = self.passes.head(self.ids, accumulated)
            direct = self.model.config.head_prediction == "direct"
            student = residual if direct else accumulated.detach() + self.model.config.residual_scale * residual
            loss = self._step_loss(student, target, fresh, before)
            total = total + weights[k - 1] * loss
            chosen = self.masked
            with torch.no_grad():
                metrics[f"loss_{k}"] = loss.detach()
                metrics[f"residual_norm_{k}"] = _mean(residual[chosen].float().norm(dim=-1))
                if all_metrics:
                    metrics.update(step_metrics(self.model, k, chosen, first, target, student))
            picks_from = target if objective.reveal_rule == "confident" else after.detach()
            accumulated, before = after, target
        # Keeps every parameter in the graph on a rank that has nothing to supervise.
        return total + 0.0 * accumulated.float().sum(), metrics

    def _targets_at_once(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """(fresh, hidden, ids, masked) of the states 0..K, whose reveals do not depend on any logits: one pass."""
        states = [(torch.zeros_like(self.masked), self.ids, self.masked)]
        for k in range(1, self.objective.steps + 1):
            fresh, tokens = self._choose(None, k)
            self._reveal(fresh, tokens)
            states.append((fresh, self.ids, self.masked))
        ids, masked = (torch.cat([state[part] for state in states]) for part in (1, 2))
        hidden = self.passes.backbone(ids, masked).chunk(len(states))
        return [(fresh, part, ids, masked) for (fresh, ids, masked), part in zip(states, hidden, strict=True)]

    def _choose(self, hidden: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        """Places `[copies, batch, blocks, block]` bool that step k reveals, and the tokens for all places."""
        objective, copies = self.objective, self.masked.shape[0]
        if self.reveals is not None:
            return self.grid.take(self.reveals[k - 1].bool(), False)[None] & self.masked, self.truth
        count = reveal_counts(self.grid, self.source, objective.reveals, k, copies)
        tokens = self.truth
        if objective.reveal_rule == "recorded":
            score = -self._recorded_order(self.masked)
        elif objective.reveal_rule == "ground_truth":
            score = place_scores(self.grid, self.source, CHOICE_STREAM, k, copies)
        else:
            assert hidden is not None
            chosen = self.masked
            token, log_odds = pick_tokens(self.model, hidden[chosen], objective.chunk_tokens)
            score = torch.full(chosen.shape, -torch.inf, device=chosen.device).masked_scatter(chosen, log_odds)
            tokens = self.truth.expand_as(chosen).masked_scatter(chosen, token)
        return highest(score, self.masked, count), tokens

    def _recorded_order(self, places: Tensor) -> Tensor:
        """Rank of each place's reveal in its recorded block, float32 of the shape of `places`."""
        if self.reveal_order is None:
            raise ValueError("reveal_rule='recorded' needs reveal_order; write it with mrp-train record.")
        return self.grid.take(self.reveal_order).float().expand_as(places)

    def _reveal(self, fresh: Tensor, tokens: Tensor) -> None:
        self.ids = torch.where(fresh, tokens, self.ids)
        self.masked = self.masked & ~fresh

    def _step_loss(self, student: Tensor, target: Tensor, fresh: Tensor, before: Tensor) -> Tensor:
        """L_k: over the places still masked, and over one revealed place per block where that is asked for."""
        chosen, weight = self.masked, self.weight
        if self.objective.supervise_revealed > 0:
            watched, target = self._watch(fresh, target, before)
            weight = torch.where(watched, self.objective.supervise_revealed * weight, weight)
            chosen = chosen | watched
        if self.objective.loss == "cross_entropy":
            loss = self._cross_entropy(student[chosen], self.truth.expand_as(chosen)[chosen])
        else:
            loss = self._divergence(student[chosen], target[chosen])
        kept = weight[chosen]
        return self._normalized((loss * kept).sum(), kept.sum(), self._length(self.masked))

    def _watch(self, fresh: Tensor, target: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """One revealed place per block, and targets that hold its teacher's hidden state there."""
        if self.objective.reveals == (1, 1):
            return fresh, torch.where(fresh[..., None], before, target)
        if self.objective.reveal_rule == "recorded":
            # The last one: with it masked again, the state is one of the trajectory's own.
            score = self._recorded_order(fresh)
        else:
            score = place_scores(self.grid, self.source, SUPERVISE_STREAM, 0, fresh.shape[0])
        watched = highest(score, fresh, torch.ones_like(fresh[..., :1], dtype=torch.int64))
        ids = torch.where(watched, self.model.config.mask_token_id, self.ids)
        hidden = self.passes.backbone(ids, self.masked | watched)
        return watched, torch.where(watched[..., None], hidden, target)

    def _divergence(self, student: Tensor, target: Tensor) -> Tensor:
        """KL per place `[places]`, times tau^2. By linearity W (h / tau) are the logits over tau."""
        tau = self.objective.temperature
        if tau != 1:
            student, target = student / tau, target / tau
        weight, chunk = self.model.lm_head.weight, self.objective.chunk_tokens
        certainty = self.objective.certainty_weight
        if self.objective.loss == "forward_kl" and certainty == 0:
            loss = residual_kl(student, target, weight, chunk=chunk, kernels=self.model.config.kernels)
        else:
            rows = reverse_kl_rows if self.objective.loss == "reverse_kl" else certain_kl_rows(certainty)
            chunk = chunk or default_chunk(weight.shape[0])
            loss = ResidualKL.apply(student, target.detach(), weight.detach(), chunk, rows)
        return loss * tau**2

    def _cross_entropy(self, hidden: Tensor, token: Tensor) -> Tensor:
        return self._by_chunks(lambda logits, t: functional.cross_entropy(logits, t, reduction="none"), hidden, token)

    def _by_chunks(self, of_logits: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, token: Tensor) -> Tensor:
        """`of_logits(logits [rows, vocab], token [rows])` -> `[places]`; logits of one chunk exist at a time."""
        chunk = self.objective.chunk_tokens or default_chunk(self.model.config.vocab_size)

        def part(h: Tensor, t: Tensor) -> Tensor:
            return of_logits(self.model.lm_head(h).float(), t)

        parts = [
            checkpoint(part, h, t, use_reentrant=False)
            for h, t in zip(hidden.split(chunk), token.split(chunk), strict=True)
        ]
        return torch.cat(parts)

    def _length(self, masked: Tensor) -> Tensor:
        """The published normaliser: number of labels - sum over revealed places of 1/t."""
        gone = self.noise.masked & ~masked
        return self.answer_length - (1 / self.noise.rate)[gone].sum()

    def _normalized(self, total: Tensor, weight: Tensor, length: Tensor) -> Tensor:
        """`total` over N_k of the global batch: DDP averages over ranks, so N_k is averaged over them too."""
        sums = torch.stack([weight.detach().float(), length.float()])
        if self.model.training and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
            sums = sums / torch.distributed.get_world_size()
        weight_sum, length_sum = sums
        if self.objective.normalizer == "answer_length":
            normalizer = torch.where(length_sum > 0, length_sum, weight_sum)
        else:
            normalizer = weight_sum
        return total / torch.where(normalizer > 0, normalizer, torch.ones_like(normalizer))


def _mean(values: Tensor) -> Tensor:
    return values.mean() if values.numel() else values.new_zeros(())
