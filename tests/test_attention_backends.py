"""Eager, sdpa, flex and packed attention give the same ids in float32."""

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import transformers.integrations.flex_attention as integration
from test_padding import MODES, decode, random_prompts
from torch._inductor.exc import InductorError

from benchmarks.random_models import random_model
from modeling_mrp.block_attention import attention_mask_for, layout_of_padded, may_see

# Prompts that fill their last block and prompts that do not, in one batch and alone.
BATCHES = [random_prompts(8), random_prompts(7), random_prompts(3, 8, 13)]


@pytest.fixture(scope="module")
def model():
    return random_model(9)


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """transformers compiles flex attention at its first call; the same function runs uncompiled, only slowly."""
    monkeypatch.setattr(integration, "WrappedFlexAttention", lambda training: lambda: flex.flex_attention)


def texts(model, implementation, arguments):
    model.set_attn_implementation(implementation)
    try:
        return [decode(model, prompts, True, **arguments) for prompts in BATCHES]
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("implementation", ["eager", "mrp_packed"])
@pytest.mark.parametrize("mode", MODES)
def test_implementations_agree(model, implementation, mode):
    """Guards a mask that one implementation reads otherwise (a bool mask is silently wrong on eager), sdpa that turns
    causal where there is no mask, and prompts that do or do not fill their block."""
    assert texts(model, implementation, MODES[mode]) == texts(model, "sdpa", MODES[mode])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mode", ["none", "lattice", "direct"])
def test_flex_agrees(model, uncompiled_flex, mode):
    """Guards flex attention, whose masks are functions; nothing is compiled here."""
    assert texts(model, "flex_attention", MODES[mode]) == texts(model, "sdpa", MODES[mode])


@pytest.mark.slow
def test_compiled_flex_agrees(model):
    """As above, as transformers runs it: compiled, which takes a C++ compiler and a minute."""
    wanted = texts(model, "sdpa", MODES["lattice"])
    try:
        assert texts(model, "flex_attention", MODES["lattice"]) == wanted
    except InductorError as error:
        if "cur_kvSplitSize" not in str(error):
            raise
        pytest.xfail("torch 2.13 on a CPU writes C++ for flex attention that names a variable it does not declare")


@pytest.mark.parametrize("implementation", ["eager", "flex_attention", "mrp_packed"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_forward_agrees(model, uncompiled_flex, implementation):
    """Guards the masks of the public forward, padded left and right, with the head's chain."""
    ids = torch.randint(0, 62, (3, 13), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, 9:] = 0, 0
    arguments = {"attention_mask": mask, "revealed_ids": ids[None], "block_length": 4}
    real = mask.bool()
    with torch.no_grad():
        wanted = model(ids, **arguments)
        model.set_attn_implementation(implementation)
        try:
            got = model(ids, **arguments)
        finally:
            model.set_attn_implementation("sdpa")
    torch.testing.assert_close(got.logits[real], wanted.logits[real], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.residual_logits[0][real], wanted.residual_logits[0][real], atol=1e-4, rtol=1e-4)


def test_flex_mask_is_the_rule():
    """Guards the block mask itself: it allows exactly what the rule allows."""
    layout = layout_of_padded(torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]]), 2)
    allowed = may_see(layout, layout)
    made = attention_mask_for("flex_attention", allowed, torch.float32)
    dense = flex.create_mask(made.mask_mod, 2, 1, 7, 7, device="cpu")
    assert torch.equal(dense[:, 0], allowed)
    for row, begin, length in ((0, 2, 5), (1, 0, 6)):
        for query in range(length):
            for key in range(length):
                assert bool(allowed[row, begin + query, begin + key]) == (key // 2 <= query // 2)
    assert not allowed[0, 2:, :2].any()
    with pytest.raises(ValueError, match="flash_attention_2"):
        attention_mask_for("flash_attention_2", allowed, torch.float32)
