"""Configuration of an SDAR backbone that carries a Multi-token Residual Prediction head."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

# The block size that the published 4B checkpoints declare, and the one that they were trained with.
_DECLARED_BLOCK_SIZE, _TRAINED_BLOCK_SIZE = 4, 16
HEAD_PREDICTIONS = ("residual", "direct")
KERNEL_CHOICES = ("auto", "torch", "triton")
MAX_HEAD_LAYERS = 8


class MRPConfig(PreTrainedConfig):
    r"""Configuration of [`MRPForCausalLM`]: a Qwen3 (or Qwen3-MoE) block-diffusion backbone plus one MRP head.

    All fields of `Qwen3Config` are accepted under their usual names; a config with `num_experts > 0` describes a
    mixture of experts and takes the fields of `Qwen3MoeConfig`. The official SDAR and SDAR-MRP field names
    (`block_size`, `mask_token_id`, `num_nextn_predict_layers`, `num_mrp_heads`) are kept.

    Args:
        block_size (`int`, defaults to 4): positions per diffusion block. Generation may override it by `block_length`.
        mask_token_id (`int`): id of the mask token that stands at positions not revealed yet.
        num_nextn_predict_layers (`int`, defaults to 3): transformer layers of the head, 1 to 8.
        num_mrp_heads (`int`, defaults to 1): heads; only one is defined by the method.
        head_prediction (`str`): `"residual"`: the head predicts how the logits move (MRP, arXiv 2605.18817);
            `"direct"`: it predicts the next logits themselves (the direct-MTP control).
        residual_scale (`float`): factor on every residual before it is added.
        draft_calibration (`dict`, *optional*): parameters of the draft model of `draft_lattice.py`, fitted on
            decoding traces; `None` uses the values fitted on the tiny model.
        kernels (`str`): `"auto"`, `"torch"` or `"triton"`; see `kernels/README.md`.
    """

    model_type = "sdar_mrp"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {"num_local_experts": "num_experts"}
    base_model_tp_plan = Qwen3Config.base_model_tp_plan
    base_model_pp_plan = Qwen3Config.base_model_pp_plan

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 36
    layer_types: list[str] | None = None
    attention_dropout: float | int = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    block_size: int = 4
    mask_token_id: int = 151669
    num_nextn_predict_layers: int = 3
    num_mrp_heads: int = 1
    head_prediction: str = "residual"
    residual_scale: float | int = 1.0
    draft_calibration: dict | None = None
    kernels: str = "auto"
    # What the file that this config was read from called itself; "sdar" or "sdar_moe" for upstream checkpoints.
    declared_model_type: str | None = None
    # Mixture of experts (Qwen3-MoE); num_experts = 0 means a dense backbone.
    num_experts: int = 0
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    def __post_init__(self, **kwargs: Any) -> None:
        self.sliding_window = None
        self.use_sliding_window = False
        self.mlp_only_layers = [] if self.mlp_only_layers is None else self.mlp_only_layers
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        # Block diffusion attends to whole blocks: every layer is a full-attention layer.
        self.layer_types = ["full_attention"] * self.num_hidden_layers
        self.declared_model_type = kwargs.pop("model_type", None) or self.declared_model_type
        if self.declared_model_type in ("sdar", "sdar_moe"):
            # Upstream files name an attention implementation that fits their own modelling code, not this one.
            kwargs.pop("attn_implementation", None)
        super().__post_init__(**kwargs)
        self._check()

    @property
    def is_mixture_of_experts(self) -> bool:
        """Whether the backbone's layers are Qwen3-MoE layers."""
        return self.num_experts > 0

    def _check(self) -> None:
        def bad(name: str, allowed: str, fix: str) -> ValueError:
            return ValueError(f"MRPConfig: {name}={getattr(self, name)!r}; allowed: {allowed}. {fix}")

        if not 1 <= self.num_nextn_predict_layers <= MAX_HEAD_LAYERS:
            raise bad("num_nextn_predict_layers", f"1 to {MAX_HEAD_LAYERS}", "Set the number of the head's layers.")
        if self.num_mrp_heads != 1:
            raise bad("num_mrp_heads", "1", "The method shares one head between all steps.")
        if self.block_size < 1:
            raise bad("block_size", "at least 1", "Set the block length that the weights were trained with.")
        if self.head_prediction not in HEAD_PREDICTIONS:
            raise bad("head_prediction", " or ".join(HEAD_PREDICTIONS), "See MRPConfig.")
        if self.kernels not in KERNEL_CHOICES:
            raise bad("kernels", ", ".join(KERNEL_CHOICES), "See kernels/README.md.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise bad("mask_token_id", f"0 to vocab_size - 1 = {self.vocab_size - 1}", "Set the mask token's id.")


def looks_misdeclared(config: PreTrainedConfig) -> bool:
    """Whether `config` is the published 4B config that says block_size 4 over weights trained with blocks of 16.

    The 4B MRP checkpoints (hidden 2560, 36 layers, with a head) are known to declare 4; plain SDAR checkpoints of
    block size 4 exist and are right, so only configs that bring an MRP head are suspected.
    """
    return (
        config.block_size == _DECLARED_BLOCK_SIZE
        and config.hidden_size == 2560
        and config.num_hidden_layers == 36
        and "MRP" in "".join(getattr(config, "architectures", None) or [])
        and getattr(config, "declared_model_type", None) == "sdar"
    )
