"""A small random model with the tiny tokenizer, as a folder that the harness can load."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
import torch

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.tiny.tokenizer import build_tokenizer

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


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A model folder with remote code, tokenizer and generation config."""
    folder = tmp_path_factory.mktemp("models") / "random-mrp"
    tokenizer = build_tokenizer()
    model = make_model(
        len(tokenizer),
        tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def language_model(model_folder):
    """The harness's model class over the random model, batches of 3."""
    from modeling_mrp.evaluation.language_model import MRPLM

    return MRPLM(str(model_folder), device="cpu", dtype="float32", batch_size=3)
