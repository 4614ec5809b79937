"""Small random models whose logits are well spread, for fuzzing and tests: no checkpoint, no training."""

from functools import lru_cache
from typing import Any

import torch

from modeling_mrp import MRPConfig, MRPForCausalLM

VOCAB, MASK = 64, 63
# Standard deviation of the logits, so that decisions are far apart compared with float32 noise (about 1e-6).
LOGIT_SPREAD = 4.0
HEADS = ("random", "adversarial", "zero")


def random_config(**overrides: Any) -> MRPConfig:
    """Hidden 32, 2 layers, 2 head layers, vocabulary 64 with the mask token last."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "block_size": 4, "mask_token_id": MASK, "num_nextn_predict_layers": 2,
    }  # fmt: skip
    if overrides.pop("moe", False):
        values |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return MRPConfig(**(values | overrides))


def random_model(seed: int = 0, head: str = "random", **overrides: Any) -> MRPForCausalLM:
    """A float32 model in eval mode. `head`: `random` moves the logits about as much as they are spread, `adversarial`
    has huge weights, `zero` moves nothing. `overrides` are config fields, and `moe=True`."""
    config = random_config(**overrides)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = MRPForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                weight.copy_(2 + 0.2 * torch.randn_like(weight))  # sharp attention, so that places differ
            elif "norm" in name:
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
            elif "embed_tokens" in name or "lm_head" in name:
                weight.normal_(0, LOGIT_SPREAD / config.hidden_size**0.5)
            else:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
        # A masked place is told by its neighbours, not by the mask token: otherwise all places predict one token.
        model.model.embed_tokens.weight[config.mask_token_id] *= 0.1
        scale = {"random": 0.5, "adversarial": -40.0, "zero": 0.0}[head]
        model.mrp.norm.weight.mul_(scale)
        if head == "adversarial":
            model.mrp.eh_proj.weight.mul_(50)
    torch.set_rng_state(state)
    return model


@lru_cache(maxsize=64)
def shared_model(seed: int = 0, head: str = "random", moe: bool = False, tied: bool = False) -> MRPForCausalLM:
    """The same, made once; not to be changed."""
    return random_model(seed, head, moe=moe, tie_word_embeddings=tied)
