"""`mrp-eval sweep`: a grid of decoding settings over one task, into a CSV, a table and a quality/speed plot.

A point of the grid is a set of generation arguments. Its row is appended to `results.csv` as soon as it is measured;
started again, the command skips the points that have a row and goes on (inside a point, through the harness's cache).
"""

import argparse
import csv
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from transformers.utils import logging

logger = logging.get_logger(__name__)

# The plain thresholds are in every grid: they are the baseline of every quality/speed figure.
THRESHOLDS = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
DEFAULT_GRID: list[dict[str, list[Any]]] = [
    {"mrp_mode": ["none"]},
    {"mrp_mode": ["none"], "remasking_strategy": ["low_confidence_dynamic"], "confidence_threshold": THRESHOLDS},
    {"mrp_mode": ["speculative"], "draft_states": [4, 8, 16]},
    {"mrp_mode": ["speculative"], "draft_states": [8], "drafter": ["zero"]},
    {"mrp_mode": ["direct"], "mrp_steps": [1, 2, 3, 4]},
    {"mrp_mode": ["remask"], "remask_rule": ["cross", "confidence", "veto"], "confidence_threshold": THRESHOLDS},
]
COLUMNS = (
    "series", "label", "settings", "task", "metric", "quality", "quality_stderr", "documents", "tokens_per_forward",
    "tokens_per_second", "new_tokens", "backbone_forwards", "segments", "head_passes", "reveals_taken_back",
    "acceptance_by_depth", "batch_size", "limit", "device", "dtype", "versions", "model",
)  # fmt: skip
_OF_THE_HARNESS = {"until", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"}
SETTINGS_FILE, CSV_FILE, TABLE_FILE, PLOT_FILE = "sweep.json", "results.csv", "results.md", "quality_speed.png"


class Point(NamedTuple):
    """One setting: the curve that it belongs to, its label there, and its generation arguments."""

    series: str
    label: str
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        return json.dumps(self.settings, sort_keys=True)


def expand(grid: Iterable[dict[str, Any]]) -> Iterator[Point]:
    """The points of a grid: a list of parts, each the product of its lists; points that arise twice come once.

    Raises:
        ValueError: a part that is not a mapping of argument names to values.
    """
    seen = set()
    for part in grid:
        if not isinstance(part, dict) or not part:
            raise ValueError(
                f"grid part {part!r}; allowed: a mapping of generation arguments to lists of values, such as "
                '{"mrp_mode": ["direct"], "mrp_steps": [1, 2]}.'
            )
        values = [value if isinstance(value, list) else [value] for value in part.values()]
        varied = [name for name, options in zip(part, values, strict=True) if len(options) > 1]
        for chosen in itertools.product(*values):
            settings = dict(zip(part, chosen, strict=True))
            series = " ".join(str(v) for n, v in settings.items() if n not in varied or isinstance(v, str))
            label = " ".join(str(settings[n]) for n in varied if not isinstance(settings[n], str))
            point = Point(series, label, settings)
            if point.key not in seen:
                seen.add(point.key)
                yield point


def read_grid(path: Path | None) -> list[dict[str, Any]]:
    """A grid file (YAML or JSON: a list of parts), or the default grid."""
    if path is None:
        return DEFAULT_GRID
    if not path.is_file():
        raise ValueError(f"--grid {path} is no file; leave it out for the default grid.")
    grid = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(grid, list):
        raise ValueError(
            f"{path} holds a {type(grid).__name__}; allowed: a list of parts (see mrp-eval sweep --help)."
        )
    return grid


class ResultsFile:
    """The CSV of a sweep; a row is complete once its line ends, so an interrupted write is dropped on reading."""

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        return list(csv.DictReader(whole.splitlines()))

    def append(self, row: dict[str, Any]) -> None:
        is_new = not self.path.exists() or self.path.stat().st_size == 0
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)


def measure(lm: Any, manager: Any, point: Point, options: argparse.Namespace) -> dict[str, Any] | None:
    """Runs one point through the harness; its row (`None` on processes other than the first)."""
    from lm_eval import simple_evaluate

    from .results import figures_in_results

    cache = options.output / "cache" / f"point_{hash_text(point.key):08x}"
    with figures_in_results():
        results = simple_evaluate(
            lm,
            tasks=[options.task],
            task_manager=manager,
            limit=options.limit,
            gen_kwargs={**options.gen_kwargs, **point.settings},
            apply_chat_template=options.apply_chat_template,
            confirm_run_unsafe_code=options.confirm_run_unsafe_code,
            use_cache=str(cache),
            log_samples=False,
        )
    if results is None:
        return None
    metrics = results["results"][options.task]
    metric = options.metric or first_metric(metrics)
    if metric not in metrics:
        raise ValueError(f"--metric {metric!r}; this task has: {', '.join(sorted(quality_metrics(metrics)))}.")
    figures = results["decoding"]["tasks"][options.task]
    environment = results["decoding"]["environment"]
    name, _, kind = metric.partition(",")
    return {
        "series": point.series,
        "label": point.label,
        "settings": point.key,
        "task": options.task,
        "metric": metric,
        "quality": metrics[metric],
        "quality_stderr": metrics.get(f"{name}_stderr,{kind}", ""),
        **{name: figures[name] for name in COLUMNS if name in figures},
        "acceptance_by_depth": json.dumps([round(share, 4) for share in figures["acceptance_by_depth"]]),
        "batch_size": options.batch_size,
        "limit": options.limit or "",
        "device": f"{environment['device']} x{environment['processes']}",
        "dtype": environment["dtype"],
        "versions": json.dumps(environment["versions"]),
        "model": options.model_args,
    }


