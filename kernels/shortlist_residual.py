"""Drafting over a few tokens a position: the correction for the best tokens of the backbone's logits only."""

import math

from torch import Tensor

from .kernel_dispatch import resolve_kernels
from .philox_torch import NoiseKey
from .reveal_statistics_torch import RevealStatistics
from .shortlist_residual_torch import Shortlist, shortlist_residual_torch, shortlist_torch

MAX_SIZE = 256


def shortlist(logits: Tensor, size: int = 64, *, mask_token_id: int | None = None, kernels: str = "auto") -> Shortlist:
    """The `size` best tokens of each row and what is left of its softmax.

    Which of the tokens that tie with the list's last are in it, and the order of equal ones, may differ between the
    kernel and its twin.

    Args:
        logits: `[rows, vocab]`, float32, float16 or bfloat16: the backbone's `A`.
        size: tokens a row, at most 256 and fewer than the tokens that can be chosen.
        mask_token_id: never in the list.
        kernels: `"auto"`, `"torch"` or `"triton"`.

    Raises:
        ValueError: a shape or an option is out of range.
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be a floating point tensor [rows, vocab], not {logits.dtype} {list(logits.shape)}."
        )
    vocab = logits.shape[1]
    if mask_token_id is not None and not 0 <= mask_token_id < vocab:
        raise ValueError(f"mask_token_id={mask_token_id} is outside the vocabulary [0, {vocab}).")
    limit = min(MAX_SIZE, vocab - (mask_token_id is not None))
    if not 2 <= size <= limit:
        raise ValueError(f"size={size} must be between 2 and {limit} for a vocabulary of {vocab}.")
    if resolve_kernels(kernels, logits.device) == "triton":
        from .shortlist_residual_triton import shortlist_triton as implementation
    else:
        implementation = shortlist_torch
    return implementation(logits, size, mask_token_id)


def shortlist_residual(
    shortlist: Shortlist,
    residual: Tensor,
    weight: Tensor,
    *,
    residual_scale: float = 1.0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    noise: NoiseKey | None = None,
    kernels: str = "auto",
) -> RevealStatistics:
    """`reveal_statistics(A + residual_scale * W residual)` as if the correction were 0 beyond the shortlist.

    `C_j = W_j . residual` for the shortlist's tokens only, so `size` rows of the LM head are read per position instead
    of all. The softmax's denominator is `sum_j exp(A_j + C_j)` over the list plus the rest of `A`'s, and every field
    is measured under it. Sampling uses the noise that `reveal_statistics` gives the same tokens; its top-k and top-p
    look at the list alone.

    Args:
        shortlist: of the backbone's logits at these rows.
        residual: `[rows, hidden]`, the head's running sum without the backbone's state, `acc_k - acc_0`.
        weight: `[vocab, hidden]`, the LM head's.
        residual_scale: factor of the correction.
        temperature, top_k, top_p, noise, kernels: as for `reveal_statistics`.

    Raises:
        ValueError: a shape or an option is out of range.
    """
    rows = shortlist.tokens.shape[0]
    if weight.ndim != 2 or residual.shape != (rows, weight.shape[1]):
        raise ValueError(
            f"residual {list(residual.shape)} must be [{rows}, hidden] for a weight [vocab, hidden] of "
            f"{list(weight.shape)}."
        )
    if not 0 <= temperature < math.inf or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"temperature={temperature} must be finite and at least 0, top_k={top_k} at least 0, "
            f"top_p={top_p} in (0, 1]."
        )
    if resolve_kernels(kernels, residual.device) == "triton":
        from .shortlist_residual_triton import shortlist_residual_triton as implementation
    else:
        implementation = shortlist_residual_torch
    return implementation(
        shortlist,
        residual,
        weight,
        residual_scale=residual_scale,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        noise=noise,
    )
