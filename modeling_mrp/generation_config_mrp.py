"""Generation arguments: what may be asked for, checked once at the border, then trusted."""

import difflib
import math
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

MODES = ("none", "speculative", "direct", "remask")
STRATEGIES = ("low_confidence_static", "low_confidence_dynamic", "sequential", "entropy_bounded")
REMASK_RULES = ("confidence", "veto", "cross")
CONTEXTS = ("prefix", "block")
DRAFTERS = ("head", "zero")
DRAFT_SHAPES = ("chain", "lattice")
KERNELS = ("auto", "torch", "triton")
MAX_DRAFT_STATES = 64

# Arguments of transformers that block diffusion has no use for, with the values at which they ask for nothing.
_NEUTRAL: dict[str, tuple] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "early_stopping": (None, False),
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "min_p": (None, 0.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "length_penalty": (None, 1.0),
    "diversity_penalty": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "guidance_scale": (None, 1.0),
    "renormalize_logits": (None, False),
    "remove_invalid_values": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "token_healing": (None, False),
    "use_mtp": (None, False),
    "low_memory": (None, False),
}
# Arguments that are read here, or that change nothing (bookkeeping, or only meaningful beside one refused above).
_HARMLESS = {
    "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id",
    "bos_token_id", "stop_strings", "num_return_sequences", "return_dict_in_generate", "transformers_version",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind", "disable_compile", "compile_config", "is_assistant",
}  # fmt: skip


def _one_of(*allowed: str) -> tuple:
    return (lambda v: isinstance(v, str) and v in allowed), "one of " + ", ".join(allowed)


def _integer(low: int, high: float = math.inf) -> tuple:
    def valid(v: Any) -> bool:
        return isinstance(v, int) and not isinstance(v, bool) and low <= v <= high

    return valid, f"an integer from {low}" + ("" if high == math.inf else f" to {high}")


def _number(low: float, high: float, open_low: bool = False) -> tuple:
    def valid(v: Any) -> bool:
        if isinstance(v, bool) or not isinstance(v, (int, float)):
            return False
        return (low < v if open_low else low <= v) and v <= high

    return valid, f"a number in {'(' if open_low else '['}{low}, {high}]"


def _states() -> tuple:
    valid, text = _integer(1, MAX_DRAFT_STATES)
    return (lambda v: v == "auto" or valid(v)), f'"auto" or {text}'


# name -> (check, what is allowed); every field defaults to None, "not asked for".
MRP_FIELDS: dict[str, tuple] = {
    "mrp_mode": _one_of(*MODES),
    "mrp_steps": _integer(0, 64),
    "block_length": _integer(1, 1024),
    "denoising_steps": _integer(1, 1024),
    "remasking_strategy": _one_of(*STRATEGIES),
    "confidence_threshold": _number(0.0, 1.0),
    "entropy_bound": _number(0.0, math.inf),
    "confidence_resolution": _number(0.0, 0.5),
    "remask_rule": _one_of(*REMASK_RULES),
    "remask_delta": _number(0.0, math.inf),
    "mrp_context": _one_of(*CONTEXTS),
    "drafter": _one_of(*DRAFTERS),
    "draft_shape": _one_of(*DRAFT_SHAPES),
    "draft_states": _states(),
    "draft_shortlist": _integer(0, 256),
    "direct_tokens_per_step": _integer(1, 1024),
    "seed": _integer(0, 2**63 - 1),
    "row_seeds": (
        lambda v: isinstance(v, (list, tuple)) and all(isinstance(s, int) and 0 <= s < 2**31 for s in v),
        "a list of integers from 0 to 2^31 - 1, one for each row",
    ),
    "output_trace": ((lambda v: isinstance(v, bool)), "True or False"),
    "kernels": _one_of(*KERNELS),
}

_DEFAULTS: dict[str, Any] = {
    "mrp_mode": "speculative",
    "confidence_threshold": 0.9,
    "entropy_bound": 0.35,
    "confidence_resolution": 0.0,
    "remask_rule": "cross",
    "remask_delta": 2.0,
    "mrp_context": "prefix",
    "drafter": "head",
    "draft_shape": "lattice",
    "draft_states": "auto",
    "direct_tokens_per_step": 1,
    "output_trace": False,
}
_DEFAULT_STEPS = {"none": 0, "speculative": 1, "direct": 1, "remask": 1}
_DEFAULT_CHAIN_STEPS = 3
# Below this the LM head is cheap beside the layers, and a shortlist would save nothing.
_LARGE_VOCABULARY, _SHORTLIST = 16384, 64
_DEFAULT_TOP_K = 50  # transformers' own default for sampling


