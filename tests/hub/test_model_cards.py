"""Model cards: those of `hub_configs/` are what the renderer gives, and their metadata is what the Hub reads.

`python tests/hub/test_model_cards.py` writes them again.
"""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import AutoConfig

import modeling_mrp  # noqa: F401 (registers the model type)
from modeling_mrp.hub.errors import HubError
from modeling_mrp.hub.model_card import card_metadata, read_figures, render_card
from modeling_mrp.hub.tensor_plan import expected_shapes

CONFIGS = Path(__file__).parents[2] / "hub_configs"
BASES = {
    "sdar-1.7b-mrp": "heavyball/sdar-1_7b-mrp-3lyr",
    "sdar-4b-mrp": "heavyball/sdar-4b-mrp-3lyr",
    "sdar-8b-mrp": "heavyball/sdar-8b-mrp-3lyr",
    "sdar-30b-a3b-mrp": "JetLM/SDAR-30B-A3B-Chat",
}


def rendered(name: str) -> str:
    config = AutoConfig.from_pretrained(CONFIGS / name)
    card = render_card(config, expected_shapes(config), repo_id=f"your-name/{name}", base_model=BASES[name])
    return card.content.rstrip("\n") + "\n"


@pytest.mark.parametrize("name", BASES)
def test_shipped_cards_are_rendered_ones(name):
    assert (CONFIGS / name / "README.md").read_text() == rendered(name)


def test_metadata_is_what_the_hub_reads():
    data = ModelCard.load(CONFIGS / "sdar-4b-mrp" / "README.md").data
    assert data.pipeline_tag == "text-generation"
    assert data.library_name == "transformers"
    assert data.base_model == "heavyball/sdar-4b-mrp-3lyr"
    assert "custom_code" in data.tags
    assert card_metadata(CONFIGS / "sdar-4b-mrp")["license"] == "apache-2.0"


def test_the_card_says_whether_there_is_a_head():
    config = AutoConfig.from_pretrained(CONFIGS / "sdar-1.7b-mrp")
    shapes = {name: shape for name, shape in expected_shapes(config).items() if not name.startswith("mrp.")}
    text = str(render_card(config, shapes, repo_id="me/plain"))
    assert "no trained head" in text
    assert "None were measured" in text
    assert "multi-token-residual-prediction" not in text


def test_figures_come_from_markdown_or_csv(tmp_path):
    (tmp_path / "figures.csv").write_text("mode,tokens per forward\nnone,1.0\nspeculative,2.9\n")
    assert read_figures(tmp_path / "figures.csv").splitlines()[2:] == ["| none | 1.0 |", "| speculative | 2.9 |"]
    (tmp_path / "figures.md").write_text("H200, torch 2.13: 2.9\n")
    assert read_figures(tmp_path / "figures.md") == "H200, torch 2.13: 2.9"
    (tmp_path / "empty.md").write_text("")
    for name in ("empty.md", "absent.md", "figures.txt"):
        (tmp_path / "figures.txt").touch()
        with pytest.raises(HubError, match=name):
            read_figures(tmp_path / name)


if __name__ == "__main__":
    for each in BASES:
        (CONFIGS / each / "README.md").write_text(rendered(each))
