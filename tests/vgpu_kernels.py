"""Small PTX kernels for testing instructions one at a time.

`check` runs one instruction on a table of operands, one thread per row, and compares the bits of the results:

    check("add.s32 %d, %a, %b;", "s32 s32 -> s32", [(2**31 - 1, 1, -(2**31))])

`run` launches a body of PTX lines on a whole grid; every instruction line n of the body carries `.loc 1 n`,
so that findings can be asked for the line they name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from oproj_lib import vgpu

SCHEDULES: tuple[str | int, ...] = ("program", 0, 1, 2)
SOURCE = "kernel.py"
Array = npt.NDArray[Any]

WIDTH = {
    "pred": 8,
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "tf32": 32,
    "f64": 64,
    "f16x2": 32,
    "bf16x2": 32,
    "f32x2": 64,
}
WIDTH |= {f"{kind}{bits}": bits for kind in "bsu" for bits in (8, 16, 32, 64)}
NUMPY_FLOAT = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "tf32": np.float32,
    "f64": np.float64,
}


def bits_of(value: int | float | bool, type_name: str) -> int:
    """The bit pattern of a literal: a Python float is a value, an integer of a float type already a pattern.

    Raises ValueError for a float that the type cannot hold exactly.
    """
    width = WIDTH[type_name]
    if isinstance(value, float):
        number = np.array(value).astype(NUMPY_FLOAT[type_name])
        if not np.isnan(value) and float(number) != value:
            raise ValueError(f"{value!r} is not an .{type_name}")
        return int(number.view(f"u{width // 8}"))
    if not -(1 << (width - 1)) <= value < (1 << width):
        raise ValueError(f"{value} does not fit into .{type_name}")
    return int(value) & ((1 << width) - 1)


def register_type(type_name: str) -> str:
    """The `.reg` type that holds an operand (PTX has no 8-bit or 16-bit float registers)."""
    if type_name in ("pred", "f32", "f64"):
        return type_name
    return f"b{max(16, WIDTH[type_name])}"


def memory_type(type_name: str) -> str:
    return "u8" if type_name == "pred" else f"b{WIDTH[type_name]}"


def statement_lines(body: str) -> list[str]:
    """The body's lines, each instruction preceded by its `.loc`."""
    lines = []
    for number, line in enumerate(body.strip("\n").splitlines(), 1):
        text = line.strip()
        if text and not text.startswith((".", "{", "}", "//")) and not text.endswith(":"):
            lines.append(f"\t.loc\t1 {number} 0")
        lines.append(line)
    return lines


def module(
    body: str,
    *,
    declarations: Sequence[str] = (),
    parameters: Sequence[str] = (),
    target: str = "sm_90a",
    version: str = "8.6",
) -> str:
    """A PTX module with one entry, `test`, whose parameters are 64-bit addresses."""
    formals = ", ".join(f".param .u64 {name}" for name in parameters)
    return "\n".join(
        [
            f".version {version}",
            f".target {target}",
            ".address_size 64",
            f'.file 1 "{SOURCE}"',
            f".visible .entry test({formals})",
            "{",
            *(f"\t{line}" for line in declarations),
            *statement_lines(body),
            "}",
            "",
        ]
    )


# -- one instruction, one thread per operand tuple --------------------------------------------------


def instruction_module(
    ptx: str, sources: Sequence[str], results: Sequence[str], target: str, version: str
) -> str:
    """A kernel that loads %a, %b, %c, %e, executes `ptx`, and stores %d, %q."""
    names = [*zip("abce", sources, strict=False), *zip("dq", results, strict=False)]
    body = [
        "mov.u32 %index, %tid.x;",
        "mov.u32 %block, %ctaid.x;",
        "mov.u32 %size, %ntid.x;",
        "mad.lo.u32 %index, %block, %size, %index;",
    ]
    for name, type_name in names[: len(sources)]:
        body += address_of(name, type_name)
        if type_name == "pred":
            body += ["ld.global.u8 %byte, [%address];", f"setp.ne.u16 %{name}, %byte, 0;"]
        else:
            body.append(f"ld.global.{memory_type(type_name)} %{name}, [%address];")
    body += ptx.strip().splitlines()
    for name, type_name in names[len(sources) :]:
        body += address_of(name, type_name)
        if type_name == "pred":
            body += [f"selp.u16 %byte, 1, 0, %{name};", "st.global.u8 [%address], %byte;"]
        else:
            body.append(f"st.global.{memory_type(type_name)} [%address], %{name};")
    body.append("ret;")
    return module(
        "\n".join(body),
        declarations=[
            *(f".reg .{register_type(type_name)} %{name};" for name, type_name in names),
            ".reg .b16 %byte, %h<9>;",
            ".reg .b32 %index, %block, %size, %r<9>;",
            ".reg .b64 %address, %offset, %rd<9>;",
            ".reg .f32 %f<9>;",
            ".reg .f64 %fd<9>;",
            ".reg .pred %p<9>;",
        ],
        parameters=[f"p_{name}" for name, _ in names],
        target=target,
        version=version,
    )


def address_of(name: str, type_name: str) -> list[str]:
    return [
        f"ld.param.u64 %address, [p_{name}];",
        f"mul.wide.u32 %offset, %index, {WIDTH[type_name] // 8};",
        "add.u64 %address, %address, %offset;",
    ]