class MRPGenerationConfig(GenerationConfig):
    """Generation arguments of [`MRPForCausalLM`]: transformers' own and these. Unknown arguments are errors.

    Args:
        mrp_mode: `none` (plain SDAR decoding), `speculative` (lossless; default), `direct` (the head's picks are kept
            unverified), `remask` (dynamic decoding whose doubtful reveals are masked again).
        mrp_steps: head steps K. `direct`: unverified picks per backbone forward (default 1). `speculative` with
            `draft_shape="chain"`: head passes per round, K + 1 states are verified (default 3); with a lattice: head
            passes along its most likely trajectory (default 1).
        block_length: positions per block, default the model's `block_size`.
        denoising_steps: steps per block, 1 to `block_length` (default): step t reveals
            `block_length // steps + (t < block_length % steps)` positions.
        remasking_strategy: `low_confidence_static` (default), `low_confidence_dynamic` (default in `remask`),
            `sequential`, `entropy_bounded`. The names are SDAR's.
        confidence_threshold: tau of the dynamic strategy and of remasking, default 0.9.
        entropy_bound: of `entropy_bounded`, in nats, default 0.35.
        confidence_resolution: floors confidences to this step and breaks ties from the left; 0 = off, 0.01 is good.
        remask_rule: `cross` (default), `confidence` or `veto`; `remask_delta` is the veto's bound on a logit's move.
        mrp_context: what the head sees: `prefix` (as in training) or `block` (the public reference's speculation).
        drafter: `head`, or `zero` (the backbone's own logits; works without a trained head).
        draft_shape, draft_states: `lattice` (default) or `chain`; states verified per row and forward, or `auto`.
        draft_shortlist: tokens per position for which a draft computes the head's correction; 0 = all. Default 64 over
            large vocabularies.
        direct_tokens_per_step: positions that one head step reveals in `direct`.
        seed: of the sampling noise; default: drawn from torch's global generator. `row_seeds`: the row part of the
            noise's key (default 0, 1, 2, ...), so that a sampled row can be repeated alone.
        output_trace: also return the step and the source at which each token was revealed.
        kernels: `auto`, `torch` or `triton`; default the model config's.
    """

    def __init__(self, **kwargs: Any):
        for name in MRP_FIELDS:
            setattr(self, name, kwargs.pop(name, None))
        if not kwargs.get("_from_model_config"):
            unknown = {k for k, v in kwargs.items() if v is not None and not k.startswith("_")} - known_arguments()
            _reject_unknown(unknown)
        super().__init__(**kwargs)

    @classmethod
    def from_model_config(cls, model_config: Any) -> "MRPGenerationConfig":
        """Only the special tokens of a model config concern generation."""
        config = model_config if isinstance(model_config, dict) else model_config.to_dict()
        tokens = {n: config.get(n) for n in ("bos_token_id", "eos_token_id", "pad_token_id")}
        generation_config = cls(**{n: v for n, v in tokens.items() if v is not None})
        generation_config._original_object_hash = hash(generation_config)
        return generation_config

    def to_diff_dict(self) -> dict[str, Any]:
        """As in transformers, without the fields that were not asked for."""
        return {k: v for k, v in super().to_diff_dict().items() if v is not None or k not in MRP_FIELDS}

    def validate(self, *args: Any, **kwargs: Any) -> None:
        super().validate(*args, **kwargs)
        for name, (valid, allowed) in MRP_FIELDS.items():
            value = getattr(self, name, None)
            if value is not None and not valid(value):
                raise ValueError(f"{name}={value!r}; allowed: {allowed}.")


@dataclass(frozen=True)
class DecodingOptions:
    """Everything a decode loop reads, resolved and valid; the fields are those of `MRPGenerationConfig`.

    `temperature` 0 means greedy. `steps` is `mrp_steps`. `eos_token_ids` may be empty. `max_new_tokens` is per row in
    `generate` (from `max_length`), so it is not here.
    """

    mode: str
    steps: int
    block_length: int
    denoising_steps: int
    strategy: str
    threshold: float
    entropy_bound: float
    resolution: float
    remask_rule: str
    remask_delta: float
    context: str
    drafter: str
    draft_shape: str
    draft_states: int | str
    draft_shortlist: int
    direct_tokens: int
    temperature: float
    top_k: int
    top_p: float
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    mask_token_id: int
    kernels: str
    trace: bool

    def reveals_at(self, step: int) -> int:
        """Positions revealed at denoising step `step`: L // S + (step mod S < L mod S), at least 1."""
        count, extra = divmod(self.block_length, self.denoising_steps)
        return max(1, count + (step % self.denoising_steps < extra))


