"""Block drafters: DFlash, DFlash 2 and DSpark on one backbone."""

from specdec.drafters.block.context import BlockContext, LayerContext
from specdec.drafters.block.drafter import BlockDrafter
from specdec.drafters.block.model import BlockModel
from specdec.drafters.block.spec import BlockSpec

__all__ = ["BlockContext", "BlockDrafter", "BlockModel", "BlockSpec", "LayerContext"]
