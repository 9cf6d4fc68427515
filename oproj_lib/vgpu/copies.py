"""cp.async and its groups, its arrivals on mbarriers, and prefetches (PTX ISA, "Asynchronous copy: cp.async",
"prefetch").

A copy moves its data as late as the rules allow: when its thread waits for its group, or when an mbarrier
needs its arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .access import EVICTION, check_address, count_access, locate, note_shared_size, take_space
from .asynchrony import CopyArrival
from .decode import Execute, Form, Op, opcode
from .mbarrier import by_offset, take_shared
from .memory import Buffer, Region
from .shadow import CHUNK_BYTES, IN_FLIGHT
from .syntax import Imm

if TYPE_CHECKING:
    from .launch import Lanes, Launch


@dataclass
class PendingCopy:
    """A cp.async instruction in flight, over many threads."""

    number: int  # of the cp.async executed in this launch
    op: Op
    threads: np.ndarray
    group: np.ndarray  # the number of the thread's commit that it belongs to
    region: Region
    source: np.ndarray  # byte offsets into region
    destination: np.ndarray  # flat byte offsets into shared memory
    valid: np.ndarray  # bytes that come from the source; the rest are zeros
    size: int


@opcode("cp")
def build_cp(form: Form) -> Execute:
    if form.take("async") is None:
        raise form.unsupported("only cp.async is modelled (no reductions)")
    if form.take("bulk"):
        return bulk_prefetch(form)
    if form.take("mbarrier"):
        return arrive_on_mbarrier(form)
    if form.take("commit_group"):
        form.finish(operands=0)
        return commit_group
    if form.take("wait_group"):
        if not isinstance(form.operands[0], Imm):
            raise form.malformed("cp.async.wait_group takes a literal")
        left = int(form.operands[0].value)
        form.finish(operands=1)
        return lambda launch, lanes: launch.copies.wait(lanes, left)
    if form.take("wait_all"):
        form.finish(operands=0)

        def wait_all(launch: Launch, lanes: Lanes) -> None:
            commit_group(launch, lanes)
            launch.copies.wait(lanes, 0)

        return wait_all
    return async_copy(form)


def commit_group(launch: Launch, lanes: Lanes) -> None:
    launch.copies.committed[lanes.sel] += 1


def async_copy(form: Form) -> Execute:
    form.take("ca", "cg")
    if take_space(form) != "shared" or take_space(form) != "global":
        raise form.malformed("cp.async copies from .global to .shared")
    hinted = "L2::cache_hint" in form.mods
    while form.take(*EVICTION):
        pass
    # [d], [s], cp-size{, src-size}{, cache-policy}: with .L2::cache_hint the last operand is a policy, which changes
    # no value.
    form.finish(operands=(4, 5) if hinted else (3, 4))
    operands = form.operands[:-1] if hinted else form.operands
    if hinted:
        form.read(form.operands[-1], "b64")
    if not isinstance(operands[2], Imm) or operands[2].value not in (4, 8, 16):
        raise form.malformed("cp.async copies 4, 8 or 16 bytes")
    size = int(operands[2].value)
    to, source = form.address(operands[0]), form.address(operands[1])
    given = form.read(operands[3], "u32") if len(operands) >= 4 else None
    note_shared_size(form, "shared", size)
    form.tracks_poison = True

    def execute(launch: Launch, lanes: Lanes) -> None:
        op = launch.op
        if launch.shadow is not None:
            check_address(launch, op, lanes)
        valid = (
            np.full(lanes.count, size)
            if given is None
            else np.broadcast_to(given(launch, lanes.sel), (lanes.count,)).astype(np.int64)
        )
        if (valid > size).any():
            launch.found(
                "bad operand",
                f"cp.async src-size {int(valid.max())} exceeds cp-size {size}",
                op,
                lanes.threads()[valid > size],
            )
            valid = np.minimum(valid, size)
        start = np.broadcast_to(np.asarray(source(launch, lanes.sel), np.int64), (lanes.count,))
        for piece in locate(launch, op, lanes, to(launch, lanes.sel), size, "shared", "cp.async to"):
            which = np.arange(lanes.count) if piece.which is None else piece.which
            launch.copies.issue(lanes, which, piece.offsets, start[which], valid[which], size)

    return execute


class AsyncCopies:
    """cp.async in flight. A copy moves its data as late as the rules allow: when its thread waits for its
    group."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.committed = np.zeros(launch.threads, np.int32)
        self.pending: list[PendingCopy] = []
        self.issued = 0

    def issue(
        self,
        lanes: Lanes,
        which: np.ndarray,
        destination: np.ndarray,
        source: np.ndarray,
        valid: np.ndarray,
        size: int,
    ) -> None:
        launch, op = self.launch, self.launch.op
        self.issued += 1
        launch.writes += 1
        threads = lanes.threads()[which]
        nothing = valid == 0  # zero fill only: the source address is not read
        if launch.shadow is not None:
            launch.shadow.shared_access(op, threads, destination, size, write=True)
            origin = launch.shadow.origin(IN_FLIGHT, op)
            launch.shadow.set_memory_origin(launch.memory.shared, destination, size, origin)
        if nothing.any():
            part = np.flatnonzero(nothing)
            self._append(
                op,
                threads[part],
                launch.memory.shared,
                np.zeros(part.size, np.int64),
                destination[part],
                valid[part],
                size,
            )
        if nothing.all():
            return
        part = np.flatnonzero(~nothing)
        reading = lanes.pick(which[part])
        for piece in locate(launch, op, reading, source[part], size, "global", "cp.async from"):
            inner = part if piece.which is None else part[piece.which]
            self._append(
                op, threads[inner], piece.region, piece.offsets, destination[inner], valid[inner], size
            )
            if launch.counting:
                count_access(launch, op, reading, piece, size, write=False)

    def _append(
        self,
        op: Op,
        threads: np.ndarray,
        region: Region,
        source: np.ndarray,
        destination: np.ndarray,
        valid: np.ndarray,
        size: int,
    ) -> None:
        self.pending.append(
            PendingCopy(
                self.issued, op, threads, self.committed[threads], region, source, destination, valid, size
            )
        )
        self.launch.counters.async_copy_bytes += int(valid.sum())

    def wait(self, lanes: Lanes, left: int) -> None:
        """Completes, for these threads, all groups but the `left` most recently committed."""
        self._complete_where(lanes.sel, lambda copy: copy.group < self.committed[copy.threads] - left)

    def complete_issued_before(self, threads: np.ndarray, number: int) -> None:
        """Completes what these threads had issued when an arrival was attached to it."""
        self._complete_where(threads, lambda copy: np.full(copy.threads.size, copy.number <= number))

    def _complete_where(self, threads: Any, ready: Callable[[PendingCopy], np.ndarray]) -> None:
        waiting = np.zeros(self.launch.threads, bool)
        waiting[threads] = True
        remaining = []
        for copy in self.pending:
            done = ready(copy) & waiting[copy.threads]
            if done.all():
                self.complete(copy)
            elif not done.any():
                remaining.append(copy)
            else:
                self.complete(select(copy, done))
                remaining.append(select(copy, ~done))
        self.pending = remaining

    def complete_random(self, rng: np.random.Generator) -> None:
        """A copy may also complete at any earlier moment."""
        if self.pending:
            self.move(self.pending[int(rng.integers(len(self.pending)))])

    def complete(self, copy: PendingCopy) -> None:
        """The thread has waited: the data is there, and visible to this thread."""
        self.move(copy)
        launch, shared, size = self.launch, self.launch.memory.shared, copy.size
        if launch.shadow is not None:
            origin = launch.shadow.memory_origin(copy.region, copy.source, size)
            if origin is not None:
                origin = np.where(copy.valid == size, origin, 0)
            launch.shadow.set_memory_origin(shared, copy.destination, size, 0 if origin is None else origin)
            launch.shadow.shared_access(copy.op, copy.threads, copy.destination, size, write=True)
            if size == CHUNK_BYTES:
                whole = (copy.valid == size) & isinstance(copy.region, Buffer)
                base = copy.region.address if isinstance(copy.region, Buffer) else 0
                launch.shadow.note_copy(copy.op, copy.destination, np.where(whole, base + copy.source, -1))

    def move(self, copy: PendingCopy) -> None:
        """Moves the bytes. Until the thread waits, checks still treat them as undefined."""
        size, shared = copy.size, self.launch.memory.shared
        words = np.zeros((copy.threads.size, size), np.uint8)
        full = copy.valid == size
        if full.all():
            words = copy.region.view(np.dtype(np.uint8), size)[copy.source // size]
        else:
            words[full] = copy.region.view(np.dtype(np.uint8), size)[copy.source[full] // size]
            for i in np.flatnonzero(~full & (copy.valid > 0)):
                words[i, : copy.valid[i]] = copy.region.bytes[copy.source[i] : copy.source[i] + copy.valid[i]]
        shared.view(np.dtype(np.uint8), size)[copy.destination // size] = words


def select(copy: PendingCopy, mask: np.ndarray) -> PendingCopy:
    return PendingCopy(
        copy.number,
        copy.op,
        copy.threads[mask],
        copy.group[mask],
        copy.region,
        copy.source[mask],
        copy.destination[mask],
        copy.valid[mask],
        copy.size,
    )


def arrive_on_mbarrier(form: Form) -> Execute:
    """cp.async.mbarrier.arrive: the barrier gets an arrival when all earlier cp.async of the thread are
    complete. Without .noinc the thread first raises the number of pending arrivals, so that the barrier's
    count is not used up."""
    if form.take("arrive") is None:
        raise form.malformed("cp.async.mbarrier needs .arrive")
    counted = form.take("noinc") is not None
    take_shared(form)
    form.take("b64")
    address = form.address(form.operands[0])
    form.finish(operands=1)

    def execute(launch: Launch, lanes: Lanes) -> None:
        threads = lanes.threads()
        for offset, which in by_offset(launch, lanes, address(launch, lanes.sel)):
            launch.mbarriers.usable(launch.op, offset, threads[which])
            if not counted:
                launch.mbarriers.add_pending(offset, threads[which])
            offsets = np.full(which.size, offset)
            launch.asynchronous.add(CopyArrival(launch.op, threads[which], offsets, launch.copies.issued))

    return execute


def bulk_prefetch(form: Form) -> Execute:
    """cp.async.bulk.prefetch.L2.global [address], size: moves nothing that a program can see, but must stay
    in bounds."""
    if form.take("prefetch") is None or form.take("L2") is None:
        raise form.unsupported("bulk copies are not modelled; modelled: cp.async.bulk.prefetch.L2")
    take_space(form)
    form.take("L2::cache_hint")
    operands = form.operands
    address, size = form.address(operands[0]), form.read(operands[1], "u32")
    form.finish(operands=(2, 3))

    def execute(launch: Launch, lanes: Lanes) -> None:
        starts = np.broadcast_to(np.asarray(address(launch, lanes.sel), np.int64), (lanes.count,))
        sizes = np.broadcast_to(size(launch, lanes.sel), (lanes.count,)).astype(np.int64)
        crooked = (starts % 16 != 0) | (sizes % 16 != 0)
        if crooked.any():
            message = f"bulk prefetch of {int(sizes[crooked][0])} bytes: address and size are multiples of 16"
            launch.found("misaligned", message, launch.op, lanes.threads()[crooked])
        for end in (starts, starts + sizes - 1):  # the first and the last byte
            for _ in locate(launch, launch.op, lanes, end, 1, "global", "bulk prefetch"):
                pass
        launch.counters.prefetch_bytes += int(sizes.sum())

    return execute


@opcode("prefetch", "prefetchu", "discard", "applypriority")
def build_prefetch(form: Form) -> Execute:
    """A prefetch moves no architectural state, but its address must be sensible."""
    if form.instruction.op == "discard":
        raise form.unsupported("discard makes memory undefined; not modelled")
    if form.take("tensormap"):
        raise form.unsupported("prefetch.tensormap is not modelled")
    take_space(form)
    form.take("L1", "L2")
    while form.take(*EVICTION):
        pass
    form.finish()
    form.address(form.operands[0])
    return lambda launch, lanes: None
