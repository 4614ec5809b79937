"""Device operations of one decoding round, by part of the round: what the method costs where launches are the limit.

    python -m benchmarks.launches [--count 8]

On a GPU a small batch waits for launches, so operations beside the backbone are what a round costs, whatever the
machine. They are counted on a CPU, exactly, by `kernels="torch"` and, where Triton is installed, `kernels="triton"`,
each in a process of its own: the second imports Triton as its interpreter. Writes `benchmarks/results/launches.md`.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from benchmarks.launch_counts import BACKBONE, PARTS, counting
from benchmarks.report import RESULTS, provenance, table, write
from benchmarks.workload import MAX_NEW_TOKENS, TINY_MODEL, Workload
from modeling_mrp.kernel_dispatch import triton_is_available

SEED = 5
BATCHES = (1, 4)
DETAILED = "lattice 8"
_LATTICE: dict[str, Any] = {"mrp_mode": "speculative", "draft_states": 8}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "none": {"mrp_mode": "none"},
    "lattice 8": _LATTICE,
    "lattice 8, shortlist 64": {**_LATTICE, "draft_shortlist": 64},
    "lattice 8, two passes": {**_LATTICE, "mrp_steps": 2},
    "lattice 8, zero": {**_LATTICE, "drafter": "zero"},
    "lattice 16": {**_LATTICE, "draft_states": 16},
    "lattice 16, zero": {**_LATTICE, "draft_states": 16, "drafter": "zero"},
    "chain 8": {"mrp_mode": "speculative", "draft_shape": "chain", "mrp_steps": 7},
    "direct K=2": {"mrp_mode": "direct", "mrp_steps": 2},
    "remask": {"mrp_mode": "remask", "confidence_threshold": 0.5},
}
_NAMES = {"logits": "LM head, statistics"}
_COUNTED = """\
One operation is one ATen operator that computes or moves data (no view, no allocation), as torch runs it below
autograd, or one Triton launch. A GPU launches a little more: some operators (`eye`, sorting, long scans) are several
kernels there. Figures are means over all rounds of the workload; not every part runs in every round (one that only
finishes blocks drafts nothing), and a constant that is kept counts where it is made. Prefill and set-up are left out.

An operation belongs to the innermost part that runs. *Plan* chooses states, *draft* is drafting but the head's layers,
*forward* makes masks and positions, *settle* walks, commits and advances, *ends* is end conditions and leaving rows,
*head* the head's input and layers; the LM head and statistics of logits are counted together, those of drafts
included. *Beside* is all but the backbone, *share* that over the backbone, which has {layers} layers here: *per layer*
tells what other depths have. *Syncs* are how often the host waits for the device, *uploads* copies from host to
device; both are counted at their calls, since a CPU run makes none, and are no operations here."""


def measure(model_path: Path, count: int, kernels: str) -> list[dict[str, Any]]:
    """Counts every configuration at every batch size, in this process: `{"name", "batch", "parts", ...}` each."""
    torch.set_num_threads(1)
    workload = Workload(model_path, count, SEED)
    rows = []
    cases = [(batch, name) for batch in BATCHES for name in CONFIGURATIONS]
    for batch, name in tqdm(cases, desc=f'kernels="{kernels}"'):
        with counting(workload.model) as counts:
            workload.run(batch=batch, kernels=kernels, **CONFIGURATIONS[name])
        operators: dict[str, dict[str, float]] = {part: {} for part in PARTS}
        for (part, operator), times in counts.operations.most_common():
            operators[part][operator] = times / counts.rounds
        rows.append({
            "name": name,
            "batch": batch,
            "rounds": counts.rounds,
            "parts": {part: times / counts.rounds for part, times in counts.by_part.items()},
            "syncs": counts.syncs.total() / counts.rounds,
            "uploads": counts.uploads.total() / counts.rounds,
            "operators": operators,
        })  # fmt: skip
    return rows


def measure_apart(model_path: Path, count: int, kernels: str) -> list[dict[str, Any]]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.launches", "--model", str(model_path), "--count", str(count)]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if kernels == "triton" else {})
    answer = subprocess.run(
        [*command, "--kernels", kernels], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return json.loads(answer.stdout)


def counts_table(rows: list[dict[str, Any]], layers: int) -> str:
    """A row per configuration and batch size, a column per part."""
    parts = [part for part in PARTS if part not in BACKBONE]
    header = ["batch", "configuration", "rounds", *(_NAMES.get(part, part) for part in parts), "**beside**",
              "backbone", "per layer", "share", "syncs", "uploads"]  # fmt: skip
    cells = []
    for row in rows:
        found = row["parts"]
        beside, backbone = (sum(found[part] for part in chosen) for chosen in (parts, BACKBONE))
        cells.append([
            row["batch"], row["name"], row["rounds"], *(f"{found[part]:.1f}" for part in parts), f"**{beside:.1f}**",
            f"{backbone:.1f}", f"{found['layers'] / layers:.1f}", f"{beside / backbone:.2f}", f"{row['syncs']:.1f}",
            f"{row['uploads']:.1f}",
        ])  # fmt: skip
    return table(header, cells)


def operators_table(row: dict[str, Any], most: int = 10) -> str:
    """The most frequent operators of every part."""
    cells = [
        [_NAMES.get(part, part), f"{sum(found.values()):.1f}",
         ", ".join(f"{name.strip('<>')} {times:.1f}" for name, times in list(found.items())[:most])]
        for part, found in row["operators"].items()
    ]  # fmt: skip
    return table(["part", "all", f"the {most} most frequent"], cells)


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = TINY_MODEL,
    count: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 8,
    output: Annotated[Path, typer.Option(help="Where the report goes.")] = RESULTS / "launches.md",
    kernels: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Counts and writes the report."""
    if kernels is not None:
        sys.stdout.write(json.dumps(measure(model, count, kernels)))
        return
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    columns = ("torch", "triton") if triton_is_available() else ("torch",)
    triton = _triton_version() if "triton" in columns else 'not installed: kernels="triton" is not counted'
    text = [
        "# Device operations of a decoding round",
        "",
        provenance(
            f"{model.name} (float32)",
            f"{count} held-out problems, seed {SEED}, greedy, at most {MAX_NEW_TOKENS} new tokens; batches of "
            f"{' and '.join(map(str, BATCHES))}",
        ),
        f"- Triton: {triton}",
        "",
        _COUNTED.format(layers=layers),
    ]
    for choice in columns:
        rows = measure_apart(model, count, choice)
        detailed = next(row for row in rows if row["name"] == DETAILED and row["batch"] == BATCHES[0])
        text += ["", f'## `kernels="{choice}"`', "", counts_table(rows, layers)]
        text += ["", f"Operators of {DETAILED}, batch {BATCHES[0]}, per round:", "", operators_table(detailed)]
    write(str(output.resolve()), "\n".join(text))


def _triton_version() -> str:
    return (
        f"{version('triton')}; launchers run as they stand and their launches are counted, then their torch twins "
        "give the results (kernels without a twin run in the interpreter)"
    )


if __name__ == "__main__":
    typer.run(main)
