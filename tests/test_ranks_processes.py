"""Ranks as processes of their own, which meet through a real store, exchange, are killed and come late.

Everything but the GPU is what runs on GPUs, see ``rank_process``. One start of two processes costs about ten seconds of
a core, nearly all of it imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oproj_lib import measured_exchange
from oproj_lib.ranks import failures, programs
from oproj_lib.ranks.failures import Ended, Outcome
from oproj_lib.ranks.plan import Plan

PROCESS = str(Path(__file__).with_name("rank_process.py"))
RANKS_COMMAND = (sys.executable, PROCESS, "ranks", "--device", "cuda", "--engine", "payload")


def payload_plan(**options: Any) -> Plan:
    return Plan(2, engine="payload", transport="unicast", **options)


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """rank_process.py on two ranks."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        PROCESS,
    ]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=150)


def test_a_suite_goes_on_behind_a_plan_with_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {
        "a": payload_plan(tokens=3, batches=(3, 1), rounds=5, payload="nasty"),
        "b": payload_plan(tokens=2, batches=(2,), rounds=6),
        "c": payload_plan(tokens=2, batches=(1,), rounds=4),
    }
    for name, plan in plans.items():
        programs.save(plan, tmp_path / name)
    monkeypatch.setenv("SPOILED", "payload_m2")
    done = torchrun(
        "ranks", "--device", "cuda", "--suite", str(tmp_path), "--timeout", "20", "--heartbeat", "3", "--json"
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert done.returncode == 1, done.stderr
    assert [(row["name"], row["rounds"]) for row in rows if row["rank"] == 0] == [
        ("a", 5),
        ("b", 3),
        ("c", 4),
    ]
    assert {row["name"] for row in rows if not row["ok"]} == {"b"}
    found = {
        row["rank"]: row["findings"] for row in rows if row["name"] == "b"
    }  # the ranks print in any order
    assert any("round 0 (M = 2), rank 0: partial sums of rank 1: 1 of 14336" in line for line in found[0])


def test_the_benchmark_writes_what_its_reader_reads(tmp_path: Path) -> None:
    """Times mean nothing here; launches, comparisons with float64 and the file are the real ones."""
    plan = Plan(2, engine="producer", transport="unicast", batches=(1,), k=768)
    programs.save(plan, tmp_path / "split")
    out = tmp_path / "exchange.json"
    done = torchrun(
        "exchange", "--programs", str(tmp_path / "split"), "--batches", "1", "--replays", "2", "--timeout", "20",
        "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = measured_exchange.read_exchange(out)
    assert [row.candidate for row in measured.rows] == ["split", "nccl", "one_shot", "two_shot"]
    assert {(row.k, row.batch, row.replays) for row in measured.rows} == {(768, 1, 2)}
    assert (
        measured.label("split") == "producer, split, 1-shot" and measured.provenance.gpu == "NVIDIA stand-in"
    )


# What happens when something is wrong


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("payload")
    programs.save(payload_plan(batches=(1, 8, 16, 64)), folder)
    return str(folder)


LATE = [pytest.param(case, marks=pytest.mark.exhaustive) for case in (failures.late, failures.other_tokens)]


@pytest.mark.parametrize("case", [failures.killed, failures.too_late, *LATE])
def test_failures_end_as_they_must(case: Any, payload: str) -> None:
    (outcome,) = failures.run_cases(payload, 6.0, RANKS_COMMAND, [case])
    assert outcome.wrong == (), outcome
    assert outcome.as_dict()["ok"] is True


def test_a_failure_that_goes_unnoticed_is_reported() -> None:
    """A rank that ends well although the other was killed, and one that says the wrong thing."""
    quiet = ("/bin/sh", "-c", "sleep 1; echo error: all is well; exit 3", "rank")
    (outcome,) = failures.run_cases("nothing", 0.2, quiet, [failures.too_late])
    assert outcome.wrong == (
        "rank 0 ended with code 3, expected 2", "rank 0 did not say 'missing: rank 1'",
        "rank 1 ended with code 3, expected 2", "rank 1 did not say 'rank 0, which keeps it'",
    )  # fmt: skip
    (outcome,) = failures.run_cases("nothing", 0.2, quiet, [failures.killed])
    assert outcome.case == "killed" and "nobody keeps a store at 127.0.0.1:" in outcome.wrong[0]
    assert failures.said("error: first\nnoise\nerror: last\nTraceback\n\n") == "error: last"
    assert Outcome("late", (Ended(0, 1.0, ""), Ended(0, 1.0, "")), ("late",)).as_dict()["ok"] is False