def resolve_options(values: dict[str, Any], model_config: Any) -> DecodingOptions:
    """The options that merged generation arguments ask for.

    Args:
        values: arguments by name, `None` for not asked.
        model_config: the model's `MRPConfig`.

    Raises:
        ValueError: unknown, unsupported, out-of-range or contradictory arguments.
    """
    asked = {name: value for name, value in values.items() if value is not None and not name.startswith("_")}
    _reject_unknown(set(asked) - known_arguments())
    for name, value in asked.items():
        if name in MRP_FIELDS:
            valid, allowed = MRP_FIELDS[name]
            if not valid(value):
                raise ValueError(f"{name}={value!r}; allowed: {allowed}.")
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise ValueError(
                    f"{name}={value!r} is not supported by block-diffusion decoding; allowed: "
                    f"{' or '.join(repr(v) for v in _NEUTRAL[name])}. Leave it out."
                )
        elif name not in _HARMLESS and value not in (False, 0, [], {}):
            raise ValueError(f"{name}={value!r} is not supported by block-diffusion decoding. Leave it out.")

    def get(name: str) -> Any:
        return asked.get(name, _DEFAULTS.get(name))

    mode = get("mrp_mode")
    block_length = asked.get("block_length", model_config.block_size)
    if block_length > model_config.max_position_embeddings:
        raise ValueError(
            f"block_length={block_length}; allowed: 1 to max_position_embeddings = "
            f"{model_config.max_position_embeddings}. Use the block length that the model was trained with, "
            f"{model_config.block_size}."
        )
    denoising_steps = asked.get("denoising_steps", block_length)
    if denoising_steps > block_length:
        raise ValueError(
            f"denoising_steps={denoising_steps} with block_length={block_length}; allowed: 1 to block_length. "
            "A step reveals at least one position."
        )
    dynamic = "low_confidence_dynamic"
    strategy = asked.get("remasking_strategy", dynamic if mode == "remask" else "low_confidence_static")
    if mode == "remask" and strategy != dynamic:
        raise ValueError(
            f"mrp_mode='remask' with remasking_strategy={strategy!r}; allowed: {dynamic!r}. Remasking takes back "
            "what the confidence threshold let through; leave remasking_strategy out, or use another mode."
        )
    if mode in ("none",) and asked.get("mrp_steps"):
        raise ValueError(
            f"mrp_steps={asked['mrp_steps']} with mrp_mode='none', which runs no head. Leave it out, or choose "
            "mrp_mode='speculative' or 'direct'."
        )
    if mode == "remask" and get("drafter") == "zero":
        raise ValueError("mrp_mode='remask' needs the head; drafter='zero' has none. Use drafter='head'.")
    chain = mode == "speculative" and get("draft_shape") == "chain"
    temperature, top_k, top_p = _sampling(asked)
    eos = asked.get("eos_token_id")
    eos_ids = tuple(int(e) for e in (eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]))
    pad = asked.get("pad_token_id")
    if pad is None:
        pad = eos_ids[0] if eos_ids else 0
    return DecodingOptions(
        mode=mode,
        steps=asked.get("mrp_steps", _DEFAULT_CHAIN_STEPS if chain else _DEFAULT_STEPS[mode]),
        block_length=block_length,
        denoising_steps=denoising_steps,
        strategy=strategy,
        threshold=float(get("confidence_threshold")),
        entropy_bound=float(get("entropy_bound")),
        resolution=float(get("confidence_resolution")),
        remask_rule=get("remask_rule"),
        remask_delta=float(get("remask_delta")),
        context=get("mrp_context"),
        drafter=get("drafter"),
        draft_shape=get("draft_shape"),
        draft_states=get("draft_states"),
        draft_shortlist=asked.get(
            "draft_shortlist", _SHORTLIST if model_config.vocab_size >= _LARGE_VOCABULARY else 0
        ),
        direct_tokens=get("direct_tokens_per_step"),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_token_ids=eos_ids,
        pad_token_id=int(pad),
        mask_token_id=model_config.mask_token_id,
        kernels=asked.get("kernels", model_config.kernels),
        trace=get("output_trace"),
    )


def _sampling(asked: dict[str, Any]) -> tuple[float, int, float]:
    """(temperature, top_k, top_p); temperature 0 is greedy, whatever `do_sample` says."""
    checks = {
        "temperature": _number(0.0, 1e6),
        "top_k": _integer(0),
        "top_p": _number(0.0, 1.0, open_low=True),
    }
    for name, (valid, allowed) in checks.items():
        if name in asked and not valid(asked[name]):
            raise ValueError(f"{name}={asked[name]!r}; allowed: {allowed}.")
    temperature = float(asked.get("temperature", 1.0))
    if not asked.get("do_sample", False) or temperature == 0.0:
        return 0.0, 0, 1.0
    return temperature, int(asked.get("top_k", _DEFAULT_TOP_K)), float(asked.get("top_p", 1.0))


def known_arguments() -> set[str]:
    """Names of every generation argument, transformers' own included."""
    own = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    return own | set(MRP_FIELDS) | set(_NEUTRAL) | _HARMLESS


def _reject_unknown(unknown: set[str]) -> None:
    if not unknown:
        return
    name = sorted(unknown)[0]
    close = difflib.get_close_matches(name, sorted(known_arguments()), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"unknown generation argument{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, sorted(unknown)))}.{hint} "
        f"Allowed beside transformers' own: {', '.join(MRP_FIELDS)}."
    )
