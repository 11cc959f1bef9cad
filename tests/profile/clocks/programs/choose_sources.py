"""Chooses a source of clocks for CUDA, and then NVML, which is not there."""

from jtrain.profile.clocks.select import choose

print(choose("auto", "cuda"))
choose("nvml", "gpu")
