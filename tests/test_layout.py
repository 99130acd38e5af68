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


NO_BEHAVIOUR = {"protocols", "errors"}
MODULES = [
    path
    for path in SOURCES
    if path.parts[0] == "specdec" and len(path.parts) == 2 and path.stem not in {"__init__", *NO_BEHAVIOUR}
]
PACKAGES = sorted({path.parent for path in SOURCES if path.parts[0] == "specdec" and len(path.parts) > 2})


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_is_tested_where_its_name_says(module):
    assert any((ROOT / "tests").glob(f"test_{module.stem}*.py")), f"{module} has no tests/test_{module.stem}.py."


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_a_package_is_tested_where_its_name_says(package):
    folder = ROOT / "tests" / Path(*package.parts[1:])
    inside, beside = folder.glob("test_*.py"), folder.parent.glob(f"test_{folder.name}*.py")
    assert any(inside) or any(beside), f"{package} has no tests in {folder.relative_to(ROOT)}."


LIBRARY = [path for path in SOURCES if path.parts[0] in ("specdec", "specdec_kernels")]


@pytest.mark.parametrize("path", LIBRARY, ids=str)
def test_what_is_refused_is_refused_by_an_error_of_ours(path):
    """`except SpecdecError` catches every refusal; both kinds of them are `ValueError`s as well."""
    lines = (ROOT / path).read_text().splitlines()
    bare = [line.strip() for line in lines if line.lstrip().startswith(("raise ValueError", "raise TypeError"))]
    assert not bare, f"{path}: raise UnsupportedError or ShapeError instead of {bare}."
