"""The re-implemented public schedules spend exactly what the recorded ones spent (guards the benchmark's baseline)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.reference_schedule import ReferenceSchedule
from modeling_mrp import MRPForCausalLM

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("generate_*.json"))


@pytest.fixture(scope="module")
def models() -> dict[str, MRPForCausalLM]:
    return {
        name: MRPForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()
        for name in ("ckpt_sharp", "ckpt_plain")
    }


@pytest.mark.parametrize("case", CASES)
def test_ids_and_counters_equal_the_recording(case: str, models: dict[str, MRPForCausalLM]) -> None:
    manifest = json.loads((GOLDEN / f"{case}.json").read_text())
    tensors = load_file(GOLDEN / f"{case}.safetensors")
    checked = 0
    for run in manifest["runs"]:
        name, parameters, stats = run["name"], run["params"], run["stats"]
        speculative = name in {"spec_k1_sum", "spec_k2_sum", "spec_k3_sum"}
        if not speculative and name != "static_full":
            continue
        prompt, expected = tensors[f"{name}.prompt_ids"][0], tensors[f"{name}.output_ids"][0]
        steps = parameters.get("mrp_steps", 0)
        schedule = ReferenceSchedule(models[manifest["checkpoint"]], parameters["block_length"], steps)
        counts = schedule.decode(prompt, parameters["max_length"])
        assert counts.ids.tolist() == expected.tolist()
        assert counts.denoising == stats["num_target_fwd_denoising"]
        assert counts.stores == stats["num_target_fwd_store_kv"]
        if speculative:
            assert counts.rounds == stats["num_spec_rounds"]
            assert counts.accepted == stats["num_drafts_accepted"]
            assert counts.bonus == stats["num_bonus_tokens"]
            assert counts.head_passes == stats["num_mrp_fwd_denoising"]
        checked += 1
    assert checked == 4
