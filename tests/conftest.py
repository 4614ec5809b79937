"""What all tests share: no network, few threads, the repository's root on the path, the fixture folders."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from paths import DATA, ROOT
from transformers.utils import logging

# The benchmarks hold the random models and the fuzzer's cases, which the tests draw from too.
sys.path.insert(0, str(ROOT))

# These models are so small that a second thread only waits.
torch.set_num_threads(1)
logging.disable_progress_bar()


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return DATA / "golden"


@pytest.fixture(scope="session")
def study_folder() -> Path:
    return DATA / "study"
