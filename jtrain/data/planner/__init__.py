"""Plans each step from document lengths alone: which tokens go to which row."""
