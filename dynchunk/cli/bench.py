"""``dynchunk bench``: the tensor cores, and the benchmarks of a source tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

import dynchunk
from dynchunk.cli.common import clear_errors
from dynchunk.cli.tensor_cores import tensor_cores

bench = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Figures measured on this machine."
)

bench.command("tensor-cores")(tensor_cores)

_FOLDER = Path(dynchunk.__file__).parents[1] / "benchmarks"
_SCRIPTS = {
    "decode": "One decode step beside torch's attention.",
    "prefill": "A prompt beside torch's and transformers' attention.",
    "memory": "Peak memory of a prompt.",
    "train": "Forward and backward of one layer.",
    "streaming": "A streaming cache, token by token.",
    "wrap": "A decode step of a wrapped model.",
    "wrap-v4": "A prompt to a wrapped DeepSeek V4.",
    "training-free": "Loss, questions found and bytes of compression without training.",
    "selection-scores": "Attention that scores of chunks miss.",
}


def script_of(name: str) -> Path:
    """Return where the script of a command is, in a source tree."""
    return _FOLDER / f"{name.replace('-', '_')}.py"


def _command(name: str, text: str) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @bench.command(name, help=f"{text} Options are those of the script (--help).",
                   context_settings=settings)  # fmt: skip
    def run(context: typer.Context) -> None:
        script = script_of(name)
        with clear_errors():
            if not script.is_file():
                raise FileNotFoundError(
                    f"{script} is not there: benchmarks are run from a source tree, "
                    "they are not part of an installed package"
                )
        raise typer.Exit(subprocess.call([sys.executable, str(script), *context.args]))


for _name, _text in _SCRIPTS.items():
    _command(_name, _text)