def hash_text(text: str) -> int:
    """A number that is the same in every process (Python's own hash of text is not)."""
    return zlib.crc32(text.encode())


def quality_metrics(metrics: dict[str, Any]) -> list[str]:
    """Names of the harness's own metrics among a task's results."""
    return [n for n in metrics if "," in n and "_stderr," not in n and not n.endswith(",decoding")]


def first_metric(metrics: dict[str, Any]) -> str:
    """The metric that a task lists first."""
    return quality_metrics(metrics)[0]


def run(options: argparse.Namespace) -> None:
    """Measures what is missing of the grid, then writes table and plot."""
    from .sweep_report import write_plot, write_table

    points = list(expand(read_grid(options.grid)))
    options.output.mkdir(parents=True, exist_ok=True)
    check_same_sweep(options)
    results = ResultsFile(options.output / CSV_FILE)
    done = {row["settings"] for row in results.rows()}
    missing = [point for point in points if point.key not in done]
    if missing:
        from lm_eval.tasks import TaskManager

        from .language_model import MRPLM

        manager = TaskManager(include_path=options.include_path)
        check_task(options.task, manager)
        lm: Any = MRPLM.create_from_arg_string(
            options.model_args,
            {"batch_size": options.batch_size, "max_batch_size": options.max_batch_size, "device": options.device},
        )
        check_points(missing, options.gen_kwargs, lm.model.config)
        for number, point in enumerate(missing, 1):
            logger.warning(f"sweep: point {number} of {len(missing)} ({len(done)} were there): {point.key}")
            row = measure(lm, manager, point, options)
            lm.barrier()
            if row is not None:
                results.append(row)
        if lm.rank != 0:
            return
    rows = results.rows()
    write_table(rows, options.output / TABLE_FILE)
    write_plot(rows, options.output / PLOT_FILE)
    print((options.output / TABLE_FILE).read_text(encoding="utf-8"))


def check_task(name: str, manager: Any) -> None:
    """Refuses what a sweep has no curve for: unknown names, groups, and tasks that generate nothing."""
    if name not in manager.all_tasks:
        raise ValueError(f"--task {name!r} is unknown; `mrp-eval ls tasks` lists tasks. Is --include_path missing?")
    if name not in manager.all_subtasks:
        raise ValueError(f"--task {name!r} is a group; allowed: one task. Run one sweep for each of its tasks.")
    output = (manager.task_index[name].cfg or {}).get("output_type", "generate_until")
    if output != "generate_until":
        raise ValueError(
            f"--task {name!r} is of type {output}, which no decoding setting changes; allowed: generation."
        )


def check_points(points: Iterable[Point], gen_kwargs: dict[str, Any], model_config: Any) -> None:
    """Refuses wrong generation arguments before the first point is measured, not when their point comes."""
    from ..generation_config_mrp import resolve_options

    for point in points:
        settings = {name: v for name, v in {**gen_kwargs, **point.settings}.items() if name not in _OF_THE_HARNESS}
        try:
            resolve_options(settings, model_config)
        except ValueError as error:
            raise ValueError(f"grid point {point.key}: {error}") from None


def check_same_sweep(options: argparse.Namespace) -> None:
    """Refuses to mix rows of different models, tasks or limits in one folder."""
    own = {
        "model_args": options.model_args, "task": options.task, "limit": options.limit,
        "gen_kwargs": options.gen_kwargs, "apply_chat_template": options.apply_chat_template, "metric": options.metric,
    }  # fmt: skip
    file = options.output / SETTINGS_FILE
    if not file.exists():
        # Replaced in one step: other processes may look at the same moment.
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(own, indent=2), encoding="utf-8")
        draft.replace(file)
        return
    there = json.loads(file.read_text(encoding="utf-8"))
    for name, value in own.items():
        if there.get(name) != value:
            raise ValueError(
                f"{options.output} holds a sweep with {name}={there.get(name)!r}, this one has {value!r}. Continue it "
                "with the same arguments, or give another --output."
            )


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command's arguments; names are the harness's where it has them."""
    from lm_eval.utils import simple_parse_args_string

    parser = argparse.ArgumentParser(
        prog="mrp-eval sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A grid file is a YAML list of parts, each the product of its lists:\n"
        "  - {mrp_mode: [direct], mrp_steps: [1, 2, 3]}\n"
        "  - {mrp_mode: [remask], remask_rule: [cross, veto], confidence_threshold: [0.5, 0.7, 0.9]}",
    )
    parser.add_argument(
        "--model_args", required=True, help="as for mrp-eval, e.g. pretrained=hub_configs/sdar-tiny-mrp"
    )
    parser.add_argument("--task", required=True, help="one task, e.g. mrp_tiny")
    parser.add_argument("--output", type=Path, required=True, help="folder of the sweep; also where it continues")
    parser.add_argument("--grid", type=Path, help="grid file; default: modes, K, thresholds and rules of the paper")
    parser.add_argument(
        "--metric", help='the quality axis, e.g. "exact_match,none"; default: the task\'s first metric'
    )
    parser.add_argument("--gen_kwargs", type=simple_parse_args_string, default={}, help="arguments of every point")
    parser.add_argument("--include_path", help="folder of tasks, e.g. lm_eval_tasks")
    parser.add_argument("--limit", type=float, help="documents, or a share below 1")
    parser.add_argument("--batch_size", default="1")
    parser.add_argument("--max_batch_size", type=int, default=64)
    parser.add_argument("--device", default=None)
    parser.add_argument("--apply_chat_template", action="store_true")
    parser.add_argument("--confirm_run_unsafe_code", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Entry of `mrp-eval sweep`."""
    run(parse(arguments))
