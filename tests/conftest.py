"""Checks jaxtyping annotations while tests run, interprets kernels without a GPU, sets the hypothesis profiles."""

import importlib.util
import os

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
    """Data that is not part of the repository."""
    parser.addoption("--spec-bench", help="Spec-Bench's question.jsonl, for the slow tests on a real model")
