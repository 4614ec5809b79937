"""A virtual environment that holds only some packages and what these require, made of links in a second.

It behaves like a new environment after `pip install torch transformers`: nothing else can be imported. With
MRP_FRESH_INSTALL=1 pip really installs them (hundreds of MB).
"""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def requirements_of(names: list[str]) -> list[str]:
    """Names of the installed distributions that `names` require, directly or not, themselves included."""
    found: dict[str, set[str]] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name, extras = re.sub(r"[-_.]+", "-", wanted.name).lower(), {"", *wanted.extras}
        if extras <= found.get(name, set()):
            continue
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found[name] = extras | found.get(name, set())
        for line in lines:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in found[name]):
                waiting.append(requirement)
    return list(found)


def make_environment(folder: Path, names: list[str]) -> Path:
    """Makes the environment in `folder` and returns its python."""
    pip = bool(os.environ.get("MRP_FRESH_INSTALL"))
    subprocess.run([sys.executable, "-m", "venv", *([] if pip else ["--without-pip"]), folder], check=True)
    python = folder / "bin" / "python"
    if pip:
        pins = [f"{name}=={distribution(name).version.split('+')[0]}" for name in names]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True)
        return python
    query = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip())
    for name in requirements_of(names):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            source = Path(str(found.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    return python


def fill_cache(home: Path, repo_id: str, folder: Path) -> None:
    """Puts `folder` into the Hub cache under `home` as the main revision of `repo_id`, as a download would."""
    repository = home / "hub" / f"models--{repo_id.replace('/', '--')}"
    revision = "0" * 40
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
