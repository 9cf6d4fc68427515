"""wgmma.mma_async m64nNk16: both sources of A, both majors, every swizzle, N from 8 to 256.

A block is one warpgroup. The bytes of shared memory come from an input, so that a wrong address reads a wrong
number; strides are larger than the tile needs, so that exchanging them shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .case import Array, Case, Result, kernel_case, row_pointer
from .matrices import addends, element_words
from .operands import seed_of

M, K, THREADS = 64, 16, 128
CORE_ROWS, CORE_BYTES, ELEMENT = 8, 16, 2
PERIOD = 1024  # bytes after which the 128-byte swizzle repeats
TWO_ACCUMULATORS = 128  # the largest N of which a thread holds two (2 x 64 registers)
CODES = {0: 0, 128: 1, 64: 2, 32: 3}  # PTX ISA, "Matrix Descriptor Format", bits 62-63


@dataclass(frozen=True)
class Tile:
    """Where an operand lies: `swizzle` span in bytes; strides of the descriptor in bytes; its region's size."""

    swizzle: int
    k_major: bool
    leading: int
    stride: int
    region: int

    @property
    def descriptor(self) -> int:
        """All fields but the address."""
        return (self.leading >> 4) << 16 | (self.stride >> 4) << 32 | CODES[self.swizzle] << 62


