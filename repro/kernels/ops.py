"""What the attention kernels share: constants and a dot product that the interpreter computes rightly."""

import triton
import triton.language as tl

LOG2E = 1.4426950408889634  # the kernels use base-2 exponentials: exp(x) = 2 ** (x * LOG2E)
LOWEST = tl.constexpr(-3.0e38)  # a running maximum before any score; finite, so that differences are never NaN
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b):
    """a @ b in float32. The interpreter keeps bf16 as raw 16-bit integers and would multiply those."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
