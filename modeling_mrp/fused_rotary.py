"""q/k norm, rotary embedding and the write to the cache by one kernel of a packed forward, if the norms lie open."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeRMSNorm

from .kernel_dispatch import resolve_kernels
from .mrp_input import qk_norm_rope
from .packed_attention import mrp_packed_attention


def may_fuse_rotary(attention: nn.Module) -> None:
    """Lets one of transformers' own attention modules take the kernel where it can; others stay as they are.

    The module changes class and nothing else: weights, names and projections (LoRA, quantised, split) are untouched.
    """
    attention.__class__ = _FUSED.get(type(attention), type(attention))


def open_norms(attention: Any, hidden: Tensor, cos: Tensor, layout: Any) -> tuple[Tensor, Tensor, float] | None:
    """Weights of the q and the k norm and their eps, if a kernel may read them itself in this call; else `None`.

    The call must belong to a packed forward by kernels, without recorded gradients or autocast, and the norms must not
    be replaced, hooked, offloaded or split: their `.weight` would not be what a call of them computes with.
    """
    device = hidden.device
    if layout is None or torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
        return None
    if resolve_kernels(layout.kernels, device) != "triton" or cos.shape[-1] != attention.head_dim:
        return None
    query, key = attention.q_norm, attention.k_norm
    query_weight, key_weight = _open_weight(query, hidden), _open_weight(key, hidden)
    if query_weight is None or key_weight is None or query.variance_epsilon != key.variance_epsilon:
        return None
    return query_weight, key_weight, query.variance_epsilon


def _open_weight(norm: nn.Module, hidden: Tensor) -> Tensor | None:
    weight: Any = getattr(norm, "weight", None)
    hooked = "forward" in vars(norm) or norm._forward_hooks or norm._forward_pre_hooks
    if type(norm) not in (Qwen3RMSNorm, Qwen3MoeRMSNorm) or hooked or type(weight) is not nn.Parameter:
        return None
    return weight if weight.device == hidden.device and weight.dtype == hidden.dtype else None


class _Fused:
    """`forward` of transformers' attention; in a packed forward, all between projections and attention in a kernel."""

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        layout: Any = kwargs.get("packed_layout")
        norms = open_norms(self, hidden_states, position_embeddings[0], layout)
        if norms is None:
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)  # type: ignore[misc]
        leading = hidden_states.shape[:-1]
        heads = (*leading, -1, self.head_dim)
        key = self.k_proj(hidden_states).view(heads)
        new_key, new_value = layout.cache.place(key.transpose(1, 2), self.layer_idx)
        query, _ = qk_norm_rope(
            self.q_proj(hidden_states).view(heads),
            key,
            *norms[:2],
            *position_embeddings,
            eps=norms[2],
            value=self.v_proj(hidden_states).view(heads),
            out=(new_key, new_value),
            kernels=layout.kernels,
        )
        mixed, _ = mrp_packed_attention(
            self, query, new_key, new_value, None, packed_layout=layout, scaling=self.scaling
        )
        return self.o_proj(mixed.reshape(*leading, -1)), None


class FusedQwen3Attention(_Fused, Qwen3Attention):
    """transformers' `Qwen3Attention`, see `_Fused`."""


class FusedQwen3MoeAttention(_Fused, Qwen3MoeAttention):
    """transformers' `Qwen3MoeAttention`, see `_Fused`."""


_FUSED = {Qwen3Attention: FusedQwen3Attention, Qwen3MoeAttention: FusedQwen3MoeAttention}
