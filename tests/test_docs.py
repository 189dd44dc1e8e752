"""Every command in README and docs is run, in the order in which a reader meets it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm import warm_program

from fortyfold.spec.site_file import load_site

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BY_CI = {"make test", "make check", "make fix"}  # these run the tests, or run beside them


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path, *programs: Path) -> str:
    path = os.pathsep.join(map(str, [*programs, Path(sys.executable).parent, os.environ["PATH"]]))
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Path:
    """A reader's, after the demo, or rather after a shorter run in its place."""
    folder = tmp_path_factory.mktemp("reader")
    run(["fortyfold", "train", "tiny", "--out", "runs/smoke"], folder, warm)
    return folder


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the program `fortyfold`, quickly started."""
    with warm_program(tmp_path_factory.mktemp("warm")) as programs:
        yield programs


def test_make_demo_is_the_installation_and_one_command() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^demo: \$\(INSTALLED\).*\n\t\$\(BIN\)/fortyfold train smoke\n\n", makefile, re.MULTILINE)


@pytest.mark.drill
def test_the_demo_reaches_95_per_cent(tmp_path: Path) -> None:
    out = run(["fortyfold", "train", "smoke"], tmp_path)
    (top1,) = re.findall(r"^top-1 ([\d.]+) % \(1000 images\)$", out, re.MULTILINE)
    assert float(top1) >= 95


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_work(page: Path, folder: Path, warm: Path) -> None:
    for text in blocks(page, "toml"):
        (folder / f"{page.stem.replace('recipes', 'phases')}.toml").write_text(text, encoding="utf-8")
    for text in blocks(page, "sh"):
        if text.strip() not in BY_CI | {"make demo"}:
            run(["bash", "-euc", text], folder, warm)
    for text in blocks(page, "python"):
        assert run([sys.executable, "-W", "error", "-c", text], folder)


def test_the_site_of_the_aws_guide_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sites.toml").write_text("".join(blocks(ROOT / "docs/guides/aws.md", "toml")))
    monkeypatch.chdir(tmp_path)
    assert load_site("cloud").keeps_runs


def test_contributing_names_targets_that_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in "".join(blocks(ROOT / "CONTRIBUTING.md", "sh")).splitlines():
        assert line in BY_CI
        assert f"\n{line.removeprefix('make ')}: $(INSTALLED)" in makefile


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readmes_tree_names_files_that_are_there() -> None:
    tree = blocks(ROOT / "README.md", "")[-1]
    known = {path.name for path in (ROOT / "src").rglob("*.py")}
    assert set(re.findall(r"\b\w+\.py\b", tree)) <= known
