"""Training cases recorded from the public reference, in this package's arguments."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from modeling_mrp import MRPForCausalLM

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("train_*.json"))
HEAD = "mrp_modules.0.model."


def load_case(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((GOLDEN / f"{name}.json").read_text()), load_file(GOLDEN / f"{name}.safetensors")


def model_of(case: dict[str, Any]) -> MRPForCausalLM:
    model = MRPForCausalLM.from_pretrained(GOLDEN / case["checkpoint"], dtype=torch.float32)
    model.config.head_prediction = "residual" if case["loss_type"] == "kd_diff_sum" else "direct"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mrp."))
    return model


def inputs_of(case: dict[str, Any], tensors: dict[str, torch.Tensor], layout: str) -> dict[str, Any]:
    per_step = case["rounds_per_step"]
    reveals = torch.zeros((case["K"], *tensors["input_ids"].shape), dtype=torch.bool)
    for step in range(case["K"]):
        for reveal_round in range(step * per_step, (step + 1) * per_step):
            rows = tensors[f"reveal_round_{reveal_round + 1}"]
            reveals[step, rows[:, 0], rows[:, 1]] = True
    objective = {
        "steps": case["K"],
        "layout": layout,
        "head_prefix": "chained",
        "loss": "reverse_kl" if case["reverse_kl"] else "forward_kl",
        "temperature": case["kd_temperature"],
        "noise_level": "sample",
        "reveal_rule": "ground_truth",
        "weighting": "inverse_rate",
        "normalizer": "answer_length",
    }
    return {
        "input_ids": tensors["input_ids"],
        "labels": tensors["labels"],
        "position_ids": tensors["position_ids"],
        "block_length": case["block_size"],
        "noise_mask": tensors["noise_mask"],
        "noise_rate": tensors["noise_prob"],
        "reveals": reveals,
        "objective": objective,
    }


def layouts_of(case: str) -> list[str]:
    return ["single"] if "infer_matched" in case else ["packed", "shared"]


CASES_BY_LAYOUT = [(case, layout) for case in CASES for layout in layouts_of(case)]


def assert_gradients_match(
    case: dict[str, Any], tensors: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> None:
    """Norm, projection on cos(0), cos(1), ..., first values and, where stored, every element of each gradient."""
    assert set(case["grads"]) == set(gradients)
    for name, expected in case["grads"].items():
        flat = gradients[name].double().flatten()
        atol = 1e-4 * float(flat.abs().max()) + 1e-6
        assert abs(float(flat.norm()) - expected["norm"]) <= 1e-3 * expected["norm"] + 1e-7, name
        waves = torch.arange(flat.numel(), dtype=torch.float64).cos()
        assert abs(float(flat @ waves) - expected["dot_cos"]) <= 1e-3 * expected["norm"] + 1e-6, name
        assert torch.allclose(flat[:4], torch.tensor(expected["first4"], dtype=torch.float64), rtol=0, atol=atol), name
        stored = tensors.get(f"grad.{name}")
        if stored is not None:
            assert float((gradients[name] - stored).abs().max()) <= atol, name
