"""The recorded check of exchanges on several GPUs, and what happened when a rank was lost: data, reader and tables.

`python -m oproj_lib.measured_ranks` prints the tables of docs/two_gpus.md. After another recording,

    python -m oproj_lib.measured_ranks --check check.jsonl --failures failures.json --exchange exchange.json

makes the data file from what `ranks --suite --json`, ``ranks.failures`` and ``bench.exchange`` wrote in one session:
of these, only the last one asks the machine for versions and clocks.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oproj_lib.measured_exchange import exchange_markdown, read_exchange
from oproj_lib.measured_exchange import recorded as recorded_exchange
from oproj_lib.provenance import Provenance, read_provenance
from oproj_lib.ranks.failures import Ended, Outcome
from oproj_lib.recorded import DATA

SCHEMA = "oproj_lib check of ranks 1"
FILE = DATA / "check_h200x2.json"
CHECK_COMMAND = (
    "torchrun --standalone --nproc-per-node 2 -m oproj_lib ranks --device cuda --timeout 20 --heartbeat 50 --json "
    "--suite programs"
)
FAILURES_COMMAND = "python -m oproj_lib.ranks.failures --programs payload --timeout 10 --out failures.json"
WHAT_IS_WRONG = {
    "killed": "rank 1 is killed between rounds",
    "late": "rank 1 starts 5 s late",
    "too late": "rank 1 starts when rank 0 has given up",
    "other tokens": "rank 1 is given other numbers of tokens",
}
PLAN_FIELDS = ("engine", "k", "shots", "fused", "consumer", "payload", "seed", "tokens", "transport")


@dataclass(frozen=True)
class CheckedPlan:
    """One plan of the suite. batches: numbers of tokens that came up; bit_exact: rounds whose outputs were compared bit
    for bit; findings: how many."""

    name: str
    engine: str
    k: int
    shots: int
    fused: bool
    consumer: str
    payload: str
    seed: int
    tokens: int
    transport: str
    batches: tuple[int, ...]
    rounds: int
    bit_exact: int
    findings: int
    seconds: float


@dataclass(frozen=True)
class RanksCheck:
    """A recorded session. provenance: its command is the check's."""

    provenance: Provenance
    ranks: int
    plans: tuple[CheckedPlan, ...]
    failures_command: str
    failures: tuple[Outcome, ...]

    def of(self, engine: str, k: int) -> tuple[CheckedPlan, ...]:
        """The plans of an engine and a K."""
        return tuple(plan for plan in self.plans if (plan.engine, plan.k) == (engine, k))

    def statement(self) -> str:
        """What was run and what was found, in one sentence."""
        rounds, exact = (sum(getattr(plan, name) for plan in self.plans) for name in ("rounds", "bit_exact"))
        return (
            f"{len(self.plans)} plans, {rounds:,} rounds, {exact:,} of them compared bit for bit, "
            f"{sum(plan.findings for plan in self.plans)} findings"
        )


# ---- data ----


def summary(
    lines: Sequence[str], failures: Sequence[Mapping[str, Any]], source: Provenance, date: str
) -> dict[str, Any]:
    """The contents of a data file. lines: of `ranks --suite --json`; failures: of ``ranks.failures``; source: of an
    exchange in the same session; date: when the check began.

    Raises ValueError for plans of different numbers of ranks.
    """
    found = [json.loads(line) for line in lines]
    ranks = {one["plan"]["ranks"] for one in found}
    if len(ranks) != 1:
        raise ValueError(f"plans for {sorted(ranks)} ranks: a session has one number")
    plans = [
        {
            "name": one["name"],
            **{name: one["plan"][name] for name in PLAN_FIELDS},
            "batches": one["batches"],
            "rounds": one["rounds"],
            "bit_exact": one["bit_exact_rounds"],
            "findings": len(one["findings"]),
            "seconds": round(one["seconds"], 2),
        }
        for one in found
    ]
    clocks = {f"{moment}, bench.exchange": answers for moment, answers in source.clocks.items()}
    return {
        "schema": SCHEMA,
        "provenance": replace(source, command=CHECK_COMMAND, date=date, clocks=clocks).as_dict(),
        "ranks": ranks.pop(),
        "plans": plans,
        "failures_command": FAILURES_COMMAND,
        "failures": [
            {
                "case": one["case"],
                "ended": [{**ended, "said": _words(ended["said"])} for ended in one["ended"]],
                "wrong": one["wrong"],
            }
            for one in failures
        ],
    }


