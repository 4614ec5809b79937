"""Ahead-of-time compilation at the models' shapes, without a GPU; in a process whose Triton does not interpret."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("triton.backends.nvidia")


def run_module(*arguments: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernels", "--compile-only", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=clean)


def test_one_launch_of_each_kernel_compiles_without_spills(tmp_path):
    finished = run_module("--quick", "--output", str(tmp_path / "table.md"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    table = (tmp_path / "table.md").read_text()
    assert "No spills, no stack." in table
    assert "wgmma" in table
    kernels = ("partial_kernel", "attention_kernel", "mrp_input_kernel", "lattice_kernel", "row_kernel")
    assert all(name in table for name in kernels)


@pytest.mark.slow
def test_every_kernel_compiles_for_every_architecture(tmp_path):
    finished = run_module("--output", str(tmp_path / "table.md"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
