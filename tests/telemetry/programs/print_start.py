"""Prints when this process began, in seconds since the epoch."""

from jtrain.telemetry.goodput import process_start_s

print(process_start_s())
