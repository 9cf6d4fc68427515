"""Data files of whole exchanges: what is read, what is refused, and what is shown of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_figures import cut_off

from oproj_lib import figures, measured_exchange
from oproj_lib.bench import exchange
from oproj_lib.measured_exchange import FILE, MeasuredExchange, parts, read_exchange
from oproj_lib.provenance import Provenance
from oproj_lib.ranks.plan import Plan
from oproj_lib.ranks.programs import Task

SOURCE = Provenance(
    gpu="NVIDIA H200", capability="9.0", multiprocessors=132, l2_bytes=62914560, driver="580.1", cuda_driver_api="13.0",
    system="Linux", processor="some", cores=32, python="3.12.3", packages={"torch": "2.11.0"}, clocks={},
    date="2026-11-30T01:02:03+00:00", command="torchrun --nproc-per-node 2 -m oproj_lib.bench.exchange",
)  # fmt: skip
PLANS = {
    "one": Task(Plan(2, transport="unicast", engine="direct", fused=True), name="one"),
    "other": Task(Plan(2, transport="unicast", engine="wgmma", shots=2, k=768), name="other"),
}
TIMES = {  # (K, M) -> candidate -> median; quartiles are 0.5 below and 1 above
    (1536, 8): {"one": 4.0, "nccl": 18.0, "one_shot": 14.0, "two_shot": 13.0},
    (1536, 64): {"one": 9.0, "nccl": 20.0, "one_shot": 17.0},
    (768, 8): {"other": 6.0, "nccl": 15.0, "one_shot": 10.5, "two_shot": 12.0},
}


def rows() -> list[dict[str, Any]]:
    return [
        {
            "k": k, "batch": batch, "candidate": name, "ours": name in PLANS, "median_us": us, "q1_us": us - 0.5,
            "q3_us": us + 1, "replays": 40, "predecessor_us": 9.3,
        }
        for (k, batch), times in TIMES.items()
        for name, us in times.items()
    ]  # fmt: skip


def written(
    tmp_path: Path, change: Callable[[dict[str, Any]], object] = lambda data: None
) -> MeasuredExchange:
    data = exchange.record(SOURCE.as_dict(), 2, list(PLANS.values()), rows())
    change(data)
    path = tmp_path / "exchange.json"
    path.write_text(json.dumps(data))
    return read_exchange(path)


def test_what_is_read(tmp_path: Path) -> None:
    measured = written(tmp_path)
    assert measured.title == "recorded on 2 x NVIDIA H200, 2026-11-30, torch 2.11.0, driver 580.1"
    assert (measured.ks, measured.batches(1536), measured.batches(768)) == ((1536, 768), (8, 64), (8,))
    assert measured.best(1536, 8, ours=False).candidate == "two_shot"
    assert (measured.ratio(1536, 8), measured.ratio(768, 8)) == (3.25, 1.75)
    assert [measured.label(name) for name in ("one", "other", "nccl")] == [
        "direct, fused, 1-shot", "wgmma, split, 2-shot", "torch.mm + NCCL all_reduce"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="nothing of ours at K = 768, M = 64"):
        measured.best(768, 64, ours=True)


def test_what_is_shown(tmp_path: Path) -> None:
    measured = written(tmp_path)
    console = Console(width=140)
    with console.capture() as capture:
        for part in parts(measured):
            console.print(part, highlight=False)
    shown = " ".join(capture.get().split())
    assert "4.00 (3.50-5.00)" in shown and "K = 1536: recorded on 2 x NVIDIA H200, 2026-11-30" in shown
    assert "best alternative / best of ours │ 3.25 │ 1.89" in shown
    assert (
        "K = 1536, M = 8: 4.00 us exposed (direct, fused, 1-shot), below 5; 3.25 times less than the best"
        in shown
    )
    assert (
        "alternative, at least 3" in shown
        and "command: torchrun --nproc-per-node 2 -m oproj_lib.bench" in shown
    )
    slow = replace(
        measured, rows=tuple(replace(row, median_us=5.0) if row.ours else row for row in measured.rows)
    )
    assert measured_exchange.target_lines(slow) == [
        "K = 1536, M = 8: 5.00 us exposed (direct, fused, 1-shot), not below 5; 2.60 times less than the best "
        "alternative, less than 3"
    ]
    assert parts(None) == [f"not measured yet: {measured_exchange.COMMAND} writes exchange_h200x2.json"]


def test_the_picture(tmp_path: Path) -> None:
    picture = figures.exposed_exchanges(written(tmp_path))
    assert cut_off(picture) == []
    assert "K = 1536, M = 8: direct, fused, 1-shot 4.00, torch.mm + NCCL all_reduce 18.00" in picture.alt
    assert "recorded on 2 x NVIDIA H200" in picture.alt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data.update(schema="oproj_lib exchange 1"),
            "schema 'oproj_lib exchange 1', this version reads",
        ),
        (
            lambda data: data.pop("schema"),
            "schema None, this version reads 'oproj_lib exchange 2': record it again",
        ),
        (lambda data: data.pop("ranks"), r"lacks \['ranks'\], unknown \[\]"),
        (lambda data: data["rows"][1].pop("q1_us"), r"row 1: lacks \['q1_us'\]"),
        (
            lambda data: data["rows"][2].update(candidate="pigeon"),
            "row 2: candidate 'pigeon' is not described",
        ),
        (lambda data: data["rows"][0].update(q1_us=4.1), "row 0: the median is not between the quartiles"),
        (lambda data: data.update(rows=[]), "no rows"),
        (lambda data: data["provenance"].pop("date"), r"provenance lacks \['date'\]"),
    ],
)
def test_what_is_refused(change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        written(tmp_path, change)


@pytest.mark.skipif(
    not FILE.exists(), reason="lacks the recorded session oproj_lib/data/exchange_h200x2.json"
)
def test_the_recorded_session_covers_what_it_is_for() -> None:
    """K, M and alternatives that were asked for, each from at least 40 replays; ours ahead everywhere."""
    measured = read_exchange(FILE)
    assert measured.ranks == 2 and measured.provenance.gpu == "NVIDIA H200" and measured.repetitions >= 200
    for k in (1536, 768):
        assert measured.batches(k) == (1, 8, 16, 64)
        for batch in measured.batches(k):
            names = {row.candidate for row in measured.rows if (row.k, row.batch) == (k, batch)}
            assert names >= set(measured_exchange.ALTERNATIVES) and measured.ratio(k, batch) > 1
    assert min(row.replays for row in measured.rows) >= 40
