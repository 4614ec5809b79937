"""How many states to verify per forward when `draft_states="auto"`.

On a GPU a forward is bound by reading weights until about 200 tokens are in it, so segments up to there are nearly
free. On a CPU they cost their share, which is measured once per model and batch size. Either way the choice only
affects speed: any budget gives the same tokens.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

_WEIGHT_BOUND_TOKENS = 200
_CANDIDATES = (1, 2, 4, 8, 16, 32)
# Tokens per forward over plain decoding's that a lattice of so many states reached on the tiny model
# (benchmarks/results/decoding.md); only their ratios matter here.
_EXPECTED_TOKENS = {1: 1.0, 2: 1.5, 4: 2.1, 8: 2.85, 16: 3.4, 32: 3.85}
_REPETITIONS = 5


def draft_budget(model: Any, rows: int, block: int, head: bool) -> int:
    """Segments per row and forward; `head` says whether every round also runs the head."""
    device = next(model.lm_head.parameters()).device
    if device.type not in ("cpu", "meta"):
        states = max(1, _WEIGHT_BOUND_TOKENS // (rows * block))
        return max(candidate for candidate in _CANDIDATES if candidate <= states)
    measured: dict[tuple[int, int, bool], int] = model.__dict__.setdefault("_measured_draft_budget", {})
    key = (min(rows, 64), block, head)
    if key not in measured:
        measured[key] = _measure(model, rows, block, head)
    return measured[key]


@torch.no_grad()
def _measure(model: Any, rows: int, block: int, head: bool) -> int:
    """The candidate with the most expected tokens per second, by timing maskless calls of that many tokens."""
    extra = 0.0
    if head:
        ids, positions = _inputs(model, rows, block)
        hidden = model.backbone(ids, positions, None)
        extra = _time(lambda: model.lm_head(model.head(ids, hidden, positions, None)[1]))
    best, best_rate = 1, 0.0
    for states in _CANDIDATES:
        inputs = _inputs(model, rows * states, block)
        seconds = _time(lambda inputs=inputs: model.lm_head(model.backbone(*inputs, None)))  # type: ignore[misc]
        rate = _EXPECTED_TOKENS[states] / (seconds + (extra if states > 1 else 0.0))
        if rate > best_rate:
            best, best_rate = states, rate
        elif rate < 0.7 * best_rate:
            break
    return best


def _inputs(model: Any, blocks: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros((blocks, block), dtype=torch.int64, device=model.device)
    return ids, torch.arange(block, device=model.device).expand(blocks, -1)


def _time(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of some calls; the first only warms up."""
    times = []
    for _ in range(_REPETITIONS + 1):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
