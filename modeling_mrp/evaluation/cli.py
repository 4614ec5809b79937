"""`mrp-eval`: the harness's command line with the model class `mrp`, decoding figures in the results, and sweeps."""

import sys


def main() -> None:
    """Runs `mrp-eval sweep ...`, or everything that `lm_eval` runs, with the same arguments.

    `--model` may be left out; it is then `mrp`.
    """
    if sys.argv[1:2] == ["sweep"]:
        from .sweep import main as sweep

        sweep(sys.argv[2:])
        return
    from lm_eval.__main__ import cli_evaluate

    from . import language_model  # noqa: F401  (registers the model class)
    from .results import figures_in_results

    sys.argv[1:] = with_default_model(sys.argv[1:])
    with figures_in_results():
        cli_evaluate()


def with_default_model(arguments: list[str]) -> list[str]:
    """The arguments with `--model mrp` added where a run names no model (nor a config file, which may name one)."""
    is_run = bool(arguments) and (arguments[0] == "run" or arguments[0].startswith("-"))
    names = {argument.split("=", 1)[0] for argument in arguments}
    if not is_run or names & {"--model", "-M", "--config", "-C", "--help", "-h"} or len(arguments) < 2:
        return arguments
    return [*arguments, "--model", "mrp"]


if __name__ == "__main__":
    main()
