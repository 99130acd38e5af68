"""specdec: speculative-decoding building blocks for Hugging Face models.

Wrap a model and a drafter in `SpeculativeGenerator` and call `generate()`; or import the parts and build a decoder
of your own. `specdec.rounds` holds the loop; read it first.
"""

from specdec import control, drafters, evaluate, kv, ops, trees, verify
from specdec.errors import ShapeError, SpecdecError, UnsupportedError
from specdec.generator import SpeculativeGenerator
from specdec.stats import GenerationStats
from specdec.types import Candidates, DraftTree, Frontier, Round, TargetLaw, TargetOutput, Verdict

__version__ = "0.1.0"

__all__ = [
    "Candidates",
    "DraftTree",
    "Frontier",
    "GenerationStats",
    "Round",
    "ShapeError",
    "SpecdecError",
    "SpeculativeGenerator",
    "TargetLaw",
    "TargetOutput",
    "UnsupportedError",
    "Verdict",
    "control",
    "drafters",
    "evaluate",
    "kv",
    "ops",
    "trees",
    "verify",
]
