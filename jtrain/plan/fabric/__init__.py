"""Networks of accelerators as data, and the time that collectives take over them; numpy only, no jax."""
