"""Controllers: how much to draft and verify in each round."""

from specdec.control.always import Always
from specdec.control.calibration import Calibration
from specdec.control.costs import CostMeter, VerifyCosts
from specdec.control.goodput import Goodput

__all__ = ["Always", "Calibration", "CostMeter", "Goodput", "VerifyCosts"]
