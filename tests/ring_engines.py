"""What the tests of the engines with a ring (``OprojUmma``, ``OprojWgmma``) have in common: builds, the statements
of their PTX, launches on the virtual GPU, and where a finding must point."""

from __future__ import annotations

import inspect
import re
import textwrap
from functools import cache
from typing import Any

import cutlass.cute as cute
import numpy as np

from oproj_lib import program as programs
from oproj_lib import vgpu
from oproj_lib.kernels.ring_engine import RingEngine
from oproj_lib.kernels.ring_lane import RingShared
from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.problem import TOLERANCE, Problem, reference
from oproj_lib.program import Program, build_umma, build_wgmma
from oproj_lib.run import SLOT, SLOTS, launch_on_vgpu
from oproj_lib.vgpu.report import Report

DEFAULT = 184 * 1024
RANKS = {1536: 8, 768: 16}
FEW = 2
"""CTAs of the launches with all checks: each does the same on its own rows."""
PROXY = "fence.proxy.async.shared::cta"
TOGETHER = "bar.warp.sync -1"
WAIT = "griddepcontrol.wait"


# Builds


def budget_for(stages: int, batch: int) -> int:
    """The smallest budget that gives this many stages."""
    return stages * (8192 + 128 * (-(-batch // 8) * 8))


def engine(
    kind: type[RingEngine],
    k: int,
    batch: int,
    stages: int | None = None,
    transport: str = "multicast",
    **options: Any,
) -> RingEngine:
    """An engine with so many stages; None: with its default budget."""
    budget = DEFAULT if stages is None else budget_for(stages, batch)
    return kind(k, budget=budget, transport=transport, **options)


def compiled(kernel: RingEngine, batch: int, slots: int = SLOTS) -> Program:
    """The engine's program for a mailbox of just the batch; only those of the library's own classes are cached."""
    options: dict[str, Any] = {"batch": batch, "mailbox_slots": slots, "mailbox_tokens": batch}
    options["cache"] = "default" if type(kernel) in (OprojUmma, OprojWgmma) else None
    if isinstance(kernel, OprojUmma):
        return build_umma(kernel, target="sm_100a", **options)
    assert isinstance(kernel, OprojWgmma)
    return build_wgmma(kernel, target="sm_90a", **options)


def late_weights(kind: type[RingEngine]) -> type[RingEngine]:
    """An engine that waits for the previous kernel before it asks for its weights."""

    class LateWeights(kind):  # type: ignore[misc, valid-type]
        def load(
            self, x: cute.Tensor, weight: cute.Tensor, shared: RingShared, trigger_after_wait: bool = True
        ) -> None:
            cute.arch.griddepcontrol_wait()
            super().load(x, weight, shared, trigger_after_wait)

    return LateWeights


# PTX


def body(ptx: str) -> list[str]:
    """The statements of the kernel, comments, directives and braces removed."""
    text = re.sub(r"//.*", "", ptx[ptx.index("{", ptx.index(".reqntid")) :])
    statements = [s.strip() for line in text.splitlines() for s in re.split(r"[;{}]|(?<=\w):(?=\s|$)", line)]
    return [s for s in statements if s and not s.startswith(".")]


def described(program: Program) -> list[str]:
    """The statements that matter, in PTX order: ``wait +8 0``, ``mma first``, ``mma``, ``copy``, ..."""
    found: list[str] = []
    predicates: dict[str, str] = {}
    without_vectors = re.sub(r"(wgmma\.mma_async\S*) \{[^}]*\}", r"\1 d", program.ptx)
    for statement in body(without_vectors):
        if match := re.match(r"mov\.pred\s+(%p\d+), (-?\d)", statement):
            predicates[match[1]] = match[2]
        plain = re.sub(r"^@!?%?\w+\s+", "", statement)
        if words := describe(plain, predicates):
            found.append(words)
    return found


def describe(statement: str, predicates: dict[str, str]) -> str:
    """What a statement does, nothing where it does not matter. predicates: values of the constant ones."""
    opcode, last = statement.split()[0], statement.split(", ")[-1]
    offset = re.search(r"\[%\w+\+(\d+)\]", statement)
    at = int(offset[1]) if offset else -1
    names = {
        "mbarrier.try_wait": f"wait +{at} {last}",
        "mbarrier.init": f"init +{at} {last}",
        "mbarrier.arrive": f"release +{at}",
        "cp.async.mbarrier.arrive.noinc": f"arrive +{at}",
        "cp.async.cg": "copy",
        "cp.async.bulk.prefetch": f"prefetch {last}",
        "tcgen05.commit": f"commit +{at}",
        "bar.": re.sub(r"\s+", " ", statement),
    }
    for prefix, words in names.items():
        if opcode.startswith(prefix):
            return words
    if opcode.startswith(("tcgen05.mma", "wgmma.mma_async")):
        accumulate = last if opcode.startswith("tcgen05") else statement.split(", ")[-5]
        return "mma" if predicates[accumulate] == "-1" else "mma first"
    if opcode.startswith("wgmma."):
        return statement.replace(".sync.aligned", "")
    kept = ("fence.", "griddepcontrol.", "tcgen05.", "elect.", "st.shared", "ld.shared")
    return opcode if opcode.startswith((*kept, "multimem", "st.relaxed", "cvt.rn.bf16x2")) else ""


def slot_waits(stages: int) -> list[str]:
    """K = 768, 12 blocks: the waits for full, then for empty slots, from rounds, without the kernel's functions."""
    full = [f"wait +{8 * (b % stages)} {b // stages % 2}" for b in range(12)]
    empty = [f"wait +{8 * (stages + b % stages)} {(b // stages + 1) % 2}" for b in range(stages, 12)]
    return [*full, *empty]


def tile_offsets() -> set[int]:
    """K = 192, M = 8, 2 stages: bytes / 16 from the ring to the tiles of the MMAs, 4 K steps of W and of x."""
    a = {(slot * 9216 + 32 * step) // 16 for slot in range(2) for step in range(4)}
    return a | {offset + 8192 // 16 for offset in a}


def check_line(program: Program, module: str, opcode: str, call: str) -> None:
    """The ``.loc`` of an opcode's first statement names the line of the module where the call stands."""
    lines = program.ptx.splitlines()
    source = programs.source_path(f"oproj_lib/kernels/{module}.py").read_text().splitlines()
    (file,) = re.findall(rf'\.file\s+(\d+)\s+"oproj_lib/kernels/{module}\.py"', program.ptx)
    number = next(i for i, line in enumerate(lines) if opcode in line)
    located = next(line for line in reversed(lines[:number]) if ".loc" in line)
    _, at_file, line, *_ = located.split()
    assert at_file == file and call in source[int(line) - 1]


# Launches


@cache
def inputs(k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x of 64 tokens, W, and the float64 result."""
    x, weight = Problem(RANKS[k], 64).inputs(11)
    return x, weight, reference(x, weight)


def launch(
    kernel: RingEngine,
    batch: int,
    ctas: int | None = None,
    *,
    x: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    checks: bool = False,
    schedule: str | int = "program",
    exact: bool = False,
) -> tuple[list[vgpu.Buffer], Report]:
    """Run on 2 virtual ranks, by default with as many tokens of ``inputs`` as the batch has."""
    own_x, own_weight, _ = inputs(kernel.config.k)
    mailboxes, report, _ = launch_on_vgpu(
        compiled(kernel, batch), own_x[:batch] if x is None else x, own_weight if weight is None else weight, ranks=2,
        ctas=ctas, checks=checks, schedule=schedule, exact=exact,
    )  # fmt: skip
    return mailboxes, report


def bits(mailboxes: list[vgpu.Buffer], batch: int, ctas: int) -> np.ndarray:
    """What rank 0 received in the columns of the first CTAs."""
    return np.array(mailboxes[0].array[SLOT, :batch, : 64 * ctas]).view(np.uint16)


def as_floats(words: np.ndarray) -> np.ndarray:
    """BF16 bits as FP32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def assert_close(words: np.ndarray, expected: np.ndarray) -> None:
    """BF16 bits are within tolerance of the first columns of float64 results."""
    exact = expected[:, : words.shape[1]]
    assert np.linalg.norm(as_floats(words) - exact) / np.linalg.norm(exact) < TOLERANCE


def check_silent(kernel: RingEngine, batch: int, seed: int) -> None:
    """All checks, two schedules: no finding, the same bits, close to float64."""
    mailboxes, report = launch(kernel, batch, FEW, checks=True)
    report.raise_for_findings()
    again, report = launch(kernel, batch, FEW, checks=True, schedule=seed)
    report.raise_for_findings()
    words = bits(mailboxes, batch, FEW)
    np.testing.assert_array_equal(words, bits(again, batch, FEW))
    assert_close(words, inputs(kernel.config.k)[2][:batch])


def check_independence(kind: type[RingEngine], stages: int) -> None:
    """Exact arithmetic: the same bits for M = 1, 9, 33 and 64, for different stages, for both transports."""
    whole = bits(launch(engine(kind, 768, 64, stages), 64, FEW, exact=True)[0], 64, FEW)
    for batch, some_stages, transport in ((1, 1, "multicast"), (9, 12, "unicast:2"), (33, 2, "unicast:2")):
        kernel = engine(kind, 768, batch, some_stages, transport)
        some = bits(launch(kernel, batch, FEW, exact=True)[0], batch, FEW)
        np.testing.assert_array_equal(some, whole[:batch])


def check_found(kernel: RingEngine, batch: int, kind: str, method: object) -> None:
    """A broken kernel is reported: a finding of the kind, at a line of the method."""
    _, report = launch(kernel, batch, FEW, checks=True)
    unwrapped: Any = inspect.unwrap(method)  # type: ignore[arg-type]
    source, first = inspect.getsourcelines(unwrapped)
    file = inspect.getsourcefile(unwrapped) or ""
    places = [(f.source.file, f.source.line) for f in report.findings if f.kind == kind and f.source]
    assert any(file.endswith(name) and first <= line < first + len(source) for name, line in places), (
        report.findings
    )


def check_marked(kind: type) -> None:
    """The wrong line of a broken kernel is marked."""
    text = textwrap.dedent(inspect.getsource(kind))
    assert text.count("# the mistake") == 1
