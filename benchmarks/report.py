"""Shared parts of benchmark reports: where a figure came from, tables, and the path of the result."""

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

RESULTS = Path(__file__).resolve().parent / "results"


def provenance(model: str, workload: str, command: str | None = None) -> str:
    """Hardware, versions, model, workload and command, as a markdown list."""
    lines = [
        f"- hardware: {processor()}, {torch.get_num_threads()} threads"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"),
        f"- versions: Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        f"- model: {model}",
        f"- workload: {workload}",
        f"- command: `{command or ' '.join(['python -m', *_module_command()])}`",
    ]
    return "\n".join(lines)


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])


def write(name: str, text: str) -> Path:
    """Writes `benchmarks/results/NAME`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / name
    path.write_text(text.rstrip() + "\n")
    return path


def _module_command() -> list[str]:
    root = Path(__file__).resolve().parent.parent
    module = Path(sys.argv[0]).resolve()
    name = ".".join(module.relative_to(root).with_suffix("").parts) if module.is_relative_to(root) else module.name
    return [name, *sys.argv[1:]]
