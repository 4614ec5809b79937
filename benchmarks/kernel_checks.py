"""Whether a kernel's result on a GPU is right: its largest error against float64, beside what may be tolerated."""

from collections.abc import Callable
from typing import Any

import torch
from mrp_kernels import PackedStates, RevealStatistics, Shortlist, VerifiedStates
from mrp_kernels.packed_block_attention_torch import visibility_matrix
from torch import Tensor

from .kernel_references import (
    attention,
    mrp_input,
    qk_norm_rope,
    scores_of,
    shortlist_corrected,
    shortlist_rest,
    statistics,
    verified_states,
)
from .lattice_reference import differing_share, lattice

LOSS_ROWS = 64  # float64 logits of all 4,096 tokens would not fit


def _largest(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to 1 + |expected|; NaN anywhere gives NaN."""
    return ((found.double() - expected).abs() / (1 + expected.abs())).max().item()


def _statistics(arguments: tuple, options: dict, found: RevealStatistics) -> tuple[float, float]:
    defaults: dict[str, Any] = {"mask_token_id": None, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "noise": None}
    choice = {name: options.get(name, default) for name, default in defaults.items()}
    values = arguments[0].double() + (options["residual"].double() if "residual" in options else 0.0)
    expected = statistics(values, chosen=found.token, **choice)
    scores = scores_of(values, **choice)
    errors = [_largest(scores.gather(1, found.token[:, None])[:, 0], scores.amax(dim=1))]
    for name in ("probability", "log_odds", "log_sum_exp", "entropy", "runner_up_probability"):
        errors.append(_largest(getattr(found, name), getattr(expected, name)))
    return max(errors), 1e-4


def _attention(arguments: tuple, options: dict, found: Tensor) -> tuple[float, float]:
    names = ("cache_key", "cache_value", "prefix_length", "block")
    visible = visibility_matrix(options["visibility"])
    expected = attention(*arguments, visible=visible, **{name: options[name] for name in names})
    return _largest(found, expected), 2e-2


def _shortlist(arguments: tuple, options: dict, found: Shortlist) -> tuple[float, float]:
    logits, size = arguments
    candidates = logits.double()
    candidates[:, options["mask_token_id"]] = -torch.inf
    rest, mean = shortlist_rest(logits, found.tokens)
    return max(
        _largest(found.logits, candidates.topk(size, dim=1).values),
        _largest(found.rest_log_sum_exp, rest),
        _largest(found.rest_mean_logit, mean),
    ), 1e-4


def _shortlist_residual(arguments: tuple, options: dict, found: RevealStatistics) -> tuple[float, float]:
    values, total = shortlist_corrected(*arguments)
    at = (arguments[0].tokens == found.token[:, None]).int().argmax(dim=1, keepdim=True)
    value = values.gather(1, at)[:, 0]
    errors = [_largest(found.log_sum_exp, total), _largest(found.probability, (value - total).exp())]
    if "noise" not in options:
        errors.append(_largest(value, values.amax(dim=1)))
    return max(errors), 1e-4


def _mrp_input(arguments: tuple, options: dict, found: Tensor) -> tuple[float, float]:
    return _largest(found, mrp_input(*arguments)), 2e-2


def _qk_norm_rope(arguments: tuple, options: dict, found: tuple[Tensor, Tensor]) -> tuple[float, float]:
    expected = qk_norm_rope(*arguments)
    return max(_largest(*pair) for pair in zip(found, expected, strict=True)), 2e-2


def _lattice_states(arguments: tuple, options: dict, found: PackedStates) -> tuple[float, float]:
    """Against sets and counts; a state may differ where two drafted confidences tie within float32."""
    first, start, step, drafted, drafts = arguments
    return differing_share(found, lattice(first, drafted, drafts, step=step, **options), start), 0.15


def _residual_kl(arguments: tuple, options: dict, found: Tensor) -> tuple[float, float]:
    """Against logits that bfloat16 has rounded, as the LM head rounds them; the gradient is checked by the tests."""
    student, target, weight = (x.detach() for x in arguments)
    log_student, log_target = ((x[:LOSS_ROWS] @ weight.T).double().log_softmax(dim=1) for x in (student, target))
    expected = (log_target.exp() * (log_target - log_student)).sum(dim=1)
    return _largest(found[:LOSS_ROWS].detach(), expected), 1e-2


def _verify_states(arguments: tuple, options: dict, found: VerifiedStates) -> tuple[float, float]:
    """How many rows differ: states are equal or they are not."""
    *tensors, measures, total, policy = arguments
    ids, step, parent, alive, total = (tensor.cpu() for tensor in (*tensors, total))
    measures = type(measures)(*(part.cpu() for part in measures))
    expected = verified_states(ids, step, parent, alive, measures, total, policy, **options)
    last, finished, following = (part.tolist() for part in (found.last, found.finished, found.following))
    broken = found.host[:, 2].bool().tolist()
    wrong = [
        (path[-1], *rest) != own
        for (path, *rest), own in zip(expected, zip(last, finished, following, broken, strict=True), strict=True)
    ]
    return float(sum(wrong)), 0.0


CHECKS: dict[str, Callable[[tuple, dict, Any], tuple[float, float]]] = {
    "reveal_statistics": _statistics,
    "packed_block_attention": _attention,
    "shortlist": _shortlist,
    "shortlist_residual": _shortlist_residual,
    "mrp_input": _mrp_input,
    "qk_norm_rope": _qk_norm_rope,
    "lattice_states": _lattice_states,
    "residual_kl": _residual_kl,
    "verify_states": _verify_states,
}
