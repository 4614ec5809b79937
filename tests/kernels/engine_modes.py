"""Run in a process of its own under the Triton interpreter: the engine's ids by the kernels and by their twins."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from modeling_mrp import MRPConfig, MRPForCausalLM

MODES = {
    "none": {"mrp_mode": "none"},
    "lattice": {"mrp_mode": "speculative", "draft_states": 4},
    "chain": {"mrp_mode": "speculative", "draft_shape": "chain", "mrp_steps": 2},
    "shortlist": {"mrp_mode": "speculative", "draft_states": 3, "draft_shortlist": 8},
    "sampled": {"mrp_mode": "speculative", "draft_states": 3, "do_sample": True, "top_k": 0, "seed": 3},
    "top_p": {"mrp_mode": "none", "do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3},
    "direct": {"mrp_mode": "direct", "mrp_steps": 2},
    "remask": {"mrp_mode": "remask", "confidence_threshold": 0.02},
    "block": {"mrp_mode": "speculative", "draft_states": 3, "mrp_context": "block"},
}
EVERYWHERE = {"reveal_statistics", "packed_block_attention", "qk_norm_rope", "verify_states"}
DRAFTING = EVERYWHERE | {"mrp_input", "lattice_states"}
CALLED = {
    **dict.fromkeys(MODES, DRAFTING),
    "none": EVERYWHERE,
    "top_p": EVERYWHERE | {"reveal_threshold"},
    "shortlist": DRAFTING | {"shortlist", "shortlist_residual"},
    "direct": EVERYWHERE | {"mrp_input"},
    "remask": EVERYWHERE | {"mrp_input"},
}
LAUNCHERS = {
    "reveal_statistics": "reveal_statistics_triton.reveal_statistics_triton",
    "reveal_threshold": "reveal_statistics_triton.reveal_threshold",
    "packed_block_attention": "packed_block_attention_triton.packed_block_attention_triton",
    "shortlist": "shortlist_residual_triton.shortlist_triton",
    "shortlist_residual": "shortlist_residual_triton.shortlist_residual_triton",
    "mrp_input": "mrp_input_triton.mrp_input_triton",
    "qk_norm_rope": "mrp_input_triton.qk_norm_rope_triton",
    "lattice_states": "lattice_states_triton.lattice_states_triton",
    "residual_kl": "residual_kl_triton.residual_kl_triton",
    "verify_states": "verify_states_triton.verify_states_triton",
}


def model_with(kernels: str, **changes) -> MRPForCausalLM:
    torch.manual_seed(0)
    config = MRPConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_nextn_predict_layers=1, block_size=4, mask_token_id=66,
        max_position_embeddings=128, initializer_range=0.3, kernels=kernels, **changes,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = MRPForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(weight, 0.5, 1.5)  # ones would hide a norm that reads the other's weight
    return model


@contextmanager
def counted() -> Iterator[Counter]:
    """Counts the calls of each launcher."""
    calls: Counter = Counter()

    def counting(name: str, original: Callable) -> Callable:
        def launch(*arguments, **options):
            calls[name] += 1
            return original(*arguments, **options)

        return launch

    with ExitStack() as stack:
        for name, place in LAUNCHERS.items():
            module, attribute = place.split(".")
            owner = importlib.import_module(f"modeling_mrp.{module}")
            original = getattr(owner, attribute)
            stack.enter_context(mock.patch.object(owner, attribute, counting(name, original)))
        yield calls


def generate(model: MRPForCausalLM, **options) -> torch.Tensor:
    prompts = torch.randint(0, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0
    return model.generate(prompts, attention_mask=mask, max_new_tokens=7, eos_token_id=[], **options)


def every_mode() -> None:
    by_twins, by_kernels = model_with("torch"), model_with("triton")
    for name, options in MODES.items():
        with counted() as calls:
            expected = generate(by_twins, **options)
        assert not calls, (name, calls)
        with counted() as calls:
            found = generate(by_kernels, **options)
        assert torch.equal(found, expected), name
        assert set(calls) == CALLED[name], (name, calls)
        # In every layer of every packed forward, of backbone and head alike.
        assert calls["qk_norm_rope"] == calls["packed_block_attention"], (name, calls)
    assert by_twins.config._attn_implementation == "sdpa"
    assert by_kernels.config._attn_implementation == "mrp_packed"


def by_argument() -> None:
    """`generate(kernels=...)` is obeyed everywhere, whatever the config says."""
    model, options = model_with("auto"), MODES["shortlist"]
    expected = generate(model, **options)
    with counted() as calls:
        assert torch.equal(generate(model, kernels="triton", **options), expected)
    assert set(calls) == CALLED["shortlist"], calls
    with counted() as calls:
        assert torch.equal(generate(model_with("triton"), kernels="torch", **options), expected)
    assert not calls, calls


def other_models() -> None:
    """A mixture of experts takes the kernel; norms that are not open are left to their layer; LoRA is obeyed."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    expected = generate(model_with("torch", **experts), **MODES["none"])
    with counted() as calls:
        assert torch.equal(generate(model_with("triton", **experts), **MODES["none"]), expected)
    assert calls["qk_norm_rope"] == calls["packed_block_attention"] > 0

    model, hooked = model_with("triton"), []
    expected = generate(model_with("torch"), **MODES["none"])
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda *_: hooked.append(1))
    with counted() as calls:
        assert torch.equal(generate(model, **MODES["none"]), expected)
    assert hooked
    assert 2 * calls["qk_norm_rope"] == calls["packed_block_attention"] > 0

    from peft import LoraConfig, get_peft_model

    found, calls = {}, Counter()
    for kernels in ("torch", "triton"):
        torch.manual_seed(5)
        lora = LoraConfig(r=4, target_modules=r"model\.layers\..*(q|k)_proj", init_lora_weights=False)
        model = get_peft_model(model_with(kernels), lora)
        with counted() as calls:
            found[kernels] = generate(model, **MODES["none"])
    assert torch.equal(found["torch"], found["triton"])
    assert not torch.equal(found["torch"], expected)
    assert calls["qk_norm_rope"] > 0


def training() -> None:
    """The loss by its kernel; the head's forward keeps its gradient, and so takes no kernel without one."""
    ids = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(2))
    found = {}
    for kernels in ("torch", "triton"):
        model = model_with(kernels).train()
        with counted() as calls:
            loss = model(ids, labels=ids, noise_seed=1).loss
            loss.backward()
        found[kernels] = loss, model.mrp.layers[0].self_attn.q_norm.weight.grad
    assert set(calls) == {"residual_kl"}, calls
    torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-4, atol=1e-6)
    assert found["torch"][1].abs().max() > 0


PARTS = {part.__name__: part for part in (every_mode, by_argument, other_models, training)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    PARTS[sys.argv[1]]()
