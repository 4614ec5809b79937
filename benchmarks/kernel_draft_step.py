"""One draft step beside one backbone forward, both built from the kernels and random weights of the real sizes."""

from collections.abc import Callable
from dataclasses import dataclass

import mrp_kernels
import torch
import torch.nn.functional as F
from mrp_kernels.mrp_input_torch import rms_norm
from torch import Tensor

from . import kernel_cases
from .kernel_cases import BLOCK, Model, random

HEAD_LAYERS = 3


@dataclass
class Layer:
    """Weights of one Qwen3 layer and its cache."""

    norms: tuple[Tensor, Tensor]
    head_norms: tuple[Tensor, Tensor]
    projection: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    cache_key: Tensor
    cache_value: Tensor


def make_layer(model: Model, prefix: int, device: torch.device) -> Layer:
    """Random weights, small enough that nothing overflows over many layers."""
    width, dim, hidden = model.heads * model.head_dim, model.head_dim, model.hidden
    cache = (1, model.kv_heads, prefix + 2 * BLOCK, dim)
    return Layer(
        norms=(torch.ones(hidden, device=device).bfloat16(), torch.ones(hidden, device=device).bfloat16()),
        head_norms=(torch.ones(dim, device=device).bfloat16(), torch.ones(dim, device=device).bfloat16()),
        projection=random(width + 2 * model.kv_heads * dim, hidden, device=device, scale=0.02),
        output=random(hidden, width, device=device, scale=0.02),
        gate_up=random(2 * model.mlp, hidden, device=device, scale=0.02),
        down=random(hidden, model.mlp, device=device, scale=0.02),
        cache_key=random(*cache, device=device),
        cache_value=random(*cache, device=device),
    )


def forward_layer(x: Tensor, layer: Layer, model: Model, rope: tuple[Tensor, Tensor], attention: dict) -> Tensor:
    """`[1, tokens, hidden]` through one layer."""
    tokens, dim = x.shape[1], model.head_dim
    sizes = [model.heads * dim, model.kv_heads * dim, model.kv_heads * dim]
    query, key, value = F.linear(rms_norm(x, layer.norms[0], 1e-6), layer.projection).split(sizes, dim=-1)
    # Keys and values go straight behind the prefix, as in the engine.
    caches = {"cache_key": layer.cache_key, "cache_value": layer.cache_value}
    prefix = attention["max_prefix_length"]
    new_key, new_value = (cache[:, :, prefix : prefix + tokens] for cache in caches.values())
    query, _ = mrp_kernels.qk_norm_rope(
        query.view(1, tokens, -1, dim),
        key.view(1, tokens, -1, dim),
        *layer.head_norms,
        *rope,
        value=value.view(1, tokens, -1, dim),
        out=(new_key, new_value),
    )
    mixed = mrp_kernels.packed_block_attention(query, new_key, new_value, **caches, **attention)
    x = x + F.linear(mixed.flatten(2), layer.output)
    gate, up = F.linear(rms_norm(x, layer.norms[1], 1e-6), layer.gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, layer.down)


def draft_and_backbone(
    model: Model, prefix: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object], Callable[[], object]]:
    """Calls to time, batch 1, one block: a draft step, the round's shortlist, a backbone forward with its picks."""
    layers = [make_layer(model, prefix, device) for _ in range(model.layers + HEAD_LAYERS)]
    embedding, head = (random(model.vocab, model.hidden, device=device, scale=0.02) for _ in range(2))
    norm = torch.ones(model.hidden, device=device).bfloat16()
    projection = random(model.hidden, 2 * model.hidden, device=device, scale=0.02)
    ids = torch.randint(model.vocab, (1, BLOCK), device=device)
    state = random(1, BLOCK, model.hidden, device=device)
    rope = (random(1, BLOCK, model.head_dim, device=device), random(1, BLOCK, model.head_dim, device=device))
    attention = {
        "prefix_length": torch.full((1,), prefix, device=device),
        "visibility": torch.ones(1, 1, device=device, dtype=torch.int64),
        "block": BLOCK,
        "max_prefix_length": prefix,
    }
    logits = random(BLOCK, model.vocab, device=device, scale=3.0)
    short = mrp_kernels.shortlist(logits, kernel_cases.SHORTLIST, mask_token_id=kernel_cases.MASK_TOKEN)

    def draft() -> object:
        x = mrp_kernels.mrp_input(ids, state, embedding, norm, norm, projection)
        for layer in layers[:HEAD_LAYERS]:
            x = forward_layer(x, layer, model, rope, attention)
        return mrp_kernels.shortlist_residual(short, rms_norm(x, norm, 1e-6)[0], head)

    def select() -> object:
        return mrp_kernels.shortlist(logits, kernel_cases.SHORTLIST, mask_token_id=kernel_cases.MASK_TOKEN)

    def backbone() -> object:
        x = F.embedding(ids, embedding)
        for layer in layers[HEAD_LAYERS:]:
            x = forward_layer(x, layer, model, rope, attention)
        found = F.linear(rms_norm(x, norm, 1e-6), head)[0]
        return mrp_kernels.reveal_statistics(found, mask_token_id=kernel_cases.MASK_TOKEN)

    return draft, select, backbone
