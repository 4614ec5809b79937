"""Run in a process of its own under the Triton interpreter: the engine's ids by the kernels and by their twins."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from modeling_mrp import MRPConfig, MRPForCausalLM

MODES = {
    "none": {"mrp_mode": "none"},
    "lattice": {"mrp_mode": "speculative", "draft_states": 4},
    "chain": {"mrp_mode": "speculative", "draft_shape": "chain", "mrp_steps": 2},
    "shortlist": {"mrp_mode": "speculative", "draft_states": 3, "draft_shortlist": 8},
    "sampled": {"mrp_mode": "speculative", "draft_states": 3, "do_sample": True, "temperature": 0.8, "seed": 3},
    "direct": {"mrp_mode": "direct", "mrp_steps": 2},
    "remask": {"mrp_mode": "remask", "confidence_threshold": 0.02},
}


def model_with(kernels: str) -> MRPForCausalLM:
    torch.manual_seed(0)
    config = MRPConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_nextn_predict_layers=1, block_size=4, mask_token_id=66,
        max_position_embeddings=128, initializer_range=0.3, kernels=kernels,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return MRPForCausalLM(config).eval()


def main() -> None:
    torch.set_num_threads(1)
    prompts = torch.randint(0, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    found = {}
    for kernels in ("torch", "triton"):
        model = model_with(kernels)
        found[kernels] = {
            name: model.generate(prompts, attention_mask=mask, max_new_tokens=7, eos_token_id=[], **options)
            for name, options in MODES.items()
        }
        expected = "mrp_packed" if kernels == "triton" else "sdpa"
        assert model.config._attn_implementation == expected
    for name in MODES:
        assert torch.equal(found["torch"][name], found["triton"][name]), name


if __name__ == "__main__":
    main()
