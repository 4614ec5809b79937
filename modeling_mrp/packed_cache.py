"""Key/value storage of ragged rows: a committed prefix per row, and a scratch area for the segments of one forward.

Storage is preallocated and grows by doubling. A forward writes its segments behind the longest committed prefix and
reads one view, so neither prefix nor segments are copied; committing a finished block moves one block per row. Layers
share one tensor, so that a commit is two operations and not two a layer.
"""

from typing import Any

import torch
from torch import Tensor


class PackedCache:
    """Keys and values of all layers of one stack (backbone or head).

    Args:
        capacity: positions to allocate at first; more is allocated when needed.
        together: layers that share a tensor, 1 where layers are on several devices.

    Attributes:
        storage: of each group of `together` layers, `[layers, 2, rows, kv_heads, capacity, head_dim]`.
        keys, values: of each layer, views of it: `[rows, kv_heads, capacity, head_dim]`.
        scratch: offset at which the next forward writes its tokens.
        rows: how many of the leading rows take part in the next forward.
    """

    def __init__(self, capacity: int = 0, together: int = 1):
        self.together = together
        self.storage: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.capacity = capacity
        self.scratch = 0
        self.rows = 0

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the tokens of this forward `[rows, kv_heads, tokens, head_dim]` and returns all that can be seen."""
        new_keys, new_values = self.place(key, layer)
        new_keys.copy_(key)
        new_values.copy_(value)
        rows, end = key.shape[0], self.scratch + key.shape[2]
        return self.keys[layer][:rows, :, :end], self.values[layer][:rows, :, :end]

    def place(self, key: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Where the keys and the values of this forward go, two views of the shape of `key`, to be written."""
        rows, _, tokens, _ = key.shape
        end = self.scratch + tokens
        if layer not in self.keys or end > self.keys[layer].shape[2]:
            self._grow(layer, key, end)
        return self.keys[layer][:rows, :, self.scratch : end], self.values[layer][:rows, :, self.scratch : end]

    def commit(self, source: Tensor, target: Tensor, rows: Tensor, block: int) -> None:
        """Moves one block of `rows` `[m]` from offsets `source` `[m]` to `target` `[m]`, in every layer."""
        span = torch.arange(block, device=rows.device)
        source, target, rows = source[:, None] + span, target[:, None] + span, rows[:, None]
        for held in self.storage.values():
            r, s, t = (index.to(held.device) for index in (rows, source, target))
            held[:, :, r, :, t] = held[:, :, r, :, s]

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchanges the first `length` positions of two rows."""
        for held in self.storage.values():
            aside = held[:, :, first, :, :length].clone()
            held[:, :, first, :, :length] = held[:, :, second, :, :length]
            held[:, :, second, :, :length] = aside

    def reorder(self, order: Tensor) -> None:
        """Puts the rows in the order `order` `[rows]`, which names each of them once."""
        for held in self.storage.values():
            for layer in held:  # one at a time: a copy of all would double the memory
                layer.copy_(layer[:, order.to(held.device)])

    def _grow(self, layer: int, key: Tensor, needed: int) -> None:
        group = layer // self.together
        old = self.storage.get(group)
        self.capacity = max(self.capacity, needed if old is None else 2 * needed)
        # The first forward of a call holds all of its rows; later ones only those still running.
        rows = key.shape[0] if old is None else old.shape[2]
        shape = (self.together, 2, rows, key.shape[1], self.capacity, key.shape[3])
        fresh = torch.zeros(shape, dtype=key.dtype, device=key.device)
        if old is not None:
            fresh[..., : old.shape[4], :] = old
        self._hold(group, fresh)

    def _hold(self, group: int, storage: Tensor) -> None:
        self.storage[group] = storage
        for place, (keys, values) in enumerate(storage):
            self.keys[group * self.together + place] = keys
            self.values[group * self.together + place] = values
