"""ldmatrix, stmatrix and mma.sync."""

from __future__ import annotations

from itertools import product

import numpy as np

from oproj_lib.vgpu.tensorcore import supported_mma

from .case import Array, Case, Result, kernel_case, row_pointer
from .operands import seed_of
from .tolerance import FLOATS

WARPS = 4
MATRIX_BYTES, ROW_BYTES = 128, 16
REGION = 4 * MATRIX_BYTES  # shared memory of one warp: four 8 x 8 matrices of 16 bits


def cases() -> list[Case]:
    return [*fragments(), *multiplies()]


def row_offsets() -> Array:
    """Per lane the byte offset of the matrix row that it points at: the warp's 32 rows in random order."""
    rng = np.random.default_rng(seed_of("matrix rows"))
    rows = [rng.permutation(32) for _ in range(WARPS)]
    rows[0] = np.arange(32)
    return (np.concatenate(rows) * ROW_BYTES).astype(np.uint32)


def fragments() -> list[Case]:
    family, found = "matrix fragments", []
    rng = np.random.default_rng(seed_of("matrix bytes"))
    inputs = {
        "a": rng.integers(0, 1 << 32, (WARPS * 32, 4), np.uint64).astype(np.uint32),
        "b": row_offsets(),
    }
    base = ["shr.u32 %t1, %thread, 5;", "mov.u32 %t2, matrices;", f"mad.lo.u32 %t2, %t1, {REGION}, %t2;",
            f"mad.lo.u32 %t3, %lane, {ROW_BYTES}, %t2;", *row_pointer("b", 4), "ld.global.b32 %t4, [%address];",
            "add.u32 %t4, %t4, %t2;", *row_pointer("a", 16),
            "ld.global.v4.b32 {%t5, %t6, %t7, %t8}, [%address];"]  # fmt: skip
    declarations = (f".shared .align 128 .b8 matrices[{WARPS * REGION}];",)
    base += ["cvt.u64.u32 %l1, %t4;", "cvta.shared.u64 %l1, %l1;"]
    for count, transpose, (space, pointer) in product(
        (1, 2, 4), ("", ".trans"), ((".shared", "%t4"), ("", "%l1"))
    ):
        form = f"x{count}{transpose}{space}"
        registers = [f"%d{i}" for i in range(count)]
        text = f"ldmatrix.sync.aligned.m8n8.{form}.b16"
        load = [*base, "st.shared.v4.b32 [%t3], {%t5, %t6, %t7, %t8};", "bar.warp.sync 0xffffffff;",
                f"{text} {{{', '.join(registers)}}}, [{pointer}];"]  # fmt: skip
        results = [Result(r, "b32", f"{text} (register {i})") for i, r in enumerate(registers)]
        found.append(
            kernel_case(f"ldmatrix {form}", family, load, results, covers="ldmatrix", inputs=inputs,
                        block=32 * WARPS, declarations=declarations)
        )  # fmt: skip
        text = f"stmatrix.sync.aligned.m8n8.{form}.b16"
        values = ", ".join(("%t5", "%t6", "%t7", "%t8")[:count])
        store = [*base, "mov.b32 %t9, 0xdeadbeef;", "st.shared.v4.b32 [%t3], {%t9, %t9, %t9, %t9};",
                 "bar.warp.sync 0xffffffff;", f"{text} [{pointer}], {{{values}}};", "bar.warp.sync 0xffffffff;",
                 "ld.shared.v4.b32 {%d0, %d1, %d2, %d3}, [%t3];"]  # fmt: skip
        results = [Result(f"%d{i}", "b32", f"{text} (word {i} of a row)") for i in range(4)]
        found.append(
            kernel_case(f"stmatrix {form}", family, store, results, covers="stmatrix", inputs=inputs,
                        block=32 * WARPS, declarations=declarations)
        )  # fmt: skip
    return found


# -- mma.sync --------------------------------------------------------------------------------------

PATTERNS = ("normal", "wide", "random bits", "cancelling", "subnormal", "integers")
WARPS_PER_PATTERN = 4


