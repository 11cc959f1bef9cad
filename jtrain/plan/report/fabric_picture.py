"""Drawing of the interconnects of a machine, with the loads of a step."""

from collections.abc import Sequence

from jtrain.plan.estimate.machine import Machine
from jtrain.plan.report.fabric_loads import Load
from jtrain.report.charts import text
from jtrain.report.number_formats import rate, seconds

_MOST_BOXES = 8


def fabric_picture(machine: Machine, levels: Sequence[Load], step_s: float) -> str:
    """The devices that links join, the memory of their hosts above and the network below, with their loads.

    Args:
      levels: loads of the links, the network and the links to the host.
    """
    links, network, to_host = levels
    linked = min(machine.device.linked, machine.count)
    groups = -(-machine.count // linked)
    # Without links the picture shows the devices of the network.
    devices = linked if linked > 1 else machine.count
    # The last box then stands for all devices that are left out.
    num_boxes = min(devices, _MOST_BOXES)
    parts = [_box(20.0, 10, 560.0, f"host memory; {_load_text(to_host, step_s)}")]
    if linked > 1:
        parts.append(_box(20.0, 140, 560.0, f"links between {linked:,} devices; {_load_text(links, step_s)}"))
    network_name = f"network to {groups - 1:,} more such groups" if linked > 1 else "network between devices"
    network_text = (
        f"{network_name}; {_load_text(network, step_s)}"
        if groups > 1
        else "no network: all devices are linked"
    )
    parts.append(_box(20.0, 200, 560.0, network_text))
    gap = 560 / num_boxes
    for index in range(num_boxes):
        # 20 is the left margin of a drawing 600 wide.
        middle = 20 + gap * (index + 0.5)
        name = machine.device.name if index < num_boxes - 1 or num_boxes == devices else f"... {devices:,}"
        parts.append(_box(middle - gap / 2 + 4, 75, gap - 8, name))
        parts.append(_line(middle, 40, 75, to_host, step_s))
        if linked > 1:
            parts.append(_line(middle, 105, 140, links, step_s))
        if groups > 1:
            parts.append(_line(middle, 170 if linked > 1 else 105, 200, network, step_s))
    label = f"fabric of {machine} with the loads of a step"
    return f'<svg class="fabric" viewBox="0 0 600 240" role="img" aria-label="{text(label)}">{"".join(parts)}</svg>'


def _load_text(load: Load, step_s: float) -> str:
    if not load.busy_s:
        return "unused"
    peak = "" if load.bytes_per_s is None else f" at up to {rate(load.bytes_per_s)}"
    return f"busy {seconds(load.busy_s)}, {load.busy_s / step_s:.0%} of the step{peak}"


def _box(x: float, y: int, width: float, words: str) -> str:
    return (
        f'<rect class="box" x="{x:.1f}" y="{y}" width="{width:.1f}" height="30" rx="4"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 20}" text-anchor="middle">{text(words)}</text>'
    )


def _line(x: float, top: int, bottom: int, load: Load, step_s: float) -> str:
    """Vertical line as wide as the load's part of the step."""
    # Levels that overlap can be busy for longer than the step.
    busy = min(1.0, load.busy_s / step_s)
    css = f'stroke-width="{1.5 + 10 * busy:.2f}"' if busy else 'class="unused"'
    return f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" data-level="{load.level}" {css}/>'
