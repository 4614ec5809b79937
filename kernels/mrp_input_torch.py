"""Torch twins of `mrp_input` and `qk_norm_rope`: what transformers' Qwen3 modules compute, rounding for rounding."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Qwen3's RMS norm over the last dimension: mean square in float32, weight applied in the input's dtype."""
    work = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = work * torch.rsqrt(work.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def mrp_input_torch(
    ids: Tensor,
    state: Tensor,
    embedding: Tensor,
    embedding_norm: Tensor,
    state_norm: Tensor,
    projection: Tensor,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """See `mrp_input.mrp_input`."""
    embedded = rms_norm(F.embedding(ids, embedding), embedding_norm, eps)
    return F.linear(torch.cat((embedded, rms_norm(state, state_norm, eps)), dim=-1), projection)


def qk_norm_rope_torch(
    query: Tensor,
    key: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    value: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `mrp_input.qk_norm_rope`."""
    cos, sin = cos[:, None], sin[:, None]
    rotated = []
    for x, weight in ((query, query_norm), (key, key_norm)):
        x = rms_norm(x, weight, eps).transpose(1, 2)
        first, second = x.chunk(2, dim=-1)
        rotated.append(x * cos + torch.cat((-second, first), dim=-1) * sin)
    if value is None or out is None:
        return rotated[0], rotated[1]
    out[1].copy_(value.transpose(1, 2))
    return rotated[0], out[0].copy_(rotated[1])
