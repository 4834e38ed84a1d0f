"""``dynchunk doctor``: what is installed, what each operation would use, what wrapping would do."""

from __future__ import annotations

import importlib
import json
import pkgutil
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import dynchunk.ops
from dynchunk._checks import optional_import, require
from dynchunk.cli.common import clear_errors, make_console
from dynchunk.ops._registration import default_impl

if TYPE_CHECKING:
    from dynchunk.integrations.hf.report import Report

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[.*?\])?(?P<range>[^;]*)(?:;(?P<marker>.*))?")

_OURS = ("dev", "docs", "test")  # extras for work on this package


class Version(NamedTuple):
    """A package that this one needs, or may need."""

    package: str
    required: str  #: range of versions
    extra: str  #: that brings it; "" if it is always needed
    installed: str | None


class Use(NamedTuple):
    """The implementation that an operation takes where none is named."""

    operation: str
    device: str
    dtype: str
    impl: str
    why: str


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model to wrap: a folder with its config.json, a GGUF file, or a name in the "
            "local hub cache. Weights are not read."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions and devices, what each operation would use and why, and what wrapping would do.

    Exit code 1 if there is a model that cannot be wrapped.
    """
    with clear_errors():
        report = None if model is None else report_model(model)
    found, uses = versions(), default_uses()
    if as_json:
        layers = None if report is None else _as_dict(report)
        tables = {
            "versions": [row._asdict() for row in found],
            "operations": [row._asdict() for row in uses],
        }
        typer.echo(json.dumps({"devices": devices(), **tables, "model": layers}))
    else:
        _print(make_console(), found, uses, report)
    if report is not None and report.problems:
        raise typer.Exit(1)


def versions() -> list[Version]:
    """Return the packages that the metadata of this one names, those always needed first.

    A package of several extras is of the smallest one: the metadata lists what an extra holds
    under every extra that holds it in turn.
    """
    extras: dict[str, list[Version]] = {}
    for line in metadata.requires("dynchunk") or ():
        match = _REQUIREMENT.fullmatch(line)
        assert match is not None, line
        extra = re.search(r"extra\s*==\s*['\"](\w+)", match["marker"] or "")
        name, needs = match["name"], extra[1] if extra else ""
        if name != "dynchunk" and needs not in _OURS:
            row = Version(name, match["range"].strip(), needs, _installed(name))
            extras.setdefault(needs, []).append(row)
    found: dict[str, Version] = {}
    for rows in sorted(extras.values(), key=lambda rows: (rows[0].extra != "", len(rows))):
        for row in rows:
            found.setdefault(row.package, row)
    return list(found.values())


def devices() -> dict[str, Any]:
    """Return what this machine computes with."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "gpus": [f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}" for gpu in gpus],
    }


def default_uses() -> list[Use]:
    """Return what each operation takes on the devices of this machine."""
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found = []
    for module in pkgutil.iter_modules(dynchunk.ops.__path__):
        if module.name.startswith("_"):
            continue
        ops = getattr(importlib.import_module(f"dynchunk.ops.{module.name}"), "OPS", {})
        for device in kinds if ops else []:
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                impl, why = default_impl(ops, device, dtype)
                name = str(dtype).removeprefix("torch.")
                found.append(Use(module.name, device, name, impl, why))
    return found


def report_model(model: str) -> Report:
    """Say what :func:`dynchunk.wrap` would do with a model, from its config alone."""
    transformers = optional_import("transformers", "hf")
    from dynchunk.integrations.wrap import supported

    path = Path(model)
    options: dict[str, Any] = {"local_files_only": True}
    if path.suffix == ".gguf":
        require(path.is_file(), "MODEL", "a file that exists", model)
        path, options = path.parent, options | {"gguf_file": path.name}
    elif path.exists():
        require((path / "config.json").is_file(), "MODEL", "a folder with a config.json", model)
    name = str(path) if path.exists() else model
    config = transformers.AutoConfig.from_pretrained(name, **options)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    found: Report = supported(empty)
    return found


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _as_dict(report: Report) -> dict[str, Any]:
    return {
        "class": report.model,
        "type": report.model_type,
        "tested": report.tested,
        "problems": list(report.problems),
        "layers": [
            {"index": x.index, "kind": x.kind, "wrapped": x.wrapped, "why": x.why}
            for x in report.layers
        ],
    }


def _print(console: Console, found: list[Version], uses: list[Use], report: Report | None) -> None:
    here = devices()
    gpus = ", ".join(here["gpus"]) or "no GPU"
    console.print(
        f"dynchunk {dynchunk.__version__}, Python {here['python']}, {here['platform']}\n"
        f"{here['threads']} CPU threads, {gpus}\n",
        highlight=False,
    )
    console.print(_version_table(found), _use_table(uses), sep="\n")
    if report is not None:
        console.print(Text(f"\n{report}"))


def _version_table(found: list[Version]) -> Table:
    table = Table("package", "needed", "installed", "", title="versions", title_justify="left")
    table.box = None
    for row in found:
        note = Text("")
        if row.installed is None:
            note = Text("missing", "red")
            if row.extra:
                note = Text(f"pip install 'dynchunk[{row.extra}]'", "yellow")
        table.add_row(row.package, row.required, row.installed or "-", note)
    return table


def _use_table(uses: list[Use]) -> Table:
    title = "operations, where no impl is named"
    table = Table("operation", "on", "uses", "why", title=title, title_justify="left")
    table.box = None
    grouped: dict[tuple[str, ...], list[str]] = {}
    for use in uses:
        grouped.setdefault((use.operation, use.device, use.impl, use.why), []).append(use.dtype)
    for (operation, device, impl, why), dtypes in grouped.items():
        table.add_row(operation, f"{device}, {' '.join(dtypes)}", impl, why)
    return table
