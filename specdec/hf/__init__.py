"""Everything that knows transformers: the target, its cache and masks, the ledger, the table of arguments."""

from specdec.hf.memory import RecurrentBytes, estimate_memory
from specdec.hf.target import ModelTarget, open_model

__all__ = ["ModelTarget", "RecurrentBytes", "estimate_memory", "open_model"]
