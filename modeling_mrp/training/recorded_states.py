"""The backbone's hidden states at every state of recorded trajectories, in a folder that is mapped into memory.

The backbone is frozen: what it says on its own trajectories need not be computed again in every epoch, and a head that
is trained on the recording costs no backbone pass at all. The price is disk: (block length + 1) hidden states per
answer token and one per prompt token.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..head_artifact import backbone_fingerprint
from ..noising import block_grid, highest
from ..training_passes import SharedPasses
from .errors import TrainingError

_DESCRIPTION = "recording.json"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class RecordedStates:
    """A finished recording.

    Args:
        folder: that `StateRecorder` wrote.

    Raises:
        TrainingError: there is no complete recording.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        if not (folder / _DESCRIPTION).exists():
            raise TrainingError(
                f"data.recorded_states={str(folder)!r} holds no complete recording ({_DESCRIPTION} is missing); write "
                "it with mrp-train record MODEL PROMPTS OUTPUT --hidden-states."
            )
        self.description = json.loads((folder / _DESCRIPTION).read_text())
        hidden, block = self.description["hidden_size"], self.description["block_length"]
        self.dtype = _DTYPES[self.description["dtype"]]
        self._clean = np.memmap(folder / "clean.bin", dtype=np.int16, mode="r").reshape(-1, hidden)
        self._states = np.memmap(folder / "states.bin", dtype=np.int16, mode="r").reshape(-1, block, hidden)
        self._place = np.fromfile(folder / "places.bin", dtype=np.int64)

    def __len__(self) -> int:
        return len(self._place)

    def check(self, model: Any) -> None:
        """Raises `TrainingError` unless the recording is of this backbone and block length."""
        found = {"fingerprint": backbone_fingerprint(model), "block_length": model.config.block_size}
        for name, value in found.items():
            if self.description[name] != value:
                raise TrainingError(
                    f"data.recorded_states was recorded with {name}={self.description[name]}, model.path has {value}; "
                    "record the states of this backbone with mrp-train record."
                )

    def clean(self, rows: Tensor) -> Tensor:
        """`[..., hidden]` of the clean sequence, for token rows `[...]` int64."""
        return self._tensor(self._clean[rows.cpu().numpy()])

    def states(self, rows: Tensor, revealed: Tensor) -> Tensor:
        """Hidden states `[..., hidden]` at token rows `[...]`, `revealed` `[...]` int64 places into its block.

        A finished block's state is not held (nothing of it is masked); the last one before it is returned instead.
        """
        place, state = np.broadcast_arrays(self._place[rows.cpu().numpy()], revealed.cpu().numpy())
        return self._tensor(self._states[place.clip(min=0), state.clip(max=self._states.shape[1] - 1)])

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).view(self.dtype)


class StateRecorder:
    """Writes a recording; `close` makes it complete.

    Args:
        folder: to write; what is there is replaced.
        model: an `MRPForCausalLM`.
    """

    def __init__(self, folder: Path, model: Any):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _DESCRIPTION).unlink(missing_ok=True)
        self.folder, self.model = folder, model
        self.dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float16
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in ("clean", "states", "places")}
        self._rows, self._recorded = 0, 0

    @torch.no_grad()
    def add(self, batch: dict[str, Tensor]) -> list[int]:
        """Runs the backbone on a collated batch of trajectories; returns the first row of each."""
        model, order = self.model, batch["reveal_order"]
        block = model.config.block_size
        grid = block_grid(batch["input_ids"], batch["labels"], block, batch["attention_mask"])
        passes = SharedPasses(model, grid, "clean", False)
        supervised, truth = grid.supervised, grid.take(grid.ids)
        rank = grid.take(order).float()
        left = supervised.sum(dim=-1, keepdim=True)
        masked = torch.stack([highest(rank, supervised, left - count) for count in range(block)])
        ids = torch.where(masked, model.config.mask_token_id, truth)
        # One state after the other: a copy of each at once would need block times the memory.
        states = torch.stack([passes.backbone(i[None], m[None])[0] for i, m in zip(ids, masked, strict=True)], dim=3)
        first = []
        for row, length in enumerate(batch["attention_mask"].sum(dim=1).tolist()):
            valid = grid.valid[row]
            place = torch.full((length,), -1, dtype=torch.int64)
            columns = grid.columns[row][valid].cpu()
            place[columns] = self._recorded + torch.arange(len(columns))
            self._write("clean", passes.clean_accumulated[row, :length])
            self._write("states", states[row][valid])
            self._files["places"].write(place.numpy().tobytes())
            first.append(self._rows)
            self._rows, self._recorded = self._rows + length, self._recorded + len(columns)
        return first

    def close(self) -> None:
        """Ends the recording; until then `RecordedStates` refuses the folder."""
        for file in self._files.values():
            file.close()
        config = self.model.config
        description = {
            "fingerprint": backbone_fingerprint(self.model),
            "block_length": config.block_size,
            "hidden_size": config.hidden_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tokens": self._rows,
            "answer_tokens": self._recorded,
        }
        (self.folder / _DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")

    def _write(self, name: str, values: Tensor) -> None:
        self._files[name].write(values.to(self.dtype).cpu().contiguous().view(torch.int16).numpy().tobytes())
