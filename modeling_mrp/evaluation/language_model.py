"""The harness's model class `mrp`: the `hf` class with per-row decoding figures and a likelihood that is right."""

import json
import os
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
from lm_eval.api.model import hash_args
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm
from transformers.utils import logging

from .. import MRPConfig, MRPForCausalLM
from .figures import FigureBook, Figures, figures_of_batch
from .likelihood import BlockLikelihood, LikelihoodEstimate

logger = logging.get_logger(__name__)

FIGURES_KEY = "mrp_figures"
# What this class passes to `generate` itself: by name, what to use instead.
_SET_HERE = {
    "stop_strings": "until=...",
    "num_return_sequences": "the task's own `repeats`",
    "return_dict_in_generate": "mrp-eval as it is; the figures need it",
    "pad_token_id": "the tokenizer's",
    "tokenizer": "--model_args tokenizer=...",
}


class _Job(NamedTuple):
    """A generation request with its place in the harness's list, its prompt's length and its arguments as a key."""

    place: int
    request: Any
    length: int
    key: str


@register_model("mrp")
class MRPLM(HFLM):
    """Block-diffusion models with an MRP head, for the lm-evaluation-harness.

    All arguments of the `hf` class are accepted. Checkpoints load through `MRPForCausalLM`, so official SDAR-MRP and
    plain SDAR checkpoints work without remote code.

    Args:
        likelihood_order: `random` (the any-order bound; default) or `sequential`; see `likelihood.py`.
        likelihood_samples: orders per block where the likelihood is estimated.
        likelihood_seed: of these orders.
        likelihood_block_length: default the model's `block_size`.
    """

    AUTO_MODEL_CLASS = MRPForCausalLM

    def __init__(
        self,
        pretrained: Any = None,
        likelihood_order: str = "random",
        likelihood_samples: int = 32,
        likelihood_seed: int = 0,
        likelihood_block_length: int | None = None,
        **kwargs: Any,
    ):
        if pretrained is None:
            raise ValueError("no model is named; pass --model_args pretrained=FOLDER_OR_REPOSITORY_ID.")
        kwargs["backend"] = "causal"
        if _launched_processes() > 1 and not torch.accelerator.is_available():
            # Without it, accelerate takes each process of a machine without GPUs for the only one.
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        super().__init__(pretrained, **kwargs)
        self._join_processes(in_tensor_parallel=kwargs.get("tp_plan") is not None)
        if self.batch_size != "auto" and self._first_batch_size() < 1:
            raise ValueError(f"batch_size={self.batch_size}; allowed: a positive integer or auto.")
        self.figures = FigureBook()
        self.likelihood = BlockLikelihood(
            self.model,
            block_length=likelihood_block_length,
            order=likelihood_order,
            samples=likelihood_samples,
            seed=likelihood_seed,
            batch_size=self._first_batch_size(),
        )
        self._estimates: list[LikelihoodEstimate] = []

    def _join_processes(self, in_tensor_parallel: bool) -> None:
        # The parent class knows of other processes only on machines with several GPUs; elsewhere (CPU, one GPU per
        # machine) each process would evaluate everything and write its own results.
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and accelerator.num_processes > 1:
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        launched = _launched_processes()
        if launched > 1 and self._world_size != launched and not in_tensor_parallel:
            raise ValueError(
                f"WORLD_SIZE={launched}, but accelerate sees {self._world_size} process(es), so each would evaluate "
                "every document. On GPUs start with `accelerate launch --multi_gpu`; to use the CPU set "
                "ACCELERATE_USE_CPU=true."
            )

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        if pretrained.startswith(("/", "./", "../", "~")) and not os.path.isdir(pretrained):
            raise ValueError(f"pretrained={pretrained!r} is no folder; allowed: a model folder or a repository id.")
        named = {name: kwargs[name] for name in ("revision", "subfolder") if kwargs.get(name)}
        self._config = MRPConfig.from_pretrained(pretrained, **named)

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        # A probing forward over the whole context says nothing about decoding; `generate_until` halves on OOM instead.
        return int(self.max_batch_size)

    def _first_batch_size(self) -> int:
        return int(self.max_batch_size) if self.batch_size == "auto" else int(self.batch_size)

    # Generation

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts of the requests, in order; their decoding figures go to `self.figures` (and the harness's cache).

        Requests with equal arguments are decoded together, long prompts first. With `batch_size=auto` the batch starts
        at `max_batch_size` and halves when memory runs out.
        """
        jobs, copies = self._jobs(requests)
        texts: list[str] = [""] * len(requests)
        bar = tqdm(total=len(jobs), disable=disable_tqdm or self.rank != 0, desc="Running generate_until requests")
        jobs.sort(key=lambda job: (job.key, -job.length))
        size, begin = self._first_batch_size(), 0
        while begin < len(jobs):
            batch = [job for job in jobs[begin : begin + size] if job.key == jobs[begin].key]
            try:
                outcome = self._decode([job.request.args[0] for job in batch], batch[0].request.args[1])
            except torch.OutOfMemoryError:
                if self.batch_size != "auto" or size == 1:
                    raise
                size = max(1, size // 2)
                logger.warning(f"out of memory: batch size halved to {size}.")
                torch.cuda.empty_cache()
                continue
            for job, (text, record) in zip(batch, outcome, strict=True):
                texts[job.place] = text
                self._remember(job.request, text, record)
            begin += len(batch)
            bar.update(len(batch))
        bar.close()
        for place, original in copies.items():
            texts[place] = texts[original]
        return texts

    def _jobs(self, requests: list[Any]) -> tuple[list[_Job], dict[int, int]]:
        """Requests to decode, and places that only repeat another one.

        Under data parallelism the harness fills up short ranks with copies of their last request. Decoding needs no
        equal counts, so a copy takes the original's text and does not enter the figures.
        """
        seen: Counter[int] = Counter()
        first: dict[int, int] = {}
        jobs, copies = [], {}
        for place, request in enumerate(requests):
            seen[id(request)] += 1
            if seen[id(request)] > max(1, getattr(request, "repeats", None) or 1):
                copies[place] = first[id(request)]
                continue
            first.setdefault(id(request), place)
            context, arguments = request.args
            key = json.dumps(arguments, sort_keys=True, default=str)
            jobs.append(_Job(place, request, len(self.tok_encode(context)), key))
        return jobs, copies

    def _decode(self, contexts: list[str], arguments: dict[str, Any]) -> list[tuple[str, Figures]]:
        """Text and figures of each prompt; `arguments` are the request's own generation arguments."""
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        _check_arguments(arguments)
        kwargs = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
        until = handle_stop_sequences(kwargs.pop("until", None), eos=end)
        new_tokens = kwargs.pop("max_gen_toks")
        if not kwargs.get("do_sample") or kwargs.get("temperature") == 0.0:
            kwargs.pop("temperature", None)
            kwargs["do_sample"] = False
        room = self.max_length - new_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks={new_tokens}; allowed: less than the model's context of {self.max_length} tokens. Pass "
                "--gen_kwargs max_gen_toks=..., or --model_args max_length=... if the model can take more."
            )
        ids, mask = self.tok_batch_encode(contexts, left_truncate_len=room, truncation=self.truncation)
        stop = [text for text in until if text and text != end]
        started = time.perf_counter()
        output = self.model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=new_tokens,
            stop_strings=stop or None,
            tokenizer=self.tokenizer if stop else None,
            pad_token_id=self.tokenizer.pad_token_id,
            return_dict_in_generate=True,
            **kwargs,
        )
        sequences = output.sequences[:, ids.shape[1] :].tolist()  # waits for the device
        records = figures_of_batch(output, time.perf_counter() - started)
        texts = [
            postprocess_generated_text(self.tok_decode(tokens), until, self.think_end_token) for tokens in sequences
        ]
        return list(zip(texts, records, strict=True))

    def _remember(self, request: Any, text: str, record: Figures) -> None:
        self.figures.add(request, record)
        self.cache_hook.add_partial("generate_until", request.args, text)
        # Beside the text, so that a resumed run still knows the figures of what it does not decode again.
        self.cache_hook.add_partial(FIGURES_KEY, request.args, record)

    def recorded_figures(self, request: Any) -> list[Figures]:
        """Figures of a request of this run, or of an earlier run with the same cache; `[]` if there are none."""
        records = self.figures.take(request)
        if not records and self.cache_hook.dbdict is not None:
            stored = self.cache_hook.dbdict.get(hash_args(FIGURES_KEY, request.args))
            records = [stored] if stored else []
        return records

    # Likelihood

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, is greedy) of each request, as `likelihood.py` defines it.

        "Is greedy" means: `generate` in mode `none` produces exactly this continuation first.
        """
        self._estimates = []
        answers = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        for request, estimate in dict(zip(map(_Identity, requests), self._estimates, strict=True)).items():
            record = {
                "log_likelihood": estimate.value,
                "standard_error": estimate.standard_error,
                "samples": estimate.samples,
                "states": estimate.states,
                "likelihood_order": self.likelihood.order,
            }
            self.figures.add(request.request, record)
            self.cache_hook.add_partial(FIGURES_KEY, request.request.args, record)
        return answers

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Estimates for (texts, context ids, continuation ids); continuations of one context share its cache."""
        answers: list[Any] = [None] * len(requests)
        estimates: list[Any] = [None] * len(requests)
        known: dict[tuple, tuple] = {}
        order = sorted(range(len(requests)), key=lambda i: (requests[i][1], requests[i][2]))
        for place in tqdm(order, disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests"):
            texts, context, continuation = requests[place]
            context = context[-max(1, self.max_length - len(continuation)) :]
            key = (tuple(context), tuple(continuation))
            if key not in known:
                estimate = self.likelihood.estimate(context, continuation)
                greedy = estimate.first_pick_agrees and self._is_greedy(context, continuation)
                known[key] = (estimate, greedy)
            estimates[place], greedy = known[key]
            answers[place] = (estimates[place].value, greedy)
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answers[place])
        self._estimates.extend(estimates)
        return answers

    def _is_greedy(self, context: list[int], continuation: list[int]) -> bool:
        if not context:
            return False  # there is nothing to start `generate` from
        ids = torch.tensor([context], device=self.device)
        new = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=len(continuation),
            mrp_mode="none",
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
            block_length=self.likelihood.block_length,
        )
        return bool(new[0, len(context) :].tolist() == continuation)


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Refuses what would collide with this class's own arguments, or fail without a name inside the harness."""
    for name in sorted(set(arguments) & set(_SET_HERE)):
        raise ValueError(
            f"{name}={arguments[name]!r} in --gen_kwargs; mrp-eval sets it itself: use {_SET_HERE[name]}."
        )
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        value = arguments.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}={value!r}; allowed: an integer of at least 1.")


def _launched_processes() -> int:
    """How many processes torchrun, accelerate or a cluster's launcher has started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


class _Identity:
    """A request as a dictionary key by identity: padding copies of one request count once."""

    def __init__(self, request: Any):
        self.request = request

    def __hash__(self) -> int:
        return id(self.request)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.request is self.request
