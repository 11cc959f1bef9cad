"""The programs of docs/reinforcement_learning.md, run as the page has them."""

import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.config.weight_stream_spec import read_token
from jtrain.hf.mapping import to_hf
from jtrain.hf.weight_link import send_weights

PAGE = Path(__file__).parents[2] / "docs" / "reinforcement_learning.md"
LOOP, READER = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_program_has_40_lines() -> None:
    compile(LOOP, str(PAGE), "exec")
    assert 20 < len([line for line in LOOP.splitlines() if line.strip()]) <= 40


@pytest.mark.slow
def test_the_program_learns_from_what_its_own_sampler_drew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sampler reads the weights of each step, and trainer and sampler agree on what it drew."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(LOOP, str(PAGE), "exec"), names)
    printed = re.findall(r"mean reward ([\d.]+), ratio ([\d.]+)", capsys.readouterr().out)
    rewards, ratios = np.asarray(printed, float).T
    assert len(rewards) == 8
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.9
    np.testing.assert_allclose(ratios, 1.0, atol=1e-3)
    assert (tmp_path / "runs/policy/weights/latest").read_text() == "step-00000007\n"

    (tmp_path / "token.txt").write_text("a secret of more than 16 bytes")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    reading: dict[str, Any] = {}
    code = compile(READER.replace("0.0.0.0:7000", f"127.0.0.1:{port}"), str(PAGE), "exec")
    thread = threading.Thread(target=exec, args=(code, reading))
    thread.start()
    while "reader" not in reading:
        time.sleep(0.01)
    tensors = dict(to_hf(names["state"].params, names["model"], dtype="float32"))
    send_weights(("127.0.0.1", port), read_token("token.txt"), 8, iter(tensors.items()), count=len(tensors))
    reading["reader"].close()
    thread.join()
    assert capsys.readouterr().out == f"8 {len(tensors)}\n"
