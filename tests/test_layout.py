"""The shape of the tree: short files, and tests that stand where the reader looks for them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = 400
SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("specdec", "specdec_kernels", "tests", "examples", "docs")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.startswith("_build") for part in path.parts)
)


def test_there_are_sources():
    assert Path("specdec/rounds.py") in SOURCES


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_holds_one_idea(path):
    lines = (ROOT / path).read_text().count("\n")
    assert lines <= MOST_LINES, f"{path} has {lines} lines, {MOST_LINES} at most: split it by idea."


TESTS = [path for path in SOURCES if path.parts[0] == "tests" and len(path.parts) > 2 and path.name.startswith("test_")]


@pytest.mark.parametrize("path", TESTS, ids=str)
def test_folders_of_tests_mirror_the_package(path):
    assert (ROOT / "specdec" / Path(*path.parts[1:-1])).is_dir(), (
        f"{path} stands in a folder the package does not have."
    )


MODULES = [path for path in SOURCES if path.parts[0] == "specdec" and path.name != "__init__.py"]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_is_tested_where_its_name_says(path):
    module = path.stem.removeprefix("_")
    tests = ROOT / "tests" / Path(*path.parts[1:-1])
    assert any(tests.glob(f"test_{module}*.py")), f"{path} has no test file {tests.relative_to(ROOT)}/test_{module}.py."
