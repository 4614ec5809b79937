"""`mrp-serve`: `transformers serve` (an OpenAI-compatible server) for MRP models.

transformers looks a model's class up in its own namespace, so the class is set there; the rest is transformers' server
with three differences that callers notice: a request that cannot be served is answered by a clear 4xx before anything
is generated, `seed` belongs to its request, and stop strings are cut off the answer, as OpenAI's servers do.
"""

import json
import sys
from typing import Any

import typer

from ..generation_config_mrp import resolve_options
from ..modeling_mrp import MRPForCausalLM
from .errors import HubError
from .stop_text import StoppingQueue, StopText

_DEFAULT_NEW_TOKENS = 1024
# Attributes on a request's generation config; generate() ignores names with an underscore.
_LENGTH_IS_DEFAULT = "_mrp_length_is_default"
_UNSUPPORTED = {
    "--continuous-batching": "it bypasses block-diffusion decoding",
    "--compile": "it asks for a static cache, which block-diffusion decoding does not use",
}


class RequestError(ValueError):
    """A request that cannot be served as asked; answered with status 400 and its message."""


def check_request(model: MRPForCausalLM, inputs: Any, generation_config: Any) -> None:
    """Refuses what `generate` would refuse, before an answer is begun.

    Raises:
        RequestError: unknown, contradictory or out-of-range arguments, or a prompt that is too long.
    """
    ids = inputs["input_ids"]
    room = model.config.max_position_embeddings - ids.shape[1]
    if getattr(generation_config, _LENGTH_IS_DEFAULT, False) and room > 0:
        generation_config.max_new_tokens = min(_DEFAULT_NEW_TOKENS, room)
    try:
        values = model._merge_arguments(generation_config, {})
        resolve_options(values, model.config)
        model._check_prompt(ids, inputs["attention_mask"])
        model._new_token_limits(list(ids), ids.shape[1], values)
    except (ValueError, TypeError) as error:
        raise RequestError(str(error)) from error


def request_config(build: Any, body: dict, model_config: Any) -> Any:
    """The generation config of a request.

    Args:
        build: transformers' own way from `body` to a generation config.
        model_config: the model's generation config.

    Raises:
        RequestError: `generation_config` is no JSON object with valid arguments, or `stop` no string or strings.
    """
    given = body.get("generation_config")
    try:
        asked = json.loads(given) if isinstance(given, str) else given or {}
        if not isinstance(asked, dict):
            raise ValueError(f"it is a JSON {type(asked).__name__}, not an object")
        if given is not None:
            body = {**body, "generation_config": json.dumps(asked)}
        config = build(body, model_config)
    except (ValueError, TypeError) as error:
        raise RequestError(f"generation_config={given!r}: {error}") from error
    stop = body.get("stop")
    if stop is not None and not (isinstance(stop, str) or _all_strings(stop)):
        raise RequestError(f"stop={stop!r}; allowed: a string or a list of strings.")
    lengths = [body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    if asked.get("max_new_tokens") is None and asked.get("max_length") is None and not any(lengths):
        setattr(config, _LENGTH_IS_DEFAULT, True)
    if body.get("seed") is not None:
        config.seed = body["seed"]
    # A temperature asks for sampling; the model's own default is greedy.
    if body.get("temperature") and "do_sample" not in asked:
        config.do_sample = True
    return config


def check_messages(messages: Any) -> None:
    """Refuses a chat that is not a list of messages.

    Raises:
        RequestError: it is none.
    """
    allowed = 'allowed: a list of objects like {"role": "user", "content": "..."}'
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages={messages!r}; {allowed}.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages hold {message!r}; {allowed}.")


def install() -> None:
    """Prepares transformers' server classes, in this process, for MRP models.

    Raises:
        HubError: this version of transformers has another server, or its requirements are not installed.
    """
    import transformers

    try:
        from fastapi import HTTPException
        from fastapi.responses import JSONResponse
        from transformers.cli.serving import chat_completion, completion, server, utils
    except ImportError as error:
        raise HubError(
            f"mrp-serve needs transformers' server ({error}). Run `pip install 'transformers[serving]'`, version 5.14 "
            "or newer."
        ) from error

    class Streamer(utils.DirectStreamer):
        """Streams text up to the first stop string."""

        stops: list[str] = []

        def __init__(self, tokenizer: Any, loop: Any, queue: Any, *args: Any, **kwargs: Any):
            super().__init__(tokenizer, loop, StoppingQueue(queue, self.stops), *args, **kwargs)

    class Manager(utils.GenerateManager):
        """Checks a request before it generates for it."""

        def generate_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
        ):
            check_request(model, inputs, gen_config)
            # The base class names its streamer's class; requests are handled on one event loop, so this is no race.
            Streamer.stops = _strings(gen_config.stop_strings)
            return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
        ):
            check_request(model, inputs, gen_config)
            text, length, ids = await super().generate_non_streaming(
                model, processor, inputs, gen_config, *args, **kwargs
            )
            return StopText(_strings(gen_config.stop_strings)).cut(text), length, ids

    def with_checks(handler: type) -> type:
        class Handler(handler):  # type: ignore[misc, valid-type]
            async def handle_request(self, body: dict, request_id: str):
                if self._wants_messages:
                    check_messages(body.get("messages"))
                return await super().handle_request(body, request_id)

            def _build_generation_config(self, body: dict, model_generation_config: Any, use_cb: bool = False):
                return request_config(super()._build_generation_config, body, model_generation_config)

        return Handler

    def build_server(*args: Any, **kwargs: Any):
        _list_the_pinned_model(args[0] if args else kwargs["model_manager"])
        app = original_server(*args, **kwargs)

        def reply(status: int, message: str) -> JSONResponse:
            # OpenAI's client shows what stands under "error".
            return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status_code=status)

        @app.exception_handler(RequestError)
        async def refuse(_: Any, error: RequestError):
            return reply(400, str(error))

        @app.exception_handler(HTTPException)
        async def explain(_: Any, error: HTTPException):
            return reply(error.status_code, str(error.detail))

        return app

    if isinstance(getattr(transformers, "MRPForCausalLM", None), type):
        return
    original_server = server.build_server
    transformers.MRPForCausalLM = MRPForCausalLM  # type: ignore[attr-defined]
    utils.DirectStreamer, utils.GenerateManager = Streamer, Manager  # type: ignore[misc]
    server.build_server = build_server
    for module, name, wants in (
        (chat_completion, "ChatCompletionHandler", True),
        (completion, "CompletionHandler", False),
    ):
        handler = with_checks(getattr(module, name))
        handler._wants_messages = wants  # type: ignore[attr-defined]
        setattr(module, name, handler)


def _list_the_pinned_model(manager: Any) -> None:
    """Before transformers 5.24, `/v1/models` listed the Hub cache only, and failed where there is none."""
    if hasattr(manager, "list_models") or manager.force_model is None:
        return
    model = {"id": manager.force_model, "object": "model", "created": 0, "owned_by": ""}
    manager.get_gen_models = lambda *_, **__: [model]


def _strings(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or [])


def _all_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


def main() -> None:
    """Console script `mrp-serve`; its arguments are those of `transformers serve`."""
    try:
        for option, reason in _UNSUPPORTED.items():
            if option in sys.argv[1:]:
                raise HubError(f"{option} is not supported: {reason}. Leave it out.")
        install()
    except HubError as error:
        sys.exit(f"error: {error}")
    from transformers.cli.serve import Serve

    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command(no_args_is_help=True)(Serve)
    app()


if __name__ == "__main__":
    main()
