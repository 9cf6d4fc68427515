"""Bank conflicts on a real GPU: cycles per shared-memory access, for the access patterns of notebook 03.

    python -m oproj_lib.bench.bank_conflicts --out oproj_lib/data/bank_conflicts_h200.json

One CTA of 8 warps does the same access again and again, every lane at its own offset, between two readings of
%clock64. With 8 warps the shared memory is what limits, not a warp's latency: cycles over accesses is then what one
warp-wide access occupies it for. The kernel is PTX that the driver compiles; the virtual GPU runs the same text and
counts wavefronts, and on both the sums of what was loaded and the memory afterwards are compared with NumPy's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from oproj_lib import accesses, provenance, vgpu
from oproj_lib.bench.measure import WrongOutputError
from oproj_lib.devices import choose_device
from oproj_lib.devices.cuda import Gpu
from oproj_lib.kernels.configuration import Configuration
from oproj_lib.layouts.banks import wavefronts
from oproj_lib.provenance import Provenance, read_provenance

WHAT = "bank conflicts on hardware"
DATA_FORMAT = 1
DATA = Path(__file__).resolve().parents[1] / "data" / "bank_conflicts_h200.json"
METHOD = (
    "one CTA of 8 warps repeats one access between readings of %clock64; cycles over warp-wide accesses, median and "
    "quartiles of launches; sums of what was loaded and the memory afterwards compared with NumPy"
)
WARPS, LANES = 8, 32
UNROLLED = 16
"""Accesses per round of the loop, each load to registers of its own: a load to a register waits for the one before."""
ROUNDS, LAUNCHES = 64, 30
STORED = 0x5EED0000
"""Lane l stores this + l."""


@dataclass(frozen=True)
class Case:
    """One access pattern. offsets: bytes, by lane; access_bytes: 4 or 16."""

    name: str
    opcode: str
    access_bytes: int
    offsets: tuple[int, ...]

    @property
    def wavefronts(self) -> int:
        """What the layout's arithmetic says."""
        return wavefronts(self.offsets, self.access_bytes)

    @property
    def loads(self) -> bool:
        return self.opcode == "ld.shared"

    @property
    def area_words(self) -> int:
        """Words of shared memory that the offsets reach."""
        return (max(self.offsets) + self.access_bytes) // 4


@dataclass(frozen=True)
class Cycles:
    """Cycles per warp-wide access of one case, over launches."""

    case: Case
    median: float
    q1: float
    q3: float
    launches: int


@dataclass(frozen=True)
class BankConflicts:
    """One session on one GPU."""

    provenance: Provenance
    rounds: int
    cases: tuple[Cycles, ...]

    def of(self, case: Case) -> Cycles | None:
        """The measurement of a case; None where another pattern has its name, or none."""
        return next((one for one in self.cases if one.case == case), None)


def cases(k: int = 1536) -> tuple[Case, ...]:
    """What is measured: two extremes, then the kernel's reads of x, stores and loads of partial sums, with and without
    padding."""

    def chunk_load(name: str, offsets: Sequence[int]) -> Case:
        return Case(name, "ld.shared", 16, tuple(offsets))

    first_loads = {}
    for name, config in (("no ring", Configuration(1536, 4, 1)), ("ring", Configuration(1536, 4, 1, 1))):
        first_loads[name] = next(iter(accesses.partial_loads(config, 8))).offsets
    return (
        Case("one word for all lanes", "ld.shared", 4, (0,) * LANES),
        Case("32 words of one bank", "ld.shared", 4, tuple(128 * lane for lane in range(LANES))),
        chunk_load("neighbouring chunks", [16 * lane for lane in range(LANES)]),
        *(
            chunk_load(f"x, rows padded by {padding} chunks", accesses.x_row_offsets(k, padding))
            for padding in (0, 1, 2, 4, 8)
        ),
        *(
            Case(
                f"partial sums, {words} floats per token",
                "st.shared",
                4,
                tuple(accesses.partial_store_offsets(words)),
            )
            for words in (16, 18, 20, 24)
        ),
        *(chunk_load(f"partial sums read, {name}", offsets) for name, offsets in first_loads.items()),
    )


# ---- the kernel ----


def kernel(case: Case) -> str:
    """PTX of one case's kernel, ``bank_conflicts``: offsets u32 [32], sums u32 [8, 32], area u32 [words] (what shared
    memory holds in the end), cycles u64 [1], words, rounds."""
    words = case.access_bytes // 4
    body, registers = [], UNROLLED * words
    for access in range(UNROLLED):
        names = [f"%v{access * words + word}" for word in range(words)]
        if not case.loads:
            body.append("    st.volatile.shared.u32 [%at], %value;")
        elif words == 1:
            body.append(f"    ld.volatile.shared.u32 {names[0]}, [%at];")
        else:
            body.append(f"    ld.volatile.shared.v4.u32 {{{', '.join(names)}}}, [%at];")
    if case.loads:
        body += [f"    add.u32 %sum, %sum, %v{number};" for number in range(registers)]
    return _KERNEL.replace("REGISTERS", str(registers)).replace("BODY", "\n".join(body))


