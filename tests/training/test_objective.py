"""Properties of the objective: layouts agree, and neither padding nor packing nor a strange sample changes it."""

from itertools import pairwise

import pytest
import torch
from training_models import BLOCK, MASK, assert_same_gradients, gradients, sample, small_model

from modeling_mrp.noising import IGNORED
from modeling_mrp.training.data import Collator, pack
from modeling_mrp.training_objective import PUBLISHED_OBJECTIVE, TrainingObjective

SAMPLES = [sample(13, 3, 11), sample(9, 5, 12), sample(16, 4, 13), sample(6, 1, 14)]
OBJECTIVES = {
    "default": {},
    "three steps": {"steps": 3, "copies": 2},
    "chained prefix": {"steps": 2, "head_prefix": "chained"},
    "ground truth": {"steps": 2, "reveal_rule": "ground_truth", "reveals": (1, 3), "weighting": "inverse_rate"},
    "drafted": {"steps": 3, "reveal_rule": "drafted", "reveals": (1, 2), "supervise_revealed": 0.5},
    "published": {"head_prefix": "chained", "noise_level": "sample", "reveal_rule": "ground_truth"},
    "certainty": {"certainty_weight": 0.1, "steps": 2},
    "cross entropy": {"loss": "cross_entropy"},
    "reverse": {"loss": "reverse_kl", "temperature": 2.0},
}


def run(model, batch, objective, **kwargs):
    output = model(**batch, objective=objective, noise_seed=5, noise_draw=3, **kwargs)
    output.loss.backward()
    return output, gradients(model)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("prediction", ["residual", "direct"])
def test_shared_equals_packed(objective, prediction):
    model, batch = small_model(head_prediction=prediction), Collator(0)(SAMPLES)
    shared, of_shared = run(model, batch, {**objective, "layout": "shared"}, all_metrics=True)
    packed, of_packed = run(model, batch, {**objective, "layout": "packed"}, all_metrics=True)
    assert shared.loss.item() == pytest.approx(packed.loss.item(), abs=1e-5)
    assert_same_gradients(of_shared, of_packed)
    for name, value in shared.metrics.items():
        assert float(value) == pytest.approx(float(packed.metrics[name]), abs=1e-4), name


@pytest.mark.parametrize("layout", ["shared", "packed", "single"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_and_packing_change_nothing(layout, attention):
    objective = {"layout": layout, "noise_level": "sample", "steps": 2, "reveals": (1, 2)}
    model = small_model()
    model.set_attn_implementation(attention)
    alone = Collator(0)(SAMPLES)
    loss, expected = run(model, alone, objective)
    wider = {name: torch.cat([value, torch.zeros_like(value[:, :7])], dim=1) for name, value in alone.items()}
    wider["labels"][:, -7:] = IGNORED
    columns = {name: [row[name] for row in SAMPLES] for name in SAMPLES[0]}
    rows = pack(columns, 30)
    packed = Collator(0)([{name: rows[name][i] for name in rows} for i in range(len(rows["input_ids"]))])
    assert len(packed["input_ids"]) == 2
    for batch in (wider, packed):
        output, found = run(model, batch, objective)
        assert output.loss.item() == pytest.approx(loss.loss.item(), rel=1e-5)
        assert_same_gradients(expected, found)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_checkpointing_gives_the_same_gradients(objective):
    model, batch = small_model(), Collator(0)(SAMPLES)
    _, plain = run(model, batch, objective)
    for layout in ("shared", "packed"):
        _, recomputed = run(model, batch, {**objective, "gradient_checkpointing": True, "layout": layout})
        assert_same_gradients(plain, recomputed)


def test_chunks_change_nothing():
    model, batch = small_model(), Collator(0)(SAMPLES)
    _, whole = run(model, batch, {"supervise_revealed": 1.0})
    _, chunked = run(model, batch, {"supervise_revealed": 1.0, "chunk_tokens": 3})
    assert_same_gradients(whole, chunked)


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1])
def test_tiny_samples(length):
    output, found = run(small_model(), Collator(0)([sample(length, 0, 1)]), {"steps": 2})
    assert torch.isfinite(output.loss)
    assert all(torch.isfinite(gradient).all() for gradient in found.values())


def test_nothing_to_supervise_has_zero_gradients_for_every_parameter():
    """Otherwise a DDP rank without answers waits for ever, or diverges."""
    model = small_model()
    output, found = run(model, Collator(0)([sample(9, 9, 1)]), {"steps": 2, "supervise_revealed": 1.0})
    assert output.loss.item() == 0.0
    assert set(found) == {name for name, _ in model.named_parameters() if name.startswith("mrp.")}
    assert all(not gradient.any() for gradient in found.values())


