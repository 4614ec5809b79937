"""Sweeps: the grid, an interruption and its continuation, table and plot."""

import csv
import json

import pytest
import torch
from evaluation_models import TASKS, make_model
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from modeling_mrp import MRPForCausalLM
from modeling_mrp.evaluation import sweep
from modeling_mrp.evaluation.sweep import DEFAULT_GRID, ResultsFile, expand


def test_a_grid_is_the_union_of_products():
    points = list(
        expand([{"mrp_mode": ["direct"], "mrp_steps": [1, 2]}, {"mrp_mode": "none"}, {"mrp_mode": ["none"]}])
    )
    assert [point.settings for point in points] == [
        {"mrp_mode": "direct", "mrp_steps": 1}, {"mrp_mode": "direct", "mrp_steps": 2}, {"mrp_mode": "none"},
    ]  # fmt: skip
    assert [(point.series, point.label) for point in points] == [("direct", "1"), ("direct", "2"), ("none", "")]


def test_the_default_grid_has_all_modes_and_the_plain_thresholds():
    points = list(expand(DEFAULT_GRID))
    series = {point.series for point in points}
    assert {"none", "none low_confidence_dynamic", "direct", "remask cross", "remask veto"} <= series
    baseline = [p.settings["confidence_threshold"] for p in points if p.series == "none low_confidence_dynamic"]
    assert baseline == sweep.THRESHOLDS


def test_a_wrong_grid_is_a_user_error(tmp_path):
    with pytest.raises(ValueError, match="grid part 'none'; allowed: a mapping"):
        list(expand(["none"]))
    (tmp_path / "grid.yaml").write_text("mrp_mode: none")
    with pytest.raises(ValueError, match="allowed: a list of parts"):
        sweep.read_grid(tmp_path / "grid.yaml")
    with pytest.raises(ValueError, match=r"none\.yaml is no file"):
        sweep.read_grid(tmp_path / "none.yaml")


def test_what_has_no_curve_is_a_user_error():
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    sweep.check_task("mrp_tiny", manager)
    with pytest.raises(ValueError, match="'mrp_tinny' is unknown"):
        sweep.check_task("mrp_tinny", manager)
    with pytest.raises(ValueError, match="'mrp_paper' is a group; allowed: one task"):
        sweep.check_task("mrp_paper", manager)
    with pytest.raises(ValueError, match="'mrp_tiny_choice' is of type multiple_choice"):
        sweep.check_task("mrp_tiny_choice", manager)


def test_a_wrong_point_is_found_before_the_first_is_measured():
    config = make_model(6, 5).config
    sweep.check_points(expand(DEFAULT_GRID), {"max_gen_toks": 8, "until": []}, config)
    points = list(expand([{"mrp_mode": ["none", "fast"]}]))
    with pytest.raises(ValueError, match=r"grid point .*fast.*: mrp_mode='fast'; allowed: one of none"):
        sweep.check_points(points, {}, config)


def test_a_half_written_row_is_dropped(tmp_path):
    file = ResultsFile(tmp_path / "results.csv")
    row = dict.fromkeys(sweep.COLUMNS, "")
    file.append({**row, "settings": "a"})
    file.append({**row, "settings": "b"})
    whole = file.path.read_text()
    file.path.write_text(whole[:-5])
    assert [r["settings"] for r in file.rows()] == ["a"]
    file.append({**row, "settings": "c"})
    assert [r["settings"] for r in file.rows()] == ["a", "c"]


def counts_of_first_problems(folder, count, **options):
    """New tokens and backbone forwards of the model itself on the first problems of the task, one row at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = MRPForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = forwards = 0
    for line in (TASKS / "tiny" / "data" / "problems.jsonl").read_text().splitlines()[:count]:
        chat = [{"role": "user", "content": json.loads(line)["question"]}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**inputs, return_dict_in_generate=True, **options)
        tokens, forwards = tokens + int(output.new_tokens), forwards + int(output.backbone_forwards)
    return tokens, forwards


def test_interrupted_it_continues(model_folder, tmp_path, monkeypatch, capsys):
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        "- {mrp_mode: [none]}\n"
        "- {mrp_mode: [none], remasking_strategy: [low_confidence_dynamic], confidence_threshold: [0.2, 0.5]}\n"
        "- {mrp_mode: [direct], mrp_steps: [1, 2]}\n"
    )
    out = tmp_path / "sweep"
    arguments = [
        "--model_args", f"pretrained={model_folder},dtype=float32", "--task", "mrp_tiny", "--output", str(out),
        "--grid", str(grid), "--include_path", str(TASKS), "--limit", "3", "--batch_size", "3", "--device", "cpu",
        "--gen_kwargs", "max_gen_toks=8",
    ]  # fmt: skip
    measure, measured = sweep.measure, []

    def interrupted(lm, manager, point, options):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(point.key)
        return measure(lm, manager, point, options)

    monkeypatch.setattr(sweep, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.main(arguments)
    assert len(ResultsFile(out / "results.csv").rows()) == 2
    again = []
    monkeypatch.setattr(sweep, "measure", lambda *a: (again.append(a[2].key), measure(*a))[1])
    sweep.main(arguments)
    assert len(again) == 3
    assert not set(again) & set(measured)
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["settings"] for row in rows] == [point.key for point in expand(sweep.read_grid(grid))]
    by_key = {row["settings"]: row for row in rows}
    plain = by_key[json.dumps({"mrp_mode": "none"})]
    assert plain["metric"] == "exact_match,none"
    direct = by_key[json.dumps({"mrp_mode": "direct", "mrp_steps": 2}, sort_keys=True)]
    for row, options in ((plain, {"mrp_mode": "none"}), (direct, {"mrp_mode": "direct", "mrp_steps": 2})):
        tokens, forwards = counts_of_first_problems(model_folder, 3, max_new_tokens=8, **options)
        assert (int(row["new_tokens"]), int(row["backbone_forwards"])) == (tokens, forwards)
        assert float(row["tokens_per_forward"]) == pytest.approx(tokens / forwards, abs=1e-3)
    assert int(direct["backbone_forwards"]) < int(plain["backbone_forwards"])
    assert (out / "quality_speed.png").stat().st_size > 10_000
    table = (out / "results.md").read_text()
    assert table.count("\n| none low_confidence_dynamic |") == 2
    assert "torch" in table
    # Nothing is left to do: no model is loaded, table and plot are written again.
    monkeypatch.setattr(sweep, "measure", None)
    sweep.main(arguments)
    with pytest.raises(ValueError, match=r"holds a sweep with limit=3\.0, this one has 2\.0"):
        sweep.main([*arguments, "--limit", "2"])
