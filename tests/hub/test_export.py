"""mrp-export: what the folder holds, and that it works where this package is not installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hub_checkpoints as official
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from modeling_mrp.head_artifact import save_head
from modeling_mrp.hub import export
from modeling_mrp.hub.check_folder import check_folder
from modeling_mrp.hub.errors import HubError
from modeling_mrp.hub.export import export_model
from modeling_mrp.hub.remote_code import AUTO_MAP, code_files
from modeling_mrp.modeling_mrp import MRPForCausalLM

MODES = ("none", "speculative", "direct", "remask")


def test_the_folder_is_self_contained(converted, exported):
    names = set(os.listdir(exported))
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {file.name for file in code_files()} <= names
    assert not any(path.is_symlink() or path.is_dir() for path in exported.iterdir())
    config = json.loads((exported / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP
    assert config["architectures"] == ["MRPForCausalLM"]
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["mrp_mode"] == "speculative"
    assert "somebody/tiny-mrp" in (exported / "README.md").read_text()
    assert (exported / "model.safetensors").read_bytes() == (converted / "model.safetensors").read_bytes()


def test_remote_code_is_flat_and_needs_only_torch_and_transformers():
    from transformers.dynamic_module_utils import get_imports

    # safetensors and huggingface_hub are requirements of transformers itself.
    allowed = {"torch", "transformers", "numpy", "safetensors", "huggingface_hub"} | set(sys.stdlib_module_names)
    for file in code_files():
        if not file.stem.endswith("_triton"):
            assert set(get_imports(file)) <= allowed, file.name


def test_a_clean_interpreter_generates_the_same_ids_in_every_mode(converted, exported):
    """Without this package, without triton, in a process of its own: the ids of the source model."""
    report = check_folder(exported, new_tokens=24, hide_triton=True)
    model = MRPForCausalLM.from_pretrained(converted).eval()
    prompt = AutoTokenizer.from_pretrained(converted)("3 + 4 =", return_tensors="pt")["input_ids"]
    assert report["missing"] == []
    for mode in MODES:
        ids = model.generate(prompt, mrp_mode=mode, max_new_tokens=24)[0, prompt.shape[1] :].tolist()
        assert report["modes"][mode]["ids"] == ids, mode
    assert report["modes"]["speculative"]["ids"] == report["modes"]["none"]["ids"]


def test_a_broken_folder_does_not_pass_the_check(exported, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(exported, folder)
    (folder / "advance.py").unlink()
    with pytest.raises(HubError, match=r"does not work in a clean interpreter:(.|\n)*advance"):
        check_folder(folder)


def test_save_pretrained_of_a_remote_model_exports_again(converted, tmp_path):
    """Training output: no card, no auto_map of ours, junk beside the weights."""
    model = MRPForCausalLM.from_pretrained(converted)
    model.save_pretrained(tmp_path / "trained", max_shard_size="40KB")
    for junk in ("optimizer.pt", "trainer_state.json", "training_args.bin"):
        (tmp_path / "trained" / junk).write_bytes(b"junk")
    path = tmp_path / "trained" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_new_tokens": 5, "_from_model_config": True}))
    folder = export_model(tmp_path / "trained", tmp_path / "out", license="mit", base_model="JetLM/SDAR-4B-Chat")
    names = set(os.listdir(folder))
    assert not names & {"optimizer.pt", "trainer_state.json", "training_args.bin"}
    assert "model.safetensors.index.json" in names
    generation = json.loads((folder / "generation_config.json").read_text())
    assert not set(generation) & {"max_new_tokens", "_from_model_config"}
    card = (folder / "README.md").read_text()
    assert "license: mit" in card
    assert "base_model: JetLM/SDAR-4B-Chat" in card
    # Exported again, the card's metadata is kept.
    again = export_model(folder, tmp_path / "again")
    assert "license: mit" in (again / "README.md").read_text()
    other = MRPForCausalLM.from_pretrained(again)
    assert all(torch.equal(p, other.get_parameter(n)) for n, p in model.named_parameters())


def test_heads_stored_apart_are_carried_along(converted, tmp_path):
    """The tiny model's direct control, or `mrp_head` of `mrp-train` with `save: both`."""
    shutil.copytree(converted, tmp_path / "source")
    model = MRPForCausalLM.from_pretrained(converted)
    with torch.no_grad():
        model.mrp.eh_proj.weight.mul_(3)
    model.config.head_prediction = "direct"
    for name in ("mrp_head", "direct_head"):
        save_head(model, tmp_path / "source", name=name)
    (tmp_path / "source" / "stray.json").write_text("{}")
    save_file({"x": torch.ones(1)}, tmp_path / "source" / "stray.safetensors")
    folder = export_model(tmp_path / "source", tmp_path / "out")
    assert not list(folder.glob("stray*"))
    for head in (folder, folder / "direct_head.safetensors"):
        other = MRPForCausalLM.from_pretrained(folder, mrp_head=str(head))
        assert other.config.head_prediction == "direct"
        assert torch.equal(other.mrp.eh_proj.weight, model.mrp.eh_proj.weight)
    own = MRPForCausalLM.from_pretrained(folder)
    assert own.config.head_prediction == "residual"
    assert not torch.equal(own.mrp.eh_proj.weight, model.mrp.eh_proj.weight)
    os.truncate(tmp_path / "source" / "direct_head.safetensors", 1000)
    with pytest.raises(HubError, match=r"direct_head\.safetensors is truncated"):
        export_model(tmp_path / "source", tmp_path / "again")


