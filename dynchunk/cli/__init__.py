"""The command line: ``dynchunk segment``, ``audit``, ``lab``, ``bench`` and ``doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

import dynchunk
from dynchunk.cli import audit, bench, doctor, lab, segment

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(segment.segment)
app.command()(audit.audit)
app.command()(doctor.doctor)
app.add_typer(lab.lab, name="lab")
app.add_typer(bench.bench, name="bench")


def main() -> None:
    """Run the command line."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dynchunk {dynchunk.__version__}")
        raise typer.Exit


@app.callback()
def _dynchunk(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    """KV-cache compression in chunks whose boundaries follow the content."""
