"""The tiny task: 400 held-out word problems that ship beside this file (see `modeling_mrp.evaluation.tiny_data`)."""

import json
import re
from pathlib import Path
from typing import Any

from datasets import Dataset

DATA = Path(__file__).parent / "data" / "problems.jsonl"
_ANSWER = re.compile(r"####\s*(-?\d+)")


def load(**_: Any) -> dict[str, Dataset]:
    """The problems, wherever the harness was started from."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    return {"test": Dataset.from_list(rows)}


def process_results(doc: dict, results: list[str]) -> dict[str, int]:
    """`exact_match`: the number behind the last `####` is the answer; `answered`: there is such a number."""
    found = _ANSWER.findall(results[0])
    return {"exact_match": int(bool(found) and int(found[-1]) == doc["answer"]), "answered": int(bool(found))}
