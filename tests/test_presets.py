"""Presets: which engine a run takes when it asks for nothing, that the recorded times agree, and that the tuned ones
compute the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oproj_lib import cli, presets, run
from oproj_lib.bench.results import HardwareBench
from oproj_lib.kernels.direct import OprojProducerDirect
from oproj_lib.recorded import recorded_bench
from oproj_lib.run import producer_for, run_producer, run_projection

NOISE_US = 0.1
"""Differences below are noise: docs/latency.md has 0.02 for the same build in one process and up to 0.17 between
processes; two builds of one process differ in their addresses, too."""


@pytest.mark.parametrize(
    ("name", "k", "batch", "engine", "settings"),
    [
        ("recommended", 1536, 8, "producer", {"staged_blocks": 4, "rows": 1, "group_tiles": 0}),
        ("recommended", 1536, 64, "producer", {"staged_blocks": 4, "rows": 1, "group_tiles": 2}),
        ("tuned", 1536, 8, "direct", {"staged_blocks": 1, "rows": 2}),
        ("tuned", 768, 8, "direct", {"staged_blocks": 0, "rows": 2}),
        ("tuned", 1536, 9, "wgmma", {}),
        ("tuned", 768, 64, "wgmma", {}),
    ],
)
def test_presets(name: str, k: int, batch: int, engine: str, settings: dict[str, int]) -> None:
    chosen = presets.preset(name, k, batch)
    assert (chosen.engine, chosen.settings, chosen.direct) == (engine, settings, engine == "direct")
    if engine in presets.PRODUCERS:
        producer = producer_for(k, batch, preset=name)
        assert isinstance(producer, OprojProducerDirect) == chosen.direct
        producer.plan(batch)


def test_blackwell_was_not_measured() -> None:
    """No wgmma there; one token tile takes Hopper's choice."""
    assert presets.preset("tuned", 1536, 8, "sm_100a").engine == "direct"
    chosen = presets.preset("tuned", 1536, 64, "sm_100a")
    assert (chosen.engine, chosen.why) == ("producer", "recommended: nothing was measured for it")


def slower_than_the_fastest(bench: HardwareBench) -> list[str]:
    """Entries of the table that lose by more than noise against another engine or build of the same session."""
    found = []
    for job in bench.jobs:
        ours = [row for row in job.rows if row.name in (*presets.PRODUCERS, "wgmma")]
        chosen = presets.preset("tuned", job.k, job.batch)
        (mine,) = [r for r in ours if (r.name, dict(r.settings)) == (chosen.engine, chosen.settings)]
        best = min(ours, key=lambda row: row.exposed.median_us)
        if mine.exposed.median_us > best.exposed.median_us + NOISE_US:
            found.append(
                f"presets.TUNED[{job.k}] at M = {job.batch}: {mine.title} takes {mine.exposed.median_us:.2f} us, "
                f"{best.title} {best.exposed.median_us:.2f}"
            )
    return found


def test_the_tuned_presets_are_the_fastest_recorded() -> None:
    found = slower_than_the_fastest(recorded_bench())
    assert not found, "\n".join(found)


def test_a_recording_that_contradicts_the_table_is_noticed() -> None:
    bench = recorded_bench()
    slow = [job for job in bench.jobs if (job.k, job.batch) == (1536, 8)]
    rows = tuple(
        replace(
            row, exposed=replace(row.exposed, median_us=row.exposed.median_us + 0.6 * (row.name == "direct"))
        )
        for row in slow[0].rows
    )
    found = slower_than_the_fastest(replace(bench, jobs=(replace(slow[0], rows=rows),)))
    assert len(found) == 1
    assert found[0].startswith("presets.TUNED[1536] at M = 8: direct (staged_blocks 1, rows 2) takes 2.")


def test_the_default_depends_on_the_device() -> None:
    assert (presets.default_preset("vgpu"), presets.default_preset("cuda")) == ("recommended", "tuned")


def test_a_tuned_run() -> None:
    """Same rows, same bits as the plain producer; the result says which one ran."""
    tuned = run_projection(ranks=16, batch=3, device="vgpu", preset="tuned", exact=True)
    plain = run_producer(ranks=16, batch=3, device="vgpu", rows=2, exact=True)
    assert tuned.ok and plain.ok
    assert tuned.configuration["direct"] == 1 and "direct" not in plain.configuration
    assert tuned.chosen.startswith("preset 'tuned': engine direct, least exposed") and not plain.chosen
    np.testing.assert_array_equal(tuned.out.view(np.uint16), plain.out.view(np.uint16))


class Ran(Exception):
    """In place of a run: what it would have been."""


@pytest.mark.parametrize(
    ("words", "engine", "configuration"),
    [
        ("-m 64", "wgmma", {}),
        ("-m 8", "producer", {"direct": 1, "staged_blocks": 1}),
        ("-m 64 --engine producer", "producer", {"staged_blocks": 4, "group_tiles": 2}),
        ("-m 8 --rows 1", "producer", {"staged_blocks": 4, "rows": 1}),
        ("-m 64 --preset recommended", "producer", {"staged_blocks": 4, "group_tiles": 2}),
        ("-m 16 -r 16 --engine wgmma", "wgmma", {}),
    ],
)
def test_what_a_gpu_runs_when_nothing_else_is_asked(
    words: str, engine: str, configuration: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line with a GPU in the machine, up to the launch."""

    def stop(name: str, engine: object, *rest: object) -> None:
        direct = isinstance(engine, OprojProducerDirect)
        raise Ran(name, {**engine.settings(), **({"direct": 1} if direct else {})})  # type: ignore[attr-defined]

    monkeypatch.setattr(run, "choose_device", lambda *args, **options: ("cuda", "there is one"))
    monkeypatch.setattr(run, "run_engine", stop)
    with pytest.raises(Ran) as found:
        cli.main(["run", *words.split()])
    name, settings = found.value.args
    assert name == engine and settings.items() >= configuration.items()
    assert ("direct" in settings) == ("direct" in configuration)


def test_the_command_line_says_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "-m", "1", "-r", "16", "-d", "vgpu"]) == 0
    assert "preset" not in capsys.readouterr().out
    result = run_projection(ranks=16, batch=1, device="vgpu")
    monkeypatch.setattr(
        run, "run_projection", lambda **options: replace(result, chosen="preset 'tuned': engine x")
    )
    assert cli.main(["run", "-m", "1", "-r", "16", "-d", "vgpu", "--preset", "tuned"]) == 0
    assert "preset 'tuned': engine x" in capsys.readouterr().out


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"preset = 'fast': choose from \('recommended', 'tuned'\)"):
        run_producer(device="vgpu", preset="fast")
    with pytest.raises(ValueError, match="there is no ring; choose 0"):
        run_producer(device="vgpu", preset="tuned", group_tiles=1)
    with pytest.raises(
        ValueError, match=r"preset = 'tuned' at K = 1536, M = 64 is engine wgmma, no producer"
    ):
        run_producer(device="vgpu", preset="tuned", batch=64)
    with pytest.raises(ValueError, match=r"k = 512 has no measured settings .* choose from \(768, 1536\)"):
        presets.direct_settings(512)
