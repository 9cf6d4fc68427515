"""Rounds of an exchange between virtual ranks: no hang, no lost or stale word, memory armed again, the right sums."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from oproj_lib import bf16, figures, problem, ranks
from oproj_lib.cli import EXIT_FOUND, EXIT_OK, EXIT_USAGE, main
from oproj_lib.exchange_programs import build_mailbox_reduce
from oproj_lib.kernels.mailbox_reduce import MailboxReduce
from oproj_lib.lessons.broken_mailbox import ClearsAhead, ClearsThisCallsTokens, RotatesTwo, TwoGenerations
from oproj_lib.ranks.inputs import Inputs, payload_values
from oproj_lib.ranks.payload import PayloadPublisher, build_payload
from oproj_lib.ranks.plan import Plan, few_batches
from oproj_lib.ranks.programs import Chain, build_chains
from oproj_lib.ranks.virtual import run_virtual

MANY = (1, 2, 7, 1, 2, 7, 1, 2, 7, 64)
"""Numbers of tokens of the long run; 64 in one of ten rounds, since it costs twice as much as another."""


def protocol(**options: Any) -> Plan:
    """One CTA per kernel, that is a whole exchange of 64 columns, with given partial sums of every kind."""
    given = {"ranks": 2, "engine": "payload", "ctas": 1, "payload": "nasty", "batches": (1, 2, 7), **options}
    return Plan(**given)


# Rounds


def test_hundreds_of_rounds_of_skewed_ranks() -> None:
    """M jumps between 1 and 64, up to twelve rounds are in flight, NaN, Inf, subnormals and -0.0 among the sums: a
    hundred times around the three generations. `test_many_rounds` has more of them."""
    result = run_virtual(protocol(rounds=300, in_flight=12, batches=MANY, seed=5), skewed=True)
    assert result.findings == ()
    assert (result.rounds, result.exact, result.batches) == (300, 300, (1, 2, 7, 64))


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 8, "rounds": 4, "in_flight": 4},
        {"ranks": 3, "transport": "unicast"},
        {"shots": 2, "ctas": None, "rounds": 3, "tokens": 8},
        {
            "consumer": "attnres",
            "ctas": None,
            "rounds": 3,
            "tokens": 3,
            "batches": (1, 3),
            "payload": "random",
        },
    ],
    ids=["eight ranks", "unicast", "two-shot", "attnres"],
)
def test_every_form_of_exchange(options: dict[str, Any]) -> None:
    plan = protocol(**{"rounds": 6, **options})
    result = run_virtual(plan, skewed=True)
    assert result.findings == () and result.exact == plan.rounds


@pytest.mark.parametrize(
    ("engine", "target", "fused"),
    [
        ("producer", "sm_90a", False),
        ("producer", "sm_90a", True),
        ("umma", "sm_100a", False),
        ("wgmma", "sm_90a", True),
    ],
)
def test_every_engine(engine: str, target: str, fused: bool) -> None:
    """Small K, one CTA; the last rounds in flight are compared bit for bit, all with float64."""
    plan = Plan(
        2,
        3,
        engine=engine,
        target=target,
        fused=fused,
        ctas=1,
        k=128,
        tokens=9,
        batches=(9, 1),
        payload="nasty",
    )
    result = run_virtual(plan, skewed=engine != "umma", checks=engine == "producer")
    assert result.findings == () and 1 <= result.exact <= 3


def test_attnres_behind_an_engine_is_followed_round_by_round() -> None:
    plan = Plan(2, 2, engine="producer", consumer="attnres", k=128, tokens=2, batches=(2, 1))
    result = run_virtual(plan)
    assert result.findings == () and result.exact == 2 and result.plan.in_flight == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("count", "rounds"), [(2, 1000), (8, 150), (16, 60)])
def test_many_rounds(count: int, rounds: int, seed: int) -> None:
    plan = protocol(ranks=count, rounds=rounds, in_flight=12, batches=few_batches(seed, 64), seed=seed)
    assert run_virtual(plan, skewed=True).findings == ()


@pytest.mark.exhaustive
@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize(
    ("engine", "target"), [("producer", "sm_90a"), ("umma", "sm_100a"), ("wgmma", "sm_90a")]
)
def test_eight_whole_ranks(engine: str, target: str, shots: int) -> None:
    plan = Plan(
        8, 4, shots=shots, engine=engine, target=target, tokens=16, batches=(1, 9, 16), payload="nasty"
    )
    assert run_virtual(plan).findings == ()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", problem.KINDS)
def test_every_kind_of_input(kind: str) -> None:
    plan = Plan(2, 3, engine="producer", k=768, ctas=2, tokens=16, batches=(3, 16), payload=kind)
    assert run_virtual(plan, skewed=True, checks=True).findings == ()


# Broken kernels


def chains(
    plan: Plan, *, consumer: Any = MailboxReduce, publisher: Any = PayloadPublisher, **options: Any
) -> Any:
    """A plan's programs with one class exchanged."""
    made: dict[int, Chain] = {}
    for batch in set(plan.batches):
        shape: dict[str, Any] = {"target": plan.target, "mailbox_tokens": plan.tokens}
        made[batch] = (
            build_payload(publisher(batch, **options), ranks=plan.ranks, **shape),
            build_mailbox_reduce(consumer(plan.ranks), batch=batch, **shape),
        )
    return made