def test_what_cannot_be_exported_is_said(tmp_path, converted):
    official.write_checkpoint(tmp_path / "official")
    with pytest.raises(HubError, match="Convert it with mrp-convert first"):
        export_model(tmp_path / "official", tmp_path / "out")
    shutil.copytree(converted, tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").unlink()
    with pytest.raises(HubError, match="holds no safetensors file"):
        export_model(tmp_path / "half", tmp_path / "out")
    with pytest.raises(HubError, match="exists and is not empty"):
        export_model(converted, tmp_path / "half")
    assert not (tmp_path / "out").exists()


def test_the_command(converted, tmp_path):
    import typer

    app = typer.Typer()
    app.command()(export.command)
    (tmp_path / "figures.md").write_text("3.1 tokens per forward on two CPU cores.")
    arguments = [converted, tmp_path / "out", "--figures", tmp_path / "figures.md", "--kernels", tmp_path / "kernels"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    assert "3.1 tokens per forward" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "kernels" / "build" / "torch-cuda" / "metadata.json").exists()


def test_a_push_without_a_network_is_said(exported, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"cannot push to 'me/model': .*offline mode"):
        export.push_folder(exported, "me/model", token="hf_x")


def test_the_kernel_repository_loads_with_the_kernels_library(tmp_path):
    """In a process of its own, offline, without this package: the Hub library's own loader, on its CPU build."""
    python = os.environ.get("MRP_KERNELS_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "from kernels import get_local_kernel"], cwd=tmp_path).returncode:
        pytest.skip("the library `kernels` is not installed")
    from modeling_mrp.hub.kernel_repository import export_kernels

    folder = export_kernels(tmp_path / "repository")
    assert {path.name for path in (folder / "build").iterdir()} == {"torch-cpu", "torch-cuda", "torch-rocm"}
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "sys.modules['mrp_kernels'] = sys.modules['modeling_mrp'] = None\n"
        "from kernels import get_local_kernel\n"
        "import torch\n"
        "kernel = get_local_kernel(Path(sys.argv[1]), backend='cpu')\n"
        "logits = torch.tensor([[0.0, 3.0, 1.0]])\n"
        "print(kernel.reveal_statistics(logits).token.tolist(), kernel.__file__)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [python, "-c", script, str(folder)], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("[1]")
    assert str(Path("build") / "torch-cpu") in run.stdout
