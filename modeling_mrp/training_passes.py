"""The forward passes of a training step: backbone and head on noisy copies of a batch.

Four layouts compute them. `shared` runs the clean half of the sequence once and hands its keys and values to the
noisy passes; `packed` recomputes noisy and clean halves side by side in every pass, and gives the same numbers; both
are what decoding sees: a noisy block sees itself and the clean blocks before it. `single` has no clean half: a noisy
block sees itself and the noisy blocks before it.

The head's clean half is, with `head_prefix="clean"`, its pass over clean tokens with their clean hidden states, as in
decoding. `"chained"` moves it along with the noisy half: step k reads the clean half's own acc_{k-1}.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .block_attention import TokenLayout, may_see
from .noising import BlockGrid


class _Recorder:
    """A cache that notes the keys and values of each layer, `[batch, kv_heads, tokens, head_dim]`."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.values.append(value)
        return key, value


class _Prefix:
    """A cache that puts given keys and values before a pass's own, repeated over the copies in its batch."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys, self.values = keys, values

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        repeats = (key.shape[0] // self.keys[layer].shape[0], 1, 1, 1)
        return (
            torch.cat([self.keys[layer].repeat(repeats), key], dim=2),
            torch.cat([self.values[layer].repeat(repeats), value], dim=2),
        )


class TrainingPasses:
    """Backbone and head passes over noisy copies; base of the layouts.

    Args:
        model: an `MRPForCausalLM`.
        grid: of the batch.
        head_prefix: `"clean"` or `"chained"`.
        checkpointing: recompute the head's activations in the backward pass.
        backbone_gradient: let gradients into the backbone (training the backbone itself).
    """

    def __init__(
        self, model: Any, grid: BlockGrid, head_prefix: str, checkpointing: bool, backbone_gradient: bool = False
    ):
        self.model, self.grid = model, grid
        self.head_prefix, self.checkpointing, self.backbone_gradient = head_prefix, checkpointing, backbone_gradient
        batch = grid.columns.shape[0]
        self.positions = grid.take(grid.position).view(batch, -1)
        self.noisy = TokenLayout(
            grid.take(grid.sample, -1).view(batch, -1),
            grid.take(grid.block_index).view(batch, -1),
            torch.ones_like(self.positions, dtype=torch.bool),
        )
        self.clean = TokenLayout(grid.sample, grid.block_index, torch.zeros_like(grid.sample, dtype=torch.bool))
        self._masks: dict[int, Any] = {}

    def backbone(self, ids: Tensor, masked: Tensor) -> Tensor:
        """Hidden states `[copies, batch, blocks, block, hidden]`.

        Args:
            ids: `[copies, batch, blocks, block]` int64, the states, with the mask token at masked places.
            masked: bool of that shape, which places these are.
        """
        with torch.set_grad_enabled(self.backbone_gradient):
            hidden = self._backbone(ids.flatten(2))
        return hidden.view(*ids.shape, hidden.shape[-1])

    def head(self, ids: Tensor, accumulated: Tensor) -> tuple[Tensor, Tensor]:
        """One head step: r_k and acc_k, `[copies, batch, blocks, block, hidden]`, for states `ids`."""
        residual, after = self._head(ids.flatten(2), accumulated.flatten(2, 3))
        return residual.view(accumulated.shape), after.view(accumulated.shape)

    def _backbone(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def _head(self, ids: Tensor, accumulated: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _mask(self, copies: int) -> Any:
        """Attention mask of a noisy pass over `copies` copies."""
        if copies not in self._masks:
            self._masks[copies] = self.model.attention_mask(self._allowed().repeat(copies, 1, 1))
        return self._masks[copies]

    def _allowed(self) -> Tensor:
        raise NotImplementedError

    def _call(self, function: Any, *args: Any) -> Any:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=False)
        return function(*args)


class SinglePasses(TrainingPasses):
    """One noisy copy, block-causal."""

    def _backbone(self, ids: Tensor) -> Tensor:
        copies = ids.shape[0]
        return self.model.backbone(ids.flatten(0, 1), self.positions.repeat(copies, 1), self._mask(copies))

    def _head(self, ids: Tensor, accumulated: Tensor) -> tuple[Tensor, Tensor]:
        copies = ids.shape[0]
        positions, mask = self.positions.repeat(copies, 1), self._mask(copies)
        return self._call(self.model.head, ids.flatten(0, 1), accumulated.flatten(0, 1), positions, mask)

    def _allowed(self) -> Tensor:
        layout = TokenLayout(self.noisy.sample, self.noisy.block)
        return may_see(layout, layout)


class PackedPasses(TrainingPasses):
    """[noisy | clean] side by side in every pass: the plain form that `SharedPasses` must equal."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.clean_accumulated: Tensor | None = None
        self.both = TokenLayout(*(torch.cat(parts, dim=1) for parts in zip(self.noisy, self.clean, strict=True)))  # type: ignore[arg-type]
        self.both_positions = torch.cat([self.positions, self.grid.position], dim=1)

    def _backbone(self, ids: Tensor) -> Tensor:
        copies, noisy = ids.shape[0], ids.shape[2]
        both = torch.cat([ids, self.grid.ids.expand(copies, -1, -1)], dim=2).flatten(0, 1)
        hidden = self.model.backbone(both, self.both_positions.repeat(copies, 1), self._mask(copies))
        if self.clean_accumulated is None:
            self.clean_accumulated = hidden.view(copies, *self.both.sample.shape, -1)[:1, :, noisy:]
        return hidden[:, :noisy]

    def _head(self, ids: Tensor, accumulated: Tensor) -> tuple[Tensor, Tensor]:
        assert self.clean_accumulated is not None
        copies, noisy = ids.shape[0], ids.shape[2]
        both = torch.cat([ids, self.grid.ids.expand(copies, -1, -1)], dim=2).flatten(0, 1)
        clean = self.clean_accumulated.expand(copies, -1, -1, -1)
        before = torch.cat([accumulated, clean], dim=2).flatten(0, 1)
        residual, after = self._call(
            self.model.head, both, before, self.both_positions.repeat(copies, 1), self._mask(copies)
        )
        if self.head_prefix == "chained":
            self.clean_accumulated = after.view(copies, *self.both.sample.shape, -1)[:, :, noisy:]
        return residual[:, :noisy], after[:, :noisy]

    def _allowed(self) -> Tensor:
        return may_see(self.both, self.both)


