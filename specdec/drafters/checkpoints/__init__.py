"""Loading and inspecting published drafters."""

from specdec.drafters.checkpoints.loading import Inspection, from_pretrained, inspect

__all__ = ["Inspection", "from_pretrained", "inspect"]
