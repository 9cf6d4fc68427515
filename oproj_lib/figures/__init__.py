"""Pictures, each computed from a layout function or from a run. Every function returns a `Picture` with alt
text."""

from __future__ import annotations

from oproj_lib.figures.attnres import code_places, eps_placement, poll_traffic, softmax_shares
from oproj_lib.figures.banks import bank_map, conflict_cycles, padding_sweep, wavefront_bars
from oproj_lib.figures.errors import rounding_staircase
from oproj_lib.figures.fragments import k_permutation, lane_loads, operand_maps
from oproj_lib.figures.mailboxes import (
    exposed_exchanges,
    generation_calendar,
    mailbox_map,
    recorded_exchanges,
    shots_by_batch,
)
from oproj_lib.figures.measured import bandwidth, exposed, latency, measured_roofline
from oproj_lib.figures.numbers import bf16_rounding, rank_errors, rounding_by_size
from oproj_lib.figures.overview import work_split
from oproj_lib.figures.pdl import (
    chain_timelines,
    exposed_by_trigger,
    machine_code_order,
    multiprocessor,
    overlap_bars,
    sunk_cost,
)
from oproj_lib.figures.ranks import rank_timeline
from oproj_lib.figures.roofline import exposed_times, roofline_plot, time_floors
from oproj_lib.figures.steps import modelled_and_recorded, recorded_launch
from oproj_lib.figures.stream import instruction_stream
from oproj_lib.figures.style import Picture
from oproj_lib.figures.sums import alignment, order_histogram, sum_tree
from oproj_lib.figures.swizzle import descriptor_bits, swizzle_atom, wrong_products
from oproj_lib.figures.timeline import exposed_by_stages, gantt, phase_diagram, ring_occupancy
from oproj_lib.figures.tmem import accumulator_map, allocation_strip, reach_map
from oproj_lib.figures.wgmma import warpgroup_fragment

__all__ = [
    "Picture",
    "accumulator_map",
    "alignment",
    "allocation_strip",
    "bandwidth",
    "bank_map",
    "bf16_rounding",
    "chain_timelines",
    "code_places",
    "conflict_cycles",
    "descriptor_bits",
    "eps_placement",
    "exposed",
    "exposed_by_stages",
    "exposed_by_trigger",
    "exposed_exchanges",
    "exposed_times",
    "gantt",
    "generation_calendar",
    "instruction_stream",
    "k_permutation",
    "lane_loads",
    "latency",
    "machine_code_order",
    "mailbox_map",
    "measured_roofline",
    "modelled_and_recorded",
    "multiprocessor",
    "operand_maps",
    "order_histogram",
    "overlap_bars",
    "padding_sweep",
    "phase_diagram",
    "poll_traffic",
    "rank_errors",
    "rank_timeline",
    "reach_map",
    "recorded_exchanges",
    "recorded_launch",
    "ring_occupancy",
    "roofline_plot",
    "rounding_by_size",
    "rounding_staircase",
    "shots_by_batch",
    "softmax_shares",
    "sum_tree",
    "sunk_cost",
    "swizzle_atom",
    "time_floors",
    "warpgroup_fragment",
    "wavefront_bars",
    "work_split",
    "wrong_products",
]
