"""The recorded check of two GPUs: its data file, what is refused, and docs/two_gpus.md against it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oproj_lib import measured_exchange, measured_ranks
from oproj_lib.measured_ranks import read_check, summary
from oproj_lib.provenance import Provenance
from oproj_lib.ranks.failures import CASES
from oproj_lib.ranks.plan import Plan
from oproj_lib.ranks.result import RanksResult

NOTES = Path(__file__).resolve().parents[1] / "docs" / "two_gpus.md"
SOURCE = Provenance(
    gpu="NVIDIA H200", capability="9.0", multiprocessors=132, l2_bytes=62914560, driver="580.1", cuda_driver_api="13.0",
    system="Linux", processor="some", cores=32, python="3.12.3", packages={"torch": "2.11.0"},
    clocks={"after": {"clocks.sm": "1980 MHz"}}, date="2026-11-30T01:02:03+00:00", command="torchrun exchange",
)  # fmt: skip
RESULTS = (
    RanksResult(
        Plan(2, transport="unicast", engine="direct", fused=True), "NVIDIA H200", 20, 20, (1, 8), 1.2345, (), name="a"
    ),
    RanksResult(
        Plan(2, transport="unicast", engine="direct", shots=2), "NVIDIA H200", 9, 7, (8,), 2.0, ("bad", "worse"),
        name="b",
    ),
)  # fmt: skip
REFUSED = (
    'error: the plan must be the same on every rank, nothing was launched: rank 0: {"k": 1}; rank 1: {"k": 2}'
)
FAILURES = [
    {
        "case": "other tokens",
        "ended": [
            {"code": 2, "seconds": 7.4, "said": REFUSED},
            {"code": 0, "seconds": 1.0, "said": "└──┴──┘"},
        ],
        "wrong": ["rank 1 ended with code 0"],
        "ok": False,
    }
]


def lines() -> list[str]:
    return [json.dumps(result.as_dict()) for result in RESULTS]


def written(tmp_path: Path, change: Callable[[dict[str, Any]], object] = lambda data: None) -> Path:
    data = summary(lines(), FAILURES, SOURCE, "2026-11-30T00:59:00+00:00")
    change(data)
    path = tmp_path / "check.json"
    path.write_text(json.dumps(data))
    return path


def test_what_a_session_becomes(tmp_path: Path) -> None:
    check = read_check(written(tmp_path))
    assert (check.provenance.date, check.provenance.command) == (
        "2026-11-30T00:59:00+00:00", measured_ranks.CHECK_COMMAND
    )  # fmt: skip
    assert check.provenance.clocks == {"after, bench.exchange": {"clocks.sm": "1980 MHz"}}
    assert [(plan.name, plan.rounds, plan.bit_exact, plan.findings) for plan in check.plans] == [
        ("a", 20, 20, 0), ("b", 9, 7, 2)
    ]  # fmt: skip
    assert check.statement() == "2 plans, 29 rounds, 27 of them compared bit for bit, 2 findings"
    assert measured_ranks.check_markdown(check).splitlines()[2:] == [
        "| direct | 1536 | 2 | 1-shot, 2-shot; fused, split | reduce | 1, 8 | 29 | 27 | 2 |"
    ]
    (failure,) = check.failures
    assert failure.wrong == ("rank 1 ended with code 0",)
    assert [ended.said for ended in failure.ended] == [
        "error: the plan must be the same on every rank, nothing was launched: ...", ""
    ]  # fmt: skip
    assert measured_ranks.failures_markdown(check).splitlines()[3] == "|  | 1 | 0 | 1 |  |"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check, failures, out = (tmp_path / name for name in ("check.jsonl", "failures.json", "out.json"))
    check.write_text("\n".join(lines()) + "\n")
    failures.write_text(json.dumps(FAILURES))
    given = ["--check", str(check), "--failures", str(failures)]
    measured_ranks.main([*given, "--exchange", str(measured_exchange.FILE), "--out", str(out)])
    source = measured_exchange.recorded().provenance
    found = read_check(out)
    assert len(found.plans) == 2 and (found.provenance.gpu, found.provenance.date) == (
        source.gpu,
        source.date,
    )
    with pytest.raises(SystemExit):
        measured_ranks.main(given)
    assert "--check, --failures and --exchange belong together" in capsys.readouterr().err
    measured_ranks.main([])
    assert "\n\n".join(measured_ranks.documented()) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data.update(schema="x"),
            "check.json: schema 'x', this version reads 'oproj_lib check of ranks 1'",
        ),
        (lambda data: data.pop("plans"), "does not have this version's fields: 'plans'"),
        (lambda data: data["plans"][0].update(colour=1), "version's fields: .*colour"),
        (lambda data: data["plans"][0].pop("k"), "version's fields: .*'k'"),
        (lambda data: data["failures"][0]["ended"][0].pop("code"), "version's fields: .*'code'"),
        (lambda data: data["provenance"].pop("date"), r"provenance lacks \['date'\]"),
    ],
)
def test_what_is_refused(change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_check(written(tmp_path, change))


def test_one_number_of_ranks() -> None:
    other = json.dumps(replace(RESULTS[0], plan=Plan(3, transport="unicast")).as_dict())
    with pytest.raises(ValueError, match=r"plans for \[2, 3\] ranks: a session has one number"):
        summary([*lines(), other], FAILURES, SOURCE, "")


# What is recorded


def test_the_recorded_check_is_what_it_is_called() -> None:
    """Engines, both K, both forms, both shots, both consumers; every round compared bit for bit; nothing found."""
    check = read_check()
    assert check.statement() == "40 plans, 7,680 rounds, 7,680 of them compared bit for bit, 0 findings"
    combinations = {(plan.engine, plan.k, plan.shots, plan.fused, plan.consumer) for plan in check.plans}
    assert combinations == {
        (engine, k, shots, fused, consumer)
        for engine in ("direct", "producer", "wgmma")
        for k in (1536, 768)
        for shots in (1, 2)
        for fused in (True, False)
        for consumer in (("reduce",) if engine == "direct" else ("reduce", "attnres"))
    }
    for plan in check.plans:
        assert (
            plan.batches == ((1, 8) if plan.engine == "direct" else (1, 8, 16, 64))
            and plan.transport == "unicast"
        )
    exchange = measured_exchange.recorded()
    for name in ("gpu", "driver", "packages", "system", "cores"):
        assert getattr(check.provenance, name) == getattr(exchange.provenance, name)
    assert check.provenance.date[:10] == exchange.provenance.date[:10]
    assert {plan.name for plan in check.plans} >= exchange.plans.keys()


def test_the_recorded_failures() -> None:
    """As ``ranks.failures`` wants them, all of its cases: codes, words, and rank 0 within three timeouts of a kill."""
    check = read_check()
    found = {failure.case: failure for failure in check.failures}
    assert (
        found.keys()
        == {case.__name__.replace("_", " ") for case in CASES}
        == measured_ranks.WHAT_IS_WRONG.keys()
    )
    assert all(not failure.wrong for failure in check.failures)
    codes = {case: tuple(ended.code for ended in failure.ended) for case, failure in found.items()}
    assert codes == {"killed": (3, -9), "late": (0, 0), "too late": (2, 2), "other tokens": (2, 2)}
    assert "missing: rank 1" in found["killed"].ended[0].said and found["killed"].ended[0].seconds < 30


def test_the_notes_say_what_the_data_say() -> None:
    """After another recording: `python -m oproj_lib.measured_ranks`, into docs/two_gpus.md."""
    notes = NOTES.read_text(encoding="utf-8")
    for piece in measured_ranks.documented():
        assert piece in notes


def test_no_path_of_a_machine_is_recorded() -> None:
    for path in (measured_ranks.FILE, measured_exchange.FILE):
        assert not re.search(r"[ \"\']/|\.\./", path.read_text(encoding="utf-8")), path.name
