"""Unit kernels of single instructions: the virtual GPU against recorded hardware, and the comparison itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oproj_lib.conformance import (
    Case,
    build,
    cases,
    compare,
    cubins,
    digest,
    expected,
    families,
    hardware,
    load,
    mismatches,
)
from oproj_lib.conformance.differences import DIFFERENCES, Difference, known
from oproj_lib.conformance.document import document
from oproj_lib.conformance.record import DATA, decode, encode, record, recorded
from oproj_lib.conformance.registry import NOT_COVERED
from oproj_lib.conformance.synchronisation import MACHINE_DEPENDENT
from oproj_lib.conformance.tolerance import Tolerance, ulps_apart
from oproj_lib.vgpu import alu, atomics, convert, elementwise, launch, logic, mbarrier, tensorcore, warp
from oproj_lib.vgpu import matrices as descriptors
from oproj_lib.vgpu.decode import BUILDERS, SPECIAL_REGISTERS

BY_NAME = {case.name: case for case in cases()}
KNOWN = {name for difference in DIFFERENCES for name in difference.cases}
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "conformance.md"


# -- coverage --------------------------------------------------------------------------------------


def test_names_and_entries_are_unique() -> None:
    assert len(BY_NAME) == len(cases())
    assert len({case.entry for case in cases()}) == len(cases())
    assert sum(families().values()) == len(cases())


def test_every_opcode_has_a_case_or_a_reason() -> None:
    covered = frozenset().union(*(case.covers for case in cases()))
    assert covered | set(NOT_COVERED) == set(BUILDERS)
    assert not covered & set(NOT_COVERED)


def test_cases_execute_what_they_cover() -> None:
    for case in cases():
        opcodes = {word.split(".")[0].rstrip(";") for word in case.kernel.split()}
        assert case.covers <= opcodes, (case.name, case.covers - opcodes)


def test_every_special_register_is_compared_or_depends_on_the_machine() -> None:
    compared = set(BY_NAME["special registers"].columns)
    assert compared | set(MACHINE_DEPENDENT) == set(SPECIAL_REGISTERS)
    assert compared & set(MACHINE_DEPENDENT) == {"%nwarpid"}  # recorded, and a known difference


# -- the virtual GPU against hardware --------------------------------------------------------------


def test_the_record_holds_every_case() -> None:
    """Without the recorded run this fails: `python -m oproj_lib.conformance record` makes it."""
    assert set(recorded()["cases"]) == set(BY_NAME)
    assert KNOWN <= set(BY_NAME)


@pytest.mark.parametrize("family", families())
def test_the_virtual_gpu_gives_what_hardware_gave(family: str) -> None:
    found = recorded()["cases"]
    for case in (case for case in cases() if case.family == family):
        item, output = found[case.name], expected(case)
        assert item["fingerprint"] == case.fingerprint[:16], (
            f"{case.name}: recorded with another kernel or inputs"
        )
        if "values" not in item:
            assert digest(output) == item["sha256"], f"{case.name}: not what hardware gave"
            continue
        hardware_gave = decode(case, item["values"])
        assert digest(hardware_gave) == item["sha256"], f"{case.name}: the record contradicts itself"
        assert case.tolerance is not None or case.name in KNOWN, f"{case.name}: recorded as different"
        assert compare(case, hardware_gave, output, known(case)) == []


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.cases[0])
def test_known_differences_still_exist(difference: Difference) -> None:
    """Every case that a row of the table names differs, and only where the row says (or another row)."""
    for name in difference.cases:
        case = BY_NAME[name]
        got = decode(case, recorded()["cases"][name]["values"])
        assert (mismatches(case, got, expected(case)) & difference.where(case)).any(), f"{name} agrees now"
        assert not known(case).all(), f"{name}: nothing is left to compare"


def test_words_that_may_differ_are_not_compared() -> None:
    case = BY_NAME["mov b16"]
    sound = expected(case)
    wrong = sound.copy()
    wrong[[3, 70]] ^= 1
    ignored = np.zeros(case.output_shape, bool)
    ignored[3] = True
    assert [line.split(":")[2].strip()[:22] for line in compare(case, wrong, sound, ignored)] == [
        "CTA 0 warp 2 lane 6 (a"
    ]
    ignored[70] = True
    assert compare(case, wrong, sound, ignored) == []


def test_the_document_is_up_to_date() -> None:
    """`python -m oproj_lib.conformance table > docs/conformance.md`"""
    assert DOCUMENT.read_text(encoding="utf-8") == document()


# -- the comparison fails when semantics are broken ------------------------------------------------


def off_by_one_bit(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, **options: function(*values, **options) ^ 1


def identity(value: Any, *others: Any) -> Any:
    return np.asarray(value)


def wrong_parity(
    self: mbarrier.Mbarriers, barrier: Any, threads: np.ndarray, parity: np.ndarray
) -> np.ndarray:
    return (barrier.phase[threads // self.launch.threads_per_cta] & 1) == (parity & 1)


@dataclass(frozen=True)
class Mutant:
    """`owner.attribute`, replaced by `broken(original)`, must show in an `instruction` of a case."""

    owner: Any
    attribute: str
    broken: Callable[[Any], Any]
    case: str
    instruction: str


MUTANTS = {
    "mul.hi is off by one": Mutant(alu, "multiply_high", off_by_one_bit, "mul s64", "mul.hi.s64"),
    "division toward minus infinity": Mutant(
        alu, "integer_quotient", lambda f: np.floor_divide, "two operands s32", "div.s32"
    ),
    "sums saturate at 64 bits": Mutant(
        alu, "saturated", lambda f: lambda g, a, b: g(a, b), "two operands s32", "add.sat.s32"
    ),
    "NaNs keep their payload": Mutant(
        elementwise, "canonical_nan", lambda f: identity, "add f32", "add.rn.f32"
    ),
    "FP64 sums take the first NaN": Mutant(
        alu, "carry_payload", lambda f: lambda result, b, a: f(result, a, b), "sub f64", "sub.rn.f64"
    ),
    "FP64 products take the first NaN": Mutant(
        alu, "carry_payload", lambda f: lambda result, b, c, a: f(result, a, b, c), "fma f64", "fma.rn.f64"
    ),
    "neg.f64 changes a NaN's sign": Mutant(alu, "quiet", lambda f: np.negative, "neg, abs f64", "neg.f64"),
    "no flush to zero": Mutant(
        elementwise, "flush_subnormals", lambda f: identity, "mul f32", "mul.rn.ftz.f32"
    ),
    "tiny quotients are lifted": Mutant(
        alu, "underflow_of_quotients", lambda f: lambda form, kind: None, "div f32", "div.rp.ftz.f32"
    ),
    "no saturation": Mutant(elementwise, "clamp_to_one", lambda f: identity, "fma f32", "fma.rn.sat.f32"),
    "fma rounds twice": Mutant(
        alu, "fma32", lambda f: lambda a, b, c: a * b + c, "fma f32, cancelling", "fma.rn.f32"
    ),
    "directed sums round to nearest": Mutant(
        alu, "directed_sum", lambda f: lambda x, y, mode: (x + y).astype(np.float32), "add f32", "add.rz.f32"
    ),
    "min of zeros is +0": Mutant(
        alu, "fmin", lambda f: lambda a, b: f(a, b) + a.dtype.type(0), "min, max f32", "min.f32"
    ),
    "tf32 truncates": Mutant(
        convert, "to_tf32", lambda f: lambda v, mode: f(v, "rz"), "cvt f32 to tf32", "cvt.rn.tf32.f32"
    ),
    "cvt.relu keeps -0": Mutant(
        convert,
        "clamp_negative",
        lambda f: lambda v: np.where(v < 0, v.dtype.type(0), v),
        "cvt f32 to bf16x2",
        "cvt.rn.relu.bf16x2.f32",
    ),
    "narrowed FP64 NaNs are canonical": Mutant(
        convert, "narrow_payload", lambda f: lambda v, result: result, "cvt f64 to f16", "cvt.rn.f16.f64"
    ),
    "setp.ne is true for NaN": Mutant(
        logic,
        "comparison",
        lambda f: lambda form, kind: f(form, kind) and np.not_equal,
        "setp f32",
        "setp.eq.f32",
    ),
    "shuffles ignore the segment": Mutant(
        warp,
        "shuffle_source",
        lambda f: lambda mode, b, c: f(mode, b, c & 31),
        "shfl",
        "shfl.sync.idx.b32",
    ),
    "inc wraps one late": Mutant(
        atomics,
        "atomic_function",
        lambda f: lambda op, *rest: np.add if op == "inc" else f(op, *rest),
        "atom inc u32",
        "atom.shared.inc.u32",
    ),
    "global FP32 atomics keep subnormal numbers": Mutant(
        atomics,
        "float_sum",
        lambda f: lambda old, operand, in_global: f(old, operand, in_global=False),
        "atom add f32",
        "red.global.add.f32",
    ),
    "24 bits of alignment": Mutant(
        tensorcore,
        "datapath",
        lambda f: lambda arch: tensorcore.Datapath(fraction_bits=24, step_bytes=32),
        "mma m16n8k16.f32.bf16.bf16.f32",
        "mma.sync",
    ),
    "no swizzle": Mutant(
        descriptors, "swizzled", lambda f: identity, "wgmma n64 bf16, a chain of 4", "wgmma.mma_async"
    ),
    "phases complete too early": Mutant(
        mbarrier.Mbarriers, "passed", lambda f: wrong_parity, "mbarrier counts", "test_wait.parity"
    ),
    "lanemask_lt includes the lane": Mutant(
        launch,
        "special_register",
        lambda f: lambda owner, name: f(owner, name.replace("lanemask_lt", "lanemask_le")),
        "special registers",
        "%lanemask_lt",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_instruction_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = MUTANTS[mutant]
    case = BY_NAME[broken.case]
    sound = expected(case)
    assert compare(case, sound, sound) == []
    monkeypatch.setattr(
        broken.owner, broken.attribute, broken.broken(getattr(broken.owner, broken.attribute))
    )
    descriptors.element_offsets.cache_clear()
    lines = compare(case, expected(case), sound)
    descriptors.element_offsets.cache_clear()
    assert any(broken.instruction in line for line in lines), lines


def test_a_mismatch_names_lane_register_and_values() -> None:
    case = BY_NAME["two operands s32"]
    sound = expected(case)
    wrong = sound.copy()
    wrong[128 + 70, 0] ^= 0x100
    a, b = (int(case.inputs[name][128 + 70]) for name in "ab")
    total = (a + b) & 0xFFFFFFFF
    assert compare(case, wrong, sound) == [
        f"two operands s32: add.s32 d, a, b: CTA 1 warp 2 lane 6 (a = {a:#010x}, b = {b:#010x}): "
        f"got {total ^ 0x100:#010x}, expected {total:#010x}"
    ]


def test_many_mismatches_are_summarised() -> None:
    case = BY_NAME["mov b16"]
    sound = expected(case)
    lines = compare(case, ~sound, sound)
    assert len(lines) == 9
    assert lines[-1] == "mov b16: 2048 of 2048 words differ, in 1 of 1 columns: mov.b16 d, a"


def test_results_of_another_shape_are_refused() -> None:
    case = BY_NAME["mov b16"]
    sound = expected(case)
    with pytest.raises(
        ValueError, match=r"got is uint32 \(2048, 1\), the case has 2048 threads x 1 columns of uint16"
    ):
        compare(case, sound.astype(np.uint32), sound)


@pytest.mark.parametrize(
    ("got", "want", "allowed"),
    [
        (1.0 + 2 * 2.0**-23, 1.0, True),
        (1.0 + 3 * 2.0**-23, 1.0, False),  # more than 2 ulps and the half that the rounding of `want` costs
        (np.inf, 3.4028234663852886e38, False),
        (np.nan, 1.0, False),
        (np.nan, np.nan, True),
        (np.inf, np.inf, True),
        (-np.inf, np.inf, False),
        (2.0**-149, 0.0, True),
        (2.0**-146, 0.0, False),
    ],
)
def test_tolerance(got: float, want: float, allowed: bool) -> None:
    tolerance = Tolerance("f32", "here", ulps=2)
    words = [np.array([[value]], np.float32).view(np.uint32) for value in (got, want)]
    assert bool(tolerance.allows(*words)[0, 0]) == allowed


def test_relative_bounds_of_subnormal_results() -> None:
    """Both the expected and the given value are rounded to the grid of subnormal numbers: half a unit each."""
    tolerance = Tolerance("f16", "here", relative=2.0**-9.9)
    words = np.array([[0x01DB], [0x01DA], [0x01D9]], np.uint16)
    assert list(tolerance.allows(words, np.full((3, 1), 0x01DB, np.uint16))[:, 0]) == [True, True, False]


def test_signs_of_zeros_count() -> None:
    tolerance = Tolerance("f32", "here", absolute=1.0)
    assert not tolerance.allows(np.array([[0x80000000]], np.uint32), np.array([[0]], np.uint32)).any()


def test_distance_in_representable_numbers() -> None:
    got = np.array([[0x3C00, 0x8001, 0x7E00]], np.uint16)
    want = np.array([[0x3BFF, 0x0001, 0x7FFF]], np.uint16)
    assert ulps_apart("f16", got, want).tolist() == [[1, 2, 0]]


def test_the_record_keeps_whole_results() -> None:
    case = BY_NAME["mov b16"]
    output = np.random.default_rng(0).integers(0, 1 << 16, case.output_shape).astype(np.uint16)
    assert (decode(case, encode(output)) == output).all()


def test_packed_elements_are_held_to_the_tolerance_one_by_one() -> None:
    tolerance = Tolerance("f16", "here", relative=2.0**-9)
    one, near, far = 0x3C00, 0x3C02, 0x3C10
    for upper, lower, allowed in ((one, near, True), (near, one, True), (far, one, False), (one, far, False)):
        words = np.array([[upper << 16 | lower]], np.uint32)
        assert bool(tolerance.allows(words, np.array([[one << 16 | one]], np.uint32))[0, 0]) == allowed


# -- cubins and the hardware run -------------------------------------------------------------------


def few() -> list[Case]:
    return [case for case in cases() if case.family in ("predication", "hints")]


def test_every_kernel_assembles(tmp_path: Path) -> None:
    for family, members in cubins.by_family(cases()).items():
        cubins.assemble(members, tmp_path / cubins.family_file(family))
        assert (tmp_path / cubins.family_file(family)).read_bytes()[:4] == b"\x7fELF"


def test_a_refused_kernel_is_reported(tmp_path: Path) -> None:
    case = BY_NAME["guards"]
    broken = Case(**{**case.__dict__, "kernel": case.kernel.replace("mul.lo.u32", "mul.low.u32")})
    with pytest.raises(RuntimeError, match="error"):
        cubins.assemble([broken], tmp_path / "broken.cubin")


PRETEND_DRIVER = """
import ctypes, os
memory = {}
class CUlaunchConfig: pass
class CUstream(int): pass
def ok(*values): return (0, *values)
cuInit = cuCtxSetCurrent = lambda value: ok()
cuCtxSynchronize = lambda: ok()
cuDeviceGet = cuDevicePrimaryCtxRetain = lambda value: ok(0)
cuDeviceGetName = lambda size, device: ok(b"Pretend GPU" + bytes(8))
cuDriverGetVersion = lambda: ok(13000)
cuModuleLoadData = lambda image: ok(image) if image[:4] == b"\\x7fELF" else (200,)
cuModuleGetFunction = lambda module, name: ok(name) if name in module else (500,)
def cuMemAlloc(size):
    buffer = ctypes.create_string_buffer(size)
    memory[ctypes.addressof(buffer)] = buffer
    return ok(ctypes.addressof(buffer))
