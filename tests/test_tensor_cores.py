import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dynchunk import Chunks
from dynchunk.bench import accounting, measured, offline
from dynchunk.bench.accounting import AttendTile, attention_shares, row_shares, work
from dynchunk.bench.problems import Maker, Sizes
from dynchunk.cli import app
from dynchunk.ops.layout import Reads

ROOT = Path(__file__).parents[1]
TILE = AttendTile(64, 32, 16)
TINY = Sizes(
    lengths=(9, 0, 14),
    heads=4,
    kv_heads=2,
    width=16,
    window=3,
    topk=3,
    index_heads=2,
    contexts=(1, 5, 70),
)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["bench", "tensor-cores", *map(str, arguments)])
    assert result.exit_code == code, result.output + str(result.exception)
    return result


@pytest.fixture(scope="module")
def text():
    return Path(argparse.__file__).read_bytes()


@pytest.fixture(scope="module")
def shares(text):
    return accounting.account(text, {"8 heads": (8, TILE), "64 heads": (64, TILE)})


# Accounting


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("tile", [AttendTile(4, 8, 8), AttendTile(8, 4, 2), AttendTile(64, 32, 16)])
def test_work_is_what_a_loop_over_tiles_counts(heads, tile):
    generator = torch.Generator().manual_seed(0)
    low = torch.randint(0, 20, (41,), generator=generator).sort().values
    high = low + torch.randint(0, 30, (41,), generator=generator)
    rows = [(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True) for _ in range(heads)]
    useful = issued = 0
    for i in range(0, len(rows), tile.rows):
        mine = rows[i : i + tile.rows]
        useful += sum(b - a for a, b in mine)
        at, last = min(a for a, _ in mine), max(b for _, b in mine)
        all_from, all_to = max(a for a, _ in mine), min(b for _, b in mine)
        while at < last:
            is_full = all_from <= at and at + tile.columns <= all_to
            at += tile.columns if is_full else tile.border
            issued += tile.rows * (tile.columns if is_full else tile.border)
    assert work(low, high, heads, tile) == (useful, issued)


def test_shares_of_rows_by_hand():
    assert row_shares(Chunks.from_lengths([5, 4, 3]), 8) == {
        "chunk by chunk": 12 / 24,
        "in order": 12 / 16,
        "best-fit": 12 / 16,
    }


def test_no_token_is_no_waste():
    assert set(row_shares(Chunks.fixed(4, 0), 8).values()) == {1.0}
    reads = Reads.of(Chunks.fixed(4, 0), window=2)
    assert set(attention_shares(reads, 8, TILE).values()) == {1.0}


def test_tiles_of_unequal_chunks_are_full(shares):
    useful = {(x.policy, x.tile): x.useful_share for x in shares if x.layout == "best-fit"}
    assert useful["content", "16"] >= 0.95
    assert useful["content", "32"] >= 0.97
    assert useful["content", "32"] > useful["fixed 5", "32"]


def test_attention_over_entries_wastes_little(shares):
    useful = {(x.policy, x.layout): x.useful_share for x in shares if x.work == "entries"}
    assert len(useful) == 4
    assert all(share >= 0.9 for share in useful.values())


def test_the_ratio_is_that_of_the_goal(text):
    found = accounting.policies(text)
    assert found["content"].ratio == pytest.approx(4.8, abs=0.05)
    assert found["fixed 5"].ratio == 5.0


# Measurement, with a clock that shows what it is asked to


def test_every_operation_is_timed_forward_and_backward():
    def timer(work):
        work()
        return 2.0

    found = list(
        measured.measure(
            torch.device("cpu"),
            timer=timer,
            large=TINY,
            wide=TINY._replace(kv_heads=1),
            long=TINY,
            ceiling=64,
            impl="reference",
        )
    )
    assert [x.operation for x in found[:2]] == ["matmul", "copy"]
    assert found[0].tflops == pytest.approx(2 * 64**3 / 2e-3 / 1e12)
    assert found[1].gigabytes == pytest.approx(2 * 4 * 64**2 * 4 / 2e-3 / 1e9)
    shapes = {x.shape for x in found if x.operation.startswith("pool (")}
    assert shapes == {"content boundaries", "fixed stride 4"}
    both = {x.direction for x in found if x.operation == "scaled_dot_product_attention"}
    assert both == {"forward", "backward"}
    for x in found[2:]:
        ceiling = found[0].tflops if x.tflops is not None else found[1].gigabytes
        assert x.of_ceiling == pytest.approx((x.tflops or x.gigabytes) / ceiling)


