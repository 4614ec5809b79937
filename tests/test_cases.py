"""Public bug reports of neighbouring projects (`../shared/cases/README.md`) that no other file here covers.

batching, batch size, padding leak, position gap: test_padding; attention backends: test_attention_backends; stuck
step, confidence: test_policies; after the end, streaming, stop strings, seeds: test_ends and test_counts; meta
loading, saving: test_model; import: test_remote_code; draft trust (NaN): test_bad_input; training, peft,
multi-process: tests/training; likelihood: tests/evaluation.
"""

import copy

import pytest
import torch
from test_padding import MODES, decode, random_prompts

from benchmarks.fuzz_losslessness import fitted_model
from benchmarks.random_models import MASK, random_model, shared_model

MASK_FITTED, BLOCK_FITTED = 127, 4  # of the golden checkpoint
LOSSLESS = {"chain": MODES["chain"], "lattice": MODES["lattice"]}


@pytest.mark.parametrize("shape", LOSSLESS)
def test_rows_that_accept_different_numbers_of_drafts(shape):
    """Cache: a batch of four whose rows accept differently reads no other row's positions."""
    model, prompts = fitted_model(), random_prompts(3, 5, 9, 12)
    alone = []
    accepted = set()
    for row, prompt in enumerate(prompts):
        alone += decode(model, [prompt], row_seeds=[row], max_new_tokens=21, **LOSSLESS[shape])
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=21, return_dict_in_generate=True, **LOSSLESS[shape]
        )
        accepted.add(int(out.drafts_accepted.sum()))
    assert len(accepted) > 1
    assert decode(model, prompts, True, max_new_tokens=21, **LOSSLESS[shape]) == alone


@pytest.mark.parametrize("mode", MODES)
def test_mask_id_in_the_prompt(mode):
    """Mask id: a prompt may hold it, stays as it is, and is not filled in; in the tail's block as well."""
    prompt = (5, MASK, 7, 8, MASK, 9, MASK)
    (got,) = decode(shared_model(1), [prompt], **MODES[mode])
    assert len(got) == 11
    assert MASK not in got
    # It is context like any other token: another token there changes the answer.
    assert [got] != decode(shared_model(1), [(5, 4, 7, 8, 4, 9, 4)], **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_logits_that_prefer_the_mask_id(mode):
    """Mask id: never produced and no endless loop, whatever the logits say, sampled too."""
    model = random_model(1)
    with torch.no_grad():
        model.lm_head.weight[MASK] = 20 * model.lm_head.weight[:MASK].mean(0)
    for sampling in ({}, {"do_sample": True, "temperature": 2.0, "top_k": 1}):
        for prompt in random_prompts(5, 8):
            (got,) = decode(model, [prompt], **(MODES[mode] | sampling))
            assert len(got) == 11
            assert MASK not in got


def always_wrong_model():
    """Its head's correction turns every draft into another token than the backbone's."""
    model = random_model(1, "zero")
    original = model.head

    def wrong(ids, accumulated, *args, **kwargs):
        residual, after = original(ids, accumulated, *args, **kwargs)
        return residual, -after

    model.head = wrong
    return model


@pytest.mark.parametrize("shape", LOSSLESS)
def test_a_head_that_is_always_wrong(shape):
    """Draft trust: still lossless, and no worse than one forward per token."""
    model = always_wrong_model()
    (prompt,) = random_prompts(5)
    none = decode(model, [prompt], mrp_mode="none")
    out = model.generate(torch.tensor([prompt]), max_new_tokens=11, return_dict_in_generate=True, **LOSSLESS[shape])
    assert out.sequences[0, 5:].tolist() == none[0]
    assert out.total_forwards <= 11
    if shape == "chain":
        assert out.total_forwards == 11


def test_half_precision_differs_only_at_near_ties():
    """Precision: bf16 speculation parts from bf16 plain decoding only where the plain decision was a near-tie."""
    model = copy.deepcopy(fitted_model()).to(torch.bfloat16)
    prompts = random_prompts(*range(3, 27))
    parted = 0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        new_tokens = 16 + -len(prompt) % BLOCK_FITTED  # up to a block's end, so that every candidate is returned
        call = {"max_new_tokens": new_tokens, "return_dict_in_generate": True, "output_trace": True}
        plain = model.generate(ids, mrp_mode="none", **call)
        drafted = model.generate(ids, mrp_mode="speculative", draft_states=8, **call)
        new = slice(len(prompt), None)
        if torch.equal(plain.sequences, drafted.sequences):
            continue
        parted += 1
        # The first step (by the plain run's order) at which the two disagree about a token.
        differs = plain.sequences[0, new] != drafted.sequences[0, new]
        step = int(plain.reveal_step[0, new][differs].min())
        assert near_tie_in_bf16(model, plain, len(prompt), step), (prompt, step)
    assert parted < len(prompts)


def near_tie_in_bf16(model, plain, begin, step):
    """Whether any decision of the plain run up to `step` was within bf16's rounding of the logits (2^-8 relative)."""
    ids, when = plain.sequences[0], plain.reveal_step[0]
    for t in range(step + 1):
        state = torch.where((when >= t) & (torch.arange(len(ids)) >= begin), MASK_FITTED, ids)
        now = (when == t).nonzero()[:, 0]
        end = (int(now.min()) // BLOCK_FITTED + 1) * BLOCK_FITTED
        begin_block = end - BLOCK_FITTED
        with torch.no_grad():
            logits = model(state[None, :end], block_length=BLOCK_FITTED).logits[0, begin_block:].float()
        logits[:, MASK_FITTED] = -torch.inf
        noise = 2.0**-7 * float(logits[torch.isfinite(logits)].abs().max())
        places = [i - begin_block for i in range(begin_block, end) if i >= begin and when[i] >= t]
        top = logits[places].topk(2).values
        odds = logits[places].log_softmax(-1).max(-1).values
        odds = odds - (-odds.expm1()).clamp(min=1e-30).log()
        ranked = odds.sort(descending=True).values
        if bool(((top[:, 0] - top[:, 1]) < noise).any()) or (len(places) > 1 and ranked[0] - ranked[1] < 2 * noise):
            return True
    return False
