"""A folder that appears complete or not at all, whatever kills the process that writes it."""

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import HubError

_MARK = ".partial-"
# Room beside the tensors: configs, tokenizer, code.
_SLACK_BYTES = 64 * 2**20


@contextmanager
def atomic_folder(destination: str | os.PathLike, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields a temporary sibling of `destination`; on success it is flushed to disk and renamed to `destination`.

    A rename within one file system is atomic, so no lock is needed: two writers of one destination both work in
    folders of their own, and the second to finish is told that the destination exists. What a killed process left
    behind is removed by the next one with the same destination on the same machine.

    Args:
        destination: must not exist, or be an empty folder.
        needed_bytes: how much will be written; checked before anything is.

    Raises:
        HubError: the destination is taken, or the disk is (or becomes) full.
    """
    destination = Path(destination).absolute()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise HubError(f"{destination} exists and is not empty. Choose another folder, or remove it first.")
    parent = destination.parent
    parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(parent, destination.name)
    _check_room(parent, needed_bytes)
    owner = f".{destination.name}{_MARK}{socket.gethostname()}-{os.getpid()}-"
    folder = Path(tempfile.mkdtemp(prefix=owner, dir=parent))
    try:
        _give_default_mode(folder)
        yield folder
        _flush_tree(folder)
        _rename(folder, destination)
        _flush(parent)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if is_disk_full(error):
            raise HubError(
                f"the disk of {parent} is full; nothing was left there. Free some space, or choose another disk."
            ) from error
        raise


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` says that no space is left, as Python does or as safetensors does (in its text only)."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return type(error).__name__ == "SafetensorError" and f"os error {errno.ENOSPC}" in str(error)


def _check_room(parent: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(parent).free
    if needed_bytes and free < needed_bytes + _SLACK_BYTES:
        raise HubError(
            f"{parent} has {free / 1e9:.2f} GB free, and {(needed_bytes + _SLACK_BYTES) / 1e9:.2f} GB are needed. "
            "Free some space, or choose another disk."
        )


def _remove_leftovers(parent: Path, name: str) -> None:
    prefix = f".{name}{_MARK}{socket.gethostname()}-"
    for path in parent.glob(f".{name}{_MARK}*"):
        process = path.name.removeprefix(prefix).split("-")[0]
        if path.name.startswith(prefix) and process.isdecimal() and not _is_alive(int(process)):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _give_default_mode(folder: Path) -> None:
    # mkdtemp makes the folder private; the finished one must be as readable as any other.
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)


def _rename(folder: Path, destination: Path) -> None:
    try:
        os.rename(folder, destination)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise HubError(f"{destination} was written by somebody else in the meantime.") from error


def _flush_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _flush(Path(root) / name)
        _flush(Path(root))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
