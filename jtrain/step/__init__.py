"""The train step: one pure function of state and batch, and everything it is built from."""
