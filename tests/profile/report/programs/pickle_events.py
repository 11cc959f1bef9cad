"""Pickles all events of a trace with their planes and lines, to stdout.

python pickle_events.py FILE
"""

import pickle
import sys

from jax.profiler import ProfileData

profile = ProfileData.from_file(sys.argv[1])  # must outlive its planes, which only point into it
events = [
    (plane.name, line.name, event.name, event.start_ns, event.duration_ns, dict(event.stats))
    for plane in profile.planes
    for line in plane.lines
    for event in line.events
]
sys.stdout.buffer.write(pickle.dumps(events))
