"""Multi-token Residual Prediction for block-diffusion language models."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_mrp import MRPConfig
from .generation_config_mrp import MRPGenerationConfig
from .generation_output import MRPGenerateOutput
from .modeling_mrp import MRPForCausalLM, MRPHead, MRPOutput

__version__ = "0.1.0"
__all__ = ["MRPConfig", "MRPForCausalLM", "MRPGenerateOutput", "MRPGenerationConfig", "MRPHead", "MRPOutput"]

AutoConfig.register(MRPConfig.model_type, MRPConfig, exist_ok=True)
AutoModel.register(MRPConfig, MRPForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(MRPConfig, MRPForCausalLM, exist_ok=True)
# `save_pretrained` then writes the remote code beside the weights.
MRPConfig.register_for_auto_class()
for _auto_class in ("AutoModel", "AutoModelForCausalLM"):
    MRPForCausalLM.register_for_auto_class(_auto_class)
