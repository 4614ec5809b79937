"""Where the tasks are, and small random models."""

from pathlib import Path

import torch

from modeling_mrp import MRPConfig, MRPForCausalLM

TASKS = Path(__file__).parents[2] / "lm_eval_tasks"

# The models here are so small that a second thread only waits for the first.
torch.set_num_threads(1)


def make_model(vocab_size, mask_token_id, block_size=4, seed=0, **overrides):
    """A random float32 model whose logits are spread enough for its decisions to differ."""
    torch.manual_seed(seed)
    fields = {
        "vocab_size": vocab_size, "mask_token_id": mask_token_id, "block_size": block_size, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "num_nextn_predict_layers": 1, "max_position_embeddings": 256, "tie_word_embeddings": False,
        "initializer_range": 0.3, **overrides,
    }  # fmt: skip
    return MRPForCausalLM(MRPConfig(**fields)).eval()
