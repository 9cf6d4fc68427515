"""Whether a CTA fits on a multiprocessor beside another kernel's: registers, threads, shared memory.

Arithmetic with documented sizes, not a measurement. Sources: CUDA Programming Guide, "Technical Specifications per
Compute Capability" (9.0 and 10.0 agree in all that stands here); NVIDIA Hopper Tuning Guide, "Occupancy" and
"Unified Shared Memory/L1/Texture Cache" (carve-outs, the 1 KiB that each CTA costs); the register allocation unit of
256 per warp is the occupancy calculator's.
"""

from __future__ import annotations

from dataclasses import dataclass

from oproj_lib.cubin import resources
from oproj_lib.program import Program

REGISTERS, THREADS, CTAS = 65_536, 2_048, 32
"""Of one multiprocessor."""
PARTITIONS = 4
"""Sub-partitions: each has a quarter of the registers, and warps of a CTA are dealt to them in turn."""
ALLOCATION = 8
"""Registers per thread are rounded up to this: 256 per warp."""
CARVEOUTS_KIB = (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)
"""What the shared memory of a multiprocessor can be set to; the rest of 256 KiB is L1."""
SYSTEM_KIB = 1
"""Shared memory that the system keeps for itself, per CTA."""
WARP = 32


@dataclass(frozen=True)
class Needs:
    """What one CTA of a kernel takes. registers: per thread; shared_bytes: static and dynamic.

    Raises ValueError for sizes that no CTA has.
    """

    name: str
    threads: int
    registers: int
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= 1024 or not 1 <= self.registers <= 255 or self.shared_bytes < 0:
            raise ValueError(
                f"{self.name}: {self.threads} threads, {self.registers} registers, {self.shared_bytes} bytes; a CTA "
                "has 1 to 1024 threads of 1 to 255 registers, and no negative memory"
            )
        if self.register_total > REGISTERS:
            raise ValueError(
                f"{self.name}: {self.warps} warps x {self.warp_registers} registers = {self.register_total}, a "
                f"multiprocessor has {REGISTERS}"
            )

    @property
    def warps(self) -> int:
        return -(-self.threads // WARP)

    @property
    def warp_registers(self) -> int:
        """Registers that one warp takes, rounded up."""
        return -(-self.registers // ALLOCATION) * ALLOCATION * WARP

    @property
    def register_total(self) -> int:
        """Registers of the CTA."""
        return self.warps * self.warp_registers

    @property
    def partition_registers(self) -> int:
        """Registers of the sub-partition that has most of its warps."""
        return -(-self.warps // PARTITIONS) * self.warp_registers

    @property
    def shared_kib(self) -> float:
        """Shared memory with the system's part; a CTA without any takes that part as well."""
        return self.shared_bytes / 1024 + SYSTEM_KIB

    @property
    def registers_left(self) -> int:
        """Registers that the multiprocessor has for others."""
        return REGISTERS - self.register_total


@dataclass(frozen=True)
class Beside:
    """Two CTAs on one multiprocessor. problems: one sentence each; empty where they fit."""

    first: Needs
    second: Needs
    carveout_kib: int
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems


def beside(first: Needs, second: Needs, carveout_kib: int) -> Beside:
    """Whether a CTA of ``second`` can start while one of ``first`` runs on the same multiprocessor.

    carveout_kib: the shared memory that ``first`` has set the multiprocessor to; it stays so until that is empty.
    Raises ValueError for a carve-out that does not exist, or does not even hold ``first``.
    """
    if carveout_kib not in CARVEOUTS_KIB or (first.shared_bytes and first.shared_kib > carveout_kib):
        raise ValueError(
            f"carveout_kib = {carveout_kib}: choose one of {', '.join(map(str, CARVEOUTS_KIB))} that holds the "
            f"{first.shared_kib:g} KiB of {first.name}"
        )
    problems = []
    share = REGISTERS // PARTITIONS
    needed = first.partition_registers + second.partition_registers
    if needed > share:
        problems.append(
            f"registers: {first.partition_registers:,} + {second.partition_registers:,} = {needed:,} of a "
            f"sub-partition's {share:,}"
        )
    threads = (first.warps + second.warps) * WARP
    if threads > THREADS:
        problems.append(f"threads: {threads:,} of {THREADS:,}")
    shared = first.shared_kib + second.shared_kib
    if shared > carveout_kib:
        problems.append(
            f"shared memory: {first.shared_kib:g} + {second.shared_kib:g} = {shared:g} KiB of a carve-out of "
            f"{carveout_kib}"
        )
    return Beside(first, second, carveout_kib, tuple(problems))


def needs_of(program: Program, name: str) -> Needs:
    """What a CTA of a compiled program takes. Raises ValueError for a program without machine code."""
    if not program.cubin:
        raise ValueError(f"{program.name} has no cubin: it was changed after it was compiled")
    used = resources(program.cubin, program.entry)
    x, y, z = program.block
    return Needs(name, x * y * z, used.registers, used.static_shared_bytes + program.dynamic_shared_bytes)
