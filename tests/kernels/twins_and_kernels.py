"""What the tests under Triton's interpreter share: fenced and poisoned memory, and a call of twin and kernel."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

FENCE = 64
CANARY = -7777


@pytest.fixture(autouse=True)
def fenced(monkeypatch) -> Iterator[None]:
    """`torch.empty` gives memory full of NaN (or canaries) between fences that must be intact at the end."""
    allocated: list[Tensor] = []
    original = torch.empty

    def poison(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else CANARY)

    def empty(*shape, device=None, dtype=None, **_) -> Tensor:
        size = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        buffer = poison(original(size.numel() + 2 * FENCE, dtype=dtype))
        allocated.append(buffer)
        return buffer[FENCE : FENCE + size.numel()].view(size)

    monkeypatch.setattr(torch, "empty", empty)
    yield
    monkeypatch.undo()
    for buffer in allocated:
        for fence in (buffer[:FENCE], buffer[-FENCE:]):
            intact = torch.full_like(fence, torch.nan if fence.is_floating_point() else CANARY)
            torch.testing.assert_close(fence, intact, rtol=0, atol=0, equal_nan=True)


def both(function: Callable, *arguments, **options) -> tuple:
    """What the twin and the kernel give; no input of the kernel may have changed."""
    before = [x.clone() for x in (*arguments, *options.values()) if isinstance(x, Tensor)]
    twin = function(*arguments, kernels="torch", **options)
    kernel = function(*arguments, kernels="triton", **options)
    after = [x for x in (*arguments, *options.values()) if isinstance(x, Tensor)]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    return twin, kernel
