"""States that decoding meets, with the backbone's hidden states at each: what the tiny heads train on.

The backbone is frozen, so what it says at every state of a decoding trajectory is computed once and kept. A head step
is then trained without running the backbone at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..block_attention import TokenLayout, may_see
from .batches import ANSWER_BLOCKS, BLOCK, SEQUENCE
from .task import Problem, problems

WIDTH = ANSWER_BLOCKS * BLOCK
STATES = BLOCK + 1
_MASKED = -1
_ROWS = 16


@dataclass
class HeadStates:
    """Trajectories of `n` problems; state s of a block has its first s reveals of the trajectory.

    Attributes:
        clean: `[n, SEQUENCE]` int16 prompt and answer; real: `[n, SEQUENCE]` bool.
        first: `[n]` int64, block index at which the answer begins.
        states: `[n, STATES, WIDTH]` int16 ids of the answer's blocks, -1 at masked positions.
        counts: `[n, ANSWER_BLOCKS]` int64, reveals of each block's trajectory.
        clean_hidden: `[n, SEQUENCE, hidden]`, hidden: `[n, STATES, WIDTH, hidden]`, float16.
    """

    clean: Tensor
    real: Tensor
    first: Tensor
    states: Tensor
    counts: Tensor
    clean_hidden: Tensor
    hidden: Tensor

    def __len__(self) -> int:
        return self.clean.shape[0]


def positions_of(first: Tensor) -> Tensor:
    """`[n, WIDTH]` absolute positions of the answer's blocks."""
    return (first[:, None] * BLOCK + torch.arange(WIDTH)).clamp(max=SEQUENCE - 1)


def record_states(model: Any, tokenizer: Any, count: int, seed: int, options: dict[str, Any]) -> HeadStates:
    """Decodes `count` problems of the training stream under `options` and records every state of every block."""
    stream = problems("train", 10_000_000 + seed)
    parts = [
        _record(model, tokenizer, list(islice(stream, min(_ROWS, count - begin))), options)
        for begin in tqdm(range(0, count, _ROWS), desc="states", mininterval=5)
    ]
    return HeadStates(
        *(torch.cat([getattr(part, name) for part in parts]) for name in HeadStates.__dataclass_fields__)
    )


def load_or_record(path: Path, *arguments: Any) -> HeadStates:
    """`record_states`, kept in `path`."""
    if path.exists():
        return HeadStates(**torch.load(path, weights_only=True))
    states = record_states(*arguments)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(vars(states), path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    return states


@torch.no_grad()
def _record(model: Any, tokenizer: Any, chosen: list[Problem], options: dict[str, Any]) -> HeadStates:
    chats = [[{"role": "user", "content": problem.question}] for problem in chosen]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    columns = inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs, max_new_tokens=SEQUENCE // 2, return_dict_in_generate=True, output_trace=True, **options
    )
    rows = len(chosen)
    clean = torch.full((rows, SEQUENCE), model.config.pad_token_id)
    step = torch.full((rows, SEQUENCE), _MASKED)
    real = torch.zeros((rows, SEQUENCE), dtype=torch.bool)
    first = torch.zeros(rows, dtype=torch.int64)
    for row in range(rows):
        padding = int((inputs["attention_mask"][row] == 0).sum())
        length = min(columns - padding + int(output.new_tokens[row]), SEQUENCE)
        clean[row, :length] = output.sequences[row, padding : padding + length]
        step[row, :length] = output.reveal_step[row, padding : padding + length]
        real[row, : -(-length // BLOCK) * BLOCK] = True
        first[row] = (columns - padding) // BLOCK
    positions = positions_of(first)
    tokens, order = clean.gather(1, positions), step.gather(1, positions)
    inside = real.gather(1, positions)
    blocks = order.view(rows, ANSWER_BLOCKS, BLOCK)
    revealed = (blocks != _MASKED) & inside.view_as(blocks)
    # Rank of each reveal inside its block: 0 first. Prompt tokens have step -1 and stand from the beginning.
    key = torch.where(revealed, blocks, 10_000)
    rank = key.argsort(dim=2, stable=True).argsort(dim=2)
    prompt = (order == _MASKED) & (positions < _prompt_ends(inputs)[:, None])
    shown = [(rank < s) & revealed for s in range(STATES)]
    states = torch.stack([
        torch.where(mask.flatten(1) | prompt, tokens, _MASKED) for mask in shown
    ], dim=1)  # fmt: skip
    clean_hidden, hidden = _hidden(model, clean, real, states, positions, inside)
    return HeadStates(
        clean.to(torch.int16),
        real,
        first,
        states.to(torch.int16),
        revealed.sum(dim=2),
        clean_hidden.half(),
        hidden.half(),
    )


def _prompt_ends(inputs: Any) -> Tensor:
    return inputs["attention_mask"].sum(dim=1)


def _hidden(
    model: Any, clean: Tensor, real: Tensor, states: Tensor, positions: Tensor, inside: Tensor
) -> tuple[Tensor, Tensor]:
    """The backbone's hidden states of the clean sequence and of every state, each over the clean blocks before it."""
    rows = clean.shape[0]
    filled = states.masked_fill(states == _MASKED, model.config.mask_token_id)
    ids = torch.cat([clean, filled.flatten(1)], dim=1)
    span = torch.arange(SEQUENCE).expand(rows, -1)
    all_positions = torch.cat([span, positions.repeat(1, STATES)], dim=1)
    mask = model.attention_mask(copies_mask(real, positions, inside, STATES))
    hidden = model.backbone(ids, all_positions, mask)
    return hidden[:, :SEQUENCE], hidden[:, SEQUENCE:].unflatten(1, (STATES, WIDTH))


def copies_mask(real: Tensor, positions: Tensor, inside: Tensor, copies: int) -> Tensor:
    """`[rows, tokens, tokens]` bool: clean tokens are block-causal; a copy's block sees itself and clean ones."""
    rows = real.shape[0]
    span = torch.arange(SEQUENCE).expand(rows, -1)
    sample = torch.cat([real.long() - 1, (inside.long() - 1).repeat(1, copies)], dim=1)
    place = torch.cat([span, positions.repeat(1, copies)], dim=1)
    copy = torch.cat(
        [torch.zeros_like(span), torch.arange(1, copies + 1).repeat_interleave(WIDTH).expand(rows, -1)], 1
    )
    layout = TokenLayout(sample, place // BLOCK, copy > 0)
    return may_see(layout, layout) & ((copy[:, :, None] == copy[:, None, :]) | (copy[:, None, :] == 0))


def batches(states: HeadStates, size: int, seed: int) -> Iterator[Tensor]:
    """Endless index batches `[size]`, every problem once an epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(states), generator=generator)
        for begin in range(0, len(order) - size + 1, size):
            yield order[begin : begin + size]
