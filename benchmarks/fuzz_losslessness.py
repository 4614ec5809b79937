"""Random cases in search of one in which the engine and the readable reference loop part.

    python -m benchmarks.fuzz_losslessness --cases 10000

A case is a random model, ragged padded prompts, a policy, sampling, a mode and its drafts. In float32 the following
must hold token for token: engine `none` = reference loop; `speculative` = `none`, whatever the drafter; engine
`direct` and `remask` = reference loop; and a row alone = the row in its batch. Where they part, the decision may have
been a near-tie of the baseline's own: that is tested, not assumed (`near_tie`), and such places are reported by name.
Interrupted, the command continues where it stopped. Writes `benchmarks/results/fuzz_losslessness.md`.
"""

import json
import random
from collections import Counter
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm
from transformers.utils import logging

from benchmarks.random_models import VOCAB, shared_model
from benchmarks.report import RESULTS, provenance, table, write
from modeling_mrp import MRPForCausalLM
from modeling_mrp.generation_config_mrp import STRATEGIES, resolve_options
from modeling_mrp.reference_decoding import ReferenceDecoder

FITTED = Path(__file__).resolve().parents[1] / "tests" / "data" / "golden" / "ckpt_sharp"
# Relative perturbations of embeddings and logits under which a decision of the baseline counts as a near-tie: from one
# to about a hundred units in the last place of float32, what a different order of summation does.
NOISE_LEVELS = (2e-7, 1e-6, 4e-6, 1.2e-5)
_TRIES = 12


@dataclass(frozen=True)
class Case:
    """One case; `arguments` are those of `generate`, `prompts` are token ids without padding."""

    model: tuple[str, int, bool, bool]  # head ("fitted" is a checkpoint), seed, mixture of experts, tied embeddings
    prompts: tuple[tuple[int, ...], ...]
    left: bool
    new: int
    row_seeds: tuple[int, ...]
    arguments: dict[str, Any]
    alone: int  # the row that is repeated alone
    attention: str = "sdpa"

    @property
    def mode(self) -> str:
        return self.arguments["mrp_mode"]


@dataclass(frozen=True)
class Difference:
    """Row `row` of `run` differs from the baseline at new token `place`; `near_tie` is the noise that explains it."""

    run: str
    row: int
    place: int
    got: list[int]
    wanted: list[int]
    near_tie: float | None


def draw_case(rng: random.Random) -> Case:
    """A random case. Only `randint`, `random` and `choice` of `rng` are used."""
    block = rng.choice([2, 3, 4, 4, 5, 7, 8, 8, 12, 16, 32])
    # A prompt may hold any id, the mask token's too.
    prompts = tuple(
        tuple(rng.randint(0, VOCAB - 1) for _ in range(rng.randint(1, min(3 * block, 40))))
        for _ in range(rng.choice([1, 1, 2, 2, 3, 4, 5, 6]))
    )
    arguments: dict[str, Any] = {
        "block_length": block,
        "denoising_steps": rng.choice([block, block, rng.randint(1, block)]),
        "remasking_strategy": rng.choice(STRATEGIES),
        "confidence_threshold": rng.choice([0.0, 0.3, 0.5, 0.7, 0.9, 1.0]),
        "entropy_bound": rng.choice([0.0, 0.1, 0.5, 2.0]),
        "confidence_resolution": rng.choice([0.0, 0.0, 0.01, 0.1]),
        "mrp_context": rng.choice(["prefix", "prefix", "block"]),
        "seed": rng.randint(0, 2**62),
    }
    if rng.random() < 0.5:
        arguments |= {
            "do_sample": True, "temperature": rng.choice([0.1, 0.5, 1.0, 2.0]),
            "top_k": rng.choice([0, 1, 5, 20]), "top_p": rng.choice([0.1, 0.5, 0.9, 1.0]),
        }  # fmt: skip
    if rng.random() < 0.4:
        arguments["eos_token_id"] = [rng.randint(0, VOCAB - 2) for _ in range(4)]
    mode = rng.choice(["speculative"] * 4 + ["direct", "remask"])
    arguments["mrp_mode"] = mode
    if mode == "remask":
        arguments |= {
            "remasking_strategy": "low_confidence_dynamic", "remask_rule": rng.choice(["cross", "confidence", "veto"]),
            "remask_delta": rng.choice([0.1, 0.5, 2.0]),
        }  # fmt: skip
    else:
        arguments |= {"mrp_steps": rng.randint(0, 6), "drafter": rng.choice(["head", "head", "head", "zero"])}
    if mode == "direct":
        arguments["direct_tokens_per_step"] = rng.choice([1, 1, 2])
    if mode == "speculative":
        arguments |= {"draft_shape": rng.choice(["chain", "lattice", "lattice"]), "draft_states": rng.randint(2, 32)}
        arguments["draft_shortlist"] = rng.choice([0, 0, 8])
    head = rng.choice(["random", "random", "fitted", "adversarial", "zero"])
    moe = rng.random() < 0.25 and head != "fitted"
    return Case(
        model=(head, 0 if head == "fitted" else rng.randint(0, 7), moe, rng.random() < 0.3 and head != "fitted"),
        prompts=prompts,
        left=rng.random() < 0.5,
        new=rng.randint(1, min(2 * block + 3, 24)),
        row_seeds=tuple(rng.randint(0, 2**31 - 1) for _ in prompts),
        arguments=arguments,
        alone=rng.randint(0, len(prompts) - 1),
        attention=rng.choice(["sdpa"] * 6 + ["eager", "mrp_packed"]),
    )


