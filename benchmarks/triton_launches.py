"""Triton launches on a CPU, counted without running the kernels: a launcher's results come from its torch twin.

A launcher of the kernels package (`NAME_triton`) runs as it stands, so that it launches and allocates what it does on
a GPU, but its kernels are left out; its twin (`NAME_torch`) fills its results, which has the same signature and, by
the tests, the same results. A kernel of a launcher without a twin runs in Triton's interpreter.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves


@contextmanager
def triton_launches(
    package: ModuleType, launched: Callable[[str], None], uncounted: Callable[[], AbstractContextManager]
) -> Iterator[None]:
    """While the block runs, `launched` gets the name of every kernel that is launched.

    Triton must have been imported under `TRITON_INTERPRET=1`.

    Args:
        package: holds the modules `*_triton` and `*_torch`.
        uncounted: a context in which twins and the interpreter run: what they do is none of the launch.
    """
    from triton.runtime.interpreter import InterpretedFunction

    interpret = InterpretedFunction.run
    running: list[Callable] = []  # launchers whose twins will answer

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched(kernel.fn.__name__)
        if not running:
            with uncounted():
                interpret(kernel, *args, **kwargs)

    def answered_by(twin: Callable, launcher: Callable) -> Callable:
        @functools.wraps(launcher)
        def call(*args: Any, **kwargs: Any) -> Any:
            running.append(launcher)
            try:
                results = launcher(*args, **kwargs)
            finally:
                running.pop()
            # Into the launcher's own tensors: what follows depends on how they lie in memory.
            with uncounted():
                answers = tree_leaves(twin(*args, **kwargs))
                for result, answer in zip(tree_leaves(results), answers, strict=True):
                    if isinstance(result, torch.Tensor):
                        result.copy_(answer)
            return results

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(InterpretedFunction, "run", run))
        for module, name, twin in _launchers(package):
            stack.enter_context(mock.patch.object(module, name, answered_by(twin, getattr(module, name))))
        yield


def _launchers(package: ModuleType) -> list[tuple[ModuleType, str, Callable]]:
    """Module and name of every launcher that has a twin, and the twin."""
    names = [found.name for found in pkgutil.iter_modules(package.__path__)]
    modules = {name: importlib.import_module(f"{package.__name__}.{name}") for name in names if _is_kernel(name)}
    twins = {name: value for module in modules.values() for name, value in vars(module).items() if callable(value)}
    return [
        (module, name, twins[name.removesuffix("_triton") + "_torch"])
        for module in modules.values()
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        if name.endswith("_triton") and name.removesuffix("_triton") + "_torch" in twins
    ]


def _is_kernel(module: str) -> bool:
    return module.endswith(("_triton", "_torch"))
