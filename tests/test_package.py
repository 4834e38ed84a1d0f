"""What is shipped, and what importing it costs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("triton", "transformers", "matplotlib", "scipy.stats", "numba", "hypothesis", "rich")


def test_importing_dynchunk_is_light():
    code = "import sys, dynchunk; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = out.stdout.split()
    assert "dynchunk.packing" in loaded
    assert not [name for name in HEAVY if name in loaded]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_both_packages_and_nothing_else(wheel):
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "dynchunk",
        "dynchunk_kernels",
    }
    for marker in ("dynchunk/py.typed", "dynchunk_kernels/py.typed"):
        assert marker in names
    shipped = {name for name in names if name.endswith(".py")}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "dynchunk").rglob("*.py")}
    sources |= {str(p.relative_to(ROOT / "kernels")) for p in (ROOT / "kernels").rglob("*.py")}
    assert shipped == sources


def test_the_wheel_declares_license_extras_and_command(wheel):
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    text = wheel.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text
    for extra in ("hf", "audit", "test", "docs", "dev"):
        assert f"Provides-Extra: {extra}\n" in text
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "dynchunk = dynchunk.cli:main" in wheel.read(entry).decode()


def test_the_top_level_holds_nothing_surprising():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    tops = {name.split("/")[0] for name in listed if name}
    assert {name for name in tops if not name.startswith(".")} <= {
        *("pyproject.toml", "dynchunk", "kernels", "tests", "benchmarks", "docs"),
        *("README.md", "Makefile", "LICENSE", "requirements.lock"),
    }
