"""Analysis of a trace: ops, timelines, overlap, clock loss and the breakdown of a step."""
