"""The virtual GPU as its users see it: load PTX, upload arrays, launch, read the report."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import access, alu, control, convert, copies, logic, mbarrier, multicast, tensor, warp, wgmma  # noqa: F401  (they register the instructions)
from .decode import Code, Decoder
from .launch import STEP_BUDGET, Launch
from .memory import AddressSpace, Buffer, MulticastWindow
from .ptx import parse
from .registers import DTYPES
from .report import Report
from .syntax import TYPE_BYTES, PTXFile, Variable

MAX_SHARED_BYTES = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    103: 227 * 1024,
    120: 99 * 1024,
}
MAX_THREADS_PER_BLOCK = 1024


@dataclass
class Module:
    """A parsed and decoded PTX module. `entries` are the names of its kernels."""

    ptx: PTXFile
    codes: dict[str, Code]

    @property
    def entries(self) -> tuple[str, ...]:
        return tuple(self.codes)

    @property
    def arch(self) -> int:
        match = re.match(r"sm_(\d+)", self.ptx.target)
        if match is None:
            raise ValueError(f"target {self.ptx.target!r}: expected sm_NN")
        return int(match[1])

    def code(self, entry: str | None) -> Code:
        if entry is None and len(self.codes) == 1:
            return next(iter(self.codes.values()))
        if entry not in self.codes:
            raise ValueError(f"entry {entry!r}: this module has {', '.join(self.codes)}")
        return self.codes[entry]


def load(ptx: str) -> Module:
    """Parses and decodes PTX.

    Raises MalformedPTX for what is not PTX, UnsupportedPTX for what the virtual GPU does not model; both name
    the PTX line.
    """
    file = parse(ptx)
    return Module(file, {name: Decoder(entry).decode() for name, entry in file.entries.items()})


class VirtualGPU:
    """Memory of `ranks` virtual GPUs in one flat address space, and the means to launch kernels on them."""

    def __init__(self, ranks: int = 1) -> None:
        self.space = AddressSpace(ranks)
        self._variables: dict[tuple[int, int], dict[str, Buffer]] = {}

    def upload(self, array: Any, name: str = "array", rank: int = 0) -> Buffer:
        """Makes a contiguous numpy array or CPU torch tensor addressable, without copying: kernels write into
        it."""
        return self.space.add(array, name, rank, defined=True)

    def empty(self, shape: tuple[int, ...] | int, dtype: Any, name: str = "out", rank: int = 0) -> Buffer:
        """Undefined memory (filled with 0xFF bytes). `Buffer.written` says, per byte, what kernels wrote."""
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xFF
        return self.space.add(array, name, rank, defined=False)

    def multicast(self, members: list[Buffer] | tuple[Buffer, ...]) -> MulticastWindow:
        """A window of addresses that stands for all members at once; only multimem instructions may use
        it."""
        return self.space.add_window(tuple(members))

    def free(self, item: Buffer | MulticastWindow) -> None:
        """Ends an allocation: later accesses are out of bounds."""
        self.space.remove(item)

    def launch(
        self,
        module: Module,
        entry: str | None = None,
        *,
        grid: tuple[int, ...] | int = 1,
        block: tuple[int, ...] | int = 1,
        args: list[Any] | tuple[Any, ...] = (),
        dynamic_shared_bytes: int = 0,
        cluster: tuple[int, ...] | int = 1,
        rank: int = 0,
        schedule: str | int = "program",
        exact: bool = False,
        checks: bool = False,
        counting: bool = True,
        predecessor_writes: tuple[Buffer, ...] = (),
        trace: int | None = None,
        step_budget: int = STEP_BUDGET,
    ) -> Report:
        """Runs one kernel over the whole grid.

        `args`: a Buffer or MulticastWindow passes its address; numbers become the parameter's PTX type; bytes
        are copied. `schedule`: "program" (lowest program counter first) or an integer seed (random warps).
        `exact`: tensor-core arithmetic bit for bit, otherwise FP32. `checks`: track undefined data and races
        (bounds, alignment and deadlocks are always checked). `trace`: a CTA whose events are recorded in
        `Report.trace`. `predecessor_writes`: buffers that the previous kernel may still write before
        `griddepcontrol.wait` returns.

        Raises ValueError for a launch that the hardware would refuse.
        """
        code = module.code(entry)
        grid3, block3 = three(grid, "grid"), three(block, "block")
        if three(cluster, "cluster") != (1, 1, 1):
            raise ValueError(f"cluster {cluster}: only clusters of one CTA are modelled")
        check_schedule(schedule)
        self._check_block(code, block3)
        shared = self._shared_bytes(code, module.arch, dynamic_shared_bytes)
        launch = Launch(
            code, self.space, grid=grid3, block=block3, parameters=encode_parameters(code, args),
            variables={name: buffer.address for name, buffer in self.variables(module, code, rank).items()},
            shared_bytes=shared, rank=rank, schedule=schedule, exact=exact, checks=checks, counting=counting,
            arch=module.arch, predecessor_writes=predecessor_writes, trace=trace, step_budget=step_budget,
        )  # fmt: skip
        return launch.run()

    def variables(self, module: Module, code: Code, rank: int) -> dict[str, Buffer]:
        """The module's .global and .const variables on this rank; they keep their values between launches."""
        key = (id(module), rank)
        known = self._variables.setdefault(key, {})
        for variable in code.module_variables:
            if variable.name not in known:
                array = np.zeros(max(variable.size, 1), np.uint8)
                raw = variable.init if isinstance(variable.init, bytes) else b""
                array[: len(raw)] = np.frombuffer(raw, np.uint8)
                known[variable.name] = self.space.add(
                    array, variable.name, rank, defined=True, space=variable.space
                )
        return known

    @staticmethod
    def _check_block(code: Code, block: tuple[int, int, int]) -> None:
        threads = block[0] * block[1] * block[2]
        if threads > MAX_THREADS_PER_BLOCK:
            raise ValueError(f"block {block} has {threads} threads; at most {MAX_THREADS_PER_BLOCK}")
        entry = code.entry
        if entry.required_threads and entry.required_threads != block:
            raise ValueError(f"block {block}: {entry.name} requires {entry.required_threads} (.reqntid)")
        if entry.max_threads and threads > entry.max_threads:
            raise ValueError(
                f"block {block} has {threads} threads; {entry.name} allows {entry.max_threads} (.maxntid)"
            )

    @staticmethod
    def _shared_bytes(code: Code, arch: int, dynamic: int) -> int:
        if dynamic < 0:
            raise ValueError(f"dynamic_shared_bytes = {dynamic} is negative")
        start = (
            max([code.static_shared_bytes, *code.shared_offsets.values()])
            if dynamic
            else code.static_shared_bytes
        )
        total = start + dynamic
        limit = MAX_SHARED_BYTES.get(arch, 227 * 1024)
        if total > limit:
            raise ValueError(
                f"{code.static_shared_bytes} static + {dynamic} dynamic bytes of shared memory; sm_{arch} has {limit}"
            )
        return total


