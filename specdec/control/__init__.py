"""How much to draft: controllers that choose the tree budget of each round, and what to verify of a drafted tree."""

from specdec.control.always import Always
from specdec.control.confidence import ConfidenceSchedule
from specdec.control.costs import VerifyCosts
from specdec.control.goodput import Goodput
from specdec.control.report import GoodputSummary
from specdec.control.temperatures import SequentialTemperatures

__all__ = ["Always", "ConfidenceSchedule", "Goodput", "GoodputSummary", "SequentialTemperatures", "VerifyCosts"]
