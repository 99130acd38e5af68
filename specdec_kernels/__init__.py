"""Triton kernels behind `specdec.ops`. Imports torch and triton alone; file names mirror `specdec/ops`.

Use the ops, not these modules: the ops check their arguments, and fall back to plain torch where no kernel runs.
"""

import triton


def interpreted() -> bool:
    """Whether triton interprets kernels in Python, on CPU tensors (`TRITON_INTERPRET=1`); for tests."""
    return bool(triton.knobs.runtime.interpret)
