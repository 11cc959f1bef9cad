"""Reports of a trace window: HTML page, terminal, comparison of two windows, Perfetto export."""
