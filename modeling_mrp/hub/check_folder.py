"""`mrp-export --check`: loads a folder the way a stranger does, in an interpreter that lacks this package."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .errors import HubError

# Runs in the other interpreter. None in sys.modules makes an import fail, so that only the folder's own code is used.
_SCRIPT = """
import json, sys
for name in ("modeling_mrp", "mrp_kernels", "triton") if {hide_triton} else ("modeling_mrp", "mrp_kernels"):
    sys.modules[name] = None
import torch
from transformers import AutoModelForCausalLM
folder, tokens = sys.argv[1], int(sys.argv[2])
model, info = AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, dtype="auto", output_loading_info=True
)
model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
try:
    from transformers import AutoTokenizer
    prompt = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("3 + 4 =", return_tensors="pt")
    prompt = prompt["input_ids"]
except (OSError, ValueError):
    prompt = torch.arange(1, 8)[None]
prompt = prompt.to(model.device)
has_head = not any(key.startswith("mrp.") for key in info["missing_keys"])
modes = ["none", "speculative"] + (["direct", "remask"] if has_head else [])
report = {{"missing": sorted(info["missing_keys"]), "modes": {{}}}}
for mode in modes:
    output = model.generate(
        prompt, mrp_mode=mode, drafter="head" if has_head else "zero", max_new_tokens=tokens,
        return_dict_in_generate=True,
    )
    report["modes"][mode] = {{
        "ids": output.sequences[0, prompt.shape[1]:].tolist(),
        "tokens_per_forward": float(output.tokens_per_forward[0]),
    }}
report["dtype"] = str(model.dtype)
print("REPORT" + json.dumps(report))
"""


def check_folder(folder: str | Path, new_tokens: int = 32, *, hide_triton: bool = False) -> dict:
    """Loads `folder` in a clean interpreter and generates in every mode.

    Args:
        new_tokens: to generate per mode.
        hide_triton: also pretend that triton is not installed.

    Returns:
        `modes`: per mode the new `ids` and `tokens_per_forward`; `missing`: tensors that the folder lacks; `dtype`.

    Raises:
        HubError: it does not load, does not generate, or (in float32) speculative decoding is not lossless.
    """
    folder = Path(folder).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            "HF_MODULES_CACHE": scratch,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",
            "TOKENIZERS_PARALLELISM": "false",
        }
        script = _SCRIPT.format(hide_triton=hide_triton)
        run = subprocess.run(
            [sys.executable, "-c", script, str(folder), str(new_tokens)],
            cwd=scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    lines = [line for line in run.stdout.splitlines() if line.startswith("REPORT")]
    if run.returncode or not lines:
        raise HubError(f"{folder} does not work in a clean interpreter:\n{run.stderr.strip()[-3000:]}")
    report = json.loads(lines[-1].removeprefix("REPORT"))
    modes = report["modes"]
    if report["dtype"] == "torch.float32" and modes["speculative"]["ids"] != modes["none"]["ids"]:
        raise HubError(f"{folder}: speculative decoding differs from plain decoding in float32; please report this.")
    return report