class SharedPasses(TrainingPasses):
    """The clean half once, its keys and values reused by every noisy pass."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.clean_mask = self.model.attention_mask(may_see(self.clean, self.clean))
        self.clean_accumulated = self._clean_pass()
        self.head_keys: list[Tensor] | None = None
        self.head_values: list[Tensor] | None = None

    def _clean_pass(self) -> Tensor:
        recorder = _Recorder()
        with torch.set_grad_enabled(self.backbone_gradient):
            hidden = self.model.backbone(self.grid.ids, self.grid.position, self.clean_mask, recorder)
        self.prefix = _Prefix(recorder.keys, recorder.values)
        return hidden

    def _backbone(self, ids: Tensor) -> Tensor:
        copies = ids.shape[0]
        positions = self.positions.repeat(copies, 1)
        return self.model.backbone(ids.flatten(0, 1), positions, self._mask(copies), self.prefix)

    def _head(self, ids: Tensor, accumulated: Tensor) -> tuple[Tensor, Tensor]:
        if self.head_keys is None or self.head_prefix == "chained":
            after, self.head_keys, self.head_values = self._call(self._clean_head, self.clean_accumulated)
            if self.head_prefix == "chained":
                self.clean_accumulated = after
        return self._call(
            self._noisy_head, ids.flatten(0, 1), accumulated.flatten(0, 1), self.head_keys, self.head_values
        )

    def _clean_head(self, accumulated: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        recorder = _Recorder()
        _, after = self.model.head(self.grid.ids, accumulated, self.grid.position, self.clean_mask, recorder)
        return after, recorder.keys, recorder.values

    def _noisy_head(
        self, ids: Tensor, accumulated: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        copies = ids.shape[0] // self.grid.ids.shape[0]
        positions = self.positions.repeat(copies, 1)
        return self.model.head(ids, accumulated, positions, self._mask(copies), _Prefix(keys, values))

    def _allowed(self) -> Tensor:
        return torch.cat([may_see(self.noisy, self.clean), may_see(self.noisy, self.noisy)], dim=2)


class RecordedPasses(SharedPasses):
    """The backbone's part read from a recording (`mrp-train record --hidden-states`); it does not run at all.

    Args:
        rows: `[batch, tokens]` int64, each token's row in `states`.
        states: a `training.recorded_states.RecordedStates`.
    """

    def __init__(self, *args: Any, rows: Tensor | None, states: Any):
        if rows is None or states is None:
            raise ValueError(
                'layout="recorded" needs record_rows and recorded_states; write them with mrp-train record '
                "--hidden-states and name the folder in data.recorded_states."
            )
        self.rows, self.states = rows, states
        super().__init__(*args)
        self.total = self.grid.supervised.sum(dim=-1)

    def _clean_pass(self) -> Tensor:
        return self.states.clean(self.rows).to(self.rows.device, self.model.lm_head.weight.dtype)

    def backbone(self, ids: Tensor, masked: Tensor) -> Tensor:
        """The recorded hidden states of the trajectory's states with as many masked places."""
        revealed = (self.total - masked.sum(dim=-1))[..., None].expand_as(masked)
        hidden = self.states.states(self.grid.take(self.rows).expand_as(revealed), revealed)
        return hidden.to(ids.device, self.clean_accumulated.dtype)


LAYOUTS: dict[str, type[TrainingPasses]] = {
    "shared": SharedPasses, "packed": PackedPasses, "single": SinglePasses, "recorded": RecordedPasses
}  # fmt: skip
