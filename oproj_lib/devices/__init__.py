"""Where a Program runs. "auto" takes a GPU of the target's capability if there is one, else the virtual
GPU."""

from __future__ import annotations

from oproj_lib import doctor

DEVICES = ("auto", "vgpu", "cuda")


class DeviceError(ValueError):
    """A device that this machine or this version does not have."""


def choose_device(device: str, engine: str, target: str) -> tuple[str, str]:
    """("vgpu" or "cuda", why).

    Raises DeviceError for an unknown name, and for "cuda" where the engine cannot run on a GPU of this
    machine.
    """
    if device not in DEVICES:
        raise DeviceError(f"device = {device!r} is unknown; choose one of {', '.join(DEVICES)}")
    if device == "vgpu":
        return "vgpu", "asked for"
    for placement in doctor.placements(doctor.find_cuda()):
        if (placement.engine, placement.target) == (engine, target):
            if device == "cuda" and placement.device != "cuda":
                raise DeviceError(f"device = 'cuda': {placement.why}; choose device = 'vgpu' or 'auto'")
            return placement.device, placement.why
    raise DeviceError(f"engine {engine!r} has no build for {target}")