_KERNEL = f""".version 8.0
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 area[];
.visible .entry bank_conflicts(
    .param .u64 p_offsets, .param .u64 p_sums, .param .u64 p_area, .param .u64 p_cycles,
    .param .u32 p_words, .param .u32 p_rounds)
{{
    .reg .pred %p<5>;
    .reg .b32 %thread, %threads, %lane, %words, %rounds, %index, %at, %base, %word, %sum, %value, %v<REGISTERS>;
    .reg .b64 %pointer, %offset, %start, %end;
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    and.b32 %lane, %thread, 31;
    ld.param.u32 %words, [p_words];
    ld.param.u32 %rounds, [p_rounds];
    mov.u32 %base, area;
    mov.u32 %index, %thread;
fill:
    setp.ge.u32 %p0, %index, %words;
    @%p0 bra filled;
    shl.b32 %at, %index, 2;
    add.u32 %at, %at, %base;
    st.shared.u32 [%at], %index;
    add.u32 %index, %index, %threads;
    bra fill;
filled:
    ld.param.u64 %pointer, [p_offsets];
    mul.wide.u32 %offset, %lane, 4;
    add.s64 %pointer, %pointer, %offset;
    ld.global.u32 %at, [%pointer];
    add.u32 %at, %at, %base;
    add.u32 %value, %lane, {STORED};
    mov.u32 %sum, 0;
    bar.sync 0;
    mov.u64 %start, %clock64;
again:
BODY
    sub.u32 %rounds, %rounds, 1;
    setp.ne.u32 %p1, %rounds, 0;
    @%p1 bra again;
    bar.sync 0;
    mov.u64 %end, %clock64;
    ld.param.u64 %pointer, [p_sums];
    mul.wide.u32 %offset, %thread, 4;
    add.s64 %pointer, %pointer, %offset;
    st.global.u32 [%pointer], %sum;
    mov.u32 %index, %thread;
dump:
    setp.ge.u32 %p2, %index, %words;
    @%p2 bra dumped;
    shl.b32 %at, %index, 2;
    add.u32 %at, %at, %base;
    ld.shared.u32 %word, [%at];
    ld.param.u64 %pointer, [p_area];
    mul.wide.u32 %offset, %index, 4;
    add.s64 %pointer, %pointer, %offset;
    st.global.u32 [%pointer], %word;
    add.u32 %index, %index, %threads;
    bra dump;
dumped:
    setp.ne.u32 %p3, %thread, 0;
    @%p3 bra over;
    sub.s64 %end, %end, %start;
    ld.param.u64 %pointer, [p_cycles];
    st.global.u64 [%pointer], %end;
over:
    ret;
}}
"""


