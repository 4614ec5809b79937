"""Calibrates the draft model of `modeling_mrp/draft_lattice.py` on decoding traces of a model.

    python -m benchmarks.calibrate_drafts [--model FOLDER] [--drafter head] [--write]

For every denoising step of plain decoding: the drafter's log-odds at the next state, and the backbone's own at that
state and at the states behind it. Their differences, by level and depth, are kept as quantiles, and how often the
token differs as a rate: nothing is assumed about their shape. `--write` puts them into the model's config.json.
"""

import json
import pprint
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from benchmarks.report import provenance, table, write
from benchmarks.workload import MAX_NEW_TOKENS, TINY_MODEL, Workload
from modeling_mrp.generation_config_mrp import resolve_options
from modeling_mrp.reference_decoding import MASKED, ReferenceDecoder
from modeling_mrp.reveal_policies import PositionStatistics

SEED = 3
DEFAULT = Path(__file__).resolve().parent.parent / "modeling_mrp" / "draft_calibration.py"
_DEFAULT_HEADER = '''"""Calibration of the drafts on the tiny model, for models that bring none of their own.

Written by `python -m benchmarks.calibrate_drafts --write-default`; see `DraftCalibration` in `draft_lattice.py`.
"""

'''
LEVELS = (-1.0, 0.5, 2.0, 4.0, 6.0, 8.0, 10.0)
QUANTILES = 17
DEPTHS = 3


