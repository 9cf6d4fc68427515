"""CUDA C++ compiled by nvcc (from PyPI) on the virtual GPU, against numpy and plain Python."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from oproj_lib import vgpu

SOURCES = Path(__file__).parent / "foreign"
SCHEDULES = ("program", 1, 2)
Array = npt.NDArray[Any]
Run = Callable[..., None]

F32_STEP = (
    2.0**-23
)  # spacing of FP32 numbers relative to their size: a function "within 2 ulp" errs by 2 of these


def nvcc_command() -> list[str]:
    """nvcc of the packages nvidia-cuda-{nvcc,crt,runtime,cccl} and nvidia-nvvm, for PTX of sm_90."""
    spec = importlib.util.find_spec("nvidia.cu13")
    roots = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    found = [root / "bin" / "nvcc" for root in roots if (root / "bin" / "nvcc").exists()]
    if not found:
        raise FileNotFoundError("nvcc is missing; pip install the test extra, which has nvidia-cuda-nvcc 13")
    # nvcc makes no jump tables (brx.idx) unless asked: half of a switch's range filled is dense enough here.
    return [str(found[0]), "-ptx", "-arch=sm_90", "--jump-table-density=50"]


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PTX of every .cu file, by its stem; about a second each."""
    folder = tmp_path_factory.mktemp("nvcc")
    texts = {}
    for source in sorted(SOURCES.glob("*.cu")):
        target = folder / f"{source.stem}.ptx"
        subprocess.run(
            [*nvcc_command(), str(source), "-o", str(target)], check=True, capture_output=True, text=True
        )
        texts[source.stem] = target.read_text()
    return texts


