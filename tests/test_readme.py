"""The README's commands parse and run, its links and names exist, and its Python runs as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from oproj_lib import cli, vgpu

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    \$ python -m oproj_lib (.+)$", README, re.M)


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in link]
    assert len(links) >= 6
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_notebook_is_in_the_map() -> None:
    names = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert names == set(re.findall(r"\(notebooks/([\w.]+)\)", README))


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|^    )make ([a-z]+)\b", README, re.M))
    assert {"demo", "test", "lab", "book"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []


def test_what_is_said_to_be_missing_is_missing() -> None:
    (missing,) = re.findall(r"Missing in this version: (.+?)\.", " ".join(README.split()))
    instructions = re.findall(r"`(\w+)`", missing)
    assert instructions
    for name in instructions:
        text = f".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry f()\n{{\n{name};\nret;\n}}"
        with pytest.raises(vgpu.UnsupportedPTX, match=f"instruction {name} is not modelled"):
            vgpu.load(text).code(None)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    assert cli.parser().parse_args(shlex.split(command))


def test_the_ptx_example_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [command for command in COMMANDS if command.startswith("ptx ")]
    arguments = shlex.split(command.replace("docs/", f"{ROOT}/docs/"))
    assert cli.main(arguments) == 0
    assert shown(capsys.readouterr().out) <= shown(README)
    assert cli.main([*arguments[:-1], "i32:1024"]) == 1
    findings = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("argument")]
    assert len(findings) > 6 and shown("\n".join(findings)) <= shown(README)


def shown(text: str) -> set[str]:
    """Lines without indentation and times."""
    return {re.sub(r"in [\d.]+ s.*?\)", "", line).strip() for line in text.splitlines()}


def test_the_run_example_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [command for command in COMMANDS if command.startswith("run ")]
    assert cli.main(shlex.split(command)) == 0
    rows = re.findall(r"│ (.+?) +│ +(.+?) │", capsys.readouterr().out)
    committed = re.findall(r"│ (.+?) +│ +(.+?) │", README)
    assert len(rows) > 10
    assert [row for row in rows if row not in committed and "seconds" not in row[0]] == []


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"```python\n(.+?)```", README, re.S)
    exec(source, {"ptx_text": (ROOT / "docs" / "add.ptx").read_text(encoding="utf-8")})
    assert str(np.full(4, 2.0, np.float32)) in capsys.readouterr().out
