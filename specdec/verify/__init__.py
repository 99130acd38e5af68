"""Verifiers: rules that turn the target's laws on a tree into accepted tokens.

`TargetOnly` fits every tree. `Rejection` and `BlockVerification` are for sampled chains, `TreeRejection` and
`Traversal` for sampled trees. `Typical` is lossy and says so. `exact` enumerates what any of them, or one of your
own, commits.
"""

from specdec.verify import exact
from specdec.verify.base import StepRule, walk
from specdec.verify.block import BlockVerification
from specdec.verify.default import default_verifier
from specdec.verify.rejection import Rejection
from specdec.verify.target_only import TargetOnly
from specdec.verify.traversal import Traversal
from specdec.verify.tree_rejection import TreeRejection
from specdec.verify.typical import Typical

__all__ = [
    "BlockVerification",
    "Rejection",
    "StepRule",
    "TargetOnly",
    "Traversal",
    "TreeRejection",
    "Typical",
    "default_verifier",
    "exact",
    "walk",
]
