"""What a launch says: findings (something is wrong, where, in which Python line) and counters (no errors,
just facts)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .syntax import Instruction, SourceLine
from .trace import Trace


@dataclass
class Finding:
    """One kind of mistake in one source line; `cta`, `warp`, `lane` and the PTX are the first that made it,
    `count` how often."""

    kind: str
    message: str
    source: SourceLine | None
    ptx_line: int
    ptx: str
    cta: int
    warp: int
    lane: int
    count: int = 1

    def __str__(self) -> str:
        where = self.source.chain() if self.source else "no source line (compile with line information)"
        place = f"CTA {self.cta}, warp {self.warp}, lane {self.lane}" + (
            f", and {self.count - 1:,} more times" if self.count > 1 else ""
        )
        return f"{self.kind}: {self.message}\n    at {where}  [PTX line {self.ptx_line}: {self.ptx}]\n    {place}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain strings and numbers."""
        return {**asdict(self), "source": self.source.chain() if self.source else None}


class FindingsError(RuntimeError):
    """Raised by `Report.raise_for_findings`."""


@dataclass
class InstructionCount:
    """What one memory instruction moved."""

    executions: int = 0  # warps that executed it
    bytes: int = 0
    sectors: int = 0  # 32-byte sectors touched (global)
    wavefronts: int = 0  # passes that shared memory needed
    ideal_wavefronts: int = 0  # passes without bank conflicts


@dataclass
class Counters:
    """Totals of one launch. `by_line` maps a PTX line to its share of the memory traffic,
    `thread_instructions_by_line` to how many threads executed it."""

    thread_instructions: int = 0
    warp_instructions: int = 0
    matrix_instructions: int = 0  # warp-wide mma.sync executed
    tensor_instructions: int = 0  # tcgen05.mma and wgmma executed
    barriers: int = 0  # barrier phases completed
    global_load_bytes: int = 0
    global_store_bytes: int = 0
    global_sectors: int = 0
    shared_load_bytes: int = 0
    shared_store_bytes: int = 0
    shared_wavefronts: int = 0
    bank_conflicts: int = 0  # wavefronts beyond the ideal
    async_copy_bytes: int = 0
    multicast_store_bytes: int = 0
    prefetch_bytes: int = 0
    by_line: dict[int, InstructionCount] = field(default_factory=dict)
    thread_instructions_by_line: dict[int, int] = field(default_factory=dict)

    def line(self, instruction: Instruction) -> InstructionCount:
        return self.by_line.setdefault(instruction.line, InstructionCount())

    def totals(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if isinstance(value, int)}


@dataclass
class Report:
    """The result of one launch."""

    entry: str
    findings: tuple[Finding, ...]
    counters: Counters
    seconds: float
    arithmetic: str  # "exact" (tensor cores bit for bit) or "fp32"
    schedule: str
    checks: bool
    trace: Trace | None = None  # of one CTA, if the launch asked for it

    @property
    def ok(self) -> bool:
        return not self.findings

    def raise_for_findings(self) -> None:
        """Raises FindingsError that lists every finding, if there are any."""
        if self.findings:
            raise FindingsError("\n\n".join(str(finding) for finding in self.findings))

    def __str__(self) -> str:
        rate = self.counters.thread_instructions / self.seconds / 1e6 if self.seconds else 0.0
        head = (
            f"{self.entry}: {self.counters.thread_instructions:,} "
            f"thread-instructions in {self.seconds:.3f} s ({rate:.0f} M/s)"
        )
        return (
            "\n".join([head, *(str(finding) for finding in self.findings)])
            if self.findings
            else head + ", no findings"
        )
