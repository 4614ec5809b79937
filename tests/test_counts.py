"""Exact counts: no forward stores a block, seeds a draft, verifies a known state, or runs for a row that has ended."""

import pytest
import torch
from test_padding import random_prompts

from benchmarks.fuzz_losslessness import pad_prompts
from benchmarks.random_models import shared_model


def run(prompts, model=None, **arguments):
    ids, mask = pad_prompts(prompts, True)
    model = shared_model(1) if model is None else model
    arguments = {"mrp_mode": "none", "return_dict_in_generate": True} | arguments
    return model.generate(ids, attention_mask=mask, **arguments)


class CountedCalls:
    """Counts what really runs: calls of `backbone` and `head`."""

    def __init__(self, monkeypatch, model):
        self.backbone, self.head = 0, 0
        for name in ("backbone", "head"):
            original = getattr(model, name)

            def counted(*args, name=name, original=original, **kwargs):
                setattr(self, name, getattr(self, name) + 1)
                return original(*args, **kwargs)

            monkeypatch.setattr(model, name, counted)


@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("divisor", [1, 2])
@pytest.mark.parametrize("length", [1, 15, 16])
def test_none_takes_one_forward_per_denoising_step(monkeypatch, block, divisor, length):
    """Guards a forward that stores a finished block or seeds the next one (the reference spends both per block)."""
    steps = block // divisor
    (prompt,) = random_prompts(length)
    blocks = 3
    begin = length // block * block
    new = begin + blocks * block - length
    tail = begin + block - length  # masked positions of the first block
    calls = CountedCalls(monkeypatch, shared_model(1))
    out = run([prompt], block_length=block, denoising_steps=steps, max_new_tokens=new)
    wanted = -(-tail // divisor) + (blocks - 1) * steps
    assert out.total_forwards == wanted
    assert out.backbone_forwards.tolist() == [wanted]
    assert out.prefill_forwards == (1 if length >= block else 0)
    assert calls.backbone == wanted + out.prefill_forwards
    assert calls.head == 0
    assert out.new_tokens.tolist() == [new]
    assert out.tokens_per_forward.tolist() == pytest.approx([new / wanted])
    # One segment a forward, and the next block's first state beside each finished state but the last.
    assert out.segments.tolist() == [wanted + blocks - 1]


def test_a_batch_takes_as_many_forwards_as_its_slowest_row():
    """Guards rows in lockstep: nobody waits for a neighbour's block border or acceptance."""
    prompts = random_prompts(1, 6, 11, 16)
    for arguments in (
        {"mrp_mode": "none"},
        {"mrp_mode": "none", "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.5},
        {"mrp_mode": "direct", "mrp_steps": 2},
        {"mrp_mode": "remask", "confidence_threshold": 0.5},
        {"mrp_mode": "speculative", "draft_states": 6},
        {"mrp_mode": "speculative", "draft_shape": "chain", "mrp_steps": 3},
    ):
        arguments |= {"block_length": 8, "max_new_tokens": 20}
        alone = [run([prompt], **arguments).total_forwards for prompt in prompts]
        together = run(prompts, **arguments)
        assert together.total_forwards == max(alone), arguments
        assert together.backbone_forwards.tolist() == alone, arguments


def test_an_ended_row_costs_nothing(monkeypatch):
    """Guards forwards for a row after its end token: the batch gets smaller, and nothing runs after the last end."""
    prompts, model = random_prompts(5, 5, 5, 5), shared_model(1)
    whole = run(prompts, block_length=4, max_new_tokens=12)
    new = whole.sequences[:, 5:]
    stop = int(new[1, 2])
    ends = [tokens.index(stop) + 1 if stop in tokens else 12 for tokens in new.tolist()]
    assert ends[1] <= 3
    batches = []
    original = model.backbone

    def watched(ids, *args, **kwargs):
        batches.append(ids.shape[0])
        return original(ids, *args, **kwargs)

    monkeypatch.setattr(model, "backbone", watched)
    out = run(prompts, block_length=4, max_new_tokens=12, eos_token_id=stop)
    assert out.new_tokens.tolist() == ends
    assert out.total_forwards == max(out.backbone_forwards.tolist())
    assert sum(batches[out.prefill_forwards :]) == int(out.backbone_forwards.sum())
    for row, prompt in enumerate(prompts):
        single = run([prompt], block_length=4, max_new_tokens=12, eos_token_id=stop)
        assert single.total_forwards == out.backbone_forwards[row]


def test_a_row_stops_inside_its_block():
    """Guards denoising that goes on once the end token and all before it are revealed."""
    (prompt,) = random_prompts(8)
    arguments = {"block_length": 8, "max_new_tokens": 8, "remasking_strategy": "sequential"}
    whole = run([prompt], **arguments)
    tokens = whole.sequences[0, 8:].tolist()
    out = run([prompt], eos_token_id=tokens[2], **arguments)
    assert out.total_forwards == out.new_tokens == tokens.index(tokens[2]) + 1


@pytest.mark.parametrize("states", [2, 8, 32])
@pytest.mark.parametrize("shape", ["chain", "lattice"])
def test_drafts_and_segments_add_up(states, shape):
    """Guards counters that the benchmarks rest on: accepted drafts are exactly the forwards saved."""
    prompts, model = random_prompts(3, 9), shared_model(1, head="random")
    arguments = {"block_length": 8, "max_new_tokens": 21, "draft_shape": shape, "draft_states": states}
    if shape == "chain":
        arguments["mrp_steps"] = min(states - 1, 6)
    none = run(prompts, model, block_length=8, max_new_tokens=21)
    spec = run(prompts, model, mrp_mode="speculative", **arguments)
    assert torch.equal(spec.sequences, none.sequences)
    saved = (none.backbone_forwards - spec.backbone_forwards).tolist()
    assert all(count > 0 for count in saved)
    assert (spec.drafts_accepted <= spec.drafts_proposed).all()
    limit = states + 1 if shape == "lattice" else arguments["mrp_steps"] + 2
    assert (spec.segments <= limit * spec.backbone_forwards).all()
    assert (spec.segments >= spec.backbone_forwards).all()
    # The walk visits the certain state and the accepted drafts; each visit is a denoising step of mode none, apart
    # from the last block's tail, which nobody needs to evaluate.
    accepted = spec.drafts_accepted.sum(dim=1).tolist()
    for row, count in enumerate(saved):
        assert count <= accepted[row] <= count + 8


def test_no_draft_evaluates_a_known_state(monkeypatch):
    """Guards verifying what is known already, or the same state twice in a forward."""
    from modeling_mrp.decode_engine import DecodeEngine

    seen = []
    original = DecodeEngine._forward

    def watched(engine, segments):
        for row in range(segments.ids.shape[0]):
            alive = segments.alive[row]
            states = [
                (int(start), *ids.tolist(), int(parent))
                for start, ids, parent in zip(
                    segments.start[row][alive], segments.ids[row][alive], segments.parent[row][alive], strict=True
                )
            ]
            assert len(set(states)) == len(states)
            seen.append(states[0])
        return original(engine, segments)

    monkeypatch.setattr(DecodeEngine, "_forward", watched)
    (prompt,) = random_prompts(6)
    for shape in ("chain", "lattice"):
        seen.clear()
        run([prompt], mrp_mode="speculative", draft_shape=shape, draft_states=16, mrp_steps=5, block_length=8,
            max_new_tokens=26)  # fmt: skip
        assert len(set(seen)) == len(seen)


def test_head_passes_are_counted(monkeypatch):
    """Guards counters that forget head calls: no round calls the head more often than it is counted."""
    (prompt,), model = random_prompts(6), shared_model(1)
    calls = CountedCalls(monkeypatch, model)
    for arguments in (
        {"mrp_mode": "speculative", "draft_states": 8},
        {"mrp_mode": "speculative", "draft_shape": "chain", "mrp_steps": 3},
        {"mrp_mode": "direct", "mrp_steps": 2},
        {"mrp_mode": "remask", "confidence_threshold": 0.5},
        {"mrp_mode": "speculative", "drafter": "zero", "draft_states": 8},
    ):
        calls.head = 0
        out = run([prompt], model, block_length=4, max_new_tokens=18, **arguments)
        assert calls.head - out.prefill_forwards * (calls.head > 0) == int(out.head_passes), arguments


def test_auto_budget_gives_the_same_tokens():
    """Guards a measured budget that changes results."""
    prompts = random_prompts(3, 9)
    none = run(prompts, block_length=8, max_new_tokens=17)
    auto = run(prompts, block_length=8, max_new_tokens=17, mrp_mode="speculative", draft_states="auto")
    assert torch.equal(auto.sequences, none.sequences)


def test_prefill_runs_in_chunks():
    """Guards one forward over the whole prompt: chunks of 512 tokens, whole blocks, the tail's block left out."""
    model = shared_model(1)
    for length, wanted in ((3, 0), (4, 1), (500, 1)):
        (prompt,) = random_prompts(length)
        assert run([prompt], model, max_new_tokens=1).prefill_forwards == wanted
