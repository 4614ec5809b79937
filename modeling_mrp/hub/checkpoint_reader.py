"""Reads what a checkpoint folder holds from the headers of its safetensors files, without reading a tensor."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .errors import HubError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a safetensors header describes it.

    Attributes:
        file: where it is stored.
        key: its name there.
        dtype: safetensors' code, `BF16`, `F16`, `F32`, ...
        shape: its dimensions.
    """

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


def read_json(path: Path) -> dict:
    """The JSON object in `path`.

    Raises:
        HubError: the file is missing, or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HubError(f"{path} is missing.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HubError(f"{path} is no valid JSON ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise HubError(f"{path} holds a JSON {type(content).__name__}, not an object; download it again.")
    return content


def stored_tensors(source: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint `source` (a folder or one safetensors file) by name, in the order of storage.

    Raises:
        HubError: no safetensors, several that no index relates, a truncated or missing shard, or a shard that lacks
            a tensor that the index promises.
    """
    if source.is_file():
        return _tensors_of([source])
    index_path = source / INDEX_NAME
    if index_path.exists():
        return _indexed_tensors(source, index_path)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise HubError(_no_safetensors(source))
    if len(files) > 1 and (source / SINGLE_NAME) not in files:
        raise HubError(
            f"{source} holds {len(files)} safetensors files and no {INDEX_NAME}, so nobody can tell whether they are "
            "complete. Download the index too, or leave one file."
        )
    return _tensors_of([source / SINGLE_NAME] if len(files) > 1 else files)


def _indexed_tensors(source: Path, index_path: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HubError(f"{index_path} has no weight_map; download it again.")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise HubError(f"{index_path} names {name!r}, which is not a file of this folder.")
        if not (source / name).exists():
            raise HubError(f"{source / name} is missing: {index_path.name} names it. Download it again.")
    found = _tensors_of(source / name for name in names)
    for key, name in weight_map.items():
        if key not in found or found[key].file.name != name:
            raise HubError(f"{source / name} lacks {key!r}, which {index_path.name} promises. Download it again.")
    return found


def _tensors_of(files: Iterable[Path]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as shard:
                for key in shard.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
                    part = shard.get_slice(key)
                    found[key] = StoredTensor(file, key, part.get_dtype(), tuple(part.get_shape()))
        except SafetensorError as error:
            raise HubError(f"{file} is truncated or damaged ({error}). Download it again.") from error
    return found


def _no_safetensors(source: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in source.glob(pattern))
    if not pickles:
        return f"{source} holds no safetensors file. Name the folder that holds the weights."
    return (
        f"{source} holds its weights as pickles only ({', '.join(pickles[:3])}{', ...' if len(pickles) > 3 else ''}). "
        "A pickle can run any code when it is read, so they are not read here. Use a safetensors revision of the "
        "checkpoint, or convert the pickles where you trust them "
        "(https://huggingface.co/docs/safetensors/convert-weights)."
    )
