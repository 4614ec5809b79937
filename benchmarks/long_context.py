"""Peak memory, prefill time and time per block from 1k to 32k prompt tokens.

    python -m benchmarks.long_context

Every length runs in a process of its own, so that its peak is its own. Writes `benchmarks/results/long_context.md`.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from tqdm import tqdm

from benchmarks.report import provenance, table, write
from benchmarks.workload import TINY_MODEL
from modeling_mrp import MRPForCausalLM

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
_BLOCKS = 12


def measure(model_path: Path, length: int) -> dict[str, float]:
    """One length in this process: seconds and peak resident memory in MiB."""
    model = MRPForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    model.config.max_position_embeddings = 2 * LENGTHS[-1]
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(10, 1000, (1, length), generator=generator)
    block = model.config.block_size
    # Left to right, so that tokens come evenly.
    arguments = {"mrp_mode": "none", "remasking_strategy": "sequential", "eos_token_id": []}
    model.generate(prompt[:, :64], max_new_tokens=block, **arguments)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock = _Clock()
    begin = time.perf_counter()
    model.generate(prompt, max_new_tokens=_BLOCKS * block, streamer=clock, **arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The first tokens come after the prefill and the first denoising steps; the rest is steady decoding.
    per_token = (clock.times[-1] - clock.times[1]) / (len(clock.times) - 2)
    prefill = clock.times[1] - begin - per_token * block
    return {"prefill": prefill, "block": per_token * block, "memory": (peak - base) / 1024}


class _Clock:
    """A streamer that notes when something comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = TINY_MODEL,
    length: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measures every length and writes the report."""
    if length is not None:
        sys.stdout.write(json.dumps(measure(model, length)))
        return
    rows = []
    for tokens in tqdm(LENGTHS, desc="lengths"):
        command = [sys.executable, "-m", "benchmarks.long_context", "--model", str(model), "--length", str(tokens)]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append([tokens, *(answer[name] for name in ("memory", "prefill", "block"))])
    cells = [
        [tokens, f"{memory:.0f}", f"{1024 * memory / tokens:.1f}", f"{1e3 * prefill / (tokens / 1024):.0f}",
         f"{1e3 * block:.0f}", f"{block / rows[0][3]:.2f}"]
        for tokens, memory, prefill, block in rows
    ]  # fmt: skip
    text = [
        "# Long inputs",
        "",
        provenance(f"{model.name} (float32), context limit lifted", "random prompts, mode none, batch 1"),
        "",
        "Times are wall times of this machine and only their growth means something. Memory is the growth of the "
        "process's peak over a short prompt's. Prefill reads every token against all before it, so its time per token "
        "grows with the length; nothing of prompt length squared is stored.",
        "",
        table(
            ["prompt tokens", "peak memory, MiB", "KiB a token", "prefill, ms per 1,024 tokens", "ms per block",
             "per block, over 1,024"],
            cells,
        ),
    ]  # fmt: skip
    write("long_context.md", "\n".join(text))


if __name__ == "__main__":
    typer.run(main)
