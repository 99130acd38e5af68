"""Public test kit: tiny models, models with a known law, a drafter that errs on schedule, checkers of parts.

For people who write drafters, trees and verifiers of their own and want to know that they are lossless.
"""

from specdec.testing.checks import check_builder, check_drafter, check_verifier
from specdec.testing.demo import demo_model
from specdec.testing.ledger import PlainLedger
from specdec.testing.models import FAMILIES, VOCAB, greedy, table_model, tiny_model
from specdec.testing.oracle import OracleDrafter
from specdec.testing.table import TableDrafter, TableTarget

__all__ = [
    "FAMILIES",
    "VOCAB",
    "OracleDrafter",
    "PlainLedger",
    "TableDrafter",
    "TableTarget",
    "check_builder",
    "check_drafter",
    "check_verifier",
    "demo_model",
    "greedy",
    "table_model",
    "tiny_model",
]
