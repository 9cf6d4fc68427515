"""Presets: which producer a run takes when it asks for nothing, and that the tuned one computes the same."""

from __future__ import annotations

import numpy as np
import pytest

from oproj_lib import presets
from oproj_lib.kernels.direct import OprojProducerDirect
from oproj_lib.run import producer_for, run_producer


@pytest.mark.parametrize(
    ("name", "k", "batch", "direct", "settings"),
    [
        ("recommended", 1536, 8, False, {"staged_blocks": 4, "rows": 1, "group_tiles": 0}),
        ("tuned", 1536, 8, True, {"staged_blocks": 1, "rows": 2}),
        ("tuned", 768, 1, True, {"staged_blocks": 0, "rows": 2}),
        ("tuned", 1536, 9, False, {"staged_blocks": 4, "rows": 1, "group_tiles": 0}),
        ("tuned", 1536, 64, False, {"staged_blocks": 4, "rows": 1, "group_tiles": 2}),
    ],
)
def test_presets(name: str, k: int, batch: int, direct: bool, settings: dict[str, int]) -> None:
    assert presets.preset(name, k, batch) == presets.Preset(direct, settings)
    producer = producer_for(k, batch, preset=name)
    assert isinstance(producer, OprojProducerDirect) == direct
    producer.plan(batch)


def test_the_default_depends_on_the_device() -> None:
    assert (presets.default_preset("vgpu"), presets.default_preset("cuda")) == ("recommended", "tuned")


def test_a_tuned_run() -> None:
    """Same rows, same bits as the plain producer; the result says which one ran."""
    tuned = run_producer(ranks=16, batch=3, device="vgpu", preset="tuned", exact=True)
    plain = run_producer(ranks=16, batch=3, device="vgpu", rows=2, exact=True)
    assert tuned.ok and plain.ok
    assert tuned.configuration["direct"] == 1 and "direct" not in plain.configuration
    np.testing.assert_array_equal(tuned.out.view(np.uint16), plain.out.view(np.uint16))


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"preset = 'fast': choose from \('recommended', 'tuned'\)"):
        run_producer(device="vgpu", preset="fast")
    with pytest.raises(ValueError, match="there is no ring; choose 0"):
        run_producer(device="vgpu", preset="tuned", group_tiles=1)
