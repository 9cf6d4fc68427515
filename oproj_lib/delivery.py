"""What a run must have delivered: the mailbox of every rank, judged. The same for the virtual GPU and for hardware,
and so without either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from oproj_lib import problem

SENTINEL = np.uint32(0x80008000)
"""The armed mailbox word, two BF16 -0.0 (KERNELS: "Lamport protocol"): no published word may contain a -0.0
half."""
SLOTS = 2
"""Slots of the mailbox in a run: the kernel publishes into slot 1, and slot 0 must stay armed."""
SLOT = 1


class Mailbox(Protocol):
    """What a launch left in one rank's mailbox: array BF16 [slots, tokens, 7168], written per byte."""

    @property
    def name(self) -> str: ...

    @property
    def array(self) -> np.ndarray: ...

    @property
    def written(self) -> np.ndarray | None: ...


def judge(
    mailboxes: Sequence[Mailbox], x: np.ndarray, weight: np.ndarray, policy: str
) -> tuple[float, list[str]]:
    """(relative Frobenius error, findings): `delivery_findings`, and the result within tolerance of
    float64."""
    batch = x.shape[0]
    findings = delivery_findings(mailboxes, batch)
    verdict = problem.check(mailboxes[0].array[SLOT, :batch], x, weight, latent=policy == "latent")
    findings += [f"wrong result: {reason}" for reason in verdict.reasons]
    return verdict.measures.relative_frobenius, findings


def delivery_findings(mailboxes: Sequence[Mailbox], batch: int) -> list[str]:
    """Whether every element of the slot was published, nothing else was touched, and all ranks hold the
    same."""
    findings = []
    first = mailboxes[0].array.view(np.uint16)
    for mailbox in mailboxes:
        if mailbox.written is None:
            raise ValueError(
                f"{mailbox.name} was not made with VirtualGPU.empty: what was written is unknown"
            )
        written = np.asarray(mailbox.written.reshape(*mailbox.array.shape, 2).all(axis=3))
        missing = ~written[SLOT, :batch]
        if missing.any():
            token, column = np.argwhere(missing)[0]
            findings.append(
                f"unwritten output: {mailbox.name}: {int(missing.sum())} "
                f"elements never published, first token {token} column {column}"
            )
        if written[:SLOT].any() or written[SLOT, batch:].any():
            findings.append(
                f"stray write: {mailbox.name}: the kernel wrote outside slot {SLOT}, tokens 0..{batch - 1}"
            )
        if not np.array_equal(mailbox.array.view(np.uint16), first):
            findings.append(f"ranks differ: {mailbox.name} does not hold what rank 0's holds")
    return findings
