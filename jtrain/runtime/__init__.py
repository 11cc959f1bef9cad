"""Runtime services of all commands: process start-up, agreement among processes, signals and atomic files."""
