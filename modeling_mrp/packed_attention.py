"""`attn_implementation="mrp_packed"`: packed block attention without a mask tensor, by the kernel or its torch twin.

A packed forward passes its `PackedLayout` through the layers; the new keys and values are read from the segments, the
prefix from the cache. Calls without a layout (prefill, training) go to sdpa.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .kernel_dispatch import resolve_kernels
from .packed_block_attention import packed_block_attention

PACKED_ATTENTION = "mrp_packed"


def mrp_packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_layout: Any = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: `query` `[rows, heads, tokens, dim]` -> `[rows, tokens, heads, dim]`.

    Args:
        packed_layout: the `PackedLayout` of a packed forward, `None` elsewhere.
    """
    if packed_layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows, _, tokens, _ = query.shape
    if key.shape[2] != tokens:  # the cache gives the prefix too
        key, value = key[:, :, -tokens:], value[:, :, -tokens:]
    cache, layer = packed_layout.cache, module.layer_idx
    return packed_block_attention(
        query,
        key,
        value,
        cache_key=cache.keys[layer][:rows],
        cache_value=cache.values[layer][:rows],
        prefix_length=packed_layout.prefix_length,
        visibility=packed_layout.visible,
        block=packed_layout.block,
        scaling=scaling,
        max_prefix_length=packed_layout.scratch,
        kernels=packed_layout.kernels,
    ), None


def prefer_packed_attention(config: Any, kernels: str, device: torch.device) -> None:
    """Switches a model on sdpa to packed attention where the Triton kernel runs; any other choice is the user's.

    The switch stays: two `generate` calls may run at once, and calls without a layout are served by sdpa anyway.
    """
    if config._attn_implementation == "sdpa" and resolve_kernels(kernels, device) == "triton":
        config._attn_implementation = PACKED_ATTENTION


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, mrp_packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, sdpa_mask)
