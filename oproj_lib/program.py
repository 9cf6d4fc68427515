"""Program: a compiled kernel with all that a launch needs, whatever runs it, and its cache on disk.

    kernel object + target  --build_...-->  Program  --> virtual GPU (its PTX) or a real one (its cubin)

``build_producer``, ``build_umma`` and ``build_wgmma`` know the engines; every other kernel describes itself
with a ``Build`` and goes through ``build_program``.

A cache entry is a directory named by a SHA-256 over what the result depends on: the source files of kernels
and layouts, the configuration, the target, the shapes, and the versions of compiler and Python (which write
the source columns into the PTX). It holds ``program.json``, ``kernel.ptx`` and ``kernel.cubin``; the JSON
carries the files' hashes, and an entry that does not match is rebuilt with a warning. Entries appear by
rename, so processes may share a cache. Nothing is unpickled.

The PTX names its source files relative to the directory that holds the package
(``oproj_lib/kernels/producer.py``), so an entry made in one checkout is right in another; ``source_path``
finds the file. The cubin keeps the absolute paths of the machine that compiled it; only profilers read those.

Reading a cached Program needs neither CuTe DSL nor a GPU.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oproj_lib.cubin import resources
from oproj_lib.kernels import configuration, ring_configuration, umma_configuration, wgmma_configuration
from oproj_lib.kernels.configuration import Configuration
from oproj_lib.kernels.umma_configuration import UmmaConfiguration, check_umma_target
from oproj_lib.kernels.wgmma_configuration import WgmmaConfiguration, check_wgmma_target
from oproj_lib.layouts import mailbox as mailbox_layout
from oproj_lib.problem import CTAS, N

if TYPE_CHECKING:
    from oproj_lib.kernels.producer import OprojProducer
    from oproj_lib.kernels.umma import OprojUmma
    from oproj_lib.kernels.wgmma import OprojWgmma

TARGETS = ("sm_90a", "sm_100a")
COMPILER_PACKAGE = "nvidia-cutlass-dsl"
CACHE_VARIABLE = "OPROJ_CACHE"
DEFAULT_CACHE = "default"
CACHE_FORMAT = 1
PACKAGE = Path(__file__).resolve().parent

MAX_REGISTERS = 255
"""Registers per thread that an instruction can name."""
SM_REGISTERS = 65536
_LIMITS = {  # by engine: threads per block, registers per thread
    "producer": (configuration.THREADS, configuration.REGISTER_LIMIT),
    "umma": (umma_configuration.THREADS, ring_configuration.REGISTER_LIMIT),
    "wgmma": (wgmma_configuration.THREADS, ring_configuration.REGISTER_LIMIT),
}
_METADATA, _PTX, _CUBIN = "program.json", "kernel.ptx", "kernel.cubin"
_compiling = threading.Lock()  # CuTe DSL keeps global state while it traces


class CorruptEntryError(ValueError):
    """A cache entry does not hold what its metadata says."""


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter, in launch order.

    kind: "tensor" (a device pointer, 8 bytes), "address" (a 64-bit address as a number) or "scalar". shape is
    () unless a tensor.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A compiled kernel: PTX, cubin, and how to launch it. Sizes in bytes, grid and block in blocks and
    threads."""

    name: str
    target: str
    entry: str
    ptx: str
    cubin: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    parameters: tuple[Parameter, ...]
    pdl: bool
    compiler: str
    key: str
    config: dict[str, int | str]

    def save(self, directory: Path) -> None:
        """Write the entry's three files into an existing, empty directory."""
        fields = asdict(self)
        ptx, cubin = fields.pop("ptx").encode(), fields.pop("cubin")
        fields["format"] = CACHE_FORMAT
        fields["sha256"] = {_PTX: _sha256(ptx), _CUBIN: _sha256(cubin)}
        (directory / _PTX).write_bytes(ptx)
        (directory / _CUBIN).write_bytes(cubin)
        (directory / _METADATA).write_text(
            json.dumps(fields, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )

    @staticmethod
    def load(directory: Path) -> Program:
        """Read an entry.

        Raises FileNotFoundError where there is none, CorruptEntryError (a ValueError) where hashes, fields or
        files do not fit.
        """
        if not directory.is_dir():
            raise FileNotFoundError(f"no program at {directory}")
        try:
            fields = json.loads((directory / _METADATA).read_text(encoding="utf-8"))
            if fields.pop("format") != CACHE_FORMAT:
                raise CorruptEntryError(f"{directory}: written by another version of this package")
            contents = {name: (directory / name).read_bytes() for name in (_PTX, _CUBIN)}
            for name, expected in fields.pop("sha256").items():
                if _sha256(contents[name]) != expected:
                    raise CorruptEntryError(
                        f"{directory / name} is not the file that was written: its SHA-256 differs"
                    )
            for name in ("grid", "block", "cluster"):
                fields[name] = tuple(fields[name])
            fields["parameters"] = tuple(
                Parameter(**{**p, "shape": tuple(p["shape"])}) for p in fields["parameters"]
            )
            return Program(ptx=contents[_PTX].decode(), cubin=contents[_CUBIN], **fields)
        except CorruptEntryError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptEntryError(f"{directory} is not a complete program: {error!r}") from error


def check_target(target: str) -> str:
    """``target`` itself. Raises ValueError, naming the choices, for an unknown one."""
    if target not in TARGETS:
        raise ValueError(f"target = {target!r}: choose from {TARGETS}")
    return target


def source_path(name: str) -> Path:
    """The file that a ``.file`` line of a Program's PTX names."""
    return PACKAGE.parent / name


def cache_directory() -> Path:
    """$OPROJ_CACHE, or the platform's cache directory: $XDG_CACHE_HOME/oproj_lib, by default
    ~/.cache/oproj_lib."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oproj_lib"


def build_producer(
    producer: OprojProducer,
    *,
    target: str,
    batch: int,
    mailbox_slots: int,
    mailbox_tokens: int,
    ranks: int = 1,
    cache: Path | str | None = DEFAULT_CACHE,
) -> Program:
    """Compile the split kernel of ``producer`` for x [batch, k] and a mailbox [mailbox_slots, mailbox_tokens,
    7168], or find it cached.

    ranks: over how many ranks a two-shot producer shards the columns; its mailbox is a receive view
    [mailbox_slots, mailbox_tokens, 7168 / ranks]. cache: a directory, "default" (see ``cache_directory``), or
    None to compile always.

    Raises ValueError for an unknown target, a batch that does not fit, or a mailbox that cannot hold it;
    RuntimeError when CuTe DSL is missing, or made something else than the object says.
    """
    check_target(target)
    if not isinstance(producer.config, Configuration):
        raise ValueError(f"{type(producer).__name__} is no mma.sync producer: build it with build_umma")
    return _build("producer", producer, target, batch, mailbox_slots, mailbox_tokens, ranks, cache)


def build_umma(
    engine: OprojUmma,
    *,
    target: str,
    batch: int,
    mailbox_slots: int,
    mailbox_tokens: int,
    ranks: int = 1,
    cache: Path | str | None = DEFAULT_CACHE,
) -> Program:
    """``build_producer`` for the UMMA engine.

    Raises ValueError also for a target without tcgen05, and for an engine of another kind.
    """
    check_umma_target(check_target(target))
    if not isinstance(engine.config, UmmaConfiguration):
        raise ValueError(f"{type(engine).__name__} is no UMMA engine: build it with build_producer")
    return _build("umma", engine, target, batch, mailbox_slots, mailbox_tokens, ranks, cache)


def build_wgmma(
    engine: OprojWgmma,
    *,
    target: str,
    batch: int,
    mailbox_slots: int,
    mailbox_tokens: int,
    ranks: int = 1,
    cache: Path | str | None = DEFAULT_CACHE,
) -> Program:
    """``build_producer`` for the wgmma engine.

    Raises ValueError also for a target without wgmma, and for an engine of another kind.
    """
    check_wgmma_target(check_target(target))
    if not isinstance(engine.config, WgmmaConfiguration):
        raise ValueError(
            f"{type(engine).__name__} is no wgmma engine: build it with build_producer or build_umma"
        )
    return _build("wgmma", engine, target, batch, mailbox_slots, mailbox_tokens, ranks, cache)


def _build(
    name: str,
    engine: OprojProducer,
    target: str,
    batch: int,
    slots: int,
    tokens: int,
    ranks: int,
    cache: Path | str | None,
) -> Program:
    """What the engines have in common."""
    plan = engine.plan(batch)
    columns = mailbox_layout.receive_columns(ranks) if engine.twoshot else N
    if ranks != 1 and not engine.twoshot:
        raise ValueError(f"ranks = {ranks}: only a two-shot engine shards its columns; leave ranks at 1")
    check_mailbox(batch, slots, tokens, columns)
    if engine.generations:
        mailbox_layout.ranks_of(slots)
    threads, register_limit = _LIMITS[name]
    return build_program(
        Build(
            name=f"{name}_k{engine.config.k}_m{batch}_{target}",
            kernel=engine,
            target=target,
            config={"engine": name, **engine_config(engine, batch, (slots, tokens, columns))},
            parameters=engine_parameters(engine, batch, (slots, tokens, columns)),
            grid=CTAS,
            threads=threads,
            register_limit=register_limit,
            shared_bytes=plan.shared_bytes,
        ),
        cache=cache,
    )


def engine_config(engine: OprojProducer, batch: int, mailbox: tuple[int, int, int]) -> dict[str, int | str]:
    """What tells builds of one engine apart."""
    slots, tokens, columns = mailbox
    return {
        **asdict(engine.config),
        "transport": engine.transport.name,
        "policy": engine.policy,
        "batch": batch,
        "mailbox_slots": slots,
        "mailbox_tokens": tokens,
        "mailbox_columns": columns,
        "generations": int(engine.generations),
        "records": kernel_identity(type(engine.records)),
    }


def engine_name(engine: OprojProducer, target: str) -> str:
    """What ``Build.config`` calls an engine: producer, umma or wgmma. Raises ValueError for a target that it
    does not run on."""
    check_target(target)
    config: Any = engine.config
    if isinstance(config, UmmaConfiguration):
        check_umma_target(target)
        return "umma"
    if isinstance(config, WgmmaConfiguration):
        check_wgmma_target(target)
        return "wgmma"
    return "producer"


def engine_parameters(
    engine: OprojProducer, batch: int, mailbox: tuple[int, int, int]
) -> tuple[Parameter, ...]:
    """The arguments of every engine: x, weight, mailbox, mc, slot, and with ``generations`` state."""
    k = engine.config.k
    return (
        tensor("x", batch, k),
        tensor("weight", N, k),
        tensor("mailbox", *mailbox),
        Parameter("mc", "address", "int64", ()),
        Parameter("slot", "scalar", "int32", ()),
        *([STATE] if engine.generations else []),
    )


def tensor(name: str, *shape: int) -> Parameter:
    """A contiguous, row-major BF16 tensor."""
    return Parameter(name, "tensor", "bfloat16", shape)


STATE = Parameter("state", "address", "int64", ())
"""Address of the generation counters, see ``layouts.mailbox``."""


@dataclass(frozen=True)
class Build:
    """What a kernel object needs to become a Program.

    kernel: its ``__call__`` takes the parameters by name, then ``stream``, and launches one kernel. config:
    everything that tells this build from another ("engine" at least; the class is added). grid: CTAs;
    threads: per CTA; register_limit: above it, or with spills, the build is refused (None: what the threads
    leave).
    """

    name: str
    kernel: Any
    target: str
    config: dict[str, int | str]
    parameters: tuple[Parameter, ...]
    grid: int
    threads: int
    shared_bytes: int = 0
    register_limit: int | None = None

    @property
    def registers(self) -> int:
        """Registers per thread that this build may use."""
        return self.register_limit or min(MAX_REGISTERS, SM_REGISTERS // self.threads)


def build_program(build: Build, *, cache: Path | str | None = DEFAULT_CACHE) -> Program:
    """Compile any kernel of this package, or find it cached; cache as for ``build_producer``.

    Raises ValueError for an unknown target, RuntimeError when CuTe DSL is missing, or made something else
    than the object says.
    """
    check_target(build.target)
    config = {**build.config, "kernel": kernel_identity(type(build.kernel))}
    key = program_key({**config, "parameters": str(build.parameters)}, build.target)

    def make() -> Program:
        compiled = _compile(build.kernel, build.target, build.parameters)
        return _program(compiled, build, config, key)

    if cache is None:
        return make()
    directory = cache_directory() if cache == DEFAULT_CACHE else Path(cache)
    return _cached(directory / key[:2] / key, key, make)


def kernel_identity(kernel: type) -> str:
    """Names the class that wrote a kernel. A subclass from elsewhere carries a hash of the files that its classes
    are defined in (in a notebook, of the classes alone: a function that it calls has to be a method), since the
    kernel sources of this package, which every key covers, do not say what it does.

    Raises ValueError when the source of such a class cannot be read.
    """
    name = f"{kernel.__module__}.{kernel.__qualname__}"
    own = [
        cls
        for cls in kernel.__mro__
        if cls is not object and not cls.__module__.startswith("oproj_lib.kernels.")
    ]
    if not own:
        return name
    try:
        text = "".join(_defining_source(cls) for cls in own)
    except (OSError, TypeError) as error:
        raise ValueError(
            f"the source of {name} cannot be read ({error}): define it in a file or a notebook cell"
        ) from error
    return f"{name}@{_sha256(text.encode())[:16]}"


def _defining_source(cls: type) -> str:
    """The file of a class, since a method may call functions beside it; of a class without a file, its own text."""
    module = inspect.getmodule(cls)
    if module is None or getattr(module, "__file__", None) is None:
        return inspect.getsource(cls)
    return inspect.getsource(module)


def check_mailbox(batch: int, slots: int, tokens: int, columns: int = N) -> None:
    """Raises ValueError unless a mailbox [slots, tokens, columns] holds ``batch`` tokens and 32-bit element
    offsets reach its end."""
    if slots < 1:
        raise ValueError(f"mailbox_slots = {slots}: a mailbox has at least 1 slot")
    if tokens < batch:
        raise ValueError(
            f"mailbox_tokens = {tokens} < batch = {batch}: a slot must hold every token of the batch"
        )
    if slots * tokens * columns >= 2**31:
        raise ValueError(
            f"mailbox of {slots} slots * {tokens} tokens * {columns} columns = {slots * tokens * columns} "
            f"elements: offsets are 32-bit, at most {2**31 - 1} elements"
        )


def program_key(config: dict[str, int | str], target: str) -> str:
    """SHA-256 (hex) over all that a compiled program depends on."""
    identity = {
        "format": CACHE_FORMAT,
        "sources": source_hashes(),
        "config": config,
        "target": target,
        "compiler": compiler_version(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    return _sha256(json.dumps(identity, sort_keys=True).encode())


def source_hashes() -> dict[str, str]:
    """SHA-256 of every file that the compiled code comes from, by its path in the package."""
    files = [*PACKAGE.glob("kernels/*.py"), *PACKAGE.glob("layouts/*.py"), PACKAGE / "problem.py"]
    return {file.relative_to(PACKAGE).as_posix(): _sha256(file.read_bytes()) for file in sorted(files)}


def compiler_version() -> str:
    """Name and version of the installed compiler. Raises RuntimeError where it is missing."""
    try:
        return f"{COMPILER_PACKAGE} {importlib.metadata.version(COMPILER_PACKAGE)}"
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError(f"compiling needs CuTe DSL: pip install '{COMPILER_PACKAGE}==4.8.*'") from error


def _cached(entry: Path, key: str, build: Any) -> Program:
    """The program in ``entry``; built, and put there, when it is absent or does not hold together."""
    try:
        program = Program.load(entry)
        if program.key != key:
            raise CorruptEntryError(f"{entry} holds the program {program.key}")
        return program
    except FileNotFoundError:
        pass
    except CorruptEntryError as error:
        warnings.warn(f"rebuilding a cached program: {error}", RuntimeWarning, stacklevel=3)
    program = build()
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".new-") as scratch:
        fresh, old = Path(scratch, "new"), Path(scratch, "old")
        fresh.mkdir()
        program.save(fresh)
        while True:
            try:
                os.replace(fresh, entry)
                return program
            except OSError:
                if not entry.exists():
                    raise
            try:  # another process's entry, or the corrupt one: out of the way
                os.replace(entry, old)
            except FileNotFoundError:
                continue
            shutil.rmtree(old)


def _compile(kernel: Any, target: str, parameters: tuple[Parameter, ...]) -> Any:
    """Run CuTe DSL on fake tensors: no GPU and no memory needed."""
    compiler_version()
    import cutlass
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir, ExtraCompilerOpts
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    types = {
        "bfloat16": cutlass.BFloat16,
        "float32": cutlass.Float32,
        "int32": cutlass.Int32,
        "int64": cutlass.Int64,
    }

    def stand_in(parameter: Parameter) -> Any:
        kind = types[parameter.dtype]
        if parameter.kind != "tensor":
            return kind(0)
        stride = [1]
        for extent in parameter.shape[:0:-1]:
            stride.insert(0, stride[0] * extent)
        return make_fake_tensor(kind, parameter.shape, stride=tuple(stride), assumed_align=16)

    with (
        _compiling,
        tempfile.TemporaryDirectory(prefix="oproj-") as scratch,
    ):  # the DSL also writes its files there
        options = (
            cute.KeepPTX(),
            cute.KeepCUBIN(),
            cute.GPUArch(target),
            cute.GenerateLineInfo(True),
            DumpDir(scratch),
            *[ExtraCompilerOpts(text) for text in extra_options(kernel)],
        )
        arguments = {parameter.name: stand_in(parameter) for parameter in parameters}
        return cute.compile[options](kernel, **arguments, stream=make_fake_stream())


def extra_options(kernel: Any) -> list[str]:
    """Further compiler options that a kernel's class names in ``compiler_options``."""
    return [text] if (text := getattr(kernel, "compiler_options", "")) else []


def _program(compiled: Any, build: Build, config: dict[str, int | str], key: str) -> Program:
    """Package what the compiler made. Raises RuntimeError where launch facts are not what the object says."""
    ptx = relative_sources(compiled.__ptx__)
    entries = re.findall(r"\.entry\s+(\w+)", ptx)
    if len(entries) != 1:
        raise RuntimeError(f"the PTX has {len(entries)} entry points, expected one: {entries}")
    launched, pdl = launch_facts(str(compiled.ir_module))
    if launched != build.shared_bytes:
        raise RuntimeError(
            f"the launch asks for {launched} bytes of dynamic shared memory, the plan says "
            f"{build.shared_bytes}"
        )
    used = resources(compiled.__cubin__, entries[0])
    if used.stack_bytes or used.registers > build.registers:
        raise RuntimeError(
            f"ptxas uses {used.registers} registers (limit {build.registers}) and spills {used.stack_bytes} "
            f"bytes per thread for {config}: the estimate of kernels.configuration is wrong"
        )
    return Program(
        name=build.name,
        target=build.target,
        entry=entries[0],
        ptx=ptx,
        cubin=compiled.__cubin__,
        grid=(build.grid, 1, 1),
        block=(build.threads, 1, 1),
        cluster=(1, 1, 1),
        dynamic_shared_bytes=build.shared_bytes,
        parameters=build.parameters,
        pdl=pdl,
        compiler=compiler_version(),
        key=key,
        config=config,
    )


def relative_sources(ptx: str) -> str:
    """``.file`` lines of this package's files made relative to the directory that holds the package; others
    stay."""
    root = re.escape(PACKAGE.parent.as_posix() + "/")
    return re.sub(rf'^(\s*\.file\s+\d+\s+"){root}', r"\1", ptx, flags=re.MULTILINE)


def launch_facts(module: str) -> tuple[int, bool]:
    """(dynamic shared bytes, PDL attribute set) of the launch in CuTe DSL's lowered host code.

    The host code fills a ``cudaLaunchConfig_t``: field 2 is ``dynamicSmemBytes``, and each attribute has its
    id stored in field 0; id 6 is ``cudaLaunchAttributeProgrammaticStreamSerialization`` (CUDA Runtime API,
    cudaLaunchAttributeID).

    Raises RuntimeError when the code does not have that form.
    """
    host = module[module.rfind("llvm.func @cutlass___call__") :]
    constants = {
        name: int(value)
        for name, value in re.findall(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i\d+\)", host)
    }
    config = r"struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    attribute = r"struct<\(i32, array<4 x i8>, array<64 x i8>\)>"
    shared = _stored(host, rf"\[0, 2\] : .*{config}", constants)
    if len(shared) != 1:
        raise RuntimeError(f"found {len(shared)} launch configurations in CuTe DSL's host code, expected one")
    return shared[0], 6 in _stored(host, rf"\[0, 0\] : .*{attribute}", constants)


def _stored(host: str, field: str, constants: dict[str, int]) -> list[int]:
    """Constants stored through a ``getelementptr`` whose text matches ``field``."""
    pattern = rf"(%\w+) = llvm\.getelementptr %\w+{field}\n\s*llvm\.store (%\w+), \1 "
    return [constants[value] for _, value in re.findall(pattern, host) if value in constants]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
