"""The virtual GPU as its users see it: load PTX, upload arrays, launch, read the report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np

from . import access, alu, atomics, control, convert, copies, logic, mbarrier, multicast, tensor, warp, wgmma  # noqa: F401  (they register the instructions)
from .decode import Code, Decoder
from .launch import STEP_BUDGET, Launch
from .memory import AddressSpace, Buffer, MulticastWindow
from .ptx import parse
from .registers import DTYPES
from .report import Report
from .sentinel import Sentinel
from .streams import GridHandle, Streams
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


class GridOptions(TypedDict, total=False):
    """Options of `enqueue` and `launch`."""

    grid: tuple[int, ...] | int
    block: tuple[int, ...] | int
    args: list[Any] | tuple[Any, ...]
    """A Buffer or MulticastWindow passes its address; numbers become the parameter's PTX type; bytes are copied."""
    dynamic_shared_bytes: int
    cluster: tuple[int, ...] | int
    rank: int
    stream: str
    """"main" by default. A stream belongs to a rank: grids of (rank, stream) run in order."""
    pdl: bool
    """The launch attribute of programmatic stream serialization: the grid may start once every CTA of its
    predecessor in the stream has triggered or exited (see `dependence`)."""
    exact: bool
    """Tensor-core arithmetic bit for bit, otherwise FP32."""
    checks: bool
    """Track undefined data and races. Bounds, alignment, deadlocks, endless polling, and accesses before
    griddepcontrol.wait are always checked."""
    counting: bool
    """Count bytes, sectors, wavefronts; True by default."""
    predecessor_writes: tuple[Buffer, ...]
    """Buffers that a kernel which is not enqueued here may still write before griddepcontrol.wait returns."""
    rearms: bool
    """See `VirtualGPU.watch_sentinel`."""
    trace: int | None
    """A CTA whose events are recorded in `Report.trace`."""
    name: str
    """For messages; the entry's name by default."""


