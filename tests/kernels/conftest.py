"""Puts the repository's root on the path: the float64 formulas live with the benchmark, which needs them too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
