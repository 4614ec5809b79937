"""A `Trainer` that trains the head alone, with the loss computed in the model's own forward."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from ..training_objective import TrainingObjective
from .muon import MuonWithAdamW
from .recorded_states import RecordedStates

HEAD_PREFIX = "mrp."
_VECTOR_SHARE = 0.25


def freeze_backbone(model: nn.Module) -> None:
    """Leaves only the head's parameters trainable."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{HEAD_PREFIX}" in f".{name}")


def freeze_head(model: nn.Module) -> None:
    """Leaves only the backbone's parameters trainable."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{HEAD_PREFIX}" not in f".{name}")


class HeadTrainer(Trainer):
    """Trains an MRP head.

    Args:
        objective: what the head is trained on.
        muon: use Muon for matrices, with the trainer's learning rate, and AdamW with a quarter of it for the rest.
        recorded_states: for `objective.layout="recorded"`.
        kwargs: of `transformers.Trainer`.
    """

    def __init__(
        self,
        *args: Any,
        objective: TrainingObjective,
        muon: bool = False,
        recorded_states: RecordedStates | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.muon, self.recorded_states = muon, recorded_states
        # The loss is already a mean; scaling by a count of labels would weigh accumulated batches wrongly.
        self.model_accepts_loss_kwargs = False
        self.objective = objective
        self._sums: dict[str, tuple[Any, int]] = {}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As configured by the trainer's arguments, or Muon."""
        if not self.muon or getattr(self, "optimizer", None) is not None:
            return super().create_optimizer(model)
        trained = [p for p in (self.model if model is None else model).parameters() if p.requires_grad]
        self.optimizer = MuonWithAdamW(
            [p for p in trained if p.ndim == 2],
            [p for p in trained if p.ndim != 2],
            lr=self.args.learning_rate,
            vector_lr=_VECTOR_SHARE * self.args.learning_rate,
            weight_decay=self.args.weight_decay,
        )
        return self.optimizer

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """The loss of `model.forward`, noised by (seed, step): exact on resume, equal for any number of ranks."""
        training = model.training
        draw = self.state.global_step + 1 if training else 0
        logs_next = (self.state.global_step + 1) % max(1, int(self.state.logging_steps or 1)) == 0
        outputs = model(
            **inputs,
            objective=self.objective,
            recorded_states=self.recorded_states,
            noise_seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
            noise_draw=draw,
            all_metrics=not training or logs_next,
        )
        self._collect(outputs.metrics)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, None, None]:
        """The loss alone: there are no logits for the whole sequence."""
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the objective's metrics, averaged since the last log."""
        evaluating = any(name.startswith("eval_") for name in logs)
        if "loss" in logs or evaluating:
            prefix = "eval_" if evaluating else ""
            logs = {**logs, **{prefix + name: value for name, value in self._take_metrics().items()}}
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Metrics of evaluation are not mixed with those of training."""
        kept, self._sums = self._sums, {}
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_{name}": value for name, value in self._take_metrics().items()})
        self._sums = kept
        return output

    def _collect(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value.detach(), count + 1)

    def _take_metrics(self) -> dict[str, float]:
        taken = {name: float(total) / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return taken