def model_of(case: Case) -> Any:
    """The case's model, shared between cases, with the case's attention."""
    head, seed, moe, tied = case.model
    model = fitted_model() if head == "fitted" else shared_model(seed, head, moe, tied)
    model.set_attn_implementation(case.attention)
    return model


@lru_cache(maxsize=1)
def fitted_model() -> Any:
    """A random backbone whose head was trained on it."""
    model = MRPForCausalLM.from_pretrained(FITTED, dtype=torch.float32).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def baseline_arguments(case: Case) -> dict[str, Any]:
    """What the case must equal: itself in the reference loop, where speculation is mode `none`."""
    if case.mode != "speculative":
        return case.arguments
    drafting = ("mrp_steps", "draft_shape", "draft_states", "draft_shortlist")
    return {k: v for k, v in case.arguments.items() if k not in drafting} | {"mrp_mode": "none"}


def reference_row(model: Any, case: Case, row: int) -> list[int]:
    """New tokens of one row, by the readable loop."""
    options = resolve_options(baseline_arguments(case), model.config)
    decoder = ReferenceDecoder(model, options, case.arguments["seed"], case.row_seeds[row])
    prompt = case.prompts[row]
    return decoder.decode(torch.tensor(prompt), case.new).ids[len(prompt) :].tolist()


def engine_rows(model: Any, case: Case, arguments: dict[str, Any], rows: list[int]) -> list[list[int]]:
    """New tokens of the given rows, as one padded batch of the engine."""
    ids, mask = pad_prompts([case.prompts[row] for row in rows], case.left)
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=case.new, return_dict_in_generate=True,
        row_seeds=[case.row_seeds[row] for row in rows], **arguments,
    )  # fmt: skip
    new = zip(output.sequences[:, ids.shape[1] :].tolist(), output.new_tokens.tolist(), strict=True)
    return [tokens[:count] for tokens, count in new]


