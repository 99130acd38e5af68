"""How much to draft: controllers that choose the tree budget of each round, and what to verify of a drafted tree."""

from specdec.control.always import Always
from specdec.control.costs import VerifyCosts
from specdec.control.goodput import Goodput
from specdec.control.report import GoodputSummary

__all__ = ["Always", "Goodput", "GoodputSummary", "VerifyCosts"]
