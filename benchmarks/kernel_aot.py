"""Ahead-of-time compilation of every kernel, without a GPU: registers, shared memory, stack, spills, tensor cores.

The launchers run on `meta` tensors with Triton's launch replaced by a recorder, so what is compiled is what a call at
that shape would launch: the same configuration and the same specialisation on divisible arguments.
"""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from .kernel_cases import Case

ARCHITECTURES = (80, 90, 100)
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}
TENSOR_CORES = ("mma.sync", "wgmma", "tcgen05.mma")


@dataclass
class Launch:
    """A kernel, specialised as at the recorded call."""

    function: JITFunction
    signature: dict[str, str]
    constants: dict[str, object]
    attributes: dict[tuple[int, ...], list]
    options: dict[str, int]
    used_by: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        return repr((self.function.__name__, self.signature, self.constants, self.attributes, self.options))


@dataclass
class Resources:
    """What the assembler reports for one architecture."""

    architecture: int
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int
    has_dot: bool
    tensor_cores: str


def record(case: Case, architecture: int) -> list[Launch]:
    """The launches of one call of `case`'s Triton path on a GPU of that generation."""
    arguments, options = case.build(torch.device("meta"))
    launches: list[Launch] = []
    capability = mock.patch("mrp_kernels.packed_block_attention_triton.compute_capability", return_value=architecture)
    with _recorded(launches), capability, torch.set_grad_enabled(case.backward):
        _triton_path(case)(*arguments, **options)
    for launch in launches:
        launch.used_by.append(f"{case.operation}: {case.shape}")
    return launches


def _triton_path(case: Case) -> Callable[..., object]:
    """`<op>_triton` of the case's module: the entry would refuse a `meta` device."""
    module = {"qk_norm_rope": "mrp_input", "shortlist": "shortlist_residual"}.get(case.operation, case.operation)
    function = getattr(importlib.import_module(f"mrp_kernels.{module}_triton"), f"{case.operation}_triton")
    if case.operation == "shortlist":
        return lambda logits, size, mask_token_id: function(logits, size, mask_token_id)
    return function


@contextmanager
def _recorded(launches: list[Launch]) -> Iterator[None]:
    original = JITFunction.run

    def run(self: JITFunction, *args, grid, warmup, **kwargs) -> None:
        launches.append(_specialise(self, args, kwargs))

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


def _specialise(function: JITFunction, args: tuple, kwargs: dict) -> Launch:
    names = list(function.signature.parameters)
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    launch = Launch(function, {}, {}, {}, options)
    for at, parameter in enumerate(function.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            launch.signature[parameter.name] = "constexpr"
            launch.constants[parameter.name] = value
            continue
        if isinstance(value, torch.Tensor):
            launch.signature[parameter.name] = "*" + TYPES[value.dtype]
            aligned = value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, float):
            launch.signature[parameter.name] = "fp32"
            aligned = False
        else:
            launch.signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        if aligned and not parameter.do_not_specialize:
            launch.attributes[(at,)] = [["tt.divisibility", 16]]
    return launch


def compile_launch(launch: Launch, architecture: int) -> Resources:
    """Compiles for `sm_<architecture>` and asks the assembler what it used."""
    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin))
        text = Path(folder) / "kernel.ptx"
        text.write_text(ptx)
        verbose = _tool(
            get_ptxas(architecture).path, "-v", "--regAllocOptLevel=2",
            f"--gpu-name={sm_arch_from_capability(architecture)}", str(text), "-o", str(cubin) + ".again",
        )  # fmt: skip
    found = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", verbose)
    if spills is None:
        raise RuntimeError(f"ptxas reported no spill figures for {launch.function.__name__}: {verbose!r}")
    return Resources(
        architecture,
        registers=found["REG"],
        shared=compiled.metadata.shared,
        stack=found["STACK"] + found.get("LOCAL", 0),
        spill_stores=int(spills.group(1)),
        spill_loads=int(spills.group(2)),
        has_dot="tt.dot" in compiled.asm["ttir"],
        tensor_cores=next((name for name in reversed(TENSOR_CORES) if name in ptx), ""),
    )


def _tool(*command: str) -> str:
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {finished.stdout}{finished.stderr}")
    return finished.stdout + finished.stderr


def unique_launches(cases: Iterable[Case], architecture: int) -> list[Launch]:
    """Every distinct kernel that the cases launch, each with the cases that use it."""
    launches: dict[str, Launch] = {}
    for case in cases:
        for launch in record(case, architecture):
            known = launches.setdefault(launch.key, launch)
            if known is not launch:
                known.used_by.extend(launch.used_by)
    return list(launches.values())
