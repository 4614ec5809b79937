"""Dispatch, user errors, and the three ways the files travel: package, model folder, Hub kernel repository."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mrp_kernels
import pytest
import torch
from inputs import attention_inputs, noise_of
from mrp_kernels import kernel_dispatch
from mrp_kernels.build_hub import build_hub

SOURCES = Path(mrp_kernels.__file__).parent
ROOT = Path(__file__).parents[2]


def run_python(code: str, cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env={**clean, **environment}
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_dispatch(monkeypatch):
    assert mrp_kernels.resolve_kernels("auto", "cpu") == "torch"
    assert mrp_kernels.resolve_kernels("torch", "cuda") == "torch"
    with pytest.raises(ValueError, match="'cuda11' is unknown"):
        mrp_kernels.resolve_kernels("cuda11", "cpu")
    monkeypatch.setattr(kernel_dispatch, "triton_is_available", lambda: True)
    monkeypatch.setattr(kernel_dispatch, "_interpreted", lambda: False)
    assert mrp_kernels.resolve_kernels("auto", "cuda") == "triton"
    with pytest.raises(ValueError, match="cannot run on a 'cpu' device"):
        mrp_kernels.resolve_kernels("triton", "cpu")
    monkeypatch.setattr(kernel_dispatch, "triton_is_available", lambda: False)
    assert mrp_kernels.resolve_kernels("auto", "cuda") == "torch"
    with pytest.raises(ImportError, match="needs the package triton"):
        mrp_kernels.resolve_kernels("triton", "cuda")


def test_a_gradient_is_never_lost_to_a_kernel_that_has_none(monkeypatch):
    """On a GPU the head's training forward must take the twin."""
    module = importlib.import_module("mrp_kernels.mrp_input")
    monkeypatch.setattr(module, "resolve_kernels", lambda kernels, device: "triton")
    x, norm = torch.randn(1, 3, 2, 4, requires_grad=True), torch.ones(4)
    cos, sin = torch.ones(1, 3, 4), torch.zeros(1, 3, 4)
    assert mrp_kernels.qk_norm_rope(x, x, norm, norm, cos, sin)[0].requires_grad
    with pytest.raises(ValueError, match="has no gradient here"):
        mrp_kernels.qk_norm_rope(x, x, norm, norm, cos, sin, kernels="triton")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": 9}, r"mask_token_id=9 is outside the vocabulary \[0, 9\)"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"residual": torch.zeros(2, 8)}, "residual"),
        ({"noise": noise_of(3)}, "noise.row"),
    ],
)
def test_statistics_errors(options, message):
    with pytest.raises(ValueError, match=message):
        mrp_kernels.reveal_statistics(torch.zeros(2, 9), **options)


def test_shape_errors():
    arguments, options = attention_inputs(2, 4, 2, 3, 4, 16, [3, 5], torch.float32)
    for change, message in (
        ({"block": 5}, "do not make whole segments of block=5"),
        ({"visibility": torch.zeros(2, 2, dtype=torch.int64)}, "visibility"),
        ({"visibility": torch.zeros(2, 3)}, "bool or int64"),
        ({"commit": torch.zeros(3)}, "commit"),
        ({"max_prefix_length": 99}, "max_prefix_length=99"),
        ({"scaling": 0.0}, "scaling=0.0 must be positive"),
        ({"cache_value": options["cache_value"][:1]}, r"cache_value \[1, 2, 9, 16\] must have the shape \[2, 2, 9"),
        ({"prefix_length": torch.zeros(1)}, r"prefix_length \[1\] must have the shape \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            mrp_kernels.packed_block_attention(*arguments, **{**options, **change})
    arguments, options = attention_inputs(1, 1, 1, 65, 1, 16, [3], torch.float32)
    with pytest.raises(ValueError, match="65 segments"):
        mrp_kernels.packed_block_attention(*arguments, **options)
    with pytest.raises(ValueError, match="size=9 must be between 2 and 8"):
        mrp_kernels.shortlist(torch.zeros(2, 9), 9, mask_token_id=1)
    with pytest.raises(ValueError, match="must both be"):
        mrp_kernels.residual_kl(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(9, 4))
    ids, state, norm = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4), torch.zeros(4)
    with pytest.raises(ValueError, match="projection"):
        mrp_kernels.mrp_input(ids, state, torch.zeros(9, 4), norm, norm, torch.zeros(4, 4))
    x, cos = torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match="cos"):
        mrp_kernels.qk_norm_rope(x, x, torch.zeros(4), torch.zeros(4), cos, cos)
    rope = (norm, norm, torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))
    place = torch.zeros(1, 2, 3, 4)
    for change, message in (
        ({"value": x}, "belong together"),
        ({"value": x, "out": (place, place[:, :1])}, "must be twice"),
        ({"value": x, "out": (place, torch.zeros(1, 3, 2, 4).transpose(1, 2))}, "must be equal and end with 1"),
    ):
        with pytest.raises(ValueError, match=message):
            mrp_kernels.qk_norm_rope(x, x, *rope, **change)


