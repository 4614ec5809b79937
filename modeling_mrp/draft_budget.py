"""How many states to verify per forward when `draft_states="auto"`.

On a GPU a forward is bound by reading weights until about 200 tokens are in it, so segments up to there are nearly
free. On a CPU they cost their share, which is measured once per model and batch size. Either way the choice only
affects speed: any budget gives the same tokens.
"""

import time
from typing import Any

import torch

from .packed_forward import PackedStack

_WEIGHT_BOUND_TOKENS = 200
_CANDIDATES = (1, 2, 4, 8, 16, 32)
# Tokens per forward that a lattice of so many states reached on the tiny model (benchmarks/results/decoding.md); only
# their ratios matter here.
_EXPECTED_TOKENS = {1: 1.0, 2: 1.6, 4: 2.1, 8: 2.6, 16: 2.9, 32: 3.1}
_REPETITIONS = 3


def draft_budget(model: Any, stack: PackedStack, rows: int, block: int) -> int:
    """Segments per row and forward."""
    device = next(model.lm_head.parameters()).device
    if device.type not in ("cpu", "meta"):
        states = max(1, _WEIGHT_BOUND_TOKENS // (rows * block))
        return max(candidate for candidate in _CANDIDATES if candidate <= states)
    measured: dict[tuple[int, int], int] = model.__dict__.setdefault("_measured_draft_budget", {})
    key = (min(rows, 64), block)
    if key not in measured:
        measured[key] = _measure(model, rows, block)
    return measured[key]


def _measure(model: Any, rows: int, block: int) -> int:
    """The candidate with the most expected tokens per second, by timing maskless forwards of that many tokens."""
    best, best_rate = 1, 0.0
    for states in _CANDIDATES:
        ids = torch.zeros((rows * states, block), dtype=torch.int64, device=model.device)
        positions = torch.arange(block, device=model.device).expand(rows * states, -1)
        times = []
        for _ in range(_REPETITIONS):
            begin = time.perf_counter()
            model.lm_head(model.backbone(ids, positions, None))
            times.append(time.perf_counter() - begin)
        rate = _EXPECTED_TOKENS[states] / min(times)
        if rate > best_rate:
            best, best_rate = states, rate
        elif rate < 0.7 * best_rate:
            break
    return best
