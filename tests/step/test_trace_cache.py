"""Traces of the parts of a step on disk: shared by processes, believed, and made anew where they are damaged."""

import dataclasses
import multiprocessing
from pathlib import Path

import jax
import pytest

from jtrain.plan.estimate.collectives import collectives
from jtrain.step.description import trace_cache
from jtrain.step.description.layout_class import class_of
from jtrain.step.description.traced_parts import forget_traces, trace_part
from tests.step.test_description import job_of


def _described(cache: str, number: int) -> int:
    """Bytes of a job's collectives in another process, with traces in `cache`."""
    jax.config.update("jax_compilation_cache_dir", cache)
    del number
    return sum(c.array_bytes for c in collectives(job_of(dict(data=8), zero_stage=3)))


@pytest.mark.slow
def test_processes_share_traces_and_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    """Two at a time write the same files; a file that is cut short, empty or of another form is traced
    again.
    """
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first = pool.starmap(_described, [(str(tmp_path), number) for number in range(2)])
    [folder] = (tmp_path / "traces").iterdir()
    files = sorted(folder.iterdir())
    assert len(set(first)) == 1
    assert len(files) == 4, "a file for each part of a step, and nothing else"
    whole = {file: file.read_text() for file in files}
    files[0].write_text(whole[files[0]][:100])
    files[1].write_text("")
    files[2].write_text('[{"kind": "all-gather"}]')
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.starmap(_described, [(str(tmp_path), 0)]) == first[:1]
    assert {file: file.read_text() for file in sorted(folder.iterdir())} == whole


def test_traces_are_read_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file says is believed: twice the count doubles the plan. Without a folder nothing is read."""
    job = job_of(dict(data=8), zero_stage=3)
    monkeypatch.setattr(trace_cache, "folder", lambda: tmp_path)
    forget_traces()
    of = class_of("embedding", job.model, job.layout, rows=job.rows(), seq_len=job.seq_len)
    found = trace_part(of)
    [file] = tmp_path.iterdir()
    each = (dataclasses.replace(one, count=(2 * one.count[0], one.count[1])) for one in found.collectives)
    doubled = dataclasses.replace(found, collectives=tuple(each))
    trace_cache.write_trace(file, trace_cache.text_of(doubled))
    forget_traces()
    assert trace_part(of) == doubled
    monkeypatch.setattr(trace_cache, "folder", lambda: None)
    forget_traces()
    assert trace_part(of) == found
