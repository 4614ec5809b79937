"""The count of device operations is complete, each operation is counted where it runs, and a lost seam is an error."""

import os
import subprocess
import sys

import pytest
import torch
from paths import ROOT

from benchmarks.launch_counts import PARTS, LaunchCounts, counting
from benchmarks.random_models import random_model
from modeling_mrp.decode_engine import DecodeEngine

PROMPT = torch.arange(1, 8)[None]
SPECULATIVE = {"mrp_mode": "speculative", "draft_states": 4}


def count(model, **options) -> tuple[LaunchCounts, list[int]]:
    """Counts of one short call, and its ids."""
    with counting(model) as counts:
        ids = model.generate(PROMPT, max_new_tokens=9, eos_token_id=[], **options)
    return counts, ids[0].tolist()


@pytest.fixture(scope="module")
def model():
    """A model that has decoded before: constants are made once a process, and would be counted in the first call."""
    model = random_model()
    for options in (SPECULATIVE, {"mrp_mode": "none"}):
        count(model, **options)
    return model


@pytest.fixture(scope="module")
def speculative(model) -> LaunchCounts:
    return count(model, **SPECULATIVE)[0]


def test_parts_add_up_to_all_operations(speculative) -> None:
    assert sum(speculative.by_part.values()) == speculative.total == speculative.operations.total()
    assert tuple(speculative.by_part) == PARTS
    assert min(part for name, part in speculative.by_part.items() if name != "ends") > 0
    assert speculative.outside > 0  # prefill runs the backbone, too
    assert speculative.syncs["settle"] >= speculative.rounds  # the engine's look at what is certain


def test_counting_changes_nothing_and_ends(model, speculative) -> None:
    expected = model.generate(PROMPT, max_new_tokens=9, eos_token_id=[], **SPECULATIVE)[0].tolist()
    before = DecodeEngine._settle, torch.Tensor.cpu
    again, ids = count(model, **SPECULATIVE)
    assert ids == expected
    assert again == speculative
    assert "forward" not in vars(model.lm_head)
    assert (DecodeEngine._settle, torch.Tensor.cpu) == before


@pytest.mark.parametrize(("method", "part"), [("_end_rows", "ends"), ("_forward", "forward"), ("_draft", "draft")])
def test_an_operation_more_is_counted_where_it_runs(model, speculative, monkeypatch, method, part) -> None:
    original, calls = getattr(DecodeEngine, method), []

    def with_one_more(self, *args):
        calls.append(torch.ones(3))
        torch.ones(3)[1:].view(2)  # and with views, which are none
        return original(self, *args)

    monkeypatch.setattr(DecodeEngine, method, with_one_more)
    found = count(model, **SPECULATIVE)[0]
    assert calls
    assert found.by_part == {**speculative.by_part, part: speculative.by_part[part] + 2 * len(calls)}


def test_what_the_host_waits_for_is_counted(model, speculative, monkeypatch) -> None:
    original, calls = DecodeEngine._end_rows, []

    def asking(self, *args):
        values = torch.ones(2)
        calls.append((bool(values[0]), values.tolist(), values.cpu(), values[values > 0], torch.tensor([1])))
        return original(self, *args)

    monkeypatch.setattr(DecodeEngine, "_end_rows", asking)
    found = count(model, **SPECULATIVE)[0]
    assert found.syncs["ends"] == speculative.syncs["ends"] + 4 * len(calls)
    assert found.uploads["ends"] == speculative.uploads["ends"] + len(calls)


def test_speculation_launches_more_a_round_than_plain_decoding(model, speculative) -> None:
    plain = count(model, mrp_mode="none")[0]
    assert plain.by_part["draft"] == plain.by_part["head"] == 0
    assert plain.total / plain.rounds < speculative.total / speculative.rounds
    assert plain.rounds > speculative.rounds


def test_a_lost_seam_is_an_error(model, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(DecodeEngine, "settle", DecodeEngine._settle, raising=False)
        patched.delattr(DecodeEngine, "_settle")
        with pytest.raises(LookupError, match="engine has no _settle"), counting(model):
            pass
    with pytest.raises(LookupError, match="not every round calls"), counting(model):
        torch.ones(1)


INTERPRETED = """
from unittest import mock
from benchmarks import triton_launches
from test_launches import SPECULATIVE, count, random_model
count(random_model(), kernels="torch", **SPECULATIVE)  # makes the constants
by_kernels, ids = count(random_model(), kernels="triton", **SPECULATIVE)
by_twins, expected = count(random_model(), kernels="torch", **SPECULATIVE)
layers = 2
launches = {key: times for key, times in by_kernels.operations.items() if key[1].startswith("<")}
assert ids == expected and by_kernels.rounds == by_twins.rounds
assert launches["layers", "<_qk_norm_rope_kernel>"] == layers * by_kernels.rounds, launches
assert launches["head", "<_mrp_input_kernel>"] == sum(
    times for seam, times in by_kernels.calls.items() if seam.part == "head"
), launches
assert {part for part, _ in launches} >= {"layers", "head", "logits"}, launches
assert not any(name.startswith("<") for _, name in by_twins.operations)
assert by_kernels.by_part["layers"] < by_twins.by_part["layers"]
with mock.patch.object(triton_launches, "_launchers", lambda package: []):
    assert count(random_model(), kernels="triton", **SPECULATIVE) == (by_kernels, ids)  # all of it interpreted
"""


def test_a_triton_launch_is_one_operation() -> None:
    pytest.importorskip("triton")
    script = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n" + INTERPRETED
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
