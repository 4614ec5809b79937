"""What the decoding benchmarks run: held-out problems of the tiny task through `generate`, counted exactly."""

import math
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from modeling_mrp import MRPForCausalLM
from modeling_mrp.tiny.task import Problem, is_correct, problems

TINY_MODEL = Path(__file__).resolve().parent.parent / "hub_configs" / "sdar-tiny-mrp"
MAX_NEW_TOKENS = 72


@dataclass
class Measurement:
    """Exact counts of one decoding configuration over the workload.

    Attributes:
        right: per problem, whether the answer was right.
        tokens, forwards: new tokens, and backbone forwards of all rows (prefill apart).
        segments, head_passes, taken_back: totals.
        seconds: wall time of `generate`.
        ids: per problem, the new tokens.
    """

    right: list[bool]
    tokens: int
    forwards: int
    segments: int
    head_passes: int
    taken_back: int
    seconds: float
    ids: list[list[int]]

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.forwards, 1)


class Workload:
    """Held-out problems, rendered by the chat template.

    Args:
        model_path: folder of the model.
        count, seed: problems and the held-out seed that they come from.
        batch: rows per `generate` call; rows are independent, so counts do not depend on it.
    """

    def __init__(self, model_path: Path = TINY_MODEL, count: int = 200, seed: int = 7, batch: int = 25):
        self.path, self.seed, self.batch = model_path, seed, batch
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.model = MRPForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.problems: list[Problem] = list(islice(problems("held-out", seed), count))

    def inputs(self, chosen: list[Problem]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask` `[rows, columns]`, left-padded."""
        chats = [[{"role": "user", "content": problem.question}] for problem in chosen]
        return dict(
            self.tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
            )
        )

    def prompt(self, problem: Problem) -> torch.Tensor:
        """`[n]` int64, without padding."""
        return self.inputs([problem])["input_ids"][0]

    def run(self, model: Any = None, batch: int | None = None, **options: Any) -> Measurement:
        """Decodes every problem under `options` of `generate`."""
        model, batch = model or self.model, batch or self.batch
        result = Measurement([], 0, 0, 0, 0, 0, 0.0, [])
        for begin in range(0, len(self.problems), batch):
            part = self.problems[begin : begin + batch]
            inputs = self.inputs(part)
            started = time.perf_counter()
            output = model.generate(
                **inputs, **{"max_new_tokens": MAX_NEW_TOKENS, **options}, return_dict_in_generate=True
            )
            result.seconds += time.perf_counter() - started
            new = output.sequences[:, inputs["input_ids"].shape[1] :]
            texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
            result.right += [is_correct(text, problem) for text, problem in zip(texts, part, strict=True)]
            result.ids += [row[:count].tolist() for row, count in zip(new, output.new_tokens, strict=True)]
            result.tokens += int(output.new_tokens.sum())
            result.forwards += int(output.backbone_forwards.sum())
            result.segments += int(output.segments.sum())
            result.head_passes += int(output.head_passes.sum())
            result.taken_back += int(output.reveals_taken_back.sum())
        return result


def standard_error(accuracy: float, count: int) -> float:
    """Of a share, in the same unit."""
    return math.sqrt(max(accuracy * (1 - accuracy), 1e-9) / count)