cuMemFree = lambda pointer: ok(memory.pop(pointer) and None)
def copy(to, source, size):
    ctypes.memmove(int(to), int(source), size)
    return ok()
cuMemcpyHtoD = cuMemcpyDtoH = copy
def cuLaunchKernelEx(config, function, parameters, extra):
    if function == b"case_guards":
        return (719,)
    last = {b"case_hints": 1, b"case_ld_under_a_guard": 1}[function]
    pointer = (ctypes.c_void_p * (last + 1)).from_address(parameters)[last]
    output = ctypes.c_uint64.from_address(pointer).value
    ctypes.memset(output, 5, 4)
    return ok()
"""


@pytest.fixture(scope="module")
def pretend_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of three cases, run on a driver that faults in one and writes 5s in the others."""
    root = tmp_path_factory.mktemp("conformance")
    build(root / "bundle", few(), {case.name: expected(case) for case in few()})
    package = root / "site" / "cuda" / "bindings"
    package.mkdir(parents=True)
    (root / "site" / "cuda" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "driver.py").write_text(PRETEND_DRIVER)
    command = [sys.executable, hardware.__file__, str(root / "bundle"), str(root / "out")]
    environment = {**os.environ, "PYTHONPATH": str(root / "site")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 cases on Pretend GPU: 0 equal the virtual GPU bit for bit, 1 errors" in done.stdout
    return root


def test_cubins_load_by_family(pretend_run: Path) -> None:
    assert set(load(pretend_run / "bundle")) == {"predication", "hints"}


def test_a_hardware_run_survives_a_fault(pretend_run: Path) -> None:
    run = json.loads((pretend_run / "out" / "conformance.json").read_text(encoding="utf-8"))
    assert (run["machine"], run["cuda_driver"]) == ("Pretend GPU", 13000)
    assert run["cases"]["guards"]["error"] == "RuntimeError: CUDA driver: 719"
    case = BY_NAME["hints"]
    output = np.zeros(case.output_shape, case.output_dtype)
    output[0, 0] = 0x05050505
    assert run["cases"]["hints"] == {
        "fingerprint": case.fingerprint,
        "sha256": digest(output),
        "stable": True,
    }
    with np.load(pretend_run / "out" / "conformance.npz") as arrays:
        assert (arrays["case_hints"] == output).all()


def test_a_failed_run_is_not_recorded(pretend_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^two operands s16: not run$"):
        record(pretend_run / "out", tmp_path / "data.json")
    assert not (tmp_path / "data.json").exists()
    assert DATA.name == "conformance_h200.json"
