"""Kernels of `mrp_kernels`: ahead-of-time resources without a GPU, correctness and speed with one.

python -m benchmarks.kernels --compile-only     writes benchmarks/results/kernels_aot.md
python -m benchmarks.kernels                    on a CUDA machine; prints and writes benchmarks/results/kernels_gpu.md
"""

import argparse
import platform
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from .kernel_cases import all_cases

RESULTS = Path(__file__).parent / "results"


def compile_only(output: Path, quick: bool) -> int:
    """Compiles every kernel for every architecture and writes the table; 1 if one spills or lacks tensor cores.

    `quick` takes the last launch of each kernel, on one architecture.
    """
    import triton

    from .kernel_aot import ARCHITECTURES, compile_launch, unique_launches

    rows, faults = [], []
    architectures = (90,) if quick else ARCHITECTURES
    work = [(launch, arch) for arch in architectures for launch in unique_launches(all_cases(), arch)]
    if quick:
        work = list(
            {launch.function.__name__ + launch.function.__module__: (launch, 90) for launch, _ in work}.values()
        )
    for launch, arch in tqdm(work, desc="compile", unit="kernel"):
        found = compile_launch(launch, arch)
        name = launch.function.__name__.strip("_")
        operation = launch.used_by[0].split(":")[0]
        shapes = sorted({use.split(": ", 1)[1] for use in launch.used_by})
        spilled = found.spill_stores + found.spill_loads + found.stack
        missed = found.has_dot and not found.tensor_cores
        if spilled or missed:
            faults.append(f"{operation} {name} sm_{arch}: {spilled} bytes of stack or spills, {found.tensor_cores!r}")
        at = shapes[0] + (f" and {len(shapes) - 1} more" if len(shapes) > 1 else "")
        rows.append(
            f"| {operation} | {name} | {at} | sm_{arch} "
            f"| {launch.options.get('num_warps')} | {found.registers} | {found.shared} | {found.stack} "
            f"| {found.spill_stores} / {found.spill_loads} | {found.tensor_cores or '-'} |"
        )
    header = [
        "# Kernels, compiled ahead of time",
        "",
        f"`python -m benchmarks.kernels --compile-only`, Triton {triton.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, no GPU. Shapes of SDAR-1.7B, 4B and 8B, bfloat16. Times are not here: "
        "they are not measured until `python -m benchmarks.kernels` has run on a GPU.",
        "",
        "Registers per thread; shared memory, stack and spills (stores / loads) in bytes; the last column is the "
        "tensor-core instruction found in the PTX.",
        "",
        "| operation | kernel | at | target | warps | registers | shared | stack | spills | tensor cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    verdict = ["", "Faults:", "", *[f"- {fault}" for fault in faults]] if faults else ["", "No spills, no stack."]
    output.write_text("\n".join([*header, *rows, *verdict]) + "\n")
    print(f"{len(rows)} kernels compiled, {len(faults)} faults, written to {output}")
    return int(bool(faults))


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-only", action="store_true", help="no GPU needed")
    parser.add_argument("--quick", action="store_true", help="with --compile-only: one launch of each kernel, sm_90")
    parser.add_argument("--output", type=Path, help="the table's file")
    parser.add_argument("--only", help="run this operation alone")
    options = parser.parse_args()
    if options.compile_only:
        return compile_only(options.output or RESULTS / "kernels_aot.md", options.quick)
    if not torch.cuda.is_available():
        parser.error("no CUDA device; use --compile-only here")
    from .kernel_timing import run

    return run(options.output or RESULTS / "kernels_gpu.md", options.only)


if __name__ == "__main__":
    sys.exit(main())
