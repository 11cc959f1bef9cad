"""The breakdown chain of Chopper (arXiv:2512.08242), exact: its links multiply to the measured time.

theoretical_s * instruction * utilisation * overlap * frequency = compute_s

| link | what | from |
|---|---|---|
| theoretical_s | the model's FLOPs at the device's peak | the plan |
| instruction | FLOPs that the program executes, over the model's: recomputation, padding, masked scores | trace, HLO |
| utilisation | the time alone and at the reference clock, over what the FLOPs would take at the peak | what remains |
| overlap | the time at the reference clock, over that without communication beside it | the same op, alone |
| frequency | the time, over what it would be at the reference clock | sampled clocks, in the same run |

Chopper takes its cycles from a second run with kernels in a row, and so cannot tell overlap from frequency; with clocks
sampled in the same run they come apart.
"""

type Factors = dict[str, float | None]


def chain(
    compute_s: float,
    *,
    overlap_s: float,
    clocks_s: float,
    model_flops: float | None,
    program_flops: float,
    peak_flops: float | None,
) -> tuple[Factors, Factors]:
    """(links, seconds) of the time in which one device computes.

    Where the peak or the FLOPs are unknown, theoretical_s and utilisation are None among the links; among the seconds
    theoretical and instruction are None, and their part is in utilisation.

    Args:
      compute_s: measured.
      overlap_s, clocks_s: of it, lost to communication beside it, and to clocks below the reference.
      model_flops, program_flops: of this device: by the model's definition, and executed (0 if unknown).
      peak_flops: FLOP/s at the reference clock.
    """
    at_reference_s = compute_s - clocks_s
    alone_s = at_reference_s - overlap_s
    instruction = max(program_flops / model_flops, 1.0) if model_flops and program_flops else None
    links: Factors = {
        "theoretical_s": None,
        "instruction": instruction,
        "utilisation": None,
        "overlap": at_reference_s / alone_s if alone_s else 1.0,
        "frequency": compute_s / at_reference_s if at_reference_s else 1.0,
        "compute_s": compute_s,
    }
    seconds: Factors = {"theoretical": None, "instruction": None, "utilisation": alone_s}
    if model_flops and instruction and peak_flops and alone_s:
        theoretical_s = model_flops / peak_flops
        links |= {"theoretical_s": theoretical_s, "utilisation": alone_s / (theoretical_s * instruction)}
        seconds = {
            "theoretical": theoretical_s,
            "instruction": theoretical_s * (instruction - 1.0),
            "utilisation": alone_s - theoretical_s * instruction,
        }
    return links, seconds | {"overlap": overlap_s, "clocks": clocks_s}
