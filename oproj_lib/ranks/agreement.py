"""What real ranks tell each other through a key-value store before they launch, and what ends a run in bounded time.

A kernel that polls cannot be interrupted, and destroying its context would wait for it. So ranks agree on plan,
programs and numbers of tokens *before* a launch, where a difference is an ordinary error; after it, a rank that sees
nothing happen says who is missing and ends its process (``end_process``), which takes its kernels with it.

The store is torch.distributed's (``set``, ``check``, ``get``), or anything like it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

EXIT_LOST = 3
"""Exit code of a run that a missing or failed rank ended."""
ABORT = "abort"
POLL_SECONDS = 0.002


class Store(Protocol):
    """A key-value store that all ranks see."""

    def set(self, key: str, value: str) -> None:
        """Make a value visible to all ranks."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there. Does not wait."""

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""


class Disagreement(ValueError):
    """Ranks were started with different plans, programs or numbers of tokens."""


class RankLostError(RuntimeError):
    """A rank failed, or did not answer in time."""


class Agreement:
    """One rank's side. timeout: seconds that every rank has for every step; clock, sleep: as in ``time``."""

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout = {timeout}: seconds, more than 0")
        self.store, self.rank, self.ranks, self.timeout = store, rank, ranks, timeout
        self.clock, self.sleep = clock, sleep
        self.last_step = clock()

    def exchange(self, topic: str, value: str) -> list[str]:
        """The values of all ranks, when they are there.

        Raises RankLostError when a rank has failed, or some have not answered within the timeout.
        """
        self.tell(topic, value)
        self.wait(lambda: not self.missing(topic), f"all ranks' {topic}", lambda: self.missing(topic))
        with self.store_there():
            return [self.store.get(f"{topic}/{rank}").decode() for rank in range(self.ranks)]

    def tell(self, topic: str, value: str) -> None:
        """This rank's value, for whoever asks. Raises RankLostError without a store."""
        with self.store_there():
            self.store.set(f"{topic}/{self.rank}", value)

    @contextmanager
    def store_there(self) -> Iterator[None]:
        """Raises RankLostError where the store does not answer: its process has ended."""
        try:
            yield
        except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
            reason = str(error).partition("\n")[0]
            raise RankLostError(
                f"rank {self.rank} lost the key-value store, and so rank 0 or torchrun, which kept it: {reason}"
            ) from error

    def same(self, topic: str, value: str, what: str) -> None:
        """Go on only if all ranks have the same value.

        Raises Disagreement (a ValueError) that names the ranks and values, RankLostError as ``exchange``.
        """
        values = self.exchange(topic, value)
        if len(set(values)) > 1:
            groups = {
                one: [rank for rank, other in enumerate(values) if other == one]
                for one in dict.fromkeys(values)
            }
            said = "; ".join(f"{ranks_text(ranks)}: {one}" for one, ranks in groups.items())
            raise Disagreement(f"{what} must be the same on every rank, nothing was launched: {said}")

    def missing(self, topic: str) -> list[int]:
        """Ranks that have not said anything about a topic."""
        with self.store_there():
            return [rank for rank in range(self.ranks) if not self.store.check([f"{topic}/{rank}"])]

    def wait(
        self, done: Callable[[], bool], what: str, who: Callable[[], Sequence[int]] = lambda: ()
    ) -> None:
        """Poll until ``done()``. who: the ranks that are to blame when it takes too long.

        Raises RankLostError when a rank has failed, or the timeout is over.
        """
        self.last_step = self.clock()
        until = self.last_step + self.timeout
        while not done():
            if reason := self.failed():
                raise RankLostError(f"rank {self.rank} waited for {what}: {reason}")
            if self.clock() > until:
                blamed = who()
                named = f"; missing: {ranks_text(blamed)}" if blamed else ""
                raise RankLostError(f"rank {self.rank} waited {self.timeout:g} s for {what}{named}")
            self.sleep(POLL_SECONDS)
        self.last_step = self.clock()

    def fail(self, reason: str) -> None:
        """Tell all ranks that this one gives up."""
        with self.store_there():
            self.store.set(ABORT, f"rank {self.rank} failed: {reason}")

    def failed(self) -> str:
        """Why another rank has given up, or nothing."""
        with self.store_there():
            return self.store.get(ABORT).decode() if self.store.check([ABORT]) else ""


class Watchdog:
    """Ends the process when the rank has not come to a step of its ``agreement`` for twice the timeout, because its
    main thread is stuck in a call that waits for a GPU. A context manager; leave: as for ``end_process``.
    """

    def __init__(self, agreement: Agreement, leave: Callable[[int], NoReturn] = os._exit) -> None:
        self.agreement, self.leave = agreement, leave
        self.limit = 2 * agreement.timeout
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="rank watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.agreement.last_step = self.agreement.clock()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.stop.wait(min(1.0, self.limit / 4)):
            silent = self.agreement.clock() - self.agreement.last_step
            if silent > self.limit:
                error = RankLostError(f"no step of this rank for {silent:.1f} s: stuck in a call")
                end_process(self.agreement, error, self.leave)


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2" """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def end_process(
    agreement: Agreement, error: BaseException, leave: Callable[[int], NoReturn] = os._exit
) -> NoReturn:
    """Say why, tell the others, and leave at once: no destructor runs, since one would wait for polling kernels."""
    reason = f"{type(error).__name__}: {error}"
    print(f"error: rank {agreement.rank} ends the run: {reason}", file=sys.stderr, flush=True)
    try:
        if not agreement.failed():
            agreement.fail(reason)
    except Exception as second:
        print(f"error: the other ranks could not be told: {second}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    leave(EXIT_LOST)
