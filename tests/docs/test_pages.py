"""What the pages show runs, what they link to is there, and the site is built without a warning."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "examples" / "README.md"])
RUN = [DOCS / "start.md", *sorted((DOCS / "howto").glob("*.md"))]  # of others, tests of their own run the code
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in RUN if CODE.search(page.read_text())], ids=named)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for number, code in enumerate(CODE.findall(page.read_text())):
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    settings = (ROOT / "mkdocs.yml").read_text()
    assert 'paths: ["."]' in settings
    (tmp_path / "mkdocs.yml").write_text(settings.replace('paths: ["."]', f'paths: ["{ROOT}"]'))
    built = zensical(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    site = tmp_path / "build" / "site"
    assert (site / "start" / "index.html").is_file()
    assert "auto_parallelize" in (site / "api" / "index.html").read_text()


@pytest.mark.parametrize("wrong", ["[x](nowhere.md)", "[x](#nowhere)", "[x](other.md#nowhere)"])
def test_a_link_that_leads_nowhere_ends_the_build(wrong: str, tmp_path: Path) -> None:
    first = f"# One\n\n## Two\n\n[x](#two) [x](other.md#three)\n\n{wrong}\n"
    pages = {"index.md": first, "other.md": "# One\n\n## Three\n"}
    (tmp_path / "docs").mkdir()
    for name, text in {**pages, "style.css": ""}.items():
        (tmp_path / "docs" / name).write_text(text)
    settings, _, _ = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")
    (tmp_path / "mkdocs.yml").write_text(f"{settings}\nnav: [index.md, other.md]\n")
    assert zensical(tmp_path).returncode != 0
    (tmp_path / "docs" / "index.md").write_text(first.replace(wrong, ""))
    assert zensical(tmp_path).returncode == 0


def test_every_page_is_in_the_navigation() -> None:  # of which zensical says nothing
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")
    named = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def zensical(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
