"""The engine gives the same ids by the Triton kernels as by their torch twins, in every mode (interpreted)."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_ids_are_the_same_in_every_mode() -> None:
    root = Path(__file__).resolve().parents[2]
    script = Path(__file__).with_name("engine_modes.py")
    result = subprocess.run(
        [sys.executable, "-c", f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"],
        cwd=root, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
