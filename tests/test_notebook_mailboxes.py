"""Notebook 11 by papermill, with its own values and with every parameter changed; and what its library computes."""

from __future__ import annotations

import html
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from notebook_checks import Runs, check_committed, check_declared, check_pictures, numbered, results
from rich.console import Console
from test_figures import cut_off

from oproj_lib import exchange_costs, exchange_tables, figures
from oproj_lib.conformance.cubins import ptxas
from oproj_lib.exchange import Channel
from oproj_lib.exchange_costs import RecordedExchange
from oproj_lib.exchange_programs import build_mailbox_reduce
from oproj_lib.kernels.mailbox_reduce import MailboxReduce
from oproj_lib.lessons import mailbox_runs
from oproj_lib.lessons.mailboxes import chunk_place, turn
from oproj_lib.notebooks import declared_parameters
from oproj_lib.program import Program
from oproj_lib.sass import disassemble

pytestmark = pytest.mark.xdist_group("notebook_mailboxes")  # one worker runs the notebook once for all tests
NAME = "11"  # as test_notebooks.py looks for it: "11"
NOTEBOOK = numbered(NAME)
CHANGED: dict[str, Any] = {
    "target": "sm_100a", "ranks": 2, "batch": 2, "shots": 2, "transport": "unicast", "calls": 2, "slow_rank": 0,
    "skew": 4.0, "seed": 3, "writer": 0, "token": 0, "column": 7160, "mistake": "arms this call's tokens",
    "crossing_us": 3.0, "link_gb_s": 900.0, "solutions": True,
}  # fmt: skip
PICTURES = 6


# The notebook


def test_it_is_committed_as_it_should_be() -> None:
    code = check_committed(NOTEBOOK)
    assert sum("assert" in source for source in code) >= 14
    check_declared(NOTEBOOK, CHANGED)
    declared = declared_parameters(NOTEBOOK)
    assert all(declared[name] != value for name, value in CHANGED.items())


def test_its_own_values_go_together() -> None:
    """The whole run with them is an exhaustive test: the run with changed ones has every cell in it already."""
    own = declared_parameters(NOTEBOOK)
    assert own["writer"] < own["ranks"] and own["slow_rank"] < own["ranks"] in mailbox_runs.RANKS
    assert own["token"] < own["batch"] and own["column"] < 7168 and own["mistake"] in mailbox_runs.BROKEN


USUAL = pytest.param({}, marks=pytest.mark.exhaustive, id="usual")


@pytest.mark.parametrize("parameters", [pytest.param(CHANGED, id="changed"), USUAL])
def test_what_does_not_depend_on_parameters(parameters: Mapping[str, Any], runs: Runs) -> None:
    run = runs(NOTEBOOK, parameters)
    assert run.seconds < 120  # 20 on two idle cores; a runner may be busy
    check_pictures(run, PICTURES)
    shown = {cell: plain_text(output) for cell, output in results(run).items()}
    for mistake, counts in (("two generations", "11-"), ("arms this call's tokens", "--1")):
        row = f"│ {mistake} +│.+?│" + "│".join(f" +{count} " for count in counts) + "│"
        assert re.search(row, shown["broken-run"]), mistake
    assert "recorded on two NVIDIA H200, NVLink, multicast off" in shown["recorded-table"]
    for batch, us, ratio in ((1, "3.27", "4.83"), (8, "4.06", "4.12")):
        assert f"target met at K = 1536, M = {batch}: {us} us exposed" in shown["waits-table"]
        assert f"{ratio} times less than the best" in shown["waits-table"]
    assert re.search(r"│ 1536 │ +8 │ direct +│ +512 x 124 │ +0 │ neither +│ +9.66 │", shown["room-table"])


@pytest.mark.exhaustive
def test_with_its_own_values(runs: Runs) -> None:
    shown = {cell: plain_text(output) for cell, output in results(runs(NOTEBOOK)).items()}
    assert "call 2, rank 1: slot 9; chunk of token 1, column 1003: byte 403,408" in shown["map-check"]
    assert "rank 0 polls mailbox of rank 0 [slot 1, token 1, column 1000]" in shown["never-run"]
    assert "(word 1 still armed); to be written by rank 1; nobody is left" in shown["never-run"]
    assert "0 of 21,504 outputs differ" in shown["same-bits"]


