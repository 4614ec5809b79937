"""push_to_hub and loading by repository id, against a Hub on the loopback device; then from its cache, offline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_hub
import pytest

PUSH = """
import sys
from modeling_mrp import MRPForCausalLM
from modeling_mrp.hub.errors import HubError
from modeling_mrp.hub.export import push_folder
from transformers import AutoTokenizer
print(push_folder(sys.argv[1], "somebody/exported"))
model = MRPForCausalLM.from_pretrained(sys.argv[1])
model.push_to_hub("somebody/pushed")
AutoTokenizer.from_pretrained(sys.argv[1]).push_to_hub("somebody/pushed")
try:
    push_folder(sys.argv[1], "some body/??")
except HubError as error:
    print("REFUSED", error)
try:
    push_folder(sys.argv[1], "somebody/exported", token="hf_wrong")
except HubError as error:
    print("REFUSED", error)
"""
LOAD = """
import json, sys
sys.modules["modeling_mrp"] = sys.modules["mrp_kernels"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
result = {}
for name in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    prompt = tokenizer("3 + 4 =", return_tensors="pt")
    result[name] = {
        mode: model.generate(**prompt, mrp_mode=mode, max_new_tokens=12)[0].tolist()
        for mode in ("none", "speculative", "direct", "remask")
    }
print("RESULT" + json.dumps(result))
"""


def run(script: str, *arguments: str, home: Path, **environment: str) -> str:
    home.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    settings = {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=home,
        env={**kept, **settings, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def hub():
    server = fake_hub.FakeHub()
    yield server
    server.close()


def test_push_load_by_id_and_load_offline(hub, converted, exported, tmp_path):
    from transformers import AutoTokenizer

    from modeling_mrp.modeling_mrp import MRPForCausalLM

    online = {"HF_ENDPOINT": hub.url, "HF_TOKEN": fake_hub.TOKEN}
    output = run(PUSH, str(exported), home=tmp_path / "author", **online)
    assert f"{hub.url}/somebody/exported/commit/" in output
    assert output.count("REFUSED") == 2
    assert hub.unknown == []
    pushed = hub.repositories["somebody/exported"]
    assert {p.name for p in exported.iterdir()} <= set(pushed)
    assert pushed["model.safetensors"] == (exported / "model.safetensors").read_bytes()
    assert "verify_states.py" in hub.repositories["somebody/pushed"]
    assert json.loads(hub.repositories["somebody/pushed"]["generation_config.json"])["mrp_mode"] == "speculative"

    names = ("somebody/exported", "somebody/pushed")
    reader = tmp_path / "reader"
    loaded = json.loads(run(LOAD, *names, home=reader, HF_ENDPOINT=hub.url).split("RESULT")[1])
    hub.close()
    offline = json.loads(run(LOAD, *names, home=reader, HF_HUB_OFFLINE="1").split("RESULT")[1])

    model = MRPForCausalLM.from_pretrained(converted).eval()
    prompt = AutoTokenizer.from_pretrained(converted)("3 + 4 =", return_tensors="pt")
    for mode in ("none", "speculative", "direct", "remask"):
        ids = model.generate(**prompt, mrp_mode=mode, max_new_tokens=12)[0].tolist()
        for name in names:
            assert loaded[name][mode] == offline[name][mode] == ids, (name, mode)
