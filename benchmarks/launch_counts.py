"""Counts the device operations of decoding rounds, by part of the round; exact, and without any clock or GPU.

One operation is one ATen operator that computes or moves data, or one Triton launch. Every operation belongs to the
innermost part that is running: parts begin and end where the functions of `SEAMS` are called and return. Operations
outside of the engine's round (prefill, set-up, output) are none of a round's.
"""

import functools
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import modeling_mrp
from benchmarks.triton_launches import triton_launches
from modeling_mrp.decode_engine import DecodeEngine


class Seam(NamedTuple):
    """A function at which a part of the round begins.

    Attributes:
        part: what its operations are counted as.
        owner: `engine` (a method), `model` (a path from the model, `*` for every member) or `package` (a function, by
            module and name, wherever a module of the package has imported it).
        name: in its owner.
        always: whether every round calls it.
    """

    part: str
    owner: str
    name: str
    always: bool = False


# Public functions and the engine's stages, so that code may move between them freely. Innermost wins.
SEAMS = (
    Seam("plan", "engine", "_plan", always=True),
    Seam("draft", "engine", "_draft"),
    Seam("forward", "engine", "_forward", always=True),
    Seam("settle", "engine", "_settle", always=True),
    Seam("ends", "engine", "_end_rows", always=True),
    Seam("backbone", "model", "backbone", always=True),
    Seam("layers", "model", "model.layers.*.forward", always=True),
    Seam("head", "model", "head"),
    Seam("logits", "model", "lm_head.forward", always=True),
    Seam("logits", "package", "token_statistics.token_statistics", always=True),
    Seam("logits", "package", "shortlist_residual.shortlist"),
    Seam("logits", "package", "shortlist_residual.shortlist_residual"),
)
PARTS = tuple(dict.fromkeys(seam.part for seam in SEAMS))
BACKBONE = ("backbone", "layers")
ROUND = "forward"  # the engine makes one packed forward a round

# Operators that neither compute nor move anything on a device, beside views, which their schemas tell.
_ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view"}
# Operators whose result the host waits for.
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim"}
# A CPU run shows no transfer, so that their callers are counted: the host waits for these of a device's tensors ...
_TO_HOST = ((torch.Tensor, "cpu"), (torch.Tensor, "tolist"))
# ... and these give a tensor made on the host, which then goes to the device.
_TO_DEVICE = ((torch, "from_numpy"), (torch, "tensor"))


@dataclass
class LaunchCounts:
    """What was counted.

    Attributes:
        operations: by (part, operator); Triton launches have the kernel's name in angle brackets.
        calls: of each seam, inside of rounds.
        syncs, uploads: by part: how often the host waits for the device, and copies from host to device.
        total: all operations inside of rounds, counted apart from their parts.
        outside: operations outside of rounds.
    """

    operations: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[Seam] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    total: int = 0
    outside: int = 0

    @property
    def rounds(self) -> int:
        return sum(count for seam, count in self.calls.items() if seam.part == ROUND)

    @property
    def by_part(self) -> dict[str, int]:
        """Operations of every part, in the order of `PARTS`."""
        found = dict.fromkeys(PARTS, 0)
        for (part, _), count in self.operations.items():
            found[part] += count
        return found


@contextmanager
def counting(model: Any) -> Iterator[LaunchCounts]:
    """Counts while the block runs; the model and the engine are as before afterwards.

    Raises:
        LookupError: a seam is missing, or one that every round calls was not called: `SEAMS` no longer fits the code.
    """
    recorder = _Recorder()
    with ExitStack() as stack:
        for seam in SEAMS:
            for owner, name in _places(seam, model):
                stack.enter_context(mock.patch.object(owner, name, recorder.entered(seam, getattr(owner, name))))
        for functions, record in ((_TO_HOST, recorder.waits), (_TO_DEVICE, recorder.uploads)):
            for owner, name in functions:
                stack.enter_context(mock.patch.object(owner, name, _noticed(record, getattr(owner, name))))
        if os.environ.get("TRITON_INTERPRET") == "1":
            stack.enter_context(triton_launches(modeling_mrp, recorder.launched, recorder.paused))
        stack.enter_context(_Mode(recorder))
        yield recorder.counts
    counts = recorder.counts
    silent = [seam.name for seam in SEAMS if seam.always and counts.calls[seam] < counts.rounds]
    if silent or not counts.rounds:
        raise LookupError(_outdated(f"not every round calls {', '.join(silent) or 'the packed forward'}"))


class _Recorder:
    """Where the program is, and what it has done there."""

    def __init__(self) -> None:
        self.counts = LaunchCounts()
        self.inside: list[Seam] = []
        self.pauses = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing while the block runs."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    @property
    def part(self) -> str | None:
        """The running part, `None` outside of a round: prefill calls the backbone, too."""
        return self.inside[-1].part if self.inside and self.inside[0].owner == "engine" else None

    def entered(self, seam: Seam, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.inside.append(seam)
            self.counts.calls[seam] += self.part is not None
            try:
                return function(*args, **kwargs)
            finally:
                self.inside.pop()

        return call

    def operation(self, name: str) -> None:
        if self.pauses:
            return
        part = self.part
        if part is None:
            self.counts.outside += 1
        else:
            self.counts.operations[part, name] += 1
            self.counts.total += 1

    def launched(self, kernel: str) -> None:
        self.operation(f"<{kernel}>")

    def waits(self) -> None:
        self._transfer(self.counts.syncs)

    def uploads(self) -> None:
        self._transfer(self.counts.uploads)

    def _transfer(self, counter: Counter[str]) -> None:
        if self.part is not None and not self.pauses:
            counter[self.part] += 1


class _Mode(TorchDispatchMode):
    """Sees every ATen operator below autograd, where composite operators are taken apart."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in _WAITS or (name.startswith("index") and _indexes_by_bool(args)):
            self.recorder.waits()
        if not func.is_view and name not in _ALLOCATIONS and name != "_local_scalar_dense":
            self.recorder.operation(name)
        return func(*args, **(kwargs or {}))


def _indexes_by_bool(args: Any) -> bool:
    """Whether an `index` or `index_put_` has a mask among its indices: how many it picks is the host's to know."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _noticed(record: Callable[[], None], function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        record()
        return function(*args, **kwargs)

    return call


def _places(seam: Seam, model: Any) -> list[tuple[Any, str]]:
    """Objects and attribute names at which a seam is called."""
    places: list[tuple[Any, str]]
    if seam.owner == "engine":
        places = [(DecodeEngine, seam.name)]
    elif seam.owner == "model":
        *path, name = seam.name.split(".")
        owners = [model]
        for step in path:
            owners = [part for owner in owners for part in (owner if step == "*" else [getattr(owner, step, None)])]
        places = [(owner, name) for owner in owners]
    else:
        module, name = seam.name.split(".")
        function = getattr(importlib.import_module(f"{modeling_mrp.__name__}.{module}"), name, None)
        loaded = [found for key, found in list(sys.modules.items()) if key.startswith(f"{modeling_mrp.__name__}.")]
        places = [(owner, name) for owner in loaded if function is not None and vars(owner).get(name) is function]
    if not places or not all(hasattr(owner, name) for owner, name in places):
        raise LookupError(_outdated(f"{seam.owner} has no {seam.name}"))
    return places


def _outdated(what: str) -> str:
    return f"{what}: SEAMS in benchmarks/launch_counts.py no longer fits the code; name there what took its place."
