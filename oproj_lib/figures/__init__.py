"""Pictures, each computed from a layout function or from a run. Every function returns a `Picture` with alt
text."""

from __future__ import annotations

from oproj_lib.figures.banks import bank_map, padding_sweep, wavefront_bars
from oproj_lib.figures.errors import rounding_staircase
from oproj_lib.figures.fragments import k_permutation, lane_loads, operand_maps
from oproj_lib.figures.overview import work_split
from oproj_lib.figures.roofline import exposed_times, roofline_plot, time_floors
from oproj_lib.figures.stream import instruction_stream
from oproj_lib.figures.style import Picture
from oproj_lib.figures.swizzle import descriptor_bits, swizzle_atom, wrong_products
from oproj_lib.figures.timeline import exposed_by_stages, gantt, phase_diagram, ring_occupancy
from oproj_lib.figures.tmem import accumulator_map, allocation_strip, reach_map

__all__ = [
    "Picture",
    "accumulator_map",
    "allocation_strip",
    "bank_map",
    "descriptor_bits",
    "exposed_by_stages",
    "exposed_times",
    "gantt",
    "instruction_stream",
    "k_permutation",
    "lane_loads",
    "operand_maps",
    "padding_sweep",
    "phase_diagram",
    "reach_map",
    "ring_occupancy",
    "roofline_plot",
    "rounding_staircase",
    "swizzle_atom",
    "time_floors",
    "wavefront_bars",
    "work_split",
    "wrong_products",
]
