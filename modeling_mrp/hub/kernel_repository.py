"""The Triton kernels as a repository that the Hub's `kernels` library loads, without this package.

Layout of kernels without compiled parts: `build/torch-<backend>/{__init__.py, metadata.json, *.py}`.
"""

import importlib.util
import json
import shutil
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from .atomic_folder import atomic_folder
from .errors import HubError

NAME = "mrp-kernels"
VERSION = 1
# On the CPU the torch twins run; Triton serves the other two.
BACKENDS = ("cpu", "cuda", "rocm")
_CARD = """
# {name}

Triton kernels of multi-token residual prediction (arXiv 2605.18817) for block-diffusion language models, each beside
the readable torch twin that specifies it and that runs where there is no GPU.

```python
from kernels import get_kernel

mrp_kernels = get_kernel("<this repository>", version={version}, trust_remote_code=True)
statistics = mrp_kernels.reveal_statistics(logits)
```

Operations: {operations}.
"""


def kernel_files() -> list[Path]:
    """The Python files of the kernels' package.

    Raises:
        HubError: the package `mrp_kernels` is not installed.
    """
    spec = importlib.util.find_spec("mrp_kernels")
    if spec is None or not spec.submodule_search_locations:
        raise HubError("the package mrp_kernels is not installed. Run `pip install -e .` in the project's folder.")
    return sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.py"))


def export_kernels(destination: str | Path) -> Path:
    """Writes the kernel repository into the new folder `destination` and returns it.

    Raises:
        HubError: `destination` is taken, or the kernels are not installed.
    """
    files = kernel_files()
    operations = sorted(f.stem.removesuffix("_torch") for f in files if f.stem.endswith("_torch"))
    with atomic_folder(destination) as target:
        for backend in BACKENDS:
            folder = target / "build" / f"torch-{backend}"
            folder.mkdir(parents=True)
            for file in files:
                shutil.copyfile(file, folder / file.name)
            metadata = {
                "id": f"_{NAME.replace('-', '_')}_{VERSION}_{backend}",
                "name": NAME,
                "version": VERSION,
                "license": "Apache-2.0",
                "python-depends": [],
                "backend": {"type": backend},
            }
            (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        card = _CARD.format(name=NAME, version=VERSION, operations=", ".join(f"`{name}`" for name in operations))
        data = ModelCardData(license="apache-2.0", library_name="kernels", tags=["kernels", "kernel"])
        ModelCard(f"---\n{data}\n---\n{card}").save(target / "README.md")
    return Path(destination)
