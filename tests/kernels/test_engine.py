"""The engine gives the same ids by the Triton kernels as by their torch twins, in every mode (interpreted)."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def run_interpreted(script: str, argument: str) -> None:
    """Runs a file of this folder in a process of its own, from the repository's root."""
    here = Path(__file__).resolve().parent
    path = str(here / script)
    code = f"import runpy, sys; sys.argv[1:] = [{argument!r}]; runpy.run_path({path!r}, run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=here.parents[1], capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("part", ["every_mode", "by_argument", "other_models", "training"])
def test_ids_are_the_same_and_the_kernels_are_called(part) -> None:
    run_interpreted("engine_modes.py", part)


def test_the_benchmark_runs_but_for_its_clock(tmp_path) -> None:
    run_interpreted("benchmark_dry_run.py", str(tmp_path / "kernels_gpu.md"))
