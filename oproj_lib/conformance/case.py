"""A unit kernel: one instruction (or the shortest legal sequence), its operands, and its exact results.

The result words of a kernel form a matrix [threads, columns]; each column names the instruction that wrote it.
Kernels store nothing that legitimately differs between machines (addresses, clocks), so that the virtual GPU
and hardware can be compared bit for bit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from oproj_lib import vgpu
from oproj_lib.vgpu.registers import DTYPES

from .tolerance import Tolerance

Array = npt.NDArray[np.unsignedinteger]

TARGET = "sm_90a"
CONSTANT_BYTES = 256
HEADER = "\n".join(
    [
        ".version 8.6",
        f".target {TARGET}",
        ".address_size 64",
        ".extern .shared .align 1024 .b8 dynamic_shared[];",  # 1024: the period of the 128-byte swizzle
        f".const .align 16 .b8 constants[{CONSTANT_BYTES}] = {{{', '.join(str(37 * i % 256) for i in range(256))}}};",
        "",
    ]
)
SHOWN = 8  # mismatches that a message spells out


@dataclass(frozen=True, eq=False)
class Case:
    """One unit kernel.

    `inputs`: arrays for the leading pointer parameters, in order; the last parameter points at the result,
    `output_shape` words of `output_dtype`, which must be zero before the launch. `columns`: the instruction behind
    each result column. `covers`: the opcodes that this case tests. `tolerance`: None (exact), or the manual's
    bound for an approximate function.
    """

    name: str
    family: str
    kernel: str = field(repr=False)  # the entry's text, without the module's header
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared_bytes: int
    inputs: Mapping[str, Array] = field(repr=False)
    columns: tuple[str, ...]
    output_dtype: np.dtype
    covers: frozenset[str]
    tolerance: Tolerance | None = None

    @property
    def ptx(self) -> str:
        """The whole module: this kernel alone."""
        return HEADER + self.kernel

    @property
    def threads(self) -> int:
        return int(np.prod(self.grid) * np.prod(self.block))

    @property
    def output_shape(self) -> tuple[int, int]:
        return self.threads, len(self.columns)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the results: kernel, launch and inputs."""
        digest = hashlib.sha256(f"{self.ptx}{self.grid}{self.block}{self.dynamic_shared_bytes}".encode())
        for array in self.inputs.values():
            digest.update(array.tobytes())
        return digest.hexdigest()


def expected(case: Case) -> Array:
    """The results on the virtual GPU, with the tensor cores' exact arithmetic.

    Raises vgpu.FindingsError if the kernel breaks a rule of the hardware.
    """
    gpu = vgpu.VirtualGPU()
    output = np.zeros(case.output_shape, case.output_dtype)
    arrays = [*((np.array(array), name) for name, array in case.inputs.items()), (output, "output")]
    report = gpu.launch(
        vgpu.load(case.ptx),
        case.entry,
        grid=case.grid,
        block=case.block,
        args=[gpu.upload(array, name) for array, name in arrays],
        dynamic_shared_bytes=case.dynamic_shared_bytes,
        exact=True,
    )
    report.raise_for_findings()
    return output


def digest(output: Array) -> str:
    """SHA-256 of a result's bytes, row by row."""
    return hashlib.sha256(np.ascontiguousarray(output).tobytes()).hexdigest()


def mismatches(
    case: Case, got: Array, want: Array, ignored: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.bool_]:
    """Which words [threads, columns] differ: in any bit, or by more than the case's tolerance; not those `ignored`.

    Raises ValueError for arrays that are not results of this case.
    """
    for name, array in (("got", got), ("expected", want)):
        if array.shape != case.output_shape or array.dtype != case.output_dtype:
            raise ValueError(
                f"{case.name}: {name} is {array.dtype} {array.shape}, "
                f"the case has {case.threads} threads x {len(case.columns)} columns of {case.output_dtype}"
            )
    different = got != want
    if ignored is not None:
        different &= ~ignored
    if case.tolerance is None or not different.any():
        return different
    return different & ~case.tolerance.allows(got, want)


def compare(case: Case, got: Array, want: Array, ignored: npt.NDArray[np.bool_] | None = None) -> list[str]:
    """What differs, a line per word (at most 8, then how many more); empty if nothing does. `ignored`: words
    [threads, columns] that may differ.

    A line names the instruction, the CTA, warp and lane, the operands, and both values in hexadecimal.
    """
    different = mismatches(case, got, want, ignored)
    lines = []
    for thread, column in np.argwhere(different)[:SHOWN]:
        lines.append(
            f"{case.name}: {case.columns[column]}: {place(case, int(thread))}{operands(case, int(thread))}: "
            f"got {shown(got[thread, column])}, expected {shown(want[thread, column])}"
        )
    total = int(different.sum())
    if total > SHOWN:
        columns = [case.columns[i] for i in np.flatnonzero(different.any(axis=0))]
        lines.append(
            f"{case.name}: {total} of {different.size} words differ, in {len(columns)} of {len(case.columns)} "
            f"columns: {', '.join(columns[:SHOWN])}{', ...' if len(columns) > SHOWN else ''}"
        )
    return lines


