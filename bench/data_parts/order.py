"""Order of training data: documents per step, correlation of steps, drift of mixtures.

Reads batches in this process, as `python -m jtrain.data inspect --order` does, of the standard library
(`tiny`), of a made corpus of 1 MB documents in three forms, of the config `mixture`, and of a mixture of 17
KB documents. Chance is what one shuffle of all chunks gives. Drift is max(0, |tokens - wanted| - seq_len) of
the source that is farthest from its share, over all tokens: what no order of whole chunks can avoid is left
out.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from bench.data_parts import files
from jtrain.bench import Row, row
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.data import Constant, PackedText, Source, open_dataset
from jtrain.data.inspect.order_report import OrderReport, measure_order
from jtrain.data.sources.sample import FILES, write_sample

LONG_BYTES, LONG_DOCUMENTS = 1_000_000, 256
"""The corpus of long documents. 16 draws of 256 find 15.5 different ones on average, 0.97 of 16 rows."""

_LETTERS = 8  # of a document's own alphabet, so that its chunks are alike and differ from all others


def rows(*, steps: int = 1000) -> Iterator[Row]:
    """Order of four corpora, then drift of two mixtures; `steps` of tiny, of 1 MB documents a fifth."""
    tiny = build_run(load_config("tiny"))
    yield from order_rows("tiny", measure_order(open_dataset(tiny.data, seed=tiny.seed), steps))
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in long_corpora(Path(folder), documents=LONG_DOCUMENTS, size=LONG_BYTES):
            label = f"{LONG_DOCUMENTS} documents of {LONG_BYTES / 1e6:g} MB, {name}"
            # A fifth of the steps: a document has thousands of chunks, and reading them takes longer.
            yield from order_rows(label, measure_order(open_dataset(spec, seed=0), max(steps // 5, 20)))
    for label, make, ends in (
        ("mixture", shipped_mixture, (100, 300)),
        ("90/10, 17 KB documents", two_sources, (100,)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            spec = make(Path(folder))
            yield from drift_rows(label, measure_order(open_dataset(spec, seed=0), ends[-1]), ends)


def order_rows(corpus: str, report: OrderReport) -> list[Row]:
    """Returns the rows with bars on the order of one source."""
    overlap, correlation = report.overlap[10], report.autocorrelation[1]
    # Lag 10 for documents, lag 1 for tokens: where a weak shuffle shows first.
    steps = f"{corpus}, {report.steps} steps"
    return [
        row(f"{steps}: different documents per step over rows", report.distinct_over_rows, "", bar=">= 0.95"),
        row(
            f"{steps}: |correlation| of k and k+1, +-{correlation.error:.3f}",
            abs(correlation.found),
            "",
            bar="< 0.05",
        ),
        row(
            f"{steps}: share of k's documents in k+10, over chance",
            overlap.found,
            "",
            baseline=overlap.chance,
            bar="<= 2",
        ),
        row(f"{steps}: independent rows in a step over rows", report.effective_rows / report.rows, ""),
    ]


def drift_rows(mixture: str, report: OrderReport, steps: tuple[int, ...]) -> list[Row]:
    """Returns the rows with bars on the drift of a mixture."""
    rows = []
    for step in steps:
        beyond, total = 100 * report.drift_beyond_a_chunk[step - 1], 100 * report.drift[step - 1]
        rows.append(
            row(
                f"{mixture}, drift beyond a chunk after {step} steps",
                float(beyond),
                "% of tokens",
                bar="<= 0.1",
            )
        )
        rows.append(row(f"{mixture}, all drift after {step} steps", float(total), "% of tokens"))
    return rows


def long_corpora(folder: Path, *, documents: int, size: int) -> Iterator[tuple[str, PackedText]]:
    """Yields the same documents of `size` bytes in three forms, with specs that read rows as `tiny` does."""
    texts = long_texts(documents, size=size)
    lines = folder / "long.jsonl"
    files.write_jsonl(lines, texts)
    # Rows as in `tiny`: 16 of 256 tokens.
    spec = PackedText(
        path=str(lines), seq_len=256, global_batch=16, eval_fraction=0.0, cache_dir=str(folder / "cache")
    )
    yield "JSON lines", spec
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "long.parquet", row_group_size=16)
    yield "Parquet", dataclasses.replace(spec, path=str(folder / "long.parquet"))
    yield "prepared", dataclasses.replace(spec, prepared=str(files.prepare_index(spec, lines)))


def long_texts(documents: int, *, size: int) -> list[str]:
    """Returns texts of `size` random letters, each from an alphabet of its own."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, _LETTERS, size)
    # Without quote and backslash, which JSON would write as two bytes.
    letters = np.frombuffer(bytes(range(33, 127)).replace(b'"', b"").replace(b"\\", b""), np.uint8)
    alphabets = [rng.choice(letters, _LETTERS, replace=False) for _ in range(documents)]
    return [alphabet[drawn].tobytes().decode() for alphabet in alphabets]


def shipped_mixture(folder: Path) -> PackedText:
    """Writes the sample corpus; returns the data of the config `mixture` with its paths there."""
    write_sample(folder)
    spec = build_run(load_config("mixture")).data
    sources = {
        name: dataclasses.replace(source, path=str(folder / FILES[name]))
        for name, source in spec.sources.items()
    }
    return dataclasses.replace(spec, sources=sources, cache_dir=str(folder / "cache"))


def two_sources(folder: Path) -> PackedText:
    """Writes two sources of 17 KB documents; returns a mixture of nine parts and one part."""
    # Two sources of equal size: the weights alone make one frequent.
    for name in ("most", "rest"):
        files.write_jsonl(folder / f"{name}.jsonl", long_texts(400, size=17_000))
    return PackedText(
        sources={name: Source(path=str(folder / f"{name}.jsonl")) for name in ("most", "rest")},
        mixture=Constant({"most": 0.9, "rest": 0.1}),
        seq_len=256,
        global_batch=16,
        eval_fraction=0.0,
        cache_dir=str(folder / "cache"),
    )
