"""What every build of the sweep must publish, as SHA-256: made by the virtual GPU with exact arithmetic, no GPU needed.

One run per order of summation and kind of inputs, at 64 tokens. A token's result depends on no other token (KERNELS:
"Accumulation order"), so the first M rows of that run are what a build for M tokens must publish for the first M rows
of the same x, with the same weights.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oproj_lib.bundle import sha256, versions
from oproj_lib.bundle_recipes import Recipe, build_program
from oproj_lib.problem import HIDDEN_K, KINDS, MAX_BATCH, ROWS_PER_CTA, Problem
from oproj_lib.sweep.points import BATCHES, TARGET, Member, Order, members, order_of

DATA = Path(__file__).resolve().parents[1] / "data" / "sweep_expected.json"
FORMAT = 1
WHAT = "what every configuration must publish"


@dataclass(frozen=True)
class InputHashes:
    """One set of inputs for 64 tokens. Builds for fewer take the first rows of x."""

    k: int
    kind: str
    seed: int
    x_sha256: str
    weight_sha256: str


@dataclass(frozen=True)
class Bits:
    """What builds with this order publish. out: batch size -> SHA-256 of BF16 [M, 7168]; first_cta: of the first 64
    columns at 64 tokens; error: relative Frobenius against float64 at 64 tokens; program: what was run."""

    order: Order
    kind: str
    program: str
    error: float
    first_cta: str
    out: Mapping[int, str]


@dataclass(frozen=True)
class Expectations:
    """Inputs by (k, kind), bits by (order, kind). versions: of the packages that made them."""

    date: str
    versions: Mapping[str, str | None]
    inputs: Mapping[tuple[int, str], InputHashes]
    bits: Mapping[tuple[Order, str], Bits]

    def draw(self, k: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """(x [64, k], weight [7168, k]). Raises ValueError where this machine draws other numbers."""
        wanted = self.inputs[k, kind]
        x, weight = draw(k, kind)
        if (sha256(x), sha256(weight)) != (wanted.x_sha256, wanted.weight_sha256):
            raise ValueError(
                f"inputs for K = {k}, {kind}, differ from those of the expectations: the random numbers of numpy "
                f"{versions()['numpy']} are not those of numpy {self.versions['numpy']}; use that one"
            )
        return x, weight


def seed_of(kind: str) -> int:
    """As in a bundle."""
    return 1 + KINDS.index(kind)


def draw(k: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """x [64, k] and weight [7168, k] of one kind."""
    return Problem(HIDDEN_K // k, MAX_BATCH).inputs(seed_of(kind), kind)


def simulated(found: Sequence[Member]) -> dict[Order, Recipe]:
    """Order -> the build that is run for it: the first one that takes 64 tokens.

    Raises RuntimeError for an order that no build has at 64 tokens.
    """
    chosen: dict[Order, Recipe] = {}
    orders = []
    for member in found:
        for recipe in member.recipes:
            orders.append(order_of(recipe))
            if recipe.batch == MAX_BATCH:
                chosen.setdefault(orders[-1], recipe)
    if missing := set(orders) - set(chosen):
        raise RuntimeError(f"no build for {MAX_BATCH} tokens adds as {sorted(o.name for o in missing)}")
    return chosen


def simulate(recipe: Recipe, kind: str, x: np.ndarray, weight: np.ndarray) -> Bits:
    """Run one build of 64 tokens. Raises RuntimeError where the virtual GPU or float64 finds anything wrong."""
    from oproj_lib.delivery import SLOT, judge
    from oproj_lib.run import launch_on_vgpu, one_line

    program = build_program(recipe, TARGET)
    mailboxes, report, _ = launch_on_vgpu(program, x, weight, ranks=recipe.mailboxes, exact=True)
    error, findings = judge(mailboxes, x, weight, str(program.config["policy"]))
    if wrong := [*map(one_line, report.findings), *findings]:
        raise RuntimeError(f"{recipe.label}, {kind}: the virtual GPU found {wrong[0]}")
    out = mailboxes[0].array[SLOT]
    first = sha256(out[:, :ROWS_PER_CTA])
    by_batch = {batch: sha256(out[:batch]) for batch in BATCHES}
    return Bits(order_of(recipe), kind, recipe.label, error, first, by_batch)


def make(path: Path, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Simulate every order and kind (some minutes), and write the file."""
    chosen = simulated(members())
    inputs, bits = [], []
    for k in sorted({order.k for order in chosen}):
        for kind in KINDS:
            x, weight = draw(k, kind)
            inputs.append(InputHashes(k, kind, seed_of(kind), sha256(x), sha256(weight)))
            for order, recipe in chosen.items():
                if order.k == k:
                    bits.append(simulate(recipe, kind, x, weight))
                    progress(f"{order.name}, {kind}: relative error {bits[-1].error:.2e}")
    data = {
        "format": FORMAT,
        "what": WHAT,
        "date": datetime.date.today().isoformat(),
        "command": "python -m oproj_lib.sweep expect",
        "versions": versions(),
        "inputs": [asdict(one) for one in inputs],
        "bits": [asdict(one) for one in bits],
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path | str = DATA) -> Expectations:
    """Raises FileNotFoundError where there is none, ValueError for a file of another kind."""
    data: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if (data.get("what"), data.get("format")) != (WHAT, FORMAT):
        raise ValueError(f"{path} does not hold the sweep's expectations in format {FORMAT}")
    inputs = [InputHashes(**one) for one in data["inputs"]]
    bits = [
        Bits(
            **{
                **one,
                "order": Order(**one["order"]),
                "out": {int(batch): digest for batch, digest in one["out"].items()},
            }
        )
        for one in data["bits"]
    ]
    return Expectations(
        data["date"],
        data["versions"],
        {(one.k, one.kind): one for one in inputs},
        {(one.order, one.kind): one for one in bits},
    )
