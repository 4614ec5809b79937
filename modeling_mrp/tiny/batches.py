"""Training batches of the tiny backbone: a clean copy of each sequence beside noisy copies of its answer blocks."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..block_attention import TokenLayout
from .task import Problem

BLOCK = 8
SEQUENCE = 96
ANSWER_BLOCKS = 7


class Batch(NamedTuple):
    """One step's tensors.

    Attributes:
        ids: `[batch, SEQUENCE + copies * ANSWER_BLOCKS * BLOCK]` int64, clean tokens then noisy copies.
        labels: same shape, -100 where nothing is supervised.
        positions: same shape.
        layout: for the attention rule; each noisy copy sees itself and the clean copy.
        copy: same shape int64, 0 for clean, 1.. for the noisy copies.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    layout: TokenLayout
    copy: Tensor


def encode(problem: Problem, tokenizer: object) -> tuple[list[int], list[int]] | None:
    """Prompt and answer ids as the chat template renders them; `None` if they do not fit the fixed shapes."""
    prompt = tokenizer.user_token + problem.question + tokenizer.eos_token + tokenizer.assistant_token  # type: ignore[attr-defined]
    ids = tokenizer(prompt, add_special_tokens=False).input_ids  # type: ignore[operator]
    answer = tokenizer(problem.solution + tokenizer.eos_token, add_special_tokens=False).input_ids  # type: ignore[operator, attr-defined]
    first = len(ids) // BLOCK
    last = (len(ids) + len(answer) - 1) // BLOCK
    if last - first + 1 > ANSWER_BLOCKS or (last + 1) * BLOCK > SEQUENCE:
        return None
    return ids, answer


def make_batch(
    stream: Iterator[Problem], tokenizer: object, size: int, copies: int, generator: torch.Generator
) -> Batch:
    """The next `size` problems that fit, noised block by block with rates stratified over (0.05, 1)."""
    pad, mask = tokenizer.pad_token_id, tokenizer.mask_token_id  # type: ignore[attr-defined]
    clean = torch.full((size, SEQUENCE), pad)
    sample = torch.full((size, SEQUENCE), -1)
    start = torch.zeros(size, dtype=torch.int64)
    supervised = torch.zeros((size, SEQUENCE), dtype=torch.bool)
    for row in range(size):
        encoded = None
        while encoded is None:
            encoded = encode(next(stream), tokenizer)
        prompt, answer = encoded
        length = len(prompt) + len(answer)
        end = -(-length // BLOCK) * BLOCK
        clean[row, :length] = torch.tensor(prompt + answer)
        sample[row, :end] = 0
        # The rest of the last block is supervised too, as padding, so that decoding knows what follows the end.
        supervised[row, len(prompt) : end] = True
        start[row] = len(prompt) // BLOCK
    width = ANSWER_BLOCKS * BLOCK
    positions = torch.arange(SEQUENCE).expand(size, -1)
    noisy_positions = (start[:, None] * BLOCK + torch.arange(width)).clamp(max=SEQUENCE - 1)
    overflow = start[:, None] * BLOCK + torch.arange(width) >= SEQUENCE
    parts = [(clean, torch.full_like(clean, -100), positions, sample, torch.zeros_like(clean))]
    total = size * copies * ANSWER_BLOCKS
    rates = (torch.randperm(total, generator=generator) + torch.rand(total, generator=generator)) / total
    rates = (0.05 + 0.95 * rates).view(copies, size, ANSWER_BLOCKS).repeat_interleave(BLOCK, 2)
    for copy in range(copies):
        tokens = clean.gather(1, noisy_positions)
        wanted = supervised.gather(1, noisy_positions) & ~overflow
        noised = wanted & (torch.rand(wanted.shape, generator=generator) < rates[copy])
        noisy_sample = sample.gather(1, noisy_positions).masked_fill(overflow, -1)
        parts.append((
            tokens.masked_fill(noised, mask),
            tokens.masked_fill(~noised, -100),
            noisy_positions,
            noisy_sample,
            torch.full_like(tokens, copy + 1),
        ))  # fmt: skip
    ids, labels, all_positions, samples, copy_index = (
        torch.cat(columns, dim=1) for columns in zip(*parts, strict=True)
    )
    layout = TokenLayout(samples, all_positions // BLOCK, copy_index > 0)
    return Batch(ids, labels, all_positions, layout, copy_index)
