"""Triton kernels of multi-token residual prediction, each beside the torch twin that specifies it."""

from .kernel_dispatch import resolve_kernels
from .mrp_input import mrp_input, qk_norm_rope
from .packed_block_attention import packed_block_attention
from .packed_block_attention_torch import visibility_bits
from .philox_torch import NoiseKey, gumbel_noise
from .residual_kl import residual_kl
from .reveal_statistics import reveal_statistics
from .reveal_statistics_torch import RevealStatistics
from .shortlist_residual import shortlist, shortlist_residual
from .shortlist_residual_torch import Shortlist

__all__ = [
    "NoiseKey",
    "RevealStatistics",
    "Shortlist",
    "gumbel_noise",
    "mrp_input",
    "packed_block_attention",
    "qk_norm_rope",
    "residual_kl",
    "resolve_kernels",
    "reveal_statistics",
    "shortlist",
    "shortlist_residual",
    "visibility_bits",
]
