"""Loads and stores, and what every access to memory has in common (PTX ISA, "Data Movement and Conversion
Instructions: ld, st"). Bounds and alignment are always checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .counting import count_sectors, count_wavefronts
from .decode import Execute, Form, Op, opcode
from .memory import LOCAL_BASE, SHARED_BASE, WINDOW_SPAN, Buffer, MulticastWindow, Region
from .registers import DTYPES
from .sentinel import check_store
from .syntax import TYPE_BYTES, Addr, Reg, Sym

if TYPE_CHECKING:
    from .launch import Lanes, Launch

# Qualifiers that choose a cache level, an eviction priority, an order or a scope. They change when and how
# fast data moves, never which bytes one thread reads or writes, except .nc (see build_ld) and the ones that
# order memory.
CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
EVICTION = tuple(
    f"{level}::{rule}"
    for level in ("L1", "L2")
    for rule in (
        "evict_normal",
        "evict_unchanged",
        "evict_first",
        "evict_last",
        "no_allocate",
        "cache_hint",
        "64B",
        "128B",
        "256B",
    )
)
ORDER = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
STRONG = frozenset(ORDER) - {"weak"}  # PTX ISA, "Memory Consistency Model: Strong Operations"
SCOPE = ("cta", "cluster", "gpu", "sys")
SPACES = ("global", "shared", "shared::cta", "local", "const", "param", "param::entry")


@dataclass
class Piece:
    """The part of an access that falls into one region: `which` selects lanes (None: all), `offsets` are
    bytes into it."""

    region: Region
    which: np.ndarray | None
    offsets: np.ndarray


def take_space(form: Form) -> str:
    space = form.take(*SPACES)
    if form.take("shared::cluster"):
        raise form.unsupported("distributed shared memory (.shared::cluster) is not modelled")
    if space == "param::entry":
        return "param"
    return space.removesuffix("::cta") if space else "generic"


def take_hints(form: Form) -> None:
    """Consumes cache, eviction, order and scope qualifiers; notes whether the operation is strong."""
    form.strong = not STRONG.isdisjoint(form.mods)
    while form.take(*CACHE, *EVICTION, *ORDER, *SCOPE):
        pass


def locate(
    launch: Launch, op: Op, lanes: Lanes, addresses: Any, size: int, space: str, verb: str
) -> Iterator[Piece]:
    """Splits an access by region. Lanes with a bad address are reported and left out."""
    addresses = np.broadcast_to(np.asarray(addresses, np.int64), (lanes.count,))
    if (addresses & (size - 1)).any():
        bad = (addresses & (size - 1)) != 0
        address = int(addresses[bad][0])
        launch.found(
            "misaligned",
            f"{verb} of {size} bytes at {where(launch, space, address)}: not a multiple of {size}",
            op,
            lanes.threads()[bad],
        )
        yield from _located(launch, op, lanes, addresses, size, space, verb, np.flatnonzero(~bad))
        return
    yield from _located(launch, op, lanes, addresses, size, space, verb, None)


def where(launch: Launch, space: str, address: int) -> str:
    if space in ("shared", "local"):
        return f"{space} byte {address} ({getattr(launch.memory, space + '_bytes')} bytes there)"
    return launch.space.describe(address)


def _located(
    launch: Launch,
    op: Op,
    lanes: Lanes,
    addresses: np.ndarray,
    size: int,
    space: str,
    verb: str,
    which: np.ndarray | None,
) -> Iterator[Piece]:
    picked = addresses if which is None else addresses[which]
    if picked.size == 0:
        return
    if space in ("shared", "local"):
        yield from _windowed(launch, op, lanes, picked, size, space, verb, which)
        return
    if space == "generic" and int(picked.max()) >= SHARED_BASE:
        for name, base in (("shared", SHARED_BASE), ("local", LOCAL_BASE)):
            inside = (picked >= base) & (picked < base + WINDOW_SPAN)
            if inside.any():
                part = np.flatnonzero(inside) if which is None else which[inside]
                yield from _windowed(launch, op, lanes, picked[inside] - base, size, name, verb, part)
        rest = picked < SHARED_BASE
        if not rest.any():
            return
        which = np.flatnonzero(rest) if which is None else which[rest]
        picked = picked[rest]
    yield from _global(launch, op, lanes, picked, size, verb, which)


def _windowed(
    launch: Launch,
    op: Op,
    lanes: Lanes,
    offsets: np.ndarray,
    size: int,
    space: str,
    verb: str,
    which: np.ndarray | None,
) -> Iterator[Piece]:
    memory = launch.memory
    limit = memory.shared_bytes if space == "shared" else memory.local_bytes
    bad = (offsets < 0) | (offsets + size > limit)
    if bad.any():
        threads = lanes.threads() if which is None else lanes.threads()[which]
        launch.found(
            "out of bounds",
            f"{verb} of {size} bytes at {where(launch, space, int(offsets[bad][0]))}",
            op,
            threads[bad],
        )
        good = np.flatnonzero(~bad)
        which = good if which is None else which[good]
        offsets = offsets[good]
        if offsets.size == 0:
            return
    threads = lanes.threads() if which is None else lanes.threads()[which]
    if space == "shared":
        yield Piece(
            memory.shared, which, offsets + (threads // launch.threads_per_cta) * memory.shared_stride
        )
    else:
        yield Piece(memory.local, which, offsets + threads * memory.local_stride)


def _global(
    launch: Launch,
    op: Op,
    lanes: Lanes,
    addresses: np.ndarray,
    size: int,
    verb: str,
    which: np.ndarray | None,
) -> Iterator[Piece]:
    low, high = int(addresses.min()), int(addresses.max())
    item = launch.space.at(low)
    if (
        isinstance(item, Buffer) and high + size <= item.end
    ):  # the common case: one allocation serves everybody
        yield from _in_buffer(launch, op, lanes, item, addresses - item.address, size, verb, which)
        return
    starts = np.asarray(launch.space.starts, np.int64)
    owner = np.searchsorted(starts, addresses, side="right") - 1
    for index in np.unique(owner):
        part = np.flatnonzero(owner == index)
        selected = part if which is None else which[part]
        item = launch.space.items[index] if index >= 0 else None
        if isinstance(item, MulticastWindow) and int(addresses[part].min()) < item.end:
            launch.found(
                "wrong address space",
                f"{verb} through {launch.space.describe(int(addresses[part][0]))}: only multimem instructions may",
                op,
                lanes.threads()[selected],
            )
            continue
        inside = addresses[part] + size <= item.end if isinstance(item, Buffer) else np.zeros(part.size, bool)
        if not inside.all():
            first = int(addresses[part][~inside][0])
            launch.found(
                "out of bounds",
                f"{verb} of {size} bytes at {launch.space.describe(first)}",
                op,
                lanes.threads()[selected[~inside]],
            )
        if isinstance(item, Buffer) and inside.any():
            offsets = addresses[part][inside] - item.address
            yield from _in_buffer(launch, op, lanes, item, offsets, size, verb, selected[inside])


def _in_buffer(
    launch: Launch,
    op: Op,
    lanes: Lanes,
    buffer: Buffer,
    offsets: np.ndarray,
    size: int,
    verb: str,
    which: np.ndarray | None,
) -> Iterator[Piece]:
    if buffer.space == "const" and verb != "load":
        threads = lanes.threads() if which is None else lanes.threads()[which]
        launch.found("wrong address space", f"{verb} to constant memory ({buffer.name})", op, threads)
        return
    if buffer in launch.predecessor_writes and not launch.dependency.waited.all():
        threads = lanes.threads() if which is None else lanes.threads()[which]
        early = ~launch.dependency.waited[threads]
        if early.any():
            launch.found(
                "too early",
                f"{verb} of {buffer.name} before griddepcontrol.wait: the previous kernel may still be writing it",
                op,
                threads[early],
            )
    if launch.footprints is not None and verb != "bulk prefetch":
        threads = lanes.threads() if which is None else lanes.threads()[which]
        write = verb in ("store", "atomic")
        launch.footprints.access(launch, op, threads, buffer, offsets, size, write)
    yield Piece(buffer, which, offsets)


def count_access(launch: Launch, op: Op, lanes: Lanes, piece: Piece, size: int, *, write: bool) -> None:
    """Adds one access to the counters."""
    threads = lanes.threads() if piece.which is None else lanes.threads()[piece.which]
    counters, line = launch.counters, launch.counters.line(op.instruction)
    moved = size * threads.size
    line.bytes += moved
    if piece.region.space == "shared":
        requests, wavefronts, ideal = shared_wavefronts(launch, threads, piece.offsets, size)
        line.wavefronts += wavefronts
        line.ideal_wavefronts += ideal
        counters.shared_wavefronts += wavefronts
        counters.bank_conflicts += wavefronts - ideal
        if write:
            counters.shared_store_bytes += moved
        else:
            counters.shared_load_bytes += moved
    elif piece.region.space == "global":
        requests, sectors = count_sectors(threads, piece.offsets, size)
        line.sectors += sectors
        counters.global_sectors += sectors
        if write:
            counters.global_store_bytes += moved
        else:
            counters.global_load_bytes += moved
    else:
        requests = np.unique(threads >> 5).size
    line.executions += requests


def shared_wavefronts(
    launch: Launch, threads: np.ndarray, offsets: np.ndarray, size: int
) -> tuple[int, int, int]:
    """`count_wavefronts`, counted in one CTA where all CTAs do the same, as they mostly do."""
    if launch.ctas > 1 and threads.size % launch.ctas == 0:
        by_cta = (
            offsets.reshape(launch.ctas, -1) - np.arange(launch.ctas)[:, None] * launch.memory.shared_stride
        )
        who = threads.reshape(launch.ctas, -1) - np.arange(launch.ctas)[:, None] * launch.threads_per_cta
        if (by_cta == by_cta[0]).all() and (who == who[0]).all():
            requests, wavefronts, ideal = count_wavefronts(who[0], by_cta[0], size)
            return requests * launch.ctas, wavefronts * launch.ctas, ideal * launch.ctas
    return count_wavefronts(threads, offsets, size)


# -- ld, st -----------------------------------------------------------------------------------------------------------


def vector_length(form: Form) -> int:
    mod = form.take("v2", "v4", "v8")
    return int(mod[1:]) if mod else 1


def note_shared_size(form: Form, space: str, size: int) -> None:
    """The finest shared-memory access decides how finely undefined data and races are tracked."""
    if space in ("shared", "generic"):
        form.decoder.smallest_shared = min(form.decoder.smallest_shared, size)


@opcode("ld", "ldu")
def build_ld(form: Form) -> Execute:
    type_name = form.take_type()
    count = vector_length(form)
    space = take_space(form)
    take_hints(form)
    operands = form.operands
    form.finish(operands=(2, 3))  # a third operand is a cache policy
    if len(operands) == 3:
        form.read(operands[2], "b64")
    if space == "param":
        return load_parameter(form, type_name, count)
    element = np.dtype(f"uint{8 * TYPE_BYTES[type_name]}")
    size = element.itemsize * count
    read_address = form.address(operands[1])
    targets = form.vector(operands[0])
    if len(targets) != count:
        raise form.malformed(f"{count} elements into {len(targets)} registers")
    writes = [form.write(target, type_name) for target in targets]
    rows = [form.row(target, write=True) if isinstance(target, Reg) else None for target in targets]
    space = resolve_space(form, operands[1], space)
    note_shared_size(form, space, size)
    form.tracks_poison = True
    dtype = DTYPES[type_name]

    def execute(launch: Launch, lanes: Lanes) -> None:
        op = launch.op
        addresses = read_address(launch, lanes.sel)
        if launch.shadow is not None:
            check_address(launch, op, lanes)
        for piece in locate(launch, op, lanes, addresses, size, space, "load"):
            part = lanes if piece.which is None else lanes.pick(piece.which)
            values = piece.region.view(element, count)[piece.offsets // size]
            for i, write in enumerate(writes):
                write(launch, part.sel, np.ascontiguousarray(values[:, i]).view(dtype))
            if launch.watch is not None:
                launch.watch.note_read(op, part.threads(), piece.region, piece.offsets, size)
            if launch.counting:
                count_access(launch, op, lanes, piece, size, write=False)
            if launch.shadow is not None:
                track_load(launch, op, part, piece, size, rows)

    return execute


def resolve_space(form: Form, operand: Any, space: str) -> str:
    """A generic access to a named variable is an access to that variable's space."""
    if isinstance(operand, Addr) and isinstance(operand.base, Sym) and space == "generic":
        return form.decoder.space_of(operand.base.name, form).replace("const", "global")
    return "global" if space == "const" else space


