"""Prints numbered lines, notes in a file that all are printed, and ends with 7.

    python print_lines.py LINES DONE [PAUSE]

PAUSE: number of the line after which it waits for one on stdin.
"""

import sys
from pathlib import Path

from jtrain.runtime.output import keep_going_without_readers

keep_going_without_readers()
lines, done, *pause = sys.argv[1:]
for number in range(int(lines)):
    print(f"line {number} " + "x" * 80, flush=number % 2 == 0)
    if [str(number)] == pause:
        sys.stdin.readline()
print("an error", file=sys.stderr)
Path(done).write_text("all lines")
sys.exit(7)
