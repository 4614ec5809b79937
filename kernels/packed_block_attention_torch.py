"""Torch twin of `packed_block_attention`: the specification of the kernel and the path on CPU.

No host synchronisation; half precision is computed in float32; the arguments are validated by the entry in
`packed_block_attention.py`.
"""

import math

import torch
from torch import Tensor


def visibility_bits(visible: Tensor) -> Tensor:
    """`[batch, segments]` int64 from `[batch, segments, segments]` bool: bit j of entry s says that s may see j."""
    segments = visible.shape[-1]
    return (visible.to(torch.int64) << torch.arange(segments, device=visible.device)).sum(dim=-1)


def visibility_matrix(bits: Tensor) -> Tensor:
    """The inverse of `visibility_bits`; every segment sees itself."""
    segments = bits.shape[-1]
    order = torch.arange(segments, device=bits.device)
    return ((bits[..., None] >> order) & 1).bool() | (order[:, None] == order)


@torch.no_grad()
def packed_block_attention_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cache_key: Tensor,
    cache_value: Tensor,
    prefix_length: Tensor,
    visibility: Tensor,
    block: int,
    scaling: float | None = None,
    commit: Tensor | None = None,
    max_prefix_length: int | None = None,
) -> Tensor:
    """See `packed_block_attention.packed_block_attention`."""
    batch, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    prefix = cache_key.shape[2] if max_prefix_length is None else max_prefix_length
    scaling = dim**-0.5 if scaling is None else scaling
    work = query.dtype if query.dtype in (torch.float32, torch.float64) else torch.float32

    # Heads that share a key head are rows of one product: [batch, kv_heads, group * tokens, dim].
    rows = (query.to(work) * scaling).reshape(batch, kv_heads, -1, dim)
    prefix_scores = rows @ cache_key[:, :, :prefix].to(work).transpose(2, 3)
    outside = torch.arange(prefix, device=query.device) >= prefix_length[:, None]
    prefix_scores.masked_fill_(outside[:, None, None], -math.inf)

    visible = visibility_matrix(visibility_bits(visibility) if visibility.dtype == torch.bool else visibility)
    hidden = ~visible.repeat_interleave(block, dim=1).repeat_interleave(block, dim=2)[:, None, None]
    own_scores = (rows @ key.to(work).transpose(2, 3)).view(batch, kv_heads, -1, tokens, tokens)
    own_scores = own_scores.masked_fill_(hidden, -math.inf).view(batch, kv_heads, -1, tokens)

    weights = torch.cat((prefix_scores, own_scores), dim=-1).softmax(dim=-1)
    # What lies behind a row's prefix is uninitialised memory: 0 * NaN would spoil the sum.
    prefix_value = cache_value[:, :, :prefix].to(work).masked_fill(outside[:, None, :, None], 0.0)
    output = weights[..., :prefix] @ prefix_value + weights[..., prefix:] @ value.to(work)
    if commit is not None:
        _commit(cache_key, key, prefix_length, commit, block)
        _commit(cache_value, value, prefix_length, commit, block)
    return output.reshape(batch, heads, tokens, dim).transpose(1, 2).to(query.dtype).contiguous()


def _commit(cache: Tensor, new: Tensor, prefix_length: Tensor, commit: Tensor, block: int) -> None:
    """Writes segment `commit[b]` of `new` at `prefix_length[b]`; rows with -1 write back what they hold."""
    batch, kv_heads, capacity, dim = cache.shape
    offsets = torch.arange(block, device=cache.device)
    target = (prefix_length.long()[:, None] + offsets).clamp_(max=capacity - 1)[:, None, :, None]
    source = (commit.long().clamp(min=0)[:, None] * block + offsets)[:, None, :, None]
    shape = (batch, kv_heads, block, dim)
    target, source = target.expand(shape), source.expand(shape)
    kept = (commit < 0)[:, None, None, None]
    cache.scatter_(2, target, torch.where(kept, cache.gather(2, target), new.gather(2, source).to(cache.dtype)))
