"""A recording of the backbone's hidden states trains the head as the backbone itself would."""

import json

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from training_models import BLOCK, assert_same_gradients, gradients, small_model

from modeling_mrp.noising import IGNORED
from modeling_mrp.training.cli import app
from modeling_mrp.training.config import config_from
from modeling_mrp.training.data import Collator, pack
from modeling_mrp.training.errors import TrainingError
from modeling_mrp.training.record import decode_trajectories
from modeling_mrp.training.recorded_states import RecordedStates, StateRecorder
from modeling_mrp.training.run import train

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14, 15, 16], [17] * 9]
RECORDED = {"noise_level": "recorded", "reveal_rule": "recorded", "steps": 3, "copies": 2}


@pytest.fixture(scope="module")
def model():
    return small_model(eos_token_id=2)


@pytest.fixture(scope="module")
def trajectories():
    """Answers of whole blocks behind prompts of any length, with orders of their reveals."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for prompt in PROMPTS:
        ids = prompt + torch.randint(3, 60, (-len(prompt) % BLOCK + 2 * BLOCK,), generator=generator).tolist()
        order = []
        for begin in range(0, len(ids), BLOCK):
            known = min(max(len(prompt) - begin, 0), BLOCK)
            later = known + torch.randperm(BLOCK - known, generator=generator)
            order += [*range(known), *later.tolist()]
        labels = [IGNORED] * len(prompt) + ids[len(prompt) :]
        rows.append({"input_ids": ids, "labels": labels, "reveal_order": order})
    return rows


@pytest.fixture(scope="module")
def recording(model, trajectories, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    recorder = StateRecorder(folder, model)
    first = recorder.add(Collator(0)(trajectories[:3])) + recorder.add(Collator(0)(trajectories[3:]))
    recorder.close()
    return folder, first


def encoded(trajectories, first):
    return [
        {
            **row,
            "position_ids": list(range(len(row["input_ids"]))),
            "sample_keys": [index] * len(row["input_ids"]),
            "record_rows": list(range(start, start + len(row["input_ids"]))),
        }
        for index, (row, start) in enumerate(zip(trajectories, first, strict=True))
    ]


@pytest.mark.parametrize(
    "objective", [{}, {"reveals": (1, 3)}, {"supervise_revealed": 0.5}, {"certainty_weight": 0.1}]
)
@pytest.mark.parametrize("packed", [False, True])
def test_recorded_equals_shared(model, trajectories, recording, objective, packed):
    folder, first = recording
    rows = encoded(trajectories, first)
    if packed:
        bins = pack({name: [row[name] for row in rows] for name in rows[0]}, 40)
        rows = [{name: bins[name][i] for name in bins} for i in range(len(bins["input_ids"]))]
        assert len(rows) < len(trajectories)
    batch = Collator(0)(rows)
    model.train()
    states = RecordedStates(folder)
    states.check(model)
    results = {}
    for layout in ("shared", "recorded"):
        extra = {"recorded_states": states} if layout == "recorded" else {}
        output = model(**batch, objective={**RECORDED, **objective, "layout": layout}, noise_seed=4, **extra)
        output.loss.backward()
        results[layout] = output.loss.item(), gradients(model)
    # Half precision on disk.
    assert results["recorded"][0] == pytest.approx(results["shared"][0], rel=2e-3)
    assert_same_gradients(results["shared"][1], results["recorded"][1], atol=5e-3)


def test_the_backbone_does_not_run(model, trajectories, recording, monkeypatch):
    folder, first = recording
    batch = Collator(0)(encoded(trajectories, first))
    monkeypatch.setattr(type(model), "backbone", lambda *a, **k: pytest.fail("the backbone ran"))
    options = {**RECORDED, "layout": "recorded", "supervise_revealed": 0.5, "reveals": (1, 2)}
    assert torch.isfinite(model(**batch, objective=options, recorded_states=RecordedStates(folder)).loss)


def test_states_of_other_trajectories_are_refused(model, trajectories, recording):
    folder, first = recording
    batch = Collator(0)(encoded(trajectories, first))
    given = {"noise_mask": torch.ones_like(batch["input_ids"], dtype=torch.bool)}
    for extra in (given, {"reveals": given["noise_mask"][None]}):
        with pytest.raises(ValueError, match="use layout='shared'"):
            model(
                **batch, objective={**RECORDED, "layout": "recorded"}, recorded_states=RecordedStates(folder), **extra
            )


def test_places_and_sizes(model, trajectories, recording):
    folder, first = recording
    states = RecordedStates(folder)
    lengths = [len(row["input_ids"]) for row in trajectories]
    assert first == np.cumsum([0, *lengths[:-1]]).tolist()
    assert len(states) == sum(lengths)
    row = trajectories[0]
    ids = torch.tensor([row["input_ids"]])
    hidden = model.eval()(input_ids=ids).last_hidden_state[0]
    found = states.clean(torch.arange(lengths[0])).float()
    torch.testing.assert_close(found, hidden, rtol=2e-3, atol=2e-3)


def test_what_does_not_fit_is_refused(model, recording, tmp_path):
    folder, _ = recording
    with pytest.raises(TrainingError, match="no complete recording"):
        RecordedStates(tmp_path)
    with pytest.raises(TrainingError, match="fingerprint"):
        RecordedStates(folder).check(small_model(seed=1))
    unfinished = StateRecorder(tmp_path / "half", model)
    assert unfinished.folder.exists()
    with pytest.raises(TrainingError, match="no complete recording"):
        RecordedStates(tmp_path / "half")


def test_record_and_train_by_the_commands(tmp_path):
    from typer.testing import CliRunner

    from modeling_mrp.tiny.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    model = small_model(vocab_size=len(tokenizer) + 64, mask_token_id=tokenizer.mask_token_id)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "2 + 3"}) + "\n")
    arguments = [str(tmp_path / "model"), str(tmp_path / "prompts.jsonl"), str(tmp_path / "rows.jsonl")]
    result = CliRunner().invoke(app, ["record", *arguments, "--hidden-states", "--max-new-tokens", "32"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 1
    for begin in range(0, len(rows[0]["reveal_order"]), BLOCK):
        assert sorted(rows[0]["reveal_order"][begin : begin + BLOCK]) == list(range(BLOCK))
    values = yaml.safe_load(f"""
        output: {tmp_path / "head"}
        save: head
        model: {{path: {tmp_path / "model"}}}
        head: {{layers: 1}}
        data: {{train: {tmp_path / "rows.jsonl"}, recorded_states: {tmp_path / "rows.jsonl.states"}}}
        objective: {{layout: recorded, noise_level: recorded, reveal_rule: recorded, steps: 2}}
        trainer: {{max_steps: 2, use_cpu: true, report_to: none, save_strategy: "no"}}
    """)
    train(config_from(values))
    assert load_file(tmp_path / "head" / "mrp_head.safetensors")
    values["objective"]["layout"] = "shared"
    with pytest.raises(TrainingError, match="a folder and 'recorded', or neither"):
        train(config_from(values))


def test_ranks_of_a_trajectory(model):
    model.config.eos_token_id = list(range(2, 63))
    (row,) = decode_trajectories(model.eval(), [PROMPTS[0]], 12)
    prompt = len(PROMPTS[0])
    assert row["labels"][:prompt] == [IGNORED] * prompt
    assert row["reveal_order"][:prompt] == list(range(prompt))
    assert len(row["input_ids"]) % BLOCK == 0
