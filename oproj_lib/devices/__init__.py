"""Where a Program runs. "auto" takes a GPU of the target's capability if there is one, else the virtual
GPU."""

from __future__ import annotations

from collections.abc import Sequence

from oproj_lib import doctor

DEVICES = ("auto", "vgpu", "cuda")


class DeviceError(ValueError):
    """A device that this machine or this version does not have."""


class CudaError(RuntimeError):
    """A call of the CUDA driver failed. ``name`` is the error's name, such as CUDA_ERROR_INVALID_VALUE."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def choose_device(device: str, engine: str, target: str, *, vgpu_only: Sequence[str] = ()) -> tuple[str, str]:
    """("vgpu" or "cuda", why).

    vgpu_only: what was asked for that only the virtual GPU can do, one sentence each. "auto" then means the
    virtual GPU.

    Raises DeviceError for an unknown name, and for "cuda" where the engine cannot run on a GPU of this
    machine, or where something in ``vgpu_only`` was asked for.
    """
    if device not in DEVICES:
        raise DeviceError(f"device = {device!r} is unknown; choose one of {', '.join(DEVICES)}")
    if device == "vgpu":
        return "vgpu", "asked for"
    for placement in doctor.placements(doctor.find_cuda()):
        if (placement.engine, placement.target) == (engine, target):
            if placement.device == "cuda" and vgpu_only:
                chosen, why = "vgpu", vgpu_only[0]
            else:
                chosen, why = placement.device, placement.why
            if device == "cuda" and chosen != "cuda":
                raise DeviceError(f"device = 'cuda': {why}; choose device = 'vgpu' or 'auto'")
            return chosen, why
    raise DeviceError(f"engine {engine!r} has no build for {target}")