def check(case: Case, sums: Any, area: Any, rounds: int) -> None:
    """Compare what a launch left with NumPy. sums: uint32 [8, 32]; area: uint32 [words]. Raises WrongOutputError."""
    expected = np.arange(case.area_words, dtype=np.uint32)
    places = np.array(case.offsets) // 4
    loaded = np.zeros(LANES, np.uint32)
    if case.loads:
        chunks = places[:, None] + np.arange(case.access_bytes // 4)
        loaded = (expected[chunks].sum(axis=1, dtype=np.uint64) * UNROLLED * rounds).astype(np.uint32)
    else:
        expected[places] = STORED + np.arange(LANES, dtype=np.uint32)
    if not np.array_equal(sums, np.broadcast_to(loaded, (WARPS, LANES))):
        warp, lane = np.argwhere(sums != loaded)[0]
        raise WrongOutputError(
            f"{case.name}: warp {warp}, lane {lane} loaded words that sum to {sums[warp, lane]}, not {loaded[lane]}"
        )
    if not np.array_equal(area, expected):
        word = int(np.argwhere(area != expected)[0, 0])
        raise WrongOutputError(
            f"{case.name}: word {word} is {area[word]:#x} afterwards, not {expected[word]:#x}"
        )


# ---- on the virtual GPU, and on a real one ----


def counted_wavefronts(case: Case) -> float:
    """Wavefronts of one warp-wide access, as the virtual GPU counts them on the kernel: two rounds less one."""
    first, second = (_run_on_vgpu(case, rounds) for rounds in (1, 2))
    return (second - first) / (WARPS * UNROLLED)


_decoded = cache(vgpu.load)
"""By text: patterns of one kind of access share a kernel."""


def _run_on_vgpu(case: Case, rounds: int) -> int:
    gpu = vgpu.VirtualGPU()
    sums = gpu.upload(np.zeros((WARPS, LANES), np.uint32), "sums")
    area = gpu.upload(np.zeros(case.area_words, np.uint32), "area")
    arguments = [
        gpu.upload(np.array(case.offsets, np.uint32), "offsets"), sums, area,
        gpu.upload(np.zeros(1, np.uint64), "cycles"), case.area_words, rounds,
    ]  # fmt: skip
    report = gpu.launch(
        _decoded(kernel(case)), "bank_conflicts", grid=(1, 1, 1), block=(WARPS * LANES, 1, 1), args=arguments,
        dynamic_shared_bytes=4 * case.area_words,
    )  # fmt: skip
    report.raise_for_findings()
    check(case, sums.array, area.array, rounds)
    return int(report.counters.shared_wavefronts)


def measure_case(gpu: Gpu, case: Case, *, rounds: int = ROUNDS, launches: int = LAUNCHES) -> Cycles:
    """Cycles per access on a GPU. Raises WrongOutputError for a result that is not NumPy's."""
    import torch

    def tensor(*shape: int, dtype: Any = torch.int32) -> Any:
        return torch.zeros(shape, dtype=dtype, device=gpu.tensors)

    offsets = torch.tensor(case.offsets, dtype=torch.int32, device=gpu.tensors)
    sums, area, cycles = tensor(WARPS, LANES), tensor(case.area_words), tensor(1, dtype=torch.int64)
    function = gpu.load(kernel(case).encode(), "bank_conflicts", shared_bytes=4 * case.area_words)
    values = (
        *(ctypes.c_void_p(t.data_ptr()) for t in (offsets, sums, area, cycles)), ctypes.c_uint32(case.area_words),
        ctypes.c_uint32(rounds),
    )  # fmt: skip
    found = []
    for _ in range(launches + 3):  # three to warm up
        sums.fill_(-1)
        area.fill_(-1)
        function.launch((1, 1, 1), (WARPS * LANES, 1, 1), values, stream=gpu.current_stream())
        gpu.synchronize(f"measuring {case.name}")
        check(case, sums.cpu().numpy().view(np.uint32), area.cpu().numpy().view(np.uint32), rounds)
        found.append(int(cycles[0]) / (WARPS * UNROLLED * rounds))
    function.unload()
    q1, median, q3 = statistics.quantiles(found[3:], n=4, method="inclusive")
    return Cycles(case, median, q1, q3, launches)


def measure(gpu: Gpu, command: Sequence[str], chosen: Sequence[Case] | None = None) -> BankConflicts:
    """Measure ``cases()`` (or others). Raises WrongOutputError, and DeviceError without nvidia-smi."""
    clocks = {"before": provenance.smi(gpu.index)}
    found = tuple(measure_case(gpu, case) for case in chosen or cases())
    clocks["after"] = provenance.smi(gpu.index)
    return BankConflicts(provenance.collect(gpu, command, clocks), ROUNDS, found)


# ---- data ----


def write(path: Path | str, measured: BankConflicts) -> None:
    """Write the data file."""
    fields = {"format": DATA_FORMAT, "what": WHAT, "method": METHOD, **asdict(measured)}
    Path(path).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def read(path: Path | str = DATA) -> BankConflicts:
    """Read a data file. Raises FileNotFoundError, and ValueError for one of another kind or version."""
    fields = json.loads(Path(path).read_text(encoding="utf-8"))
    if (fields.get("what"), fields.get("format")) != (WHAT, DATA_FORMAT):
        raise ValueError(f"{path} is no data file of oproj_lib.bench.bank_conflicts in format {DATA_FORMAT}")
    found = []
    for one in fields["cases"]:
        case = one.pop("case")
        found.append(Cycles(Case(**{**case, "offsets": tuple(case["offsets"])}), **one))
    return BankConflicts(read_provenance(fields["provenance"]), fields["rounds"], tuple(found))


def recorded() -> BankConflicts:
    """The recorded session."""
    return read()


def on_hardware(device: str, target: str) -> tuple[BankConflicts, str]:
    """(cycles, where they come from): measured now where ``device`` takes a GPU for ``target``, else recorded.

    Raises what ``measure`` raises.
    """
    if device != "vgpu" and choose_device(device, "producer", target)[0] == "cuda":
        measured = measure(Gpu(0), [f"oproj_lib.bench.bank_conflicts.on_hardware({device!r}, {target!r})"])
        return measured, f"measured on {measured.provenance.title}"
    known = recorded()
    return known, f"recorded on {known.provenance.title}"


def cycles_by_name(measured: BankConflicts) -> dict[str, tuple[float, float, float]]:
    """Median and quartiles of ``cases()``. Raises ValueError where one of them is missing."""
    found = {case.name: measured.of(case) for case in cases()}
    if missing := [name for name, one in found.items() if one is None]:
        raise ValueError(
            f"the measurement did not measure {', '.join(missing)} as it is defined now: measure again"
        )
    return {name: (one.median, one.q1, one.q3) for name, one in found.items() if one}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m oproj_lib.bench.bank_conflicts")
    parser.add_argument("--out", help="data file (JSON) with machine, versions, date and command")
    parser.add_argument("--gpu", type=int, default=0, help="index of the GPU (default 0)")
    arguments = parser.parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    measured = measure(Gpu(arguments.gpu), ["python", "-m", "oproj_lib.bench.bank_conflicts", *words])
    print(f"cycles per warp-wide access, {measured.provenance.title}")
    for one in measured.cases:
        spread = f"[{one.q1:.2f}, {one.q3:.2f}]"
        print(
            f"{one.case.name:34s} {one.case.opcode:9s} {one.median:6.2f} {spread:16s} wavefronts {one.case.wavefronts}"
        )
    if arguments.out:
        write(arguments.out, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
