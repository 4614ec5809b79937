"""One model over several places: CPU and disk offload, two tensor-parallel processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modeling_mrp.modeling_mrp import MRPForCausalLM

MODES = ("none", "speculative", "direct", "remask")
PROMPT = torch.tensor([[12, 8, 40, 77, 5]])


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "moe"])
def test_a_map_over_cpu_and_disk_equals_one_device(converted, converted_moe, tmp_path, experts):
    pytest.importorskip("accelerate")
    folder = converted_moe if experts else converted
    whole = MRPForCausalLM.from_pretrained(folder).eval()
    places = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "disk",
        "lm_head": "disk",
        "mrp": "disk",
    }
    split = MRPForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path).eval()
    assert split.lm_head.weight.device.type == "meta"
    for model in (whole, split):
        model.config._experts_implementation = "eager"
    for mode in MODES:
        expected = whole.generate(PROMPT, mrp_mode=mode, max_new_tokens=12)
        assert torch.equal(split.generate(PROMPT, mrp_mode=mode, max_new_tokens=12), expected), mode
    with torch.no_grad():
        torch.testing.assert_close(split(PROMPT).logits, whole(PROMPT).logits, atol=1e-5, rtol=0)


def test_device_map_auto(converted):
    pytest.importorskip("accelerate")
    model = MRPForCausalLM.from_pretrained(converted, device_map="auto").eval()
    ids = PROMPT.to(model.device)
    plain, drafted = (model.generate(ids, mrp_mode=mode, max_new_tokens=12) for mode in ("none", "speculative"))
    assert torch.equal(plain, drafted)


def test_the_plan_names_the_layers_of_the_head(converted):
    model = MRPForCausalLM.from_pretrained(converted)
    plan = model.tp_plan
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        assert f"model.layers.*.{part}" in plan
        assert f"mrp.layers.*.{part}" in plan


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "moe"])
def test_two_tensor_parallel_processes_equal_one(converted, converted_moe, tmp_path, experts):
    folder = converted_moe if experts else converted
    script = Path(__file__).parent / "tensor_parallel.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [str(part) for part in [*command, tmp_path / "result.pt"]],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = torch.load(tmp_path / "result.pt")
    # Sharded: each of the two processes holds half of the rows.
    assert found["q_proj"] == found["head_q_proj"] == [32, 32]
    model = MRPForCausalLM.from_pretrained(folder).eval()
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        output = model(PROMPT, revealed_ids=PROMPT[None])
    torch.testing.assert_close(found["logits"], output.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(found["residual_logits"], output.residual_logits, atol=1e-5, rtol=0)
    for mode in MODES:
        assert torch.equal(found[mode], model.generate(PROMPT, mrp_mode=mode, max_new_tokens=12)), mode
