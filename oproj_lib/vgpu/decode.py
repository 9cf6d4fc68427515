"""Instructions -> operations: operands resolved to register rows, control flow to instruction indices.

Each semantic module registers a *builder* per opcode with `@opcode("add", ...)`. A builder receives a `Form`,
consumes every qualifier, and returns the function that the scheduler calls with the launch and the lanes that
execute. A qualifier that nobody consumed is an error naming the PTX line, so nothing is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .registers import CLASS_DTYPE, DTYPES, Row, allocate_rows, live_intervals, register_class
from .syntax import (
    TYPE_BYTES,
    Addr,
    Entry,
    Imm,
    Instruction,
    MalformedPTX,
    Operand,
    Reg,
    Sym,
    UnsupportedPTX,
    Variable,
    Vec,
)

if TYPE_CHECKING:
    from .launch import Lanes, Launch

Execute = Callable[["Launch", "Lanes"], Any]
Reader = Callable[["Launch", Any], Any]
Writer = Callable[["Launch", Any, Any], None]

SPECIAL_REGISTERS = {
    **{f"%{name}.{axis}": "u32" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"},
    **{f"%{name}": "u32" for name in ("laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid")},
    **{f"%lanemask_{name}": "u32" for name in ("eq", "lt", "le", "gt", "ge")},
    **{f"%cluster_{name}": "u32" for name in ("ctarank", "nctarank")},
    **{f"%{name}.{axis}": "u32" for name in ("clusterid", "nclusterid", "cluster_ctaid",
    "cluster_nctaid") for axis in "xyz"},
    "%clock": "u32", "%clock64": "u64", "%globaltimer": "u64", "%dynamic_smem_size": "u32", "%total_smem_size": "u32",
}  # fmt: skip

RELAXED_TYPES = ("ld", "ldu", "st", "cvt", "atom", "red")

Access = tuple[int, list[str], list[str]]  # instruction, registers read, registers written
BUILDERS: dict[str, Callable[[Form], Execute]] = {}


def opcode(*names: str) -> Callable[[Callable[[Form], Execute]], Callable[[Form], Execute]]:
    """Registers the builder of one or more opcodes (the part before the first dot)."""

    def register(builder: Callable[[Form], Execute]) -> Callable[[Form], Execute]:
        for name in names:
            if name in BUILDERS:
                raise RuntimeError(f"two builders for {name}")
            BUILDERS[name] = builder
        return builder

    return register


@dataclass
class Op:
    """One decoded instruction."""

    index: int
    instruction: Instruction
    execute: Execute
    reads: tuple[Row, ...]
    writes: tuple[Row, ...]
    guard: Row | None
    guard_negated: bool
    control: str = "next"  # "next", "branch", "indexed", "exit", "barrier", "warp", "wait", "grid wait"
    targets: tuple[int, ...] = ()
    tracks_poison: bool = False  # the operation handles undefined data itself
    address_rows: tuple[Row, ...] = ()
    member_mask: Reader | None = None  # which lanes of the warp must execute this together
    strong: bool = False  # a strong memory operation: volatile, relaxed, atomic, ...


@dataclass
class Code:
    """An entry, decoded."""

    entry: Entry
    ops: list[Op]
    row_counts: dict[str, int]
    shared_offsets: dict[str, int]
    static_shared_bytes: int
    local_offsets: dict[str, int]
    local_bytes: int
    parameter_offsets: dict[str, int]
    parameter_bytes: int
    module_variables: list[Variable]
    join_points: frozenset[int] = frozenset()
    shared_granule: int = 16  # bytes: the smallest shared-memory access in the program
    shared_atomics: bool = False
    matrix_tiles: bool = False  # tensor-core operands are described by descriptors


@dataclass
class Form:
    """One instruction while it is being decoded."""

    instruction: Instruction
    decoder: Decoder
    mods: list[str] = field(default_factory=list)
    control: str = "next"
    targets: tuple[int, ...] = ()
    tracks_poison: bool = False
    reads: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    address_registers: list[str] = field(default_factory=list)
    member_mask: Reader | None = None
    strong: bool = False
    is_tensor_load: bool = False  # its registers arrive at the next wait
    waits_for_loads: bool = False
    is_async_mma: bool = False
    waits_for_mmas: bool = False
    fragments: tuple[str, ...] = ()  # registers that a wgmma reads and writes beside the warp

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.instruction.operands

    def take(self, *names: str) -> str | None:
        """Removes and returns the first qualifier that is one of `names`."""
        for mod in self.mods:
            if mod in names:
                self.mods.remove(mod)
                return mod
        return None

    def take_type(self, *allowed: str) -> str:
        """Removes and returns the last qualifier, which must be a type (one of `allowed`, if given)."""
        if not self.mods or self.mods[-1] not in DTYPES or (allowed and self.mods[-1] not in allowed):
            names = ", ".join("." + name for name in allowed) or "a type"
            raise self.unsupported(f"expected {names} as the last qualifier")
        return self.mods.pop()

    def finish(self, *, operands: int | tuple[int, ...] | None = None) -> None:
        """Every qualifier must have been understood, and the number of operands be right."""
        if self.mods:
            raise self.unsupported(f"qualifier .{self.mods[0]} of {self.instruction.op} is not modelled")
        if operands is not None:
            allowed = (operands,) if isinstance(operands, int) else operands
            if len(self.operands) not in allowed:
                raise self.malformed(
                    f"{self.instruction.op} takes {' or '.join(map(str, allowed))} operands, not {len(self.operands)}"
                )

    def unsupported(self, what: str) -> UnsupportedPTX:
        return UnsupportedPTX(what, self.instruction.line, self.instruction.text)

    def malformed(self, what: str) -> MalformedPTX:
        return MalformedPTX(what, self.instruction.line, self.instruction.text)

    # -- operands -----------------------------------------------------------------------------------------------

    def row(self, operand: Operand, *, write: bool = False) -> Row:
        if not isinstance(operand, Reg):
            raise self.malformed(f"expected a register, not {operand}")
        (self.writes if write else self.reads).append(operand.name)
        return self.decoder.row(operand.name, self)

    def read(self, operand: Operand, type_name: str) -> Reader:
        """A function (launch, selection) -> array (or scalar) of the type's numpy dtype."""
        dtype = DTYPES[type_name]
        if isinstance(operand, Imm):
            value = self._immediate(operand, type_name, dtype)
            return lambda launch, sel: value
        if isinstance(operand, Sym | Addr):
            return self._symbol(operand, dtype)
        if not isinstance(operand, Reg):
            raise self.malformed(f"cannot read {operand} as .{type_name}")
        if operand.name in SPECIAL_REGISTERS:
            return self._special(operand.name, dtype)
        if operand.name.startswith("!"):
            row = self.row(Reg(operand.name[1:]))
            if row.kind != "p" or type_name != "pred":
                raise self.malformed("`!` negates a predicate, where a predicate is read")
            return lambda launch, sel: ~launch.regs.files["p"][row.index, sel]
        row = self.row(operand)
        self._check_type(operand.name, type_name)
        return self._register_reader(row, type_name, dtype)

    def _check_type(self, name: str, type_name: str) -> None:
        """Operand types must agree with the instruction's (PTX ISA, "Instruction Operands: Operand Type
        Information"). Only ld, st and cvt may use wider registers ("Operand Size Exceeding Instruction-Type
        Size")."""
        if self.instruction.op in RELAXED_TYPES:
            return
        declared = self.decoder.entry.registers[name]
        if TYPE_BYTES[declared] != TYPE_BYTES[type_name] or not agree(declared, type_name):
            raise self.malformed(f"register {name} is .{declared} where .{type_name} belongs")

    def _register_reader(self, row: Row, type_name: str, dtype: np.dtype) -> Reader:
        kind, index = row.kind, row.index
        held = CLASS_DTYPE[kind]
        if held == dtype:
            return lambda launch, sel: launch.regs.files[kind][index, sel]
        if (kind == "p") != (dtype.kind == "b"):
            raise self.malformed("a predicate where a value belongs, or the reverse")
        if held.itemsize == dtype.itemsize:
            return lambda launch, sel: launch.regs.files[kind][index, sel].view(dtype)
        if held.itemsize > dtype.itemsize:  # PTX: "source operands may be wider than the type"
            narrow = np.dtype(f"uint{8 * dtype.itemsize}")
            return lambda launch, sel: launch.regs.files[kind][index, sel].astype(narrow).view(dtype)
        raise self.malformed(f"a {8 * held.itemsize}-bit register read as .{type_name}")

    def _immediate(self, operand: Imm, type_name: str, dtype: np.dtype) -> Any:
        if type_name == "pred":
            return np.bool_(operand.value)
        is_float = type_name in ("f16", "bf16", "f32", "f64", "tf32")
        if operand.float_bits and not is_float and type_name != f"b{operand.float_bits}":
            raise self.malformed(f"a floating-point literal where .{type_name} belongs")
        if (not operand.float_bits and is_float) or type_name in ("f16", "bf16"):
            raise self.malformed(f"a literal that is not a .{type_name}")
        if operand.float_bits:
            literal = np.array(operand.value, f"uint{operand.float_bits}")
            return (
                literal.view(f"float{operand.float_bits}").astype(dtype)[()]
                if is_float
                else literal.view(dtype)[()]
            )
        bits = 8 * dtype.itemsize
        return np.array(operand.value & ((1 << bits) - 1), f"uint{bits}").view(dtype)[()]

    def _symbol(self, operand: Sym | Addr, dtype: np.dtype) -> Reader:
        base = operand if isinstance(operand, Sym) else operand.base
        offset = 0 if isinstance(operand, Sym) else operand.offset
        if not isinstance(base, Sym):
            raise self.malformed("expected a variable's name")
        name = base.name
        if name == "WARP_SZ":
            return lambda launch, sel: dtype.type(32)
        self.decoder.space_of(name, self)
        return lambda launch, sel: dtype.type(launch.address_of_variable(name) + offset)

    def _special(self, name: str, dtype: np.dtype) -> Reader:
        held = DTYPES[SPECIAL_REGISTERS[name]]

        def read(launch: Launch, sel: Any) -> Any:
            value = launch.special(name)
            value = value[sel] if isinstance(value, np.ndarray) and value.ndim else value
            return value.view(dtype) if held.itemsize == dtype.itemsize else value.astype(dtype)

        return read

    def write(self, operand: Operand, type_name: str) -> Writer:
        """A function (launch, selection, value) that writes the register, extending as the type says."""
        dtype = DTYPES[type_name]
        if isinstance(operand, Sym) and operand.name == "_":
            return lambda launch, sel, value: None
        row = self.row(operand, write=True)
        assert isinstance(operand, Reg)
        self._check_type(operand.name, type_name)
        kind, index = row.kind, row.index
        held = CLASS_DTYPE[kind]
        if (kind == "p") != (dtype.kind == "b"):
            raise self.malformed("a predicate where a value belongs, or the reverse")
        if held.itemsize < dtype.itemsize:
            raise self.malformed(f"a {8 * held.itemsize}-bit register cannot hold .{type_name}")
        if held.itemsize == dtype.itemsize:

            def write(launch: Launch, sel: Any, value: Any) -> None:
                launch.regs.files[kind][index, sel] = _bits(value, dtype, held)

            return write
        wide = np.dtype(f"int{8 * held.itemsize}") if dtype.kind == "i" else held
        narrow = dtype if dtype.kind == "i" else np.dtype(f"uint{8 * dtype.itemsize}")

        def write_extended(launch: Launch, sel: Any, value: Any) -> None:
            launch.regs.files[kind][index, sel] = _bits(value, dtype, narrow).astype(wide).view(held)

        return write_extended

    def vector(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.items if isinstance(operand, Vec) else (operand,)

    def address(self, operand: Operand) -> Reader:
        """`[base + offset]` -> int64 addresses (an array, or a scalar where all lanes use one address)."""
        if not isinstance(operand, Addr):
            raise self.malformed(f"expected an address in brackets, not {operand}")
        offset = operand.offset
        if operand.base is None:
            return lambda launch, sel: np.int64(offset)
        if isinstance(operand.base, Sym):
            return self._symbol(operand, np.dtype(np.int64))
        row = self.row(operand.base)
        self.address_registers.append(operand.base.name)
        if row.kind == "w":
            return lambda launch, sel: launch.regs.files["w"][row.index, sel].astype(np.int64) + offset
        if row.kind != "d":
            raise self.malformed("an address register has 32 or 64 bits")
        return lambda launch, sel: launch.regs.files["d"][row.index, sel].view(np.int64) + offset


def agree(declared: str, type_name: str) -> bool:
    """Whether a register of one type may appear where another is expected (sizes aside)."""
    if declared == type_name or "b" in (declared[0], type_name[0]):
        return True
    return declared[0] in "us" and type_name[0] in "us"


def _bits(value: Any, dtype: np.dtype, held: np.dtype) -> Any:
    array = np.asarray(value)
    if array.dtype != dtype:
        if array.dtype == held:
            return array
        raise TypeError(f"semantics produced {array.dtype} for a register of type {dtype}")
    return array if array.dtype == held else array.view(held)


class Decoder:
    """Decodes one entry. Two passes: the first collects register accesses, the second knows the rows."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.rows: dict[str, Row] | None = None
        self.spaces = {
            v.name: v.space for v in [*entry.parent_variables, *entry.variables, *entry.parameters]
        }
        self.smallest_shared = 16
        self.shared_atomics = False
        self.matrix_tiles = False
        self.fragments: frozenset[str] = frozenset()  # of all wgmmas

    def row(self, name: str, form: Form) -> Row:
        kind = self.entry.registers.get(name)
        if kind is None:
            raise form.malformed(f"register {name} is not declared")
        if TYPE_BYTES[kind] == 16:
            raise form.unsupported("128-bit registers are not modelled")
        return Row(register_class(kind), 0) if self.rows is None else self.rows[name]

    def space_of(self, name: str, form: Form) -> str:
        if name not in self.spaces:
            raise form.malformed(f"variable {name} is not declared")
        return self.spaces[name]

    def label(self, operand: Operand, form: Form) -> int:
        if not isinstance(operand, Sym) or operand.name not in self.entry.labels:
            raise form.malformed(f"unknown label {operand}")
        return self.entry.labels[operand.name]

    def build(self, instruction: Instruction) -> tuple[Form, Execute]:
        form = Form(instruction, self, list(instruction.mods))
        if instruction.guard is not None:
            self.row(instruction.guard, form)
        builder = BUILDERS.get(instruction.op)
        if builder is None:
            raise form.unsupported(f"instruction {instruction.op} is not modelled")
        try:
            return form, builder(form)
        except IndexError:
            raise form.malformed("an operand is missing") from None

    def decode(self) -> Code:
        # A kernel may end without ret (or with a guarded one): falling off the end is an exit.
        last = self.entry.instructions[-1].line if self.entry.instructions else self.entry.line
        instructions = [*self.entry.instructions, Instruction("exit", (), None, False, last, "exit", None)]
        first_pass = [self.build(instruction)[0] for instruction in instructions]
        back_edges, joins = [], set()
        accesses: list[Access] = []
        for index, form in enumerate(first_pass):
            reads = form.reads + ([form.instruction.guard] if form.instruction.guard else [])
            if (
                form.instruction.guard
            ):  # lanes whose guard is false keep the old value: the write does not end a life
                reads = reads + form.writes
            accesses.append((index, reads, form.writes))
            for target in form.targets:
                joins.add(target)
                if target <= index:
                    back_edges.append((index, target))
        accesses = self._keep_until_waited(first_pass, accesses)
        self.fragments = frozenset(name for form in first_pass for name in form.fragments)
        classes = {
            name: register_class(kind) for name, kind in self.entry.registers.items() if TYPE_BYTES[kind] < 16
        }
        self.rows, counts = allocate_rows(live_intervals(accesses, back_edges), classes)
        ops = [self._op(index, *self.build(instruction)) for index, instruction in enumerate(instructions)]
        return self._code(ops, counts, joins)

    @staticmethod
    def _keep_until_waited(forms: list[Form], accesses: list[Access]) -> list[Access]:
        """Registers that an asynchronous instruction delivers later stay reserved until the wait that
        delivers them."""
        owed: dict[bool, set[str]] = {True: set(), False: set()}
        kept = []
        for form, (index, reads, writes) in zip(forms, accesses, strict=True):
            if form.is_tensor_load or form.is_async_mma:
                owed[form.is_tensor_load] |= set(writes)
            for is_load, waits in ((True, form.waits_for_loads), (False, form.waits_for_mmas)):
                if waits:
                    reads = [*reads, *owed[is_load]]
                    owed[is_load] = set()
            kept.append((index, reads, writes))
        if owed[True] or owed[False]:
            index, reads, writes = kept[-1]
            kept[-1] = (index, [*reads, *owed[True], *owed[False]], writes)
        return kept

    def _op(self, index: int, form: Form, execute: Execute) -> Op:
        instruction = form.instruction
        guard = self.row(instruction.guard, form) if instruction.guard else None
        if guard is not None and guard.kind != "p":
            raise form.malformed(f"the guard {instruction.guard} is not a predicate")
        touched = self.fragments.intersection([*form.reads, *form.writes])
        if touched and not form.fragments:
            execute = touching(execute, tuple(sorted(touched)))
        return Op(
            index, instruction, execute,
            tuple(self.row(name, form) for name in dict.fromkeys(form.reads)),
            tuple(self.row(name, form) for name in dict.fromkeys(form.writes)),
            guard, instruction.guard_negated, form.control, form.targets, form.tracks_poison,
            tuple(self.row(name, form) for name in form.address_registers),
            form.member_mask, form.strong,
        )  # fmt: skip

    def _code(self, ops: list[Op], counts: dict[str, int], joins: set[int]) -> Code:
        everything = [*self.entry.parent_variables, *self.entry.variables]
        shared, shared_bytes = lay_out([v for v in everything if v.space == "shared" and not v.extern])
        for variable in everything:  # dynamic shared memory begins where the static part ends
            if variable.space == "shared" and variable.extern:
                shared[variable.name] = -(-shared_bytes // max(variable.align, 16)) * max(variable.align, 16)
        local, local_bytes = lay_out([v for v in everything if v.space == "local"])
        parameters, parameter_bytes = lay_out(self.entry.parameters)
        module = [v for v in everything if v.space in ("global", "const")]
        return Code(
            self.entry, ops, counts, shared, shared_bytes, local, local_bytes, parameters, parameter_bytes, module,
            frozenset(joins), self.smallest_shared, self.shared_atomics,
            self.matrix_tiles,
        )  # fmt: skip


def touching(execute: Execute, names: tuple[str, ...]) -> Execute:
    """`execute` of an instruction, other than a wgmma, that reads or writes registers of wgmmas."""

    def run(launch: Launch, lanes: Lanes) -> None:
        execute(launch, lanes)
        launch.multiplies.touch(launch.op, lanes, names)

    return run


def lay_out(variables: list[Variable]) -> tuple[dict[str, int], int]:
    """Variables one after another, each at its alignment: (offsets, total bytes)."""
    offsets, end = {}, 0
    for variable in variables:
        end = -(-end // variable.align) * variable.align
        offsets[variable.name] = end
        end += variable.size
    return offsets, end
