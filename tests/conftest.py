"""Checks jaxtyping annotations while tests run, interprets kernels without a GPU, sets the hypothesis profiles."""

import importlib.util
import os
import zlib

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=300, **_COMMON)
settings.load_profile("ci")  # `pytest --hypothesis-profile nightly` takes the other

# Without a GPU, kernels run in triton's interpreter; triton reads this when it is imported.
if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Modules imported while the hook is active carry the checks for good.
with install_import_hook(["specdec"], "beartype.beartype"):
    import specdec  # noqa: F401 - imported for the hook


def pytest_addoption(parser: pytest.Parser) -> None:
    """Data that is not part of the repository, and how much of the tests is run."""
    parser.addoption("--spec-bench", help="Spec-Bench's question.jsonl, for the slow tests on a real model")
    parser.addoption("--one-in", type=int, default=1, help="run the first case of each test, and one in so many")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases where a share is asked for: on a GPU each compiles kernels of its own."""
    seen: set[str] = set()
    kept, left = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        # By their names, so that the share is the same in each run and favours no argument.
        chosen = name not in seen or zlib.crc32(item.nodeid.encode()) % config.getoption("one_in") == 0
        (kept if chosen else left).append(item)
        seen.add(name)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
