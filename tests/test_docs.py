"""The documents point at files that exist and hold no place left to fill in."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
PAGES = LISTED or [str(p.relative_to(ROOT)) for p in ROOT.glob("*.md")]  # a wheel or an archive has no git


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    missing = [t for t in targets if t and not (ROOT / page).parent.joinpath(t).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_left_to_fill_in(page: str) -> None:
    assert re.findall(r"@@\w+@@|TODO|FIXME", (ROOT / page).read_text(encoding="utf-8")) == []


def _modules() -> list[Path]:
    packages = [path for top in ("minite", "slime_plugin") for path in (ROOT / top).rglob("*.py")]
    return [path for path in (*packages, *(ROOT / "scripts").glob("*.py")) if path.name != "__init__.py"]


def test_every_module_has_its_place_in_the_readme_of_its_package() -> None:
    unknown = []
    for module in _modules():
        if module.parent == ROOT / "minite":
            page = ROOT / "ARCHITECTURE.md"
        else:
            page = next(folder / "README.md" for folder in module.parents if (folder / "README.md").exists())
        if module.name not in page.read_text(encoding="utf-8"):
            unknown.append(f"{module.relative_to(ROOT)} is not in {page.relative_to(ROOT)}")
    assert unknown == []
