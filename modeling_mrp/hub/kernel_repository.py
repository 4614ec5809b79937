"""The Triton kernels as a repository that the Hub's `kernels` library loads, without this package."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from .atomic_folder import atomic_folder
from .errors import HubError

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


def export_kernels(destination: str | Path) -> Path:
    """Writes the kernel repository into the new folder `destination` and returns it.

    Raises:
        HubError: `destination` is taken, or the kernels are not installed.
    """
    try:
        from mrp_kernels import build_hub
    except ImportError as error:
        raise HubError("mrp_kernels is not installed. Run `pip install -e .` in the project's folder.") from error
    sources = Path(build_hub.__file__).parent.glob("*_torch.py")
    operations = ", ".join(sorted(f"`{file.stem.removesuffix('_torch')}`" for file in sources))
    with atomic_folder(destination) as target:
        build_hub.build_hub(target)
        data = ModelCardData(license="apache-2.0", library_name="kernels", tags=["kernels", "kernel"])
        card = _CARD.format(name=build_hub.NAME, version=build_hub.VERSION, operations=operations)
        ModelCard(f"---\n{data}\n---\n{card}").save(target / "README.md")
    return Path(destination)
