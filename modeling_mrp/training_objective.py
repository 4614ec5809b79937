"""What a head is trained on: the options of the objective, checked once."""

from dataclasses import dataclass, fields
from typing import Any

from .training_passes import LAYOUTS

REVEAL_RULES = ("ground_truth", "confident", "drafted", "recorded")
_CHOICES = {
    "layout": tuple(LAYOUTS),
    "head_prefix": ("clean", "chained"),
    "loss": ("forward_kl", "reverse_kl", "cross_entropy", "denoising"),
    "noise_level": ("sample", "block", "recorded"),
    "reveal_rule": REVEAL_RULES,
    "weighting": ("uniform", "inverse_rate"),
    "normalizer": ("weight", "answer_length"),
}


@dataclass(frozen=True)
class TrainingObjective:
    """What the head is trained on. The published recipe is `PUBLISHED_OBJECTIVE`.

    Attributes:
        steps: K, chained head steps per noisy copy.
        layout: `"shared"`, `"packed"` (same numbers, plainly computed), `"single"`, or `"recorded"` (the backbone's
            hidden states read from `data.recorded_states`); see `training_passes.py`.
        head_prefix: what the head sees of earlier blocks: `"clean"` as in decoding, or `"chained"`.
        loss: `"forward_kl"` KL(B || A + C), `"reverse_kl"` KL(A + C || B), `"cross_entropy"` against the true tokens,
            or `"denoising"`: no head at all, the backbone's own masked cross-entropy (to fine-tune the backbone).
        temperature: tau of both softmaxes; the KL is multiplied by tau^2.
        noise_level: `"sample"`, `"block"` or `"recorded"`; see `noising.draw_noise`.
        copies: noisy copies per clean sample.
        reveal_rule: what each step reveals: `"ground_truth"`: the true tokens of random places; `"confident"`: what
            the backbone would reveal itself; `"drafted"`: the same, but from step 2 on what the head's own corrected
            logits would reveal, as in direct decoding; `"recorded"`: the next of the recorded trajectory.
        reveals: lowest and highest number of places that a step reveals in a block, drawn uniformly.
        supervise_revealed: weight of one just revealed place per block and step. Its teacher is the backbone with
            that place masked and the others revealed: what remasking by corrected confidence needs.
        certainty_weight: weight of a Huber loss on the log-odds of the teacher's token, which the KL hardly feels near
            probability 1, although they decide the order of the reveals; see `row_losses.py`.
        weighting: `"uniform"` or `"inverse_rate"`, 1/t.
        normalizer: `"weight"`: N_k = the sum of the weights, positive wherever anything is supervised;
            `"answer_length"`: N_k = (number of labels) - (sum over revealed places of 1/t) as published, replaced by
            the former where it is not positive.
        step_weights: weights of L_1..L_K, default 1/K each.
        gradient_checkpointing: recompute the head's activations in the backward pass.
        chunk_tokens: tokens whose logits exist at a time; default: as fit 256 MiB.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int = 1
    layout: str = "shared"
    head_prefix: str = "clean"
    loss: str = "forward_kl"
    temperature: float = 1.0
    noise_level: str = "block"
    copies: int = 1
    reveal_rule: str = "confident"
    reveals: tuple[int, int] = (1, 1)
    supervise_revealed: float = 0.0
    certainty_weight: float = 0.0
    weighting: str = "uniform"
    normalizer: str = "weight"
    step_weights: tuple[float, ...] | None = None
    gradient_checkpointing: bool = False
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}; allowed: {', '.join(map(repr, allowed))}.")
        low, high = self.reveals
        checks = {
            "steps": (self.steps >= 1, "at least 1"),
            "copies": (self.copies >= 1, "at least 1"),
            "temperature": (self.temperature > 0, "above 0"),
            "reveals": (1 <= low <= high, "two numbers, 1 <= lowest <= highest"),
            "supervise_revealed": (self.supervise_revealed >= 0, "0 or more"),
            "certainty_weight": (
                self.certainty_weight == 0 or (self.certainty_weight > 0 and self.loss == "forward_kl"),
                "0, or more with loss='forward_kl'",
            ),
            "step_weights": (
                self.step_weights is None or len(self.step_weights) == self.steps, f"{self.steps} numbers or null"
            ),
            "chunk_tokens": (self.chunk_tokens is None or self.chunk_tokens >= 1, "at least 1, or null"),
        }  # fmt: skip
        for name, (holds, wanted) in checks.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r}; allowed: {wanted}.")
        if self.reveal_rule == "recorded" and self.noise_level != "recorded":
            raise ValueError("reveal_rule='recorded' continues a recorded state; set noise_level='recorded' too.")
        if self.layout == "recorded" and (
            self.reveal_rule != "recorded" or self.loss == "denoising" or self.head_prefix != "clean"
        ):
            raise ValueError(
                f"layout='recorded' with reveal_rule={self.reveal_rule!r}, loss={self.loss!r}, head_prefix="
                f"{self.head_prefix!r}: a recording holds the backbone's own trajectories alone. Allowed: "
                "reveal_rule='recorded', a loss of the head, head_prefix='clean'."
            )
        if self.layout == "single" and self.noise_level != "sample":
            raise ValueError(
                f"layout='single' noises whole samples; noise_level={self.noise_level!r} leaves a block's "
                "neighbours in states that decoding never meets. Use noise_level='sample'."
            )

    @classmethod
    def of(cls, value: "TrainingObjective | dict[str, Any] | None") -> "TrainingObjective":
        """An objective from a dict (as YAML gives it), or as it is; unknown names are an error."""
        if value is None or isinstance(value, cls):
            return value or cls()
        if not isinstance(value, dict):  # an objective of another copy of this module (Hub remote code)
            value = {field.name: getattr(value, field.name) for field in fields(cls)}
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise ValueError(f"objective: unknown {unknown}; allowed: {known}.")
        value = {name: tuple(entry) if isinstance(entry, list) else entry for name, entry in value.items()}
        return cls(**value)


PUBLISHED_OBJECTIVE = TrainingObjective(
    layout="packed", head_prefix="chained", noise_level="sample", reveal_rule="ground_truth",
    weighting="inverse_rate", normalizer="answer_length",
)  # fmt: skip