def evaluate(
    ptx: str,
    signature: str,
    rows: Sequence[Sequence[int | float]],
    target: str = "sm_90a",
    version: str = "8.6",
) -> list[Array]:
    """Runs `ptx` once per row of operands; the results' bit patterns, one array per result.

    `signature`: "s32 s32 -> s32", or "f32 f32 -> pred pred" for two results (%d and %q).
    """
    before, _, after = signature.partition("->")
    sources, results = before.split(), after.split()
    threads = len(rows)
    columns = [
        np.array([bits_of(row[i], type_name) for row in rows], f"u{WIDTH[type_name] // 8}")
        for i, type_name in enumerate(sources)
    ]
    outputs = [np.zeros(threads, f"u{WIDTH[type_name] // 8}") for type_name in results]
    block = next(size for size in range(min(threads, 256), 0, -1) if threads % size == 0)
    text = instruction_module(ptx, sources, results, target, version)
    report = execute(text, threads // block, block, [*columns, *outputs])
    report.raise_for_findings()
    return outputs


def execute(text: str, grid: int, block: int, arrays: list[Array]) -> vgpu.Report:
    return vgpu.run_ptx(text, "test", grid, block, arrays)


def check(
    ptx: str,
    signature: str,
    rows: Sequence[Sequence[int | float]],
    target: str = "sm_90a",
    version: str = "8.6",
) -> None:
    """Each row: the operands, then the results that the manual asks for. Compares bits."""
    before, _, after = signature.partition("->")
    count, results = len(before.split()), after.split()
    got = evaluate(ptx, signature, [row[:count] for row in rows], target, version)
    wrong = []
    for i, row in enumerate(rows):
        expected = [bits_of(value, name) for value, name in zip(row[count:], results, strict=True)]
        found = [int(column[i]) for column in got]
        if found != expected:
            wrong.append(f"{ptx} {show(row[:count])}: {show(found, True)}, expected {show(expected, True)}")
    if wrong:
        pytest.fail("\n".join(wrong))


def show(values: Sequence[int | float], as_bits: bool = False) -> str:
    return ", ".join(hex(int(v)) if as_bits or isinstance(v, int) else repr(v) for v in values)


def float_bits(value: float) -> int:
    """The FP32 pattern nearest to a Python float."""
    return int.from_bytes(struct.pack("<f", value), "little")


# -- what must be refused ---------------------------------------------------------------------------

REGISTERS = (
    ".reg .pred %p<9>;",
    ".reg .b16 %h<9>;",
    ".reg .b32 %r<9>;",
    ".reg .b64 %rd<9>;",
    ".reg .f32 %f<9>;",
    ".reg .f64 %fd<9>;",
)


def load_line(line: str, target: str = "sm_90a", version: str = "8.6") -> vgpu.Module:
    """Decodes a kernel of one instruction."""
    return vgpu.load(module(f"{line}\nret;", declarations=REGISTERS, target=target, version=version))


def refused(line: str, match: str | None = None, kind: type[ValueError] | None = None) -> None:
    """Asserts that decoding `line` raises MalformedPTX or UnsupportedPTX, naming the right PTX line."""
    text = module(f"{line}\nret;", declarations=REGISTERS)
    first = line.strip().splitlines()[0].strip()
    number = next(n for n, found in enumerate(text.splitlines(), 1) if found.strip() == first)
    with pytest.raises(kind or (vgpu.MalformedPTX, vgpu.UnsupportedPTX), match=match) as caught:
        vgpu.load(text)
    if f"PTX line {number}:" not in str(caught.value):
        pytest.fail(f"{line}: the error names another line: {caught.value}")


# -- whole kernels ----------------------------------------------------------------------------------


def run(
    body: str,
    *,
    out: int = 32,
    inputs: Sequence[Array] = (),
    grid: tuple[int, ...] | int = 1,
    block: tuple[int, ...] | int = 32,
    declarations: Sequence[str] = (),
    target: str = "sm_90a",
    **options: Any,
) -> tuple[Array, vgpu.Report]:
    """Launches `body`: %out points at `out` words (initially 0xFFFFFFFF), %in0.. at the inputs.

    Declared for the body: %id (%tid.x), %lane, %cta, %slot = %out + 4 * global thread
    number, and %p, %h, %r, %rd, %f, %fd 0 to 31. Returns (words, report).
    """
    names = ["out", *(f"in{i}" for i in range(len(inputs)))]
    head = "\n".join(
        [
            *(f"ld.param.u64 %{name}, [p_{name}];" for name in names),
            "mov.u32 %id, %tid.x;",
            "mov.u32 %lane, %laneid;",
            "mov.u32 %cta, %ctaid.x;",
            "mov.u32 %size, %ntid.x;",
            "mad.lo.u32 %thread, %cta, %size, %id;",
            "mad.wide.u32 %slot, %thread, 4, %out;",
        ]
    )
    # The head has no .loc of its own, so that line 1 is the body's first.
    text = module(
        body,
        declarations=[
            ".reg .pred %p<32>;",
            ".reg .b16 %h<32>;",
            ".reg .b32 %id, %lane, %cta, %size, %thread, %r<32>;",
            f".reg .b64 %slot, {', '.join('%' + name for name in names)}, %rd<32>;",
            ".reg .f32 %f<32>;",
            ".reg .f64 %fd<32>;",
            *declarations,
            head.replace("\n", "\n\t"),
        ],
        parameters=[f"p_{name}" for name in names],
        target=target,
    )
    words = np.full(out, 0xFFFFFFFF, np.uint32)
    report = vgpu.run_ptx(text, "test", grid, block, [words, *inputs], **options)
    return words, report
