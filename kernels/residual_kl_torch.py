"""The training loss in chunks of tokens: logits of `[tokens, vocab]` never exist, forward or backward.

The gradient of a token's loss needs nothing but that token's two rows of logits, so the forward pass computes it at
once, `(softmax(W z) - softmax(W h)) W`, and the backward pass only scales it.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

# Bytes of the two chunks of float32 logits; the products reach full speed well below it.
CHUNK_BYTES = 2**28

# (student logits, target logits) -> loss per row; overwrites the student's logits with the loss's gradient.
RowLoss = Callable[[Tensor, Tensor], Tensor]


def rows_torch(student: Tensor, target: Tensor) -> Tensor:
    """KL(softmax(target) || softmax(student)) of each row `[rows]`; `student` becomes its gradient."""
    work = torch.promote_types(student.dtype, torch.float32)
    log_student = student.to(work).log_softmax(dim=1)
    log_target = target.to(work).log_softmax(dim=1)
    p_target = log_target.exp()
    loss = log_target.sub_(log_student).mul_(p_target).sum(dim=1)
    student.copy_(log_student.exp_().sub_(p_target))
    return loss


def default_chunk(vocab: int) -> int:
    """Tokens per chunk within `CHUNK_BYTES`."""
    return max(16, CHUNK_BYTES // (8 * vocab))


class ResidualKL(torch.autograd.Function):
    """Loss per token with the gradient to the student's hidden states."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, student: Tensor, target: Tensor, weight: Tensor, chunk: int, row_loss: RowLoss
    ) -> Tensor:
        """See `residual_kl.residual_kl`."""
        needs_gradient = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        work = torch.promote_types(weight.dtype, torch.float32)
        loss = torch.empty(student.shape[0], device=student.device, dtype=work)
        gradient = torch.empty_like(student) if needs_gradient else None
        for start in range(0, student.shape[0], chunk):
            rows = slice(start, start + chunk)
            student_logits = student[rows].to(weight.dtype) @ weight.t()
            target_logits = target[rows].to(weight.dtype) @ weight.t()
            loss[rows] = row_loss(student_logits, target_logits)
            if gradient is not None:
                gradient[rows] = student_logits @ weight
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (gradient * grad_output[:, None]).to(gradient.dtype), None, None, None, None


def residual_kl_torch(student: Tensor, target: Tensor, weight: Tensor, *, chunk: int | None = None) -> Tensor:
    """See `residual_kl.residual_kl`."""
    return ResidualKL.apply(
        student, target.detach(), weight.detach(), chunk or default_chunk(weight.shape[0]), rows_torch
    )
