"""Triton kernels of multi-token residual prediction, each beside the torch twin that specifies it."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

if __name__ == "kernels":
    # A python started in the repository's root finds this folder where transformers asks for the PyPI library of that
    # name. Ours is called mrp_kernels: the library takes this module's place, or, if there is none, it stays empty.
    _root = Path(__file__).resolve().parents[1]
    _library = PathFinder.find_spec("kernels", [entry for entry in sys.path if Path(entry).resolve() != _root])
    if _library is not None and _library.loader is not None:
        sys.modules["kernels"] = module_from_spec(_library)
        _library.loader.exec_module(sys.modules["kernels"])
else:
    from .kernel_dispatch import resolve_kernels
    from .lattice_states import lattice_states
    from .lattice_states_torch import DraftStatistics, PackedStates, Perturbation
    from .mrp_input import mrp_input, qk_norm_rope
    from .packed_block_attention import packed_block_attention
    from .packed_block_attention_torch import visibility_bits
    from .philox_torch import NoiseKey, gumbel_noise
    from .residual_kl import residual_kl
    from .reveal_rule import PositionStatistics, RevealRule
    from .reveal_statistics import reveal_statistics
    from .reveal_statistics_torch import RevealStatistics
    from .shortlist_residual import shortlist, shortlist_residual
    from .shortlist_residual_torch import Shortlist
    from .verify_states import verify_states
    from .verify_states_torch import VerifiedStates, split_host

__all__ = [
    "DraftStatistics",
    "NoiseKey",
    "PackedStates",
    "Perturbation",
    "PositionStatistics",
    "RevealRule",
    "RevealStatistics",
    "Shortlist",
    "VerifiedStates",
    "gumbel_noise",
    "lattice_states",
    "mrp_input",
    "packed_block_attention",
    "qk_norm_rope",
    "residual_kl",
    "resolve_kernels",
    "reveal_statistics",
    "shortlist",
    "shortlist_residual",
    "split_host",
    "verify_states",
    "visibility_bits",
]
