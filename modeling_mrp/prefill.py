"""Prefill: reads the finished blocks of the prompts into the caches, in block-aligned chunks.

Memory grows linearly with the prompt: a chunk's mask is `[chunk, prefix + chunk]`, and no tensor is prompt length
squared.
"""

from typing import Any

import torch
from torch import Tensor

from .head_runner import HeadRunner
from .packed_forward import PackedStack

_CHUNK_TOKENS = 512


def prefill(
    model: Any, prompts: list[Tensor], stack: PackedStack, runner: HeadRunner | None, block: int, reused: int = 0
) -> int:
    """Stores all whole blocks of each prompt; returns the number of backbone forwards.

    Rows are aligned at their own first token, so a row's block grid starts at column 0. Shorter rows carry garbage
    behind their end, which their committed length hides.

    Args:
        prompts: one `[n]` int64 tensor per row.
        stack: the backbone's.
        runner: the head's, or `None`; a head that sees only its block has no cache to fill.
        block: block length.
        reused: positions (whole blocks) that the caches already hold for every row.
    """
    device = prompts[0].device
    whole = max(len(prompt) for prompt in prompts) // block * block
    if whole <= reused:
        return 0
    ids = torch.zeros((len(prompts), whole), dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        kept = min(len(prompt), whole)
        ids[row, :kept] = prompt[:kept]
    chunk = max(block, _CHUNK_TOKENS // block * block)
    forwards = 0
    for begin in range(reused, whole, chunk):
        end = min(begin + chunk, whole)
        positions = torch.arange(begin, end, device=device)
        mask = None
        if end - begin > block:
            seen = torch.arange(end, device=device) // block <= (positions // block)[:, None]
            mask = model.attention_mask(seen[None].expand(len(prompts), -1, -1))
        rows = positions.expand(len(prompts), -1)
        stack.cache.scratch, stack.cache.rows = begin, len(prompts)
        hidden = model.backbone(ids[:, begin:end], rows, mask, stack.cache)
        forwards += 1
        if runner is not None and runner.stack is not None:
            runner.stack.cache.scratch, runner.stack.cache.rows = begin, len(prompts)
            model.head(ids[:, begin:end], hidden, rows, mask, runner.stack.cache, kernels=stack.kernels)
    return forwards
