"""The activation of a gate, as `specdec.ops._gate` defines it."""

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, KIND: tl.constexpr, ACTIVATION: tl.constexpr):
    """The activation of the gate times its partner, in float32; each is rounded to `KIND` on the way, as models do."""
    gate, up = gate.to(KIND).to(tl.float32), up.to(KIND).to(tl.float32)
    if ACTIVATION == "silu":
        opened = gate * tl.sigmoid(gate)
    else:  # half of 1 + tanh(x) is the sigmoid of 2 x
        opened = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return opened.to(KIND).to(tl.float32) * up
