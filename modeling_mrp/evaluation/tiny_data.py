"""Writes the data of the lm-eval tasks `mrp_tiny*`: `python -m modeling_mrp.evaluation.tiny_data`.

The problems come from the held-out stream of the tiny task, with a seed that nothing else uses, so no training step
has seen them (a short problem may still arise twice by chance).
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..tiny.batches import encode
from ..tiny.task import Problem, problems
from ..tiny.tokenizer import build_tokenizer

SEED = 606
COUNT = 400
DEFAULT_OUT = Path(__file__).parents[2] / "lm_eval_tasks" / "tiny" / "data" / "problems.jsonl"
_LAST_EQUATION = re.compile(r"=\s*(\d+)[^=]*\n####", re.DOTALL)


def rows(count: int = COUNT, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """`count` different problems that fit the tiny model's window, with a multiple-choice form each."""
    tokenizer, seen = build_tokenizer(), set[str]()
    rng = random.Random(seed)
    for problem in problems("held-out", seed):
        if len(seen) == count:
            return
        if problem.question not in seen and encode(problem, tokenizer) is not None:
            seen.add(problem.question)
            yield {"id": len(seen) - 1, **_columns(problem, rng)}


def _columns(problem: Problem, rng: random.Random) -> dict[str, Any]:
    last = _LAST_EQUATION.search(problem.solution)
    if last is None:
        raise ValueError(f"a solution without an equation before '####': {problem.solution!r}")
    right = int(last.group(1))
    near = [right + d for d in (-20, -10, -9, -2, -1, 1, 2, 9, 10, 20) if right + d > 0]
    choices = [str(n) for n in rng.sample(near, 3)]
    label = rng.randrange(4)
    choices.insert(label, str(right))
    return {
        "question": problem.question,
        "solution": problem.solution,
        "answer": problem.answer,
        # A solution up to the last "=", and four results to choose from.
        "started": problem.solution[: last.start() + 1],
        "choices": choices,
        "label": label,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: %(default)s")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
