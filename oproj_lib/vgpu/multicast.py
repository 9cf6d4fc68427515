"""multimem instructions on multicast windows (PTX ISA, "multimem.ld_reduce, multimem.st, multimem.red")."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .access import Piece, check_address, store_piece, take_hints, take_space, vector_length
from .decode import Execute, Form, opcode
from .memory import MULTICAST_BASE, MulticastWindow
from .syntax import TYPE_BYTES, Reg

if TYPE_CHECKING:
    from .launch import Lanes, Launch


@opcode("multimem")
def build_multimem(form: Form) -> Execute:
    if form.take("st") is None:
        raise form.unsupported("only multimem.st is modelled")
    type_name = form.take_type("f32", "b32", "u32", "s32", "f16x2", "bf16x2", "f64", "b64", "u64", "s64")
    count = vector_length(form)
    if take_space(form) not in ("global", "generic"):
        raise form.malformed("multimem addresses are global")
    take_hints(form)
    form.finish(operands=2)
    element = np.dtype(f"uint{8 * TYPE_BYTES[type_name]}")
    size = element.itemsize * count
    sources = form.vector(form.operands[1])
    if len(sources) != count:
        raise form.malformed(f"{count} elements from {len(sources)} registers")
    reads = [form.read(source, f"b{8 * element.itemsize}") for source in sources]
    rows = [form.row(source) if isinstance(source, Reg) else None for source in sources]
    read_address = form.address(form.operands[0])
    form.tracks_poison = True

    def execute(launch: Launch, lanes: Lanes) -> None:
        op = launch.op
        if launch.shadow is not None:
            check_address(launch, op, lanes)
        addresses = np.broadcast_to(np.asarray(read_address(launch, lanes.sel), np.int64), (lanes.count,))
        values = np.stack([np.broadcast_to(r(launch, lanes.sel), (lanes.count,)) for r in reads], axis=1)
        starts = np.asarray([*launch.space.starts, MULTICAST_BASE * 2], np.int64)
        owner = np.searchsorted(starts, addresses, side="right") - 1
        for index in np.unique(owner):
            which = np.flatnonzero(owner == index)
            window = launch.space.items[index] if 0 <= index < len(launch.space.items) else None
            offsets = addresses[which] - (window.address if window else 0)
            if not isinstance(window, MulticastWindow) or not (offsets < window.end - window.address).any():
                what = launch.space.describe(int(addresses[which][0]))
                message = f"multimem.st of {size} bytes at {what}: not a multicast address"
                launch.found("wrong address space", message, op, lanes.threads()[which])
                continue
            outside, crooked = offsets + size > window.end - window.address, offsets % size != 0
            for kind, bad in (("out of bounds", outside), ("misaligned", crooked & ~outside)):
                if bad.any():
                    what = launch.space.describe(int(addresses[which][bad][0]))
                    launch.found(
                        kind, f"multimem.st of {size} bytes at {what}", op, lanes.threads()[which[bad]]
                    )
            good = ~(outside | crooked)
            which, offsets = which[good], offsets[good]
            launch.counters.multicast_store_bytes += size * which.size
            for member in window.members:
                if launch.footprints is not None and which.size:
                    threads = lanes.threads()[which]
                    launch.footprints.access(launch, op, threads, member, offsets, size, write=True)
                store_piece(launch, op, lanes, Piece(member, which, offsets), values[which], rows)

    return execute
