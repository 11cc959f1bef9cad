"""Fuzzes the readers of files with atheris, which jtrain's tests do not need: `pip install atheris` first.

python -m tests.data.fuzz TARGET [--seconds N]   changes inputs of corpus/TARGET until one breaks the reader

The input that broke it is written to the current folder. `tests/data/fuzz/test_corpus.py` replays the corpus.
"""

import argparse
import importlib
import shutil
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
_MOST_BYTES = 1 << 14


def main() -> None:
    """Fuzzes one target; libFuzzer ends the process, with code 0 if nothing was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=300)
    args = parser.parse_args()

    atheris = importlib.import_module("atheris")  # not installed where types are checked

    with atheris.instrument_imports(include=["jtrain", "json", "csv"]):
        from tests.data.fuzz import targets

    # Found inputs go to a folder that is thrown away: of what they are, a few belong into the corpus, by
    # hand.
    with tempfile.TemporaryDirectory(prefix="jtrain-fuzz-") as found, tempfile.TemporaryDirectory() as files:
        folder = Path(files) / "files"

        def one(content: bytes) -> None:
            folder.mkdir()
            try:
                targets.run(args.target, content, folder)
            finally:
                shutil.rmtree(folder)

        limits = ["-timeout=60", "-rss_limit_mb=4096", f"-max_len={_MOST_BYTES}", "-print_final_stats=1"]
        limits += [f"-max_total_time={args.seconds}", "-verbosity=0"]
        atheris.Setup([sys.argv[0], *limits, found, str(CORPUS / args.target)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
