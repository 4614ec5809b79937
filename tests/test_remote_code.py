"""A stranger's machine: trust_remote_code in a process without this package, triton, peft or flash_attn.

One child process a folder does everything (transformers takes seconds to import); the tests look at its report.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from paths import ROOT

from benchmarks.random_models import random_model
from modeling_mrp import MRPForCausalLM

TINY = ROOT / "hub_configs" / "sdar-tiny-mrp"
MODES = ("none", "speculative", "direct", "remask")
ARGUMENTS = {"max_new_tokens": 12, "confidence_threshold": 0.5}
CHILD = """
import json, sys
for name in ("modeling_mrp", "mrp_kernels", "triton", "peft", "flash_attn"):
    sys.modules[name] = None  # an import of it fails
import torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder, repository, target, arguments = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
prompt = torch.arange(5, 16)[None]
report = {}

def look_at(name, auto, place):
    model = auto.from_pretrained(place, trust_remote_code=True, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(place, trust_remote_code=True)
    with torch.no_grad():
        logits = model(prompt, revealed_ids=prompt[None])
    report[name] = {
        "module": type(model).__module__,
        "config": type(config).__name__,
        "first": [float(model.model.rotary_emb.inv_freq[0]), float(model.mrp.rotary_emb.inv_freq[0])],
        "logits": logits.logits.double().sum().item(),
        "residual": logits.residual_logits.double().sum().item(),
        "ids": {mode: model.generate(prompt, mrp_mode=mode, **arguments)[0].tolist() for mode in MODES},
        "generation_config": type(model.generation_config).__name__,
    }
    return model

MODES = ("none", "speculative", "direct", "remask")
look_at("folder", AutoModelForCausalLM, folder)
model = look_at("base class", AutoModel, folder)
model.save_pretrained(target)
look_at("saved", AutoModelForCausalLM, target)
look_at("repository", AutoModelForCausalLM, repository)
report["imported"] = sorted(name for name in sys.modules if name.split(".")[0] in ("triton", "peft", "flash_attn")
                            and sys.modules[name] is not None)
print("REPORT" + json.dumps(report))
"""


def put_into_hub_cache(folder, home, repository):
    """An offline Hub cache that holds `folder` as `repository`."""
    place = home / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = place / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)


def ask_child(folder, work):
    repository = "somebody/tiny-mrp"
    put_into_hub_cache(folder, work / "home", repository)
    environment = {
        **os.environ, "HF_HOME": str(work / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "HF_MODULES_CACHE": str(work / "modules"),
    }  # fmt: skip
    environment.pop("HF_HUB_CACHE", None), environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", CHILD, str(folder), repository, str(work / "saved"), json.dumps(ARGUMENTS)]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.split("REPORT")[1])


@pytest.fixture(scope="module", params=["random", "tiny"])
def loaded(request, tmp_path_factory):
    """(the child's report, the model here)."""
    work = tmp_path_factory.mktemp(request.param)
    if request.param == "tiny":
        if not (TINY / "model.safetensors").exists():
            pytest.skip("hub_configs/sdar-tiny-mrp has no weights yet")
        folder = TINY
    else:
        folder = work / "folder"
        random_model(3).save_pretrained(folder)
    model = MRPForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return ask_child(folder, work), model


PLACES = ("folder", "base class", "saved", "repository")


@pytest.mark.parametrize("place", PLACES)
def test_loads_without_the_package(loaded, place):
    """Guards a closure of remote code that misses a file, imports the package, or needs triton on a CPU."""
    report = loaded[0][place]
    assert report["module"].startswith("transformers_modules.")
    assert report["config"] == "MRPConfig"
    assert report["generation_config"] == "MRPGenerationConfig"
    assert loaded[0]["imported"] == []


@pytest.mark.parametrize("place", PLACES)
def test_same_results_as_the_package(loaded, place):
    """Guards weights or buffers lost on the way: same logits, same ids in every mode, also after saving again."""
    report, model = loaded[0][place], loaded[1]
    prompt = torch.arange(5, 16)[None]
    with torch.no_grad():
        wanted = model(prompt, revealed_ids=prompt[None])
    assert report["logits"] == pytest.approx(wanted.logits.double().sum().item(), rel=1e-4, abs=1e-2)
    assert report["residual"] == pytest.approx(wanted.residual_logits.double().sum().item(), rel=1e-4, abs=1e-2)
    assert report["first"] == [1.0, 1.0]
    for mode in MODES:
        assert report["ids"][mode] == model.generate(prompt, mrp_mode=mode, **ARGUMENTS)[0].tolist(), mode
    assert report["ids"]["speculative"] == report["ids"]["none"]
    assert report["logits"] == loaded[0]["folder"]["logits"]


def closure(entry):
    """The files that transformers copies: `from .name import` lines, followed."""
    found, open_ = set(), [entry]
    while open_:
        name = open_.pop()
        if name not in found:
            found.add(name)
            source = (ROOT / "modeling_mrp" / f"{name}.py").read_text()
            open_ += re.findall(r"^\s*from \.(\w+) import", source, re.MULTILINE)
    return found


def test_the_shipped_folder_holds_the_whole_closure():
    """Guards a module added to the package and forgotten in the folder that loads as it stands."""
    needed = closure("modeling_mrp") | closure("configuration_mrp")
    present = {path.stem for path in TINY.glob("*.py")}
    assert needed <= present, sorted(needed - present)
    for name in needed:
        assert (TINY / f"{name}.py").read_text() == (ROOT / "modeling_mrp" / f"{name}.py").read_text()


def test_remote_code_keeps_to_what_transformers_can_copy():
    """Guards import forms on which transformers' copying breaks: `from . import x`, dotted relative imports."""
    for name in closure("modeling_mrp"):
        source = (ROOT / "modeling_mrp" / f"{name}.py").read_text()
        assert not re.search(r"^\s*from \. import", source, re.MULTILINE), name
        assert not re.search(r"^\s*from \.\w+\.\w+ import", source, re.MULTILINE), name
        assert not re.search(r"^\s*from \.\.", source, re.MULTILINE), name
        assert not re.search(r"^\s*(import|from) modeling_mrp", source, re.MULTILINE), name
