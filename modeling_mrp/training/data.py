"""From files or a Hub data set to packed, labelled samples.

A sample is one of: plain text (everything supervised), a prompt and a response (the response is), chat messages
(assistant turns are), or ids that are ready (`input_ids`, `labels`, and, for recorded trajectories, `reveal_order`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset, load_dataset
from torch import Tensor

from ..noising import IGNORED
from .errors import TrainingError

_COLUMNS = ("input_ids", "labels", "position_ids", "sample_keys", "reveal_order", "record_rows")
_FORMATS = {
    "ids": ("input_ids",), "messages": ("messages",), "prompt_response": ("prompt", "response"), "text": ("text",),
}  # fmt: skip
_FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
# Samples that are packed together; packing never looks further, so that streaming works.
_PACK_WINDOW = 512


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from and how they become sequences.

    Attributes:
        train, evaluation: a file (jsonl, json, csv, parquet), a list of files, or a Hub data set's name.
        train_split, evaluation_split, subset: of a Hub data set.
        evaluation_size: without `evaluation`, this many samples are held out of `train` (not when streaming).
        streaming: read as the training goes; the trainer then needs `max_steps`.
        max_length: tokens of a packed sequence; longer samples are an error, or are skipped.
        too_long: `"error"` or `"skip"`.
        packing: put several samples into one sequence. They never see each other.
        complete_last_block: fill the last block of a sample up with supervised padding tokens, as decoding does.
        recorded_states: folder that `mrp-train record --hidden-states` wrote beside `train`, for
            `objective.layout: recorded`.
        chat_prompts: render prompt and response as a user and an assistant turn, if the tokenizer has a template.
    """

    train: str | list[str] = ""
    evaluation: str | list[str] | None = None
    train_split: str = "train"
    evaluation_split: str = "test"
    subset: str | None = None
    evaluation_size: int = 0
    streaming: bool = False
    max_length: int = 4096
    too_long: str = "error"
    packing: bool = True
    complete_last_block: bool = True
    chat_prompts: bool = True
    recorded_states: str | None = None

    def __post_init__(self) -> None:
        if self.too_long not in ("error", "skip"):
            raise TrainingError(f"data.too_long={self.too_long!r}; allowed: 'error', 'skip'.")
        if self.max_length < 1:
            raise TrainingError(f"data.max_length={self.max_length}; allowed: at least 1.")
        if not self.train:
            raise TrainingError("data.train is empty; give a jsonl or parquet file, or the name of a Hub data set.")


def load_samples(source: str | list[str], split: str, subset: str | None, streaming: bool) -> Any:
    """A `datasets` data set of raw rows.

    Raises:
        TrainingError: a file is missing, or of an unknown kind.
    """
    names = [source] if isinstance(source, str) else list(source)
    kinds = {_FILES.get(Path(name).suffix) for name in names}
    if kinds == {None} and len(names) == 1:
        return load_dataset(names[0], subset, split=split, streaming=streaming)
    if len(kinds) > 1 or None in kinds:
        raise TrainingError(f"data files {names} are of mixed or unknown kinds; allowed: {', '.join(_FILES)}.")
    missing = [name for name in names if not Path(name).exists()]
    if missing:
        raise TrainingError(f"data file {missing[0]} does not exist; give a path from {Path.cwd()}.")
    kind = kinds.pop()
    assert kind is not None
    return load_dataset(kind, data_files=names, split="train", streaming=streaming)


