"""Where a published chunk goes. One interface, chosen when the kernel is built.

The kernel computes (slot, token, column) and four BF16x2 words, and hands them to ``store_chunk``; what the
argument ``mc`` means is the transport's business:

    transport     mc                                         a chunk goes to
    multicast     multicast address of the mailbox           the copy of every rank, one store
    unicast:R     int64[R], address of every rank's mailbox  the copy of every rank, R stores
    twoshot       int64[R], address of every rank's receive  the owner of its column, one store
                  view

Every store is 16 bytes and relaxed at system scope. A weak store to memory that another GPU polls would be a
data race (PTX ISA, "Memory Consistency Model"), which has no defined outcome; the compiler could also split
it, or keep it back. relaxed is enough: a Lamport mailbox infers nothing from an arrived word but itself, so
there is nothing to release. It costs nothing: only the .STRONG.SYS on the store differs in the machine code.
Vector accesses are single accesses in no particular order to the memory model, which is why the reader tests
every word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cutlass import Int64
from cutlass.cutlass_dsl import dsl_user_op

from oproj_lib.kernels import primitives
from oproj_lib.kernels.mailbox_primitives import load_table_entry
from oproj_lib.layouts import mailbox as layout
from oproj_lib.layouts.fragments import BF16_BYTES
from oproj_lib.layouts.publish import mailbox_offset

MULTICAST = "multicast"
UNICAST = "unicast"
TWOSHOT = "twoshot"
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

    def open(self, mailbox: Mailbox, mc: Any, column: Any) -> Any:
        """What ``store_chunk`` gets as ``mc``, from the kernel's argument: look-ups that all chunks of a CTA
        share, done early. column: any of the CTA's (Int32)."""

    def store_chunk(self, mailbox: Mailbox, mc: Any, slot: Any, token: Any, column: Any, words: Any) -> None:
        """Emit the stores of one chunk: columns ``column .. column + 7`` of ``token`` in ``slot``.

        mc is what ``open`` made, slot, token and column are Int32, words are four BF16x2 words.
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

    def open(self, mailbox: Mailbox, mc: Any, column: Any) -> Any:
        """The multicast address as it is."""
        del mailbox, column
        return mc

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
    """``mc`` is the address of an int64[ranks] table of mailbox base addresses: one store per rank.

    held: for one rank, the kernel has looked its base address up itself, early, and ``mc`` is that address. A build's
    own matter: the kernel's argument is the table, and the name the same.
    """

    ranks: int = 1
    held: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"unicast to {self.ranks} ranks: choose 1 to {MAX_RANKS}")
        if self.held and self.ranks != 1:
            raise ValueError(f"held with {self.ranks} ranks: mc holds one address, not {self.ranks}")

    @property
    def name(self) -> str:
        """``unicast:<ranks>``"""
        return f"{UNICAST}:{self.ranks}"

    def open(self, mailbox: Mailbox, mc: Any, column: Any) -> Any:
        """The table's address as it is: its entries would fill registers."""
        del mailbox, column
        return mc

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
        if self.held:
            bases = [mc]
        else:
            bases = [primitives.load_address(mc, rank, loc=loc, ip=ip) for rank in range(self.ranks)]
        for base in bases:
            primitives.store_chunk(base + offset, words, loc=loc, ip=ip)


@dataclass(frozen=True)
class TwoShotTransport:
    """First shot of two: ``mc`` is the address of an int64[ranks] table of the owners' receive views.

    The mailbox is the receive view BF16 [slots, tokens, 7168 / ranks]; its columns say how many ranks there
    are. ``kernels.second_shot`` is what the owner does.
    """

    @property
    def name(self) -> str:
        """``twoshot``"""
        return TWOSHOT

    @dsl_user_op
    def open(self, mailbox: Mailbox, mc: Any, column: Any, *, loc: Any = None, ip: Any = None) -> Any:
        """Address of the receive view of this CTA's owner."""
        return load_table_entry(mc, layout.owner(column, mailbox.columns), loc=loc, ip=ip)

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
        """16 bytes to the owner, [slot, token, column within its shard]."""
        offset = chunk_offset(mailbox, slot, token, layout.shard_column(column, mailbox.columns))
        primitives.store_chunk(mc + offset, words, loc=loc, ip=ip)


def choose_transport(twoshot: bool, value: Transport | str | None) -> Transport:
    """The transport of an engine: ``value``, or where that is None multicast, or the first shot of two.

    Raises ValueError for another name, and for one that contradicts ``twoshot``.
    """
    transport = as_transport((TWOSHOT if twoshot else MULTICAST) if value is None else value)
    if twoshot != isinstance(transport, TwoShotTransport):
        raise ValueError(
            f"twoshot = {twoshot} with transport = {transport.name!r}: {TWOSHOT!r} is the transport of "
            f"twoshot = True, and of nothing else; leave transport out"
        )
    return transport


def as_transport(value: Transport | str) -> Transport:
    """A transport from its name: ``multicast``, ``unicast`` (one rank), ``unicast:<ranks>`` or ``twoshot``; a
    transport is passed through.

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
    if value == TWOSHOT:
        return TwoShotTransport()
    kind, _, ranks = value.partition(":")
    if kind == UNICAST and (ranks.isdecimal() or not ranks):
        return UnicastTransport(int(ranks or 1))
    raise ValueError(
        f"transport = {value!r}: choose {MULTICAST!r}, {UNICAST!r} (one rank) or '{UNICAST}:<ranks>'"
    )
