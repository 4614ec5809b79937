"""The central test of generation: a padded batch gives each row what it gives alone."""

import pytest
import torch

from benchmarks.fuzz_losslessness import pad_prompts
from benchmarks.random_models import VOCAB, shared_model

MODES = {
    "none": {"mrp_mode": "none"},
    "chain": {"mrp_mode": "speculative", "draft_shape": "chain", "mrp_steps": 3},
    "lattice": {"mrp_mode": "speculative", "draft_states": 8},
    "direct": {"mrp_mode": "direct", "mrp_steps": 2},
    "remask": {"mrp_mode": "remask", "confidence_threshold": 0.4},
    "dynamic": {"mrp_mode": "none", "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.5},
    "sampled": {"mrp_mode": "speculative", "draft_states": 8, "do_sample": True, "temperature": 0.8, "seed": 5},
}
NEW = 11


def random_prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist()) for length in lengths]


def decode(model, prompts, left=False, row_seeds=None, **arguments):
    """New tokens of each row."""
    ids, mask = pad_prompts(prompts, left)
    row_seeds = list(range(len(prompts))) if row_seeds is None else row_seeds
    arguments = {"max_new_tokens": NEW, "row_seeds": row_seeds} | arguments
    sequences = model.generate(ids, attention_mask=mask, **arguments)
    assert torch.equal(sequences[:, : ids.shape[1]], ids)
    return sequences[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_padded_batch_equals_rows_alone(mode, moe):
    """Guards another row's keys, length or block grid, positions that count padding, and noise that depends on the
    place in the batch; at every residue of the prompt's length modulo the block, padded left and right."""
    model, arguments = shared_model(2, moe=moe), MODES[mode]
    block = 4
    prompts = random_prompts(*range(1, 2 * block + 2))
    alone = [decode(model, [prompt], row_seeds=[row], **arguments)[0] for row, prompt in enumerate(prompts)]
    assert len({tuple(tokens) for tokens in alone}) > 5
    for left in (False, True):
        assert decode(model, prompts, left, **arguments) == alone


@pytest.mark.parametrize("block", [2, 5, 8, 16])
def test_every_residue_at_every_block_length(block):
    """Guards the block that holds the prompt's tail, whatever is left of it."""
    model = shared_model(3)
    prompts = random_prompts(*range(block, 2 * block))
    for mode in ("none", "lattice", "direct", "remask"):
        arguments = MODES[mode] | {"block_length": block}
        alone = [decode(model, [prompt], **arguments)[0] for prompt in prompts]
        assert decode(model, prompts, True, **arguments) == alone, mode


@pytest.mark.parametrize("mode", MODES)
def test_lengths_3_and_17(mode):
    """A public report's case: two prompts of lengths 3 and 17 in one call."""
    model, prompts = shared_model(4), random_prompts(3, 17)
    alone = [decode(model, [prompt], row_seeds=[row], **MODES[mode])[0] for row, prompt in enumerate(prompts)]
    assert decode(model, prompts, False, **MODES[mode]) == decode(model, prompts, True, **MODES[mode]) == alone


@pytest.mark.parametrize("mode", ["none", "lattice", "direct", "remask", "sampled"])
def test_batch_size_does_not_matter(mode):
    """Guards decisions that depend on how many rows are computed together."""
    model, prompts = shared_model(5), random_prompts(4, 9, 2, 7, 12, 1, 5, 5)
    seeds = list(range(8))
    found = []
    for size in (1, 2, 4, 8):
        texts = []
        for begin in range(0, 8, size):
            rows = slice(begin, begin + size)
            texts += decode(model, prompts[rows], True, row_seeds=seeds[rows], **MODES[mode])
        found.append(texts)
    assert all(texts == found[0] for texts in found)


@pytest.mark.parametrize("mode", ["lattice", "sampled", "direct"])
def test_neighbours_do_not_matter(mode):
    """Guards a row that reads its neighbour's position, noise or acceptance."""
    model, (prompt, *others) = shared_model(6), random_prompts(6, 6, 13, 1)
    alone = decode(model, [prompt], row_seeds=[77], **MODES[mode])[0]
    for neighbours in (others[:1], others, others[::-1], [prompt, prompt]):
        batch = decode(model, [*neighbours, prompt], True, row_seeds=[*range(len(neighbours)), 77], **MODES[mode])
        assert batch[-1] == alone


def test_row_seeds_are_the_row_part_of_the_key():
    """Guards noise that ignores `row_seeds`, or a default that is not 0, 1, 2, ..."""
    model, (prompt,) = shared_model(7), random_prompts(5)
    arguments = {"do_sample": True, "temperature": 1.5, "seed": 9, "mrp_mode": "none"}
    same = decode(model, [prompt] * 3, row_seeds=[4, 4, 5], **arguments)
    assert same[0] == same[1] != same[2]
    ids, mask = pad_prompts([prompt] * 3, True)
    default = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **arguments)[:, ids.shape[1] :].tolist()
    assert default == decode(model, [prompt] * 3, row_seeds=[0, 1, 2], **arguments)


def test_what_stands_at_the_padding_does_not_matter():
    """Guards a pad token that is read: any id may stand there, end tokens and the mask token too."""
    model, prompts = shared_model(2), random_prompts(3, 10)
    results = []
    for pad in (0, 7, VOCAB - 1):
        for left in (True, False):
            ids, mask = pad_prompts(prompts, left, pad)
            sequences = model.generate(
                ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=7, pad_token_id=7, mrp_mode="none"
            )
            assert torch.equal(sequences[:, : ids.shape[1]], ids)
            results.append(sequences[:, ids.shape[1] :].tolist())
    assert all(result == results[0] for result in results)


def test_forward_positions_are_those_of_the_unpadded_row():
    """Guards positions and blocks counted from the tensor's edge instead of the row's first real token."""
    model, prompts = shared_model(2), random_prompts(3, 10, 7)
    for left in (True, False):
        ids, mask = pad_prompts(prompts, left)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, block_length=4).logits
            for row, prompt in enumerate(prompts):
                alone = model(torch.tensor([prompt]), block_length=4).logits[0]
                torch.testing.assert_close(logits[row][mask[row].bool()], alone, atol=1e-4, rtol=1e-4)


def test_mask_is_inferred_from_the_pad_token():
    """As in transformers: without an attention mask the pad token is padding, unless it ends texts as well."""
    model, prompts = shared_model(2), random_prompts(3, 8)
    ids, mask = pad_prompts(prompts, True, pad=61)
    ids[ids == 0] = 1
    arguments = {"max_new_tokens": NEW, "mrp_mode": "none", "pad_token_id": 61}
    masked = model.generate(ids, attention_mask=mask, **arguments)
    assert torch.equal(model.generate(ids, **arguments), masked)
    both = model.generate(ids, eos_token_id=61, **arguments)
    all_ones = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=61, **arguments)
    assert torch.equal(both, all_ones)
