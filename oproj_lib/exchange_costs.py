"""What an exchange of partial sums costs: bytes, stores and crossings by formula, and times recorded on two GPUs.

R ranks exchange BF16 [M, 7168], B = 14336 M bytes. Counted per rank, and only what crosses between GPUs; a multicast
store leaves its GPU once, whatever the number of copies it reaches.

    form                  leaves a GPU                    arrives            crossings
    one shot, multicast   B                               (R - 1) B          1
    one shot, unicast     (R - 1) B                       (R - 1) B          1
    two shots, multicast  (R - 1) B / R + B / R           2 (R - 1) B / R    2
    two shots, unicast    (R - 1) B / R + (R - 1) B / R   2 (R - 1) B / R    2
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from oproj_lib.layouts import mailbox as layout
from oproj_lib.layouts.fragments import BF16_BYTES
from oproj_lib.problem import MAX_BATCH, N
from oproj_lib.recorded import DATA

SHOTS = (1, 2)
TRANSPORTS = ("multicast", "unicast")


@dataclass(frozen=True)
class Cost:
    """Computed, per rank and exchange. stores: 16-byte store instructions per 16-byte chunk of a partial sum, on
    average; polled: bytes that a rank's kernels read of mailboxes; additions: FP32 additions of a rank."""

    form: str
    leaves: int
    arrives: int
    stores: Fraction
    polled: int
    additions: int
    crossings: int

    def microseconds(self, crossing_us: float, link_gb_s: float) -> float:
        """Modelled: crossings one after the other, and the bytes of the busier direction at full link speed.

        Raises ValueError unless both are positive.
        """
        if crossing_us <= 0 or link_gb_s <= 0:
            raise ValueError(f"crossing_us = {crossing_us}, link_gb_s = {link_gb_s}: both must be positive")
        return self.crossings * crossing_us + max(self.leaves, self.arrives) / (link_gb_s * 1e3)


def cost(ranks: int, tokens: int, shots: int, transport: str) -> Cost:
    """The cost of one exchange.

    Raises ValueError for shots or a transport that do not exist, a batch outside 1..64, fewer than 2 ranks, and with
    two shots for ranks over which the columns cannot be sharded.
    """
    if shots not in SHOTS or transport not in TRANSPORTS:
        raise ValueError(f"shots = {shots}, transport = {transport!r}: choose from {SHOTS} and {TRANSPORTS}")
    if ranks < 2:
        raise ValueError(f"ranks = {ranks}: with fewer than 2 nothing is exchanged")
    layout.check_batch(tokens)
    whole, copies = tokens * N * BF16_BYTES, 1 if transport == "multicast" else ranks
    peers = 1 if transport == "multicast" else ranks - 1
    if shots == 1:
        return Cost(
            f"one shot, {transport}",
            leaves=peers * whole,
            arrives=(ranks - 1) * whole,
            stores=Fraction(copies),
            polled=ranks * whole,
            additions=(ranks - 1) * tokens * N,
            crossings=1,
        )
    shard = tokens * layout.receive_columns(ranks) * BF16_BYTES
    return Cost(
        f"two shots, {transport}",
        leaves=(ranks - 1) * shard + peers * shard,
        arrives=2 * (ranks - 1) * shard,
        stores=1 + Fraction(copies, ranks),
        polled=ranks * shard + whole,
        additions=(ranks - 1) * tokens * N // ranks,
        crossings=2,
    )


def costs(ranks: int, tokens: int) -> tuple[Cost, ...]:
    """All four forms. Raises ValueError as ``cost``."""
    return tuple(cost(ranks, tokens, shots, transport) for shots in SHOTS for transport in TRANSPORTS)


def break_even(ranks: int, crossing_us: float, link_gb_s: float) -> int | None:
    """Modelled: the smallest M for which two shots take less time than one; None: no M up to 64.

    The transport makes no difference: at least as much arrives at a rank as leaves it. Raises ValueError as ``cost``.
    """
    for tokens in range(1, MAX_BATCH + 1):
        one, two = (
            cost(ranks, tokens, shots, "multicast").microseconds(crossing_us, link_gb_s) for shots in SHOTS
        )
        if two < one:
            return tokens
    return None


@dataclass(frozen=True)
class RecordedExchange:
    """One recording session of exchanges by themselves. us: name -> M -> microseconds."""

    machine: str
    date: str
    software: str
    method: str
    ranks: int
    us: Mapping[str, Mapping[int, float]]

    @property
    def batches(self) -> tuple[int, ...]:
        """Every M that was recorded."""
        return tuple(sorted({m for times in self.us.values() for m in times}))


def recorded_exchange() -> RecordedExchange:
    """The session on two H200."""
    data = json.loads((DATA / "recorded_exchange_h200x2.json").read_text(encoding="utf-8"))
    rows = data.pop("exchange_us")
    return RecordedExchange(**data, us=_by_batch(rows))


def _by_batch(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    return {row["name"]: {int(m): us for m, us in row.items() if m != "name"} for row in rows}
