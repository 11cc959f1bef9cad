"""Numbers as text: seconds, shares, bytes and rates, with three or four digits and their unit."""

import math

type Number = int | float
"""Number that a table or a page shows."""


def seconds(value: Number | None) -> str:
    """Formats seconds with four digits, in s, ms or µs."""
    if value is None:
        return "unknown"
    if value == 0:
        return "0 s"
    unit, factor = next(
        (unit, factor)
        for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
        if abs(value) * factor >= 1 or unit == "µs"
    )
    return (
        # "#" keeps trailing zeros, as in 1.000 s. From 9999.5 on, .4g would write 1.000e+04.
        f"{value * factor:#.4g} {unit}" if abs(value) * factor < 9999.5 else f"{value * factor:,.0f} {unit}"
    )


def signed(value: Number) -> str:
    """`+12.00 ms`."""
    return f"{'+' if value >= 0 else '-'}{seconds(abs(value))}"


def milliseconds(microseconds: Number) -> str:
    """Microseconds as milliseconds with four digits, such as `6.691` or `38,710`."""
    value = microseconds / 1000
    if value == 0:
        return "0"
    # log10 says how many digits stand before the point: four in all.
    return f"{value:,.{max(0, 3 - math.floor(math.log10(value)))}f}"


def share(value: Number | None, total: Number = 1.0) -> str:
    """`15.0%`."""
    # No share of nothing: a step without time, or a window without ops.
    return "unknown" if value is None or not total else f"{value / total:.1%}"


def size(value: Number | None) -> str:
    """Bytes in powers of two: `1.50 GiB`."""
    return _scaled(value, (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 0)), digits=2)


def rate(value: Number | None) -> str:
    """Bytes per second in powers of ten, as vendors quote link speeds: `42.1 GB/s`."""
    return _scaled(value, (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 0)), digits=1)


def _scaled(value: Number | None, units: tuple[tuple[str, Number], ...], *, digits: int) -> str:
    """The value in the largest unit of which it has at least one."""
    if value is None:
        return "unknown"
    # The last unit has factor 0, which every size reaches.
    unit, factor = next((unit, factor) for unit, factor in units if abs(value) >= factor)
    return f"{value / factor:,.{digits}f} {unit}" if factor else f"{value:,.0f} {unit}"


def gib(size: int) -> str:
    """Bytes as text in GiB; small sizes have more decimals."""
    size_gib = size / 2**30
    return (
        f"{size_gib:,.2f}"
        if size_gib >= 0.1
        else f"{size_gib:.4f}"
        if size_gib >= 1e-4
        else f"{size_gib:.1e}"
        if size
        else "0"
    )


def number(value: Number | None, unit: str) -> str:
    """`1,755 MHz`, or unknown."""
    if value is None:
        return "unknown"
    # From 999.5 on, .3g would write an exponent.
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:,.3g} {unit}"


def short(value: Number) -> str:
    """Three or four digits, with k, M, B or T: `1.06M`, `423k`, `71.6`."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,950 is 1M, not 1000k: four digits round up just below the factor.
        if value >= 0.9995 * factor:
            return (
                f"{value / factor:.4g}{suffix}" if value < 1000 * factor else f"{value / factor:,.0f}{suffix}"
            )
    return f"{value:.3g}"
