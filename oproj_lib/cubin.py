"""What a cubin says about its kernels, read without any tool: registers, stack, shared memory.

A cubin is an ELF file (System V gABI). Section ``.nv.info`` holds NVIDIA's attributes, each (format,
attribute, size or value); two of them are per kernel: EIATTR_REGCOUNT and EIATTR_FRAME_SIZE, each (symbol
number, value). ``.nv.shared.<kernel>`` has the size of its static shared memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SYSTEM_SHARED_BYTES = 1024
"""sm_90 and later reserve 1 KiB of each block's shared memory; ptxas counts it, the 227 KiB limit of a launch
does not."""

_ELF_SECTION = struct.Struct("<IIQQQQIIQQ")
_ELF_SYMBOL_BYTES = 24
_NO_CONTENTS = 8  # SHT_NOBITS
_SIZED_VALUE = 0x04
_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F


@dataclass(frozen=True)
class Resources:
    """Registers and stack bytes per thread, static shared bytes per block (without the system's)."""

    registers: int
    stack_bytes: int
    static_shared_bytes: int


def resources(cubin: bytes, kernel: str) -> Resources:
    """What ptxas recorded for ``kernel``.

    Raises ValueError when the cubin is no ELF file or has no such kernel.
    """
    sections = list(_sections(cubin))
    index = {name: number for number, name in enumerate(_symbols(sections))}
    if kernel not in index:
        raise ValueError(f"no kernel {kernel!r} in this cubin")
    found: dict[int, int] = {}
    for name, _, data in sections:
        if name == ".nv.info":
            for attribute, payload in _attributes(data):
                if attribute in (_FRAME_SIZE, _REGISTER_COUNT):
                    symbol, value = struct.unpack("<II", payload)
                    if symbol == index[kernel]:
                        found[attribute] = value
    missing = {_FRAME_SIZE, _REGISTER_COUNT} - found.keys()
    if missing:
        raise ValueError(
            f"the cubin's .nv.info lacks attributes {[hex(a) for a in sorted(missing)]} of {kernel!r}"
        )
    shared = sum(size for name, size, _ in sections if name == f".nv.shared.{kernel}")
    return Resources(found[_REGISTER_COUNT], found[_FRAME_SIZE], max(0, shared - SYSTEM_SHARED_BYTES))


def _sections(cubin: bytes) -> Iterator[tuple[str, int, bytes]]:
    """(name, size, contents) of every ELF section; a section without contents (.nv.shared) still has its
    size."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"this cubin of {len(cubin)} bytes is no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    count, names_index = struct.unpack_from("<HH", cubin, 0x3C)
    headers = [_ELF_SECTION.unpack_from(cubin, table + i * _ELF_SECTION.size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size, *_ in headers:
        end = cubin.index(b"\0", names + name)
        contents = b"" if kind == _NO_CONTENTS else cubin[offset : offset + size]
        yield cubin[names + name : end].decode(), size, contents


def _symbols(sections: list[tuple[str, int, bytes]]) -> list[str]:
    """Names of the ELF symbols, by symbol number."""
    contents = {name: data for name, _, data in sections}
    table, names = contents.get(".symtab", b""), contents.get(".strtab", b"")
    starts = [struct.unpack_from("<I", table, at)[0] for at in range(0, len(table), _ELF_SYMBOL_BYTES)]
    return [names[start : names.index(b"\0", start)].decode() for start in starts]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of a .nv.info section; attributes whose value is in the header have an empty
    payload."""
    at = 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        payload = data[at : at + size] if form == _SIZED_VALUE else b""
        at += len(payload)
        yield attribute, payload
