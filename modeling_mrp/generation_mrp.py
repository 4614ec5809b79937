"""`generate` of an MRP model: transformers' signature and habits over the decode engine."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.utils import logging

from .block_attention import check_attention_mask
from .decode_engine import DecodeEngine
from .decode_state import Counters
from .end_conditions import EndConditions, RowText
from .generation_config_mrp import DecodingOptions, MRPGenerationConfig, known_arguments, resolve_options
from .generation_output import MRPGenerateOutput
from .prefix_handle import PrefixHandle

logger = logging.get_logger(__name__)

NO_CONTINUOUS_BATCHING = "continuous batching is not supported by block-diffusion models; use generate()."
_DEFAULT_NEW_TOKENS = 256
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class MRPGenerationMixin:
    """Overrides `generate`; mixed in before transformers' `GenerationMixin`."""

    generation_config_class = MRPGenerationConfig
    generation_config: MRPGenerationConfig
    config: Any

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """Loads the generation config as usual and gives it its own, validated class."""
        super().adjust_generation_fn(*args, **kwargs)  # type: ignore[misc]
        loaded = self.generation_config
        values = {k: v for k, v in loaded.to_dict().items() if v is not None and not k.startswith("_")}
        # transformers hands keyword arguments of from_pretrained that were meant for the model config here as well.
        values = {k: v for k, v in values.items() if k not in kwargs or k in known_arguments()}
        if getattr(loaded, "_from_model_config", False):
            # There was no generation_config.json; config.json's training-time entries (use_cache) are no wish.
            values = {name: values[name] for name in _SPECIAL_TOKENS if name in values}
        self.generation_config = MRPGenerationConfig(**values)
        self.generation_config._original_object_hash = hash(self.generation_config)

    @property
    def init_continuous_batching(self) -> Any:
        """Absent, because it would bypass block diffusion: tools ask `hasattr` and then call `generate`."""
        raise AttributeError(NO_CONTINUOUS_BATCHING)

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        stopping_criteria: Any = None,
        streamer: Any = None,
        tokenizer: Any = None,
        past_key_values: PrefixHandle | None = None,
        return_cache: bool = False,
        **kwargs: Any,
    ) -> Tensor | MRPGenerateOutput:
        """Generates by block diffusion; the arguments are transformers' own and those of [`MRPGenerationConfig`].

        Args:
            inputs: `[rows, columns]` int64 prompt ids (or `input_ids`), padded left or right under `attention_mask`.
            generation_config: default: the model's own; keyword arguments win over both.
            stopping_criteria: called on growing prefixes, one token at a time.
            streamer: gets the prompt, then finished tokens in order (one row only).
            tokenizer: needed for `stop_strings`.
            past_key_values: the handle of an earlier call; a prompt that continues it is not read again. With
                `return_cache=True` (and `return_dict_in_generate=True`) the output carries a new one.

        Returns:
            `[rows, columns + new]` int64: prompts as given, then new tokens, then the pad token; or
            [`MRPGenerateOutput`] with `return_dict_in_generate=True`.

        Raises:
            ValueError: unknown or contradictory arguments, or a prompt that cannot be decoded, by name, with what is
                allowed.
            BrokenLogitsError: the model produced NaN.
        """
        past_key_values = kwargs.pop("cache", None) or past_key_values
        input_ids, attention_mask = _take_inputs(inputs, kwargs)
        values = self._merge_arguments(generation_config, kwargs)
        options = resolve_options(values, self.config)
        if attention_mask is None:
            attention_mask = _infer_mask(input_ids, values)
        self._check_prompt(input_ids, attention_mask)
        copies = values.get("num_return_sequences", 1)
        if not isinstance(copies, int) or isinstance(copies, bool) or copies < 1:
            raise ValueError(f"num_return_sequences={copies!r}; allowed: an integer of at least 1.")
        if copies > 1:
            if options.temperature == 0:
                raise ValueError(
                    f"num_return_sequences={copies} without sampling gives equal rows; allowed: 1. "
                    "Set do_sample=True with a temperature above 0."
                )
            input_ids = input_ids.repeat_interleave(copies, dim=0)
            attention_mask = attention_mask.repeat_interleave(copies, dim=0)
        if streamer is not None and input_ids.shape[0] > 1:
            raise ValueError(f"a streamer takes one row, not {input_ids.shape[0]}; call generate row by row.")
        prompts = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        limits = self._new_token_limits(prompts, input_ids.shape[1], values)
        rows = [RowText(prompt.tolist(), limit) for prompt, limit in zip(prompts, limits, strict=True)]
        stop_strings = _stop_string_criterion(values.get("stop_strings"), tokenizer)
        ends = EndConditions(
            input_ids, rows, options.eos_token_ids, options.pad_token_id, stop_strings, stopping_criteria
        )
        seed, row_keys = _noise_keys(values, options, len(rows), input_ids.device)
        caches, reused = None, 0
        if past_key_values is not None:
            needs_head = options.drafter == "head" and options.mode != "none"
            reused = past_key_values.shared_blocks(prompts, options, needs_head)
            if reused:
                caches = (past_key_values.stack, past_key_values.runner if needs_head else None)
                # This call overwrites what lies behind the shared prefix: the old handle holds nothing any more.
                past_key_values.tokens = []
        if streamer is not None:
            streamer.put(input_ids[0].cpu())
        engine = DecodeEngine(self, options, prompts, ends, seed, row_keys, streamer, caches, reused)
        counters = engine.run()
        if streamer is not None:
            streamer.end()
        sequences = _assemble(input_ids, rows, options.pad_token_id)
        if not values.get("return_dict_in_generate"):
            return sequences
        output = _describe(sequences, input_ids.shape[1], rows, counters, options)
        if return_cache:
            output.cache = engine.prefix_handle()
        return output

    def _merge_arguments(self, given: GenerationConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments win over a given config, which wins over the model's own."""
        for name in ("synced_gpus", "custom_generate", "trust_remote_code"):
            kwargs.pop(name, None)
        for name in ("logits_processor", "prefix_allowed_tokens_fn", "assistant_model", "negative_prompt_ids"):
            if kwargs.pop(name, None):
                raise ValueError(f"{name} is not supported by block-diffusion decoding. Leave it out.")
        values: dict[str, Any] = {}
        for config in (self.generation_config, given):
            if config is not None:
                values.update({k: v for k, v in config.to_dict().items() if v is not None and not k.startswith("_")})
        if given is not None and given.max_length is not None and given.max_new_tokens is None:
            values.pop("max_new_tokens", None)
        if kwargs.get("max_length") is not None and kwargs.get("max_new_tokens") is None:
            values.pop("max_new_tokens", None)
        values.update({name: value for name, value in kwargs.items() if value is not None})
        return values

    def _check_prompt(self, input_ids: Tensor, attention_mask: Tensor) -> None:
        config = self.config
        check_attention_mask(attention_mask, input_ids)
        real = input_ids[attention_mask.bool()]
        if bool(((real < 0) | (real >= config.vocab_size)).any()):
            wrong = int(real[(real < 0) | (real >= config.vocab_size)][0])
            raise ValueError(
                f"input_ids hold {wrong}; allowed: 0 to vocab_size - 1 = {config.vocab_size - 1}. Use the model's own "
                "tokenizer."
            )
        longest = int(attention_mask.sum(dim=1).max())
        if longest >= config.max_position_embeddings:
            raise ValueError(
                f"the longest prompt has {longest} tokens; allowed: fewer than max_position_embeddings = "
                f"{config.max_position_embeddings}. Shorten the prompt."
            )

    def _new_token_limits(self, prompts: list[Tensor], columns: int, values: dict[str, Any]) -> list[int]:
        """New tokens allowed per row, checked against the context before any work starts."""
        context = self.config.max_position_embeddings
        asked: Any
        asked, max_length = values.get("max_new_tokens"), values.get("max_length")
        longest = max(len(prompt) for prompt in prompts)
        if asked is None and max_length is None:
            return [min(_DEFAULT_NEW_TOKENS, context - len(prompt)) for prompt in prompts]
        if asked is None and max_length is not None:
            asked = int(max_length) - columns
            if asked < 1:
                raise ValueError(
                    f"max_length={max_length} leaves no room behind a prompt of {columns} tokens; allowed: more than "
                    f"{columns}. Raise max_length, or set max_new_tokens."
                )
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
            raise ValueError(f"max_new_tokens={asked!r}; allowed: an integer of at least 1.")
        if longest + asked > context:
            raise ValueError(
                f"a prompt of {longest} tokens plus {asked} new ones exceeds max_position_embeddings = {context}; "
                f"allowed: at most {context - longest} new tokens. Lower max_new_tokens or shorten the prompt."
            )
        return [asked] * len(prompts)


def _take_inputs(inputs: Tensor | None, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    input_ids = kwargs.pop("input_ids", None)
    attention_mask = kwargs.pop("attention_mask", None)
    if (inputs is None) == (input_ids is None):
        raise ValueError("generate needs exactly one of inputs and input_ids: prompt ids of shape [rows, columns].")
    input_ids = inputs if input_ids is None else input_ids
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids is {shape}; allowed: an integer tensor of shape [rows, columns].")
    if input_ids.numel() == 0:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}: the prompt is empty. Give at least one row of one token."
        )
    kwargs.pop("token_type_ids", None)
    return input_ids.long(), attention_mask


