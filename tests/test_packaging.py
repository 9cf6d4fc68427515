"""The files that install, build and check the project agree, and say clearly what is missing."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

import oproj_lib

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;+]+)$")


def pins() -> dict[NormalizedName, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    matches = [PIN.match(line) for line in lines if line and not line.startswith("#")]
    assert all(matches), "each line of constraints.txt is name==version, without a build such as +cpu"
    found = {canonicalize_name(match[1]): Version(match[2]) for match in matches if match}
    assert len(found) == len(matches), "a package is pinned twice"
    return found


def declared() -> list[Requirement]:
    """All that pyproject.toml names, its own extras resolved."""
    lists = [PROJECT["dependencies"], *EXTRAS.values()]
    requirements = [Requirement(text) for texts in lists for text in texts]
    return [requirement for requirement in requirements if requirement.name != PROJECT["name"]]


# ---- pyproject.toml, constraints.txt, environment.yml ----


def test_every_dependency_is_pinned_to_a_version_it_allows() -> None:
    pinned = pins()
    for requirement in declared():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert version in requirement.specifier, f"{requirement} does not allow the pinned {version}"


def test_what_is_installed_is_what_was_tested() -> None:
    different = {
        name: (installed, str(version))
        for name, version in pins().items()
        if (installed := _installed(name)) is not None and Version(installed).public != str(version)
    }
    assert not different, (
        f"installed, pinned: {different}; run `make test`, which installs the pinned versions"
    )


def test_every_dependency_is_installed_and_all_they_need_is_pinned() -> None:
    """Walks from the declared dependencies through those of the installed packages."""
    pinned = pins()
    todo, seen = [(requirement.name, requirement.extras) for requirement in declared()], set()
    while todo:
        name, extras = todo.pop()
        if (canonicalize_name(name), frozenset(extras)) in seen:
            continue
        seen.add((canonicalize_name(name), frozenset(extras)))
        assert _installed(name) is not None, f"{name} is not installed"
        assert canonicalize_name(name) in pinned, f"constraints.txt does not pin {name}"
        for needed in map(Requirement, metadata.requires(name) or []):
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            ):
                todo.append((needed.name, needed.extras))
    assert len(seen) > 100


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def test_triton_and_cuda_are_those_that_the_default_build_of_torch_asks_for() -> None:
    """Its metadata: triton==3.7.1 and cuda-toolkit==13.0.3. A build for the CPU alone asks for neither."""
    versions = {str(name): str(version) for name, version in pins().items()}
    assert (versions["torch"], versions["triton"]) == ("2.13.0", "3.7.1")
    nvcc = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-nvvm", "nvidia-cuda-runtime")
    assert {versions[name].rsplit(".", 1)[0] for name in nvcc} == {"13.0"}


def test_environment_yml_agrees_with_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    python, pip, from_pip = environment["dependencies"]
    assert python == f"python{PROJECT['requires-python']}" and pip == "pip"
    constraint, editable = from_pip["pip"]
    assert constraint == "-c constraints.txt" and (ROOT / "constraints.txt").exists()
    match = re.fullmatch(r"-e \.\[([a-z,]+)\]", editable)
    assert match and set(match[1].split(",")) == {"notebooks", "test"} <= set(EXTRAS)


def test_versions_of_python() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    assert sys.version_info[:2] >= (3, 11) and SpecifierSet(PROJECT["requires-python"]).contains("3.11.0")
    assert Version(oproj_lib.__version__) == Version(metadata.version("oproj-workbook"))


def test_the_license_is_the_apache_license_word_for_word() -> None:
    text = (ROOT / "LICENSE").read_bytes()
    assert PROJECT["license"] == "Apache-2.0"
    # of https://www.apache.org/licenses/LICENSE-2.0.txt
    assert (
        hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    )


# ---- what an import costs and needs ----


def python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_nothing_else() -> None:
    source = (
        "import sys; before = set(sys.modules); import oproj_lib; print(sorted(set(sys.modules) - before))"
    )
    assert python(source) == "['oproj_lib']\n"


def test_the_library_needs_no_extra() -> None:
    """All modules but the notebook driver and the Triton kernel import with the core dependencies alone."""
    python(
        """
import importlib, pkgutil, sys
for name in ("torch", "triton", "papermill", "nbclient", "nbformat", "nbconvert", "jupyter_client", "psutil"):
    sys.modules[name] = None  # importing it is an ImportError
import oproj_lib
extra = ("notebooks", "notebook_html", "notebook_lint", "book")
names = [module.name for module in pkgutil.walk_packages(oproj_lib.__path__, "oproj_lib.")]
assert "oproj_lib.problem" in names
for name in names:
    if name.split(".")[1] not in extra and not name.endswith(("__main__", "triton_split_k")):
        importlib.import_module(name)