@pytest.fixture(params=SCHEDULES)
def run(request: pytest.FixtureRequest, ptx: dict[str, str]) -> Run:
    """run("file.kernel", grid, block, *args): one launch with all checks; a finding is a failure."""

    def run_(name: str, grid: Any, block: Any, *args: Any, dynamic: int = 0) -> None:
        file, entry = name.split(".")
        options = {"dynamic_shared_bytes": dynamic, "checks": True, "schedule": request.param}
        report = vgpu.run_ptx(ptx[file], entry, grid, block, list(args), **options)
        assert report.findings == ()

    return run_


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def c_div(a: int, b: int) -> int:
    """C's quotient: toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def wrap32(value: int) -> int:
    """A Python integer as a signed 32-bit one."""
    return (value + 2**31) % 2**32 - 2**31


# --- control.cu ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", (1, 31, 100))
def test_collatz(run: Run, n: int) -> None:
    start = rng(n).integers(1, 1000, n).astype(np.uint32)
    steps = np.full(n + 1, 77, np.uint32)
    run("control.collatz", 2, 64, start, steps, n)

    def count(x: int) -> int:
        return 0 if x == 1 else 1 + count(3 * x + 1 if x % 2 else x // 2)

    np.testing.assert_array_equal(steps, [*(count(int(x)) for x in start), 77])


def test_collatz_of_27_takes_111_steps(run: Run) -> None:
    start, steps = np.array([27, 1, 2, 97], np.uint32), np.zeros(4, np.uint32)
    run("control.collatz", 1, 32, start, steps, 4)
    assert steps.tolist() == [111, 0, 1, 118]  # OEIS A006577


def test_nested_divergence(run: Run) -> None:
    x = rng().integers(-150, 60, 200).astype(np.int32)
    out = np.full(200, 77, np.int32)
    run("control.nested_divergence", 4, 64, x, out, 200)

    def wanted(v: int) -> int:
        if v < -100:
            return -1
        if v >= 0 and v % 3 == 0:
            return v // 3
        v, total = abs(v), 0
        for j in range(v):
            if j % 5 != 4:
                if total > 1000:
                    break
                total += j ^ v
        return total

    np.testing.assert_array_equal(out, [wanted(int(v)) for v in x])


def switch(op: int, x: int, y: int, out: int) -> int:
    """The switch of control.cu in Python."""
    unsigned_x, unsigned_y = x % 2**32, y % 2**32
    match op:
        case 2:
            return sum(x ^ j for j in range(y & 7))
        case 5:
            return int(f"{unsigned_x:032b}"[::-1], 2) >> (y & 15)
        case 6:
            while x > y and x > 0:
                x -= (y & 255) + 1
            return x
        case 12:
            return next(r for r in (1 << i for i in range(31)) if r >= x & 1023)
    simple = {
        0: x + y,
        1: x - y * 3,
        3: unsigned_x.bit_count() + 32 - (unsigned_y | 1).bit_length(),
        4: out * 2 + x,
        7: min(x, y) * max(x & 15, 2),
        8: x & ~y,
        9: (x & -x).bit_length(),
        10: abs(y - x),
        11: x * y >> 32,
        13: unsigned_y << 7 | unsigned_x >> 25,
        14: x if x < y else 2 * y,
        15: x >> 4 | y << 28,
    }
    return simple.get(op, -7)


def test_switch_is_a_jump_table(run: Run, ptx: dict[str, str]) -> None:
    assert "brx.idx" in ptx["control"]
    op = rng(1).permutation(np.arange(256) % 20 - 2).astype(np.int32)  # -2 and -1, 16 and 17: the default
    a, b = (
        rng(2).integers(-1000, 1001, 256).astype(np.int32),
        rng(3).integers(-300, 301, 256).astype(np.int32),
    )
    before = rng(4).integers(-99, 100, 256).astype(np.int32)
    out = before.copy()
    run("control.switch_table", 4, 64, op, a, b, out)
    rows = zip(op.tolist(), a.tolist(), b.tolist(), before.tolist(), strict=True)
    np.testing.assert_array_equal(out, [wrap32(switch(*row)) for row in rows])


def test_divisions(run: Run) -> None:
    r = rng()
    a = np.concatenate([r.integers(-(2**31), 2**31, 60), [-(2**31), 2**31 - 1, 0, -1]]).astype(np.int32)
    b = np.concatenate([r.integers(1, 2**12, 30), -r.integers(1, 2**20, 30), [2, -(2**31), 5, 2**31 - 1]])
    c = np.concatenate([r.integers(-(2**63), 2**63 - 1, 60), [-(2**63), 2**63 - 1, 7, -(2**40)]])
    d = np.concatenate([r.integers(1, 2**20, 30), -r.integers(2**33, 2**62, 30), [3, -(2**63), -8, 2**31]])
    out = np.zeros((64, 8), np.int64)
    run("control.divisions", 1, 64, a, b.astype(np.int32), c, d, out)

    def wanted(a: int, b: int, c: int, d: int) -> list[int]:
        ua, ub = a % 2**32, b % 2**32
        narrow = [c_div(a, b), a - b * c_div(a, b), ua // ub, ua % ub]
        return [*narrow, c_div(c, d), c - d * c_div(c, d), c_div(a, 7), c % 2**64 % 1000003]

    rows = zip(a.tolist(), b.tolist(), c.tolist(), d.tolist(), strict=True)
    np.testing.assert_array_equal(out, [wanted(*row) for row in rows])


def test_wide_integers(run: Run) -> None:
    seed = rng().integers(1, 2**64, 64, dtype=np.uint64)
    out = np.zeros((64, 4), np.uint64)
    run("control.wide_integers", 2, 32, seed, out, 5)
    wanted = []
    for x in seed.tolist():
        low = high = 0
        for _ in range(5):
            x ^= x << 13 & (2**64 - 1)
            x ^= x >> 7
            x ^= x << 17 & (2**64 - 1)
            product = x * 0x9E3779B97F4A7C15 % 2**64
            high += x * product >> 64
            low += product >> (x & 63)
            high, low = (high + (low >> 64)) % 2**64, low % 2**64
        signed = x - 2**64 if x >> 63 else x
        mixed = signed >> 5 & (2**64 - 1)
        wanted.append([x, low, high, mixed ^ x.bit_count() ^ (64 - (low | 1).bit_length()) << 8])
    np.testing.assert_array_equal(out, np.array(wanted, np.uint64))


def test_local_sort(run: Run) -> None:
    x = rng().integers(-50, 50, (64, 12)).astype(np.int32)
    out = np.zeros_like(x)
    run("control.local_sort", 2, 32, x, out)
    np.testing.assert_array_equal(out, np.sort(x, axis=1))


# --- cooperation.cu -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", (256, 600))
def test_block_sum(run: Run, n: int) -> None:
    x = rng(n).standard_normal(n).astype(np.float32)
    blocks = -(-n // 256)
    out = np.zeros(blocks, np.float32)
    run("cooperation.block_sum", blocks, 256, x, out, n)
    tile = np.pad(x, (0, 256 * blocks - n)).reshape(blocks, 256)
    while tile.shape[1] > 1:  # the same tree, so the same bits
        half = tile.shape[1] // 2
        tile = tile[:, :half] + tile[:, half:]
    np.testing.assert_array_equal(out, tile[:, 0])


@pytest.mark.parametrize("rows, columns", [(32, 32), (33, 70)])
def test_transpose(run: Run, rows: int, columns: int) -> None:
    x = rng().standard_normal((rows, columns)).astype(np.float32)
    out = np.zeros((columns, rows), np.float32)
    grid = (-(-columns // 32), -(-rows // 32))
    run("cooperation.transpose", grid, (32, 8), x, out, rows, columns, dynamic=32 * 33 * 4)
    np.testing.assert_array_equal(out, x.T)


@pytest.mark.parametrize("threads", (32, 96, 100))
def test_block_scan(run: Run, threads: int) -> None:
    x = rng(threads).integers(0, 50, (2, threads)).astype(np.int32)
    out = np.zeros_like(x)
    run("cooperation.block_scan", 2, threads, x, out, dynamic=2 * 4 * threads)
    sums = x.cumsum(axis=1)
    np.testing.assert_array_equal(out, sums * 1000 + sums[:, -1:] % 1000)


def test_shuffles(run: Run) -> None:
    x = rng().integers(-1000, 1000, (4, 32)).astype(np.int32)
    out = np.zeros((4, 32, 6), np.int32)
    run("cooperation.shuffles", 2, 64, x, out)
    lane = np.arange(32)
    sources = [
        np.where(lane < 3, lane, lane - 3),
        np.where(lane > 26, lane, lane + 5),
        lane ^ 9,
        x & 31,
        np.where(lane % 8 > 5, lane, lane + 2),
    ]
    for column, source in enumerate(sources):
        wanted = np.take_along_axis(x, np.broadcast_to(source, x.shape), axis=1)
        np.testing.assert_array_equal(out[..., column], wanted)
    np.testing.assert_array_equal(out[..., 5], np.broadcast_to(x.sum(axis=1, keepdims=True), x.shape))


def test_votes(run: Run) -> None:
    x = rng(7).integers(0, 95, (4, 32)).astype(np.int32)
    x[1, 5], x[2, 6], x[3, 7] = 97, 99, 96  # any and all come out both ways
    out = np.zeros((4, 32, 5), np.uint32)
    run("cooperation.votes", 2, 64, x, out)
    for warp, values in enumerate(x.tolist()):
        odd = sum(1 << lane for lane, v in enumerate(values) if v % 2)
        big = sum(1 << lane for lane, v in enumerate(values) if v % 2 and v > 50)
        evens = sum(v for v in values if v % 2 == 0)
        for lane, v in enumerate(values):
            same = sum(1 << i for i, u in enumerate(values) if u % 2 == 0 and u & 6 == v & 6)
            last = big if v % 2 else (evens + same) % 2**32
            below = (odd & ((1 << lane) - 1)).bit_count()
            wanted = [odd, max(values) > 95, max(values) < 99, below, last]
            assert out[warp, lane].tolist() == wanted, (warp, lane)


def test_histogram(run: Run) -> None:
    x = rng().integers(0, 256, 1000).astype(np.uint8)
    bins = np.full(64, 3, np.int32)
    run("cooperation.histogram", 3, 96, x, bins, 1000)
    np.testing.assert_array_equal(bins, 3 + np.bincount(x >> 2, minlength=64))


def test_atomics(run: Run) -> None:
    x = rng().integers(-(2**31), 2**31, 96).astype(np.int32)
    counters = np.array([0, -(2**31), 2**31 - 1, 0, 0, -1, 0, 0, 0, 0], np.int32)
    total, wide, order = np.full(1, 0.5, np.float32), np.zeros(1, np.uint64), np.zeros(96, np.uint32)
    run("cooperation.atomics", 3, 32, x, counters, total, wide, order)
    values = x.tolist()
    wanted = [
        wrap32(sum(values)),
        max(values),
        min(values),
        np.bitwise_or.reduce(np.left_shift(np.int32(1), x & 31)),
        np.bitwise_xor.reduce(x),
        ~0xFF,
        -96,
        96 % 10,  # atomicInc counts modulo limit + 1
        96,
        5,
    ]
    assert counters.tolist() == wanted
    assert total[0] == 0.5 + 0.25 * (x & 15).sum()  # quarters: exact in any order
    assert int(wide[0]) == (sum(values) << 32) % 2**64
    np.testing.assert_array_equal(np.sort(order), np.arange(96))


def test_cas_loops(run: Run) -> None:
    x = rng().integers(1, 65521, 64).astype(np.int32)
    y = rng(1).random(64).astype(np.float32)
    product, largest = np.ones(1, np.uint32), np.zeros(1, np.float32)
    run("cooperation.cas_loops", 2, 32, x, y, product, largest)
    wanted = 1
    for value in x.tolist():
        wanted = wanted * value % 65521
    assert product[0] == wanted
    assert largest[0] == y.max()


def test_last_block_sums(run: Run) -> None:
    x = rng().integers(-1000, 1000, 7 * 32).astype(np.int32)
    partial, out = np.zeros(7, np.int32), np.zeros(1, np.int32)
    run("cooperation.last_block_sum", 7, 32, x, partial, out)
    np.testing.assert_array_equal(partial, x.reshape(7, 32).sum(axis=1))
    assert out[0] == x.sum()


# --- numbers.cu ---------------------------------------------------------------------------------------------


def test_float_math(run: Run) -> None:
    x = np.exp2(rng().uniform(-20, 20, 64)).astype(np.float32)
    y = rng(1).uniform(-12, 12, 64).astype(np.float32)
    x[4:6] = [3e9, 2.0**32 - 256]  # beyond a signed integer
    y[:4] = [2e5, -1.5e5, 0.0, 1e-20]  # sinf reduces arguments beyond 105615 by a table in local memory
    out = np.zeros((64, 12), np.float32)
    run("numbers.float_math", 2, 32, x, y, out)
    a, b = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(over="ignore", divide="ignore"):
        exact = {
            0: np.sqrt(a),
            1: x / y,
            2: a * b - 1,
            7: np.minimum(np.abs(b), np.floor(a)),
            10: np.rint(y * np.float32(10)) + np.trunc(x),
        }
        within_ulps = {
            3: (np.exp(b), 2),
            5: (np.log(a), 1),
            6: (a**-0.5, 2),
            8: (np.sin(b), 2),
            9: (np.tanh(b), 2),
        }
    for column, wanted in exact.items():
        np.testing.assert_array_equal(out[:, column], wanted.astype(np.float32), err_msg=str(column))
    for column, (wanted, ulps) in within_ulps.items():  # CUDA C++ Programming Guide, "Mathematical Functions"
        wanted = wanted.astype(np.float32).astype(np.float64)
        np.testing.assert_allclose(out[:, column], wanted, rtol=(ulps + 0.5) * F32_STEP, err_msg=str(column))
    with np.errstate(over="ignore"):
        fast = np.exp(b).astype(np.float32).astype(np.float64)
    finite = np.isfinite(fast)
    bound = (2.5 + np.floor(np.abs(1.173 * b))) * F32_STEP * fast  # the guide's bound for __expf
    assert (np.abs(out[finite, 4] - fast[finite]) <= bound[finite] + 2.0**-126).all()
    np.testing.assert_array_equal(out[~finite, 4], fast[~finite])
    quotient, whole = a / (y + np.float32(3)), np.copysign(np.trunc(a), b)
    bound = 2.5 * F32_STEP * np.abs(quotient) + F32_STEP * np.abs(whole + quotient)
    assert (np.abs(out[:, 11] - (whole + quotient)) <= bound).all()


def test_double_math(run: Run) -> None:
    x = rng().uniform(0.25, 4.0, 64)
    out = np.zeros((64, 4))
    run("numbers.double_math", 1, 64, x, out)
    np.testing.assert_array_equal(out[:, 0], np.sqrt(x) + 1 / x)
    as_long = x.astype(
        np.longdouble
    )  # 64 significant bits leave a relative error of 2**-64 / |x - 1| in x * x - x
    np.testing.assert_allclose(out[:, 1], (as_long * as_long - as_long).astype(np.float64), rtol=2.0**-52)
    np.testing.assert_array_equal(out[:, 2], np.trunc(x * 1e6) + x.astype(np.float32))
    np.testing.assert_array_equal(out[:, 3], np.where(x > 1.5, np.floor(x), np.ceil(-x)))


def test_half_math(run: Run) -> None:
    h = rng().standard_normal((64, 2)).astype(np.float16)
    b = rng(1).standard_normal((64, 2)).astype(ml_dtypes.bfloat16)
    halves, bf16s = np.zeros((64, 4), np.float16), np.zeros((64, 3), ml_dtypes.bfloat16)
    run("numbers.half_math", 2, 32, h, b, halves, bf16s)
    x, y = h.astype(np.float64).T  # float64 holds sums and products of FP16 exactly: one rounding each
    wanted = np.stack([x + y, x * 3, x * y + 0.5, np.where(x > y, x, -y)], axis=1)
    np.testing.assert_array_equal(halves, wanted.astype(np.float16))
    u, v = b.astype(np.float32).T
    wanted = np.stack([u + np.float32(1), v * np.float32(1.25), u * v], axis=1).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bf16s.view(np.uint16), wanted.view(np.uint16))


def test_bytes(run: Run) -> None:
    s = rng().integers(-128, 128, (64, 4)).astype(np.int8)
    u = rng(1).integers(0, 256, (64, 4)).astype(np.uint8)
    h = rng(2).integers(-(2**15), 2**15, 64).astype(np.int16)
    out = np.zeros((64, 4), np.uint32)
    run("numbers.bytes", 1, 64, s, u, h, out)
    for row, (signed, unsigned, half) in enumerate(zip(s.tolist(), u.tolist(), h.tolist(), strict=True)):
        dot = sum(p * q for p, q in zip(signed, unsigned, strict=True))
        dot_bytes = list((dot % 2**32).to_bytes(4, "little"))
        # __byte_perm(word, dot, 0x3715): selectors from the low nibble up, 4..7 being dot's bytes
        permuted = int.from_bytes([dot_bytes[1], unsigned[1], dot_bytes[3], unsigned[3]], "little")
        word = int.from_bytes(unsigned, "little")
        packed = (dot >> 3) % 256 | (signed[0] + signed[1]) % 256 << 8 | (word >> 9) % 2**16 << 16
        third = ((half * 3) % 2**32 + (half >> 2) % 2**16) % 2**32
        assert out[row].tolist() == [dot % 2**32, permuted, third, packed], row


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_struct_by_value_with_a_pointer_in_it(ptx: dict[str, str], schedule: str | int) -> None:
    gpu = vgpu.VirtualGPU()
    x = rng().standard_normal(50).astype(np.float32)
    source, total = gpu.upload(x, name="x"), gpu.empty(1, np.float64, name="sum")
    out = gpu.empty(150, np.float32, name="out")  # every third element is written, the rest stays undefined
    fields = [("scale", "f4"), ("shift", "f4"), ("stride", "i4"), ("skip", "i2", 3), ("sum", "u8")]
    affine = np.array((1.5, -0.25, 3, (7, 0, 49), total.address), np.dtype(fields, align=True))  # 32 bytes
    report = gpu.launch(
        vgpu.load(ptx["numbers"]),
        "struct_param",
        grid=(2,),
        block=(32,),
        args=[source, affine.tobytes(), out, 50],
        checks=True,
        schedule=schedule,
    )
    assert report.findings == ()
    assert out.written is not None
    wanted = (x.astype(np.float64) * 1.5 - 0.25).astype(np.float32)
    wanted[[7, 0, 49]] = -1.0
    np.testing.assert_array_equal(out.array[::3], wanted)
    np.testing.assert_array_equal(out.written.reshape(150, 4).all(axis=1), np.arange(150) % 3 == 0)
    assert total.array[0] == 1.25


def test_constant_and_global_variables(run: Run) -> None:
    x = rng().standard_normal(256).astype(np.float32)
    out = np.zeros(256, np.float32)
    run("numbers.filter", 1, 256, x, out, 256)
    padded = np.pad(x.astype(np.float64), 2, mode="edge")
    filtered = sum(w / 16 * padded[j : j + 256] for j, w in enumerate((1, 4, 6, 4, 1)))
    permutation = np.array([3, 1, 4, 0, 5, 2, 7, 6])
    wanted = np.zeros((32, 8))
    wanted[:, permutation] = np.reshape(filtered, (32, 8))
    np.testing.assert_allclose(out, wanted.reshape(-1), rtol=0, atol=5 * F32_STEP * np.abs(x).max())


def test_vector_loads_in_a_grid_stride_loop(run: Run) -> None:
    x, y = rng().standard_normal((2, 150, 4)).astype(np.float32)
    out = np.zeros_like(x)
    run("numbers.axpy4", 2, 32, x, y, out, 0.75, 150)
    wanted = (0.75 * x.astype(np.float64) + y).astype(
        np.float32
    )  # 0.75 x is exact, so this is the fused result
    np.testing.assert_array_equal(out, wanted)


# --- broken versions ----------------------------------------------------------------------------------------


def without_barrier(text: str, entry: str, number: int) -> str:
    """The PTX less the given bar.sync of one kernel, counted from 0 in the order of the text."""
    start = text.index(f".entry {entry}(")
    for _ in range(number + 1):
        start = text.index("bar.sync", start + 1)
    return text[:start] + text[text.index(";", start) + 1 :]


BARRIERS = [  # a barrier between different warps; the lower levels of block_sum's tree stay within one warp
    *[("block_sum", 3, 256, 0, n) for n in (0, 1, 2)],
    ("transpose", (3, 2), (32, 8), 32 * 33 * 4, 0),
    *[("block_scan", 2, 96, 2 * 4 * 96, n) for n in (0, 1, 2)],
    *[("histogram", 3, 96, 0, n) for n in (0, 1)],
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("entry, grid, block, dynamic, number", BARRIERS)
def test_a_removed_barrier_is_reported(
    ptx: dict[str, str], entry: str, grid: Any, block: Any, dynamic: int, number: int, schedule: str | int
) -> None:
    args: dict[str, list[Any]] = {
        "block_sum": [np.ones(600, np.float32), np.zeros(3, np.float32), 600],
        "transpose": [np.ones((33, 70), np.float32), np.zeros((70, 33), np.float32), 33, 70],
        "block_scan": [np.ones((2, 96), np.int32), np.zeros((2, 96), np.int32)],
        "histogram": [np.arange(1000).astype(np.uint8), np.zeros(64, np.int32), 1000],
    }
    text = without_barrier(ptx["cooperation"], entry, number)
    report = vgpu.run_ptx(
        text, entry, grid, block, args[entry], dynamic_shared_bytes=dynamic, checks=True, schedule=schedule
    )
    assert "race" in {finding.kind for finding in report.findings}
