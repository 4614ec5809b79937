"""Runs the `interpreted*.py` in processes whose Triton is the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", ["interpreted.py", "interpreted_policies.py"])
def test_kernels_equal_their_twins(file):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", str(HERE / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[1])
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
