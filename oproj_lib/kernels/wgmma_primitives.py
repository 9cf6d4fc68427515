"""One function per PTX instruction that the wgmma kernel adds to those of the ring.

As in ``primitives``: each carries the caller's source line and is volatile with a memory clobber. All are for
four whole warps, a warpgroup, that execute them together (.sync.aligned). Accumulators are FP32 registers,
``layouts.wgmma`` says of which elements; while a wgmma is in flight nobody may touch them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from oproj_lib.kernels.primitives import _asm
from oproj_lib.layouts.wgmma import register_count


@dsl_user_op
def fence(*, loc: Any = None, ip: Any = None) -> None:
    """``wgmma.fence``: what this warp did with its registers comes before the wgmmas that follow.

    Needed before the first one, and wherever anything but a wgmma of the same shape has touched an
    accumulator.
    """
    _asm("wgmma.fence.sync.aligned;", [], [], loc=loc, ip=ip)


@dsl_user_op
def multiply_bf16(
    accumulator: Sequence[Float32], a: Int64, b: Int64, n: int, *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """Start D = A @ B + accumulator, or D = A @ B where ``accumulator`` is empty: A [64, 16], B [16, n].

    a, b: shared-memory descriptors of K-major tiles. The n / 2 registers that come back are the ones that
    went in; they hold D once a ``wait_group`` has covered this wgmma. wgmmas with one accumulator run in
    order.
    """
    count = register_count(n)
    d = ", ".join(f"${i}" for i in range(count))
    # Operands behind D: the two descriptors and the predicate that says whether to add.
    first = count
    # No scaling of A and B by -1, neither transposed.
    text = (
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{d}}}, ${first}, ${first + 1}, "
        f"${first + 2}, 1, 1, 0, 0;"
    )
    inputs = [("l", a), ("l", b), ("b", Boolean(bool(accumulator)))]
    return _in_place(text, accumulator, count, inputs, loc=loc, ip=ip)


@dsl_user_op
def commit_group(*, loc: Any = None, ip: Any = None) -> None:
    """This warp's wgmmas since the last commit are a group."""
    _asm("wgmma.commit_group.sync.aligned;", [], [], loc=loc, ip=ip)


@dsl_user_op
def wait_group(in_flight: int, *, loc: Any = None, ip: Any = None) -> None:
    """Wait until all groups of this warp but the ``in_flight`` latest are done: they have read their
    operands."""
    _asm(f"wgmma.wait_group.sync.aligned {in_flight};", [], [], loc=loc, ip=ip)


@dsl_user_op
def wait_for_result(accumulator: Sequence[Float32], *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Wait for all groups of this warp. The registers that come back hold the result, those that go in do
    not: passing them through keeps the compiler from reading them any earlier."""
    return _in_place("wgmma.wait_group.sync.aligned 0;", accumulator, len(accumulator), [], loc=loc, ip=ip)


def _in_place(
    text: str, values: Sequence[Float32], count: int, inputs: Sequence[tuple[str, Any]], *, loc: Any, ip: Any
) -> list[Float32]:
    """Emit ``text`` with ``$0 .. $count - 1`` = registers that are updated in place, then the inputs.

    values: what the registers hold before; empty where they are only written. (``_asm`` has no operands that
    are both.)
    """
    constraints = ["=f"] * count + [register for register, _ in inputs]
    constraints += [str(i) for i in range(len(values))] + ["~{memory}"]
    operands = [*(value for _, value in inputs), *values]
    kind = llvm.StructType.get_literal([Float32.mlir_type] * count)
    result = llvm.inline_asm(
        kind,
        [value.ir_value(loc=loc, ip=ip) for value in operands],
        text,
        ",".join(constraints),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Float32(llvm.extractvalue(Float32.mlir_type, result, [i], loc=loc, ip=ip)) for i in range(count)]