def test_published_normaliser_is_guarded():
    """The published N_k can be negative, which would turn the loss around."""
    model, batch = small_model(), Collator(0)([sample(8, 0, 1)])
    noise = torch.zeros((1, 8), dtype=torch.bool)
    noise[0, [1, 2, 5]] = True
    reveals = torch.zeros((1, 1, 8), dtype=torch.bool)
    reveals[0, 0, 1] = True
    rate = torch.full((1, 8), 0.01)
    output = model(
        **batch, objective=PUBLISHED_OBJECTIVE, noise_mask=noise, noise_rate=rate, reveals=reveals
    )  # fmt: skip
    assert output.loss.item() > 0


def test_the_next_state_supervises_what_was_revealed():
    """One reveal: its teacher is the state before, so an untrained correction of zero has no loss there."""
    model, batch = small_model(), Collator(0)([sample(8, 0, 1)])
    torch.nn.init.zeros_(model.mrp.norm.weight)
    noise = torch.zeros((1, 8), dtype=torch.bool)
    noise[0, 2] = True
    reveals = noise[None]
    output = model(**batch, objective={"supervise_revealed": 1.0}, noise_mask=noise, reveals=reveals)
    assert output.loss.item() == pytest.approx(0.0, abs=1e-6)


def test_certainty_loss_is_zero_where_the_student_is_the_teacher():
    """With the true target as its input and no correction, the student is as certain as the teacher."""
    model, batch = small_model(), Collator(0)([sample(8, 0, 1)])
    torch.nn.init.zeros_(model.mrp.norm.weight)
    noise = torch.ones((1, 8), dtype=torch.bool)
    nothing = torch.zeros((1, 1, 8), dtype=torch.bool)
    output = model(**batch, objective={"certainty_weight": 1.0}, noise_mask=noise, reveals=nothing)
    assert output.loss.item() == pytest.approx(0.0, abs=1e-5)
    losses = [
        model(
            **batch, objective={"reveal_rule": "ground_truth", "certainty_weight": w}, noise_mask=noise, noise_seed=1
        )
        for w in (0.0, 1.0)
    ]
    assert losses[1].loss.item() > losses[0].loss.item() > 0


def test_confident_reveals_are_the_backbones_own():
    from modeling_mrp import training_passes

    model, batch = small_model(), Collator(0)(SAMPLES)
    states = []
    original = training_passes.SharedPasses.backbone

    def spy(self, ids, masked):
        hidden = original(self, ids, masked)
        states.append((ids, hidden))
        return hidden

    training_passes.SharedPasses.backbone = spy
    try:
        model(**batch, objective={"steps": 2}, noise_seed=1)
    finally:
        training_passes.SharedPasses.backbone = original
    for (before, hidden), (after, _) in pairwise(states):
        logits = model.lm_head(hidden)
        logits[..., MASK] = -torch.inf
        masked = before == MASK
        confidence = logits.softmax(-1).amax(-1).masked_fill(~masked, -1.0)
        for block in masked.any(-1).nonzero().tolist():
            place = int(confidence[tuple(block)].argmax())
            changed = (before[tuple(block)] != after[tuple(block)]).nonzero()[:, 0].tolist()
            assert changed == [place]
            assert int(after[tuple(block)][place]) == int(logits[tuple(block)][place].argmax())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"layout": "side"}, "'shared', 'packed', 'single'"),
        ({"reveals": [2, 1]}, "lowest <= highest"),
        ({"temperature": 0}, "above 0"),
        ({"reveal_rule": "recorded"}, "noise_level='recorded'"),
        ({"layout": "single"}, "noise_level='sample'"),
        ({"layout": "recorded"}, "reveal_rule='recorded'"),
        ({"certainty_weight": 0.1, "loss": "reverse_kl"}, "loss='forward_kl'"),
        ({"certainty_weight": -1.0}, "0, or more"),
        ({"colour": 1}, "unknown"),
    ],
)
def test_wrong_options_say_what_is_allowed(change, message):
    with pytest.raises(ValueError, match=message):
        TrainingObjective.of(change)


def test_wrong_inputs_say_what_is_allowed():
    model, batch = small_model(), Collator(0)(SAMPLES)
    shifted = {**batch, "labels": batch["labels"].roll(-1, 1)}
    with pytest.raises(ValueError, match="position i predicts token i"):
        model(**shifted)
    with pytest.raises(ValueError, match="number every packed sample"):
        model(**{**batch, "position_ids": batch["position_ids"] * 2})
    with pytest.raises(ValueError, match="must have the shape of input_ids"):
        model(**{**batch, "labels": batch["labels"][:, 1:]})
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(**batch, colour=1)
    with pytest.raises(ValueError, match="mrp-train record"):
        model(**batch, objective={"noise_level": "recorded", "reveal_rule": "recorded"})
