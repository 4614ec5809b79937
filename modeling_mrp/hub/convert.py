"""`mrp-convert`: from an official SDAR or SDAR-MRP checkpoint to a folder of this package.

Reads the headers of all shards first and refuses what does not fit; then copies tensor by tensor, so that memory holds
about one shard. The result appears complete or not at all (`atomic_folder`).
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub import snapshot_download, split_state_dict_into_shards_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from ..configuration_mrp import MRPConfig
from .atomic_folder import atomic_folder
from .checkpoint_reader import INDEX_NAME, StoredTensor, stored_tensors
from .console import run_command, say
from .errors import HubError
from .model_card import card_metadata, render_card
from .remote_code import copy_code
from .source_config import declared_token, generation_config, read_config, write_generation_config
from .tensor_plan import TensorPlan, head_file_names, head_layers, our_names, plan_tensors
from .tokenizer_files import write_tokenizer

DTYPES = ("float32", "float16", "bfloat16")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "*.model", "LICENSE*", "NOTICE*", "README.md"]
# Rows of the two LM heads that are compared at a time.
_ROWS = 4096


@dataclass
class Conversion:
    """What was converted: `notes` say everything that differs from the source."""

    folder: Path
    tensors: int
    total_bytes: int
    files: list[str]
    has_head: bool
    notes: list[str] = field(default_factory=list)


def convert_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    head: str | Path | None = None,
    block_length: int | None = None,
    mask_token_id: int | None = None,
    head_prediction: str | None = None,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    progress: bool = False,
) -> Conversion:
    """Converts `source` into the new folder `destination`.

    Args:
        source: folder or Hub id of an official MRP checkpoint, of a plain SDAR checkpoint, or of ours.
        head: safetensors file or folder with the MRP head's weights, where `source` has none (or to replace its own).
        block_length: overrides the config's `block_size`.
        mask_token_id: overrides the config's.
        head_prediction: `residual` or `direct`; official configs do not say it, the default is `residual`.
        dtype: `float32`, `float16` or `bfloat16`; default: the backbone's.
        max_shard_size: of a written file, as in `save_pretrained`; also about the memory needed.

    Raises:
        HubError: anything the user can put right: see `checkpoint_reader`, `tensor_plan`, `atomic_folder`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise HubError(f"dtype={dtype!r}; allowed: {', '.join(DTYPES)}.")
    folder = _local(source)
    destination = Path(destination)
    if destination.absolute() == folder.absolute() or folder.absolute() in destination.absolute().parents:
        raise HubError(f"{destination} lies in the source {folder}, which is never written to. Choose another folder.")
    named = our_names(stored_tensors(folder))
    if head is not None:
        backbone = {name: tensor for name, tensor in named.items() if not name.startswith("mrp.")}
        named = {**backbone, **head_file_names(stored_tensors(_local(head)))}
    config, notes = read_config(
        folder,
        block_length=block_length,
        head_layers=head_layers(named),
        mask_token_id=mask_token_id,
        head_prediction=head_prediction,
        other_head=head is not None,
    )
    if head_prediction is None and config.head_prediction == "residual" and _named_direct(head or source):
        notes.append(
            f"WARNING: {head or source} is named like a head trained for direct prediction, but is read as a residual "
            "head. Convert again with --head-prediction direct if it is one."
        )
    plan = plan_tensors(named, config, dtype)
    _check_tied(plan)
    config.dtype = plan.dtype
    notes += plan.notes
    if not plan.has_head:
        notes.append(
            "no MRP head in the source: loading makes a fresh, untrained one. Decode with drafter='zero' or "
            "mrp_mode='none', or train the head with mrp-train."
        )
    with atomic_folder(destination, plan.total_bytes) as target:
        files = write_tensors(plan, target, max_shard_size, progress)
        tokenizer = write_tokenizer(folder, target, config.mask_token_id, config.vocab_size)
        notes += tokenizer.notes
        declared = declared_token(folder, "eos_token_id")
        end_tokens = list(dict.fromkeys([*declared, *tokenizer.end_tokens]))
        if set(end_tokens) != set(declared):
            notes.append(f"end tokens: {declared} in the configs, {tokenizer.end_tokens} by the tokenizer; both end.")
        config.eos_token_id = end_tokens[0] if len(end_tokens) == 1 else end_tokens or None
        if config.pad_token_id is None:
            config.pad_token_id = next(iter(declared_token(folder, "pad_token_id")), tokenizer.pad_token_id)
        config.save_pretrained(target)
        generation, more = generation_config(folder, config, end_tokens)
        notes += more
        write_generation_config(generation, target)
        copy_code(target)
        _write_card(plan, config, folder, str(source), target, destination.name)
    return Conversion(destination, len(plan.tensors), plan.total_bytes, files, plan.has_head, notes)


