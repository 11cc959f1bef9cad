"""Breakdown of compute time after Chopper (arXiv:2512.08242): factors whose product is exactly the measured
time.

theoretical_s * instruction * utilisation * overlap * frequency = compute_s

| factor | meaning | source |
|---|---|---|
| theoretical_s | the model's FLOPs at the device's peak | the plan |
| instruction | executed FLOPs over the model's FLOPs: recomputation, padding, masked scores | trace, HLO |
| utilisation | time without overlap at the reference clock, over the executed FLOPs at the peak | remainder |
| overlap | time at the reference clock, over the time without concurrent communication | same op running alone |
| frequency | measured time over the time at the reference clock | clocks sampled in the same run |

Chopper measures cycles in a second run that serialises the kernels, so it cannot separate overlap from
frequency. Clocks sampled in the same run separate them.
"""

type Factors = dict[str, float | None]


def chopper_chain(
    compute_s: float,
    *,
    overlap_s: float,
    clocks_s: float,
    model_flops: float | None,
    program_flops: float,
    peak_flops: float | None,
) -> tuple[Factors, Factors]:
    """Divides the time in which one device computes into factors and into seconds.

    Args:
      compute_s: measured compute time.
      overlap_s, clocks_s: parts of compute_s lost to concurrent communication, and to clocks below the
        reference.
      model_flops: this device's FLOPs by the model's definition; None if unknown.
      program_flops: FLOPs that this device executes; 0 if unknown.
      peak_flops: FLOP/s at the reference clock; None if unknown.

    Returns:
      (factors, seconds). If the peak or the FLOPs are unknown, the factors theoretical_s and utilisation are
      None; the seconds of theoretical and instruction are None too, and counted in utilisation.
    """
    at_reference_s = compute_s - clocks_s
    alone_s = at_reference_s - overlap_s
    instruction = max(program_flops / model_flops, 1.0) if model_flops and program_flops else None
    factors: Factors = {
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
        factors |= {"theoretical_s": theoretical_s, "utilisation": alone_s / (theoretical_s * instruction)}
        seconds = {
            "theoretical": theoretical_s,
            "instruction": theoretical_s * (instruction - 1.0),
            "utilisation": alone_s - theoretical_s * instruction,
        }
    return factors, seconds | {"overlap": overlap_s, "clocks": clocks_s}
