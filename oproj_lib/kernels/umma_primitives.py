"""One function per PTX instruction that the UMMA kernel adds to those of the ring: tcgen05.

As in ``primitives``: each carries the caller's source line, values are 32-bit words and addresses, and
everything that touches memory or orders it is volatile with a memory clobber, so it stays in program order.
``barrier`` arguments are Int32 shared-memory addresses, ``offset`` compile-time bytes.
"""

from __future__ import annotations

from typing import Any

from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from oproj_lib.kernels.primitives import _asm

# Fences


@dsl_user_op
def barrier_init_fence(*, loc: Any = None, ip: Any = None) -> None:
    """Makes this thread's ``mbarrier.init`` visible at cluster scope: ``tcgen05.commit`` arrives through
    .shared::cluster."""
    _asm("fence.mbarrier_init.release.cluster;", [], [], loc=loc, ip=ip)


@dsl_user_op
def tcgen05_fence_before(*, loc: Any = None, ip: Any = None) -> None:
    """This thread's tcgen05 operations so far come before the thread synchronisation that follows."""
    _asm("tcgen05.fence::before_thread_sync;", [], [], loc=loc, ip=ip)


@dsl_user_op
def tcgen05_fence_after(*, loc: Any = None, ip: Any = None) -> None:
    """This thread's tcgen05 operations from here on come after the thread synchronisation before it."""
    _asm("tcgen05.fence::after_thread_sync;", [], [], loc=loc, ip=ip)


# Tensor memory. alloc, dealloc, relinquish and ld are for a whole converged warp (.sync.aligned).


@dsl_user_op
def tmem_allocate(address_slot: Int32, columns: int, *, loc: Any = None, ip: Any = None) -> None:
    """Reserve ``columns`` columns, waiting until they are free; their address goes to shared memory."""
    text = f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], {columns};"
    _asm(text, [], [("r", address_slot)], loc=loc, ip=ip)


@dsl_user_op
def tmem_relinquish_permit(*, loc: Any = None, ip: Any = None) -> None:
    """This CTA allocates no more: others on the SM, the dependent kernel's for one, may."""
    _asm("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", [], [], loc=loc, ip=ip)


@dsl_user_op
def tmem_free(address: Uint32, columns: int, *, loc: Any = None, ip: Any = None) -> None:
    """Free an allocation. Not doing so leaves the SM without these columns for everybody who follows."""
    text = f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, {columns};"
    _asm(text, [], [("r", address)], loc=loc, ip=ip)


@dsl_user_op
def tmem_load(address: Uint32, columns: int, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """``columns`` consecutive columns of the warp's 32 lanes: lane i gets those of TMEM lane first + i.

    The registers hold nothing before ``tmem_load_wait``.
    """
    registers = ", ".join(f"${i}" for i in range(columns))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{registers}}}, [${columns}];"
    return _asm(text, [Uint32] * columns, [("r", address)], loc=loc, ip=ip)


@dsl_user_op
def tmem_load_wait(*, loc: Any = None, ip: Any = None) -> None:
    """Wait for this thread's ``tmem_load``."""
    _asm("tcgen05.wait::ld.sync.aligned;", [], [], loc=loc, ip=ip)


# MMA, by one thread


@dsl_user_op
def umma_f16(
    accumulator: Uint32,
    a: Int64,
    b: Int64,
    instruction: int,
    accumulate: bool,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Start D = A @ B, or D += A @ B with ``accumulate``: D in tensor memory, A and B in shared memory.

    a, b: shared-memory descriptors; instruction: an instruction descriptor, kind::f16. Asynchronous: done
    when a later commit has arrived. MMAs of one thread with one accumulator run in order.
    """
    text = f"tcgen05.mma.cta_group::1.kind::f16 [$0], $1, $2, {instruction:#x}, $3;"
    _asm(text, [], [("r", accumulator), ("l", a), ("l", b), ("b", Boolean(accumulate))], loc=loc, ip=ip)


@dsl_user_op
def umma_commit(barrier: Int32, offset: int, *, loc: Any = None, ip: Any = None) -> None:
    """One arrival on the barrier when all earlier tcgen05.mma of this thread are done; it implies
    ``tcgen05_fence_before``."""
    text = f"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0+{offset}];"
    _asm(text, [], [("r", barrier)], loc=loc, ip=ip)


# Shared memory


@dsl_user_op
def load_shared_word(address: Int32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """One 32-bit word of shared memory."""
    return _asm("ld.shared.b32 $0, [$1];", [Uint32], [("r", address)], loc=loc, ip=ip)[0]


@dsl_user_op
def store_shared_word(
    address: Int32, offset: int, word: Uint32, valid: Boolean, *, loc: Any = None, ip: Any = None
) -> None:
    """One 32-bit word to shared memory; nothing happens where ``valid`` is false."""
    inputs = [("r", address), ("r", word), ("b", valid)]
    _asm(f"@$2 st.shared.b32 [$0+{offset}], $1;", [], inputs, loc=loc, ip=ip)
