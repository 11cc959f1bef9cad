"""Money, time and energy of a whole run, with failures; and how large a run can be."""
