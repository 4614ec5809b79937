"""8-bit and 4-bit weights of the backbone: speculative decoding stays lossless against the quantised model."""

from pathlib import Path

import pytest
import torch

from modeling_mrp.hub.errors import HubError
from modeling_mrp.hub.quantize import backbone_weights
from modeling_mrp.modeling_mrp import MRPForCausalLM

TINY = Path(__file__).parents[2] / "hub_configs" / "sdar-tiny-mrp"
PROMPT = torch.tensor([[12, 8, 40, 77, 5]])


def test_other_widths_are_refused():
    with pytest.raises(HubError, match="bits=3; allowed: 4 or 8"):
        backbone_weights(3)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_speculative_equals_none_on_a_quantised_backbone(converted, bits):
    pytest.importorskip("torchao")
    model = MRPForCausalLM.from_pretrained(converted, quantization_config=backbone_weights(bits, group_size=16)).eval()
    plain = torch.nn.Parameter
    assert type(model.model.layers[0].mlp.up_proj.weight) is not plain
    assert type(model.mrp.layers[0].mlp.up_proj.weight) is plain
    assert type(model.lm_head.weight) is plain
    for options in ({}, {"remasking_strategy": "low_confidence_dynamic"}, {"do_sample": True, "seed": 3}):
        none, speculative = (
            model.generate(PROMPT, mrp_mode=mode, max_new_tokens=16, **options) for mode in ("none", "speculative")
        )
        assert torch.equal(none, speculative), options
    for mode in ("direct", "remask"):
        assert model.generate(PROMPT, mrp_mode=mode, max_new_tokens=8).shape == (1, 13)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.02), (4, 0.2)])
def test_a_trained_model_stays_itself(bits, tolerance, dtype):
    """Its activations are large enough to overflow float16 where weights are scaled behind the product."""
    pytest.importorskip("torchao")
    whole = MRPForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    model = MRPForCausalLM.from_pretrained(TINY, dtype=dtype, quantization_config=backbone_weights(bits)).eval()
    ids = torch.arange(5, 29)[None]
    with torch.no_grad():
        expected, found = whole(ids).logits, model(ids).logits.float()
    assert (found - expected).norm() < tolerance * expected.norm()
    for mode in ("none", "speculative", "direct", "remask"):
        model.generate(ids, mrp_mode=mode, max_new_tokens=16)
