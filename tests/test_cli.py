import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from dynchunk import Chunks
from dynchunk.audit import survival
from dynchunk.cli import app

SOURCE = Path(textwrap.__file__)


def run(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, ["segment", *map(str, arguments)])
    assert result.exit_code == code, result.output + str(result.exception)
    return result


@pytest.fixture(scope="module")
def report():
    return json.loads(run(SOURCE, "--json").stdout)


def test_content_boundaries_survive_and_a_fixed_grid_does_not(report):
    content, fixed = report["survival"]["content"], report["survival"]["fixed"]
    assert len(content) == len(fixed) == 16
    assert min(content) >= 0.99
    assert report["stride"] == 4
    assert [share for k, share in enumerate(fixed) if k % 4 == 0] == [1.0] * 4
    assert max(share for k, share in enumerate(fixed) if k % 4) < 0.01


def test_json_is_complete_and_true(report):
    assert report["ratio"] == pytest.approx(4.0, rel=0.02)
    assert 0 <= report["forced_share"] < 0.1
    assert set(report["utilisation"]) == set(report["utilisation_in_order"]) == {"8", "16", "32"}
    assert report["tokens"] == SOURCE.stat().st_size
    assert sum(report["lengths"]) == report["chunks"]
    assert sum(n * count for n, count in enumerate(report["lengths"])) == report["tokens"]
    assert report["rule"]["max_length"] == 16


def test_the_view_shows_figures_and_verdict(report):
    out = run(SOURCE).stdout
    text = " ".join(out.split())
    assert f"{report['tokens']:,} tokens in {report['chunks']:,} chunks" in text
    assert f"ratio {report['ratio']:.3f} tokens per entry" in text
    assert f"{report['forced_share']:.2%} of boundaries" in text
    assert "chunk lengths" in text
    assert re.search(r"content boundaries keep at least 99\.\d\d% of its chunks", text)
    assert out.startswith('"""Text wrapping and filling.\u23ce')


def test_survival_counts_whole_chunks():
    """A hand-made segmenter: chunks of 3 from the first 7 on."""

    def segment(tokens):
        seven = int((tokens == 7).nonzero()[0])
        starts = [0, 1, *range(seven, len(tokens), 3)]
        return Chunks.from_boundaries(sorted(set(starts)), len(tokens))

    tokens = torch.tensor([1, 2, 7, 4, 5, 6, 7, 8])
    # 4 chunks: [1] [2] [7 4 5] [6 7 8]; with one in front [x] [1 2] [7 4 5] [6 7 8].
    assert survival(segment, tokens, [0, 1, 2]) == [1.0, 0.5, 0.5]
    with pytest.raises(ValueError, match="tokens: expected at least one token"):
        survival(segment, tokens[:0])


def test_a_figure_is_drawn(tmp_path):
    run(SOURCE, "--plot", tmp_path / "figure.png", "--json")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_tokens_of_a_tokenizer(tmp_path):
    words = {word: i for i, word in enumerate(["[UNK]", "=", "\n", ".", "the", "cat", "sat"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "text"
    text.write_text("the cat sat . " * 40 + "sat the cat . the . cat sat " * 60)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        out = run(text, "--tokenizer", name, "--json", "--ratio", 3, "--score", "hash")
        assert json.loads(out.stdout)["tokens"] == 4 * 40 + 8 * 60


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "FILE: expected a file that exists, got "),
        (b"", [], "FILE: expected some text, got "),
        (b"\x7fELF\0\0\1", [], "binary (it holds NUL bytes)"),
        (b"caf\xe9 " * 99, ["--tokenizer", "TOKENIZER"], "FILE: expected UTF-8 text"),
        (b"text " * 99, ["--tokenizer", "no/such"], "--tokenizer: expected a tokenizer.json"),
        (b"text " * 99, ["--tokenizer", "."], "--tokenizer: expected a tokenizer.json"),
        (b"text " * 99, ["--tokenizer", "BROKEN"], "is no tokenizer.json"),
        (b"text " * 99, ["--ratio", "40"], "ratio: expected a number in"),
        (b"=" * 999, [], "ratio: expected one that this rule can reach"),
        (b"text " * 99, ["--radius", "-1"], "radius: expected an integer >= 0"),
        (b"text " * 99, ["--min-length", "4"], "radius: expected at least min_length - 1 = 3"),
        (b"a b c " * 99, ["--plot", "/no/such/folder/x.png"], "No such file or directory"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path, content, arguments, message):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    (tmp_path / "broken.json").write_text("{")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    names = {"TOKENIZER": tmp_path / "tokenizer.json", "BROKEN": tmp_path / "broken.json"}
    result = run(file, *(names.get(argument, argument) for argument in arguments), code=2)
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.stdout.startswith("dynchunk 0.")
