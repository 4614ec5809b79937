"""Triton kernel of `residual_kl`: loss and gradient of a row of logits, written over the student's logits.

The matrix products stay with cuBLAS. A row is read twice, once for both softmaxes' sums and the loss, once for the
gradient; float32 copies of the logits are never written.
"""

import torch
from torch import Tensor

from .residual_kl_torch import ResidualKL, default_chunk
from .tile_arithmetic import next_power_of_2

try:  # transformers' check of remote code tolerates a missing package only in a try block
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('kernels="triton" needs the package triton.') from error


@triton.jit
def _row_kernel(student, target, loss, vocab, student_stride, target_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    target += row * target_stride
    low = -float("inf")
    # Every lane keeps its own running maximum, sum and weighted difference; they meet once, at the end.
    s_max = tl.full([BLOCK], low, tl.float32)
    t_max = tl.full([BLOCK], low, tl.float32)
    s_sum = tl.zeros([BLOCK], tl.float32)
    t_sum = tl.zeros([BLOCK], tl.float32)
    difference = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < vocab
        s = tl.load(student + index, mask=inside, other=low).to(tl.float32)
        t = tl.load(target + index, mask=inside, other=low).to(tl.float32)
        new = tl.maximum(s_max, s)
        safe = tl.where(new == low, 0.0, new)
        s_sum = s_sum * tl.exp(s_max - safe) + tl.exp(s - safe)
        s_max = new
        new = tl.maximum(t_max, t)
        safe = tl.where(new == low, 0.0, new)
        decay = tl.exp(t_max - safe)
        weight = tl.exp(t - safe)
        t_sum = t_sum * decay + weight
        difference = difference * decay + tl.where(t == low, 0.0, weight * (t - s))
        t_max = new
    s_top = tl.max(s_max, axis=0)
    t_top = tl.max(t_max, axis=0)
    s_total = tl.sum(s_sum * tl.exp(s_max - s_top), axis=0)
    scale = tl.exp(t_max - t_top)
    t_total = tl.sum(t_sum * scale, axis=0)
    mean = tl.sum(difference * scale, axis=0) / t_total
    tl.store(loss + row, mean + (s_top + tl.log(s_total)) - (t_top + tl.log(t_total)))
    s_share = 1.0 / s_total
    t_share = 1.0 / t_total
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < vocab
        s = tl.load(student + index, mask=inside, other=low).to(tl.float32)
        t = tl.load(target + index, mask=inside, other=low).to(tl.float32)
        gradient = tl.exp(s - s_top) * s_share - tl.exp(t - t_top) * t_share
        tl.store(student + index, gradient.to(student.dtype.element_ty), mask=inside)


def rows_triton(student: Tensor, target: Tensor) -> Tensor:
    """Loss of each row `[rows]` float32; `student` becomes its gradient. See `residual_kl_torch.rows_torch`."""
    rows, vocab = student.shape
    loss = torch.empty(rows, device=student.device, dtype=torch.float32)
    # Four logits a thread, with five running values each: twice as many fill 64 registers and spill under Triton 3.6.
    block = min(2048, max(128, next_power_of_2(vocab)))
    if rows:
        _row_kernel[(rows,)](
            student,
            target,
            loss,
            vocab,
            student.stride(0),
            target.stride(0),
            BLOCK=block,
            num_warps=block // 128,
        )
    return loss


def residual_kl_triton(student: Tensor, target: Tensor, weight: Tensor, *, chunk: int | None = None) -> Tensor:
    """See `residual_kl.residual_kl`."""
    chunk = chunk or default_chunk(weight.shape[0])
    return ResidualKL.apply(student, target.detach(), weight.detach(), chunk, rows_triton)