class PublishesTwo(PayloadPublisher):
    """Publishes into two generations."""

    records = TwoGenerations()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"consumer": ClearsThisCallsTokens}, "words are not armed again"),
        ({"consumer": ClearsAhead}, "words are not armed again|polls for ever|deadlock"),
        (
            {"consumer": RotatesTwo, "publisher": PublishesTwo},
            "polls for ever|not armed again|never published",
        ),
        ({"policy": "plain"}, "sentinel"),
    ],
    ids=["this call's tokens", "clears ahead", "two generations", "sends -0.0"],
)
def test_a_broken_kernel_is_found(options: dict[str, Any], expected: str) -> None:
    plan = protocol(rounds=12, in_flight=4, batches=(7, 1), tokens=7)
    broken = run_virtual(plan, skewed=True, chains=chains(plan, **options))
    assert not broken.ok and any(part in line for line in broken.findings for part in expected.split("|")), (
        broken.findings
    )
    assert broken.rounds <= plan.rounds


class AddsBackwards(MailboxReduce):
    """Sums from the last rank to the first."""

    def reduce_chunk(self, base: Any, box: Any, turn: Any, crew: Any, out: Any, index: Any) -> None:
        reader = self.reader
        poll = reader.poll
        reader.poll = lambda address, offsets: poll(address, offsets)[::-1]  # type: ignore[method-assign]
        super().reduce_chunk(base, box, turn, crew, out, index)
        reader.poll = poll  # type: ignore[method-assign]


def test_another_order_of_the_sum_is_found() -> None:
    plan = protocol(ranks=3, rounds=2, payload="cancellation", batches=(7,), tokens=7)
    result = run_virtual(plan, chains=chains(plan, consumer=AddsBackwards))
    assert result.findings and all("not the sum in rank order" in line for line in result.findings)
    assert run_virtual(plan).ok


