"""Tree builders: which nodes to draft, and the index algebra of the result.

Every builder has `nodes`, `sampled`, `chain` and `grow` (`specdec.protocols.TreeBuilder`); pass one as `tree=`.
"""

from specdec.trees import topology
from specdec.trees.best_first import BestFirst, tempered
from specdec.trees.chain import Chain
from specdec.trees.fixed import Fixed
from specdec.trees.merging import merge
from specdec.trees.rendering import render
from specdec.trees.sampled import Sampled, draw, sampled_chain

__all__ = [
    "BestFirst",
    "Chain",
    "Fixed",
    "Sampled",
    "draw",
    "merge",
    "render",
    "sampled_chain",
    "tempered",
    "topology",
]
