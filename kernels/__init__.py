"""Triton kernels of multi-token residual prediction, each beside the torch twin that specifies it."""

from .kernel_dispatch import resolve_kernels
from .philox_torch import NoiseKey, gumbel_noise
from .reveal_statistics import reveal_statistics
from .reveal_statistics_torch import RevealStatistics


__all__ = ["NoiseKey", "RevealStatistics", "gumbel_noise", "resolve_kernels", "reveal_statistics"]