def test_a_stale_payload_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In round 2 rank 1 publishes what it published in round 1; what it should have published is known."""
    plan = protocol(rounds=4, batches=(7,), tokens=7, in_flight=1)
    given, other = Inputs.payload, Inputs(plan)

    def stale(inputs: Inputs, number: int, rank: int) -> np.ndarray:
        return given(inputs, 1 if (number, rank) == (2, 1) else number, rank)

    def right(inputs: Inputs, number: int, rank: int) -> np.ndarray:
        return bf16.publish(given(other, number, rank).astype(np.float32))

    monkeypatch.setattr(Inputs, "payload", stale)
    monkeypatch.setattr(Inputs, "published", right)
    result = run_virtual(plan)
    assert result.rounds == 3 and "round 2 (M = 7): not the sum in rank order" in result.findings[0]


# Inputs


def test_inputs_are_the_same_for_everybody_who_draws_them() -> None:
    plan = Plan(2, k=128, tokens=8, batches=(3, 8), payload="nasty")
    first, second = Inputs(plan), Inputs(plan)
    for number in range(3):
        assert (first.x(number, 1).view(np.uint16) == second.x(number, 1).view(np.uint16)).all()
        assert first.x(number, 0).shape == (plan.batch(number), 128)
    assert (first.x(0, 1)[-1].view(np.uint16) == first.x(1, 1)[-1].view(np.uint16)).all()  # the probe
    assert (first.weight(0) != first.weight(1)).any()


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        ("nan", np.isnan),
        ("inf", np.isinf),
        ("negative_zero", lambda values: (values == 0) & np.signbit(values)),
        ("subnormal", lambda values: (values != 0) & (np.abs(values) < 2.0**-126)),
    ],
)
def test_payloads_hold_what_their_kind_says(kind: str, test: Any) -> None:
    values = payload_values((64, 64), np.random.default_rng(0), kind).astype(np.float64)
    assert (
        200 < test(values).sum() < 600
    )  # an eighth of 4096 is 512, half of it where the kind has large values too


# Timeline and command line


def test_the_timeline_of_all_ranks() -> None:
    result = run_virtual(protocol(rounds=3, in_flight=3, seed=4), skewed=True)
    rows = ranks.timeline(result.handles)
    assert [row.rank for row in rows] == sorted(row.rank for row in rows) and {row.rank for row in rows} == {
        0,
        1,
    }
    for row in rows:
        assert row.start is not None and row.end is not None and row.start < row.end
        assert row.wait_begin is not None and row.wait_end is not None
        assert row.start <= row.wait_begin <= row.wait_end <= row.end
    console = Console(width=200, record=True)
    console.print(ranks.table(rows))
    assert "mailbox_reduce_r2" in console.export_text()
    picture = figures.rank_timeline(rows)
    assert f"{len(rows)} grids on 2 ranks" in picture.alt and picture.png().startswith(b"\x89PNG")


def test_a_picture_needs_grids() -> None:
    with pytest.raises(ValueError, match="0 grids that started: a picture shows 1 to 400"):
        figures.rank_timeline([])


def test_a_grid_that_never_ended_is_said_to_be_one() -> None:
    row = ranks.GridRow(0, "mailbox_reduce_r2_m1_sm_90a", 5, 6, None, None, None)
    assert "1 did not end" in figures.rank_timeline([row]).alt


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = "ranks --ranks 2 --rounds 3 --engine payload --ctas 1 --tokens 7 --batches 7,1 --skew"
    assert main([*command.split(), "--json"]) == EXIT_OK
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] and data["rounds"] == 3 and data["bit_exact_rounds"] == 3 and data["batches"] == [1, 7]
    assert data["plan"]["transport"] == "multicast"
    assert main([*command.split(), "--timeline"]) == EXIT_OK
    text = capsys.readouterr().out
    assert "2 ranks, 1-shot, payload and reduce" in text and "trigger" in text


def test_findings_make_the_command_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = protocol(rounds=3, batches=(7, 1), tokens=7)
    broken = chains(plan, policy="plain")
    monkeypatch.setattr("oproj_lib.ranks.virtual.build_chains", lambda plan: broken)
    command = "ranks --ranks 2 --rounds 3 --engine payload --ctas 1 --tokens 7 --batches 7,1 --payload negative_zero"
    assert main(command.split()) == EXIT_FOUND
    assert "sentinel" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device tpu", "device = 'tpu': choose one of vgpu, cuda"),
        ("--local", "--local does not belong to ranks --device vgpu"),
        ("--device cuda --local --skew", "--skew does not belong to ranks --device cuda"),
        ("--device cuda", "--device cuda needs one process per GPU: torchrun"),
        ("--transport smoke", "--transport smoke: choose multicast or unicast"),
        ("--shots 2 --ranks 3", "ranks = 3 does not divide the 7168 columns"),
        ("--engine tensor", "engine = 'tensor' is unknown"),
        ("--engine umma --target sm_90a", "engine 'umma' has no build for sm_90a"),
        ("--batches 8,65", "batch = 65 > tokens = 64"),
        ("--batches many", "--batches = 'many'"),
    ],
)
def test_impossible_commands_are_one_line(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ranks", *options.split()]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_programs_of_a_folder_are_those_of_the_plan(tmp_path: Any) -> None:
    from oproj_lib.ranks import programs

    plan = protocol(batches=(2, 1), tokens=2)
    programs.save(plan, tmp_path / "p")
    assert programs.load(plan, tmp_path / "p") == build_chains(plan)