class SampleEncoder:
    """Turns a raw row into ids and labels.

    Args:
        tokenizer: of the backbone; may be `None` if rows bring `input_ids`.
        config: of the data.
        block_length: for `complete_last_block`.
        pad_token_id: the token that fills up the last block.
    """

    def __init__(self, tokenizer: Any, config: DataConfig, block_length: int, pad_token_id: int | None):
        self.tokenizer, self.config, self.block_length = tokenizer, config, block_length
        self.pad_token_id = pad_token_id

    def __call__(self, row: dict[str, Any], number: int) -> dict[str, list[int]]:
        """The columns of row `number`, each `[tokens]`; empty if skipped.

        Raises:
            TrainingError: the row is empty, too long, or has none of the known columns; it names the row.
        """
        kind = next((kind for kind, names in _FORMATS.items() if all(row.get(n) is not None for n in names)), None)
        if kind is None:
            raise TrainingError(
                f"row {number} has the columns {sorted(row)}; allowed: messages, or prompt and response, or text, "
                "or input_ids."
            )
        ids, supervised = getattr(self, f"_{kind}")(row, number)
        if not ids:
            raise TrainingError(f"row {number} is empty; remove it, or give it at least one token.")
        if not any(supervised):
            raise TrainingError(f"row {number} has nothing to learn from: its answer is empty. Remove it.")
        order = list(row.get("reveal_order") or [0] * len(ids))
        first = row.get("record_row")
        if first is None:
            if self.config.recorded_states is not None:
                raise TrainingError(f"row {number} has no record_row; data.recorded_states needs one in every row.")
            first = 0
        if self.config.complete_last_block and kind != "ids" and self.pad_token_id is not None:
            missing = -len(ids) % self.block_length
            ids, supervised = ids + [self.pad_token_id] * missing, supervised + [True] * missing
            order += [0] * missing
        if len(ids) > self.config.max_length:
            if self.config.too_long == "skip":
                return {name: [] for name in _COLUMNS}
            raise TrainingError(
                f"row {number} has {len(ids)} tokens; allowed: data.max_length={self.config.max_length}. Raise it, "
                "shorten the row, or set data.too_long: skip."
            )
        labels = [token if learnt else IGNORED for token, learnt in zip(ids, supervised, strict=True)]
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": list(range(len(ids))),
            "sample_keys": [number] * len(ids),
            "reveal_order": order,
            "record_rows": list(range(first, first + len(ids))),
        }

    def _ids(self, row: dict[str, Any], number: int) -> tuple[list[int], list[bool]]:
        ids = list(row["input_ids"])
        labels = row.get("labels")
        labels = ids if labels is None else list(labels)
        if len(labels) != len(ids):
            raise TrainingError(f"row {number}: {len(labels)} labels for {len(ids)} input_ids; give equally many.")
        return ids, [label != IGNORED for label in labels]

    def _text(self, row: dict[str, Any], number: int) -> tuple[list[int], list[bool]]:
        ids = self._encode(row["text"])
        return ids, [True] * len(ids)

    def _prompt_response(self, row: dict[str, Any], number: int) -> tuple[list[int], list[bool]]:
        if not row["response"]:
            raise TrainingError(f"row {number} has an empty response; remove it.")
        if self.config.chat_prompts and self.tokenizer.chat_template:
            turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
            return self._messages({"messages": turns}, number)
        prompt, response = self._encode(row["prompt"]), [*self._encode(row["response"]), self.tokenizer.eos_token_id]
        return prompt + response, [False] * len(prompt) + [True] * len(response)

    def _messages(self, row: dict[str, Any], number: int) -> tuple[list[int], list[bool]]:
        """Assistant turns are what a longer rendering adds to a shorter one: no template needs generation markers."""
        if not self.tokenizer.chat_template:
            raise TrainingError(
                f"row {number} holds chat messages, but the tokenizer has no chat template. Set one, or give columns "
                "prompt and response with data.chat_prompts: false."
            )
        messages = row["messages"]
        if not any(message["role"] == "assistant" for message in messages):
            raise TrainingError(f"row {number} has no assistant turn; nothing would be learnt from it. Remove it.")
        ids = self._render(messages, False)
        supervised = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._render(messages[:turn], True), self._render(messages[: turn + 1], False)
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise TrainingError(
                    f"row {number}: the chat template renders the turns before turn {turn} differently when later "
                    "turns follow, so its tokens cannot be told apart. Split the row at that turn."
                )
            supervised[len(before) : len(after)] = [True] * (len(after) - len(before))
        return ids, supervised

    def _render(self, messages: list[dict[str, Any]], prompt: bool) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=True)["input_ids"]
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def prepare(samples: Any, encoder: SampleEncoder, packing: bool) -> Any:
    """Encoded, and if wanted packed, sequences of a raw data set (a `Dataset` or `IterableDataset`)."""
    columns = samples.column_names
    encoded = samples.map(encoder, with_indices=True, remove_columns=columns)
    encoded = encoded.filter(lambda row: len(row["input_ids"]) > 0)
    if not packing:
        return encoded
    length = encoder.config.max_length
    arguments = {"batched": True, "batch_size": _PACK_WINDOW}
    return encoded.map(lambda batch: pack(batch, length), **arguments)


def pack(batch: dict[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    """Packs samples into sequences of at most `length` tokens, first fit in the order in which they come."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index, ids in enumerate(batch["input_ids"]):
        place = next((place for place, room in enumerate(free) if room >= len(ids)), None)
        if place is None:
            bins.append([])
            free.append(length)
            place = len(bins) - 1
        bins[place].append(index)
        free[place] -= len(ids)
    return {
        name: [[value for index in members for value in values[index]] for members in bins]
        for name, values in batch.items()
    }


def held_out(samples: Any, size: int, seed: int) -> tuple[Any, Any]:
    """(train, evaluation): `size` rows of a map-style data set held out at random."""
    if size == 0:
        return samples, None
    if not isinstance(samples, Dataset) or size >= len(samples):
        raise TrainingError(
            f"data.evaluation_size={size} cannot be held out; allowed: fewer than the rows of a data set that is not "
            "streamed. Give data.evaluation."
        )
    parts = samples.train_test_split(test_size=size, seed=seed)
    return parts["train"], parts["test"]


class Collator:
    """Pads sequences to one length on the right: `attention_mask` 0, labels -100."""

    def __init__(self, pad_token_id: int):
        self.fill = {"input_ids": pad_token_id, "labels": IGNORED}

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        batch: dict[str, Tensor] = {}
        for name in _COLUMNS:
            if name not in rows[0]:
                continue
            values = torch.full((len(rows), longest), self.fill.get(name, 0), dtype=torch.int64)
            for index, row in enumerate(rows):
                values[index, : len(row[name])] = torch.as_tensor(row[name], dtype=torch.int64)
            batch[name] = values
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        return batch


def pad_token_of(model: Any) -> int:
    """The token that fills up a batch."""
    return 0 if model.config.pad_token_id is None else int(model.config.pad_token_id)


def iterate_samples(samples: "Dataset | IterableDataset") -> Iterator[dict[str, Any]]:
    """Rows of either kind of data set, in order."""
    yield from samples
