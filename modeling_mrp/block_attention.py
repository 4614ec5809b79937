"""Which token may see which: the block-causal rule and its forms for transformers' attention implementations.

A token is described by three integers: the *sample* that it belongs to (padding is a sample of its own), its *block*
inside the sample, and whether it is *noisy* (part of a copy that is being denoised). The rule, for a query q and a key
k of the same sample:

    q clean: sees clean k with block(k) <= block(q)                      block-causal
    q noisy: sees noisy k of its own block and clean k of earlier blocks  what decoding sees

Without a noisy copy this is plain block-causal attention (DESIGN section 1).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Masks of any other implementation would be dropped without an error (FlashAttention ignores mask functions).
MASKED_IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention")
PADDING_SAMPLE = -1


class TokenLayout(NamedTuple):
    """What the attention rule needs to know of each token.

    Attributes:
        sample: `[batch, tokens]` int64; tokens of different samples never see each other; `-1` is padding.
        block: `[batch, tokens]` int64, index of the block in its sample.
        noisy: `[batch, tokens]` bool, or `None` where no token is noisy.
    """

    sample: Tensor
    block: Tensor
    noisy: Tensor | None = None


def may_see(query: TokenLayout, key: TokenLayout) -> Tensor:
    """`[batch, queries, keys]` bool: the rule above, evaluated for all pairs."""
    same_sample = query.sample[:, :, None] == key.sample[:, None, :]
    query_block, key_block = query.block[:, :, None], key.block[:, None, :]
    if query.noisy is None or key.noisy is None:
        return same_sample & (key_block <= query_block)
    query_noisy, key_noisy = query.noisy[:, :, None], key.noisy[:, None, :]
    own = query_noisy & key_noisy & (key_block == query_block)
    earlier = ~key_noisy & (key_block < query_block)
    clean = ~query_noisy & ~key_noisy & (key_block == query_block)
    return same_sample & (own | earlier | clean)


def attention_mask_for(implementation: str, allowed: Tensor, dtype: torch.dtype) -> Any:
    """`allowed` in the form that an attention implementation of transformers understands.

    Args:
        implementation: `config._attn_implementation`.
        allowed: `[batch, queries, keys]` bool.
        dtype: dtype of the hidden states (eager adds its mask to the scores).

    Returns:
        `[batch, 1, queries, keys]` bool (sdpa) or additive float (eager), or a flex `BlockMask`.

    Raises:
        ValueError: the implementation is known to ignore masks.
    """
    if implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        batch, queries, keys = allowed.shape
        return create_block_mask(
            lambda b, h, q, k: allowed[b, q, k], batch, None, queries, keys, device=allowed.device, _compile=False
        )
    if implementation == "eager":
        lowest = torch.finfo(dtype).min
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, lowest)[:, None]
    if implementation in ("sdpa", "mrp_packed"):
        return allowed[:, None]
    raise ValueError(
        f"attn_implementation={implementation!r} ignores block masks; allowed: {', '.join(MASKED_IMPLEMENTATIONS)}, "
        'mrp_packed. Load the model with attn_implementation="sdpa".'
    )


def row_positions(attention_mask: Tensor) -> Tensor:
    """`[batch, tokens]` int64 position of every real token in its own row; padding gets 0."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp_(min=0).mul_(attention_mask.long())


def layout_of_padded(attention_mask: Tensor, block_length: int) -> TokenLayout:
    """Layout of a padded batch: one sample a row, the block grid counted from the row's own first real token."""
    real = attention_mask.bool()
    position = row_positions(attention_mask)
    return TokenLayout(sample=real.long() - 1, block=position // block_length)


def check_attention_mask(attention_mask: Tensor, input_ids: Tensor) -> None:
    """Raises `ValueError` for a padding mask of a wrong shape, with holes, or with an empty row."""
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it must have that of input_ids, "
            f"{tuple(input_ids.shape)}. Pass the mask that the tokenizer returned with these ids."
        )
    real = attention_mask.bool()
    lengths = real.sum(dim=1)
    if bool((lengths == 0).any()):
        row = int((lengths == 0).nonzero()[0])
        raise ValueError(f"row {row} of the prompt is empty (attention_mask holds no 1); give at least one token.")
    first = real.long().argmax(dim=1)
    last = real.shape[1] - 1 - real.flip(1).long().argmax(dim=1)
    if bool((last - first + 1 != lengths).any()):
        row = int((last - first + 1 != lengths).nonzero()[0])
        raise ValueError(
            f"attention_mask of row {row} has holes: {int(lengths[row])} ones between columns {int(first[row])} and "
            f"{int(last[row])}. Allowed: one run of ones per row (left or right padding). Remove padding inside rows."
        )
