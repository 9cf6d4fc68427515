"""A real GPU, through the CUDA driver API (cuda-bindings): load a cubin, check its arguments, launch it.

gpu = Gpu(0)
kernel = gpu.program(program)              # module loaded, shared memory granted
kernel(x, weight, mailbox, address, slot)  # on torch's current stream; CUDA tensors are used in place

Launching needs torch and cuda-bindings and a driver, not CuTe DSL: the Program may come from `Program.load`.
Streams and graphs are torch's own. A launch inside ``with torch.cuda.graph(graph)`` is captured, and launches
with programmatic dependent launch (PDL) become programmatic edges between its nodes (CUDA C++ Programming
Guide, "Programmatic Dependent Launch and Synchronization").
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oproj_lib.devices import CudaError
from oproj_lib.doctor import CAPABILITY
from oproj_lib.kernels.inputs import array_facts
from oproj_lib.program import Parameter, Program

Extents = tuple[int, int, int]
ALIGNMENT = 16
"""Bytes. Every tensor is read and written in 16-byte accesses."""

SCALARS: dict[str, Any] = {
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
}
RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}

CAUSES = {
    "CUDA_ERROR_INVALID_VALUE": "an argument that the driver refuses: more shared memory or threads than the "
    "GPU has, or an empty grid",
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU's memory is full: other processes on it, or weight copies too many",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "a GPU index that this machine does not have",
    "CUDA_ERROR_INVALID_IMAGE": "the bytes are no cubin, or PTX without its final NUL",
    "CUDA_ERROR_INVALID_CONTEXT": "no CUDA context on this thread, or one that an earlier error destroyed",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the code is built for another architecture; sm_90a and sm_100a code runs "
    "on exactly that one",
    "CUDA_ERROR_INVALID_PTX": "the driver's PTX compiler refuses the text",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the PTX is newer than the driver: update the driver, or lower .version",
    "CUDA_ERROR_NOT_FOUND": "the module has no kernel of that name",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel used an address outside every allocation: a wrong shape or slot, or a "
    "tensor that was freed. The context is lost, start a new process; compute-sanitizer names the instruction",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "an address that is no multiple of its access's size. The context is lost, "
    "start a new process",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "an instruction that this GPU does not have, or multimem on an address that "
    "is no multicast address. The context is lost, start a new process",
    "CUDA_ERROR_LAUNCH_FAILED": "a fault inside a kernel, often shared memory out of bounds. The context is lost, "
    "start a new process",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "the block needs more registers or shared memory than a multiprocessor "
    "has",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran too long on a GPU that also drives a screen: a deadlock, perhaps",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "a call that a graph capture does not allow: load modules and run "
    "once before capturing",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "an earlier call broke this graph capture",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the driver is not up: on NVSwitch machines, is the fabric manager running?",
}
"""What usually lies behind an error, by its name (CUDA Driver API, CUresult)."""


class Api:
    """The CUDA driver API with every status looked at. driver: the module cuda.bindings.driver, or a stand-in."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def call(self, function: str, *arguments: Any, doing: str) -> Any:
        """Call ``function``: its only result, a tuple of several, or None.

        Raises CudaError with the error's name and text, what was being done, and the usual cause.
        """
        status, *values = getattr(self.driver, function)(*arguments)
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise self._error(status, function, doing)
        return tuple(values) if len(values) > 1 else values[0] if values else None

    def _error(self, status: Any, function: str, doing: str) -> CudaError:
        name, text = status.name, self._text(status)
        cause = CAUSES.get(name)
        usual = f". Usual cause: {cause}" if cause else ""
        return CudaError(name, f"{doing}: {function} answered {name} ({text}){usual}")

    def _text(self, status: Any) -> str:
        found, text = self.driver.cuGetErrorString(status)
        return text.decode() if found == self.driver.CUresult.CUDA_SUCCESS else "no description"


def needed() -> list[str]:
    """What launching needs and this Python lacks, as one instruction each."""
    return [
        f"{package} is missing: pip install {package}"
        for package, module in (("torch", "torch"), ("cuda-bindings", "cuda"))
        if importlib.util.find_spec(module) is None
    ]


def open_driver() -> Any:
    """The module cuda.bindings.driver. Raises CudaError where a package is missing, or torch has no CUDA."""
    if missing := needed():
        raise CudaError("MISSING_PACKAGE", f"launching on a GPU: {'; '.join(missing)}")
    import torch
    from cuda.bindings import driver

    if not torch.cuda.is_available():
        raise CudaError(
            "NO_TORCH_CUDA",
            f"launching on a GPU: torch {torch.__version__} sees none (torch.cuda.is_available() is False): a CPU "
            "build of torch, no driver, or CUDA_VISIBLE_DEVICES",
        )
    return driver


