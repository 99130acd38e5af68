"""How the buffers of drafters grow."""

STEP = 256
"""Slots added at least when a buffer grows; growth copies, so it must be rare."""


def with_room(slots: int) -> int:
    """Slots of a new buffer that has to hold so many: a step more, from four steps on a quarter more."""
    return slots + max(STEP, slots // 4)
