"""Loading, inspecting and writing published drafters."""

from specdec.drafters.checkpoints.keys import Note
from specdec.drafters.checkpoints.loading import Inspection, from_pretrained, inspect
from specdec.drafters.checkpoints.writing import save_pretrained

__all__ = ["Inspection", "Note", "from_pretrained", "inspect", "save_pretrained"]
