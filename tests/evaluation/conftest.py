"""A small random model with the tiny tokenizer, as a folder that the harness can load."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from evaluation_models import make_model

from modeling_mrp.tiny.tokenizer import build_tokenizer


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
