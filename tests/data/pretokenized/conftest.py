"""Documents for token files of other projects."""

import numpy as np
import pytest

from jtrain.data.pretokenized import scanned_parts
from jtrain.data.pretokenized.foreign import dense, foreign_file
from tests.data.pretokenized.adopting import END
from tests.data.pretokenized.foreign_writers import Documents


@pytest.fixture
def documents() -> Documents:
    """Documents of 1 to 300 ids, each ended by the end id, which is nowhere else."""
    rng = np.random.default_rng(0)
    return [[*(int(i) for i in rng.integers(2, 278, rng.integers(0, 300))), END] for _ in range(83)]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of some 500 ids: documents lie in several, and several in one."""
    for module in (dense, foreign_file, scanned_parts):
        monkeypatch.setattr(module, "PART_BYTES", 1000)
