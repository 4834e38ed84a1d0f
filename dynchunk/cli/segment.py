"""``dynchunk segment FILE``: chunk a text, and show what a shift leaves of its chunks."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dynchunk._checks import optional_import
from dynchunk.audit import SegmentationReport, report_segmentation
from dynchunk.boundaries import BoundaryRule, DelimiterScore, HashScore, Score, calibrate
from dynchunk.chunks import Chunks, Kind
from dynchunk.cli.common import clear_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Decode = Callable[[list[int]], str]

_SHOWN = 480  # tokens of the coloured view
_STYLES = ("black on cyan", "black on yellow")  # told apart on every terminal
_FORCED_STYLE = "black on red"


class ScoreName(StrEnum):
    """Scores that need no fitting."""

    DELIMITER = "delimiter"
    HASH = "hash"


def segment(
    file: Annotated[Path, typer.Argument(help="A text file.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="A tokenizer.json, a folder that holds one, or the name of a model in the local "
            "hub cache. Default: bytes are tokens."
        ),
    ] = None,
    ratio: Annotated[float, typer.Option(help="Tokens per chunk to calibrate to.")] = 4.0,
    score: Annotated[ScoreName, typer.Option(help="What decides.")] = ScoreName.DELIMITER,
    radius: Annotated[int, typer.Option(help="Radius of the local maxima.")] = 1,
    min_length: Annotated[int, typer.Option(help="Shortest chunk.")] = 1,
    max_length: Annotated[int, typer.Option(help="Longest chunk.")] = 16,
    plot: Annotated[Path | None, typer.Option(help="Write a figure here (PNG, SVG, ..).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Chunk a file, and show what is left of its chunks when tokens are put in front of it.

    The content rule stands beside a fixed stride of the same ratio.
    """
    with clear_errors():
        content = _read(file)
        tokens, decode, delimiters, filler = _tokenize(content, tokenizer)
        report = _report(tokens, delimiters, filler, score, ratio, radius, min_length, max_length)
        if plot is not None:
            report.plot(plot)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        Console().print(_render(report, file, tokens, decode))


def _read(file: Path) -> bytes:
    if not file.exists():
        raise ValueError(f"FILE: expected a file that exists, got {file}")
    if not file.is_file():
        raise ValueError(f"FILE: expected a file, got {file}, which is none")
    content = file.read_bytes()
    if not content:
        raise ValueError(f"FILE: expected some text, got {file}, which is empty")
    if b"\0" in content:
        raise ValueError(f"FILE: expected text, got {file}, which is binary (it holds NUL bytes)")
    return content


def _tokenize(content: bytes, name: str | None) -> tuple[Tensor, Decode, DelimiterScore, int]:
    """Tokens [T], a decoder for the view, the delimiter score, and the filler token "="."""
    if name is None:
        return (
            torch.frombuffer(bytearray(content), dtype=torch.uint8).long(),
            lambda ids: bytes(ids).decode(errors="replace"),
            DelimiterScore.from_bytes(),
            ord("="),
        )
    tokenizer = _load_tokenizer(name)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"FILE: expected UTF-8 text for a tokenizer, got {error}") from error
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise ValueError("FILE: expected text of at least one token, got none")
    filler = tokenizer.encode("=", add_special_tokens=False).ids or ids
    return (
        torch.tensor(ids, dtype=torch.int64),
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        DelimiterScore.from_tokenizer(tokenizer),
        filler[0],
    )


def _load_tokenizer(name: str) -> Tokenizer:
    tokenizers = optional_import("tokenizers", extra="hf")
    path = Path(name)
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.is_file():
        hub = optional_import("huggingface_hub", extra="hf")
        try:
            path = Path(hub.hf_hub_download(name, "tokenizer.json", local_files_only=True))
        except (OSError, ValueError) as error:
            raise ValueError(
                "--tokenizer: expected a tokenizer.json, a folder that holds one, or the name of a "
                f"model in the local hub cache, got {name!r}"
            ) from error
    try:
        loaded: Tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception on a malformed file
        raise ValueError(f"--tokenizer: {path} is no tokenizer.json: {error}") from error
    return loaded


