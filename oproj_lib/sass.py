"""What ptxas made of a kernel: registers, stack, and whether the weight preload is still a preload.

A preload that looks right in Python and in the PTX can be gone in the machine code: ptxas sinks non-coherent
loads (``ld.global.nc``) below ``griddepcontrol.wait``. ``check_sass`` disassembles the cubin (nvdisasm, no
GPU needed) and counts the weight loads on either side of the wait.

Sources: CUDA Binary Utilities ("nvdisasm", "Instruction Set Reference"): LDG = global load, LDGSTS =
``cp.async``, ACQBULK = ``griddepcontrol.wait``, PREEXIT = ``griddepcontrol.launch_dependents``, LDL / STL =
local memory, that is spills. The ELF format is the System V gABI's; section ``.nv.info`` holds NVIDIA's
attributes, each (format, attribute, size or value).
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from oproj_lib.cubin import resources
from oproj_lib.kernels.configuration import REGISTER_LIMIT, SHARED_LIMIT, Configuration
from oproj_lib.program import Program

WAIT = "ACQBULK"
TRIGGER = "PREEXIT"
ASYNC_COPY = "LDGSTS"
NVDISASM_PACKAGE = "nvidia-cuda-nvdisasm"

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?P<text>[^;]*);")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction: its address in bytes, predicate ("" or "@P0", ...), opcode with modifiers, and
    operands."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]


@dataclass(frozen=True)
class SassReport:
    """What the machine code of one kernel needs and does. Counts are instructions, sizes bytes."""

    kernel: str
    registers: int
    stack_bytes: int
    spills: int
    """LDL and STL instructions."""
    shared_bytes: int
    """Static shared memory of the cubin plus the dynamic bytes of the launch."""
    weight_loads_before_wait: int
    """16-byte LDG and LDGSTS above the PDL wait."""
    weight_loads_after_wait: int
    """Expected weight loads that are missing above the wait."""
    expected_weight_loads: int
    waits: int
    triggers: int
    instructions: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise RuntimeError with every problem, if there is one."""
        if self.problems:
            raise RuntimeError(f"machine code of {self.kernel}: " + "; ".join(self.problems))


def find_nvdisasm() -> Path:
    """The nvdisasm of the nvidia-cuda-nvdisasm wheel.

    Raises FileNotFoundError, saying what to install, when the wheel or its program is missing.
    """
    try:
        files = importlib.metadata.files(NVDISASM_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError(f"nvdisasm is missing: pip install {NVDISASM_PACKAGE}") from error
    for file in files:
        if file.name in ("nvdisasm", "nvdisasm.exe"):
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"package {NVDISASM_PACKAGE} is installed without its nvdisasm program: reinstall it"
    )


def disassemble(cubin: bytes) -> dict[str, tuple[Instruction, ...]]:
    """Machine code by kernel, in address order.

    Raises FileNotFoundError without nvdisasm, ValueError for what it cannot read.
    """
    with tempfile.TemporaryDirectory(prefix="oproj-") as scratch:
        path = Path(scratch, "kernel.cubin")
        path.write_bytes(cubin)
        result = subprocess.run(
            [str(find_nvdisasm()), "--print-code", "--no-dataflow", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        raise ValueError(f"nvdisasm cannot read this cubin of {len(cubin)} bytes: {result.stderr.strip()}")
    kernels: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    for line in result.stdout.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.([^,\s]+)", line)
        if section:
            current = kernels.setdefault(section[1], [])
        match = _INSTRUCTION.match(line)
        if match and current is not None:
            words = match["text"].strip().split(None, 1)
            predicate = words.pop(0) if words[0].startswith("@") else ""
            if predicate:
                words = words[0].split(None, 1)
            operands = words[1] if len(words) > 1 else ""
            current.append(Instruction(int(match[1], 16), predicate, words[0], operands))
    return {name: tuple(code) for name, code in kernels.items()}


def check_sass(program: Program) -> SassReport:
    """Read a producer's machine code and say what is wrong with it, if anything.

    Wrong is: a weight load that belongs before the PDL wait and is not there, a number of waits or triggers
    other than one, local memory, more registers than the object said, more shared memory than a block has.

    Raises FileNotFoundError without nvdisasm, ValueError for a program that is no producer or whose cubin
    cannot be read.
    """
    if program.config.get("engine") != "producer":
        raise ValueError(
            f"check_sass knows producers, {program.name} has engine {program.config.get('engine')!r}"
        )
    values = {field: int(program.config[field]) for field in ("k", "staged_blocks", "rows", "group_tiles")}
    config = Configuration(**values, direct=bool(program.config["direct"]))
    plan = config.plan(int(program.config["batch"]))
    code = disassemble(program.cubin)[program.entry]
    used = resources(program.cubin, program.entry)
    waits = [instruction.address for instruction in code if instruction.name == WAIT]
    first_wait = min(waits, default=-1)
    preloads = {
        kind: sum(
            1 for i in code if i.name == kind and "128" in i.opcode.split(".") and i.address < first_wait
        )
        for kind in ("LDG", ASYNC_COPY)
    }
    expected = {
        "LDG": 2 * config.register_blocks * config.rows,
        ASYNC_COPY: 2 * config.staged_blocks * config.rows,
    }
    spills = sum(1 for i in code if i.name in ("LDL", "STL"))
    triggers = sum(1 for i in code if i.name == TRIGGER)
    shared = used.static_shared_bytes + program.dynamic_shared_bytes
    problems = [
        f"{preloads[kind]} of {count} 16-byte {kind} weight loads stand before {WAIT}"
        for kind, count in expected.items()
        if preloads[kind] != count
    ]
    if len(waits) != 1:
        problems.append(f"{len(waits)} {WAIT} (griddepcontrol.wait), expected 1")
    if triggers != 1:
        problems.append(f"{triggers} {TRIGGER} (griddepcontrol.launch_dependents), expected 1")
    if spills or used.stack_bytes:
        problems.append(
            f"{spills} local-memory instructions, {used.stack_bytes} bytes of stack per thread, expected none"
        )
    if used.registers > REGISTER_LIMIT:
        problems.append(f"{used.registers} registers per thread, the launch has {REGISTER_LIMIT}")
    if program.dynamic_shared_bytes != plan.shared_bytes:
        problems.append(
            f"{program.dynamic_shared_bytes} dynamic shared bytes, the plan says {plan.shared_bytes}"
        )
    if shared > SHARED_LIMIT:
        problems.append(
            f"{used.static_shared_bytes} static + {program.dynamic_shared_bytes} dynamic shared bytes exceed "
            f"{SHARED_LIMIT}"
        )
    return SassReport(
        kernel=program.entry,
        registers=used.registers,
        stack_bytes=used.stack_bytes,
        spills=spills,
        shared_bytes=shared,
        weight_loads_before_wait=sum(preloads.values()),
        weight_loads_after_wait=max(0, sum(expected.values()) - sum(preloads.values())),
        expected_weight_loads=sum(expected.values()),
        waits=len(waits),
        triggers=triggers,
        instructions=len(code),
        problems=tuple(problems),
    )
