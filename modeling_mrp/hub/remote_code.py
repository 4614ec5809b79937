"""The files that transformers needs beside a model to load it without this package (Hub "remote code")."""

import shutil
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

ENTRY_FILES = ("configuration_mrp.py", "modeling_mrp.py")
# lm_eval asks for AutoModelForCausalLM; AutoModel is the same class.
AUTO_MAP = {
    "AutoConfig": "configuration_mrp.MRPConfig",
    "AutoModel": "modeling_mrp.MRPForCausalLM",
    "AutoModelForCausalLM": "modeling_mrp.MRPForCausalLM",
}


def code_files() -> list[Path]:
    """The closure of `from .name import X` lines that starts at the entry files, sorted; all at the package's root."""
    root = Path(__file__).resolve().parent.parent
    files = {root / name for name in ENTRY_FILES}
    for entry in ENTRY_FILES:
        files.update(Path(file) for file in get_relative_import_files(root / entry))
    return sorted(files)


def copy_code(folder: Path) -> list[Path]:
    """Copies the remote code into `folder` as plain files (links are followed) and returns what was written."""
    return [Path(shutil.copyfile(file, folder / file.name)) for file in code_files()]
