"""A small random model and small batches for tests of training."""

from typing import Any

import torch

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.noising import IGNORED

BLOCK = 4
MASK = 63


def small_model(seed: int = 0, **settings: Any) -> MRPForCausalLM:
    torch.manual_seed(seed)
    values = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "block_size": BLOCK, "mask_token_id": MASK, "pad_token_id": 0, "eos_token_id": 1,
        "num_nextn_predict_layers": 2, "initializer_range": 0.3, "tie_word_embeddings": True, **settings,
    }  # fmt: skip
    model = MRPForCausalLM(MRPConfig(**values))
    torch.nn.init.constant_(model.mrp.norm.weight, 0.3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mrp."))
    return model.train()


def sample(length: int, prompt: int, key: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(key)
    ids = torch.randint(2, MASK, (length,), generator=generator).tolist()
    return {
        "input_ids": ids,
        "labels": [IGNORED] * prompt + ids[prompt:],
        "position_ids": list(range(length)),
        "sample_keys": [key] * length,
    }


def gradients(model: MRPForCausalLM) -> dict[str, torch.Tensor]:
    taken = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def assert_same_gradients(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    assert one
    for name, value in one.items():
        difference = float((value - other[name]).abs().max())
        assert difference <= atol * max(1.0, float(value.abs().max())), f"{name}: {difference}"
