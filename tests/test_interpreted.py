"""The tests of ``tests/interpreted``, in a process of their own with Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not made for this platform")
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"\n{found.stdout}{found.stderr}"
