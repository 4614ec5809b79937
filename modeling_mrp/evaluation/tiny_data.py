"""Writes the data of the lm-eval tasks `mrp_tiny*`: `python -m modeling_mrp.evaluation.tiny_data`.

They are the held-out problems of the tiny model's card (`benchmarks/tiny.py`: the same seed and count), so that the
harness reproduces the card's accuracy. Neither training nor any choice of settings has used that seed.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ..tiny.task import Problem, problems

SEED = 1
COUNT = 300
DEFAULT_OUT = Path(__file__).parents[2] / "lm_eval_tasks" / "tiny" / "data" / "problems.jsonl"
_LAST_EQUATION = re.compile(r"=\s*(\d+)[^=]*\n####", re.DOTALL)


def rows(count: int = COUNT, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """The first `count` problems of a held-out seed, with a multiple-choice form each."""
    rng = random.Random(seed)
    for number, problem in enumerate(islice(problems("held-out", seed), count)):
        yield {"id": number, **_columns(problem, rng)}


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
