"""The head's input by one kernel, where the weights lie open to it."""

from typing import Any

import torch
from torch import Tensor, nn

from .kernel_dispatch import resolve_kernels
from .mrp_input import mrp_input


def can_fuse_input(model: Any, device: torch.device, kernels: str) -> bool:
    """Whether the Triton kernel may read the weights itself.

    Not while gradients are recorded, and not through modules that are quantised, adapted (LoRA), offloaded or split:
    their `.weight` is not what a call of them computes with.
    """
    if torch.is_grad_enabled() or resolve_kernels(kernels, device) != "triton":
        return False
    embedding, projection = model.model.embed_tokens, model.mrp.eh_proj
    plain = type(embedding) is nn.Embedding and type(projection) is nn.Linear
    modules = (embedding, projection, model.mrp.enorm, model.mrp.hnorm)
    open_ = not any(hasattr(module, "_hf_hook") for module in modules)
    return plain and open_ and all(module.weight.device == device for module in modules)


def fused_input(model: Any, input_ids: Tensor, accumulated: Tensor, kernels: str) -> Tensor:
    """u = P [norm_e(embed(ids)); norm_h(acc)] `[batch, tokens, hidden]`, the concatenation never made."""
    head = model.mrp
    return mrp_input(
        input_ids,
        accumulated,
        model.model.embed_tokens.weight,
        head.enorm.weight,
        head.hnorm.weight,
        head.eh_proj.weight,
        eps=model.config.rms_norm_eps,
        kernels=kernels,
    )
