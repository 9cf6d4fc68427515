"""What PTX text becomes: operands, instructions, variables, entries. Plain data, produced by `ptx.parse`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath


class UnsupportedPTX(ValueError):
    """An instruction, qualifier or directive that the virtual GPU does not model; names the PTX line."""

    def __init__(self, what: str, line: int, text: str) -> None:
        super().__init__(f"PTX line {line}: {what}: `{text.strip()}`")
        self.line = line


class MalformedPTX(ValueError):
    """Text that is not PTX, or breaks PTX's own rules."""

    def __init__(self, what: str, line: int, text: str = "") -> None:
        super().__init__(f"PTX line {line}: {what}" + (f": `{text.strip()}`" if text else ""))
        self.line = line


@dataclass(frozen=True)
class SourceLine:
    """A place in the kernel's source, from `.loc`; `inlined_at` is the call that brought it here."""

    file: str
    line: int
    column: int = 0
    inlined_at: SourceLine | None = None

    def __str__(self) -> str:
        return f"{PurePosixPath(self.file).name}:{self.line}"

    def chain(self) -> str:
        """`primitives.py:40 <- producer.py:210`: the line, then the lines that inlined it."""
        return str(self) if self.inlined_at is None else f"{self} <- {self.inlined_at.chain()}"


@dataclass(frozen=True)
class Reg:
    """A register, `%r1`, or a special register, `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Imm:
    """A literal. Integers keep their sign; for floats (`0f3F800000`) `value` is the bit pattern, so NaNs
    keep theirs."""

    value: int
    float_bits: int = 0  # 0: an integer; 32 or 64: the bit pattern of a float of that width


@dataclass(frozen=True)
class Sym:
    """A variable, label or function name."""

    name: str


@dataclass(frozen=True)
class Addr:
    """`[base + offset]`; base is a register, a variable, or None for an absolute address."""

    base: Reg | Sym | None
    offset: int


@dataclass(frozen=True)
class Vec:
    """`{a, b, c, d}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`d|p`: two destinations."""

    first: Operand
    second: Operand


Operand = Reg | Imm | Sym | Addr | Vec | Pair


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    guard: str | None
    guard_negated: bool
    line: int
    text: str
    source: SourceLine | None

    @property
    def op(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def mods(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])


@dataclass(frozen=True)
class Variable:
    """A `.global`, `.const`, `.shared`, `.local` or `.param` variable."""

    name: str
    space: str
    align: int
    size: int  # bytes; 0 for an `extern` array whose size the launch decides
    init: bytes | tuple[tuple[int, str], ...] = b""
    type: str = "b8"
    extern: bool = False


@dataclass
class Entry:
    """One `.entry` function."""

    name: str
    line: int
    parameters: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # name -> type without the dot
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    required_threads: tuple[int, int, int] | None = None
    max_threads: int | None = None
    parent_variables: list[Variable] = field(default_factory=list)


@dataclass
class PTXFile:
    version: str
    target: str
    entries: dict[str, Entry]
    variables: list[Variable]


TYPE_BYTES = {
    **dict.fromkeys(("b8", "u8", "s8", "pred"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 8),
    "b128": 16,
}
