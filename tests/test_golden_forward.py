"""The network itself against the recorded reference: backbone, head, chain, caches, packed verification.

Guards: a wrong norm order, rotary convention, half of the projection, or mask, which no decoding test would localise.
"""

import pytest
import torch
from golden_files import golden_file, golden_model, golden_names

from modeling_mrp.packed_forward import PackedStack
from modeling_mrp.prefill import prefill
from modeling_mrp.reference_decoding import PrefixCache


def close(actual, expected, manifest, scale=1.0):
    tolerance = manifest["tolerance"]
    torch.testing.assert_close(actual, expected, atol=tolerance["atol"] * scale, rtol=tolerance["rtol"])


@pytest.mark.parametrize("name", golden_names("forward_*"))
@torch.no_grad()
def test_forward_equals_recording(name):
    """Guards the public forward: A, the residual chain A + C1 + C2, and the direct chain."""
    manifest, data = golden_file(name)
    model = golden_model(manifest["checkpoint"])
    block = manifest["block_size"]
    revealed = torch.stack([data["ids1"], data["ids2"]])
    output = model(data["ids0"], revealed_ids=revealed, block_length=block)
    close(output.last_hidden_state, data["hidden_A"], manifest)
    close(output.logits, data["logits_A"], manifest)
    close(output.residual_logits[0], data["logits_A_plus_C1"], manifest)
    close(output.residual_logits[1], data["logits_A_plus_C1_plus_C2"], manifest)
    close(model(data["ids1"], block_length=block).logits, data["teacher_logits_ids1"], manifest)
    close(model(data["ids2"], block_length=block).logits, data["teacher_logits_ids2"], manifest)
    direct = golden_model(manifest["checkpoint"], "direct")
    chain = direct(data["ids0"], revealed_ids=revealed, block_length=block).residual_logits
    close(chain[0], data["logits_C1"], manifest)
    close(chain[1], data["direct_chain_logits_2"], manifest)
    same = direct(data["ids0"], revealed_ids=data["ids0"][None], block_length=block).residual_logits
    close(same[0], data["logits_use_mrp_same_ids"], manifest)


@pytest.mark.parametrize("name", golden_names("forward_*"))
@torch.no_grad()
def test_head_equals_recording(name):
    """Guards the order of the projection's halves and that the head reads the normalised state."""
    manifest, data = golden_file(name)
    model = golden_model(manifest["checkpoint"])
    mask = model.attention_mask(data["attention_mask"])
    fused = torch.cat([model.mrp.enorm(model.model.embed_tokens(data["ids1"])), model.mrp.hnorm(data["hidden_A"])], -1)
    close(model.mrp.eh_proj(fused), data["mrp_input_1"], manifest)
    first, accumulated = model.head(data["ids1"], data["hidden_A"], data["position_ids"], mask)
    close(first, data["hidden_C1"], manifest)
    close(accumulated, data["acc_1"], manifest)
    second, accumulated = model.head(data["ids2"], accumulated, data["position_ids"], mask)
    close(second, data["hidden_C2"], manifest)
    close(accumulated, data["acc_2"], manifest)


@pytest.mark.parametrize("name", golden_names("cached_*"))
@torch.no_grad()
def test_cached_block_equals_recording(name):
    """Guards keys stored before norm or rotary, a block that does not see its prefix, and a head without its own."""
    manifest, data = golden_file(name)
    model = golden_model(manifest["checkpoint"])
    block, prefix = manifest["block_size"], manifest["prefix_length"]
    stack, head_stack = PackedStack(model, block, 64), PackedStack(model, block, 64)

    class Runner:
        stack = head_stack

    assert prefill(model, [data["prefix_ids"][0]], stack, Runner, block) == 1
    for layer in range(model.config.num_hidden_layers):
        close(stack.cache.keys[layer][:, :, :prefix], data[f"backbone_k.{layer}"], manifest)
        close(stack.cache.values[layer][:, :, :prefix], data[f"backbone_v.{layer}"], manifest)
    for layer in range(model.config.num_nextn_predict_layers):
        close(head_stack.cache.keys[layer][:, :, :prefix], data[f"mrp_k.{layer}"], manifest)
        close(head_stack.cache.values[layer][:, :, :prefix], data[f"mrp_v.{layer}"], manifest)

    positions = prefix + torch.arange(block)[None]
    arguments = stack.arguments(torch.ones(1, 1, 1, dtype=torch.bool), torch.tensor([prefix]), prefix, False)
    hidden = model.backbone(data["block_ids"], positions, **arguments)
    close(hidden, data["block_hidden_A"], manifest)
    close(model.lm_head(hidden), data["block_logits_A"], manifest)

    state = data["candidates"][1:2]
    alone, _ = model.head(state, hidden, positions, None)
    close(alone, data["block_hidden_C1_no_mrp_prefix"], manifest)
    close(model.lm_head(alone), data["block_logits_C1_no_mrp_prefix"], manifest)
    arguments = head_stack.arguments(torch.ones(1, 1, 1, dtype=torch.bool), torch.tensor([prefix]), prefix, False)
    beside, _ = model.head(state, hidden, positions, **arguments)
    close(beside, data["block_hidden_C1_mrp_prefix"], manifest)
    close(model.lm_head(beside), data["block_logits_C1_mrp_prefix"], manifest)


@pytest.mark.parametrize("name", golden_names("cached_*"))
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_packed_verification_equals_recording(name, implementation):
    """Guards candidates that see each other, and packed positions that count on from the last candidate."""
    manifest, data = golden_file(name)
    model = golden_model(manifest["checkpoint"])
    block, prefix, candidates = manifest["block_size"], manifest["prefix_length"], data["candidates"]
    model.set_attn_implementation(implementation)
    try:
        stack = PackedStack(model, block, 64)
        prefill(model, [data["prefix_ids"][0]], stack, None, block)
        count = len(candidates)
        start = torch.full((1, count), prefix)
        visible = torch.eye(count, dtype=torch.bool)[None]
        arguments = stack.arguments(visible, torch.tensor([prefix]), prefix, False)
        hidden = model.backbone(candidates.reshape(1, -1), stack.positions(start), **arguments)
    finally:
        model.set_attn_implementation("sdpa")
    close(hidden, data["verify_hidden"], manifest)
    close(model.lm_head(hidden), data["verify_logits"], manifest)


@torch.no_grad()
def test_reference_cache_stores_only_on_request():
    """Guards a denoising pass whose masked keys stay behind in the prefix (the readable loop's cache)."""
    cache = PrefixCache()
    key = torch.randn(1, 1, 4, 8)
    cache.update(key, key, 0)
    assert not cache.layers
    cache.storing = True
    cache.update(key, key, 0)
    cache.storing = False
    assert cache.update(key, key, 0)[0].shape[2] == 8
    assert cache.layers[0][0].shape[2] == 4
