"""`--one-in`: a share of the cases of each test, for machines on which each case compiles kernels."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

NAMES = [f"tests/test_a.py::test_{test}[{case}]" for test in range(20) for case in range(30)]
NAMES += ["tests/test_a.py::test_alone", "tests/test_b.py::test_0[0]"]


def chosen(pytestconfig: pytest.Config, names: list[str], one_in: int) -> tuple[list[str], list[str]]:
    """Names that are kept, and those that are said to be left out."""
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parent / "conftest.py"))
    left: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    items = [SimpleNamespace(nodeid=name) for name in names]
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: one_in, hook=hook), items)
    return [item.nodeid for item in items], [item.nodeid for item in left]


@pytest.mark.parametrize("one_in", [1, 3, 10])
def test_a_share_of_each_test_is_run(pytestconfig: pytest.Config, one_in: int) -> None:
    kept, left = chosen(pytestconfig, NAMES, one_in)
    assert sorted(kept + left) == sorted(NAMES)
    assert {name.partition("[")[0] for name in kept} == {name.partition("[")[0] for name in NAMES}
    assert [name for name in NAMES if name in {*kept}] == kept, "in another order"
    # The first case of each test, one of thirty, is kept besides; the rest is how hashes of six hundred names fall.
    assert abs(len(kept) / len(NAMES) - 1 / one_in) < 0.06
    assert (not left) == (one_in == 1)


def test_the_share_does_not_depend_on_what_else_is_run(pytestconfig: pytest.Config) -> None:
    """So a failure is found again by the name of its test alone."""
    some = NAMES[::2]
    kept = {*chosen(pytestconfig, NAMES, 4)[0]}
    first = {name.partition("[")[0]: name for name in reversed(some)}.values()
    assert {*chosen(pytestconfig, some, 4)[0]} - {*first} == kept.intersection(some) - {*first}