def tile(rows: int, swizzle: int, k_major: bool) -> Tile:
    """The canonical layout (PTX ISA, "Canonical Layouts") with 16-byte or whole-pattern gaps between its parts."""
    groups = -(-rows // CORE_ROWS)
    if k_major and swizzle:  # 8 rows at a pitch of one span; the leading stride has no meaning
        pitch = CORE_ROWS * swizzle
        stride = pitch if swizzle == 128 else 2 * pitch
        return Tile(swizzle, True, CORE_BYTES, stride, groups * stride + PERIOD)
    if k_major:  # core matrices: the next 8 rows `stride` further, the next 8 k `leading` further
        stride = CORE_ROWS * CORE_BYTES + CORE_BYTES
        leading = groups * stride + 3 * CORE_BYTES
        return Tile(0, True, leading, stride, 2 * leading)
    if swizzle:  # spans along M or N, 8 k to a group
        spans = -(-rows * ELEMENT // swizzle)
        group = CORE_ROWS * swizzle
        leading = 2 * group + (0 if swizzle == 128 else group)
        return Tile(swizzle, False, leading, group, spans * leading + 2 * group + PERIOD)
    stride = CORE_ROWS * CORE_BYTES + CORE_BYTES
    leading = groups * stride + 3 * CORE_BYTES
    return Tile(0, False, leading, stride, 2 * leading)


def aligned(size: int) -> int:
    return -(-size // PERIOD) * PERIOD


def cases() -> list[Case]:
    found = []
    for kind in ("bf16", "f16"):
        for n in (8, 16, 24, 64, 128, 256):
            found.append(case(kind, n, tile(M, 128, True), tile(n, 128, True), "normal"))
        for swizzle in (0, 32, 64, 128):
            for a_major in (True, False):
                for b_major in (True, False):
                    found.append(
                        case(
                            kind,
                            64,
                            tile(M, swizzle, a_major),
                            tile(64, swizzle, b_major),
                            "normal",
                            "majors",
                        )
                    )
        for pattern in ("wide", "random bits", "cancelling", "subnormal", "integers"):
            found.append(case(kind, 32, tile(M, 128, True), tile(32, 128, True), pattern))
            found.append(case(kind, 40, None, tile(40, 64, True), pattern))
        for n in (8, 96):
            found.append(case(kind, n, None, tile(n, 128, True), "normal"))
        found.append(case(kind, 128, tile(M, 32, True), tile(128, 128, False), "normal", "mixed"))
        found.append(case(kind, 256, tile(M, 128, False), tile(256, 64, False), "normal", "mixed"))
        found.append(case(kind, 48, None, tile(48, 128, False), "normal"))
        for n in (104, 248):
            found.append(case(kind, n, tile(M, 64, True), tile(n, 64, True), "normal"))
        found.append(chain(kind))
    return found


def shared_bytes(kind: str, count: int, pattern: str, rng: np.random.Generator) -> Array:
    """`count` bytes of elements, as 16-byte rows of 32-bit words."""
    return element_words(kind, (count // ELEMENT,), pattern, rng).view(np.uint32).reshape(-1, 4)


def fill_shared(chunks: int) -> list[str]:
    """The block copies `chunks` 16-byte rows of input `s` to dynamic shared memory, for the asynchronous proxy."""
    return ["mov.u32 %t1, dynamic_shared;", "mov.u32 %t2, %thread;", "ld.param.u64 %l1, [p_s];", "FILL:",
            "mad.wide.u32 %l2, %t2, 16, %l1;", "ld.global.v4.b32 {%t4, %t5, %t6, %t7}, [%l2];",
            "mad.lo.u32 %t3, %t2, 16, %t1;", "st.shared.v4.b32 [%t3], {%t4, %t5, %t6, %t7};",
            f"add.u32 %t2, %t2, {THREADS};", f"setp.lt.u32 %p1, %t2, {chunks};", "@%p1 bra FILL;",
            "fence.proxy.async.shared::cta;", "bar.sync 0;"]  # fmt: skip


def descriptor(register: str, item: Tile, offset: int) -> list[str]:
    """The tile's descriptor for an operand at `offset` in dynamic shared memory."""
    return [f"add.u32 %t8, %t1, {offset};", "shr.u32 %t8, %t8, 4;", "and.b32 %t8, %t8, 0x3fff;",
            f"cvt.u64.u32 {register}, %t8;", f"or.b64 {register}, {register}, {item.descriptor:#x};"]  # fmt: skip


def load_registers(name: str, count: int) -> list[str]:
    lines = row_pointer(name, 4 * count)
    return lines + [f"ld.global.b32 %{name}{i}, [%address+{4 * i}];" for i in range(count)]


def case(kind: str, n: int, a: Tile | None, b: Tile, pattern: str, note: str = "") -> Case:
    """One multiply with scale-d 1 on an addend from memory; then, while registers suffice, one with scale-d 0."""
    a_bytes = 0 if a is None else aligned(a.region)
    total = a_bytes + aligned(b.region)
    source = "registers" if a is None else layout(a)
    name = f"wgmma n{n} {kind} A {source}, B {layout(b)}, {pattern}{' ' + note if note else ''}"
    rng = np.random.default_rng(seed_of(name))
    inputs = {
        "s": shared_bytes(kind, total, pattern, rng),
        "c": addends("f32", (THREADS, n // 2), pattern, rng),
    }
    accumulators = [f"%c{i}" for i in range(n // 2)]
    declared = [
        f".reg .f32 {', '.join(accumulators)};",
        f".reg .f32 {', '.join('%z' + str(i) for i in range(n // 2))};",
    ]
    body = [*fill_shared(total // 16), *load_registers("c", n // 2), *descriptor("%l4", b, a_bytes)]
    flags = f"{int(not b.k_major)}"
    if a is None:
        inputs["a"] = element_words(kind, (THREADS, 8), pattern, rng).view(np.uint32)
        declared.append(".reg .b32 %a<4>;")
        body += load_registers("a", 4)
        first = "{%a0, %a1, %a2, %a3}"
    else:
        body += descriptor("%l3", a, 0)
        first, flags = "%l3", f"{int(not a.k_major)}, {flags}"
    body += [f"mov.f32 %z{i}, 0f7FC00000;" for i in range(n // 2)]
    text = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    body += ["setp.ne.u32 %p2, %size, 0;", "wgmma.fence.sync.aligned;"]
    body.append(f"{text} {{{', '.join(accumulators)}}}, {first}, %l4, %p2, 1, 1, {flags};")
    body.append("wgmma.commit_group.sync.aligned;")
    if n > TWO_ACCUMULATORS:
        body += ["wgmma.wait_group.sync.aligned 0;", *(f"mov.b32 %d{i}, %c{i};" for i in range(n // 2))]
        results = [Result(f"%d{i}", "f32", f"{text} (D {i}, accumulating)") for i in range(n // 2)]
        return kernel_case(
            name, "wgmma", body, results, covers="wgmma fence", inputs=inputs, shared_bytes=total,
            declarations=tuple(declared),
        )  # fmt: skip
    zeros = ", ".join(f"%z{i}" for i in range(n // 2))
    body += [f"{text} {{{zeros}}}, {first}, %l4, 0, 1, 1, {flags};", "wgmma.commit_group.sync.aligned;",
             "wgmma.wait_group.sync.aligned 0;"]  # fmt: skip
    copies = [f"mov.b32 %d{i}, %c{i};" for i in range(n // 2)] + [
        f"mov.b32 %d{n // 2 + i}, %z{i};" for i in range(n // 2)
    ]
    results = [Result(f"%d{i}", "f32", f"{text} (D {i}, accumulating)") for i in range(n // 2)]
    results += [Result(f"%d{n // 2 + i}", "f32", f"{text} (D {i}, scale-d 0)") for i in range(n // 2)]
    return kernel_case(
        name, "wgmma", [*body, *copies], results, covers="wgmma fence", inputs=inputs, shared_bytes=total,
        declarations=tuple(declared),
    )  # fmt: skip


def layout(item: Tile) -> str:
    return f"{'K' if item.k_major else 'MN'}-major {item.swizzle or 'no'} swizzle"


def chain(kind: str) -> Case:
    """K = 64 as four multiplies into one accumulator, each 32 bytes further along the swizzled rows; then the
    operands of a second group while the first is in flight."""
    n, steps = 64, 4
    a, b = tile(M, 128, True), tile(n, 128, True)
    total = aligned(a.region) + aligned(b.region)
    name = f"wgmma n{n} {kind}, a chain of {steps}"
    rng = np.random.default_rng(seed_of(name))
    inputs = {
        "s": shared_bytes(kind, total, "normal", rng),
        "c": addends("f32", (THREADS, n // 2), "normal", rng),
    }
    registers = ", ".join(f"%c{i}" for i in range(n // 2))
    body = [*fill_shared(total // 16), *load_registers("c", n // 2)]
    body += [*descriptor("%l3", a, 0), *descriptor("%l4", b, aligned(a.region)), "wgmma.fence.sync.aligned;"]
    text = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    for step in range(steps):
        body.append(f"{text} {{{registers}}}, %l3, %l4, 1, 1, 1, 0, 0;")
        if step % 2:
            body.append("wgmma.commit_group.sync.aligned;")
        body += [f"add.u64 %l3, %l3, {K * ELEMENT >> 4};", f"add.u64 %l4, %l4, {K * ELEMENT >> 4};"]
    body += ["wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 0;"]
    body += [f"mov.b32 %d{i}, %c{i};" for i in range(n // 2)]
    results = [Result(f"%d{i}", "f32", f"{text} x {steps} (D {i})") for i in range(n // 2)]
    return kernel_case(
        name, "wgmma", body, results, covers="wgmma fence", inputs=inputs, shared_bytes=total,
        declarations=(f".reg .f32 {registers};",),
    )  # fmt: skip
