"""Every python block of the README and of the docs runs, in order, as its reader would run it."""

from pathlib import Path

import pytest
from mktestdocs import check_md_file

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page):
    check_md_file(fpath=page, memory=True)
