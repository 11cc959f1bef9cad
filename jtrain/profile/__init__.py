"""Where the time goes: traces with clocks, goodput with causes."""
