"""Trajectories: the backbone writes answers itself, and the order in which it reveals them is kept.

A head that is trained on them meets exactly the states that decoding meets, and the states of all steps are known
beforehand, so that their teacher passes fit into one batch.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from ..modeling_mrp import MRPForCausalLM
from ..noising import IGNORED
from .data import Collator, load_samples, pad_token_of
from .errors import TrainingError
from .recorded_states import StateRecorder

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def record_trajectories(
    model_path: str,
    data: str,
    output: Path,
    max_new_tokens: int,
    batch_size: int,
    limit: int | None = None,
    hidden_states: Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> int:
    """Writes one jsonl row per prompt: `input_ids`, `labels`, `reveal_order`; returns the number of rows.

    Args:
        model_path: backbone, run in `dtype` on `device`.
        data: rows with `prompt`, or `messages` (all but a last assistant turn are the prompt).
        output: file to write.
        max_new_tokens: per row; a row that does not end by then is cut behind its last whole block.
        batch_size: rows decoded together.
        limit: use only so many rows.
        hidden_states: folder for the backbone's hidden states at every state of the trajectories (see
            `recorded_states.py`); rows then have `record_row`, too.

    Raises:
        TrainingError: a row has no prompt, or `dtype` is unknown.
    """
    model = load_model(model_path, dtype, device)
    prompts = load_prompts(model_path, data, limit)
    # Rows of one batch should be of like length; the order of rows does not matter afterwards.
    prompts.sort(key=len)
    written = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    recorder = None if hidden_states is None else StateRecorder(hidden_states, model)
    collate = Collator(pad_token_of(model))
    part = output.with_suffix(".part")
    with part.open("w") as file:
        for begin in tqdm(range(0, len(prompts), batch_size), desc="recording", unit="batch"):
            rows: list[dict[str, Any]] = list(
                decode_trajectories(model, prompts[begin : begin + batch_size], max_new_tokens)
            )
            if recorder is not None and rows:
                batch = {name: values.to(model.device) for name, values in collate(rows).items()}
                for row, first in zip(rows, recorder.add(batch), strict=True):
                    row["record_row"] = first
            file.writelines(json.dumps(row) + "\n" for row in rows)
            written += len(rows)
    if recorder is not None:
        recorder.close()
    part.replace(output)
    return written


def load_model(path: str, dtype: str, device: str) -> Any:
    """A checkpoint in eval mode.

    Raises:
        TrainingError: `dtype` is unknown.
    """
    if dtype not in _DTYPES:
        raise TrainingError(f"--dtype {dtype!r}; allowed: {', '.join(_DTYPES)}.")
    return MRPForCausalLM.from_pretrained(path, dtype=_DTYPES[dtype]).eval().to(device)


def load_prompts(model_path: str, data: str, limit: int | None) -> list[list[int]]:
    """Token ids of the prompts of a data set, by the model's own tokenizer and chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    samples = load_samples(data, "train", None, False)
    if limit is not None:
        samples = samples.select(range(min(limit, len(samples))))
    return [_prompt_ids(row, number, tokenizer) for number, row in enumerate(samples)]


def decode_trajectories(model: Any, prompts: list[list[int]], max_new_tokens: int) -> Iterator[dict[str, list[int]]]:
    """The rows of one batch of prompts, each up to the block that holds its end token, or to the last whole one."""
    config = model.config
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), longest), dtype=torch.int64, device=model.device)
    mask = torch.zeros_like(ids)
    for index, prompt in enumerate(prompts):
        ids[index, longest - len(prompt) :] = torch.tensor(prompt, device=ids.device)
        mask[index, longest - len(prompt) :] = 1
    # Decoding must go on behind the end token, whose block is denoised as a whole. The mask token is never chosen.
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=max_new_tokens, mrp_mode="none", eos_token_id=config.mask_token_id,
        return_dict_in_generate=True, output_trace=True,
    )  # fmt: skip
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    for index, prompt in enumerate(prompts):
        new = output.sequences[index, longest:].tolist()
        end = next((place for place, token in enumerate(new) if token in ends), len(new) - 1)
        block = config.block_size
        whole = (len(prompt) + len(new)) // block * block
        length = min(-(-(len(prompt) + end + 1) // block) * block, whole) - len(prompt)
        if length <= 0:
            continue
        step = [-1] * len(prompt) + output.reveal_step[index, longest : longest + length].tolist()
        yield {
            "input_ids": prompt + new[:length],
            "labels": [IGNORED] * len(prompt) + new[:length],
            "reveal_order": _ranks(step, config.block_size),
        }


def _ranks(step: list[int], block: int) -> list[int]:
    """Rank of each token's reveal inside its block; what one step reveals together ranks from the left."""
    ranks = []
    for begin in range(0, len(step), block):
        part = step[begin : begin + block]
        order = sorted(range(len(part)), key=lambda place: part[place])
        ranks += [order.index(place) for place in range(len(part))]
    return ranks


def _prompt_ids(row: dict[str, Any], number: int, tokenizer: Any) -> list[int]:
    messages = row.get("messages")
    if messages is None and row.get("prompt") is not None:
        messages = [{"role": "user", "content": row["prompt"]}]
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise TrainingError(f"row {number} has the columns {sorted(row)}; allowed: prompt, or messages.")
    if tokenizer.chat_template:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(rendered["input_ids"])
    return list(tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"])
