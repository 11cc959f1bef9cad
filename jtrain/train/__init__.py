"""The training loop and the callbacks that watch it."""
