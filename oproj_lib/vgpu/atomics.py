"""Atomic operations on memory (PTX ISA, "Parallel Synchronization and Communication Instructions: atom, red")."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .access import (
    check_address,
    count_access,
    locate,
    note_shared_size,
    resolve_space,
    take_hints,
    take_space,
    vector_length,
)
from .decode import Execute, Form, opcode
from .floats import canonical_nan, carry_payload, flush_subnormals
from .registers import DTYPES

if TYPE_CHECKING:
    from .launch import Lanes, Launch


def float_sum(old: np.ndarray, operand: np.ndarray, *, in_global: bool) -> np.ndarray:
    """atom.add of floats.

    FP32 sums in global memory flush subnormal operands and results (PTX ISA, "atom"). As on an H200, NaNs are
    canonical; in FP64 they keep a payload: in global memory the operand's, else the old value's, not made quiet;
    elsewhere the old value's, else the operand's.
    """
    if old.dtype == np.float64:
        total = carry_payload(old + operand, old, operand)
        if not in_global:
            return total
        return np.where(np.isnan(operand), operand, np.where(np.isnan(old), old, total))
    if old.dtype == np.float32 and in_global:
        return flush_subnormals(canonical_nan(flush_subnormals(old) + flush_subnormals(operand)))
    return canonical_nan(old + operand)


def atomic_function(name: str, type_name: str, space: str) -> Any:
    """new = function(old, operand), for memory of a state space."""
    dtype = DTYPES[type_name]
    if name == "add" and type_name in ("f16", "bf16", "f32", "f64"):
        return partial(float_sum, in_global=space == "global")
    table: dict[str, Any] = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda old, new: new,
        "inc": lambda old, limit: np.where(old >= limit, dtype.type(0), old + dtype.type(1)),
        "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - dtype.type(1)),
    }  # fmt: skip
    return table.get(name)


@opcode("atom", "red")
def build_atom(form: Form) -> Execute:
    type_name = form.take_type()
    space = take_space(form)
    take_hints(form)
    form.strong = True  # .relaxed unless it says more
    form.take("noftz")
    name = form.take("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas")
    if name is None:
        raise form.unsupported("this atomic operation is not modelled")
    count = vector_length(form)
    if count > 1 or type_name in ("f16x2", "bf16x2"):
        raise form.unsupported("vector and packed atomics are not modelled")
    returns = form.instruction.op == "atom"
    operands = form.operands[1:] if returns else form.operands
    form.finish(operands=(len(form.operands),))
    write = form.write(form.operands[0], type_name) if returns else None
    read_address = form.address(operands[0])
    b = form.read(operands[1], type_name)
    c = form.read(operands[2], type_name) if name == "cas" else None
    dtype = DTYPES[type_name]
    space = resolve_space(form, operands[0], space)
    note_shared_size(form, space, dtype.itemsize)
    form.decoder.shared_atomics |= space in ("shared", "generic")

    def execute(launch: Launch, lanes: Lanes) -> None:
        op, size = launch.op, dtype.itemsize
        if launch.shadow is not None:
            check_address(launch, op, lanes)
        operand = np.broadcast_to(b(launch, lanes.sel), (lanes.count,))
        swap = np.broadcast_to(c(launch, lanes.sel), (lanes.count,)) if c is not None else None
        for piece in locate(launch, op, lanes, read_address(launch, lanes.sel), size, space, "atomic"):
            which = np.arange(lanes.count) if piece.which is None else piece.which
            function = atomic_function(name, type_name, piece.region.space)
            memory = piece.region.view(dtype, 1)[:, 0]
            index = piece.offsets // size
            old = np.empty(which.size, dtype)
            before = memory[index].copy()
            for turn in turns(index):  # lanes that share an address go one after another
                current = memory[index[turn]]
                old[turn] = current
                value = operand[which[turn]]
                if swap is not None:
                    memory[index[turn]] = np.where(current == value, swap[which[turn]], current)
                else:
                    memory[index[turn]] = function(current, value)
            if (memory[index] != before).any():
                launch.writes += 1
                if launch.watch is not None:
                    launch.watch.changed = True
            if launch.watch is not None:
                launch.watch.note_read(op, lanes.threads()[which], piece.region, piece.offsets, size)
            if write is not None:
                write(launch, lanes.pick(which).sel, old)
            if piece.region.written is not None:
                for step in range(size):
                    piece.region.written[piece.offsets + step] = True
            if launch.counting:
                count_access(launch, op, lanes, piece, size, write=True)
            if launch.shadow is not None and piece.region.space == "shared":
                launch.shadow.shared_access(
                    op, lanes.threads()[which], piece.offsets, size, write=True, atomic=True
                )

    return execute


def turns(index: np.ndarray) -> Iterator[np.ndarray]:
    """Positions grouped so that no group holds an address twice; order within an address is lane order."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    lengths = np.diff(np.r_[starts, ordered.size])
    occurrence = np.arange(ordered.size) - np.repeat(starts, lengths)
    for turn in range(int(lengths.max())):
        yield order[occurrence == turn]
