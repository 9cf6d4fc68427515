"""Where a published chunk goes. One interface, chosen when the kernel is built.

The kernel computes (slot, token, column) and four BF16x2 words, and hands them to ``store_chunk``; what the
argument ``mc`` means is the transport's business. A later two-shot transport sends the chunk to the owner of
its column only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cutlass import Int64
from cutlass.cutlass_dsl import dsl_user_op

from oproj_lib.kernels import primitives
from oproj_lib.layouts.fragments import BF16_BYTES
from oproj_lib.layouts.publish import mailbox_offset

MULTICAST = "multicast"
UNICAST = "unicast"
MAX_RANKS = 72
"""GPUs of the largest NVLink domain (NVL72)."""


@dataclass(frozen=True)
class Mailbox:
    """Shape of a mailbox, BF16 [slots, tokens, columns]."""

    slots: int
    tokens: int
    columns: int


class Transport(Protocol):
    """Sends 16-byte chunks. ``name`` is part of a build's identity."""

    @property
    def name(self) -> str:
        """What tells one build from another, for example ``unicast:8``."""

    def store_chunk(self, mailbox: Mailbox, mc: Any, slot: Any, token: Any, column: Any, words: Any) -> None:
        """Emit the stores of one chunk: columns ``column .. column + 7`` of ``token`` in ``slot``.

        mc is the kernel's Int64 argument, slot, token and column are Int32, words are four BF16x2 words.
        """


def chunk_offset(mailbox: Mailbox, slot: Any, token: Any, column: Any) -> Any:
    """Byte offset of a chunk in the mailbox, 64-bit: 2 * ((slot * tokens + token) * columns + column)."""
    return Int64(mailbox_offset(slot, token, column, mailbox.tokens, mailbox.columns)) * BF16_BYTES


@dataclass(frozen=True)
class MulticastTransport:
    """``mc`` is a multicast address: one ``multimem.st`` reaches the copy of every rank."""

    @property
    def name(self) -> str:
        """``multicast``"""
        return MULTICAST

    @dsl_user_op
    def store_chunk(
        self,
        mailbox: Mailbox,
        mc: Any,
        slot: Any,
        token: Any,
        column: Any,
        words: Any,
        *,
        loc: Any = None,
        ip: Any = None,
    ) -> None:
        """One 16-byte ``multimem.st`` to ``mc + offset``."""
        offset = chunk_offset(mailbox, slot, token, column)
        primitives.store_chunk_multicast(mc + offset, words, loc=loc, ip=ip)


@dataclass(frozen=True)
class UnicastTransport:
    """``mc`` is the address of an int64[ranks] table of mailbox base addresses: one store per rank."""

    ranks: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"unicast to {self.ranks} ranks: choose 1 to {MAX_RANKS}")

    @property
    def name(self) -> str:
        """``unicast:<ranks>``"""
        return f"{UNICAST}:{self.ranks}"

    @dsl_user_op
    def store_chunk(
        self,
        mailbox: Mailbox,
        mc: Any,
        slot: Any,
        token: Any,
        column: Any,
        words: Any,
        *,
        loc: Any = None,
        ip: Any = None,
    ) -> None:
        """The same 16 bytes to ``base[rank] + offset`` for every rank."""
        offset = chunk_offset(mailbox, slot, token, column)
        bases = [primitives.load_address(mc, rank, loc=loc, ip=ip) for rank in range(self.ranks)]
        for base in bases:
            primitives.store_chunk(base + offset, words, loc=loc, ip=ip)


def as_transport(value: Transport | str) -> Transport:
    """A transport from its name: ``multicast``, ``unicast`` (one rank) or ``unicast:<ranks>``; a transport is
    passed through.

    Raises ValueError for another name.
    """
    if not isinstance(value, str):
        if not hasattr(value, "store_chunk"):
            raise ValueError(
                f"transport = {value!r}: choose {MULTICAST!r}, '{UNICAST}:<ranks>', or a Transport object"
            )
        return value
    if value == MULTICAST:
        return MulticastTransport()
    kind, _, ranks = value.partition(":")
    if kind == UNICAST and (ranks.isdecimal() or not ranks):
        return UnicastTransport(int(ranks or 1))
    raise ValueError(
        f"transport = {value!r}: choose {MULTICAST!r}, {UNICAST!r} (one rank) or '{UNICAST}:<ranks>'"
    )
