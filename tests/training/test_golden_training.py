"""Loss and gradients of the public reference's training step, in every layout, through `model.forward`."""

import pytest
from training_golden import CASES_BY_LAYOUT, HEAD, assert_gradients_match, inputs_of, load_case, model_of


@pytest.mark.parametrize(("name", "layout"), CASES_BY_LAYOUT)
def test_loss_and_gradients(name, layout):
    case, tensors = load_case(name)
    model = model_of(case).train()
    output = model(**inputs_of(case, tensors, layout))
    assert abs(output.loss.item() - case["loss"]) <= case["tolerance"]["loss_rtol"] * abs(case["loss"])
    for step, expected in enumerate(case["step_losses"], start=1):
        assert abs(float(output.metrics[f"loss_{step}"]) - expected) <= 1e-4 * abs(expected)
    output.loss.backward()
    gradients = {
        HEAD + key.removeprefix("mrp."): parameter.grad
        for key, parameter in model.named_parameters()
        if key.startswith("mrp.")
    }
    assert_gradients_match(case, tensors, gradients)
    assert all(parameter.grad is None for key, parameter in model.named_parameters() if not key.startswith("mrp."))
