"""Calibrates the draft model of `draft_lattice.py` on decoding traces: how far do drafts fall from the backbone?

For every denoising step of plain decoding: the drafter's log-odds at the next states, and the backbone's own at these
states. Their differences, by level and depth, are kept as quantiles, and how often the token differs as a rate:
nothing is assumed about their shape.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..generation_config_mrp import resolve_options
from ..reference_decoding import MASKED, ReferenceDecoder
from ..reveal_rule import PositionStatistics

LEVELS = (-1.0, 0.5, 2.0, 4.0, 6.0, 8.0, 10.0)
QUANTILES = 17
# States behind a head pass's own whose spread is told apart; the last stands for all further ones.
DISTANCES = 3


class _Tracer(ReferenceDecoder):
    """Plain decoding that notes drafted and actual log-odds of every masked position."""

    def __init__(self, *args: Any, passes: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.passes = passes
        self.samples: list[dict[str, Tensor]] = []
        self.drafts: list[tuple[int, list[PositionStatistics], PositionStatistics]] = []
        self.block_start = -1

    def _extra_picks(self, span: slice, hidden: Tensor, step: int) -> None:
        own = self._statistics(self.model.lm_head(hidden), span.start, step).choice
        if span.start != self.block_start:
            self.block_start, self.drafts = span.start, []
        masked = self.result.states[-1] == MASKED
        for number, drafts, known in self.drafts:
            depth = step - number - 1
            for index, drafted in enumerate(drafts[: depth + 1]):
                self._note(masked, own, known, drafted, index, depth - index)
        self.drafts.append((step, self._drafted(span, hidden, own, step), own))

    def _note(
        self,
        masked: Tensor,
        own: PositionStatistics,
        known: PositionStatistics,
        drafted: PositionStatistics,
        index: int,
        distance: int,
    ) -> None:
        self.samples.append(
            {
                "pass": torch.full_like(own.log_odds, float(index))[masked],
                "distance": torch.full_like(own.log_odds, float(distance))[masked],
                "drafted": drafted.log_odds[masked],
                "known": torch.where(drafted.token == known.token, known.log_odds, drafted.log_odds)[masked],
                "actual": own.log_odds[masked],
                "flip": (drafted.token != own.token)[masked].float(),
            }
        )

    def _drafted(self, span: slice, hidden: Tensor, own: PositionStatistics, step: int) -> list[PositionStatistics]:
        """What the head says along its own trajectory, pass by pass, as `Drafter.predict` runs it."""
        if self.options.drafter != "head":
            return [own]
        ids, accumulated = self.result.ids[span], hidden
        found: list[PositionStatistics] = []
        for index in range(self.passes):
            masked = ids == MASKED
            _, accumulated = self._head(ids[None], accumulated, span.start)
            now = self._statistics(self.model.lm_head(accumulated), span.start, step + 1 + index).choice
            if found:
                now = PositionStatistics(
                    *(torch.where(masked, new, old) for new, old in zip(now, found[-1], strict=True))
                )
            found.append(now)
            reveal = self.policy.select(now, masked, torch.tensor(step + 1 + index, device=ids.device))
            ids = torch.where(reveal, now.token, ids)
        return found


@torch.no_grad()
def collect_traces(
    model: Any, prompts: Iterable[Tensor], max_new_tokens: int, drafter: str = "head", passes: int = 1
) -> dict[str, Tensor]:
    """Traces of greedy decoding, one entry per masked position.

    Args:
        model: an `MRPForCausalLM`.
        prompts: `[n]` int64 each.
        max_new_tokens: per prompt.
        drafter: `"head"` or `"zero"`.
        passes: head passes per draft.

    Returns:
        float32 `[entries]`: `pass` of the head, `distance` (reveals behind the state that it predicts), log-odds
        `drafted`, `known` (of the state before) and `actual`, `flip` (1 where the token differs); and int64 `group`,
        which numbers the states.
    """
    options = resolve_options(
        {"mrp_mode": "direct", "mrp_steps": 0, "drafter": drafter, "eos_token_id": model.config.eos_token_id},
        model.config,
    )
    samples: list[dict[str, Tensor]] = []
    for prompt in prompts:
        tracer = _Tracer(model, options, passes=passes)
        tracer.decode(prompt, max_new_tokens)
        samples += tracer.samples
    if not samples:
        raise ValueError("the traces are empty: no prompt led to a second denoising step; give longer answers.")
    traces = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    sizes = torch.tensor([len(sample["pass"]) for sample in samples], device=traces["actual"].device)
    traces["group"] = torch.arange(len(samples), device=sizes.device).repeat_interleave(sizes)
    return {name: values.cpu() for name, values in traces.items()}


def fit_head_weight(traces: dict[str, Tensor]) -> float:
    """Maximum likelihood of the next reveal, a softmax of a (w head + (1 - w) known) over the masked positions."""
    here = traces["distance"] == 0
    group = torch.unique(traces["group"][here], return_inverse=True)[1]
    drafted, known, actual = (traces[name][here].double() for name in ("drafted", "known", "actual"))
    count = int(group.max()) + 1
    largest = torch.full((count,), -torch.inf, dtype=torch.float64).scatter_reduce(0, group, actual, "amax")
    chosen = actual == largest[group]
    parameters = torch.tensor([0.5, 0.5], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        score = parameters[0] * drafted + parameters[1] * known
        top = torch.full((count,), -torch.inf, dtype=torch.float64).scatter_reduce(0, group, score.detach(), "amax")
        weights = (score - top[group]).exp()
        total = torch.zeros(count, dtype=torch.float64).index_add(0, group, weights)
        loss = -(score - top[group] - total.log()[group])[chosen].mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    head, own = parameters.tolist()
    return round(min(1.0, max(0.0, head / (head + own))), 3)


def fit_calibration(traces: dict[str, Tensor], levels: tuple[float, ...] = LEVELS) -> dict[str, Any]:
    """`MRPConfig.draft_calibration` (see `DraftCalibration`) from traces."""
    passes = range(int(traces["pass"].max()) + 1)
    parts = [_fit_pass({name: values[traces["pass"] == p] for name, values in traces.items()}, levels) for p in passes]
    weights, quantiles, flips = (list(column) for column in zip(*parts, strict=True))
    return {"levels": list(levels), "quantiles": quantiles, "flips": flips, "head_weights": weights}


def _fit_pass(
    traces: dict[str, Tensor], levels: tuple[float, ...]
) -> tuple[float, list[list[list[float]]], list[list[float]]]:
    """Weight, quantiles `[distances, bins, quantiles]` and flips `[distances, bins]` of one head pass."""
    weight = fit_head_weight(traces)
    drafted = torch.lerp(traces["known"], traces["drafted"], weight)
    residual, distance = traces["actual"] - drafted, traces["distance"]
    level = torch.bucketize(drafted, torch.tensor(levels))
    probabilities = torch.linspace(0, 1, QUANTILES)
    quantiles, flips = [], []
    for index in range(DISTANCES):
        here = distance >= index if index == DISTANCES - 1 else distance == index
        rows, rates = [], []
        for bin_ in range(len(levels) + 1):
            chosen = here & (level == bin_)
            # A bin that the traces never meet says nothing: no spread, no flips.
            values = residual[chosen] if bool(chosen.any()) else torch.zeros(1)
            rows.append([round(v, 3) for v in torch.quantile(values, probabilities).tolist()])
            rates.append(round(float(traces["flip"][chosen].mean()), 4) if bool(chosen.any()) else 0.0)
        quantiles.append(rows)
        flips.append(rates)
    return weight, quantiles, flips
