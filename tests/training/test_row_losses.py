"""Losses of rows of logits: values against the plain formula, gradients against autograd, in float64 and float32."""

import pytest
import torch
from torch.nn import functional

from modeling_mrp.row_losses import certain_kl_rows, reverse_kl_rows

CERTAINTY = 0.3


def plain_certain(student, target):
    log_student, log_target = student.log_softmax(1), target.log_softmax(1)
    token = target.argmax(1, keepdim=True)
    p, q = (values.exp().gather(1, token)[:, 0] for values in (log_target, log_student))
    odds = [torch.log(share) - torch.log1p(-share) for share in (p, q)]
    kl = (log_target.exp() * (log_target - log_student)).sum(1)
    return kl + CERTAINTY * functional.smooth_l1_loss(odds[1], odds[0], reduction="none")


def plain_reverse(student, target):
    log_student, log_target = student.log_softmax(1), target.log_softmax(1)
    return (log_student.exp() * (log_student - log_target)).sum(1)


@pytest.mark.parametrize(
    ("rows", "plain"), [(certain_kl_rows(CERTAINTY), plain_certain), (reverse_kl_rows, plain_reverse)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_value_and_gradient(rows, plain, dtype, scale):
    generator = torch.Generator().manual_seed(3)
    student, target = (scale * torch.randn(11, 37, generator=generator, dtype=torch.float64) for _ in range(2))
    # Some rows far apart, so that both branches of the Huber loss are met.
    student[:4] = target[:4] + 0.01 * student[:4]
    leaf = student.clone().requires_grad_(True)
    expected = plain(leaf, target)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    found = student.to(dtype)
    loss = rows(found, target.to(dtype))
    accuracy = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(loss.double(), expected.detach(), **accuracy)
    torch.testing.assert_close(found.double(), gradient, **accuracy)


def test_near_certain_rows_stay_finite():
    student, target = torch.zeros(2, 9), torch.zeros(2, 9)
    student[:, 3], target[0, 3], target[1, 5] = 80.0, 90.0, 90.0
    loss = certain_kl_rows(CERTAINTY)(student, target)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(student).all()