def track_load(launch: Launch, op: Op, lanes: Lanes, piece: Piece, size: int, rows: list[Any]) -> None:
    shadow = launch.shadow
    assert shadow is not None
    if piece.region.space == "shared":
        shadow.shared_access(op, lanes.threads(), piece.offsets, size, write=False)
    each = size // len(rows)
    poisoned = shadow.memory_origin(piece.region, piece.offsets, size) is not None
    for i, row in enumerate(rows):
        if row is not None:
            origin = shadow.memory_origin(piece.region, piece.offsets + i * each, each) if poisoned else None
            if origin is not None:  # remember which load brought it in, if memory itself was never written
                blame = shadow.origin("memory that nobody wrote, loaded", op)
                origin = np.where(origin == 1, np.uint16(blame), origin)
            shadow.set(row, lanes, origin)


def check_address(launch: Launch, op: Op, lanes: Lanes) -> None:
    """An address computed from undefined data."""
    shadow = launch.shadow
    if shadow is None or not launch.regs.poison:
        return
    addressing = op.address_rows
    origin = shadow.get(addressing, lanes)
    if origin is not None:
        shadow.report_use(op, lanes, origin, "this address")


def load_parameter(form: Form, type_name: str, count: int) -> Execute:
    operand = form.operands[1]
    if not isinstance(operand, Addr) or not isinstance(operand.base, Sym):
        raise form.unsupported("ld.param through a register")
    name, offset = operand.base.name, operand.offset
    form.decoder.space_of(name, form)
    dtype = DTYPES[type_name]
    targets = form.vector(form.operands[0])
    writes = [form.write(target, type_name) for target in targets]

    def execute(launch: Launch, lanes: Lanes) -> None:
        start = launch.code.parameter_offsets[name] + offset
        for i, write in enumerate(writes):
            at = start + i * dtype.itemsize
            write(launch, lanes.sel, np.frombuffer(launch.parameters, dtype, 1, at)[0])

    return execute