class _Tracer(ReferenceDecoder):
    """Plain decoding that notes drafted and actual log-odds of every masked position."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.samples: list[dict[str, Tensor]] = []
        self.drafts: list[tuple[int, PositionStatistics, PositionStatistics]] = []
        self.block_start = -1

    def _extra_picks(self, span: slice, hidden: Tensor, step: int) -> None:
        own = self._statistics(self.model.lm_head(hidden), span.start, step).choice
        if span.start != self.block_start:
            self.block_start, self.drafts = span.start, []
        masked = self.result.states[-1] == MASKED
        for number, drafted, known in self.drafts:
            self.samples.append({
                "depth": torch.full_like(own.log_odds, float(step - number - 1))[masked],
                "drafted": drafted.log_odds[masked],
                "known": torch.where(drafted.token == known.token, known.log_odds, drafted.log_odds)[masked],
                "actual": own.log_odds[masked],
                "flip": (drafted.token != own.token)[masked].float(),
            })  # fmt: skip
        drafted = own
        if self.options.drafter == "head":
            _, accumulated = self._head(self.result.ids[span][None], hidden, span.start)
            drafted = self._statistics(self.model.lm_head(accumulated), span.start, step + 1).choice
        self.drafts.append((step, drafted, own))


def collect(workload: Workload, drafter: str) -> dict[str, Tensor]:
    """Traces of all problems, one entry per masked position; `group` numbers the states whose order is decided."""
    options = resolve_options(
        {"mrp_mode": "direct", "mrp_steps": 0, "drafter": drafter, "eos_token_id": workload.model.config.eos_token_id},
        workload.model.config,
    )
    samples: list[dict[str, Tensor]] = []
    for problem in tqdm(workload.problems, desc=f"traces, {drafter}"):
        tracer = _Tracer(workload.model, options)
        tracer.decode(workload.prompt(problem), MAX_NEW_TOKENS)
        samples += tracer.samples
    traces = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    sizes = torch.tensor([len(sample["depth"]) for sample in samples])
    traces["group"] = torch.arange(len(samples)).repeat_interleave(sizes)
    return traces


def fit_head_weight(traces: dict[str, Tensor]) -> float:
    """Maximum likelihood of the next reveal, a softmax of a (w head + (1 - w) known) over the masked positions."""
    here = traces["depth"] == 0
    group = torch.unique(traces["group"][here], return_inverse=True)[1]
    drafted, known, actual = (traces[name][here].double() for name in ("drafted", "known", "actual"))
    count = int(group.max()) + 1
    largest = torch.full((count,), -torch.inf, dtype=torch.float64).scatter_reduce(0, group, actual, "amax")
    chosen = actual == largest[group]
    parameters = torch.tensor([0.5, 0.5], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        score = parameters[0] * drafted + parameters[1] * known
        top = torch.full((count,), -torch.inf, dtype=torch.float64).scatter_reduce(0, group, score.detach(), "amax")
        weights = (score - top[group]).exp()
        total = torch.zeros(count, dtype=torch.float64).index_add(0, group, weights)
        loss = -(score - top[group] - total.log()[group])[chosen].mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    head, own = parameters.tolist()
    return round(min(1.0, max(0.0, head / (head + own))), 3)


def fit(traces: dict[str, Tensor], levels: tuple[float, ...] = LEVELS) -> dict[str, Any]:
    """Quantiles of the residuals and rates of flips by depth and level, as `DraftCalibration` takes them."""
    weight = fit_head_weight(traces)
    drafted = torch.lerp(traces["known"], traces["drafted"], weight)
    residual = traces["actual"] - drafted
    level = torch.bucketize(drafted, torch.tensor(levels))
    probabilities = torch.linspace(0, 1, QUANTILES)
    quantiles, flips = [], []
    for depth in range(DEPTHS):
        here = traces["depth"] >= depth if depth == DEPTHS - 1 else traces["depth"] == depth
        quantiles.append([
            [round(v, 3) for v in torch.quantile(residual[here & (level == b)], probabilities).tolist()]
            for b in range(len(levels) + 1)
        ])  # fmt: skip
        flips.append([round(float(traces["flip"][here & (level == b)].mean()), 4) for b in range(len(levels) + 1)])
    return {"levels": list(levels), "quantiles": quantiles, "flips": flips, "head_weight": weight}


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = TINY_MODEL,
    count: Annotated[int, typer.Option(min=1, help="Problems to trace.")] = 100,
    drafter: Annotated[str, typer.Option(help="head or zero.")] = "head",
    write_config: Annotated[
        bool, typer.Option("--write", help="Put the values into the model's config.json.")
    ] = False,
    write_default: Annotated[bool, typer.Option(help="Make them the package's default.")] = False,
) -> None:
    """Fits and reports."""
    workload = Workload(model, count, SEED)
    with torch.no_grad():
        fitted = fit(collect(workload, drafter))
    bins = [f"up to {level:g}" for level in LEVELS] + [f"above {LEVELS[-1]:g}"]
    middle = QUANTILES // 2
    rows = [
        [depth, name, *(f"{values[i]:+.2f}" for i in (2, middle // 2, middle, -1 - middle // 2, -3)), f"{flip:.1%}"]
        for depth in range(DEPTHS)
        for name, values, flip in zip(bins, fitted["quantiles"][depth], fitted["flips"][depth], strict=True)
    ]
    text = [
        f"# Calibration of the drafts ({drafter})",
        "",
        provenance(workload.path.name, f"{count} held-out problems, seed {SEED}, plain static decoding"),
        "",
        f"Share of the head in the drafted log-odds: {fitted['head_weight']}.",
        "",
        "Quantiles of (backbone's - drafted) log-odds, by reveals behind the drafted state and by drafted log-odds, "
        "and how often the backbone chooses another token.",
        "",
        table(["reveals on", "drafted log-odds", "12.5 %", "25 %", "50 %", "75 %", "87.5 %", "other token"], rows),
    ]
    write("calibration.md", "\n".join(text))
    if write_config:
        path = model / "config.json"
        config = json.loads(path.read_text())
        config["draft_calibration"] = fitted
        path.write_text(json.dumps(config, indent=2) + "\n")
    if write_default:
        body = pprint.pformat(fitted, width=115, compact=True, sort_dicts=False)
        DEFAULT.write_text(_DEFAULT_HEADER + f"TINY_CALIBRATION: dict = {body}\n")


if __name__ == "__main__":
    typer.run(main)