def element_words(kind: str, shape: tuple[int, ...], pattern: str, rng: np.random.Generator) -> Array:
    """Elements of a float type as bit patterns, in 16 or 32 bits.

    normal: standard normal. wide: exponents over the whole range. random bits: NaNs and infinities too.
    cancelling: few distinct magnitudes with both signs. subnormal: around the smallest numbers. integers: exact.
    """
    dtype = FLOATS["f32" if kind == "tf32" else kind]
    bits = np.dtype(f"u{dtype.itemsize}")
    if pattern == "random bits":
        return rng.integers(0, 1 << 8 * dtype.itemsize, shape, np.uint64).astype(bits)
    if pattern == "cancelling":
        values = rng.choice([1.0, -1.0, 1.5, -1.5, 1024.0, -1024.0, 2.0**-10, 0.0, -0.0], shape)
    elif pattern == "integers":
        values = rng.integers(-8, 9, shape).astype(np.float64)
    else:
        values = rng.standard_normal(shape)
        if pattern == "wide":
            span = 14 if kind == "f16" else 60
            values = values * np.exp2(rng.integers(-span, span, shape))
        elif pattern == "subnormal":
            span = 20 if kind == "f16" else 130
            values = values * np.exp2(rng.integers(-span - 4, -span + 8, shape))
    with np.errstate(over="ignore"):
        return values.astype(dtype).view(bits)


def addends(kind: str, shape: tuple[int, ...], pattern: str, rng: np.random.Generator) -> Array:
    """C (F32 or F16) to match the products' sizes."""
    if pattern == "wide" and kind == "f32":
        values = rng.standard_normal(shape) * np.exp2(rng.integers(-100, 100, shape))
        return values.astype(np.float32).view(np.uint32)
    if pattern == "subnormal" and kind == "f32":
        return rng.integers(0, 1 << 24, shape, np.uint64).astype(np.uint32) | np.uint32(
            1 << 31
        ) * rng.integers(0, 2, shape, np.uint32)
    return element_words(kind, shape, pattern, rng)


def packed(words: Array) -> Array:
    """[.., registers x per register] elements -> [.., registers] 32-bit words."""
    return np.ascontiguousarray(words).view(np.uint32)


def multiplies() -> list[Case]:
    """Every lane's registers come from memory; a block of four warps per pattern of operands."""
    family, found = "mma.sync", []
    for name in supported_mma():
        shape, d, a, b, c = name.split(".")
        rng = np.random.default_rng(seed_of(name))
        k = int(shape.rpartition("k")[2])
        integer = d == "s32"
        bytes_ = 1 if integer else FLOATS["f32" if a == "tf32" else a].itemsize
        counts = {"a": 16 * k * bytes_ // 128, "b": 8 * k * bytes_ // 128, "c": 2 if c == "f16" else 4}
        patterns = ("random bits",) if integer else PATTERNS
        inputs = {}
        for operand, kind in (("a", a), ("b", b), ("c", c)):
            rows = (WARPS_PER_PATTERN * 32, counts[operand])
            blocks = []
            for pattern in patterns:
                if integer:
                    blocks.append(rng.integers(0, 1 << 32, rows, np.uint64).astype(np.uint32))
                    continue
                per = 2 if kind in ("f16", "bf16") else 1
                make = addends if operand == "c" else element_words
                blocks.append(packed(make(kind, (rows[0], rows[1] * per), pattern, rng)))
            inputs[operand] = np.concatenate(blocks)
        found.append(
            multiply_case(
                family,
                name,
                f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{c}",
                counts,
                inputs,
                len(patterns),
            )
        )
    return found


def multiply_case(
    family: str, name: str, text: str, counts: dict[str, int], inputs: dict[str, Array], grid: int
) -> Case:
    body, vectors, declared = [], [], []
    for operand, count in counts.items():
        registers = [f"%{operand}{i}" for i in range(count)]
        single = name.endswith("f32") and operand == "c"
        declared.append(f".reg .{'f32' if single else 'b32'} {', '.join(registers)};")
        body += row_pointer(operand, 4 * count)
        body += [f"ld.global.b32 {r}, [%address+{4 * i}];" for i, r in enumerate(registers)]
        vectors.append("{" + ", ".join(registers) + "}")
    kind = "f32" if name.endswith("f32") else "b32"
    results = [Result(f"%d{i}", kind, f"{text} (register {i})") for i in range(counts["c"])]
    target = "{" + ", ".join(result.register for result in results) + "}"
    body.append(f"{text} {target}, {', '.join(vectors)};")
    return kernel_case(
        f"mma {name}", family, body, results, covers="mma", inputs=inputs, block=32 * WARPS_PER_PATTERN, grid=grid,
        declarations=tuple(declared),
    )  # fmt: skip