@opcode("st")
def build_st(form: Form) -> Execute:
    type_name = form.take_type()
    count = vector_length(form)
    space = take_space(form)
    take_hints(form)
    operands = form.operands
    form.finish(operands=(2, 3))
    if space in ("param", "const"):
        raise form.malformed(f"st to .{space}")
    element = np.dtype(f"uint{8 * TYPE_BYTES[type_name]}")
    size = element.itemsize * count
    sources = form.vector(operands[1])
    if len(sources) != count:
        raise form.malformed(f"{count} elements from {len(sources)} registers")
    reads = [form.read(source, f"b{8 * element.itemsize}") for source in sources]
    rows = [
        form.row(source) if isinstance(source, Reg) and source.name in form.decoder.entry.registers else None
        for source in sources
    ]
    read_address = form.address(operands[0])
    space = resolve_space(form, operands[0], space)
    note_shared_size(form, space, size)
    form.tracks_poison = True

    def execute(launch: Launch, lanes: Lanes) -> None:
        op = launch.op
        addresses = read_address(launch, lanes.sel)
        if launch.shadow is not None:
            check_address(launch, op, lanes)
        values = np.empty((lanes.count, count), element)
        for i, read in enumerate(reads):
            values[:, i] = read(launch, lanes.sel)
        for piece in locate(launch, op, lanes, addresses, size, space, "store"):
            store_piece(
                launch, op, lanes, piece, values if piece.which is None else values[piece.which], rows
            )

    return execute


