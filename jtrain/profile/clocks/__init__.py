"""Clock, power and energy samples of devices, with one module per driver interface."""