def _words(said: str) -> str:
    """A process' last line where it is a sentence, without the plans that it may list; a table's edge is none."""
    return re.sub(r": rank 0: \{.*", ": ...", said) if re.search(r"\w", said) else ""


def read_check(path: Path = FILE) -> RanksCheck:
    """A data file. Raises FileNotFoundError, and ValueError for one of another schema or with other fields."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{path.name}: schema {found!r}, this version reads {SCHEMA!r}")
    try:
        return RanksCheck(
            read_provenance(data["provenance"]),
            data["ranks"],
            tuple(CheckedPlan(**{**plan, "batches": tuple(plan["batches"])}) for plan in data["plans"]),
            data["failures_command"],
            tuple(
                Outcome(
                    one["case"],
                    (Ended(**one["ended"][0]), Ended(**one["ended"][1])),
                    tuple(one["wrong"]),
                )
                for one in data["failures"]
            ),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path.name} does not have this version's fields: {error}") from error


# ---- tables ----


def check_markdown(check: RanksCheck) -> str:
    """A row per engine and K of the check."""
    lines = [
        "| engine | K | plans | forms | consumers | M | rounds | bit for bit | findings |",
        "| --- | ---: | ---: | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for engine, k in dict.fromkeys((plan.engine, plan.k) for plan in check.plans):
        plans = check.of(engine, k)
        shots = _every(plans, lambda plan: f"{plan.shots}-shot")
        forms = f"{shots}; {_every(plans, lambda plan: 'fused' if plan.fused else 'split')}"
        batches = ", ".join(map(str, sorted({batch for plan in plans for batch in plan.batches})))
        sums = " | ".join(
            f"{sum(getattr(plan, name) for plan in plans):,}" for name in ("rounds", "bit_exact", "findings")
        )
        consumers = _every(plans, lambda plan: plan.consumer)
        lines.append(f"| {engine} | {k} | {len(plans)} | {forms} | {consumers} | {batches} | {sums} |")
    return "\n".join(lines)


def _every(plans: Sequence[CheckedPlan], what: Callable[[CheckedPlan], str]) -> str:
    return ", ".join(sorted({what(plan) for plan in plans}))


def failures_markdown(check: RanksCheck) -> str:
    """A row per case and rank: exit code, seconds, last words."""
    lines = [
        "| what is wrong | rank | exit code | seconds | its last line |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for failure in check.failures:
        for rank, ended in enumerate(failure.ended):
            what = WHAT_IS_WRONG[failure.case] if rank == 0 else ""
            said = f"`{ended.said}`" if ended.said else ""
            lines.append(f"| {what} | {rank} | {ended.code} | {ended.seconds:g} | {said} |")
    return "\n".join(lines)


def documented() -> tuple[str, ...]:
    """What docs/two_gpus.md says of the recorded session, piece by piece."""
    check, exchange = read_check(), recorded_exchange()
    tables = [exchange_markdown(exchange, k) for k in exchange.ks]
    return (check.statement(), check_markdown(check), *tables, failures_markdown(check))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, or make the data file."""
    parser = argparse.ArgumentParser(prog="python -m oproj_lib.measured_ranks")
    parser.add_argument("--check", help="lines of `ranks --suite ... --json`")
    parser.add_argument("--failures", help="data file of ranks.failures")
    parser.add_argument("--exchange", help="data file of bench.exchange, of the same session")
    parser.add_argument("--date", help="when the check began (default: the exchange's date)")
    parser.add_argument("--out", default=str(FILE), help=f"default {FILE.name} of the package")
    arguments = parser.parse_args(argv)
    given = (arguments.check, arguments.failures, arguments.exchange)
    if not any(given):
        print("\n\n".join(documented()))
        return
    if not all(given):
        parser.error("--check, --failures and --exchange belong together")
    lines, failures = (Path(path).read_text(encoding="utf-8") for path in given[:2])
    source = read_exchange(Path(arguments.exchange)).provenance
    data = summary(lines.splitlines(), json.loads(failures), source, arguments.date or source.date)
    Path(arguments.out).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
