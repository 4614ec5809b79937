"""SDAR block-diffusion backbone with a Multi-token Residual Prediction head (arXiv 2605.18817)."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3Model,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel
from transformers.utils import ModelOutput, logging

from .block_attention import attention_mask_for, check_attention_mask, layout_of_padded, may_see, row_positions
from .configuration_mrp import MRPConfig, looks_misdeclared
from .fused_head_input import can_fuse_input, fused_input
from .fused_rotary import may_fuse_rotary
from .generation_config_mrp import MRPGenerationConfig
from .generation_mrp import NO_CONTINUOUS_BATCHING, MRPGenerationMixin
from .head_artifact import load_head
from .residual_objective import training_loss

logger = logging.get_logger(__name__)

# transformers 5.24 renamed the layers' cache argument.
_CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(Qwen3DecoderLayer.forward).parameters else "past_key_values"
# The final norm of a fresh head starts near zero, so that an untrained head hardly moves the logits.
_FRESH_HEAD_NORM = 0.01
_HEAD_PREFIX = "mrp."


@dataclass
class MRPOutput(ModelOutput):
    """Output of [`MRPForCausalLM`].

    Attributes:
        loss: scalar float32, the training loss, when labels were given.
        logits: `[batch, tokens, vocab]` backbone logits; position i predicts token i (no shift).
        residual_logits: `[steps, batch, tokens, vocab]`: A + C after each revealed state (or C alone for a direct
            head), when `revealed_ids` were given.
        last_hidden_state: `[batch, tokens, hidden]` after the final norm.
        hidden_states: tuple of `[batch, tokens, hidden]`, when `output_hidden_states`.
        metrics: dict of scalar tensors that training logs.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    residual_logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    metrics: dict[str, Tensor] | None = None


def run_layers(
    layers: nn.ModuleList, hidden: Tensor, position_embeddings: Any, mask: Any, cache: Any = None, **kwargs: Any
) -> Tensor:
    """Runs decoder layers over `hidden` `[batch, tokens, hidden]` under one prepared attention mask.

    `cache` is anything with `update(key, value, layer_index, ...)`; it decides what is stored. `kwargs` travel to the
    attention function.
    """
    kwargs[_CACHE_ARGUMENT] = cache
    for layer in layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=position_embeddings, **kwargs)
        if isinstance(hidden, tuple):
            hidden = hidden[0]
    return hidden


class MRPHead(nn.Module):
    """The residual head: r = norm(layers(P [norm_e(embed(ids)); norm_h(acc)])) (DESIGN section 1).

    Its layers are dense Qwen3 layers, also over a mixture-of-experts backbone. It holds neither the embeddings nor the
    LM head: both are the backbone's.
    """

    def __init__(self, config: MRPConfig):
        super().__init__()
        self.enorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, 0) for _ in range(config.num_nextn_predict_layers))
        for index, layer in enumerate(self.layers):
            layer.self_attn.layer_idx = index
            may_fuse_rotary(layer.self_attn)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm.starts_small = True  # see `_init_weights`
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)

    def forward(
        self,
        embeddings: Tensor,
        accumulated: Tensor,
        position_ids: Tensor,
        mask: Any,
        cache: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """The correction r `[batch, tokens, hidden]`, in hidden space; its logits are C = W r.

        Args:
            embeddings: `[batch, tokens, hidden]` of the tokens after the reveal.
            accumulated: `[batch, tokens, hidden]`, acc_{k-1} = h + r_1 + ... + r_{k-1}.
            position_ids: `[batch, tokens]`.
            mask: as for `run_layers`.
        """
        return self.run(self.join(embeddings, accumulated), position_ids, mask, cache, **kwargs)

    def join(self, embeddings: Tensor, accumulated: Tensor) -> Tensor:
        """u = P [norm_e(embed(ids)); norm_h(acc)], `[batch, tokens, hidden]`."""
        return self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(accumulated)], dim=-1))

    def run(self, hidden: Tensor, position_ids: Tensor, mask: Any, cache: Any = None, **kwargs: Any) -> Tensor:
        """r = norm(layers(u)) for a joined input u."""
        position_embeddings = self.rotary_emb(hidden, position_ids)
        return self.norm(run_layers(self.layers, hidden, position_embeddings, mask, cache, **kwargs))


