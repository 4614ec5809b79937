"""Correctness and speed of every kernel on a CUDA machine, against that machine's own copy and matrix rates."""

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mrp_kernels
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from . import kernel_cases
from .kernel_cases import BLOCK, Case, all_cases
from .kernel_checks import CHECKS
from .kernel_draft_step import draft_and_backbone

FLUSH_BYTES = 2**28  # several times the largest L2 cache
DEVICE = "cuda"
COMPILE_SECONDS = 200  # after these, torch.compile and flex attention are left out, to stay below eight minutes
CALLS = 8  # of a function in one CUDA graph
COLUMNS = (
    "operation", "shape", "MB", "GFLOP", "error", "graph us", "eager us", "of copy", "of equal copy", "of products",
    "rivals",
)  # fmt: skip


class Timer:
    """Median time of a call with a cold L2 cache, in microseconds.

    The cache is cleared by reading: what a write leaves in it would be written back at the measured call's cost.
    """

    def __init__(self) -> None:
        self.buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=DEVICE)
        self.sink = torch.zeros((), dtype=torch.float32, device=DEVICE)

    def flush(self) -> None:
        torch.sum(self.buffer, dim=0, out=self.sink)

    def eager(self, function: Callable[[], object], repeats: int = 30) -> float:
        """As launched from Python; clearing the cache hides part of the launch time, as other work would."""
        for _ in range(3):
            function()
        times = []
        for _ in range(repeats):
            self.flush()
            times.append(_elapsed(function))
        return statistics.median(times)

    def graph(self, function: Callable[[], object], repeats: int = 15) -> float:
        """The machine's time alone: what a call adds to a CUDA graph of flushes. NaN if it cannot be captured."""
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function()
                self.flush()
            torch.cuda.current_stream().wait_stream(stream)
            graphs = [self._captured(function), self._captured(lambda: None)]
        except RuntimeError:
            torch.cuda.synchronize()
            return float("nan")
        times = [[_elapsed(graph.replay) for graph in graphs] for _ in range(repeats)]
        busy, idle = (statistics.median(column) for column in zip(*times[2:], strict=True))
        return max(busy - idle, 0.0) / CALLS or float("nan")

    def _captured(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                self.flush()
                function()
        return graph


def _elapsed(function: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    stop.record()
    stop.synchronize()
    return 1000 * start.elapsed_time(stop)


def machine_rates(timer: Timer) -> tuple[float, float]:
    """Measured copy bandwidth in bytes per second (read and write counted) and bfloat16 matrix rate in operations."""
    source = torch.empty(2**30, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / timer.eager(lambda: target.copy_(source), 20) * 1e6
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return copy, 2 * 8192**3 / timer.eager(lambda: a @ b, 20) * 1e6


class EqualCopies:
    """Microseconds of a copy that moves as many bytes as a case, in a graph: what starting it leaves attainable."""

    def __init__(self, timer: Timer) -> None:
        self.timer, self.known = timer, dict[int, float]()

    def microseconds(self, bytes_moved: int) -> float:
        half = max(1, bytes_moved // 2)
        if half not in self.known:
            source = torch.zeros(half, dtype=torch.int8, device=DEVICE)
            target = torch.empty_like(source)
            self.known[half] = self.timer.graph(lambda: target.copy_(source))
        return self.known[half]


Rivals = Iterator[tuple[str, Callable[[], object]]]


def attention_rivals(arguments: tuple, options: dict, slow: bool) -> Rivals:
    """SDPA with a mask and flex attention; prefix and new keys are joined for them beforehand, free of charge.

    SDPA twice: with grouped heads, and with heads repeated first, as transformers does where there is a mask.
    """
    query, key, value = arguments
    prefix, block = options["max_prefix_length"], options["block"]
    keys = torch.cat((options["cache_key"][:, :, :prefix], key), dim=2)
    values = torch.cat((options["cache_value"][:, :, :prefix], value), dim=2)
    segment = torch.arange(query.shape[2], device=query.device) // block
    own = segment[:, None] >= segment[None, :]
    mask = torch.cat((own.new_ones(len(segment), prefix), own), dim=1).expand(query.shape[0], 1, -1, -1)
    group = query.shape[1] // key.shape[1]

    def repeated() -> Tensor:
        all_keys, all_values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        return F.scaled_dot_product_attention(query, all_keys, all_values, attn_mask=mask)

    yield "sdpa", lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    yield "sdpa repeated", repeated
    if slow:

        def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k < prefix) | ((k - prefix) // block <= q // block)

        def flex() -> Callable[[], object]:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            blocks = create_block_mask(visible, None, None, query.shape[2], keys.shape[2], device=DEVICE)
            compiled = compile_fresh(flex_attention)
            return lambda: compiled(query, keys, values, block_mask=blocks, enable_gqa=True)

        yield "flex", _prepared_once(flex)


def compile_fresh(function: Callable) -> Callable:
    """`torch.compile` without what was compiled before: past eight versions of a function it would stay eager."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def _prepared_once(prepare: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """A call that prepares itself when it is first made, where a failure is the rival's and not the benchmark's."""
    ready: list[Callable[[], object]] = []

    def call() -> object:
        if not ready:
            ready.append(prepare())
        return ready[0]()

    return call


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


@dataclass
class Measured:
    """One case's figures: microseconds (NaN: could not be captured), shares in % of the copy rate and of a copy of as
    many bytes, rivals' times over it."""

    graph: float
    eager: float
    of_copy: float
    of_equal_copy: float
    ratios: dict[str, float] = field(default_factory=dict)


def measure(
    case: Case, timer: Timer, rates: tuple[float, float], copies: EqualCopies, report: Report, slow: bool
) -> Measured | None:
    """Checks one case, times it and its rivals, and adds its row; `None` if it cannot run."""
    try:
        arguments, options = case.build(torch.device(DEVICE))
        error, tolerance = CHECKS[case.operation](arguments, options, case.call(arguments, options, "triton"))
        calls = _paths(case, arguments, options, slow)
        own_graph, own_eager = _times(timer, calls.pop("triton"), case.backward)
    except Exception as problem:  # the other kernels are worth their figures nevertheless
        report.faults += 1
        report.add(f"| {case.operation} | {case.shape} | | | FAILED {_short(problem)} | | | | | | |")
        return None
    right = error <= tolerance  # false for NaN
    report.faults += not right
    reached = _reached(own_graph, own_eager)
    shares = [100e6 / (rate * reached) for rate in rates]
    of_equal_copy = 100 * copies.microseconds(case.bytes_moved) / reached
    measured = Measured(own_graph, own_eager, case.bytes_moved * shares[0], of_equal_copy)
    notes = []
    for name, function in calls.items():
        try:
            graph, eager = _times(timer, function, case.backward)
        except Exception as problem:  # a rival that cannot run must not end the benchmark
            notes.append(f"{name} failed ({_short(problem)})")
            continue
        measured.ratios[name] = eager / own_eager if math.isnan(graph / own_graph) else graph / own_graph
        notes.append(f"{name} {measured.ratios[name]:.2f}x")
    if case.operation == "residual_kl":
        try:
            own, plain = (peak_memory(_paths(case, arguments, options, False)[name]) for name in ("triton", "plain"))
            measured.ratios["memory"] = plain / own
            notes.append(f"memory {own / 2**20:.0f} MiB, plain {plain / 2**20:.0f} MiB ({plain / own:.1f}x)")
        except torch.OutOfMemoryError:
            notes.append("plain does not fit into memory")
    report.add(
        f"| {case.operation} | {case.shape} | {case.bytes_moved / 1e6:.2f} | {case.operations / 1e9:.3f} "
        f"| {error:.1e}{'' if right else ' WRONG'} | {own_graph:.1f} | {own_eager:.1f} "
        f"| {measured.of_copy:.0f} % | {measured.of_equal_copy:.0f} % | {case.operations * shares[1]:.0f} % "
        f"| {', '.join(notes)} |"
    )
    return measured


def _paths(case: Case, arguments: tuple, options: dict, slow: bool) -> dict[str, Callable[[], object]]:
    """What is timed: the kernel and its rivals, each a call without arguments."""
    operation = getattr(mrp_kernels, case.operation)

    def path(kernels: str) -> Callable[..., object]:
        return lambda *tensors: operation(*tensors, kernels=kernels, **options)

    def called(function: Callable[..., object]) -> Callable[[], object]:
        if case.backward:
            # The backward pass is torch's own business also where the forward pass is compiled.
            return lambda: torch.autograd.grad(function(*arguments).sum(), arguments[0])  # type: ignore[attr-defined]
        return lambda: function(*arguments)

    calls = {"triton": called(path("triton")), "torch": called(path("torch"))}
    if case.operation == "packed_block_attention":
        calls.update(attention_rivals(arguments, options, slow and case.headline))
    if case.operation == "residual_kl":
        calls["plain"] = called(plain_loss)
    if slow and case.headline:
        calls["compile"] = _prepared_once(lambda: called(compile_fresh(path("torch"))))
    return calls


def _short(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"[:120]


def _times(timer: Timer, function: Callable[[], object], backward: bool) -> tuple[float, float]:
    """(graph, eager) microseconds; a gradient is timed eagerly only, a few times."""
    return (float("nan"), timer.eager(function, 5)) if backward else (timer.graph(function), timer.eager(function))


def _reached(graph: float, eager: float) -> float:
    return eager if math.isnan(graph) else graph


def targets(found: dict[tuple[str, str], Measured], drafts: dict[int, float]) -> Iterator[str]:
    """What was aimed at, and what was reached; `drafts` is a draft step's share of the backbone, by prefix."""
    vocab, name = kernel_cases.MODELS[0].vocab, kernel_cases.MODELS[1].name
    missing = Measured(math.nan, math.nan, math.nan, math.nan)
    greedy = found.get(("reveal_statistics", f"64 x {vocab}, greedy"), missing)
    yield _verdict("statistics, share of copy bandwidth in %", greedy.of_copy, at_least=85)
    yield _verdict("the same, in % of a copy of as many bytes", greedy.of_equal_copy, at_least=85)
    attention = found.get(("packed_block_attention", kernel_cases.HEADLINE_ATTENTION), missing).ratios
    sdpa = min((attention.get(rival, math.nan) for rival in ("sdpa", "sdpa repeated")), default=math.nan)
    yield _verdict("packed attention, times SDPA with a mask (the faster of two)", sdpa, at_least=1.5)
    for prefix, share in drafts.items():
        yield _verdict(f"draft step of {name} on {prefix}, % of a backbone forward", share, at_most=10)
    loss = next((case.ratios for (operation, _), case in found.items() if operation == "residual_kl"), {})
    yield _verdict("loss, memory of the plain version over its own", loss.get("memory", math.nan), at_least=8)
    yield _verdict("loss, time of the plain version over its own", loss.get("plain", math.nan), at_least=1)


def _verdict(what: str, value: float, at_least: float = -math.inf, at_most: float = math.inf) -> str:
    wanted = f"at least {at_least:g}" if at_least > -math.inf else f"at most {at_most:g}"
    reached = "not measured" if math.isnan(value) else "reached" if at_least <= value <= at_most else "missed"
    return f"- {what}: {value:.2f}, wanted {wanted}: {reached}"


def run(output: Path, only: str | None) -> int:
    """Runs everything, prints and writes the table; 1 if a kernel is wrong."""
    began = time.monotonic()
    torch.manual_seed(0)
    timer, report = Timer(), Report()
    rates, copies = machine_rates(timer), EqualCopies(timer)
    report.add("# Kernels on a GPU")
    report.add("")
    report.add(
        f"`python -m benchmarks.kernels`, {torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, Triton {triton.__version__}, Python {platform.python_version()}. Copy "
        f"{rates[0] / 1e12:.2f} TB/s (read and write), bfloat16 products {rates[1] / 1e12:.0f} TFLOP/s, both measured "
        "here. Median times with a cold L2 cache; `graph` is what a call adds to a CUDA graph, `eager` a call from "
        "Python; "
        "ratios say how many times longer the rival takes. `of equal copy` compares with a copy of as many bytes: "
        "where a call lasts a few microseconds, starting it is a good part of them for any kernel."
    )
    report.add("")
    report.add("| " + " | ".join(COLUMNS) + " |")
    report.add("|---" * len(COLUMNS) + "|")
    found: dict[tuple[str, str], Measured] = {}
    drafts: dict[int, float] = {}
    for case in all_cases():
        if only is None or case.operation == only:
            slow = time.monotonic() - began < COMPILE_SECONDS
            if (measured := measure(case, timer, rates, copies, report, slow)) is not None:
                found[case.operation, case.shape] = measured
            torch.cuda.empty_cache()
    if only is None:
        report.add("")
        model = kernel_cases.MODELS[1]
        for prefix in (512, 4096):
            calls = draft_and_backbone(model, prefix, torch.device(DEVICE))
            draft, select, backbone = (_reached(*_times(timer, call, False)) for call in calls)
            drafts[prefix] = 100 * draft / backbone
            report.add(
                f"- {model.name}, batch 1, one block of {BLOCK} on a prefix of {prefix}: draft step {draft:.0f} us, "
                f"shortlist once a round {select:.0f} us, backbone forward {backbone:.0f} us: a draft step is "
                f"{drafts[prefix]:.1f} % of it."
            )
            del calls
            torch.cuda.empty_cache()
        report.add("")
        for line in targets(found, drafts):
            report.add(line)
    report.add("")
    report.add(f"{report.faults} wrong results; {time.monotonic() - began:.0f} s in all.")
    output.write_text("\n".join(report.lines) + "\n")
    return int(report.faults > 0)
