"""Mixture of sources: schedules of their shares, and the draw of the next documents."""
