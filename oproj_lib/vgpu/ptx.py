"""PTX text -> instructions, with the source line each one came from.

This module knows the *grammar* of PTX (PTX ISA, "Syntax" and "Instruction Operands"): statements, operands,
directives. It does not know what any instruction means: `decode` resolves operands; `alu`, `access`, `warp`
and others give the semantics.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace

from .syntax import (
    TYPE_BYTES,
    Addr,
    Entry,
    Imm,
    Instruction,
    MalformedPTX,
    Operand,
    Pair,
    PTXFile,
    Reg,
    SourceLine,
    Sym,
    UnsupportedPTX,
    Variable,
    Vec,
)

_COMMENT = re.compile(
    r'"[^"\n]*"|/\*.*?\*/|//[^\n]*', re.S
)  # strings are matched so that they stay as they are
_INLINED = r"inlined_at\s+(?P<outer>\d+)\s+(?P<outer_line>\d+)(?:\s+(?P<outer_column>\d+))?"
_LOC = re.compile(
    r"\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)(?:\s+(?P<column>\d+))?"
    rf"(?:\s*,\s*function_name\s+[\w$.]+(?:\s*\+\s*\d+)?\s*,\s*{_INLINED})?\s*$"
)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_REG_RANGE = re.compile(r"(%?[\w$]+)<(\d+)>")
_VARIABLE = re.compile(
    r"(?P<linkage>(?:\.(?:extern|visible|weak|common)\s+)*)\.(?P<space>global|const|shared|local|param)\s+"
    r"(?:\.align\s+(?P<align>\d+)\s+)?(?:\.ptr\s*(?:\.\w+\s+)*(?:\.align\s+\d+\s+)?)?(?:\.attribute\([^)]*\)\s*)?"
    r"(?:\.align\s+(?P<align2>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\s*(?:\.(?:global|shared|const|local)\s*)?(?:\.align\s+\d+\s+)?)?"
    r"(?P<name>[\w$%.]+)\s*(?P<dims>(?:\[\s*\d*\s*\])*)\s*(?:=\s*(?P<init>.*))?$",
    re.S,
)
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
_OPCODE = re.compile(r"([a-z][\w]*(?:(?:::|\.)[\w]+)*)\s*", re.I)
_OPERAND = re.compile(
    r"\s*(?:(?P<punct>[{}\[\]|,()+!-])|(?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16})|(?P<dec>\d+\.\d*(?:[eE][-+]?\d+)?)|"
    r"(?P<int>0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?|(?P<name>[%$_a-zA-Z][\w$.%]*))"
)


def parse(text: str) -> PTXFile:
    """Parses one PTX module.

    Raises MalformedPTX for text that is not PTX and UnsupportedPTX for what is not modelled (`.func` bodies).
    """
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        if ".version" not in text:
            raise MalformedPTX("no .version directive: this is not PTX", 1, text[:60])
        # Comments become blanks of the same shape, so that line numbers stay those of the file.
        self.text = _COMMENT.sub(
            lambda m: m.group() if m.group()[0] == '"' else re.sub(r"[^\n]", " ", m.group()), text
        )
        self.files = {int(n): name for n, name in _FILE.findall(self.text)}
        self.position = 0
        self.counted_to, self.line_number = 0, 1
        self.source: SourceLine | None = None

    # -- statements --------------------------------------------------------------------------------

    def line_at(self, position: int) -> int:
        self.line_number += self.text.count("\n", self.counted_to, position)
        self.counted_to = position
        return self.line_number

    def next_statement(self) -> tuple[str, str, int] | None:
        """(text, terminator, line). Terminators: `;` `{` `}` `:`, or newline for line-oriented directives."""
        text, n = self.text, len(self.text)
        while self.position < n and text[self.position].isspace():
            self.position += 1
        if self.position >= n:
            return None
        start = self.position
        line = self.line_at(start)
        if text.startswith((".loc ", ".loc\t", ".file", ".version", ".target", ".address_size"), start):
            end = text.find("\n", start)
            end = n if end < 0 else end
            self.position = end + 1
            return text[start:end].rstrip(), "\n", line
        depth, i = 0, start
        while i < n:
            c = text[i]
            if c == "{" and depth == 0 and self._opens_block(text[start:i]):
                self.position = i + 1
                return text[start:i].strip(), "{", line
            if c in "{[(":
                depth += 1
            elif c == "}" and depth == 0:
                self.position = i + 1
                return text[start:i].strip(), "}", line
            elif c in "}])":
                depth -= 1
            elif c == ";" and depth == 0:
                self.position = i + 1
                return text[start:i].strip(), ";", line
            elif c == ":" and depth == 0 and text[i : i + 2] != "::" and text[i - 1] != ":":
                if re.fullmatch(r"[\w$%]+", text[start:i].strip()):
                    self.position = i + 1
                    return text[start:i].strip(), ":", line
            i += 1
        raise MalformedPTX("statement without end", line, text[start : start + 60])

    @staticmethod
    def _opens_block(head: str) -> bool:
        head = head.strip()
        if "=" in head:  # an initialiser list
            return False
        return head == "" or bool(re.match(r"(\.(visible|weak|extern)\s+)*\.(entry|func|section)", head))

    # -- module level ------------------------------------------------------------------------------

    def module(self) -> PTXFile:
        result = PTXFile("", "", {}, [])
        while (statement := self.next_statement()) is not None:
            text, end, line = statement
            if not result.version and not text.startswith(".version"):
                raise MalformedPTX("a module begins with .version", line, text)
            if end == "\n":
                self._module_directive(result, text, line)
            elif text.startswith(".pragma") and end == ";":
                continue
            elif text.startswith(".section") and end == "{":
                self._skip_block(line)
            elif re.match(r"(\.(visible|weak)\s+)*\.entry", text):
                entry = self._entry(text, end, line)
                if entry.name in result.entries:
                    raise MalformedPTX("entry defined twice", line, entry.name)
                result.entries[entry.name] = entry
            elif ".func" in text.split("(")[0]:
                if end == "{":
                    raise UnsupportedPTX("device functions (.func with a body) are not modelled", line, text)
            elif end == ";" and (variable := self._variable(text, line)):
                result.variables.append(variable)
            elif text or end != ";":
                raise UnsupportedPTX("unknown directive", line, text + end)
        for entry in result.entries.values():
            entry.parent_variables = result.variables
        if not result.entries:
            raise MalformedPTX("no .entry function in this module", 1)
        if not result.target:
            raise MalformedPTX("no .target directive", 1)
        return result

    def _module_directive(self, result: PTXFile, text: str, line: int) -> None:
        """The directives that end with their line."""
        if match := re.fullmatch(r"\.version\s+(\d+\.\d+)", text):
            if result.version:
                raise MalformedPTX("a second .version", line, text)
            result.version = match[1]
        elif match := re.fullmatch(r"\.target\s+(\w+)((?:\s*,\s*\w+)*)", text):
            options = {option.strip() for option in match[2].split(",")} - {
                "",
                "debug",
                "texmode_independent",
            }
            if options or (result.target and result.target != match[1]):
                raise UnsupportedPTX("target", line, text)
            result.target = match[1]
        elif match := re.fullmatch(r"\.address_size\s+(\d+)", text):
            if match[1] != "64":
                raise UnsupportedPTX("only 64-bit addresses are modelled", line, text)
        elif text.startswith(".loc"):
            self._location(text, line)
        elif not _FILE.match(text):
            raise MalformedPTX("cannot read this directive", line, text)

    def _skip_block(self, line: int) -> None:
        end = self.text.find("}", self.position)
        if end < 0:
            raise MalformedPTX(".section without end", line)
        self.position = end + 1

    def _variable(self, text: str, line: int) -> Variable | None:
        match = _VARIABLE.match(text.strip())
        if match is None:
            return None
        kind = match["type"]
        if kind not in TYPE_BYTES:
            raise UnsupportedPTX(f"variable type .{kind}", line, text)
        count, sized = 1, True
        for dim in re.findall(r"\[\s*(\d*)\s*\]", match["dims"]):
            sized &= dim != ""
            count *= int(dim or 0)
        align = int(match["align"] or match["align2"] or TYPE_BYTES[kind])
        size = count * TYPE_BYTES[kind] if sized else 0
        init = self._initial(match["init"], kind, line) if match["init"] else b""
        if init and match["space"] not in ("global", "const"):
            raise MalformedPTX(f".{match['space']} variables have no initial value", line, text)
        if sized and len(init) > size:
            raise MalformedPTX(f"{len(init)} bytes of initial values for {size}", line, text)
        extern = ".extern" in match["linkage"] or not sized
        return Variable(match["name"], match["space"], align, size, init, kind, extern)

    def _initial(self, text: str, kind: str, line: int) -> bytes:
        size = TYPE_BYTES[kind]
        out = bytearray()
        for item in re.findall(r"[^\s,{}]+", text):
            if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", item):
                out += int(item[2:], 16).to_bytes(4, "little")
            elif re.fullmatch(r"0[dD][0-9a-fA-F]{16}", item):
                out += int(item[2:], 16).to_bytes(8, "little")
            elif re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", item):
                out += (int(item.rstrip("U"), 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
            else:
                raise UnsupportedPTX("initialiser that is not a number", line, text)
        return bytes(out)

    # -- entries -----------------------------------------------------------------------------------

    def _entry(self, head: str, end: str, line: int) -> Entry:
        match = re.match(
            r"(?:\.(?:visible|weak)\s+)*\.entry\s+([\w$]+)\s*(?:\((.*?)\)\s*)?([^()]*)$", head, re.S
        )
        if match is None:
            raise MalformedPTX("cannot read this .entry", line, head)
        entry = Entry(match[1], line)
        for item in (match[2] or "").split(","):
            if item.strip():
                parameter = self._variable(item, line)
                if parameter is None:
                    raise UnsupportedPTX("kernel parameter", line, item)
                entry.parameters.append(parameter)
        if end != "{":
            raise MalformedPTX(".entry without a body", line, head)
        self._entry_directives(entry, match[3], line)
        self._body(entry, None)
        return entry

    @staticmethod
    def _entry_directives(entry: Entry, text: str, line: int) -> None:
        """Performance-tuning directives between the parameters and the body."""
        for name, arguments in re.findall(r"\.(\w+)([^.]*)", text):
            numbers = [int(n) for n in re.findall(r"\d+", arguments)]
            if name in ("reqntid", "maxntid", "reqnctapercluster") and 1 <= len(numbers) <= 3:
                x, y, z = (*numbers, 1, 1)[:3]
                if name == "reqntid":
                    entry.required_threads = (x, y, z)
                elif name == "maxntid":
                    entry.max_threads = x * y * z
                elif (x, y, z) != (1, 1, 1):
                    raise UnsupportedPTX("only clusters of one CTA are modelled", line, text)
            elif name not in ("minnctapersm", "maxnreg", "maxclusterrank", "pragma", "explicitcluster"):
                raise UnsupportedPTX(f"directive .{name}", line, text)

    def _body(self, entry: Entry, outer: dict[str, str] | None) -> None:
        """One `{ ... }` scope. Registers of an inner scope are renamed, so that scopes cannot clash."""
        renamed = dict(outer or {})
        own: set[str] = set()  # declared in this scope
        labels: dict[str, str] = {}  # of an inner scope, and what they are called outside it
        first = len(entry.instructions)
        while (statement := self.next_statement()) is not None:
            text, end, line = statement
            if end == "}":
                if text:
                    raise MalformedPTX("statement without `;`", line, text)
                if labels:
                    entry.instructions[first:] = [relabelled(i, labels) for i in entry.instructions[first:]]
                return
            if end == "{":
                self._body(entry, renamed)
            elif end == ":":
                name = text if outer is None else f"{text}@{line}"
                if name in entry.labels or text in labels:
                    raise MalformedPTX("label defined twice", line, text)
                if outer is not None:
                    labels[text] = name
                entry.labels[name] = len(entry.instructions)
            elif text.startswith((".loc ", ".loc\t")):
                self.source = self._location(text, line)
            elif text.startswith(".reg"):
                self._registers(entry, text, line, renamed, own, scoped=outer is not None)
            elif text.startswith(".branchtargets"):
                label = next(reversed(entry.labels), "")
                if entry.labels.get(label) != len(entry.instructions):
                    raise MalformedPTX(".branchtargets without a label", line, text)
                entry.branch_targets[label] = tuple(t.strip() for t in text.split(None, 1)[1].split(","))
            elif text.startswith((".pragma", ".file")):
                continue
            elif text.startswith((".shared", ".local", ".global", ".const", ".extern")):
                variable = self._variable(text, line)
                if variable is None:
                    raise UnsupportedPTX("variable declaration", line, text)
                entry.variables.append(variable)
            elif text.startswith("."):
                raise UnsupportedPTX("directive", line, text)
            elif text:
                entry.instructions.append(self._instruction(text, line, renamed))
        raise MalformedPTX(".entry body without end", entry.line, entry.name)

    def _registers(
        self, entry: Entry, text: str, line: int, renamed: dict[str, str], own: set[str], scoped: bool
    ) -> None:
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text, re.S)
        if match is None or match[1] not in TYPE_BYTES:
            raise UnsupportedPTX("register declaration", line, text)
        for item in match[2].split(","):
            item = item.strip()
            if ranged := _REG_RANGE.fullmatch(item):
                names = [f"{ranged[1]}{i}" for i in range(int(ranged[2]))]
            elif re.fullmatch(r"[%\w$]+", item):
                names = [item]
            else:
                raise MalformedPTX(f"cannot read `{item}` as a register's name", line, text)
            for name in names:
                if name in own:
                    raise MalformedPTX(f"register {name} is declared twice", line, text)
                own.add(name)
                renamed[name] = f"{name}@{len(entry.registers)}" if scoped else name
                entry.registers[renamed[name]] = match[1]

    def _location(self, text: str, line: int) -> SourceLine:
        match = _LOC.match(text)
        if match is None:
            raise MalformedPTX("cannot read .loc", line, text)

        def place(file: str, number: str, column: str | None, at: SourceLine | None) -> SourceLine:
            name = self.files.get(int(file), f"file {file}")
            return SourceLine(name, int(number), int(column or 0), at)

        outer = None
        if match["outer"]:
            outer = place(match["outer"], match["outer_line"], match["outer_column"], None)
        return place(match["file"], match["line"], match["column"], outer)

    # -- instructions ------------------------------------------------------------------------------

    def _instruction(self, text: str, line: int, renamed: dict[str, str]) -> Instruction:
        rest = text
        guard, negated = None, False
        if match := _GUARD.match(rest):
            guard, negated = renamed.get(match[2], match[2]), match[1] == "!"
            rest = rest[match.end() :]
        match = _OPCODE.match(rest)
        if match is None:
            raise MalformedPTX("cannot read this instruction", line, text)
        opcode = match[1]
        reader = _Operands(rest[match.end() :], line, text, renamed)
        return Instruction(opcode, reader.all(), guard, negated, line, " ".join(text.split()), self.source)


def relabelled(instruction: Instruction, labels: dict[str, str]) -> Instruction:
    """The instruction with the labels of its scope under their outer names."""
    operands = tuple(
        Sym(labels[o.name]) if isinstance(o, Sym) and o.name in labels else o for o in instruction.operands
    )
    return replace(instruction, operands=operands)


class _Operands:
    """Recursive descent over the operand list of one instruction."""

    def __init__(self, text: str, line: int, whole: str, renamed: dict[str, str]) -> None:
        self.line, self.whole, self.renamed = line, whole, renamed
        self.tokens: list[re.Match[str]] = []
        position = 0
        text = text.rstrip()
        while position < len(text):
            match = _OPERAND.match(text, position)
            if match is None:
                raise MalformedPTX(f"cannot read operand at `{text[position : position + 20]}`", line, whole)
            self.tokens.append(match)
            position = match.end()
        self.index = 0

    def peek(self) -> str:
        return self.tokens[self.index]["punct"] or "" if self.index < len(self.tokens) else ""

    def expect(self, punct: str) -> None:
        if self.peek() != punct:
            raise MalformedPTX(f"expected `{punct}`", self.line, self.whole)
        self.index += 1

    def all(self) -> tuple[Operand, ...]:
        result: list[Operand] = []
        while self.index < len(self.tokens):
            result.append(self.operand())
            if self.index < len(self.tokens):
                self.expect(",")
                if self.index == len(self.tokens):
                    raise MalformedPTX("operand missing after `,`", self.line, self.whole)
        return tuple(result)

    def operand(self) -> Operand:
        if self.peek() == "{":
            return Vec(self.list_until("{", "}"))
        if self.peek() == "(":
            return Vec(self.list_until("(", ")"))
        if self.peek() == "[":
            return self.address()
        first = self.atom()
        if self.peek() == "|":
            self.index += 1
            return Pair(first, self.atom())
        if self.peek() == "+" and isinstance(first, Sym):  # `mov.b64 %rd1, variable+8`
            self.index += 1
            offset = self.atom()
            if not isinstance(offset, Imm):
                raise MalformedPTX("offset must be a literal", self.line, self.whole)
            return Addr(first, int(offset.value))
        return first

    def list_until(self, opening: str, closing: str) -> tuple[Operand, ...]:
        self.expect(opening)
        items: list[Operand] = []
        while self.peek() != closing:
            items.append(self.operand())
            if self.peek() != closing:
                self.expect(",")
        self.index += 1
        if not items and opening == "{":
            raise MalformedPTX("empty operand list", self.line, self.whole)
        return tuple(items)

    def address(self) -> Operand:
        self.expect("[")
        base: Operand = self.operand() if self.peek() == "{" else self.atom()
        offset = 0
        if isinstance(base, Imm):
            offset, base_or_none = int(base.value), None
        elif isinstance(base, Reg | Sym):
            base_or_none = base
        else:
            raise MalformedPTX("cannot read this address", self.line, self.whole)
        while self.peek() in ("+", "-"):
            sign = -1 if self.peek() == "-" else 1
            self.index += 1
            step = self.atom()
            if not isinstance(step, Imm):
                raise MalformedPTX("address offset must be a literal", self.line, self.whole)
            offset += sign * int(step.value)
        if self.peek() == ",":  # tensor copies: [map, {coordinates}]
            raise UnsupportedPTX(
                "address with coordinates (tensor copies) is not modelled", self.line, self.whole
            )
        self.expect("]")
        return Addr(base_or_none, offset)

    def atom(self) -> Operand:
        if self.index >= len(self.tokens):
            raise MalformedPTX("operand missing", self.line, self.whole)
        token = self.tokens[self.index]
        self.index += 1
        if token["punct"] == "-":
            inner = self.atom()
            if not isinstance(inner, Imm):
                raise MalformedPTX("`-` before something that is not a number", self.line, self.whole)
            if inner.float_bits:
                return Imm(inner.value ^ (1 << (inner.float_bits - 1)), inner.float_bits)
            return Imm(-inner.value)
        if token["punct"] == "!":
            inner = self.atom()
            if not isinstance(inner, Reg):
                raise MalformedPTX("`!` before something that is not a predicate", self.line, self.whole)
            return Reg("!" + inner.name)
        if token["float"]:
            digits = token["float"]
            return Imm(int(digits[2:], 16), 32 if digits[1] in "fF" else 64)
        if token["dec"]:
            return Imm(int.from_bytes(struct.pack("<d", float(token["dec"])), "little"), 64)
        if token["int"]:
            return Imm(
                int(token["int"], 0) if not re.fullmatch(r"0\d+", token["int"]) else int(token["int"], 8)
            )
        if token["name"]:
            name = token["name"]
            if name.startswith("%") or name in self.renamed:
                return Reg(self.renamed.get(name, name))
            return Sym(name)
        raise MalformedPTX("cannot read operand", self.line, self.whole)
