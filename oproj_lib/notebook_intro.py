"""The first lines that every notebook prints: the device it found, and what it therefore leaves out."""

from __future__ import annotations

from oproj_lib.devices import choose_device
from oproj_lib.program import check_target

ARCHITECTURES = {"sm_90a": "Hopper", "sm_100a": "Blackwell"}
DEVICES = {"vgpu": "the virtual GPU", "cuda": "a GPU of this machine"}


ON_VGPU = "this notebook shows counters, checks or traces, which only the virtual GPU has"


def announce(device: str, target: str, *, needs_gpu: str = "", on_gpu: bool = False) -> str:
    """Print where this notebook runs and what it skips there; returns "vgpu" or "cuda".

    needs_gpu: what only a GPU could show. on_gpu: the notebook can run its kernels on a GPU; if not, "auto" is
    the virtual GPU on every machine.

    Raises:
        ValueError: for an unknown target or device, or a device that cannot run it.
    """
    check_target(target)
    chosen, why = choose_device(device, "producer", target, vgpu_only=() if on_gpu else (ON_VGPU,))
    print(f"device:  {DEVICES[chosen]} ({why})")
    print(f"target:  {target} ({ARCHITECTURES[target]})")
    if chosen == "vgpu":
        print(f"skipped: {needs_gpu or 'nothing'}")
    return chosen