def _infer_mask(input_ids: Tensor, values: dict[str, Any]) -> Tensor:
    """As in transformers: the pad token is padding only where it is no end token as well."""
    pad, eos = values.get("pad_token_id"), values.get("eos_token_id")
    ends = eos if isinstance(eos, (list, tuple)) else [eos]
    if pad is None or pad in ends or not bool((input_ids == pad).any()):
        return torch.ones_like(input_ids)
    return (input_ids != pad).long()


def _stop_string_criterion(strings: Any, tokenizer: Any) -> StopStringCriteria | None:
    if not strings:
        return None
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} needs the tokenizer: pass generate(..., tokenizer=tokenizer).")
    return StopStringCriteria(tokenizer, strings)


def _noise_keys(
    values: dict[str, Any], options: DecodingOptions, rows: int, device: torch.device
) -> tuple[int, Tensor]:
    """Base seed and row keys; the seed comes from torch's global generator, so `set_seed` works as everywhere."""
    row_seeds = values.get("row_seeds")
    if row_seeds is not None and len(row_seeds) != rows:
        raise ValueError(f"row_seeds has {len(row_seeds)} entries; allowed: one for each of the {rows} rows.")
    keys = torch.tensor(row_seeds if row_seeds is not None else range(rows), dtype=torch.int64, device=device)
    seed = values.get("seed")
    if seed is None:
        seed = int(torch.randint(0, 2**63 - 1, (1,))) if options.temperature > 0 else 0
    return seed, keys


