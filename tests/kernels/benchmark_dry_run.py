"""Run in a process of its own under the Triton interpreter: the GPU benchmark on a CPU, small, with a clock of straw.

What a GPU would run is run, but for CUDA's events and graphs: every case's check, every rival (compiled ones traced
whole), the draft step, the report and its verdicts.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from benchmarks import kernel_cases, kernel_timing
from benchmarks.kernel_cases import Model

MODELS = tuple(Model(name, 64, 2, 4, 2, 48, head_dim=16, vocab=203) for name in ("1.7B", "4B"))


class StrawTimer:
    """Calls once; every answer is one microsecond more than the last, so that ratios differ."""

    def __init__(self) -> None:
        self.calls = 0

    def eager(self, function: Callable[[], object], repeats: int = 30) -> float:
        function()
        return self.graph(function)

    def graph(self, function: Callable[[], object]) -> float:
        self.calls += 1
        return float(self.calls)


def main(output: Path) -> None:
    torch.set_num_threads(1)
    compiled = []

    def compile_whole(function: Callable, **options) -> Callable:
        compiled.append(function)
        return original(function, backend="eager", fullgraph=True, **options)

    original = torch.compile
    small = {
        kernel_cases: {
            "MODELS": MODELS,
            "MASK_TOKEN": 199,
            "ATTENTION_SHAPES": ((1, 1, 32), (1, 4, 24), (2, 2, 24)),
            "HEADLINE_ATTENTION": "4B, batch 1, 4 x 16 on 24",
            "LOSS_TOKENS": 80,
            "SHORTLIST": 8,
        },
        kernel_timing: {
            "DEVICE": "cpu",
            "COMPILE_SECONDS": float("inf"),
            "Timer": StrawTimer,
            "machine_rates": lambda timer: (1e12, 1e14),
            "peak_memory": lambda function: 1 + (function() is None),
        },
        torch: {"compile": compile_whole},
        torch.cuda: {"get_device_name": lambda: "straw", "empty_cache": lambda: None},
    }
    patches = [
        mock.patch.object(owner, name, value) for owner, names in small.items() for name, value in names.items()
    ]
    for patch in patches:
        patch.start()
    status = kernel_timing.run(output, None)
    text = output.read_text()
    assert status == 0, text
    assert "failed" not in text.lower(), text
    assert "WRONG" not in text, text
    assert "0 wrong results" in text
    # One of each headline: three of the statistics, attention and flex, both shortlists, inputs, loss, verification.
    assert len(compiled) == 11, compiled
    for rival in ("torch", "compile", "sdpa", "sdpa repeated", "flex", "plain", "memory"):
        assert f"{rival} " in text, rival
    assert text.count("wanted at") == 6, text
    assert "not measured" not in text, text

    # A wrong kernel is seen, and one that cannot run leaves the others their figures.
    from mrp_kernels import mrp_input_triton

    rotate = mrp_input_triton.qk_norm_rope_triton

    def wrong(*arguments, **options):
        query, key = rotate(*arguments, **options)
        return query, key * 1.5

    def broken(*arguments, **options):
        raise RuntimeError("out of shared memory")

    with (
        mock.patch.object(mrp_input_triton, "qk_norm_rope_triton", wrong),
        mock.patch.object(mrp_input_triton, "mrp_input_triton", broken),
        mock.patch.object(kernel_timing, "COMPILE_SECONDS", 0),
    ):
        assert kernel_timing.run(output, "qk_norm_rope") == 1
        assert "WRONG" in output.read_text()
        assert kernel_timing.run(output, "mrp_input") == 1
        assert "FAILED RuntimeError: out of shared memory" in output.read_text()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
