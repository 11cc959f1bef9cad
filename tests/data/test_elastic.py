"""The batches are the same for any number of hosts and loaders, up to the end of the data."""

import dataclasses
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.data import TextDataset, open_dataset
from jtrain.errors import UserError
from jtrain.layout.dims import Batch
from tests.data.conftest import assert_same_batch
from tests.data.four_sources import NAMES, digest, spec


def hosts_batches(dataset: TextDataset, state: Any, hosts: int, steps: int) -> tuple[list[Batch], Any]:
    """Returns the joined batches of `hosts` hosts, and the state after them, which is the same on each
    host.
    """
    rows = np.split(np.arange(dataset.spec.global_batch), hosts)
    parts = [dataset.train_batches(state, rows=mine, inline=True) for mine in rows]
    found = [jax.tree.map(lambda *rows: np.concatenate(rows), *map(next, parts)) for _ in range(steps)]
    states = [part.state() for part in parts]
    assert all(other == states[0] for other in states), "every host's planner says the same without a word"
    return found, json.loads(json.dumps(states[0]))


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concat", pytest.param("best_fit", marks=pytest.mark.slow)])
def test_eight_then_four_then_sixteen_hosts_hold_the_batches_of_one(folder: Path, packing: str) -> None:
    """All four arrays of each batch."""
    dataset = open_dataset(spec(folder, packing=packing), seed=0)
    want, _ = hosts_batches(dataset, None, 1, 9)
    found, state = hosts_batches(dataset, None, 8, 3)
    for hosts in (4, 16):
        more, state = hosts_batches(dataset, state, hosts, 3)
        found += more
    for got, batch in zip(found, want, strict=True):
        assert_same_batch(got, batch)
    assert len(json.dumps(state)) < 8192


def test_resuming_twice_with_other_loaders_each_time_is_the_same_stream(folder: Path) -> None:
    with open_dataset(spec(folder), seed=0).train_batches(inline=True) as batches:
        want = digest(batches, 45)
    found, state = hashlib.blake2b(digest_size=8), None
    for loaders in (1, 3, 2):
        dataset = open_dataset(spec(folder, max_loaders=loaders, shadows=loaders % 2), seed=0)
        with dataset.train_batches(state) as batches:
            for batch in itertools.islice(batches, 15):
                for name in ("token_BL", "target_BL", "position_BL", "segment_BL"):
                    found.update(getattr(batch, name).tobytes())
            state = json.loads(json.dumps(batches.state()))
    assert found.hexdigest() == want


@pytest.mark.slow
def test_data_ends_at_the_same_step_on_every_host_with_every_document_read_once(folder: Path) -> None:
    dataset = open_dataset(spec(folder, epochs=1, eval_fraction=0.0), seed=0)
    counts, tokens = [], 0
    for mine in np.split(np.arange(16), 4):
        with dataset.train_batches(rows=mine, inline=True) as batches:
            taken = list(batches)
        assert all(batch.token_BL.shape == (4, 64) for batch in taken)
        counts.append(len(taken))
        tokens += sum(int((batch.segment_BL > 0).sum()) for batch in taken)
    assert len(set(counts)) == 1
    texts = [
        json.loads(line)["text"] for n in NAMES for line in (folder / f"{n}.jsonl").read_text().splitlines()
    ]
    assert tokens == sum(len(text) + 2 for text in texts)
    with dataset.train_batches() as batches:
        assert len(list(batches)) == counts[0]
        with pytest.raises(StopIteration):
            next(batches)


def test_a_host_with_a_prepared_index_reads_only_documents_of_its_own_rows(folder: Path) -> None:
    from jtrain.data.pretokenized.build import prepare_command

    plain = spec(folder)
    out = folder / "prepared"
    options = {
        "tokenizer": "bytes",
        "end_token": None,
        "on_bad_record": "fail",
        "cache_dir": folder / "cache",
    }
    prepare_command(plain.sources, out, **options, workers=1, command="prepare")
    prepared = open_dataset(spec(folder, prepared=str(out)), seed=0)
    want, state = hosts_batches(prepared, None, 1, 12)
    found, other_state = hosts_batches(prepared, None, 4, 12)
    for got, batch in zip(found, want, strict=True):
        assert_same_batch(got, batch)
    assert other_state == state
    with pytest.raises(UserError, match=r"saved with sources\..*start in a new --workdir"):
        open_dataset(plain, seed=0).train_batches(state, inline=True)

    documents = []
    for rows in (np.arange(16), np.arange(4)):
        with prepared.train_batches(rows=rows, inline=True) as batches:
            digest(batches, 12)
            assert batches.stats is not None
            documents.append(batches.stats.loaders[0].documents)
    assert documents[1] < 0.45 * documents[0]


def test_a_changed_mixture_goes_on_and_says_what_changed_from_which_step(folder: Path) -> None:
    first = open_dataset(spec(folder), seed=0)
    with first.train_batches(inline=True) as batches:
        digest(batches, 12)
        state = json.loads(json.dumps(batches.state()))
    sources = {
        n: dataclasses.replace(s, weight=0.0 if n == "web" else 1.0) for n, s in first.spec.sources.items()
    }
    second = open_dataset(spec(folder, sources=sources), seed=0)
    with second.train_batches(state, inline=True) as batches:
        said = "\n".join(batches.take_messages())
        assert "step 12: the mixture was" in said
        assert "step 12: web 0.1000 -> 0.0000" in said
        digest(batches, 40)
        assert batches.stats is not None
        assert "web" not in batches.stats.tokens(second.names)
        assert [step for step, *_ in batches.state()["planner"]["history"]] == [0, 12]
