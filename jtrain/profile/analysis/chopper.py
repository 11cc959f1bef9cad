"""Compute time after Chopper (arXiv:2512.08242): factors whose product is exactly the measured time.

theoretical_s * instruction * utilisation * overlap * frequency = compute_s

| factor | meaning | source |
|---|---|---|
| theoretical_s | the model's FLOPs at the device's peak | the plan |
| instruction | executed FLOPs over the model's FLOPs: recomputation, padding, masked scores | trace, HLO |
| utilisation | time without overlap at the reference clock, over the executed FLOPs at the peak | remainder |
| overlap | time at the reference clock over that without concurrent communication | the op running alone |
| frequency | measured time over the time at the reference clock | clocks sampled in the same run |

Chopper measures cycles in a second run that serialises the kernels, so it cannot separate overlap from
frequency. Clocks sampled in the same run separate them.

Example: a device with a peak of 1000 TFLOP/s computes for 1.0 s per step. It executes 400 TFLOP, of which 300
are the model's own; 0.2 s are lost to low clocks and 0.1 s to communication at the same time.

| factor | value | seconds that it adds |
|---|---|---|
| theoretical_s | 300 / 1000 = 0.3 s | 0.3 |
| instruction | 400 / 300 = 1.333 | 0.3 * 0.333 = 0.1 |
| utilisation | (1.0 - 0.2 - 0.1) / 0.4 = 1.75 | 0.7 - 0.4 = 0.3 |
| overlap | (1.0 - 0.2) / 0.7 = 1.143 | 0.1 |
| frequency | 1.0 / 0.8 = 1.25 | 0.2 |

0.3 s * 1.333 * 1.75 * 1.143 * 1.25 = 1.0 s, and the seconds sum to 1.0 s as well.
"""

type Factors = dict[str, float | None]
"""Factors of the chain by name; None where one is unknown."""


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
    # Losses are peeled off in this order: overlap is a slowdown at the reference clock, so clocks come first.
    at_reference_s = compute_s - clocks_s
    alone_s = at_reference_s - overlap_s
    # Below 1 means that FLOPs of some kernel are unknown; the remainder is then utilisation.
    instruction = max(program_flops / model_flops, 1.0) if model_flops and program_flops else None
    factors: Factors = {
        "theoretical_s": None,
        "instruction": instruction,
        "utilisation": None,
        "overlap": at_reference_s / alone_s if alone_s else 1.0,
        "frequency": compute_s / at_reference_s if at_reference_s else 1.0,
        "compute_s": compute_s,
    }
    # Without a peak, all that is left is utilisation: a difference to an unknown ideal.
    seconds: Factors = {"theoretical": None, "instruction": None, "utilisation": alone_s}
    if model_flops and instruction and peak_flops and alone_s:
        theoretical_s = model_flops / peak_flops
        factors |= {"theoretical_s": theoretical_s, "utilisation": alone_s / (theoretical_s * instruction)}
        seconds = {
            "theoretical": theoretical_s,
            "instruction": theoretical_s * (instruction - 1.0),
            "utilisation": alone_s - theoretical_s * instruction,
        }
    # The five seconds sum to compute_s, as the factors multiply to it.
    return factors, seconds | {"overlap": overlap_s, "clocks": clocks_s}
