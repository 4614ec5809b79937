"""Fits the draft model of `modeling_mrp/draft_lattice.py` on decoding traces of a model.

    python -m benchmarks.calibrate_drafts [--model FOLDER] [--count 60] [--write]

For every denoising step of plain decoding: the drafter's statistics at the next state, and the backbone's own at that
state and at the states behind it. `bias`, `slope` by least squares; `spread`, `spread_slope` and `drift` by maximum
likelihood of the residuals, taken relative to their state's mean (an order does not feel a common shift); `flip` and
`flip_slope` by logistic regression. `--write` puts them into the model's config.json.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.report import provenance, table, write
from benchmarks.workload import MAX_NEW_TOKENS, TINY_MODEL, Workload
from modeling_mrp.draft_lattice import DraftCalibration
from modeling_mrp.generation_config_mrp import resolve_options
from modeling_mrp.reference_decoding import MASKED, ReferenceDecoder

SEED = 3


class _Tracer(ReferenceDecoder):
    """Plain decoding that notes drafted and actual log-odds of every masked position."""

    def __init__(self, *args: object, **kwargs: object):
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.samples: list[tuple[int, int, Tensor, Tensor, Tensor]] = []
        self.drafts: list[tuple[int, Tensor, Tensor]] = []
        self.state = 0
        self.block_start = -1

    def _extra_picks(self, span: slice, hidden: Tensor, step: int) -> None:
        logits = self.model.lm_head(hidden)
        actual = self._statistics(logits, span.start, step).choice
        before = self.result.states[-1]
        if span.start != self.block_start:
            self.block_start, self.drafts = span.start, []
        masked = before == MASKED
        self.state += 1
        for number, log_odds, token in self.drafts:
            depth = step - number - 1
            self.samples.append((
                self.state, depth, log_odds[masked], actual.log_odds[masked], token[masked] != actual.token[masked],
            ))  # fmt: skip
        ids = self.result.ids[span]
        if self.options.drafter == "head":
            _, accumulated = self._head(ids[None], hidden, span.start)
            logits = self.model.lm_head(accumulated)
        drafted = self._statistics(logits, span.start, step + 1).choice
        self.drafts.append((step, drafted.log_odds, drafted.token))


def collect(workload: Workload, drafter: str) -> dict[str, Tensor]:
    """Traces of all problems: per masked position, its state's number, depth, drafted and actual log-odds, flip."""
    options = resolve_options(
        {"mrp_mode": "direct", "mrp_steps": 0, "drafter": drafter, "eos_token_id": workload.model.config.eos_token_id},
        workload.model.config,
    )
    rows: dict[str, list[Tensor]] = {"group": [], "depth": [], "drafted": [], "actual": [], "flip": []}
    offset = 0
    for problem in tqdm(workload.problems, desc=f"traces, {drafter}"):
        tracer = _Tracer(workload.model, options)
        tracer.decode(workload.prompt(problem), MAX_NEW_TOKENS)
        for state, depth, drafted, actual, flip in tracer.samples:
            # One group per (state, depth): the positions whose order is decided together.
            offset += 1
            rows["group"].append(torch.full(drafted.shape, offset))
            rows["depth"].append(torch.full(drafted.shape, float(depth)))
            rows["drafted"].append(drafted)
            rows["actual"].append(actual)
            rows["flip"].append(flip.float())
            del state
    return {name: torch.cat(parts) for name, parts in rows.items()}


def fit(traces: dict[str, Tensor]) -> DraftCalibration:
    """Maximum likelihood, as the module says."""
    drafted, actual = traces["drafted"].double(), traces["actual"].double()
    design = torch.stack([torch.ones_like(drafted), drafted], dim=1)
    bias, slope = torch.linalg.lstsq(design, actual[:, None]).solution[:, 0].tolist()
    residual = actual - bias - slope * drafted
    groups = torch.unique(traces["group"], return_inverse=True)[1]
    sizes = torch.bincount(groups).double()
    mean = torch.zeros_like(sizes).index_add_(0, groups, residual) / sizes
    many = sizes[groups] >= 2
    relative = ((residual - mean[groups]) * (sizes[groups] / (sizes[groups] - 1).clamp(min=1)).sqrt())[many]
    level, depth = drafted[many], traces["depth"][many].double()
    spread = torch.zeros(3, dtype=torch.float64, requires_grad=True)

    def likelihood(parameters: Tensor) -> Tensor:
        log_scale = parameters[0] + parameters[1] * level + 0.5 * torch.log1p(parameters[2].exp() ** 2 * depth)
        # Student's t with 4 degrees of freedom: a few wild positions must not widen all others.
        return (log_scale + 2.5 * torch.log1p((relative / log_scale.exp()) ** 2 / 4)).mean()

    _minimise(likelihood, spread)
    flip = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    target = traces["flip"].double()

    def flips(parameters: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(-(parameters[0] + parameters[1] * drafted), target)

    _minimise(flips, flip)
    values = [bias, slope, *spread[:2].tolist(), float(spread[2].exp()), *flip.tolist()]
    names = ("bias", "slope", "spread", "spread_slope", "drift", "flip", "flip_slope")
    return DraftCalibration(**{name: round(value, 4) for name, value in zip(names, values, strict=True)})


def _minimise(loss_of: object, parameters: Tensor) -> None:
    optimizer = torch.optim.LBFGS([parameters], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(parameters)  # type: ignore[operator]
        loss.backward()
        return loss

    optimizer.step(closure)


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = TINY_MODEL,
    count: Annotated[int, typer.Option(min=1, help="Problems to trace.")] = 60,
    write_config: Annotated[
        bool, typer.Option("--write", help="Put the values into the model's config.json.")
    ] = False,
) -> None:
    """Fits and reports; the head's calibration is the one that is written."""
    workload = Workload(model, count, SEED)
    fitted = {}
    for drafter in ("head", "zero"):
        with torch.no_grad():
            traces = collect(workload, drafter)
        fitted[drafter] = fit(traces)
    names = list(vars(fitted["head"]))
    text = [
        "# Calibration of the drafts",
        "",
        provenance(workload.path.name, f"{count} held-out problems, seed {SEED}, plain static decoding"),
        "",
        "log-odds(backbone) = bias + slope l + exp(spread + spread_slope l) (z_0 + drift (z_1 + ... + z_d)); the "
        "drafted token is replaced with probability sigmoid(-(flip + flip_slope l)).",
        "",
        table(["drafter", *names], [[d, *(f"{getattr(c, n):.3f}" for n in names)] for d, c in fitted.items()]),
    ]
    write("calibration.md", "\n".join(text))
    if write_config:
        path = model / "config.json"
        config = json.loads(path.read_text())
        config["draft_calibration"] = vars(fitted["head"])
        path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
