"""The tiny task: 300 held-out word problems that ship beside this file (see `modeling_mrp.evaluation.tiny_data`)."""

import json
import re
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

DATA = Path(__file__).parent / "data" / "problems.jsonl"
_ANSWER = re.compile(r"####\s*(-?\d+)")


class TinyTask(ConfigurableTask):
    """A task whose prompts are chat turns in any case: the tiny model knows no other form.

    With `--apply_chat_template` the tokenizer's template renders them, else the same marks are written out here.
    `gen_prefix` begins the assistant's turn.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__(config={name: value for name, value in config.items() if name != "class"})

    def fewshot_context(self, doc: dict, num_fewshot: int = 0, **kwargs: Any) -> str:
        """The prompt of one problem; the task is zero-shot."""
        system = kwargs.get("system_instruction")
        history = [{"role": "system", "content": system}] if system else []
        history.append({"role": "user", "content": self.doc_to_text(doc)})
        if kwargs.get("apply_chat_template"):
            prompt = kwargs["chat_template"](history, add_generation_prompt=True)
        else:
            prompt = "".join(f"<|{turn['role']}|>{turn['content']}<|im_end|>" for turn in history) + "<|assistant|>"
        return prompt + (kwargs.get("gen_prefix") or "")


def load(**_: Any) -> dict[str, Dataset]:
    """The problems, wherever the harness was started from."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    return {"test": Dataset.from_list(rows)}


def process_results(doc: dict, results: list[str]) -> dict[str, int]:
    """`exact_match`: the number behind the last `####` is the answer; `answered`: there is such a number."""
    found = _ANSWER.findall(results[0])
    return {"exact_match": int(bool(found) and int(found[-1]) == doc["answer"]), "answered": int(bool(found))}
