"""A real Ray cluster of two nodes on this machine, and three sources to read there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.data import PackedText, Source

ROOT = Path(__file__).parents[3]

QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Starts two nodes with one core and 80 MiB of object store each; a node killed by a test stays dead."""
    pytest.importorskip("ray", reason="needs the extra [ray]")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        size: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
        started = Cluster(
            initialize_head=True,
            head_node_args={**size, "include_dashboard": False, "_system_config": QUICK_TO_NOTICE},
        )
        try:
            started.add_node(**size)
            patch.setenv("RAY_ADDRESS", str(started.address))
            yield started
        finally:
            started.shutdown()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> PackedText:
    """Three sources of 300 documents; `b` has a loss mask."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for name in "abc":
        lines = [f"{name}{i}:" + "".join(rng.choice(list("xyß "), rng.integers(0, 400))) for i in range(300)]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": line, "mask": [[0, 1], [2, len(line)]]}) + "\n" for line in lines)
        )
    masks = {"b": "mask"}
    return PackedText(
        sources={
            name: Source(path=str(folder / f"{name}.jsonl"), weight=i + 1.0, mask_field=masks.get(name))
            for i, name in enumerate("abc")
        },
        seq_len=64,
        global_batch=8,
        eval_fraction=0.0,
        max_loaders=2,
    )