def plain_text(output: str) -> str:
    """An output as `results` gives it, without escapes."""
    return re.sub(r"\\x1b\[[\d;]*m", "", html.unescape(output).replace("\\'", "'").replace('\\"', '"'))


SAYS = {
    "target": ("setup", "sm_100a (Blackwell)"),
    "ranks": ("map-picture", "the 6 slots of a mailbox for 2 ranks"),
    "batch": ("map-picture", "2 tokens by 7168 columns"),
    "shots": ("ranks-check", "2 shot(s)"),
    "transport": ("ranks-check", "by unicast"),
    "slow_rank": ("ranks-check", "rank 0 gets"),
    "skew": ("ranks-check", "0.20 times the turns"),
    "seed": ("ranks-check", "order 3"),
    "calls": ("map-check", "call 1, "),
    "writer": ("map-check", "rank 0: slot 2"),
    "token": ("map-check", "token 0"),
    "column": ("map-check", "column 7160"),
    "mistake": ("mistake-report", "arms this call's tokens: 0 findings, "),
    "crossing_us": ("shots-picture", "3 us per crossing"),
    "link_gb_s": ("shots-picture", "900 GB/s"),
    "solutions": ("exercise-turn-check", "turn: right. (the solution)"),
}
"""The cell, and what it says when the parameter is changed."""


def test_every_parameter_shows(runs: Runs) -> None:
    assert SAYS.keys() == CHANGED.keys()
    changed = {cell: plain_text(output) for cell, output in results(runs(NOTEBOOK, CHANGED)).items()}
    for parameter, (cell, shown) in SAYS.items():
        assert shown in changed[cell], parameter


@pytest.mark.exhaustive
def test_what_shows_comes_from_the_parameter(runs: Runs) -> None:
    usual = {cell: plain_text(output) for cell, output in results(runs(NOTEBOOK)).items()}
    for parameter, (cell, shown) in SAYS.items():
        assert shown not in usual[cell], parameter


def test_how_ranks_run_depends_on_all_of_it() -> None:
    """The parameters of section 3 that show in the timeline alone."""
    usual: dict[str, Any] = {"schedule": 0, "slow": {1: 2.0}}
    changes: tuple[dict[str, Any], ...] = (
        {}, {"schedule": 1}, {"slow": {0: 2.0}}, {"slow": {1: 4.0}}
    )  # fmt: skip
    made = [mailbox_runs.run_calls(2, [1], ctas=1, **{**usual, **change}) for change in changes]
    assert len({run.grids for run in made}) == len(changes)
    assert not any(run.findings or run.wrong for run in made)


# Runs


def test_a_flipped_bit_is_counted() -> None:
    run = mailbox_runs.run_calls(2, [1], ctas=1)
    assert run.outputs == 64 and (run.wrong, run.different) == (0, 0)
    first, second = run.outs[0]
    second = second.copy()
    second.view(np.uint16)[0, 5] ^= 1
    changed = replace(run, outs=((first, second),))
    assert (changed.wrong, changed.different) == (1, 1)
    both = replace(run, outs=((second, second),))
    assert (both.wrong, both.different) == (2, 0)
    # Partial sums of 128 products up to 64, and their sum, are below 2**14: a BF16 step there is 64.
    assert np.abs(first.astype(float) - run.partials[0].sum(axis=0)).max() <= 3 * 32


def test_who_should_have_written() -> None:
    """One shot: the slot says it. Two shots: the sender in the receive view, the column's owner in the result."""
    one, two = mailbox_runs.Ranks(4, 1), mailbox_runs.Ranks(4, 1, shots=2)

    def writers(channel: Channel, *places: tuple[int, int]) -> list[str]:
        named = channel.boxes[2].writer_of
        assert named is not None
        return [named((slot, 0, column)) for slot, column in places]

    first = writers(one.exchange.first, (0, 7167), (3, 0), (4, 0), (11, 0))
    assert first == ["rank 0", "rank 3", "rank 0", "rank 3"]
    assert writers(two.exchange.first, (1, 1791), (10, 0)) == ["rank 1", "rank 2"]
    owners = writers(two.exchange.result, (2, 0), (0, 1791), (1, 1792), (2, 7167))
    assert owners == ["rank 0", "rank 0", "rank 1", "rank 3"]