class MRPPreTrainedModel(PreTrainedModel):
    """What transformers needs to know to load, save, split and initialise the model."""

    config_class = MRPConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Qwen3DecoderLayer", "Qwen3MoeDecoderLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True
    # FlashAttention drops mask functions without an error.
    _supports_flash_attn = False
    _supports_attention_backend = True
    _can_compile_fullgraph = False

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # Not by `isinstance(module, MRPHead)`: transformers passes over custom modules without weights of their own.
        if getattr(module, "starts_small", False):
            initialization.constant_(module.weight, _FRESH_HEAD_NORM)


class MRPForCausalLM(MRPPreTrainedModel, MRPGenerationMixin, GenerationMixin):
    """Block-diffusion language model (Qwen3 or Qwen3-MoE layers) with one MRP head, `mrp`.

    `forward` gives the backbone's logits under the block-causal mask. `generate` decodes in four modes; see
    [`MRPGenerationConfig`].
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {
        "lm_head": "colwise_gather_output",
        **{f"mrp.{name}": plan for name, plan in MRPConfig.base_model_tp_plan.items() if name.startswith("layers.*.")},
    }
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: MRPConfig):
        super().__init__(config)
        self.model = (Qwen3MoeModel if config.num_experts > 0 else Qwen3Model)(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mrp = MRPHead(config)
        # transformers' own class would drop the MRP fields when it is saved and loaded again.
        self.generation_config = MRPGenerationConfig.from_model_config(config)
        for layer in (*self.model.layers, *self.mrp.layers):
            # A block step without padding has no mask, and sdpa would then be causal.
            layer.self_attn.is_causal = False
            may_fuse_rotary(layer.self_attn)
        self.post_init()

    def __getattr__(self, name: str) -> Any:
        # torch's own replaces the text of an error that a property raises.
        if name == "init_continuous_batching":
            raise AttributeError(NO_CONTINUOUS_BATCHING)
        return super().__getattr__(name)

    def backbone(self, input_ids: Tensor, position_ids: Tensor, mask: Any, cache: Any = None, **kwargs: Any) -> Tensor:
        """Hidden states `[batch, tokens, hidden]` after the final norm, under a prepared attention mask."""
        hidden = self.model.embed_tokens(input_ids)
        position_embeddings = self.model.rotary_emb(hidden, position_ids)
        return self.model.norm(run_layers(self.model.layers, hidden, position_embeddings, mask, cache, **kwargs))

    def head(
        self,
        input_ids: Tensor,
        accumulated: Tensor,
        position_ids: Tensor,
        mask: Any,
        cache: Any = None,
        kernels: str | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """One head step: the correction r_k and the new accumulator acc_k, both `[batch, tokens, hidden]`.

        For a direct head (`config.head_prediction == "direct"`) the new accumulator is the head's output itself.
        `kernels` (`auto`, `torch`, `triton`) says how its input is made; the config's by default.
        """
        kernels = self.config.kernels if kernels is None else kernels
        if can_fuse_input(self, accumulated.device, kernels):
            joined = fused_input(self, input_ids, accumulated, kernels)
            residual = self.mrp.run(joined, position_ids, mask, cache, **kwargs)
        else:
            residual = self.mrp(self.model.embed_tokens(input_ids), accumulated, position_ids, mask, cache, **kwargs)
        if self.config.head_prediction == "direct":
            return residual, residual
        return residual, accumulated + self.config.residual_scale * residual

    def attention_mask(self, allowed: Tensor) -> Any:
        """`allowed` `[batch, queries, keys]` in the form of this model's attention implementation."""
        return attention_mask_for(self.config._attn_implementation, allowed, self.dtype)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        revealed_ids: Tensor | None = None,
        labels: Tensor | None = None,
        block_length: int | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> MRPOutput | tuple:
        """Backbone logits under the block-causal mask and, on request, the head's residual chain or the loss.

        Args:
            input_ids: `[batch, tokens]` int64; masked positions hold `config.mask_token_id`.
            attention_mask: `[batch, tokens]`, 1 for real tokens (left or right padding), default all ones. The block
                grid of a row starts at its first real token.
            position_ids: `[batch, tokens]`, default: counted from the row's first real token.
            revealed_ids: `[steps, batch, tokens]`: the states after each further reveal; gives `residual_logits`.
            labels: `[batch, tokens]`, -100 where nothing is supervised; gives `loss` (see `residual_objective.py`,
                whose arguments are accepted here as keywords).
            block_length: default `config.block_size`.

        Raises:
            ValueError: for a mask of a wrong shape, with holes or empty rows.
        """
        if input_ids is None:
            raise ValueError("forward needs input_ids ([batch, tokens]); inputs_embeds are not supported.")
        kwargs.pop("use_cache", None), kwargs.pop("num_items_in_batch", None)
        # PEFT passes its own signature on, with None where nothing was given.
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        block_length = block_length or self.config.block_size
        if labels is not None:
            # A function of the loss takes what is left, so that an unknown argument is a TypeError there too.
            loss, metrics = training_loss(
                self, input_ids, labels, block_length, attention_mask, position_ids, **kwargs
            )
            output = MRPOutput(loss=loss, metrics=metrics)
            return output if return_dict is not False else output.to_tuple()
        if kwargs:
            raise TypeError(f"forward got unknown arguments {sorted(kwargs)}.")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        check_attention_mask(attention_mask, input_ids)
        layout = layout_of_padded(attention_mask, block_length)
        if position_ids is None:
            position_ids = row_positions(attention_mask)
        mask = self.attention_mask(may_see(layout, layout))
        hidden = self.backbone(input_ids, position_ids, mask)
        residual_logits = None
        if revealed_ids is not None:
            chain, accumulated = [], hidden
            for ids in revealed_ids:
                _, accumulated = self.head(ids, accumulated, position_ids, mask)
                chain.append(self.lm_head(accumulated))
            residual_logits = torch.stack(chain)
        output = MRPOutput(
            logits=self.lm_head(hidden),
            residual_logits=residual_logits,
            last_hidden_state=hidden,
            hidden_states=(hidden,) if output_hidden_states else None,
        )
        return output if return_dict is not False else output.to_tuple()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; a checkpoint without a head gets a fresh one and says so, half a head is an error.

        `mrp_head` names a folder or Hub id with a head-only artefact of `mrp-train`, which is put on the backbone.
        """
        head = kwargs.pop("mrp_head", None)
        wants_info = kwargs.pop("output_loading_info", False)
        ignores_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        if info["mismatched_keys"] and not ignores_mismatch:
            # transformers' own error names neither the weight nor its shapes.
            name, *shapes = sorted(info["mismatched_keys"])[0]
            found, wanted = map(list, shapes)
            raise ValueError(
                f"{pretrained_model_name_or_path}: {name} has shape {found}; the config asks for {wanted}. "
                "Set the config's sizes (hidden_size, num_nextn_predict_layers, ...) to those of the weights, or "
                "convert the checkpoint again with mrp-convert."
            )
        missing = sorted(key for key in info["missing_keys"] if key.startswith(_HEAD_PREFIX))
        parameters = [name for name, _ in model.named_parameters() if name.startswith(_HEAD_PREFIX)]
        if missing and len(missing) < len(parameters):
            raise ValueError(
                f"{pretrained_model_name_or_path}: the MRP head is incomplete, {len(missing)} of {len(parameters)} of "
                f"its weights are missing (first: {missing[0]}). Set num_nextn_predict_layers to the checkpoint's own "
                "number of head layers, or convert the checkpoint again with mrp-convert."
            )
        if head is not None:
            load_head(model, head)
        elif missing:
            logger.warning(
                f"{pretrained_model_name_or_path} has no MRP head: a fresh, untrained one of "
                f"{model.config.num_nextn_predict_layers} layers was made. Decode with mrp_mode='none' or "
                "drafter='zero', or train the head with mrp-train."
            )
        if looks_misdeclared(model.config):
            logger.warning(
                "This checkpoint's config says block_size 4, but the published 4B MRP weights were trained with 16. "
                "Pass block_length=16 to generate, or convert it with mrp-convert --block-length 16."
            )
        return (model, info) if wants_info else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with this package's own key names (`mrp.*`), whatever names were loaded."""
        kwargs.setdefault("save_original_format", False)
        if self._auto_class is not None:
            # transformers notes one auto class; this model answers to two.
            name = f"{type(self).__module__.rsplit('.', 1)[-1]}.{type(self).__name__}"
            known = getattr(self.config, "auto_map", None) or {}
            self.config.auto_map = {**known, "AutoModel": name, "AutoModelForCausalLM": name}
        super().save_pretrained(*args, **kwargs)


_renamings = [WeightRenaming(r"mrp_modules\.0\.model\.", r"mrp.")]
register_checkpoint_conversion_mapping(
    "MRPForCausalLM", [*(get_checkpoint_conversion_mapping("qwen3_moe") or []), *_renamings], overwrite=True
)