def write_tensors(plan: TensorPlan, target: Path, max_shard_size: str | int, progress: bool = False) -> list[str]:
    """Writes the tensors of `plan` into safetensors files of `target`, with an index if there are several.

    Source files stay memory-mapped while one output file is put together; nothing else is held.
    """
    split = split_state_dict_into_shards_factory(
        plan.tensors,
        get_storage_size=plan.bytes_of,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    bar = tqdm(total=plan.total_bytes, unit="B", unit_scale=True, desc="Converting", disable=not progress)
    for file, names in split.filename_to_tensors.items():
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in _read(plan, names):
            tensors[name] = tensor.to(plan.dtype).contiguous()
            bar.update(plan.bytes_of(plan.tensors[name]))
        save_file(tensors, target / file, metadata={"format": "pt"})
        del tensors
        _verify(target / file, plan, names)
    bar.close()
    if split.is_sharded:
        index = {"metadata": {"total_size": plan.total_bytes}, "weight_map": split.tensor_to_filename}
        (target / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return list(split.filename_to_tensors)


def _read(plan: TensorPlan, names: list[str]):
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(plan.tensors[name].file, []).append(name)
    for file, wanted in by_file.items():
        with safe_open(str(file), framework="pt") as shard:
            for name in wanted:
                yield name, shard.get_tensor(plan.tensors[name].key)


def _verify(file: Path, plan: TensorPlan, names: list[str]) -> None:
    written = stored_tensors(file)
    if set(written) != set(names) or any(written[name].shape != plan.tensors[name].shape for name in names):
        raise HubError(f"{file.name} does not hold what was written to it: is the disk at fault?")


def _check_tied(plan: TensorPlan) -> None:
    """A stored LM head that differs from the embeddings contradicts a config that ties the two."""
    if plan.tied is None:
        return
    embeddings: StoredTensor = plan.tensors["model.embed_tokens.weight"]
    with (
        safe_open(str(plan.tied.file), framework="pt") as first,
        safe_open(str(embeddings.file), framework="pt") as second,
    ):
        head, table = first.get_slice(plan.tied.key), second.get_slice(embeddings.key)
        for start in range(0, embeddings.shape[0], _ROWS):
            if plan.tied.shape != embeddings.shape or not torch.equal(
                head[start : start + _ROWS], table[start : start + _ROWS]
            ):
                raise HubError(
                    f"{plan.tied.file}: lm_head.weight differs from the embeddings, but config.json says "
                    '"tie_word_embeddings": true. Set it to false if the LM head is the trained one.'
                )


def _write_card(plan: TensorPlan, config: MRPConfig, folder: Path, source: str, target: Path, title: str) -> None:
    """A model card that carries the source's licence and name on to `mrp-export`, and the licence's own files."""
    for file in (*folder.glob("LICENSE*"), *folder.glob("NOTICE*")):
        shutil.copyfile(file, target / file.name)
    known = card_metadata(folder)
    card = render_card(
        config,
        {name: tensor.shape for name, tensor in plan.tensors.items()},
        repo_id=title,
        license=known.get("license") or "apache-2.0",
        base_model=known.get("base_model") if Path(source).exists() else source,
    )
    card.save(target / "README.md")


def _named_direct(source: str | Path) -> bool:
    return Path(source).stem.lower().endswith("direct")


def _local(source: str | Path) -> Path:
    """`source` itself if it exists here, else the downloaded snapshot of that Hub repository (no pickles)."""
    path = Path(source)
    if path.exists():
        return path
    try:
        return Path(snapshot_download(str(source), allow_patterns=_WANTED))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise HubError(f"{source} is neither a folder here nor a repository that can be read: {error}") from error


def command(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of an SDAR or SDAR-MRP checkpoint.")],
    destination: Annotated[Path, typer.Argument(help="New folder.")],
    head: Annotated[
        str | None, typer.Option(help="Safetensors file, folder or Hub id with the head's weights.")
    ] = None,
    block_length: Annotated[int | None, typer.Option(min=1, help="Overrides the config's block_size.")] = None,
    mask_token_id: Annotated[int | None, typer.Option(min=0, help="Overrides the config's mask token.")] = None,
    head_prediction: Annotated[str | None, typer.Option(help="residual (default) or direct.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; default: as stored.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Size of a written file, about the memory needed.")] = "5GB",
) -> None:
    """Converts an official SDAR or SDAR-MRP checkpoint to a folder that this package (and transformers) loads."""
    result = convert_checkpoint(
        source,
        destination,
        head=head,
        block_length=block_length,
        mask_token_id=mask_token_id,
        head_prediction=head_prediction,
        dtype=dtype,
        max_shard_size=max_shard_size,
        progress=True,
    )
    for note in result.notes:
        say(f"- {note}")
    size = f"{result.tensors} tensors, {result.total_bytes / 1e9:.2f} GB in {len(result.files)} file(s)"
    say(f"{result.folder}: {size}, {'with' if result.has_head else 'without'} an MRP head.")


def main() -> None:
    """Console script `mrp-convert`."""
    run_command(command)


if __name__ == "__main__":
    main()
