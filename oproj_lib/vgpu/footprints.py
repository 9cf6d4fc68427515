"""Who touched which byte of global memory, where several grids may touch it at the same time.

Two accesses of one byte by grids that nothing orders are a mistake whatever the schedule was, if one of them
is a write and they are not both *strong* (volatile, relaxed, acquire, release, atomic; PTX ISA, "Memory
Consistency Model: Morally Strong Operations"). Every grid that may run beside another therefore marks what it
reads and writes, and compares with the marks of the others:

* "too early": the two are in one stream, and the later one, launched with `pdl`, made its access before a
  `griddepcontrol.wait` that orders it (see `dependence`). Strong reads are polls, and exempt.
* "grid race": they are on different streams or ranks, and both run with checks.

Strong reads of what a weak store publishes are races by the letter of the manual; `strict` reports them too.
Grids that both order memory themselves (a fence, acquire or release other than on an mbarrier) are left out:
message passing through flags is not followed here. What one thread waited for with griddepcontrol.wait counts
for the threads that meet it at a later bar.sync, not for those that it signals through an mbarrier.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .dependence import AFTER_WAIT, BEFORE_WAIT
from .memory import Buffer

if TYPE_CHECKING:
    from .decode import Code, Op
    from .launch import Launch

_ORDERS = {"acquire", "release", "acq_rel", "sc"}
MAX_PLACES = np.iinfo(np.uint16).max


@dataclass(frozen=True)
class Kind:
    """What sort of access. phase: BEFORE_WAIT or AFTER_WAIT."""

    phase: int
    write: bool
    strong: bool


@dataclass
class Marks:
    """The accesses of one launch: per buffer and kind, for every byte, 1 + the number of the place that touched it
    last."""

    launch: Launch
    stream: int
    position: int  # in its stream
    order: int  # in which it was enqueued
    followed: bool  # a later grid of the stream may run beside it
    orders_memory: bool
    beside_others: bool = False  # grids of other streams or ranks are compared with it
    places: list[tuple[Op, int]] = field(default_factory=list)  # instruction, a thread that executed it
    numbers: dict[int, int] = field(default_factory=dict)
    touched: dict[Buffer, dict[Kind, np.ndarray]] = field(default_factory=dict)

    def number(self, op: Op, thread: int) -> int:
        if op.index not in self.numbers:
            self.places.append((op, thread))
            self.numbers[op.index] = len(self.places)
            if len(self.places) > MAX_PLACES:
                raise OverflowError(f"more than {MAX_PLACES} instructions access global memory")
        return self.numbers[op.index]

    def add(self, buffer: Buffer, kind: Kind, offsets: np.ndarray, size: int, number: int) -> None:
        marks = self.touched.setdefault(buffer, {})
        if kind not in marks:
            marks[kind] = sparse_zeros(buffer.bytes.size)
        rows(marks[kind], size)[offsets // size] = number


def sparse_zeros(count: int) -> np.ndarray:
    """uint16 zeros of which few will be touched. NumPy asks for huge pages, and touching one word then costs clearing
    2 MiB: mapped memory is cleared in pages of 4 KiB."""
    return np.frombuffer(mmap.mmap(-1, max(2 * count, 2)), np.uint16)[:count]


def rows(marks: np.ndarray, size: int) -> np.ndarray:
    return marks[: marks.size // size * size].reshape(-1, size)


def orders_memory(code: Code) -> bool:
    """Whether a kernel has fences or acquire and release operations of its own."""
    for op in code.ops:
        instruction = op.instruction
        if instruction.op in ("fence", "membar"):
            if not {"proxy", "mbarrier_init"} & set(instruction.mods):
                return True
        elif instruction.op != "mbarrier" and _ORDERS & set(instruction.mods):
            return True
    return False


class Footprints:
    """The marks of all grids of one `synchronize`. streams: the launches of each, in order; order: all launches as
    they were enqueued."""

    def __init__(self, streams: list[list[Launch]], order: list[Launch], strict: bool) -> None:
        self.strict = strict
        self.marks: dict[Launch, Marks] = {}
        for number, stream in enumerate(streams):
            for i, launch in enumerate(stream):
                followed = i + 1 < len(stream) and stream[i + 1].dependency.pdl
                self.marks[launch] = Marks(
                    launch, number, i, order.index(launch), followed, orders_memory(launch.code)
                )
        for mine in self.marks.values():
            mine.beside_others = any(self._across(mine, other) for other in self.marks.values())

    def needed(self, launch: Launch) -> bool:
        """Whether any other grid may run beside this one, and is to be compared with it."""
        mine = self.marks[launch]
        return (
            mine.followed or launch.dependency.pdl or any(self._across(mine, m) for m in self.marks.values())
        )

    def _across(self, mine: Marks, other: Marks) -> bool:
        return mine.stream != other.stream and mine.launch.checks and other.launch.checks

    def access(
        self,
        launch: Launch,
        op: Op,
        threads: np.ndarray,
        buffer: Buffer,
        offsets: np.ndarray,
        size: int,
        write: bool,
    ) -> None:
        """Checks and marks one access of `size` bytes per thread at byte offsets into a buffer."""
        waited = launch.dependency.waited[threads]
        if waited.all() or not waited.any():
            phase = AFTER_WAIT if waited[0] else BEFORE_WAIT
            self._access(launch, op, threads, buffer, offsets, size, Kind(phase, write, op.strong))
            return
        for phase, part in ((BEFORE_WAIT, ~waited), (AFTER_WAIT, waited)):
            kind = Kind(phase, write, op.strong)
            self._access(launch, op, threads[part], buffer, offsets[part], size, kind)

    def _access(
        self,
        launch: Launch,
        op: Op,
        threads: np.ndarray,
        buffer: Buffer,
        offsets: np.ndarray,
        size: int,
        kind: Kind,
    ) -> None:
        mine = self.marks[launch]
        ahead = launch.dependency.unordered(kind.phase)
        for other in self.marks.values():
            if other is mine or buffer not in other.touched:
                continue
            for theirs, marks in other.touched[buffer].items():
                if not (kind.write or theirs.write):
                    continue
                relation = self._relation(mine, kind, other, theirs, ahead)
                if relation and self._matters(relation, kind, theirs, mine, other):
                    found = rows(marks, size)[offsets // size]
                    if found.any():
                        self._report(relation, mine, op, threads, kind, other, found, theirs, buffer, offsets)
        if mine.followed or ahead or mine.beside_others:
            mine.add(buffer, kind, offsets, size, mine.number(op, int(threads[0])))

    def _relation(self, mine: Marks, kind: Kind, other: Marks, theirs: Kind, ahead: frozenset[Launch]) -> str:
        """Who depends on whom: "mine" (this access was made too early), "theirs", "across", or "": ordered."""
        if mine.stream != other.stream:
            return "across" if self._across(mine, other) else ""
        if other.launch in ahead:
            return "mine"
        if other.position > mine.position and mine.launch in other.launch.dependency.unordered(theirs.phase):
            return "theirs"
        return ""

    def _matters(self, relation: str, kind: Kind, theirs: Kind, mine: Marks, other: Marks) -> bool:
        if mine.orders_memory and other.orders_memory:
            return False
        if self.strict:
            return not (kind.strong and theirs.strong)
        if relation == "across":
            return not (kind.strong or theirs.strong)
        if kind.strong and theirs.strong:
            return False
        dependent, ahead = (kind, theirs) if relation == "mine" else (theirs, kind)
        polls = (dependent.strong and not dependent.write) or (ahead.strong and not ahead.write)
        return not polls

    def _report(
        self, relation: str, mine: Marks, op: Op, threads: np.ndarray, kind: Kind, other: Marks, found: np.ndarray,
        theirs: Kind, buffer: Buffer, offsets: np.ndarray,
    ) -> None:  # fmt: skip
        hit = found.any(axis=1)
        first = int(np.flatnonzero(hit)[0])
        other_op, other_thread = other.places[int(found[first].max()) - 1]
        here = Access(mine, kind, op, threads[hit])
        there = Access(other, theirs, other_op, np.array([other_thread]))
        element = buffer.element(int(offsets[first]))
        if relation == "across":  # the writer is named; of two writers, the one enqueued later
            is_mine = kind.write and (not theirs.write or mine.order > other.order)
        else:
            is_mine = relation == "mine"
        named, against = (here, there) if is_mine else (there, here)
        what = f"{named.verb} of {element} by {named.marks.launch.name}"
        which = f"{against.marks.launch.name}, which {against.verb}s it at {place(against.op)}"
        if relation == "across":
            rule, message = "grid race", f"{what} is not ordered with {which}"
        else:
            rule, message = "too early", f"{what} before a griddepcontrol.wait that orders it after {which}"
        named.marks.launch.found(rule, message, named.op, named.threads, int(hit.sum()))


@dataclass
class Access:
    """One side of a conflict."""

    marks: Marks
    kind: Kind
    op: Op
    threads: np.ndarray

    @property
    def verb(self) -> str:
        return "write" if self.kind.write else "read"


def place(op: Op) -> str:
    source = op.instruction.source
    return source.chain() if source else f"PTX line {op.instruction.line}"
