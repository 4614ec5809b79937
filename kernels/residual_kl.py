"""The training loss from hidden states: KL between the later backbone state and the corrected one."""

from torch import Tensor

from .kernel_dispatch import resolve_kernels
from .residual_kl_torch import residual_kl_torch


def residual_kl(
    student: Tensor, target: Tensor, weight: Tensor, *, chunk: int | None = None, kernels: str = "auto"
) -> Tensor:
    """`KL( softmax(W target) || softmax(W student) )` per token, in nats, with a gradient to `student` alone.

    For the residual head `student = acc + r`; for direct MTP `student = r`. The weights of the loss (1/t, the masked
    positions) multiply the result: `(residual_kl(...) * weights).sum()`. Select the masked positions first: a position
    of weight 0 costs as much as any other. Beside the gradient, `[tokens, hidden]`, the extra memory is one chunk's.

    Args:
        student: `[tokens, hidden]`.
        target: `[tokens, hidden]`, a constant.
        weight: `[vocab, hidden]`, the frozen LM head's, a constant. The products are made in its dtype, as the LM
            head makes them; the softmax is float32 (float64 for a float64 weight).
        chunk: tokens at a time; by default as many as make 256 MiB of float32 logits.
        kernels: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        `[tokens]` float32 (float64 for a float64 weight).

    Raises:
        ValueError: shapes that do not fit together.
    """
    if student.ndim != 2 or student.shape != target.shape:
        raise ValueError(
            f"student {list(student.shape)} and target {list(target.shape)} must both be [tokens, hidden]."
        )
    if weight.ndim != 2 or weight.shape[1] != student.shape[1]:
        raise ValueError(f"weight {list(weight.shape)} must be [vocab, {student.shape[1]}].")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1.")
    if resolve_kernels(kernels, student.device) == "triton":
        from .residual_kl_triton import residual_kl_triton as implementation
    else:
        implementation = residual_kl_torch
    return implementation(student, target, weight, chunk=chunk)
