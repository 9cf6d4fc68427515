"""Memory in which the data is its own flag: a word that has arrived is one that is no longer the sentinel.

A buffer is *watched* with `VirtualGPU.watch_sentinel`. Then

* no store may put the sentinel there, because readers would take it for data that has not arrived;
* except that a grid enqueued with `rearms=True` may store whole 16-byte chunks of it (re-arming), and not
  through a multicast address, which would re-arm the copies that other ranks still read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .decode import Op
    from .launch import Launch
    from .memory import Buffer

REARM_BYTES = 16


@dataclass(frozen=True)
class Sentinel:
    """The 32-bit word that means "not yet". halves: no published 16-bit half may equal one of the word's halves
    either (0x80008000: no BF16 -0.0), so that a reader may test halves as well as words."""

    word: int
    halves: bool

    def matches(self, values: np.ndarray) -> np.ndarray:
        """Per row of bytes [n, size]: whether a word or half in it equals the sentinel. Sizes below 4: halves."""
        raw = np.ascontiguousarray(values)
        if self.halves and raw.shape[1] >= 2:
            parts = raw.view(np.uint16)
            return ((parts == self.word & 0xFFFF) | (parts == self.word >> 16)).any(axis=1)
        if raw.shape[1] < 4:
            return np.zeros(raw.shape[0], bool)
        return (raw.view(np.uint32) == self.word).any(axis=1)

    def armed(self, buffer: Buffer, offsets: np.ndarray, size: int) -> np.ndarray:
        """Per access: whether a word there is still the sentinel."""
        if size < 4:
            return np.zeros(offsets.size, bool)
        words = buffer.view(np.dtype(np.uint32), size // 4)[offsets // size]
        return (words == self.word).any(axis=1)

    def describe(self, words: np.ndarray) -> str:
        """Which words of some bytes are still the sentinel."""
        if words.size % 4:
            return ""
        which = np.flatnonzero(words.view(np.uint32) == self.word).tolist()
        names = ", ".join(map(str, which))
        return f" (word{'s' if len(which) > 1 else ''} {names} still armed)" if which else ""


def check_store(
    launch: Launch, op: Op, threads: np.ndarray, buffer: Buffer, offsets: np.ndarray, values: np.ndarray
) -> None:
    """A store of values [lanes, count] to a watched buffer."""
    sentinel = buffer.sentinel
    assert sentinel is not None
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(values.shape[0], -1)
    bad = sentinel.matches(raw)
    if launch.rearms and raw.shape[1] == REARM_BYTES and op.instruction.op != "multimem":
        bad &= ~(raw.view(np.uint32) == sentinel.word).all(axis=1)
    if not bad.any():
        return
    first = int(np.flatnonzero(bad)[0])
    words = (
        " ".join(f"{w:08x}" for w in raw[first].view(np.uint32))
        if raw.shape[1] % 4 == 0
        else raw[first].tobytes().hex()
    )
    message = f"{words} stored to {buffer.element(int(offsets[first]))}: a reader takes "
    message += (
        f"{sentinel.word:#010x}{' or half of it' if sentinel.halves else ''} for data that has not arrived"
    )
    launch.found("sentinel published", message, op, threads[bad])
