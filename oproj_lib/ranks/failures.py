"""What two ranks do when something is wrong, on real GPUs: an error that says what, within a bounded time.

    python -m oproj_lib.ranks.failures --programs folder --timeout 10 --out failures.json

folder: from `python -m oproj_lib ranks --device cuda --local --ranks 2 --engine payload --batches 1,8,16,64 --build`.
Starts the two processes itself, with the variables that torchrun would set: torchrun ends all workers when one dies,
and would hide what the others do on their own.

    case               what is wrong                             what must come
    killed             rank 1 is killed between rounds           rank 0 names it and ends with code 3
    late               rank 1 starts late, within the timeout    nothing: both end with code 0
    too late           rank 1 starts after the timeout           each names the other and ends with code 2
    other tokens       rank 1 is given other numbers of tokens   both refuse before a launch, with code 2
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oproj_lib.ranks.agreement import EXIT_LOST
from oproj_lib.ranks.world import KEYS

HOST = "127.0.0.1"
START_SECONDS = 60.0
"""Most that a process may need to import, to start torch.distributed and to load programs, beside all timeouts."""
HEARTBEAT = 20
BATCHES, OTHER_BATCHES = "1,8,16,64", "64,8,1"
KILLED_ROUNDS = 100_000
"""More than are run until the kill."""
COMMAND = (sys.executable, "-m", "oproj_lib", "ranks", "--device", "cuda", "--engine", "payload")


@dataclass(frozen=True)
class Ended:
    """A process that has ended. code: negative for a signal; seconds: from its start, or from the kill where one was
    killed; said: its last line."""

    code: int
    seconds: float
    said: str


@dataclass(frozen=True)
class Outcome:
    """A case. ended: rank 0, rank 1; wrong: what did not come as it must, empty if all did."""

    case: str
    ended: tuple[Ended, Ended]
    wrong: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ok": not self.wrong}


class Pair:
    """Two ranks of a case, started by hand. command: the words before the options of a rank."""

    def __init__(self, programs: str, timeout: float, command: Sequence[str] = COMMAND) -> None:
        self.programs, self.timeout, self.command = programs, timeout, command
        self.port = free_port()
        self.started: dict[int, tuple[subprocess.Popen[str], float]] = {}
        self.since: float | None = None

    def start(self, rank: int, *, rounds: int, batches: str = BATCHES) -> None:
        """Start a rank."""
        options = [
            "--programs", self.programs, "--rounds", str(rounds), "--batches", batches, "--heartbeat", str(HEARTBEAT),
            "--timeout", f"{self.timeout:g}",
        ]  # fmt: skip
        variables = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self.port),
        }  # fmt: skip
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")
        }
        process = subprocess.Popen(
            [*self.command, *options],
            env={**inherited, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started[rank] = (process, time.monotonic())

    def wait_for_rounds(self) -> None:
        """Until both ranks have judged their second block of rounds. Raises TimeoutError."""
        import torch.distributed as dist

        until = time.monotonic() + START_SECONDS
        store = dist.PrefixStore(f"attempt 0/{KEYS}/task 0", connected(self.port, until, self.alive))
        keys = [f"judged {HEARTBEAT}/{rank}" for rank in self.started]
        while not store.check(keys):
            if time.monotonic() > until or not self.alive():
                raise TimeoutError(
                    f"no second block of rounds after {START_SECONDS:g} s, or a rank has ended"
                )
            time.sleep(0.01)

    def alive(self) -> bool:
        """Whether every rank that was started still runs."""
        return all(process.poll() is None for process, _ in self.started.values())

    def kill(self, rank: int) -> None:
        """SIGKILL. The seconds of all ranks count from now on."""
        self.since = time.monotonic()
        self.started[rank][0].kill()

    def ended(self) -> tuple[Ended, Ended]:
        """Both, when they have ended; one that does not in time is killed, with a code below 0."""
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(self._ended, sorted(self.started))
        return first, second

    def _ended(self, rank: int) -> Ended:
        process, since = self.started[rank]
        try:
            output, _ = process.communicate(timeout=START_SECONDS + 4 * self.timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        seconds = time.monotonic() - (since if self.since is None else self.since)
        return Ended(process.returncode, round(seconds, 1), said(output))


def said(output: str) -> str:
    """The last line that begins with "error", or else the last line: what a person sees."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error")]
    return (errors or lines or [""])[-1]


def connected(port: int, until: float, alive: Callable[[], bool]) -> Any:
    """The store of rank 0, when it is there. Raises TimeoutError."""
    from datetime import timedelta

    import torch.distributed as dist

    while not listens(port):
        if time.monotonic() > until or not alive():
            raise TimeoutError(f"nobody keeps a store at {HOST}:{port}")
        time.sleep(0.1)
    return dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)


