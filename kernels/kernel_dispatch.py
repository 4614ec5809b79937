"""Which implementation of an operation runs: one argument, no environment variables."""

import importlib.util
from functools import lru_cache

import torch

CHOICES = ("auto", "torch", "triton")


@lru_cache(maxsize=1)
def triton_is_available() -> bool:
    """Whether the package `triton` can be imported; it is not imported here."""
    return importlib.util.find_spec("triton") is not None


def resolve_kernels(choice: str, device: torch.device | str) -> str:
    """The implementation to use, `"torch"` or `"triton"`.

    Args:
        choice: `"auto"` takes Triton on CUDA and ROCm devices where it is installed and the torch twin elsewhere;
            `"torch"` and `"triton"` demand one of the two.
        device: where the tensors are.

    Raises:
        ValueError: `choice` is not one of the three, or `"triton"` is demanded for a device it cannot run on.
        ImportError: `"triton"` is demanded and not installed.
    """
    if choice not in CHOICES:
        raise ValueError(f"kernels={choice!r} is unknown; use one of {', '.join(map(repr, CHOICES))}.")
    if choice == "torch":
        return "torch"
    kind = device.type if isinstance(device, torch.device) else torch.device(device).type
    if choice == "auto":
        return "triton" if kind == "cuda" and triton_is_available() else "torch"
    if not triton_is_available():
        raise ImportError('kernels="triton" needs the package triton: install it, or use kernels="auto" or "torch".')
    if kind != "cuda" and not _interpreted():
        raise ValueError(
            f'kernels="triton" cannot run on a {kind!r} device (only on CUDA and ROCm, or anywhere under the Triton '
            'interpreter); use kernels="auto" or "torch", or move the tensors to a GPU.'
        )
    return "triton"


def resolve_within(choice: str, device: torch.device | str, limit: str | None) -> str:
    """`resolve_kernels`, but the twin for what the kernel cannot do.

    Args:
        choice, device: as there.
        limit: what that is, as it follows "cannot"; `None`: it can.

    Raises:
        ValueError: `"triton"` is demanded for what the kernel cannot do; and as `resolve_kernels`.
    """
    if choice == "triton" and limit is not None:
        raise ValueError(f'kernels="triton" cannot {limit}; use kernels="auto" or "torch".')
    chosen = resolve_kernels(choice, device)
    return chosen if limit is None else "torch"


@lru_cache(maxsize=8)
def compute_capability(device: torch.device) -> int:
    """80, 90, 100 for the CUDA generations, by which tile sizes are chosen; ROCm counts as 80, no GPU as 90."""
    if device.type != "cuda":
        return 90
    if torch.version.hip:
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _interpreted() -> bool:
    try:
        from triton import knobs
    except ImportError:  # before Triton 3.4
        return False
    return bool(knobs.runtime.interpret)