def test_the_twins_need_neither_triton_nor_transformers():
    code = (
        "import sys; sys.modules.update(triton=None, transformers=None)\n"
        "import torch, mrp_kernels as k\n"
        "k.reveal_statistics(torch.randn(2, 9)); k.shortlist(torch.randn(2, 9), 3)\n"
        "k.residual_kl(torch.randn(2, 4), torch.randn(2, 4), torch.randn(9, 4))\n"
        "print([name for name in sys.modules if name.endswith('_triton')])"
    )
    assert run_python(code, SOURCES.parent) == "[]"


def test_transformers_accepts_the_files_as_remote_code(tmp_path):
    """Flat copies beside a model file: only torch is demanded, and the closure holds all it needs."""
    utilities = pytest.importorskip("transformers.dynamic_module_utils")
    for path in SOURCES.glob("*.py"):
        if path.name not in ("__init__.py", "build_hub.py"):
            shutil.copy(path, tmp_path)
            assert set(utilities.get_imports(path)) <= {"torch", *sys.stdlib_module_names}
    model = tmp_path / "modeling_probe.py"
    names = (
        "reveal_statistics", "packed_block_attention", "shortlist_residual", "mrp_input", "lattice_states",
        "residual_kl", "verify_states",
    )  # fmt: skip
    model.write_text("".join(f"from .{name} import {name}\n" for name in names))
    closure = {Path(path).name for path in utilities.get_relative_import_files(model)}
    assert closure == {path.name for path in tmp_path.glob("*.py")} - {"modeling_probe.py"}


def test_the_folder_makes_way_for_the_library_of_its_name(tmp_path):
    library = tmp_path / "kernels"
    library.mkdir()
    (library / "__init__.py").write_text("from .part import VALUE\n")
    (library / "part.py").write_text("VALUE = 41\n")
    code = "import kernels, kernels.part, mrp_kernels; print(kernels.VALUE, mrp_kernels.NoiseKey.__name__)"
    assert run_python(code, ROOT, PYTHONPATH=str(tmp_path)) == "41 NoiseKey"


def test_transformers_is_not_misled_by_the_folder():
    pytest.importorskip("transformers")
    code = "from transformers import Qwen3Config, Qwen3ForCausalLM; print('loaded')"
    assert run_python(code, ROOT).endswith("loaded")


def test_hub_layout_loads_as_a_local_kernel(tmp_path):
    variants = build_hub(tmp_path)
    assert [path.name for path in variants] == ["torch-cpu", "torch-cuda", "torch-rocm"]
    assert build_hub(tmp_path) == variants
    (variants[0] / "stranger.py").write_text("")
    with pytest.raises(FileExistsError, match="holds stranger"):
        build_hub(tmp_path)
    (variants[0] / "stranger.py").unlink()
    if importlib.util.find_spec("kernels.load") is None:
        pytest.skip("the PyPI library kernels is not installed")
    code = (
        "from pathlib import Path; import torch; from kernels import get_local_kernel\n"
        f"k = get_local_kernel(Path({str(tmp_path)!r}), backend='cpu')\n"
        "print(k.reveal_statistics(torch.tensor([[0.0, 2.0, 1.0]])).token.item(), 'mrp_kernels' in k.__name__)"
    )
    assert run_python(code, tmp_path) == "1 True"
