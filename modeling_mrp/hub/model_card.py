"""The model card (README.md) of an exported repository, rendered from its config and its tensors."""

import csv
import math
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..configuration_mrp import MRPConfig
from .errors import HubError

_TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
_LIMITS = (
    "The model inherits the knowledge, the errors and the biases of its backbone. `direct` and `remask` are not "
    "lossless: measure them on your task against `none` (and, for `remask`, against plain `low_confidence_dynamic` "
    "decoding at the same number of tokens per forward) before you rely on them. In bfloat16, `speculative` may part "
    "from `none` where the baseline's own decision was a near-tie."
)


def render_card(
    config: MRPConfig,
    shapes: dict[str, tuple[int, ...]],
    *,
    repo_id: str,
    license: str = "apache-2.0",
    base_model: str | list[str] | None = None,
    figures: str | None = None,
    limits: str | None = None,
) -> ModelCard:
    """The card of a model with these tensors.

    Args:
        shapes: name -> shape of every stored tensor, by this package's names.
        repo_id: name under which the example loads it.
        license: Hub identifier of the licence of the weights.
        base_model: Hub id of the checkpoint that the weights come from.
        figures: Markdown of measured results (see `read_figures`).
        limits: what the model is not good for, instead of the general text.
    """
    if isinstance(base_model, list):
        base_model = base_model[0] if base_model else None
    head = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("mrp."))
    backbone = sum(map(math.prod, shapes.values())) - head
    data = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base_model,
        tags=["block-diffusion", "sdar", "custom_code"] + (["multi-token-residual-prediction"] if head else []),
    )
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=repo_id.split("/")[-1],
        repo_id=repo_id,
        base_model=base_model,
        has_head=bool(head),
        head_parameters=_count(head),
        head_layers=config.num_nextn_predict_layers,
        head_prediction=config.head_prediction,
        backbone_parameters=_count(backbone),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        is_moe=config.is_mixture_of_experts,
        experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        dtype=str(config.dtype).removeprefix("torch."),
        figures=figures,
        limits=limits or _LIMITS,
    )


def read_figures(path: Path) -> str:
    """Measured results as Markdown, from a Markdown file (as it is) or a CSV file (as a table).

    Raises:
        HubError: another kind of file, or an empty one.
    """
    if not path.exists():
        raise HubError(f"{path} is missing. Name the Markdown or CSV file with the measured figures.")
    if path.suffix == ".md":
        text = path.read_text(encoding="utf-8").strip()
    elif path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            rows = [[cell.replace("|", "\\|") for cell in row] for row in csv.reader(file) if row]
        text = _table(rows)
    else:
        raise HubError(f"{path}: figures come as .md or .csv, not as {path.suffix or 'a file without a suffix'}.")
    if not text:
        raise HubError(f"{path} is empty.")
    return text


def card_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of `folder`'s README.md, empty where there is none."""
    path = folder / "README.md"
    if not path.exists():
        return {}
    try:
        return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except ValueError:
        return {}


def _table(rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