class Gpu:
    """One GPU and its primary context, which is the one that torch uses.

    index: as in torch.device("cuda", index). driver: a stand-in for cuda.bindings.driver; then tensors live
    where ``tensors`` says.

    Raises CudaError where there is no such GPU or a package is missing.
    """

    def __init__(self, index: int = 0, *, driver: Any = None, tensors: str | None = None) -> None:
        self.index = index
        self.tensors = tensors or f"cuda:{index}"
        self.api = Api(driver if driver is not None else open_driver())
        call, doing = self.api.call, f"opening GPU {index}"
        call("cuInit", 0, doing=doing)
        self.device = call("cuDeviceGet", index, doing=doing)
        self.context = call("cuDevicePrimaryCtxRetain", self.device, doing=doing)
        call("cuCtxSetCurrent", self.context, doing=doing)
        self.name = call("cuDeviceGetName", 256, self.device, doing=doing).split(b"\0")[0].decode()
        self.capability = (
            self.attribute("COMPUTE_CAPABILITY_MAJOR"),
            self.attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        self.multiprocessors: int = self.attribute("MULTIPROCESSOR_COUNT")

    def attribute(self, name: str) -> int:
        """An attribute of the device, by its name without CU_DEVICE_ATTRIBUTE_."""
        which = getattr(self.api.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.api.call("cuDeviceGetAttribute", which, self.device, doing=f"asking for {name}"))

    def load(
        self, image: bytes, entry: str, *, shared_bytes: int = 0, carveout: int | None = None
    ) -> Function:
        """A kernel of a cubin or of PTX text.

        shared_bytes: dynamic shared memory to grant. carveout: percent of the L1 cache that shared memory
        should get, None for the driver's own choice.
        """
        if carveout is not None and not 0 <= carveout <= 100:
            raise ValueError(f"carveout = {carveout}: a percentage, choose 0 to 100")
        if not image.startswith(b"\x7fELF") and not image.endswith(b"\0"):
            image += b"\0"  # PTX is a C string
        doing = f"loading the kernel {entry} on GPU {self.index} ({self.name})"
        self.api.call("cuCtxSetCurrent", self.context, doing=doing)
        module = self.api.call("cuModuleLoadData", image, doing=doing)
        handle = self.api.call("cuModuleGetFunction", module, entry.encode(), doing=doing)
        function = Function(self, entry, module, handle, shared_bytes)
        function.set_attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES", shared_bytes)
        if carveout is not None:
            function.set_attribute("PREFERRED_SHARED_MEMORY_CARVEOUT", carveout)
        return function

    def program(self, program: Program, *, carveout: int | None = None) -> CudaKernel:
        """A Program, loaded. Raises ValueError where this GPU does not run its target."""
        wanted = CAPABILITY[program.target]
        if self.capability != wanted:
            raise ValueError(
                f"{program.name} is built for {program.target}, compute capability {wanted[0]}.{wanted[1]}; "
                f"GPU {self.index}, {self.name}, has {self.capability[0]}.{self.capability[1]}"
            )
        shared = program.dynamic_shared_bytes
        return CudaKernel(
            program, self.load(program.cubin, program.entry, shared_bytes=shared, carveout=carveout)
        )

    def current_stream(self) -> int:
        """torch's current stream on this GPU, as the driver's handle."""
        import torch

        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def synchronize(self, doing: str = "waiting for the GPU") -> None:
        """Wait for all work of the context. An error inside a kernel appears here."""
        self.api.call("cuCtxSynchronize", doing=doing)


@dataclass(frozen=True)
class Function:
    """A kernel in a loaded module. Unload it when no launch and no graph needs it any more."""

    gpu: Gpu
    entry: str
    module: Any
    handle: Any
    shared_bytes: int

    def set_attribute(self, name: str, value: int) -> None:
        """Set a function attribute, by its name without CU_FUNC_ATTRIBUTE_."""
        which = getattr(self.gpu.api.driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        doing = f"setting {name} = {value} for {self.entry}"
        self.gpu.api.call("cuFuncSetAttribute", self.handle, which, value, doing=doing)

    def attribute(self, name: str) -> int:
        """A function attribute, by its name without CU_FUNC_ATTRIBUTE_: NUM_REGS, LOCAL_SIZE_BYTES, ..."""
        which = getattr(self.gpu.api.driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        doing = f"asking for {name} of {self.entry}"
        return int(self.gpu.api.call("cuFuncGetAttribute", which, self.handle, doing=doing))

    def launch(
        self,
        grid: Extents,
        block: Extents,
        values: Sequence[Any],
        *,
        stream: int,
        pdl: bool = False,
        cluster: Extents = (1, 1, 1),
    ) -> None:
        """Launch with ``values``: one ctypes object per kernel parameter, in order.

        pdl: may start while its predecessor in the stream still runs, up to its griddepcontrol.wait
        (attribute PROGRAMMATIC_STREAM_SERIALIZATION).
        """
        driver = self.gpu.api.driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = self.shared_bytes
        config.hStream = driver.CUstream(stream)
        config.attrs = launch_attributes(driver, pdl, cluster)
        config.numAttrs = len(config.attrs)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        doing = (
            f"launching {self.entry}, grid {grid}, block {block}, {self.shared_bytes} bytes of shared memory"
        )
        self.gpu.api.call("cuLaunchKernelEx", config, self.handle, ctypes.addressof(pointers), 0, doing=doing)

    def unload(self) -> None:
        """Give the module back."""
        self.gpu.api.call("cuModuleUnload", self.module, doing=f"unloading {self.entry}")


def launch_attributes(driver: Any, pdl: bool, cluster: Extents) -> list[Any]:
    """The attributes of a launch: PDL and a cluster shape, where asked for."""
    found = []
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        found.append(attribute)
    if cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = attribute.value.clusterDim
        shape.x, shape.y, shape.z = cluster
        found.append(attribute)
    return found


class CudaKernel:
    """A Program loaded on one GPU."""

    def __init__(self, program: Program, function: Function) -> None:
        self.program = program
        self.function = function
        self.pdl = program.pdl

    def __call__(self, *arguments: Any, stream: int | None = None, pdl: bool | None = None) -> None:
        """Launch with one argument per ``program.parameters``: CUDA tensors, addresses and numbers.

        stream: a driver handle, None for torch's current stream. pdl: None for what the program was built for.

        Raises ValueError for arguments that do not fit the parameters, CudaError when the launch fails. An error
        inside the kernel appears at the next ``synchronize``. Tensors must live until the kernel has run.
        """
        values = pack(self.program.parameters, arguments, self.function.gpu.tensors)
        chosen = self.function.gpu.current_stream() if stream is None else stream
        self.function.launch(
            self.program.grid,
            self.program.block,
            values,
            stream=chosen,
            pdl=self.pdl if pdl is None else pdl,
            cluster=self.program.cluster,
        )

    def registers(self) -> int:
        """Registers per thread, as the driver sees the loaded code."""
        return self.function.attribute("NUM_REGS")


def pack(parameters: Sequence[Parameter], arguments: Sequence[Any], device: str) -> tuple[Any, ...]:
    """One ctypes object per parameter: pointers, 64-bit addresses, 32-bit numbers.

    device: where tensors must be, "cuda:0" for instance.

    Raises ValueError, naming the parameter, what came and what is needed.
    """
    if len(arguments) != len(parameters):
        names = ", ".join(parameter.name for parameter in parameters)
        raise ValueError(
            f"{len(arguments)} arguments for {len(parameters)} parameters: the kernel takes ({names})"
        )
    return tuple(
        _packed(parameter, value, device) for parameter, value in zip(parameters, arguments, strict=True)
    )


def _packed(parameter: Parameter, value: Any, device: str) -> Any:
    if parameter.kind == "tensor":
        return ctypes.c_void_p(_pointer(parameter, value, device))
    if parameter.kind == "address":
        if hasattr(value, "data_ptr"):
            value = value.data_ptr()
        value = _number(parameter, value)
        return ctypes.c_int64(value)
    if parameter.dtype not in SCALARS:
        raise ValueError(f"{parameter.name} is a {parameter.dtype}: choose from {', '.join(SCALARS)}")
    return SCALARS[parameter.dtype](
        value if parameter.dtype == "float32" else _number(parameter, value, RANGES[parameter.dtype])
    )


def _number(parameter: Parameter, value: Any, limits: tuple[int, int] = RANGES["int64"]) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{parameter.name} = {value!r} is a {type(value).__name__}: it must be an integer")
    number = int(value.__index__())
    if not limits[0] <= number <= limits[1]:
        raise ValueError(
            f"{parameter.name} = {number} is outside {parameter.dtype}, {limits[0]} to {limits[1]}"
        )
    return number


def _pointer(parameter: Parameter, tensor: Any, device: str) -> int:
    """The address of a tensor that is what the parameter says."""
    name = parameter.name
    if not hasattr(tensor, "data_ptr"):
        raise ValueError(f"{name} is a {type(tensor).__name__}: it must be a torch tensor on {device}")
    if str(tensor.device) != device:
        raise ValueError(f"{name} is on {tensor.device}: it must be on {device}")
    facts = array_facts(name, tensor)
    if facts.dtype != parameter.dtype:
        raise ValueError(f"{name} is {facts.dtype}: the kernel was built for {parameter.dtype}")
    if facts.shape != parameter.shape:
        raise ValueError(f"{name} has shape {facts.shape}: the kernel was built for {parameter.shape}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} of shape {facts.shape} has strides {facts.strides} (elements): it must be contiguous and "
            "row-major; copy it first"
        )
    address = int(tensor.data_ptr())
    if address % ALIGNMENT:
        raise ValueError(
            f"{name} starts at address {address:#x}, {address % ALIGNMENT} bytes past a multiple of {ALIGNMENT}: "
            "16-byte accesses need a multiple"
        )
    return address
