"""What commands share: errors of one line, and a console."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

_FILE_WIDTH = 160  # columns where no terminal says how many it has


def make_console() -> Console:
    """Return a console that does not squeeze tables into a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what a user can cause into one line on stderr and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
