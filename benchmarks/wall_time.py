"""Ratios of wall time on this machine: engine against the readable loop, speculative against none.

    python -m benchmarks.wall_time [--count 16] [--repeat 5]

Each pair runs in turn, A B A B, in one process; medians of the ratios count, absolute times are noise. Writes
`benchmarks/results/wall_time.md`.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from tqdm import tqdm

from benchmarks.report import provenance, table, write
from benchmarks.workload import MAX_NEW_TOKENS, TINY_MODEL, Workload
from modeling_mrp.generation_config_mrp import resolve_options
from modeling_mrp.reference_decoding import ReferenceDecoder

SEED = 5


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = TINY_MODEL,
    count: Annotated[int, typer.Option(min=1, help="Problems.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each pair.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Measures and writes the report."""
    torch.set_num_threads(threads)
    workload = Workload(model, count, SEED)

    def reference() -> int:
        options = resolve_options(
            {"mrp_mode": "none", "eos_token_id": workload.model.config.eos_token_id}, workload.model.config
        )
        tokens = 0
        for problem in workload.problems:
            prompt = workload.prompt(problem)
            tokens += len(ReferenceDecoder(workload.model, options).decode(prompt, MAX_NEW_TOKENS).ids) - len(prompt)
        return tokens

    def engine(batch: int, **options: object) -> Callable[[], int]:
        return lambda: workload.run(batch=batch, **options).tokens

    speculative = {"mrp_mode": "speculative"}
    pairs = {
        "engine none, batch 16, over the reference loop": (engine(16, mrp_mode="none"), reference, 2.0),
        "engine none, batch 1, over the reference loop": (engine(1, mrp_mode="none"), reference, None),
        "speculative (auto, head) over none, batch 1": (engine(1, **speculative), engine(1, mrp_mode="none"), 1.0),
        "speculative (auto, zero drafter) over none, batch 1": (
            engine(1, **speculative, drafter="zero"), engine(1, mrp_mode="none"), None,
        ),
        "direct K=3 over none, batch 1": (engine(1, mrp_mode="direct", mrp_steps=3), engine(1, mrp_mode="none"), None),
        "speculative (auto, head) over none, batch 16": (engine(16, **speculative), engine(16, mrp_mode="none"), None),
    }  # fmt: skip
    rows = []
    for name, (first, second, target) in tqdm(pairs.items(), desc="pairs"):
        first(), second()  # warm-up, and the measurement behind draft_states="auto"
        ratios = []
        for _ in range(repeat):
            speeds = []
            for run in (first, second):
                begin = time.perf_counter()
                tokens = run()
                speeds.append(tokens / (time.perf_counter() - begin))
            ratios.append(speeds[0] / speeds[1])
        median = statistics.median(ratios)
        holds = "" if target is None else ("yes" if median >= target else "**no**")
        rows.append([name, f"{median:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", target or "", holds])
    budgets = workload.model.__dict__.get("_measured_draft_budget", {})
    text = [
        "# Wall time, as ratios of tokens per second",
        "",
        provenance(
            f"{model.name} (float32)", f"{count} held-out problems, seed {SEED}, greedy, {repeat} runs of a pair"
        ),
        "",
        table(["pair", "median ratio", "range", "target", "holds"], rows),
        "",
        'Budgets that `draft_states="auto"` measured, (rows, block): states: '
        + ", ".join(f"{key}: {value}" for key, value in budgets.items()),
    ]
    write("wall_time.md", "\n".join(text))


if __name__ == "__main__":
    typer.run(main)