def store_piece(
    launch: Launch, op: Op, lanes: Lanes, piece: Piece, values: np.ndarray, rows: list[Any]
) -> None:
    """Writes values [lanes, count] into one region, with bookkeeping."""
    note_write(launch, op, lanes, piece, values)
    element, count = values.dtype, values.shape[1]
    size = element.itemsize * count
    region, where_to = piece.region, piece.offsets // size
    racing = launch.shadow is not None and region.space == "shared"
    same_old = (region.view(element, count)[where_to] == values).all(axis=1) if racing else None
    region.view(element, count)[where_to] = values
    if region.written is not None:
        region.written.reshape(-1)[: region.written.size // size * size].reshape(-1, size)[where_to] = True
    if launch.counting:
        count_access(launch, op, lanes, piece, size, write=True)
    if launch.shadow is None:
        return
    part = lanes if piece.which is None else lanes.pick(piece.which)
    if same_old is not None:
        if launch.copies.pending:
            launch.shadow.check_in_flight(op, part.threads(), piece.offsets, size)
        same_new = (region.view(element, count)[where_to] == values).all(axis=1)
        launch.shadow.shared_access(
            op, part.threads(), piece.offsets, size, write=True, same=(same_old, same_new)
        )
    for i, row in enumerate(rows):
        origin = launch.shadow.get((row,), part) if row is not None else None
        if origin is not None and region.space == "global":
            launch.shadow.report_use(op, part, origin, f"a value stored to {region.name}")
        launch.shadow.set_memory_origin(
            region, piece.offsets + i * element.itemsize, element.itemsize, 0 if origin is None else origin
        )


def note_write(launch: Launch, op: Op, lanes: Lanes, piece: Piece, values: np.ndarray) -> None:
    """Tells those who poll that a write comes, and checks what is published."""
    region = piece.region
    if launch.watch is not None:
        element, count = values.dtype, values.shape[1]
        there = region.view(element, count)[piece.offsets // (element.itemsize * count)]
        launch.watch.changed |= bool((there != values).any())
    launch.writes += 1
    if isinstance(region, Buffer) and region.sentinel is not None:
        threads = lanes.threads() if piece.which is None else lanes.threads()[piece.which]
        check_store(launch, op, threads, region, piece.offsets, values)
