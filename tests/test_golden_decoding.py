"""Decoding against the recorded reference: the readable loop and `generate`, run by run.

Counters are not matched, apart from denoising forwards: the reference's store, seed and stale forwards are what this
project does away with.
"""

import copy

import pytest
import torch
from golden_files import arguments_of, golden_file, golden_model, golden_names, golden_runs, model_of

from modeling_mrp.generation_config_mrp import resolve_options
from modeling_mrp.reference_decoding import ReferenceDecoder


def reference_row(model, arguments, prompt, new):
    return ReferenceDecoder(model, resolve_options(arguments, model.config)).decode(prompt, new)


def recorded_order(data, run):
    """(forward, source) of each token; the prompt is -1 in both, as here."""
    return data[f"{run}.commit_forward"][0].tolist(), data[f"{run}.commit_iter"][0].clamp(min=-1).tolist()


def find_run(manifest, run):
    return next(entry for entry in manifest["runs"] if entry["name"] == run)


@pytest.mark.parametrize("name", golden_names("generate_*"))
def test_generate_equals_recording(name):
    """Guards every decision of every mode: which tokens, in which forward, from backbone or head step k.

    Runs at temperature 0.7 use a model whose LM head is divided by 0.7; see `golden_files.golden_model`.
    """
    manifest, data = golden_file(name)
    wrong = []
    for entry in manifest["runs"]:
        run, params = entry["name"], entry["params"]
        model, arguments = model_of(manifest, params), arguments_of(params, entry["variant"])
        prompt, wanted = data[f"{run}.prompt_ids"], data[f"{run}.output_ids"][0]
        new = len(wanted) - prompt.shape[1]
        reference = reference_row(model, arguments, prompt[0], new)
        result = model.generate(
            prompt, max_new_tokens=new, return_dict_in_generate=True, output_trace=True, **arguments
        )
        checks = {
            "reference ids": reference.ids.tolist() == wanted.tolist(),
            "generate ids": result.sequences[0].tolist() == wanted.tolist(),
        }
        if arguments["mrp_mode"] != "speculative":
            forward, source = recorded_order(data, run)
            recorded = entry["stats"]["num_target_fwd_denoising"]
            traced = (result.reveal_step[0].tolist(), result.reveal_source[0].tolist())
            checks["reference order"] = reference.reveal_forward.tolist() == forward
            checks["generate order"] = traced[0] == forward
            checks["sources"] = reference.reveal_source.tolist() == traced[1]
            if arguments["mrp_mode"] != "none":
                checks["recorded sources"] = traced[1] == source
            checks["forwards"] = result.total_forwards == reference.denoising_forwards == recorded
        wrong += [f"{run}: {check}" for check, right in checks.items() if not right]
    assert not wrong


@pytest.mark.parametrize(("name", "run"), golden_runs("stop_*"))
def test_output_ends_at_the_first_stop(name, run):
    """Guards stop ids that are only looked for once a block is complete (the reference returns what follows)."""
    manifest, data = golden_file(name)
    entry = find_run(manifest, run)
    model, arguments = model_of(manifest, entry["params"]), arguments_of(entry["params"])
    prompt, recorded = data[f"{run}.prompt_ids"], data[f"{run}.output_ids"][0].tolist()
    end = entry["first_stop_position"] + 1
    assert recorded[end - 1] == entry["stop_id"]
    new = len(recorded) - prompt.shape[1]
    assert reference_row(model, arguments, prompt[0], new).ids.tolist() == recorded[:end]
    result = model.generate(prompt, max_new_tokens=new, return_dict_in_generate=True, **arguments)
    assert result.sequences[0].tolist() == recorded[:end]
    assert result.total_forwards <= entry["stats"]["num_target_fwd_denoising"]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("name", "run"), golden_runs("batch_*"))
def test_batch_rows_equal_recorded_single_runs(name, run, side):
    """Guards rows that advance at their slowest neighbour's pace, share its block grid or its length."""
    manifest, data = golden_file(name)
    entry = find_run(manifest, run)
    model, arguments = model_of(manifest, entry["params"]), arguments_of(entry["params"])
    ids, mask = data[f"{run}.input_ids"], data[f"{run}.attention_mask"]
    lengths = mask.sum(dim=1).tolist()
    if side == "left":
        rows = list(zip(ids, lengths, strict=True))
        ids = torch.stack([row.roll(ids.shape[1] - length) for row, length in rows])
        mask = mask.flip(1)
    singles = [data[f"{run}.single_{row}.output_ids"][0].tolist() for row in range(len(ids))]
    stops = arguments.get("eos_token_id", [])
    new = max(len(single) - length for single, length in zip(singles, lengths, strict=True))
    result = model.generate(ids, attention_mask=mask, max_new_tokens=new, return_dict_in_generate=True, **arguments)
    assert torch.equal(result.sequences[:, : ids.shape[1]], ids)
    for row, (single, length) in enumerate(zip(singles, lengths, strict=True)):
        wanted = single[length:]
        ends = [place for place, token in enumerate(wanted) if token in stops]
        wanted = wanted[: ends[0] + 1] if ends else wanted
        # A single run's canvas is shorter than that of the longest; what lies beyond it was not recorded.
        got = result.sequences[row, ids.shape[1] :].tolist()
        count = int(result.new_tokens[row])
        assert got[: len(wanted)] == wanted
        assert count == (len(wanted) if ends else new)


def test_mask_id_is_never_produced():
    """Guards endless loops and mask ids in the text where the logits prefer the mask token (`defect_mask_sampled`)."""
    manifest, data = golden_file("defect_mask_sampled")
    model = copy.deepcopy(golden_model(manifest["checkpoint"]))
    change = manifest["modification"]
    with torch.no_grad():
        model.get_parameter(change["tensor"])[change["row"]] *= change["multiply"]
    assert (data["static_output_ids"] == 127).any()
    for mode in ("none", "speculative", "direct", "remask"):
        result = model.generate(
            data["prompt_ids"], mrp_mode=mode, block_length=4, max_new_tokens=15, return_dict_in_generate=True
        )
        assert result.sequences.shape == data["static_output_ids"].shape
        assert not (result.sequences == 127).any()
        assert result.total_forwards <= 15


@pytest.mark.parametrize("run", ["eb0.35", "eb1.5"])
def test_entropy_bound_orders_by_entropy(run):
    """Guards one entropy per row instead of one per position, so that order was left to right (`defect_...`)."""
    manifest, data = golden_file("defect_entropy_bounded")
    entry = find_run(manifest, run)
    model, arguments = model_of(manifest, entry["params"]), arguments_of(entry["params"])
    prompt = data[f"{run}.prompt_ids"]
    result = model.generate(prompt, max_new_tokens=11, return_dict_in_generate=True, output_trace=True, **arguments)
    order = result.reveal_step[0, prompt.shape[1] :]
    assert order.tolist() != sorted(order.tolist())
    # Each first reveal of a whole block is its position of least entropy.
    ids = result.sequences[0].clone()
    ids[8:12][order[3:7] > order[3:7].min()] = 127
    seen = torch.where(torch.arange(len(ids)) < 8, ids, torch.where(torch.arange(len(ids)) < 12, 127, ids))[None, :12]
    probabilities = model(seen, block_length=4).logits[0, 8:].softmax(-1)
    entropy = torch.special.entr(probabilities).sum(-1)
    assert order[3:7][entropy.argmin()] == order[3:7].min()
