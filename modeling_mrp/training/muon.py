"""Muon for the head's matrices and AdamW for the rest, as one optimizer."""

from typing import Any

import torch
from torch import Tensor


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (orthogonalised momentum, Jordan et al. 2024) on matrices, AdamW on vectors.

    Args:
        matrices: parameters of two dimensions.
        vectors: all others.
        lr: of Muon.
        vector_lr: of AdamW.
        weight_decay: of both.
    """

    def __init__(
        self, matrices: list[Tensor], vectors: list[Tensor], lr: float, vector_lr: float, weight_decay: float = 0.0
    ):
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay),
            torch.optim.AdamW(vectors, lr=vector_lr, betas=(0.9, 0.98), weight_decay=weight_decay),
        ]
        super().__init__([*matrices, *vectors], {})
        self._share_groups()

    def _share_groups(self) -> None:
        # The very dicts of the parts, so that a learning rate schedule reaches them.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of both; `closure` is not supported."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Of both parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of both parts."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()