"""
    )


# ---- Makefile and .ci/run ----


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, tmp_path / name)
    return tmp_path


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=checkout, capture_output=True, text=True, env=environment)


def set_up(checkout: Path, *stamps: str) -> None:
    (checkout / ".venv").mkdir(exist_ok=True)
    for stamp in stamps:
        (checkout / ".venv" / stamp).touch()


def test_make_help_names_every_target(checkout: Path) -> None:
    shown = make(checkout).stdout
    listed = re.findall(r"^  make ([a-z-]+) +\S", shown, re.M)
    assert listed == [
        "help",
        "demo",
        "lab",
        "book",
        "lint",
        "test",
        "test-all",
        "test-gpu",
        "pictures",
        "format",
        "clean",
    ]


@pytest.mark.parametrize("target", ["demo", "lab", "book", "lint", "test", "test-all", "test-gpu", "format"])
def test_make_installs_once(checkout: Path, target: str) -> None:
    assert "pip install" in make(checkout, "--dry-run", target).stdout
    set_up(checkout, ".python", ".ready-notebooks", ".ready-test")
    assert "pip" not in make(checkout, "--dry-run", target).stdout


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_make_installs_again_after_a_change(checkout: Path, name: str) -> None:
    set_up(checkout, ".python", ".ready-notebooks", ".ready-test")
    later = (checkout / ".venv/.ready-test").stat().st_mtime + 10
    os.utime(checkout / name, (later, later))
    for target in ("demo", "test"):
        assert "--constraint constraints.txt --editable" in make(checkout, "--dry-run", target).stdout


def test_make_demo_does_not_wait_for_torch(checkout: Path) -> None:
    assert "'.[notebooks]'" in make(checkout, "--dry-run", "demo").stdout
    assert "'.[notebooks,test]'" in make(checkout, "--dry-run", "test").stdout


def test_make_says_which_python_is_needed(checkout: Path) -> None:
    old = checkout / "python3.9"
    old.write_text('#!/bin/sh\ncase "$2" in *platform*) echo 3.9.18;; *) exit 1;; esac\n')
    old.chmod(0o755)
    done = make(checkout, f"PYTHON={old}", "demo")
    assert done.returncode != 0
    assert f"Python 3.11 or newer is needed, and '{old}' is 3.9.18. Name another: make PYTHON=" in done.stderr
    done = make(checkout, "PYTHON=no-such-python", "demo")
    assert done.returncode != 0
    assert "there is no 'no-such-python' here. Install Python 3.11 or newer" in done.stderr
    bare = checkout / "bare"
    bare.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\n')
    bare.chmod(0o755)
    assert "cannot make virtual environments" in make(checkout, f"PYTHON={bare}", "demo").stderr
    assert not (checkout / ".venv").exists()


def test_make_stops_at_the_first_failing_check(checkout: Path) -> None:
    """Each tool is a stand-in that fails: the next must not run, and make must fail."""
    set_up(checkout, ".python", ".ready-notebooks", ".ready-test")
    (checkout / ".venv/bin").mkdir()
    for tool in ("ruff", "mypy", "nbstripout", "python"):
        path = checkout / ".venv/bin" / tool
        path.write_text(f"#!/bin/sh\necho {tool} ran\n[ {tool} != mypy ]\n")
        path.chmod(0o755)
    done = make(checkout, "test")
    assert done.returncode != 0
    assert re.findall(r"^(\w+) ran$", done.stdout, re.M) == ["ruff", "ruff", "mypy"]


def test_lab_listens_on_this_computer_only_and_keeps_its_token(checkout: Path) -> None:
    command = make(checkout, "--dry-run", "lab").stdout
    assert "--ip=127.0.0.1" in command and "--notebook-dir=notebooks" in command
    assert "token" not in command.lower() and "password" not in command.lower()


@pytest.mark.parametrize("status", [0, 2])
def test_ci_runs_make_test_from_anywhere_and_passes_its_status_on(checkout: Path, status: int) -> None:
    script = checkout / ".ci/run"
    assert os.access(script, os.X_OK)
    bin_dir = checkout / "bin"
    bin_dir.mkdir()
    fake = bin_dir / "make"
    fake.write_text(f'#!/bin/sh\necho "make $* in $(pwd), stdin $(readlink /proc/$$/fd/0)"\nexit {status}\n')
    fake.chmod(0o755)
    path = f"{bin_dir}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(script)], cwd="/", env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == status
    assert done.stdout == f"make test in {checkout}, stdin /dev/null\n"


# ---- the suite's own options ----


def test_no_skips_turns_a_skip_into_a_failure(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_skips():\n    pytest.skip('no GPU here')\n"
        "@pytest.mark.skip(reason='marked')\ndef test_marked(): pass\n"
        "@pytest.mark.xfail\ndef test_expected(): assert False\n"
        "def test_fine(): pass\n"
    )

    def suite(*options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options, str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout

    assert suite()[0] == 0
    status, output = suite("--no-skips")
    assert status == 1
    assert "1 failed, 1 passed, 1 xfailed, 1 error" in output  # a mark skips in the set-up, hence "error"
    assert "was skipped, which --no-skips forbids: Skipped: no GPU here" in output
