"""One function per PTX instruction that the engines with a ring share: mbarrier, proxy fence, L2 prefetch.

As in ``primitives``: each carries the caller's source line, values are 32-bit words and addresses, and
everything that touches memory or orders it is volatile with a memory clobber, so it stays in program order.
``barrier`` arguments are Int32 shared-memory addresses, ``offset`` compile-time bytes.
"""

from __future__ import annotations

from typing import Any

from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from oproj_lib.kernels.primitives import _asm


@dsl_user_op
def elect_one(*, loc: Any = None, ip: Any = None) -> Boolean:
    """True in one lane of a converged warp, the same lane every time (``elect.sync``)."""
    elected = llvm.inline_asm(  # not _asm: the only instruction that returns a predicate
        Boolean.mlir_type,
        [],
        "elect.sync _|$0, 0xffffffff;",
        "=b,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Boolean(elected)


# mbarrier


@dsl_user_op
def barrier_init(barrier: Int32, offset: int, arrivals: int, *, loc: Any = None, ip: Any = None) -> None:
    """A barrier whose phases complete after ``arrivals`` arrivals. One thread."""
    _asm(f"mbarrier.init.shared::cta.b64 [$0+{offset}], {arrivals};", [], [("r", barrier)], loc=loc, ip=ip)


@dsl_user_op
def barrier_wait(barrier: Int32, offset: int, parity: int, *, loc: Any = None, ip: Any = None) -> None:
    """Wait until the phase of this parity (0 or 1) has completed; acquires what the arrivals released (CTA
    scope)."""
    # On one line: LLVM counts source lines on with every line of an inline text, and findings would name the
    # wrong one. ${:uid} makes the label unique.
    label = "WAIT_${:uid}"
    attempt = f"mbarrier.try_wait.parity.shared::cta.b64 p, [$0+{offset}], {parity};"
    text = f"{{ .reg .pred p; {label}: {attempt} @!p bra {label}; }}"
    _asm(text, [], [("r", barrier)], loc=loc, ip=ip)


@dsl_user_op
def barrier_arrive_after_copies(barrier: Int32, offset: int, *, loc: Any = None, ip: Any = None) -> None:
    """One arrival on the barrier when every ``cp.async`` that this thread has issued so far has landed.

    noinc: the arrival is one of those that ``barrier_init`` counted. Without it the pending count would first
    go up by one, and the barrier would expect nobody.
    """
    text = f"cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0+{offset}];"
    _asm(text, [], [("r", barrier)], loc=loc, ip=ip)


@dsl_user_op
def barrier_arrive(barrier: Int32, offset: int, valid: Boolean, *, loc: Any = None, ip: Any = None) -> None:
    """One arrival of this thread, releasing what it has done so far (CTA scope); none where ``valid`` is
    false."""
    text = f"@$1 mbarrier.arrive.shared::cta.b64 _, [$0+{offset}];"
    _asm(text, [], [("r", barrier), ("b", valid)], loc=loc, ip=ip)


# Fence and prefetch


@dsl_user_op
def proxy_fence(*, loc: Any = None, ip: Any = None) -> None:
    """Orders shared-memory accesses of the generic proxy (ld, st, cp.async) and of the async proxy (the
    operand reads of tcgen05.mma and wgmma), in both directions, for the executing thread and what it has synchronised
    with."""
    _asm("fence.proxy.async.shared::cta;", [], [], loc=loc, ip=ip)


@dsl_user_op
def prefetch_to_l2(
    address: Int64, offset: int, size: int, valid: Boolean | None = None, *, loc: Any = None, ip: Any = None
) -> None:
    """Bring ``size`` bytes (a multiple of 16) of global memory to L2; a hint, nobody waits for it."""
    text = f"cp.async.bulk.prefetch.L2.global [$0+{offset}], {size};"
    inputs: list[tuple[str, Any]] = [("l", address)]
    if valid is not None:
        text = f"@$1 {text}"
        inputs.append(("b", valid))
    _asm(text, [], inputs, loc=loc, ip=ip)
