"""Do your own parts keep the laws of their seams? One checker for each: drafters, tree builders, verifiers."""

from specdec.testing.checks.builder import check_builder
from specdec.testing.checks.drafter import check_drafter
from specdec.testing.checks.verifier import check_verifier

__all__ = ["check_builder", "check_drafter", "check_verifier"]