def pad_prompts(prompts: list[tuple[int, ...]], left: bool, pad: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, attention mask) `[rows, longest]`."""
    width = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), width), pad), torch.zeros((len(prompts), width), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        span = slice(width - len(prompt), width) if left else slice(0, len(prompt))
        ids[row, span], mask[row, span] = torch.tensor(prompt), 1
    return ids, mask


def check_case(case: Case) -> list[Difference]:
    """All differences of a case, near-ties among them."""
    model = model_of(case)
    rows = list(range(len(case.prompts)))
    wanted = [reference_row(model, case, row) for row in rows]
    runs = {"batch": (case.arguments, rows), "alone": (case.arguments, [case.alone])}
    if case.mode == "speculative":
        runs["none"] = (baseline_arguments(case), rows)
    differences = []
    for run, (arguments, which) in runs.items():
        for row, got in zip(which, engine_rows(model, case, arguments, which), strict=True):
            if got != wanted[row]:
                place = next((i for i, (a, b) in enumerate(zip(got, wanted[row], strict=False)) if a != b), -1)
                differences.append(Difference(run, row, place, got, wanted[row], near_tie(model, case, row, got)))
    return differences


def near_tie(model: Any, case: Case, row: int, got: list[int]) -> float | None:
    """The smallest noise level at which the reference loop itself gives `got`, or `None` where it never does."""
    for level in NOISE_LEVELS:
        for attempt in range(_TRIES):
            generator = torch.Generator().manual_seed(attempt)

            def disturb(module: Any, args: Any, output: Tensor, level=level, generator=generator) -> Tensor:
                return output * (1 + level * torch.randn(output.shape, generator=generator))

            hooks = [part.register_forward_hook(disturb) for part in (model.model.embed_tokens, model.lm_head)]
            try:
                if reference_row(model, case, row) == got:
                    return level
            finally:
                for hook in hooks:
                    hook.remove()
    return None


def case_of(seed: int) -> Case:
    return draw_case(random.Random(seed))


def main(
    cases: Annotated[int, typer.Option(min=1, help="Random cases.")] = 10_000,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first case; each case has the next seed.")] = 0,
    state: Annotated[Path, typer.Option(help="Where progress is kept.")] = RESULTS / "fuzz_losslessness.partial.json",
    fresh: Annotated[bool, typer.Option(help="Forget earlier partial results.")] = False,
) -> None:
    """Runs the cases `first` to `first + cases - 1` and reports every difference."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    kept: dict[str, Any] = {"range": [first, cases], "next": first, "kinds": {}, "differences": []}
    if state.exists() and not fresh and json.loads(state.read_text())["range"] == kept["range"]:
        kept = json.loads(state.read_text())
    kinds = Counter(kept["kinds"])
    bar = tqdm(range(kept["next"], first + cases), initial=kept["next"] - first, total=cases, unit="case")
    for seed in bar:
        case = case_of(seed)
        kinds[describe(case)] += 1
        kept["differences"] += [{"seed": seed, **asdict(difference)} for difference in check_case(case)]
        bar.set_postfix(differences=len(kept["differences"]))
        if (seed + 1) % 50 == 0 or seed + 1 == first + cases:
            kept |= {"next": seed + 1, "kinds": kinds}
            state.parent.mkdir(parents=True, exist_ok=True)
            state.write_text(json.dumps(kept))
    text = report(kinds, kept["differences"], first, cases)
    typer.echo(text)
    write("fuzz_losslessness.md", text)
    state.unlink()
    raise typer.Exit(any(entry["near_tie"] is None for entry in kept["differences"]))


def describe(case: Case) -> str:
    kind = case.mode
    if kind == "speculative":
        kind += f" {case.arguments['draft_shape']} {case.arguments['drafter']}"
    return f"{kind}, {case.model[0]} head, {'sampled' if case.arguments.get('do_sample') else 'greedy'}"


def report(kinds: Counter, differences: list[dict[str, Any]], first: int, cases: int) -> str:
    """The result as markdown."""
    real = [entry for entry in differences if entry["near_tie"] is None]
    ties = [entry for entry in differences if entry["near_tie"] is not None]
    workload = f"cases {first} to {first + cases - 1}; random dense and MoE models (hidden 32, 2 layers), float32"
    lines = [
        "# Random cases: engine against the readable loop", "", provenance("random", workload), "",
        f"**{cases} cases, {len(real)} differences**, {len(ties)} near-ties of the baseline's own decisions.", "",
    ]  # fmt: skip
    if differences:
        rows = [[e["seed"], e["run"], e["row"], e["place"], e["near_tie"] or "DIFFERENCE"] for e in real + ties]
        lines += [
            "A near-tie: the readable loop itself gives the same tokens once its embeddings and logits are moved by",
            "the stated relative noise.", "", table(["case", "run", "row", "new token", "noise"], rows), "",
        ]  # fmt: skip
    return "\n".join([*lines, table(["kind", "cases"], sorted(kinds.items()))])


if __name__ == "__main__":
    typer.run(main)