def _assemble(input_ids: Tensor, rows: list[RowText], pad_token_id: int) -> Tensor:
    width = max(len(row.tokens) for row in rows)
    new = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    for index, row in enumerate(rows):
        new[index, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int64)
    return torch.cat([input_ids, new.to(input_ids.device)], dim=1)


def _describe(
    sequences: Tensor, columns: int, rows: list[RowText], counters: Counters, options: DecodingOptions
) -> MRPGenerateOutput:
    new_tokens = torch.tensor([len(row.tokens) for row in rows])
    forwards = torch.from_numpy(counters.backbone_forwards)
    output = MRPGenerateOutput(
        sequences=sequences,
        tokens_per_forward=new_tokens / forwards.clamp(min=1),
        new_tokens=new_tokens,
        backbone_forwards=forwards,
        total_forwards=counters.total_forwards,
        prefill_forwards=counters.prefill_forwards,
        segments=torch.from_numpy(counters.segments),
        head_passes=torch.from_numpy(counters.head_passes),
        drafts_proposed=torch.from_numpy(counters.drafts_proposed),
        drafts_accepted=torch.from_numpy(counters.drafts_accepted),
        reveals_taken_back=torch.from_numpy(counters.reveals_taken_back),
        order="stable" if options.resolution > 0 else "published",
    )
    if counters.reveals is not None:
        for name, source in zip(("reveal_step", "reveal_source"), counters.reveals, strict=True):
            trace = torch.full_like(sequences, -1)
            for index, row in enumerate(rows):
                begin, count = len(row.prompt), len(row.tokens)
                trace[index, columns : columns + count] = source[index, begin : begin + count]
            setattr(output, name, trace)
    return output
