"""Checks jaxtyping annotations of the whole package while tests run, and sets the hypothesis profiles."""

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=300, **_COMMON)
settings.load_profile("ci")  # `pytest --hypothesis-profile nightly` takes the other

# Modules imported while the hook is active carry the checks for good.
with install_import_hook(["specdec"], "beartype.beartype"):
    import specdec  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    """Data that is not part of the repository."""
    parser.addoption("--spec-bench", help="Spec-Bench's question.jsonl, for the slow tests on a real model")
