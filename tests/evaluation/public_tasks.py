"""The four public tasks, built by the installed harness over rows with the recorded columns instead of a download."""

from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, DatasetDict
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "lm_eval_tasks"
DATA = Path(__file__).parent / "data"
REAL_TOKENIZER = ROOT.parent / "shared" / "sdar-tokenizer"
PUBLIC_TASKS = ("mrp_gsm8k", "mrp_math500", "mrp_humaneval", "mrp_mbpp")


def recorded(name: str) -> Any:
    return yaml.safe_load((DATA / f"{name}.yaml").read_text())


def row_of(columns: dict[str, str]) -> dict[str, Any]:
    """A row that has exactly the recorded columns, each telling its own name."""
    by_type = {"int32": 1, "int64": 1}
    return {
        name: [f"assert {name}_one(1) == 1", f"assert {name}_one(2) == 2"] if kind == "list of string" else
        by_type.get(kind, f"the {name}\n#### 4")
        for name, kind in columns.items()
    }  # fmt: skip


class FakeHub:
    """Stands for `datasets.load_dataset`: serves rows for known data sets and keeps what was asked for."""

    def __init__(self, rows: dict[str, list[dict]] | None = None):
        self.schemas = recorded("dataset_schemas")
        self.rows, self.asked = rows or {}, []

    def load_dataset(self, path: str, name: str | None = None, **kwargs: Any) -> DatasetDict:
        self.asked.append({"path": path, "name": name, **kwargs})
        schema = self.schemas[path]
        return DatasetDict({schema["split"]: Dataset.from_list(self.rows.get(path) or [row_of(schema["columns"])])})


def build_task(name: str, monkeypatch: Any, rows: dict[str, list[dict]] | None = None) -> tuple[Any, FakeHub]:
    """A task object of the harness and the data requests that it made."""
    hub = FakeHub(rows)
    monkeypatch.setattr("datasets.load_dataset", hub.load_dataset)
    loaded = TaskManager(include_path=str(TASKS), include_defaults=False).load([name])
    return loaded["tasks"][name], hub


def sdar_tokenizer() -> Any:
    """The real SDAR tokenizer, or a stand-in of single bytes with the real chat template and special tokens."""
    if REAL_TOKENIZER.exists():
        return AutoTokenizer.from_pretrained(REAL_TOKENIZER)
    alphabet = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|MASK|>",
        extra_special_tokens={"im_start_token": "<|im_start|>"},
        chat_template=(DATA / "sdar_chat_template.jinja").read_text(),
    )
