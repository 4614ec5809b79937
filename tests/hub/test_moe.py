"""A mixture of experts (Qwen3-MoE layers): the two promises of generation, losslessness and independence of rows."""

import pytest
import torch

from modeling_mrp.modeling_mrp import MRPForCausalLM

MODES = ("none", "speculative", "direct", "remask")


def load(folder, experts: str) -> MRPForCausalLM:
    model = MRPForCausalLM.from_pretrained(folder).eval()
    # The grouped product of transformers' default compiles a fallback on CPUs, which takes longer than all tests here.
    model.config._experts_implementation = experts
    return model


@pytest.fixture(scope="module")
def model(converted_moe):
    return load(converted_moe, "eager")


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 94, (length,), generator=generator) for length in (3, 17, 8)]


@pytest.mark.parametrize("strategy", ["low_confidence_static", "low_confidence_dynamic", "entropy_bounded"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculative_is_lossless(model, prompts, strategy, temperature):
    options = {
        "remasking_strategy": strategy,
        "do_sample": temperature > 0,
        "temperature": temperature,
        "max_new_tokens": 18,
        "confidence_threshold": 0.3,
        "seed": 5,
    }
    plain = model.generate(prompts[1][None], mrp_mode="none", **options)
    for drafting in ({"draft_shape": "lattice", "draft_states": 6}, {"draft_shape": "chain"}):
        drafted = model.generate(prompts[1][None], mrp_mode="speculative", **drafting, **options)
        assert torch.equal(plain, drafted), drafting


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", MODES)
def test_a_padded_batch_equals_each_row_alone(model, prompts, side, mode):
    width = max(map(len, prompts))
    ids, mask = torch.full((3, width), 256), torch.zeros(3, width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    together = model.generate(ids, attention_mask=mask, mrp_mode=mode, max_new_tokens=14)[:, width:]
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], mrp_mode=mode, max_new_tokens=14)[0, len(prompt) :]
        assert torch.equal(together[row], alone), row


@pytest.mark.slow
def test_the_default_experts_implementation_is_lossless_too(converted_moe, prompts):
    model = MRPForCausalLM.from_pretrained(converted_moe).eval()
    plain, drafted = (
        model.generate(prompts[1][None], mrp_mode=mode, max_new_tokens=18) for mode in ("none", "speculative")
    )
    assert torch.equal(plain, drafted)
