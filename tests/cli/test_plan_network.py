"""`python -m jtrain.plan network` and `ecmp`: figures, files to be sourced, and one message for each
mistake.
"""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jtrain.cli.plan import main
from jtrain.plan.fabric.hashing import expected_max_load
from tests.cli.loaded import list_loaded

type Output = Callable[..., str]

H100 = ("--device", "h100", "--count", "64")
RACKS = """
count = 512
[chip]
name = "h100"
[host]
oversubscription = 0.889
cpu = "amd"
[network]
rails = 1
hosts_per_leaf = 2
uplinks = 18
routing = "hashed"
efficiency = 0.92
latency_us = 2
buffer_mb = 16
traffic_class = 106
"""


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Output:
    """Runs `plan` with these words; returns what it prints, or after exit code 2 the message."""

    def run(*words: str, code: int = 0) -> str:
        assert main(words) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return run


@pytest.fixture
def racks(tmp_path: Path) -> Path:
    """A machine whose racks have one leaf switch each, which hashes flows over 18 uplinks."""
    path = tmp_path / "racks.toml"
    path.write_text(RACKS)
    return path


def test_a_table_the_choice_and_its_variables(output: Output, tmp_path: Path) -> None:
    """64 x H100, 1 GiB: NCCL chooses a ring; the file that is written sets just that in a shell."""
    shell, figures = tmp_path / "nccl.sh", tmp_path / "nccl.json"
    printed = output("network", *H100, "--bytes", "1G", "--shell", str(shell), "--json", str(figures))
    assert "all-reduce of 1 GiB over 64 x h100" in printed
    assert "NCCL 2.31's own model, channels in GB/s: ring 8 x 45, tree 8 x 48, NVLS 8 x 40" in printed
    assert "NCCL chooses Ring with Simple: 6.691 ms by its model" in printed
    assert "hierarchical" in printed
    found = json.loads(figures.read_text())
    assert [row["nccl_us"] for row in found["nccl"]] == sorted(row["nccl_us"] for row in found["nccl"])
    assert (found["nccl"][0]["algorithm"], found["bytes"]) == ("Ring", 2**30)
    assert found["nccl"][0]["bus_gb_per_s"] == pytest.approx(315.9, abs=0.05)
    assert found["us"] == pytest.approx(6691.3, abs=0.05)
    assert all(line in printed for line in found["shell"])
    script = f". {shell} && echo $NCCL_ALGO $NCCL_PROTO $NCCL_IB_QPS_PER_CONNECTION"
    done = subprocess.run(["sh", "-ec", script], env={}, capture_output=True, text=True, check=True)
    assert done.stdout == "allreduce:ring allreduce:simple\n"


def test_queue_pairs_on_a_hashed_spine(output: Output, racks: Path, tmp_path: Path) -> None:
    """Racks of 16 adapters over 18 uplinks: loads are exact, an all-reduce gains, NCCL's variables can be
    sourced.
    """
    shell, figures = tmp_path / "nccl.sh", tmp_path / "ecmp.json"
    words = ("--machine", str(racks), "--bytes", "256M", "--shell", str(shell), "--json", str(figures))
    printed = output("ecmp", *words)
    assert "32 flows over 18 links" in printed
    assert "up to 40 %" in printed
    assert "no target of this model" in " ".join(printed.split())
    assert "incast: 2 senders to one adapter" in printed
    found = json.loads(figures.read_text())
    rows = {row["queue_pairs"]: row for row in found["rows"]}
    assert set(rows) == {1, 2, 4, 8, 16, 32}
    assert rows[4]["exact"] == expected_max_load(32, 18, 4)
    assert rows[1]["simulated"] == pytest.approx(rows[1]["exact"], rel=0.02)
    gains = [row["faster"] for row in found["rows"]]
    assert gains[0] == 1
    assert gains == sorted(gains)
    assert 1.3 < rows[4]["faster"] < rows[4]["speed"], "latency does not shrink"
    script = f". {shell} && echo $NCCL_IB_QPS_PER_CONNECTION $NCCL_IB_SPLIT_DATA_ON_QPS $NCCL_IB_TC"
    done = subprocess.run(["sh", "-ec", script], env={}, capture_output=True, text=True, check=True)
    assert done.stdout == f"{found['queue_pairs']} 0 106\n"
    assert found["queue_pairs"] in (8, 16)


def test_short_messages_cannot_use_more_queue_pairs(output: Output, racks: Path, tmp_path: Path) -> None:
    """4 MiB are 1 MiB per adapter: two connections with one message each."""
    figures = tmp_path / "ecmp.json"
    output("ecmp", "--machine", str(racks), "--bytes", "4M", "--trials", "10", "--json", str(figures))
    found = json.loads(figures.read_text())
    assert {row["used"] for row in found["rows"]} == {1}
    assert found["queue_pairs"] == 1


