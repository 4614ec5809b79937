"""Writes the folder of a Hub kernel repository: `build/torch-<backend>/{__init__.py, ..., metadata.json}`.

The kernels are pure Python, so every backend gets the same files; `kernels.get_local_kernel(folder)` loads them, and
so does `kernels.get_kernel` from a repository that holds them. Run it as `python -m mrp_kernels.build_hub FOLDER`.
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

NAME = "mrp-kernels"
VERSION = 1
BACKENDS = ("cpu", "cuda", "rocm")


def build_hub(folder: Path | str) -> list[Path]:
    """Writes (or refreshes) `folder/build` and returns the variant folders.

    Raises:
        FileExistsError: a variant holds a file that is none of ours, which is not deleted.
    """
    sources = [path for path in sorted(Path(__file__).parent.glob("*.py")) if path.name != Path(__file__).name]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:10]
    written = []
    for backend in BACKENDS:
        variant = Path(folder) / "build" / f"torch-{backend}"
        variant.mkdir(parents=True, exist_ok=True)
        ours = {"metadata.json", "__pycache__", *(path.name for path in sources)}
        foreign = sorted(path.name for path in variant.iterdir() if path.name not in ours)
        if foreign:
            raise FileExistsError(f"{variant} holds {', '.join(foreign)}; remove them or choose another folder.")
        for path in sources:
            shutil.copyfile(path, variant / path.name)
        metadata = {
            # The module is imported under this identifier, so it changes with the sources.
            "id": f"_{NAME.replace('-', '_')}_{backend}_{digest}",
            "name": NAME,
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        written.append(variant)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    build_hub(parser.parse_args().folder)