def test_an_assembler_shows_what_weak_and_volatile_loads_become(tmp_path: Path) -> None:
    """What section 2 and the exercise say of them: volatile is the same code, weak loses what leads past L1."""
    program = build_mailbox_reduce(MailboxReduce(1), target="sm_90a", batch=1, mailbox_tokens=1)
    relaxed = loads_of(program, "ld.relaxed.sys.global", tmp_path)
    assert relaxed == ["LDG.E.128.STRONG.SYS"] * 2
    assert loads_of(program, "ld.volatile.global", tmp_path) == relaxed
    assert loads_of(program, "ld.global", tmp_path) == ["LDG.E.128"] * 2


def loads_of(program: Program, load: str, folder: Path) -> list[str]:
    """Opcodes of the 16-byte loads when the poll uses another instruction."""
    source, cubin = folder / "poll.ptx", folder / "poll.cubin"
    source.write_text(program.ptx.replace("ld.relaxed.sys.global.v4", f"{load}.v4"))
    subprocess.run([str(ptxas()), "-arch=sm_90a", "-o", str(cubin), str(source)], check=True)
    (code,) = disassemble(cubin.read_bytes()).values()
    return [one.opcode for one in code if one.opcode.startswith("LDG.E.128")]


# Costs


def test_costs_are_those_worked_out_by_hand() -> None:
    """One token, 14336 bytes, over 8 ranks: shards of 1792 bytes."""
    forms = {cost.form: cost for cost in exchange_costs.costs(8, 1)}
    by_hand = {
        "one shot, multicast": (14_336, 100_352, 1.0, 114_688, 50_176, 1),
        "one shot, unicast": (100_352, 100_352, 8.0, 114_688, 50_176, 1),
        "two shots, multicast": (14_336, 25_088, 1.125, 28_672, 6_272, 2),
        "two shots, unicast": (25_088, 25_088, 2.0, 28_672, 6_272, 2),
    }
    assert forms.keys() == by_hand.keys()
    for form, numbers in by_hand.items():
        cost = forms[form]
        seen = (cost.leaves, cost.arrives, float(cost.stores), cost.polled, cost.additions, cost.crossings)
        assert seen == numbers, form
    # 100,352 bytes at 448 GB/s: 0.224 us
    assert forms["one shot, multicast"].microseconds(2.0, 448.0) == pytest.approx(2.224)
    # (7 - 1.75) * 14336 M / 450e3 > 1.2 from M = 7.2 on; (3 - 1.5) * ... from 25.1 on
    assert [exchange_costs.break_even(ranks, 1.2, 450.0) for ranks in (2, 4, 8)] == [None, 26, 8]


def test_recorded_times_are_the_ones_given() -> None:
    recorded = exchange_costs.recorded_exchange()
    assert recorded.us == {
        "NCCL all_reduce": {1: 12.2, 8: 12.0, 64: 18.0},
        "symm_mem one_shot_all_reduce": {1: 6.5, 8: 7.3, 64: 12.1},
        "symm_mem two_shot_all_reduce_": {1: 6.4, 8: 7.1, 64: 9.8},
        "copy to the peer": {1: 2.4, 8: 2.5, 64: 4.6},
    }
    assert (recorded.ranks, recorded.date) == (2, "2026-11")
    assert "two NVIDIA H200" in recorded.machine and "multicast off" in recorded.machine
    more = replace(recorded, us={**recorded.us, "pigeon": {8: 123.4}})
    assert re.search(r"pigeon.*not recorded.*123\.4.*not recorded", printed(more))
    assert "pigeon 123.4 at M = 8" in figures.recorded_exchanges(more).alt