class VirtualGPU:
    """Memory of `ranks` virtual GPUs in one flat address space, and the means to launch kernels on them."""

    def __init__(self, ranks: int = 1, resident_ctas: int | None = None) -> None:
        """`resident_ctas`: how many CTAs a rank has room for (SMs x CTAs per SM): the others start, in order, when
        one exits. None: there is room for all."""
        if resident_ctas is not None and resident_ctas < 1:
            raise ValueError(f"resident_ctas = {resident_ctas}: at least 1, or None for no limit")
        self.space = AddressSpace(ranks)
        self.resident_ctas = resident_ctas
        self._enqueued: list[GridHandle] = []
        self._variables: dict[tuple[int, int], dict[str, Buffer]] = {}

    def upload(self, array: Any, name: str = "array", rank: int = 0, axes: tuple[str, ...] = ()) -> Buffer:
        """Makes a contiguous numpy array or CPU torch tensor addressable, without copying: kernels write into
        it. `axes`: names of the array's axes, for messages."""
        return self.space.add(array, name, rank, defined=True, axes=axes)

    def empty(
        self,
        shape: tuple[int, ...] | int,
        dtype: Any,
        name: str = "out",
        rank: int = 0,
        axes: tuple[str, ...] = (),
    ) -> Buffer:
        """Undefined memory (filled with 0xFF bytes). `Buffer.written` says, per byte, what kernels wrote."""
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xFF
        return self.space.add(array, name, rank, defined=False, axes=axes)

    def multicast(self, members: list[Buffer] | tuple[Buffer, ...]) -> MulticastWindow:
        """A window of addresses that stands for all members at once; only multimem instructions may use
        it."""
        return self.space.add_window(tuple(members))

    def free(self, item: Buffer | MulticastWindow) -> None:
        """Ends an allocation: later accesses are out of bounds."""
        self.space.remove(item)

    def watch_sentinel(self, buffer: Buffer, word: int = 0x80008000, *, halves: bool = True) -> None:
        """Reports every store that puts the word (halves: or one of its 16-bit halves) into a buffer whose readers
        take it for "not yet written". Grids enqueued with `rearms=True` may store whole 16-byte chunks of it."""
        if not 0 <= word < 1 << 32:
            raise ValueError(f"sentinel word {word:#x}: 32 bits")
        buffer.sentinel = Sentinel(word, halves)

    def enqueue(
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
        stream: str = "main",
        pdl: bool = False,
        exact: bool = False,
        checks: bool = False,
        counting: bool = True,
        predecessor_writes: tuple[Buffer, ...] = (),
        rearms: bool = False,
        trace: int | None = None,
        name: str = "",
    ) -> GridHandle:
        """Puts a grid behind the others of its stream; `synchronize` runs it. Options: `GridOptions`.

        Raises ValueError for a launch that the hardware would refuse.
        """
        code = module.code(entry)
        grid3, block3 = three(grid, "grid"), three(block, "block")
        if three(cluster, "cluster") != (1, 1, 1):
            raise ValueError(f"cluster {cluster}: only clusters of one CTA are modelled")
        if not 0 <= rank < self.space.ranks:
            raise ValueError(f"rank {rank}: ranks here are 0..{self.space.ranks - 1}")
        self._check_block(code, block3)
        shared = self._shared_bytes(code, module.arch, dynamic_shared_bytes)
        launch = Launch(
            code, self.space, grid=grid3, block=block3, parameters=encode_parameters(code, args),
            variables={name: buffer.address for name, buffer in self.variables(module, code, rank).items()},
            shared_bytes=shared, rank=rank, exact=exact, checks=checks, counting=counting, arch=module.arch,
            predecessor_writes=predecessor_writes, trace=trace, name=name, rearms=rearms,
        )  # fmt: skip
        handle = GridHandle(launch, launch.name, rank, stream, pdl)
        self._enqueued.append(handle)
        return handle

    def synchronize(
        self,
        schedule: str | int = "program",
        *,
        step_budget: int = STEP_BUDGET,
        skew: Mapping[int, float] | None = None,
        strict: bool = False,
    ) -> list[Report]:
        """Runs everything that was enqueued, on all ranks and streams, to completion: reports in that order.

        `schedule`: "program" (one grid after another, as far as each can go, its lowest program counter first) or
        an integer seed (random grids and warps). `skew` {rank: s}, s >= 0, with a seed: the rank gets a turn
        1 + s times more rarely, and starts s x 1000 steps late (a step: one instruction of one group of
        threads). `strict`: see `footprints`.
        `step_budget`: steps, of all grids together, after which whatever still runs is stopped.

        Grids that wait or poll for ever end with findings. Raises ValueError for a schedule or skew that is none.
        """
        check_schedule(schedule)
        skew = dict(skew or {})
        if skew and schedule == "program":
            raise ValueError(
                'skew needs a seeded schedule; schedule="program" runs the ranks one after another'
            )
        for rank, value in skew.items():
            if not 0 <= rank < self.space.ranks or not value >= 0:
                raise ValueError(f"skew {value} of rank {rank}: ranks 0..{self.space.ranks - 1}, values >= 0")
        grids, self._enqueued = self._enqueued, []
        return Streams(grids, schedule, step_budget, skew, self.resident_ctas, strict).run()

    def launch(
        self,
        module: Module,
        entry: str | None = None,
        *,
        schedule: str | int = "program",
        step_budget: int = STEP_BUDGET,
        **options: Unpack[GridOptions],
    ) -> Report:
        """Runs one kernel over the whole grid: `enqueue` and `synchronize`. Options: `GridOptions`.

        Raises ValueError for a launch that the hardware would refuse, RuntimeError if grids are already enqueued.
        """
        if self._enqueued:
            raise RuntimeError(
                f"{len(self._enqueued)} grids are enqueued: synchronize() first, or enqueue this one"
            )
        check_schedule(schedule)
        self.enqueue(module, entry, **options)
        return self.synchronize(schedule, step_budget=step_budget)[0]

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