def test_flops_of_an_attention_are_those_of_the_rows_it_reads():
    problem = Maker(TINY, torch.float32, torch.device("cpu")).attend()
    reads = Maker(TINY, torch.float32, torch.device("cpu")).reads
    own = torch.arange(1, 24)
    products = int(reads.n_visible.sum() + (own - reads.raw_start).sum())
    assert problem.flops == (2 * 2 * 16 * 4 * products, 5 * 2 * 16 * 4 * products)


# The command


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(measured, "is_possible", lambda: False)
    assert "not measured: there is no CUDA device here" in run("--only", "measured").stdout


def test_json_of_the_counts():
    rows = json.loads(run("--only", "accounting", "--json", "-").stdout)
    assert rows["offline"] == rows["measured"] == []
    assert {"policy", "tile", "useful_share", "ratio", "work", "layout"} == set(
        rows["accounting"][0]
    )
    assert {row["tile"] for row in rows["accounting"]} >= {"8", "16", "32"}
    assert all(0 < row["useful_share"] <= 1 for row in rows["accounting"])


@pytest.fixture
def keep(monkeypatch):
    """Keep one kernel, as it is or changed."""
    pytest.importorskip("triton", reason="triton is not made for this platform")
    from dynchunk_kernels import offline as kernels

    plain = kernels.cases_of("pack")

    def only(n=1, **changes):
        changed = [plain[0]._replace(config=f"{i}", **changes) for i in range(n)]
        monkeypatch.setattr(kernels, "modules", lambda: ["pack"])
        monkeypatch.setattr(kernels, "cases_of", lambda module: changed)

    return only


def test_machine_code_in_a_table_and_in_json(keep, tmp_path):
    keep()
    path = tmp_path / "found.json"
    out = run("--only", "offline", "--arch", "90", "--json", path).stdout
    assert "gather_rows" in out
    (row,) = json.loads(path.read_text())["offline"]
    names = "kernel config arch registers spill_bytes shared_bytes shared_limit mma ok".split()
    assert set(names) <= set(row)
    assert row["ok"] is True
    assert row["arch"] == 90
    assert row["shared_limit"] == 227 * 1024


def test_a_kernel_that_is_not_fit_is_an_error(keep):
    keep(2, is_matmul=True)
    out = run("--only", "offline", "--arch", "80", "--jobs", "1", code=1).stdout
    assert out.count("gather_rows") == 2
    assert out.count("no tensor-core instruction") == 2


def test_several_processes_find_the_same(keep):
    found = offline.jobs([80], quick=True)[:3]
    assert list(offline.compiled(found, 2)) == list(offline.compiled(found, 1))


def test_quick_keeps_the_first_and_the_largest_of_each_kernel():
    found = [job.case for job in offline.jobs([90], quick=True) if job.module == "pool"]
    configs = {case.config for case in found if case.kernel.__name__ == "pool_kernel"}
    assert configs == {"D=64 H=8 bf16 mean", "D=512 H=1 bf16 gate+bias+overlap+norm+rope"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "offline", "--arch", "75"), "--arch: expected one of 80, 90, 100, got 75"),
        (("--only", "offline", "--jobs", "0"), "--jobs: expected an integer >= 1"),
        (("--only", "accounting", "--text", "no/such/file"), "--text: expected a file"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message):
    result = run(*arguments, code=2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_gpu_script_without_a_gpu():
    if measured.is_possible():
        pytest.skip("there is a CUDA device here")
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr.splitlines() == ["not measured: there is no CUDA device here"]
