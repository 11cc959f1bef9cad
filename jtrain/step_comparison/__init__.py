"""Steps of one run under several layouts, and all of their results that must agree."""