def listens(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


# ---- the cases ----


def killed(pair: Pair) -> Outcome:
    """Rank 1 is killed in the middle of its rounds."""
    for rank in (0, 1):
        pair.start(rank, rounds=KILLED_ROUNDS)
    try:
        pair.wait_for_rounds()
    finally:
        pair.kill(1)
    ended = pair.ended()
    limit = 3 * pair.timeout
    wrong = expect(ended[0], 0, (EXIT_LOST,), "missing: rank 1")
    if ended[0].seconds > limit:
        wrong.append(f"rank 0 took {ended[0].seconds:g} s to end, limit 3 timeouts, {limit:g} s")
    return Outcome("killed", ended, tuple(wrong))


def late(pair: Pair) -> Outcome:
    """Rank 1 starts half a timeout late."""
    pair.start(0, rounds=2 * HEARTBEAT)
    time.sleep(pair.timeout / 2)
    pair.start(1, rounds=2 * HEARTBEAT)
    ended = pair.ended()
    return Outcome("late", ended, tuple(expect(ended[0], 0, (0,), "") + expect(ended[1], 1, (0,), "")))


def too_late(pair: Pair) -> Outcome:
    """Rank 1 starts when rank 0 has given up."""
    pair.start(0, rounds=2 * HEARTBEAT)
    pair.started[0][0].wait(START_SECONDS + 4 * pair.timeout)
    pair.start(1, rounds=2 * HEARTBEAT)
    ended = pair.ended()
    wrong = expect(ended[0], 0, (2,), "missing: rank 1") + expect(ended[1], 1, (2,), "rank 0, which keeps it")
    return Outcome("too late", ended, tuple(wrong))


def other_tokens(pair: Pair) -> Outcome:
    """The ranks are given different numbers of tokens."""
    pair.start(0, rounds=2 * HEARTBEAT)
    pair.start(1, rounds=2 * HEARTBEAT, batches=OTHER_BATCHES)
    ended = pair.ended()
    text = "must be the same on every rank, nothing was launched"
    return Outcome(
        "other tokens", ended, tuple(expect(ended[0], 0, (2,), text) + expect(ended[1], 1, (2,), text))
    )


CASES: tuple[Callable[[Pair], Outcome], ...] = (killed, late, too_late, other_tokens)


def expect(ended: Ended, rank: int, codes: Sequence[int], text: str) -> list[str]:
    """What differs from one of these exit codes, and from an error that contains ``text``."""
    wrong = []
    if ended.code not in codes:
        wrong.append(f"rank {rank} ended with code {ended.code}, expected {' or '.join(map(str, codes))}")
    if text not in ended.said:
        wrong.append(f"rank {rank} did not say {text!r}")
    return wrong


def run_case(case: Callable[[Pair], Outcome], pair: Pair) -> Outcome:
    """A case's outcome, also where its processes ended before it could begin. None of them outlives it."""
    try:
        return case(pair)
    except TimeoutError as error:
        return Outcome(case.__name__.replace("_", " "), pair.ended(), (str(error),))
    finally:
        for process, _ in pair.started.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def run_cases(
    programs: str,
    timeout: float,
    command: Sequence[str] = COMMAND,
    cases: Sequence[Callable[[Pair], Outcome]] = CASES,
) -> list[Outcome]:
    """All cases. The one that mostly waits, and never comes to a launch, runs beside the others."""
    beside = [case for case in cases if case is too_late]
    with ThreadPoolExecutor(1) as pool:
        waiting = [pool.submit(run_case, case, Pair(programs, timeout, command)) for case in beside]
        made = {
            case: run_case(case, Pair(programs, timeout, command)) for case in cases if case is not too_late
        }
        made |= {case: future.result() for case, future in zip(beside, waiting, strict=True)}
    return [made[case] for case in cases]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases; 0 if everything came as it must."""
    top = argparse.ArgumentParser(
        prog="python -m oproj_lib.ranks.failures", description=(__doc__ or "").split("\n")[0]
    )
    top.add_argument("--programs", required=True, help="a folder for 2 ranks, engine payload")
    top.add_argument("--timeout", type=float, default=10.0, help="of the ranks, seconds (default 10)")
    top.add_argument("--out", help="data file (JSON)")
    arguments = top.parse_args(argv)
    outcomes = run_cases(arguments.programs, arguments.timeout)
    for outcome in outcomes:
        print(f"{outcome.case}: {'; '.join(outcome.wrong) or 'as it must be'}")
        for rank, ended in enumerate(outcome.ended):
            print(f"  rank {rank}: code {ended.code} after {ended.seconds:g} s: {ended.said}")
    if arguments.out:
        data = [outcome.as_dict() for outcome in outcomes]
        Path(arguments.out).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
