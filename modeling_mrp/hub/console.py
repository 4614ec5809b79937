"""How the commands of this package print and fail."""

import sys
from collections.abc import Callable

import typer
from rich.console import Console

from .errors import HubError

_OUT = Console(soft_wrap=True, highlight=False, markup=False)


def say(text: str) -> None:
    """One line for the user, unwrapped."""
    _OUT.print(text)


def run_command(function: Callable[..., None]) -> None:
    """Runs `function` as a typer command; a `HubError` becomes its message and exit status 1."""
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command()(function)
    try:
        app()
    except HubError as error:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"error: {error}")
        sys.exit(1)
