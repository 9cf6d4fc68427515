"""What each byte of memory and each register knows about itself, kept only when a launch runs with
`checks=True`.

* Undefined data: memory nobody wrote, or that an asynchronous copy has yet to deliver, carries an *origin*
  (which instruction is to blame). Loads move the origin into a register, arithmetic spreads it, and it is
  reported when it reaches global memory, an address or a branch. Undefined data that nobody uses is legal.
* Races in shared memory: one vector clock per warp, joined by barriers (Flanagan and Freund, "FastTrack",
  PLDI 2009, with a read clock per warp and word). Two accesses of one word, one of them a write, must be
  ordered whatever the schedule was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numba
import numpy as np

from .memory import Region
from .order import HappensBefore
from .registers import Row

if TYPE_CHECKING:
    from .decode import Op
    from .launch import Lanes, Launch

NEVER_WRITTEN = 1
CHUNK_BYTES = 16
IN_FLIGHT = "a cp.async that nobody waited for"
WGMMA_IN_FLIGHT = "a wgmma that nobody waited for"


@dataclass(frozen=True)
class Origin:
    """Why some data is undefined."""

    reason: str
    op: Op | None

    def __str__(self) -> str:
        if self.op is None:
            return self.reason
        where = self.op.instruction.source
        return f"{self.reason} ({where.chain() if where else f'PTX line {self.op.instruction.line}'})"


@numba.njit(cache=True)
def mark_reads(words, warps, pc, vector, writer, write_clock, write_pc, read_clock, read_pc, atomic_clock):  # type: ignore[no-untyped-def]
    """Records plain reads. A read must come after the last write and after every atomic.

    Returns (index of the first racing access or -1, word, other warp, other pc, how many).
    """
    bad, bad_word, other, other_pc, count = -1, -1, -1, -1, 0
    per_cta = vector.shape[1]
    for i in range(words.size):
        word, warp = words[i], warps[i]
        w = warp % per_cta
        last = writer[word]
        culprit = -1
        if last >= 0 and last != w and vector[warp, last] < write_clock[word]:
            culprit = last
        for r in range(atomic_clock.shape[1]):
            if r != w and vector[warp, r] < atomic_clock[word, r]:
                culprit = r
        if culprit >= 0:
            count += 1
            if bad < 0:
                bad, bad_word, other, other_pc = i, word, culprit, write_pc[word]
        read_clock[word, w] = vector[warp, w]
        read_pc[word] = pc
    return bad, bad_word, other, other_pc, count


@numba.njit(cache=True)
def mark_writes(  # type: ignore[no-untyped-def]
    words,
    warps,
    pc,
    vector,
    writer,
    write_clock,
    write_pc,
    read_clock,
    read_pc,
    atomic_clock,
    stamps,
    agreed,
    now,
    same_old,
    same_new,
    atomic,
):
    """Records writes. A write must come after every read, after every atomic (unless it is one), and after
    the last write unless both leave the same bytes: `same_old` says that the bytes were there before,
    `same_new` that they are there after the whole instruction (for two warps in one instruction). Result as
    `mark_reads`."""
    bad, bad_word, other, other_pc, count = -1, -1, -1, -1, 0
    per_cta = vector.shape[1]
    for i in range(words.size):
        word, warp = words[i], warps[i]
        w = warp % per_cta
        last = writer[word]
        culprit, culprit_pc = -1, -1
        if last >= 0 and last != w and vector[warp, last] < write_clock[word]:
            harmless = same_new[i] and agreed[word] if stamps[word] == now else same_old[i]
            if not harmless:
                culprit, culprit_pc = last, write_pc[word]
        for r in range(per_cta):
            if r != w and vector[warp, r] < read_clock[word, r]:
                culprit, culprit_pc = r, read_pc[word]
                break
        if not atomic:
            for r in range(atomic_clock.shape[1]):
                if r != w and vector[warp, r] < atomic_clock[word, r]:
                    culprit, culprit_pc = r, write_pc[word]
        if culprit >= 0:
            count += 1
            if bad < 0:
                bad, bad_word, other, other_pc = i, word, culprit, culprit_pc
        if atomic:
            atomic_clock[word, w] = vector[warp, w]
        else:
            writer[word] = w
            write_clock[word] = vector[warp, w]
        write_pc[word] = pc
        stamps[word] = now
        agreed[word] = same_new[i]
    return bad, bad_word, other, other_pc, count


@numba.njit(cache=True)
def mark_async_reads(  # type: ignore[no-untyped-def]
    words, warps, pc, known, fenced, writer, write_clock, write_pc, read_clock, read_pc
):
    """Reads through the asynchronous proxy: after the last write, with a proxy fence between. As
    `mark_reads`, and whether the first offence is a missing fence rather than a missing order."""
    bad, bad_word, other, other_pc, count, unfenced = -1, -1, -1, -1, 0, False
    per_cta = known.shape[1]
    for i in range(words.size):
        word, warp = words[i], warps[i]
        w = warp % per_cta
        last = writer[word]
        if last >= 0:
            unordered = last != w and known[warp, last] < write_clock[word]
            if unordered or fenced[warp, last] < write_clock[word]:
                count += 1
                if bad < 0:
                    bad, bad_word, other, other_pc, unfenced = i, word, last, write_pc[word], not unordered
        read_clock[word, w] = known[warp, w]
        read_pc[word] = pc
    return bad, bad_word, other, other_pc, count, unfenced


class Shadow:
    """The shadow state of one launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.origins: list[Origin] = [Origin("defined", None), Origin("memory that nobody wrote", None)]
        self.origin_ids: dict[tuple[str, int], int] = {}
        self.in_flight: list[int] = []  # origins that stand for asynchronous copies under way
        memory, code = launch.memory, launch.code
        self.granule = code.shared_granule
        words = memory.shared.bytes.size // self.granule
        memory.shared.granule = self.granule
        memory.shared.undefined = np.full(words, NEVER_WRITTEN, np.uint16)
        if code.local_bytes:
            memory.local.undefined = np.full(memory.local.bytes.size, NEVER_WRITTEN, np.uint16)
        warps = launch.warps_per_cta
        self.order = HappensBefore(launch.ctas, warps)
        self.writer = np.full(words, -1, np.int8)
        self.write_clock = np.zeros(words, np.uint16)
        self.write_pc = np.full(words, -1, np.int32)
        self.read_clock = np.zeros((words, warps), np.uint16)
        self.read_pc = np.full(words, -1, np.int32)
        self.atomic_clock = np.zeros((words, warps if code.shared_atomics else 0), np.uint16)
        self.stamps = np.zeros(words, np.int64)  # when a word was last written, and whether its value lasted
        self.agreed = np.zeros(words, bool)
        self.async_readers: np.ndarray | None = None  # tensor-core operations in flight that read a word
        self.async_pc = 0
        self.copied_from: np.ndarray | None = (
            None  # global address of each 16-byte chunk; -1: not copied as a whole
        )
        self.copied_by = 0  # the last cp.async that filled it
        if code.matrix_tiles:
            self.copied_from = np.full(memory.shared.bytes.size // CHUNK_BYTES, -1, np.int64)

    # -- races --------------------------------------------------------------------------------------------------

    def shared_access(
        self,
        op: Op,
        threads: np.ndarray,
        offsets: np.ndarray,
        size: int,
        *,
        write: bool,
        same: tuple[np.ndarray, np.ndarray] | None = None,
        atomic: bool = False,
    ) -> None:
        """Checks one access of `size` bytes per thread; `offsets` are flat (CTA stride included). `same`: per
        thread, whether a write leaves the bytes that were there before, and the bytes that are there after
        the whole instruction."""
        words, repeated = self._granules(threads, offsets, size)
        state = (
            self.order.known, self.writer, self.write_clock, self.write_pc, self.read_clock,
            self.read_pc, self.atomic_clock,
        )  # fmt: skip
        if write:
            self.check_async_readers(op, repeated, words)
            if self.copied_from is not None:
                self.copied_from[offsets // CHUNK_BYTES] = -1
            never = np.zeros(words.size, bool)
            per = words.size // threads.size
            old, new = (never, never) if same is None else (np.repeat(same[0], per), np.repeat(same[1], per))
            now = self.launch.steps
            bad, word, other, other_pc, count = mark_writes(
                words, repeated >> 5, op.index, *state, self.stamps, self.agreed, now, old, new, atomic
            )
        else:
            bad, word, other, other_pc, count = mark_reads(words, repeated >> 5, op.index, *state)
        if bad < 0:
            return
        place = self.place(other_pc)
        offset = word * self.granule % self.launch.memory.shared_stride
        self.launch.found(
            "race",
            f"{'write to' if write else 'read of'} shared memory byte {offset} is not ordered after "
            f"warp {other}'s access at {place}; a barrier is missing between them",
            op,
            np.asarray([repeated[bad]]),
            count=count,
        )

    def _granules(self, threads: np.ndarray, offsets: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        first = offsets // self.granule
        per = max(1, size // self.granule)
        if per == 1:
            return first, threads
        return (first[:, None] + np.arange(per)).reshape(-1), np.repeat(threads, per)

    # -- undefined data -----------------------------------------------------------------------------------------

    def origin(self, reason: str, op: Op) -> int:
        """The id of "this instruction made it undefined, for this reason"."""
        key = (reason, op.index)
        if key not in self.origin_ids:
            self.origin_ids[key] = len(self.origins)
            self.origins.append(Origin(reason, op))
            if reason in (IN_FLIGHT, WGMMA_IN_FLIGHT):
                self.in_flight.append(self.origin_ids[key])
        return self.origin_ids[key]

    # -- where tiles came from ----------------------------------------------------------------------------------

    def note_copy(self, op: Op, destination: np.ndarray, addresses: np.ndarray) -> None:
        """16-byte chunks of shared memory now hold what lay at these global addresses (-1: zeros)."""
        if self.copied_from is not None:
            self.copied_from[destination // CHUNK_BYTES] = addresses
            self.copied_by = op.index

    def check_tile(self, op: Op, threads: np.ndarray, offsets: np.ndarray, name: str) -> None:
        """Whether a K-major operand's descriptor agrees with how its tile was stored. `offsets` [rows, 2]: the two
        16-byte chunks of K = 16 of each row. Rows must not share bytes, and must agree on the order of their
        chunks."""
        if self.copied_from is None:
            return
        first: dict[int, int] = {}
        for row, chunk in enumerate(offsets[:, 0].tolist()):
            row_of = first.setdefault(chunk, row)
            if row_of != row:
                message = (
                    f"rows {row_of} and {row} of operand {name} are the same bytes of shared memory: the stride byte "
                    "offset of its descriptor is too small for 8 rows"
                )
                self.launch.found("descriptor", message, op, threads)
                return
        cta = int(threads[0]) // self.launch.threads_per_cta
        source = self.copied_from[(cta * self.launch.memory.shared_stride + offsets) // CHUNK_BYTES]
        known = np.flatnonzero((source >= 0).all(axis=1))
        steps = source[known, 1] - source[known, 0]
        if known.size and (steps != steps[0]).any():
            row = int(known[np.flatnonzero(steps != steps[0])[0]])
            message = (
                f"operand {name}: rows {int(known[0])} and {row} do not agree on the order of their 16-byte chunks "
                f"({int(steps[0]):+d} and {int(source[row, 1] - source[row, 0]):+d} "
                "bytes apart in global memory): the tile "
                f"stored at {self.place(self.copied_by)} is not swizzled as its descriptor says"
            )
            self.launch.found("descriptor", message, op, threads)

    # -- the asynchronous proxy ---------------------------------------------------------------------------------

    def start_async_reads(self, op: Op, threads: np.ndarray, tiles: list[np.ndarray]) -> np.ndarray:
        """A tensor-core operation begins to read tiles (byte offsets within a CTA) of shared memory. Returns
        the flat words."""
        launch = self.launch
        inside = np.unique(np.concatenate([tile.reshape(-1) for tile in tiles]) // self.granule)
        bases = threads // launch.threads_per_cta * (launch.memory.shared_stride // self.granule)
        words = (bases[:, None] + inside).reshape(-1)
        repeated = np.repeat(threads, inside.size)
        bad, word, other, other_pc, count, unfenced = mark_async_reads(
            words, repeated >> 5, op.index, self.order.known, self.order.fenced, self.writer, self.write_clock,
            self.write_pc, self.read_clock, self.read_pc,
        )  # fmt: skip
        if bad >= 0:
            self._report_async(op, repeated[bad : bad + 1], word, other, other_pc, count, unfenced)
        if self.async_readers is None:
            self.async_readers = np.zeros(self.writer.size, np.int16)
        self.async_readers[words] += 1
        self.async_pc = op.index
        return words

    def _report_async(
        self, op: Op, thread: np.ndarray, word: int, other: int, other_pc: int, count: int, unfenced: bool
    ) -> None:
        offset = word * self.granule % self.launch.memory.shared_stride
        what = (
            f"{op.instruction.op} reads shared memory byte {offset}, "
            f"written by warp {other} at {self.place(other_pc)}, "
        )
        if unfenced:
            what += "without fence.proxy.async in between: the asynchronous proxy may see old data"
            self.launch.found("missing proxy fence", what, op, thread, count=count)
        else:
            self.launch.found("race", what + "which nothing orders before it", op, thread, count=count)

    def place(self, pc: int) -> str:
        """The source of an instruction, for messages."""
        instruction = self.launch.code.ops[pc].instruction
        return instruction.source.chain() if instruction.source else f"PTX line {instruction.line}"

    def finish_async_reads(self, words: np.ndarray) -> None:
        assert self.async_readers is not None
        self.async_readers[words] -= 1

    def check_async_readers(self, op: Op, threads: np.ndarray, words: np.ndarray) -> None:
        """A write to shared memory that a tensor-core operation in flight may still read."""
        if self.async_readers is None:
            return
        busy = self.async_readers[words] > 0
        if busy.any():
            offset = int(words[busy][0]) * self.granule % self.launch.memory.shared_stride
            reader = self.launch.code.ops[self.async_pc].instruction.op
            message = (
                f"write to shared memory byte {offset} while {reader} "
                f"at {self.place(self.async_pc)} is in flight and may "
                "still read it"
            )
            self.launch.found("race", message, op, threads[busy])

    def check_in_flight(self, op: Op, threads: np.ndarray, offsets: np.ndarray, size: int) -> None:
        """A store to shared memory that an asynchronous copy may still overwrite."""
        undefined = self.launch.memory.shared.undefined
        assert undefined is not None
        words, repeated = self._granules(threads, offsets, size)
        pending = np.isin(undefined[words], self.in_flight)
        if pending.any():
            copy = self.origins[int(undefined[words][pending][0])]
            message = f"store to shared memory that {copy} may still overwrite"
            self.launch.found("race", message, op, repeated[pending])

    def memory_origin(self, region: Region, offsets: np.ndarray, size: int) -> np.ndarray | None:
        """The origin of each access's bytes, or None if all are defined."""
        if region.undefined is not None:
            first = offsets // region.granule
            per = max(1, size // region.granule)
            found = region.undefined[first]
            for step in range(1, per):
                found = np.maximum(found, region.undefined[first + step])
            return found if found.any() else None
        if region.written is not None:
            written = region.written[offsets]
            for step in range(1, size):
                written = written & region.written[offsets + step]
            return None if written.all() else np.where(written, 0, NEVER_WRITTEN).astype(np.uint16)
        return None

    def set_memory_origin(
        self, region: Region, offsets: np.ndarray, size: int, origin: np.ndarray | int
    ) -> None:
        if region.undefined is None:
            return
        first = offsets // region.granule
        for step in range(max(1, size // region.granule)):
            region.undefined[first + step] = origin

    def get(self, rows: tuple[Row, ...], lanes: Lanes) -> np.ndarray | None:
        """The combined origin of some registers on these lanes, or None."""
        poison = self.launch.regs.poison
        combined: np.ndarray | None = None
        for row in rows:
            if row in poison:
                values = poison[row][lanes.sel]
                combined = values if combined is None else np.maximum(combined, values)
        return combined if combined is not None and combined.any() else None

    def set(self, row: Row, lanes: Lanes, origin: np.ndarray | None) -> None:
        poison = self.launch.regs.poison
        if row not in poison:
            if origin is None:
                return
            poison[row] = np.zeros(self.launch.threads, np.uint16)
        poison[row][lanes.sel] = 0 if origin is None else origin
        if origin is None and (lanes.count == self.launch.threads or not poison[row].any()):
            del poison[row]

    def propagate(self, op: Op, lanes: Lanes) -> None:
        """After an ordinary instruction: results are undefined where an operand or the guard was."""
        poison = self.launch.regs.poison
        if not poison:
            return
        origin = self.get(op.reads, lanes)
        for row in op.writes:
            self.set(row, lanes, origin)

    def report_use(self, op: Op, lanes: Lanes, origin: np.ndarray, what: str) -> None:
        """Undefined data reached something that matters."""
        bad = np.flatnonzero(origin)
        cause = self.origins[int(origin[bad[0]])]
        self.launch.found("undefined data", f"{what} comes from {cause}", op, lanes.threads()[bad])