def test_flows_over_links_need_no_machine(output: Output, tmp_path: Path) -> None:
    """64 over 16: half of the ideal rate with one queue pair, 82 % with 16; a seed repeats its draws."""
    path = tmp_path / "ecmp.json"
    words = ("ecmp", "--flows", "64", "--links", "16", "--trials", "100", "--json", str(path))
    assert "4 if even" in output(*words)
    first = json.loads(path.read_text())["rows"]
    output(*words)
    assert json.loads(path.read_text())["rows"] == first
    output(*words, "--seed", "1")
    assert json.loads(path.read_text())["rows"] != first
    assert [round(row["of_even"], 2) for row in first] == [0.51, 0.6, 0.68, 0.76, 0.82, 0.86]
    assert first[4]["speed"] == pytest.approx(1.6, rel=0.01)


def test_order_and_hash_decide_what_the_spine_leaves(output: Output, racks: Path, tmp_path: Path) -> None:
    """Leaf by leaf half as many flows cross; an all-to-all crosses with nearly all of its bytes."""
    path = tmp_path / "network.json"

    def spine(*words: str) -> dict[str, float]:
        output("network", "--machine", str(racks), *words, "--json", str(path))
        return json.loads(path.read_text())["spine"]

    assert (spine()["flows"], spine("--ordered")["flows"]) == (32, 16)
    assert spine()["share"] < spine("--ordered")["share"] < 0.92
    assert spine("--collective", "all-to-all")["flows"] == 16 * 62


def test_tpus_and_other_makers_have_levels_and_no_variables(output: Output) -> None:
    """A slice's torus; AMD's GPUs."""
    printed = output("network", "--device", "v5p", "--count", "64", "--collective", "all-gather")
    assert "rings of the torus" in printed
    assert "# No variables of NCCL follow from it." in printed
    assert "NCCL chooses" not in output("network", "--device", "mi300x", "--count", "8")
    assert "NCCL has no model of an all-to-all" in output("network", *H100, "--collective", "all-to-all")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("network",), "a network needs a machine. Give --device, one of a100, h100,"),
        (("network", "--device", "h100"), "--device h100: how many? Give --count."),
        (("network", "--device", "h1000", "--count", "8"), "No device is called 'h1000'. Did you mean h100"),
        (
            ("network", "--device", "h100", "--count", "12"),
            "--count 12 is no whole number of domains: links join 8",
        ),
        (("network", *H100, "--machine", "a.toml"), "--machine a.toml with --device: the file says it"),
        (
            ("network", "--machine", "none.toml"),
            "--machine none.toml: No such file or directory. Give a TOML file",
        ),
        (
            ("network", *H100, "--collective", "allreduce"),
            "--collective allreduce is unknown. Give one of all-reduce,",
        ),
        (("network", *H100, "--bytes", "much"), "--bytes much: expected a size such as 128GiB or 2TB"),
        (("network", *H100, "--shell", "no/where.sh"), "--shell no/where.sh: there is no folder"),
        (("network", *H100, "--json", "no/where.json"), "--json no/where.json: there is no folder"),
        (("ecmp",), "a network needs a machine"),
        (
            ("ecmp", *H100),
            "64 x h100: its switches spread flows by load, so no hashes collide. Set network.routing to",
        ),
        (("ecmp", "--flows", "8"), "--flows and --links belong together. Give both"),
        (("ecmp", "--flows", "0", "--links", "8"), "--flows 0 must be from 1 to 65,536"),
        (("ecmp", "--flows", "8", "--links", "8", "--trials", "0"), "--trials 0 must be from 1 to 1,000,000"),
        (("ecmp", "--flows", "8", "--links", "8", "--seed", "-1"), "--seed -1 must be 0 or more"),
        (("ecmp", "--flows", "8", "--links", "8", *H100), "--flows and --links are instead of a machine"),
        (
            ("ecmp", "--flows", "8", "--links", "8", "--shell", "a.sh"),
            "--shell a.sh: the variables are of a machine",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_each_mistake_is_one_message(output: Output, words: tuple[str, ...], message: str) -> None:
    """Exit code 2, no traceback."""
    printed = output(*words, code=2)
    assert message in printed
    assert printed.startswith("error: ")
    assert "Traceback" not in printed


def test_the_pages_output_is_what_the_commands_print(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/network.md, with its own machine: every command whose output follows it."""
    page = (Path(__file__).parents[2] / "docs" / "network.md").read_text()
    (tmp_path / "racks.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"```bash\njtrain plan (.*?)\n```\n\n```\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 2
    for command, text in shown:
        printed = [line.rstrip() for line in output(*command.split()).splitlines()]
        assert printed == text.splitlines()


def test_hosts_under_one_leaf_have_no_collisions(output: Output, racks: Path) -> None:
    """Two hosts of a rack: nothing crosses the spine."""
    message = output("ecmp", "--machine", str(racks), "--count", "16", code=2)
    assert "16 x h100: all 2 hosts are under one leaf, so nothing crosses the spine. Raise --count" in message


def test_tables_answer_without_jax() -> None:
    """In a process of its own, which must not import jax."""
    commands = (
        ["jtrain.plan", "network", "--device", "h100", "--count", "8"],
        ["jtrain.plan", "ecmp", "--flows", "8", "--links", "8"],
    )
    loaded = list_loaded(["jax"], *commands)
    assert (loaded.codes, loaded.packages) == ([0, 0], [])
    assert "NCCL chooses NVLS with Simple" in loaded.output
