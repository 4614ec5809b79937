"""8-bit and 4-bit weights of the backbone: speculative decoding stays lossless against the quantised model."""

import pytest
import torch

from modeling_mrp.hub.errors import HubError
from modeling_mrp.hub.quantize import backbone_weights
from modeling_mrp.modeling_mrp import MRPForCausalLM

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
