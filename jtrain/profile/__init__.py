"""Profiler: traces of a few steps with sampled clocks, and reports that divide the step time by cause."""
