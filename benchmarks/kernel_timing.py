"""Correctness and speed of every kernel on a CUDA machine, against that machine's own copy and matrix rates."""

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from .kernel_cases import BLOCK, MODELS, Case, all_cases
from .kernel_checks import CHECKS
from .kernel_draft_step import draft_and_backbone

FLUSH_BYTES = 2**28  # several times the largest L2 cache
DEVICE = "cuda"
COMPILE_SECONDS = 240  # after these, torch.compile and flex attention are left out, to stay below eight minutes


class Timer:
    """Median time of a call with a cold L2 cache, in microseconds."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=DEVICE)

    def eager(self, function: Callable[[], object], repeats: int = 30) -> float:
        """As launched from Python; clearing the cache hides part of the launch time, as other work would."""
        for _ in range(3):
            function()
        return self._median(function, repeats)

    def graph(self, function: Callable[[], object], repeats: int = 30) -> float:
        """As replayed from a CUDA graph: the machine's time alone. NaN if the call cannot be captured."""
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function()
        except RuntimeError:
            torch.cuda.synchronize()
            return float("nan")
        return self._median(graph.replay, repeats)

    def _median(self, function: Callable[[], object], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            start.record()
            function()
            stop.record()
            stop.synchronize()
            times.append(1000 * start.elapsed_time(stop))
        return statistics.median(times)


def machine_rates(timer: Timer) -> tuple[float, float]:
    """Measured copy bandwidth in bytes per second (read and write counted) and bfloat16 matrix rate in operations."""
    source = torch.empty(2**30, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / timer.eager(lambda: target.copy_(source), 20) * 1e6
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return copy, 2 * 8192**3 / timer.eager(lambda: a @ b, 20) * 1e6


def attention_rivals(arguments: tuple, options: dict, slow: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """SDPA with a mask and flex attention; prefix and new keys are joined for them beforehand, free of charge."""
    query, key, value = arguments
    prefix, block = options["max_prefix_length"], options["block"]
    keys = torch.cat((options["cache_key"][:, :, :prefix], key), dim=2)
    values = torch.cat((options["cache_value"][:, :, :prefix], value), dim=2)
    segment = torch.arange(query.shape[2], device=query.device) // block
    own = segment[:, None] >= segment[None, :]
    mask = torch.cat((own.new_ones(len(segment), prefix), own), dim=1).expand(query.shape[0], 1, -1, -1)
    yield "sdpa", lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    if slow:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k < prefix) | ((k - prefix) // block <= q // block)

        blocks = create_block_mask(visible, None, None, query.shape[2], keys.shape[2], device=DEVICE)
        compiled = torch.compile(flex_attention, dynamic=False)
        yield "flex", lambda: compiled(query, keys, values, block_mask=blocks, enable_gqa=True)


def plain_loss(student: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """The loss as one writes it first: both tensors of logits at once."""
    log_student, log_target = (F.log_softmax((x @ weight.T).float(), dim=-1) for x in (student, target))
    return F.kl_div(log_student, log_target, log_target=True, reduction="none").sum(dim=-1)


def peak_memory(function: Callable[[], object]) -> int:
    """Bytes that a call allocates at its peak beside what was there before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Report:
    """Prints lines as they come and keeps them for the file."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.faults = 0

    def add(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)


def measure(case: Case, timer: Timer, rates: tuple[float, float], report: Report, slow: bool) -> None:
    """Checks one case, times it and its rivals, and adds its row."""
    arguments, options = case.build(torch.device(DEVICE))
    error, tolerance = CHECKS[case.operation](arguments, options, case.call(arguments, options, "triton"))
    right = error <= tolerance  # false for NaN
    report.faults += not right

    def with_gradient(function: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*arguments).sum(), arguments[0])

    def path(kernels: str) -> Callable[[], object]:
        if case.backward:
            return with_gradient(lambda *a: case.call(a, options, kernels))  # type: ignore[arg-type, return-value]
        return lambda: case.call(arguments, options, kernels)

    rivals = [("torch", path("torch"))]
    if case.operation == "packed_block_attention":
        rivals += attention_rivals(arguments, options, slow and case.headline)
    if case.operation == "residual_kl":
        rivals.append(("plain", with_gradient(plain_loss)))
    if slow and case.headline:
        rivals.append(("compile", torch.compile(path("torch"), dynamic=False)))
    own_graph, own_eager = _times(timer, path("triton"), case.backward)
    reached = own_eager if math.isnan(own_graph) else own_graph
    ratios = []
    for name, function in rivals:
        try:
            graph, eager = _times(timer, function, case.backward)
        except Exception as problem:  # a rival that cannot run must not end the benchmark
            ratios.append(f"{name} failed ({type(problem).__name__})")
            continue
        ratio = eager / own_eager if math.isnan(graph / own_graph) else graph / own_graph
        ratios.append(f"{name} {ratio:.2f}x")
    if case.operation == "residual_kl":
        own, plain = peak_memory(path("triton")), peak_memory(with_gradient(plain_loss))
        ratios.append(f"memory {own / 2**20:.0f} MiB, plain {plain / 2**20:.0f} MiB ({plain / own:.1f}x)")
    copy, matrix = (100e6 / (rate * reached) for rate in rates)
    report.add(
        f"| {case.operation} | {case.shape} | {case.bytes_moved / 1e6:.2f} | {case.operations / 1e9:.3f} "
        f"| {error:.1e}{'' if right else ' WRONG'} | {own_graph:.1f} | {own_eager:.1f} "
        f"| {case.bytes_moved * copy:.0f} % | {case.operations * matrix:.0f} % | {', '.join(ratios)} |"
    )


def _times(timer: Timer, function: Callable[[], object], backward: bool) -> tuple[float, float]:
    """(graph, eager) microseconds; a gradient is timed eagerly only, a few times."""
    return (float("nan"), timer.eager(function, 5)) if backward else (timer.graph(function), timer.eager(function))


def run(output: Path, only: str | None) -> int:
    """Runs everything, prints and writes the table; 1 if a kernel is wrong."""
    began = time.monotonic()
    torch.manual_seed(0)
    timer, report = Timer(), Report()
    rates = machine_rates(timer)
    report.add("# Kernels on a GPU")
    report.add("")
    report.add(
        f"`python -m benchmarks.kernels`, {torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, Triton {triton.__version__}, Python {platform.python_version()}. Copy "
        f"{rates[0] / 1e12:.2f} TB/s (read and write), bfloat16 products {rates[1] / 1e12:.0f} TFLOP/s, both measured "
        "here. Median times with a cold L2 cache; `graph` is a CUDA graph's replay, `eager` a call from Python; "
        "ratios say how many times longer the rival takes."
    )
    report.add("")
    report.add("| operation | shape | MB | GFLOP | error | graph us | eager us | of copy | of products | rivals |")
    report.add("|---|---|---|---|---|---|---|---|---|---|")
    for case in all_cases():
        if only is None or case.operation == only:
            measure(case, timer, rates, report, slow=time.monotonic() - began < COMPILE_SECONDS)
            torch.cuda.empty_cache()
    if only is None:
        report.add("")
        model = MODELS[1]
        for prefix in (512, 4096):
            draft, select, backbone = (timer.graph(f) for f in draft_and_backbone(model, prefix, torch.device(DEVICE)))
            report.add(
                f"- {model.name}, batch 1, one block of {BLOCK} on a prefix of {prefix}: draft step {draft:.0f} us, "
                f"shortlist once a round {select:.0f} us, backbone forward {backbone:.0f} us: a draft step is "
                f"{100 * draft / backbone:.1f} % of it."
            )
            torch.cuda.empty_cache()
    report.add("")
    report.add(f"{report.faults} wrong results; {time.monotonic() - began:.0f} s in all.")
    output.write_text("\n".join(report.lines) + "\n")
    return int(report.faults > 0)