def printed(recorded: RecordedExchange) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(exchange_tables.recorded_exchange_table(recorded))
    return capture.get()


# Exercises and pictures


def test_what_exercises_are_checked_against() -> None:
    """Literals, worked out by hand."""
    assert chunk_place(0, 0, 0, 7, 2, 4) == (0, 0)
    assert chunk_place(5, 1, 2, 4095, 4, 3) == (9, 2 * ((9 * 3 + 2) * 7168 + 4088))
    assert turn(0, 5, 0) == (0, 2, 0, 0, 5) and turn(7, 1, 64) == (1, 0, 64, 1, 1)


DRAWN: dict[str, Callable[[], figures.Picture]] = {
    "map, 8 ranks": lambda: figures.mailbox_map(8, 64, call=5, writer=7, token=63, column=7167),
    "calendar": lambda: figures.generation_calendar((64, 1, 64, 64, 1)),
    "shots": lambda: figures.shots_by_batch(8, 64, crossing_us=1.2, link_gb_s=450),
    "recorded": lambda: figures.recorded_exchanges(exchange_costs.recorded_exchange()),
}


@cache
def drawn(name: str) -> figures.Picture:
    return DRAWN[name]()


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_can_be_read(name: str) -> None:
    picture = drawn(name)
    assert len(picture.alt) > 80 and cut_off(picture) == []


def test_alternatives_say_what_the_data_say() -> None:
    alt = drawn("map, 8 ranks").alt
    assert "slot 23, generation 2 of rank 7" in alt and "CTA 111" in alt and "columns 7160 to 7167" in alt
    last = 2 * (24 * 64 * 7168 - 8)
    assert f"from byte {last:,} of the mailbox on" in alt
    assert "with 3 generations never; with 2 generations in calls 1 to 4" in drawn("calendar").alt
    assert "6,422.5 arrive with one shot and 1,605.6 with two" in drawn("shots").alt
    assert "less from M = 8 on" in drawn("shots").alt


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mailbox_runs.Ranks(3, 1), "ranks = 3: this notebook runs 2, 4, 8"),
        (lambda: mailbox_runs.Ranks(2, 1, shots=3), "shots = 3: choose 1"),
        (lambda: mailbox_runs.run_calls(2, [1], transport="pigeon"), "transport = 'pigeon'"),
        (lambda: mailbox_runs.run_calls(2, [1], shots=2, ctas=1), "ctas = 1: in the two-shot form"),
        (lambda: mailbox_runs.run_calls(2, [1], schedule=0, slow={2: 1.0}, ctas=1), "skew 1.0 of rank 2"),
        (lambda: mailbox_runs.deliveries(2, 1, 2), "rank 2: there are 2, choose 0 to 1"),
        (lambda: mailbox_runs.never_arrives(2, 3, 0, 3, 0), "token = 3: choose 0 to 2"),
        (lambda: mailbox_runs.never_arrives(2, 3, 0, 0, 7168), "column = 7168: choose 0 to 7167"),
        (lambda: mailbox_runs.run_broken("rust"), "mistake = 'rust': choose from two generations, arms"),
        (lambda: mailbox_runs.find_run({}, "rust"), "mistake = 'rust'"),
        (lambda: figures.mailbox_map(2, 3, call=0, writer=2, token=0, column=0), "writer = 2: choose 0 to 1"),
        (lambda: figures.generation_calendar([1], (1,)), "at least 1 call and 2 generations"),
        (lambda: figures.shots_by_batch(2, 65, crossing_us=1, link_gb_s=1), "batch = 65"),
        (lambda: figures.shots_by_batch(2, 1, crossing_us=0, link_gb_s=1), "both must be positive"),
        (lambda: exchange_costs.cost(1, 1, 1, "unicast"), "ranks = 1: with fewer than 2"),
        (lambda: exchange_costs.cost(3, 1, 2, "unicast"), "ranks = 3 does not divide the 7168 columns"),
        (lambda: exchange_costs.cost(2, 1, 3, "unicast"), "shots = 3"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
