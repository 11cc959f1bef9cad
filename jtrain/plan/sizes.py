"""Sizes in bytes for a reader."""


def show_bytes(count: int | float) -> str:
    """A size for a reader, such as `1 GiB` or `4 KiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.4g} {unit}"
    return f"{count:.4g} bytes"
