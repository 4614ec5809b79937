"""Calibrating drafts: the fit says what the traces hold, is stored beside the head, and is read by generation."""

import json

import pytest
import torch
from training_models import small_model

from modeling_mrp import MRPForCausalLM
from modeling_mrp.draft_lattice import DraftCalibration
from modeling_mrp.head_artifact import save_head
from modeling_mrp.lattice_states_torch import DraftStatistics, perturbed
from modeling_mrp.reveal_rule import PositionStatistics
from modeling_mrp.tiny.tokenizer import build_tokenizer
from modeling_mrp.training.calibrate import calibrate_folder
from modeling_mrp.training.draft_traces import DISTANCES, LEVELS, QUANTILES, collect_traces, fit_calibration
from modeling_mrp.training.errors import TrainingError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrate")
    tokenizer = build_tokenizer()
    model = small_model(vocab_size=len(tokenizer) + 64, mask_token_id=tokenizer.mask_token_id)
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    save_head(model, path / "head")
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} + 3"}) + "\n" for n in range(4)))
    return path


@pytest.mark.parametrize("passes", [1, 2])
def test_the_fit_is_that_of_the_traces(passes):
    model = small_model(eos_token_id=None).eval()
    traces = collect_traces(model, [torch.arange(5, 12), torch.arange(20, 24)], 12, passes=passes)
    assert set(traces["distance"].tolist()) <= set(range(model.config.block_size))
    assert set(traces["pass"].tolist()) == set(range(passes))
    fitted = fit_calibration(traces)
    calibration = DraftCalibration(**fitted)
    assert calibration.quantiles.shape == (passes, DISTANCES, len(LEVELS) + 1, QUANTILES)
    assert len(fitted["head_weights"]) == passes
    # By hand: the extreme residuals at the state that each pass predicts, over all levels.
    for number in range(passes):
        here = (traces["distance"] == 0) & (traces["pass"] == number)
        drafted = torch.lerp(traces["known"], traces["drafted"], fitted["head_weights"][number])
        residual = (traces["actual"] - drafted)[here]
        assert float(calibration.quantiles[number, 0].max()) == pytest.approx(float(residual.max()), abs=1e-3)
        assert float(calibration.quantiles[number, 0].min()) == pytest.approx(float(residual.min()), abs=1e-3)


def test_a_drafter_that_is_right_has_no_spread():
    """A model without attention between places of a block would draft itself exactly; here: the traces say so."""
    count = 40
    values = torch.linspace(-2, 12, count)
    exact = {
        "pass": torch.zeros(count), "distance": torch.zeros(count), "drafted": values,
        "known": values - 1, "actual": values,
        "flip": torch.zeros(count), "group": torch.arange(count) // 4,
    }  # fmt: skip
    fitted = fit_calibration(exact)
    assert fitted["head_weights"][0] == pytest.approx(1.0, abs=0.51)
    exact["known"] = values
    fitted = fit_calibration(exact)
    assert float(torch.tensor(fitted["quantiles"]).abs().max()) == 0
    assert float(torch.tensor(fitted["flips"]).max()) == 0


def test_written_beside_model_and_head(folder):
    plain = MRPForCausalLM.from_pretrained(folder / "model")
    assert plain.config.draft_calibration is None
    fitted = calibrate_folder(folder / "model", str(folder / "prompts.jsonl"), None, 12, 3, 2)
    model = MRPForCausalLM.from_pretrained(folder / "model")
    assert model.config.draft_calibration == fitted
    calibrate_folder(folder / "model", str(folder / "prompts.jsonl"), folder / "head", 12, 4, 1)
    with_head = MRPForCausalLM.from_pretrained(folder / "model", mrp_head=str(folder / "head"))
    assert len(with_head.config.draft_calibration["head_weights"]) == 1
    prompt = torch.tensor([[5, 6, 7]])
    outputs = [m.generate(prompt, max_new_tokens=9, draft_states=4) for m in (plain.eval(), model.eval())]
    assert torch.equal(*outputs)


def test_what_cannot_be_calibrated_is_refused(folder, tmp_path):
    with pytest.raises(TrainingError, match="does not exist"):
        calibrate_folder(tmp_path, str(folder / "prompts.jsonl"), None, 12, 1, 1)
    with pytest.raises(TrainingError, match="allowed: float32"):
        calibrate_folder(folder / "model", str(folder / "prompts.jsonl"), None, 12, 1, 1, dtype="int3")


@pytest.mark.parametrize(
    ("passes", "groups"), [(1, [(0, 0), (0, 1), (0, 2), (0, 2)]), (2, [(0, 0), (1, 0), (1, 1), (1, 2)])]
)
def test_each_state_is_spread_as_its_pass_and_distance_say(passes, groups):
    """Flat tables whose value names them: the lattice moves the log-odds of a state by exactly the right one."""
    tables = [[[[10.0 * p + d] * QUANTILES] * (len(LEVELS) + 1) for d in range(DISTANCES)] for p in range(2)]
    flips = [[[0.0] * (len(LEVELS) + 1)] * DISTANCES] * 2
    calibration = DraftCalibration(list(LEVELS), tables, flips, [1.0, 1.0])
    perturbation = calibration.perturbation(4, torch.device("cpu"))
    zeros = torch.zeros(1, passes, 4)
    choice = PositionStatistics(zeros.long(), zeros + 0.5, zeros, zeros)
    drafts = DraftStatistics(choice, zeros.long(), passes)
    for depth, (source, distance) in enumerate(groups):
        group = perturbation.group(passes, depth)
        moved = perturbed(drafts, min(depth, passes - 1), group, perturbation).log_odds
        assert torch.equal(moved, torch.full_like(moved, 10.0 * source + distance))
