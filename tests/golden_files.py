"""Reads the golden files and says their parameters in this package's words."""

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from modeling_mrp import MRPForCausalLM

GOLDEN = Path(__file__).resolve().parent / "data" / "golden"


def golden_names(*patterns: str) -> list[str]:
    return sorted(path.stem for pattern in patterns for path in GOLDEN.glob(f"{pattern}.json"))


@lru_cache(maxsize=16)
def golden_file(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(manifest, tensors) of a case."""
    return json.loads((GOLDEN / f"{name}.json").read_text()), load_file(GOLDEN / f"{name}.safetensors")


def golden_runs(*patterns: str) -> list[tuple[str, str]]:
    """(file, run) of every recorded run."""
    return [(name, run["name"]) for name in golden_names(*patterns) for run in golden_file(name)[0]["runs"]]


@lru_cache(maxsize=8)
def golden_model(checkpoint: str, prediction: str = "residual", scale: float = 1.0, temperature: float = 1.0) -> Any:
    """A golden checkpoint; not to be changed.

    `prediction` and `scale` are the recorded `mrp_logit_mix_mode` and `mrp_logit_sum_scale`. The recorded runs at
    temperature 0.7 draw with top-k 1, so they are greedy, but they order positions by the softmax of logits / 0.7,
    which DESIGN forbids (confidence is never changed by temperature). The same mathematics is greedy decoding of the
    model whose LM head is divided by 0.7, and as such they are tested.
    """
    # eos_token_id = 1 in these configs ends nothing in the recordings (they name stop ids explicitly).
    model = MRPForCausalLM.from_pretrained(GOLDEN / checkpoint, dtype=torch.float32).eval()
    model.config = copy.copy(model.config)
    model.config.head_prediction, model.config.residual_scale = prediction, scale
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with torch.no_grad():
        model.lm_head.weight.div_(temperature)
    return model


def model_of(manifest: dict[str, Any], params: dict[str, Any]) -> Any:
    return golden_model(
        manifest["checkpoint"],
        "direct" if params.get("mrp_logit_mix_mode") == "none" else "residual",
        params.get("mrp_logit_sum_scale", 1.0),
        params.get("temperature", 1.0),
    )


def arguments_of(params: dict[str, Any], variant: str | None = None) -> dict[str, Any]:
    """Generation arguments that mean what the recorded parameters meant."""
    values = {
        "block_length": params["block_length"],
        "denoising_steps": params["denoising_steps"],
        "remasking_strategy": params["remasking_strategy"],
        "mrp_context": "prefix" if variant == "mrp_prefix_kv" else "block",
    }
    if "confidence_threshold" in params:
        values["confidence_threshold"] = params["confidence_threshold"]
    if "eb_threshold" in params:
        values["entropy_bound"] = params["eb_threshold"]
    if "stopping_criteria_idx" in params:
        values["eos_token_id"] = params["stopping_criteria_idx"]
    verify, steps = params.get("mrp_verify_mode"), params.get("mrp_steps")
    if verify == "residual_remask":
        return values | {"mrp_mode": "remask", "remask_rule": "veto", "remask_delta": params["residual_delta"]}
    if verify == "spec":
        # "Always one token per pick regardless of denoising_steps": what spec is equal to is static decoding.
        return values | {"mrp_mode": "speculative", "draft_shape": "chain", "mrp_steps": steps}
    if steps:
        # Direct decoding always had the head's prefix (README of the golden files, "MRP layers keep their own").
        extra = params.get("mrp_num_transfer_per_iter", 1)
        return values | {
            "mrp_mode": "direct", "mrp_steps": steps, "mrp_context": "prefix", "direct_tokens_per_step": extra
        }  # fmt: skip
    return values | {"mrp_mode": "none"}
