"""What the residual attention kernel works on, and who a thread of it is: small records of traced values."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from oproj_lib.kernels.mailbox import Crew

Row = list[list[Float32]]
"""A thread's share of a row of 7168: [chunk][column of the chunk], FP32."""


@dataclass(frozen=True)
class Arrays:
    """The kernel's tensors, but for the mailbox."""

    prefix: cute.Tensor
    blocks: cute.Tensor
    norm_weight: cute.Tensor
    qk_weight: cute.Tensor
    out_weight: cute.Tensor
    out: cute.Tensor


@dataclass(frozen=True)
class Thread:
    """A thread of a CTA that consumes a token, where its first chunk is in each array (Int64), and the CTA's
    shared memory (Int32). crew says the same to the mailbox."""

    crew: Crew
    lane: Int32
    warp: Int32
    prefix: Int64
    blocks: Int64
    norm_weight: Int64
    qk_weight: Int64
    out_weight: Int64
    out: Int64
    shared: Int32