def check_schedule(schedule: str | int) -> None:
    if schedule != "program" and not (isinstance(schedule, int) and not isinstance(schedule, bool)):
        raise ValueError(f'schedule {schedule!r}: "program" or an integer seed')


def three(value: tuple[int, ...] | int, what: str) -> tuple[int, int, int]:
    """Launch dimensions as (x, y, z)."""
    items = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(items) <= 3 or any(int(item) < 1 for item in items):
        raise ValueError(f"{what} {value}: one to three positive numbers")
    x, y, z = (*items, 1, 1)[:3]
    return int(x), int(y), int(z)


def encode_parameters(code: Code, args: list[Any] | tuple[Any, ...]) -> bytes:
    """The parameter block: each argument in its parameter's type."""
    parameters = code.entry.parameters
    if len(args) != len(parameters):
        names = ", ".join(
            f"{p.name} (.{p.type}{f' x {p.size}' if p.type == 'b8' else ''})" for p in parameters
        )
        raise ValueError(f"{code.entry.name} takes {len(parameters)} arguments, {len(args)} given: {names}")
    block = bytearray(code.parameter_bytes)
    for parameter, value in zip(parameters, args, strict=True):
        at = code.parameter_offsets[parameter.name]
        block[at : at + parameter.size] = encode_argument(parameter, value)
    return bytes(block) + bytes(16)


def encode_argument(parameter: Variable, value: Any) -> bytes:
    size = parameter.size or TYPE_BYTES[parameter.type]
    if isinstance(value, Buffer | MulticastWindow):
        raw = value.address.to_bytes(8, "little")
    elif isinstance(value, bytes | bytearray):
        raw = bytes(value)
    elif isinstance(value, np.generic):
        raw = value.tobytes()
    elif isinstance(value, bool | int) and parameter.type not in ("f32", "f64"):
        raw = (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    elif isinstance(value, int | float):
        kind = parameter.type if parameter.type in ("f32", "f64") else {4: "f32", 8: "f64"}.get(size, "f32")
        raw = DTYPES[kind].type(value).tobytes()
    else:
        raise TypeError(
            f"argument for {parameter.name}: a Buffer, a number, or bytes; not {type(value).__name__}"
        )
    if len(raw) != size:
        raise ValueError(f"argument for {parameter.name}: {len(raw)} bytes where the parameter has {size}")
    return raw


def run_ptx(
    ptx: str,
    entry: str | None = None,
    grid: tuple[int, ...] | int = 1,
    block: tuple[int, ...] | int = 1,
    args: list[Any] | tuple[Any, ...] = (),
    **options: Any,
) -> Report:
    """Runs anybody's PTX: numpy arrays among `args` are used in place, everything else is passed by value.

    Options are those of `VirtualGPU.launch`. Example: `run_ptx(text, "add", 4, 128, [x, y, out, 512])`.
    """
    gpu = VirtualGPU()
    items = [
        gpu.upload(a, f"argument {i}") if hasattr(a, "shape") and not isinstance(a, np.generic) else a
        for i, a in enumerate(args)
    ]
    return gpu.launch(load(ptx), entry, grid=grid, block=block, args=items, **options)
