"""Producers with one mistake about programmatic dependent launch: one shows in the machine code only, one in a
consumer that does not wait itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from oproj_lib.kernels import primitives
from oproj_lib.kernels.lane import Shared
from oproj_lib.kernels.primitives import Words4
from oproj_lib.kernels.producer import Fragment, OprojProducer


@contextmanager
def weights_loaded_by(load: Callable[..., Words4]) -> Iterator[None]:
    """While it lasts, weights are loaded to registers with ``load``, not with ``primitives.load_weight_chunk``."""
    right = primitives.load_weight_chunk
    primitives.load_weight_chunk = load
    try:
        yield
    finally:
        primitives.load_weight_chunk = right


class NonCoherentWeights(OprojProducer):
    """Right in Python, right in PTX, right in its results; but ptxas moves loads below griddepcontrol.wait."""

    @staticmethod
    @primitives.dsl_user_op
    def load_non_coherent(address: Int64, offset: int, *, loc: Any = None, ip: Any = None) -> Words4:
        """`primitives.load_weight_chunk`, non-coherent: the compiler is told that nobody writes this memory while
        the kernel runs, so it may move the load as it likes."""
        text = f"ld.global.nc.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"  # the mistake: .nc
        return primitives._load4(text, ("l", address), None, loc, ip)

    def load_weight(self, weight: cute.Tensor, shared: Shared) -> list[list[Fragment]]:
        with weights_loaded_by(self.load_non_coherent):
            return super().load_weight(weight, shared)


class TriggersBeforeWait(OprojProducer):
    """Releases its dependents before it has waited itself, so that they may overtake the previous kernel."""

    def compute(
        self,
        x: cute.Tensor,
        weights: Any,
        shared: Shared,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        trigger_after_wait: bool = True,
        state: Int64 | None = None,
    ) -> None:
        cute.arch.griddepcontrol_launch_dependents()  # the mistake: before the wait in super().compute
        super().compute(x, weights, shared, mailbox, mc, slot, False, state)
