"""`mrp-export`: a self-contained repository folder, checked in a clean interpreter, and its way to the Hub."""

import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from ..configuration_mrp import MRPConfig
from .atomic_folder import atomic_folder
from .check_folder import check_folder
from .checkpoint_reader import INDEX_NAME, read_json, stored_tensors
from .console import run_command, say
from .errors import HubError
from .kernel_repository import export_kernels
from .model_card import card_metadata, read_figures, render_card
from .remote_code import AUTO_MAP, copy_code
from .tensor_plan import our_names, plan_tensors

_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.jinja", "tokenizer.model", "vocab.txt", "LICENSE", "LICENSE.txt",
    "NOTICE",
)  # fmt: skip
# They beat the arguments of other tools (lm_eval passes max_length), or make greedy decoding random.
_UNWANTED_GENERATION = ("max_new_tokens", "max_length", "_from_model_config", "temperature", "top_k", "top_p")
_OFFICIAL_HEAD = "mrp_modules."


def export_model(
    source: str | Path,
    destination: str | Path,
    *,
    repo_id: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    figures: str | Path | None = None,
    limits: str | None = None,
) -> Path:
    """Writes `source` (a folder of this package) as a repository that loads with torch and transformers alone.

    Weights, configs, tokenizer and heads stored apart (`head_artifact.save_head`) are copied; the flat remote code and
    a model card are added. Nothing else of `source` is taken: no pickles, no optimizer states, no foreign code.

    Args:
        repo_id: name for the model card's example, default the destination's name.
        license: Hub identifier of the weights' licence, default that of the source's card, else apache-2.0.
        base_model: Hub id of the checkpoint that the weights come from, default that of the source's card.
        figures: Markdown or CSV file with measured figures for the card.
        limits: the card's text on limits.

    Raises:
        HubError: `source` is no complete folder of this package, or `destination` is taken.
    """
    source, destination = Path(source), Path(destination)
    raw = read_json(source / "config.json")
    if raw.get("model_type") != MRPConfig.model_type:
        raise HubError(
            f"{source} holds a model of type {raw.get('model_type')!r}, not {MRPConfig.model_type!r}. "
            "Convert it with mrp-convert first."
        )
    stored = stored_tensors(source)
    if any(key.startswith(_OFFICIAL_HEAD) for key in stored):
        raise HubError(f"{source} holds official tensor names. Convert it with mrp-convert first.")
    config = MRPConfig.from_pretrained(source)
    plan = plan_tensors(our_names(stored), config)
    if config.dtype is None:
        config.dtype = plan.dtype
    known = card_metadata(source)
    card = render_card(
        config,
        {name: tensor.shape for name, tensor in plan.tensors.items()},
        repo_id=repo_id or destination.name,
        license=license or known.get("license") or "apache-2.0",
        base_model=base_model or known.get("base_model"),
        figures=read_figures(Path(figures)) if figures is not None else None,
        limits=limits,
    )
    heads = _separate_heads(source)
    weight_files = [*sorted({tensor.file for tensor in stored.values()}), *heads]
    with atomic_folder(destination, sum(file.stat().st_size for file in weight_files)) as target:
        for file in weight_files:
            shutil.copyfile(file, target / file.name)
        for name in (*_COPIED, INDEX_NAME, *(head.with_suffix(".json").name for head in heads)):
            if (source / name).exists():
                shutil.copyfile(source / name, target / name)
        _write_configs(source, config, target)
        copy_code(target)
        card.save(target / "README.md")
    return destination


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    repo_type: str = "model",
) -> str:
    """Creates `repo_id` if needed, uploads `folder` in one commit and returns the commit's address.

    Raises:
        HubError: no token, no permission, or a name that the Hub refuses.
    """
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, repo_type=repo_type, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            repo_type=repo_type,
            revision=revision,
            commit_message="Upload by mrp-export",
            ignore_patterns=["__pycache__/**", "*.bin", "*.pt", "*.pth"],
        )
    except (HFValidationError, LocalTokenNotFoundError, ConnectionError) as error:
        raise HubError(f"cannot push to {repo_id!r}: {error}") from error
    except HfHubHTTPError as error:
        raise HubError(f"the Hub refused the push to {repo_id!r}: {error}. Is `hf auth login` done?") from error
    return str(commit.commit_url)


def _separate_heads(source: Path) -> list[Path]:
    """Weight files of heads beside the model, for `from_pretrained(..., mrp_head=)`: a control, one more training."""
    found = []
    for file in sorted(source.glob("*.safetensors")):
        description = file.with_suffix(".json")
        if description.exists() and {"head", "fingerprint"} <= set(read_json(description)):
            stored_tensors(file)
            found.append(file)
    return found


def _write_configs(source: Path, config: MRPConfig, target: Path) -> None:
    config.architectures = ["MRPForCausalLM"]
    config.auto_map = dict(AUTO_MAP)
    config.declared_model_type = None
    config.save_pretrained(target)
    # register_for_auto_class makes save_pretrained copy code and add its own auto_map entries; ours are complete.
    path = source / "generation_config.json"
    generation = read_json(path) if path.exists() else _default_generation(config)
    generation = {k: v for k, v in generation.items() if v is not None and k not in _UNWANTED_GENERATION}
    generation = {**generation, "do_sample": False, "mrp_mode": generation.get("mrp_mode", "speculative")}
    (target / path.name).write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _default_generation(config: MRPConfig) -> dict:
    return {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def command(
    source: Annotated[Path, typer.Argument(help="Folder written by mrp-convert, mrp-train or save_pretrained.")],
    destination: Annotated[Path, typer.Argument(help="New folder.")],
    check: Annotated[bool, typer.Option(help="Load it in a clean interpreter and generate in every mode.")] = False,
    figures: Annotated[Path | None, typer.Option(help="Measured figures for the card, .md or .csv.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence of the weights (Hub identifier).")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the checkpoint they come from.")] = None,
    kernels: Annotated[Path | None, typer.Option(help="Also write the kernels as a Hub kernel repository.")] = None,
    push_to: Annotated[str | None, typer.Option(help="Hub id to push the folder to, user/name.")] = None,
    private: Annotated[bool | None, typer.Option(help="Whether a new repository is private.")] = None,
) -> None:
    """Writes a self-contained model repository: weights, configs, code, card. Optionally checks and pushes it."""
    folder = export_model(
        source, destination, repo_id=push_to, license=license, base_model=base_model, figures=figures
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(f"{folder}: {len(os.listdir(folder))} files, {size / 1e9:.3f} GB.")
    if kernels is not None:
        say(f"{export_kernels(kernels)}: kernel repository.")
    if check:
        for mode, result in check_folder(folder)["modes"].items():
            say(f"- {mode}: {len(result['ids'])} tokens, {result['tokens_per_forward']:.2f} tokens per forward")
    if push_to is not None:
        say(f"pushed: {push_folder(folder, push_to, private=private)}")


def main() -> None:
    """Console script `mrp-export`."""
    run_command(command)


if __name__ == "__main__":
    main()