def _report(
    tokens: Tensor,
    delimiters: DelimiterScore,
    filler: int,
    name: ScoreName,
    ratio: float,
    radius: int,
    min_length: int,
    max_length: int,
) -> SegmentationReport:
    score: Score = HashScore(4)
    if name is ScoreName.DELIMITER:
        score = delimiters + 0.5 * score  # the hash only orders tokens of one class
    rule = BoundaryRule(radius, min_length=min_length, max_length=max_length)
    # A short or repetitive text may allow no ratio nearer than this; what is reached is printed.
    rule = calibrate(rule, score(tokens), ratio, tolerance=0.5)
    return report_segmentation(tokens, score, rule, filler)


def _render(
    report: SegmentationReport,
    file: Path,
    tokens: Tensor,
    decode: Decode,
) -> Group:
    blocks: list[Any] = [
        _view(report.chunks, tokens, decode),
        _figures(report, file),
        _histogram(report),
        _survival_table(report),
        _verdict(report),
    ]
    return Group(*(part for block in blocks for part in (block, "")))


def _view(chunks: Chunks, tokens: Tensor, decode: Decode) -> Text:
    """Show the first tokens, each chunk on its own colour; red: it begins with a forced cut."""
    view = Text()
    spans = zip(chunks.starts.tolist(), chunks.ends.tolist(), chunks.kinds.tolist(), strict=True)
    for i, (start, end, kind) in enumerate(spans):
        if end > _SHOWN:
            break
        style = _FORCED_STYLE if kind == Kind.FORCED else _STYLES[i % len(_STYLES)]
        first, *others = decode(tokens[start:end].tolist()).expandtabs(4).split("\n")
        view.append(first, style)
        for line in others:
            view.append("\u23ce", style).append("\n").append(line, style)
    return view


def _figures(report: SegmentationReport, file: Path) -> Table:
    chunks, rule = report.chunks, report.rule
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_row("text", f"{file}: {chunks.num_tokens:,} tokens in {len(chunks):,} chunks")
    table.add_row(
        "rule",
        f"radius {rule.radius}, threshold {rule.threshold:.4g}, "
        f"length {rule.min_length} to {rule.max_length}",
    )
    table.add_row("ratio", f"{chunks.ratio:.3f} tokens per entry (fixed stride: {report.stride})")
    table.add_row("forced cuts", f"{chunks.forced_share:.2%} of boundaries")
    for name, shares in (
        ("rows used, best-fit", report.utilisation),
        ("rows used, in order", report.utilisation_in_order),
    ):
        row = ", ".join(f"{share:.1%} of tiles of {tile}" for tile, share in shares.items())
        table.add_row(name, row)
    return table


def _histogram(report: SegmentationReport, width: int = 40) -> Table:
    counts = torch.bincount(report.chunks.lengths).tolist()
    table = Table(title="chunk lengths", title_justify="left", box=None, padding=(0, 1))
    table.add_column("tokens", justify="right")
    table.add_column("chunks", justify="right")
    table.add_column()
    for length, count in enumerate(counts):
        if length > 0:
            bar = "\u2588" * round(width * count / max(counts))
            table.add_row(str(length), f"{count:,}", Text(bar, "blue"))
    return table


def _survival_table(report: SegmentationReport) -> Table:
    table = Table(title="chunks unchanged with tokens put in front", title_justify="left", box=None)
    table.add_column("tokens in front", justify="right")
    table.add_column("content", justify="right")
    table.add_column(f"fixed {report.stride}", justify="right")
    pairs = zip(report.survival["content"], report.survival["fixed"], strict=True)
    for shift, shares in enumerate(pairs):
        cells = (Text(f"{share:.2%}", "green" if share > 0.5 else "red") for share in shares)
        table.add_row(str(shift), *cells)
    return table


def _verdict(report: SegmentationReport) -> str:
    content, fixed = (min(report.survival[name]) for name in ("content", "fixed"))
    return (
        f"Put up to {len(report.survival['content']) - 1} tokens in front of this text: content "
        f"boundaries keep at least {content:.2%} of its chunks, a fixed stride of {report.stride} "
        f"as few as {fixed:.2%}."
    )