def place(case: Case, thread: int) -> str:
    cta, within = divmod(thread, int(np.prod(case.block)))
    return f"CTA {cta} warp {within // 32} lane {within % 32}"


def operands(case: Case, thread: int) -> str:
    """The operands of a thread, where an input holds one row per thread."""
    rows = [
        f"{name} = {' '.join(shown(word) for word in np.atleast_1d(array[thread])[:4])}"
        for name, array in case.inputs.items()
        if array.shape[0] == case.threads
    ]
    return f" ({', '.join(rows)})" if rows else ""


def shown(word: np.unsignedinteger) -> str:
    return f"{int(word):#0{2 + 2 * word.itemsize}x}"


# -- writing kernels -------------------------------------------------------------------------------


def register_type(type_name: str) -> str:
    """The `.reg` type that holds an operand (PTX has no 8-bit registers and no 16-bit float operands in
    loads)."""
    if type_name in ("pred", "f32", "f64"):
        return type_name
    return f"b{8 * max(2, DTYPES[type_name].itemsize)}"


def word_bits(type_name: str) -> int:
    """Bits that an operand takes in memory. Bytes travel as 16 bits: instructions must ignore the upper half."""
    return 32 if type_name == "pred" else 8 * max(2, DTYPES[type_name].itemsize)


SCRATCH = (
    ".reg .pred %p<8>;",
    ".reg .b16 %h<8>;",
    ".reg .b32 %index, %block, %size, %lane, %thread, %t<24>;",
    ".reg .b64 %address, %slot, %l<16>;",
)


def entry_name(name: str) -> str:
    return "case_" + re.sub(r"\W+", "_", name)


def entry_text(
    name: str, body: list[str], inputs: list[str], declarations: list[str], directives: str = ""
) -> str:
    """The text of one entry: parameters p_<input>.. and p_output; %index is the thread's number in the grid
    (blocks and grids of one dimension), %thread its number in the block."""
    formals = ", ".join(f".param .u64 p_{name}" for name in [*inputs, "output"])
    head = [
        "mov.u32 %thread, %tid.x;",
        "mov.u32 %block, %ctaid.x;",
        "mov.u32 %size, %ntid.x;",
        "mov.u32 %lane, %laneid;",
        "mad.lo.u32 %index, %block, %size, %thread;",
    ]
    lines = [*SCRATCH, *declarations, *head, *body, "ret;"]
    text = "\n".join(f"    {line}" for line in lines)
    return f".visible .entry {entry_name(name)}({formals}) {directives}\n{{\n{text}\n}}\n"


def row_pointer(parameter: str, row_bytes: int, register: str = "%address") -> list[str]:
    """Lines that point a register at this thread's row of an array."""
    return [
        f"ld.param.u64 {register}, [p_{parameter}];",
        f"mad.wide.u32 {register}, %index, {row_bytes}, {register};",
    ]


def load_operand(name: str, type_name: str) -> list[str]:
    """Lines that load this thread's element of input `name` into %name."""
    lines = row_pointer(name, word_bits(type_name) // 8)
    if type_name == "pred":
        return [*lines, "ld.global.b32 %t0, [%address];", f"setp.ne.b32 %{name}, %t0, 0;"]
    return [*lines, f"ld.global.b{word_bits(type_name)} %{name}, [%address];"]


def store_result(register: str, type_name: str, slot: int) -> list[str]:
    """Lines that store a result at byte `slot` of this thread's row, which %slot points at."""
    if type_name == "pred":
        return [f"selp.b32 %t0, 1, 0, {register};", f"st.global.b32 [%slot+{slot}], %t0;"]
    return [f"st.global.b{word_bits(type_name)} [%slot+{slot}], {register};"]


@dataclass(frozen=True)
class Result:
    """A register whose value is compared, its type, and the instruction that the report names."""

    register: str
    type: str
    label: str


def kernel_case(
    name: str,
    family: str,
    body: list[str],
    results: list[Result],
    *,
    covers: str,
    inputs: Mapping[str, Array] | None = None,
    block: int = 128,
    grid: int = 1,
    shared_bytes: int = 0,
    declarations: tuple[str, ...] = (),
    directives: str = "",
) -> Case:
    """A case of whole warps or CTAs: `body` computes the registers in `results`, which it need not declare.

    `covers`: the opcodes tested, separated by spaces. `shared_bytes`: dynamic shared memory (`dynamic_shared`).
    """
    inputs = inputs or {}
    slot = max(word_bits(result.type) for result in results) // 8
    own = [f".reg .{register_type(result.type)} {result.register};" for result in results]
    lines = [*row_pointer("output", slot * len(results), "%slot"), *body]
    for i, result in enumerate(results):
        lines += store_result(result.register, result.type, slot * i)
    return Case(
        name, family, entry_text(name, lines, list(inputs), [*own, *declarations], directives), entry_name(name),
        (grid, 1, 1), (block, 1, 1), shared_bytes, dict(inputs), tuple(result.label for result in results),
        np.dtype(f"u{slot}"), frozenset(covers.split()),
    )  # fmt: skip
