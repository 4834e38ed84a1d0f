"""Tests of Triton kernels in Triton's interpreter.

They run in a process that has TRITON_INTERPRET=1 from its start, where nothing else can be
compiled: ``tests/test_interpreted.py`` starts it. To run one file by hand:
``TRITON_INTERPRET=1 python -m pytest tests/interpreted/test_pool.py``.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the oracles
