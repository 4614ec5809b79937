"""A converted and an exported tiny model, made once."""

from collections.abc import Iterator
from pathlib import Path

import hub_checkpoints as official
import pytest
import torch

from modeling_mrp.hub.convert import convert_checkpoint
from modeling_mrp.hub.export import export_model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are so small that a second thread only waits, and waits long where the cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Path:
    """A dense float32 model with a head, converted from the official layout."""
    work = tmp_path_factory.mktemp("converted")
    official.write_checkpoint(work / "source", dtype=torch.float32)
    return convert_checkpoint(work / "source", work / "model").folder


@pytest.fixture(scope="session")
def converted_moe(tmp_path_factory) -> Path:
    """The same with a mixture of experts."""
    work = tmp_path_factory.mktemp("converted_moe")
    official.write_checkpoint(work / "source", dtype=torch.float32, experts=True)
    return convert_checkpoint(work / "source", work / "model").folder


@pytest.fixture(scope="session")
def exported(converted, tmp_path_factory) -> Path:
    """`converted` as a repository folder."""
    return export_model(converted, tmp_path_factory.mktemp("exported") / "tiny-mrp", repo_id="somebody/tiny-mrp")
