"""Tables of the report on the order of the training data: each figure, and what is good."""

from jtrain.data.inspect.order_report import LAGS, OrderReport
from jtrain.report.table import Table, numbers, words

MOST_SOURCES = 12
"""Sources that the table lists, those farthest from their shares first."""

_ADVICE = {
    "documents": "Good is many: rows of one document teach less than rows of several.",
    "distinct": "Good is 0.95 or more; rows of many short documents make it larger than 1.",
    "overlap": (
        "Good is what one shuffle of all chunks gives, beside it, and for k+1 a chunk that a step's end cuts."
    ),
    "autocorrelation": (
        "Good is 0, but for the standard error beside it; a mixture that changes makes it larger."
    ),
    "effective_rows": (
        "Good is the number of rows, beside it, or more: a mixture's shares make steps more even."
    ),
    "fill": "Good is above 99 %; the rest of the token positions is padding.",
    "pieces": "1 is a row of one chunk; attention does not cross from one piece to the next.",
    "cuts": "Good is few: tokens after a cut do not see those before it.",
    "met": "Good is what one shuffle of the corpus gives, beside it.",
    "distance": "Good is what one shuffle gives; 1 if no topic of the steps is one of the corpus.",
    "loss": "Good is 1.02 times what one shuffle gives, beside it, or less.",
    "drift": "Good is at most 0.1 % beyond one chunk per source, which is beside it.",
}


def lines_of(report: OrderReport) -> list[str]:
    """Returns the report as tables: each figure, what it is compared with, and a sentence on what is good."""
    head = f"order of the first {report.steps} steps of {report.rows} rows x {report.seq_len} tokens"
    table = Table("order", words(head) + numbers("found", "beside") + words(""))
    table.add("documents per step", f"{report.documents_per_step:.1f}", "", _ADVICE["documents"])
    table.add("documents per step / rows", f"{report.distinct_over_rows:.3f}", "", _ADVICE["distinct"])
    for lag, overlap in report.overlap.items():
        label, advice = (
            f"share of step k's documents in k+{lag}",
            _ADVICE["overlap"] if lag == LAGS[0] else "",
        )
        table.add(label, f"{overlap.found:.3f}", f"{overlap.chance:.3f}", advice)
    for lag, correlation in report.autocorrelation.items():
        label, advice = (
            f"correlation of the tokens of k and k+{lag}",
            _ADVICE["autocorrelation"] if lag == LAGS[0] else "",
        )
        table.add(label, f"{correlation.found:.3f}", f"±{correlation.error:.3f}", advice)
    rows = f"{report.effective_rows:.1f}", str(report.rows)
    table.add("independent rows in a step", *rows, _ADVICE["effective_rows"])
    topics = report.topics
    label = f"topics met, of {topics.topics}"
    table.add(label, f"{topics.met.found:.0f}", f"{topics.met.chance:.1f}", _ADVICE["met"])
    for label, compared in (
        ("all steps", topics.distance),
        ("an eighth of the steps", topics.window_distance),
    ):
        advice = _ADVICE["distance"] if compared is topics.distance else ""
        table.add(
            f"distance of the topics of {label}", f"{compared.found:.3f}", f"{compared.chance:.3f}", advice
        )
    loss = f"{topics.loss.found:.3f}", f"{topics.loss.chance:.3f}"
    table.add("expected loss, nats per token", *loss, f"{topics.loss_ratio:.3f}x. {_ADVICE['loss']}")
    table.add("fill", f"{report.fill:.2%}", "", _ADVICE["fill"])
    table.add("pieces per row", f"{report.pieces_per_row:.2f}", "", _ADVICE["pieces"])
    table.add("cut chunks per step", f"{report.cut_chunks_per_step:.2f}", "", _ADVICE["cuts"])
    # One source has no shares to drift from.
    if len(report.sources) == 1:
        return table.lines()
    for steps in report.drift_steps():
        percent, percent_beyond = (
            f"{drift[steps - 1]:.3%}" for drift in (report.drift, report.drift_beyond_a_chunk)
        )
        table.add(
            f"drift after {steps:,} steps", percent, percent_beyond, _ADVICE["drift"] if steps == 1 else ""
        )
    shares = Table("shares", words("share of a source") + numbers("found", "wanted"))
    # Hundreds of sources would fill the screen: those that are farthest off.
    farthest = sorted(report.sources, key=lambda source: -abs(source.found - source.wanted))[:MOST_SOURCES]
    for source in farthest:
        shares.add(f"  {source.name}", f"{source.found:.3%}", f"{source.wanted:.3%}")
    if num_unlisted := len(report.sources) - len(farthest):
        shares.add(f"  ... and {num_unlisted} more sources, which are closer to theirs")
    return [*table.lines(), *shares.lines()]
