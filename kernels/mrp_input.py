"""The head's input and the first steps of its attention, fused for inputs of a few blocks."""

import torch
from torch import Tensor

from .kernel_dispatch import resolve_kernels
from .mrp_input_torch import mrp_input_torch, qk_norm_rope_torch


def mrp_input(
    ids: Tensor,
    state: Tensor,
    embedding: Tensor,
    embedding_norm: Tensor,
    state_norm: Tensor,
    projection: Tensor,
    *,
    eps: float = 1e-6,
    kernels: str = "auto",
) -> Tensor:
    """`u = P [ norm_e(embed(ids)) ; norm_h(acc) ]`, the concatenation never made.

    The kernel has no gradient: where one is wanted, `auto` takes the twin.

    Args:
        ids: `[..., tokens]` int64.
        state: `[..., tokens, hidden]`, the running sum `acc`.
        embedding: `[vocab, hidden]`.
        embedding_norm, state_norm: `[hidden]`, weights of the two RMS norms.
        projection: `[out, 2 * hidden]`; its first half takes the embedding.
        eps: of both norms.
        kernels: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        `[..., tokens, out]` in the state's dtype.

    Raises:
        ValueError: shapes that do not fit together, or a gradient is wanted from the kernel.
    """
    hidden = embedding.shape[-1]
    if state.shape != (*ids.shape, hidden):
        raise ValueError(f"state {list(state.shape)} must be {[*ids.shape, hidden]} for ids {list(ids.shape)}.")
    if projection.ndim != 2 or projection.shape[1] != 2 * hidden:
        raise ValueError(f"projection {list(projection.shape)} must be [out, {2 * hidden}].")
    if embedding_norm.shape != (hidden,) or state_norm.shape != (hidden,):
        raise ValueError(
            f"the norm weights {list(embedding_norm.shape)} and {list(state_norm.shape)} must be [{hidden}]."
        )
    if _choose(kernels, state, embedding, embedding_norm, state_norm, projection) == "triton":
        from .mrp_input_triton import mrp_input_triton as implementation
    else:
        implementation = mrp_input_torch
    return implementation(ids, state, embedding, embedding_norm, state_norm, projection, eps=eps)


def qk_norm_rope(
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
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:
    """RMS norm per head, then rotary position embedding (halves, as in Qwen3).

    The kernel has no gradient: where one is wanted, `auto` takes the twin. With `out` there is none to be had.

    Args:
        query: `[batch, tokens, heads, dim]`, what the query projection gives, seen as heads.
        key: `[batch, tokens, kv_heads, dim]`.
        query_norm, key_norm: `[dim]`.
        cos, sin: `[batch or 1, tokens, dim]`, as the rotary embedding gives them.
        eps: of the norms.
        value: `[batch, tokens, kv_heads, dim]`, only together with `out`: copied there, not rotated.
        out: where keys and values are written, such as two views of a cache: `[batch, kv_heads, tokens, dim]` each, of
            the same strides, the last of which is 1.
        kernels: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        The two in the order of transformers' attention interface, `[batch, heads, tokens, dim]` and
        `[batch, kv_heads, tokens, dim]` (`out[0]` if there is one).

    Raises:
        ValueError: shapes that do not fit together, or a gradient is wanted from the kernel.
    """
    batch, tokens, _, dim = query.shape
    if key.shape != (batch, tokens, key.shape[2], dim) or dim % 2:
        raise ValueError(f"query {list(query.shape)} and key {list(key.shape)} must share all but heads; dim is even.")
    if query_norm.shape != (dim,) or key_norm.shape != (dim,):
        raise ValueError(f"the norm weights {list(query_norm.shape)} and {list(key_norm.shape)} must be [{dim}].")
    rope = cos.shape
    if rope != sin.shape or (rope != (batch, tokens, dim) and rope != (1, tokens, dim)):
        raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} must be [{batch} or 1, {tokens}, {dim}].")
    if value is not None or out is not None:
        _validate_out(key, value, out)
    if _choose(kernels, query, key, query_norm, key_norm) == "triton":
        from .mrp_input_triton import qk_norm_rope_triton as implementation
    else:
        implementation = qk_norm_rope_torch
    return implementation(query, key, query_norm, key_norm, cos, sin, eps=eps, value=value, out=out)


def _validate_out(key: Tensor, value: Tensor | None, out: tuple[Tensor, Tensor] | None) -> None:
    if value is None or out is None:
        raise ValueError("value and out belong together: the keys and the values are written to out.")
    batch, tokens, kv_heads, dim = key.shape
    shape, strides = (batch, kv_heads, tokens, dim), out[0].stride()
    if value.shape != key.shape or out[0].shape != shape or out[1].shape != shape:
        raise ValueError(
            f"value {list(value.shape)} must have the key's shape {list(key.shape)}, and out "
            f"{[list(part.shape) for part in out]} must be twice {list(shape)}."
        )
    if out[1].stride() != strides or strides[3] != 1:
        raise ValueError(f"the strides of out, {strides} and {out[1].stride()}, must be equal and end with 1.")


def _choose(kernels: str, *tensors: Tensor) -> str:
    """`resolve_kernels`, but the twin where a gradient would be lost."""
    chosen = resolve_kernels(kernels, tensors[0].device)
    if chosen == "triton" and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        if kernels == "triton":
            raise ValueError(
                'kernels="triton" has no gradient here, and an input requires one; call it under torch.no_grad(), or '
                'use kernels="auto" or "torch".'
            )
        return "torch"
    return chosen
