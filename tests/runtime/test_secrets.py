"""Secrets are hidden by their field's name or by their form, and nothing else is."""

import json
import os
import stat
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jtrain.cli.run import run
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.resume import check_same_run, config_from_text, with_history
from jtrain.config.run import build_run
from jtrain.errors import FileError, UserError
from jtrain.runtime.atomic_io import write_whole
from jtrain.runtime.run_files import write_run_files
from jtrain.runtime.secrets import is_secret, redact_command, redact_value, without_secrets
from jtrain.telemetry.metrics import MetricsSpec
from jtrain.telemetry.metrics_writer import Metrics

SIGNED = "https://b.s3.amazonaws.com/a.jsonl?X-Amz-Expires=60&X-Amz-Credential=AKIAID&X-Amz-Signature=5ec7e7"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("s3://bucket/a/*.jsonl", "s3://bucket/a/*.jsonl"),
        ("hf://datasets/org/name@refs/a.parquet", "hf://datasets/org/name@refs/a.parquet"),
        ("https://user:5ec7e7@host/a?b=c", "https://***@host/a?b=c"),
        ("https://5ec7e7@host", "https://***@host"),
        (SIGNED, "https://b.s3.amazonaws.com/a.jsonl?X-Amz-Expires=60&X-Amz-Credential=***&X-Amz-Signature=***"),
        ("https://x.blob.core.windows.net/c?sv=2024&sp=r&sig=5ec7e7%3D", "https://x.blob.core.windows.net/c?sv=2024&sp=r&sig=***"),
        ("('https://a/b?access_token=5ec7e7', 'c')", "('https://a/b?access_token=***', 'c')"),
        ("https://hooks.slack.com/services/T0/B0/5ec7e7", "https://hooks.slack.com/***"),
        ("https://discord.com/api/webhooks/1/5ec7e7", "https://discord.com/***"),
        ("https://a/b?subscription-key=5ec7e7&x=1", "https://a/b?subscription-key=***&x=1"),
        ("https://a/b?session=5ec7e7", "https://a/b?session=***"),
        ("https://a/b?my.pass=5ec7e7", "https://a/b?my.pass=***"),
        ("https://api.telegram.org/bot17:AAHd5ec7e7Gh2jKlMn4pQ/send", "https://api.telegram.org/***/send"),
        ("https://hf.co/o/n/resolve/0123456789abcdef0123456789abcdef01234567/CC-MAIN-20240220.json",
         "https://hf.co/o/n/resolve/0123456789abcdef0123456789abcdef01234567/CC-MAIN-20240220.json"),
        ("""('my.py:make(api_key="5ec7e7", every=3)',)""", """('my.py:make(api_key="***", every=3)',)"""),
        ("data.end_token='<|eos|>'", "data.end_token='<|eos|>'"),
        ("meet me @ https://example.com/a", "meet me @ https://example.com/a"),
    ],
)  # fmt: skip
def test_urls_lose_what_opens_the_door(text: str, kept: str) -> None:
    assert without_secrets(text) == kept
    assert "5ec7e7" not in kept


def test_names_that_hold_secrets() -> None:
    """And names that only look alike."""
    for name in (
        "data.api_key",
        "hub_token",
        "a.secret",
        "db.password",
        "my.pass",
        "aws_credentials",
        "alerts.webhook",
    ):
        assert is_secret(name), name
        assert redact_value(name, "'5ec7e7'") == "'***'"
        assert redact_value(name, "None") == "None"
    assert redact_value("data.api_key", "17") == "17"
    for name in (
        "data.tokenizer",
        "model.loss_chunk_tokens",
        "data.end_token",
        "tokens",
        "keyboard",
        "monkey",
    ):
        assert not is_secret(name), name


def test_no_shipped_config_has_a_hidden_value() -> None:
    for name in ("tiny", "mixture", "llama8b"):
        assert "***" not in tree.flat(load_config(name))


WEBHOOK = "alerts.webhook=https://example.com/T/5ec7e7"
SOURCES = f"data.sources={{'web': {{'path': '{SIGNED}'}}}}"


def test_a_run_keeps_no_secret_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in config.txt, run.json or remarks; with a renewed signature it is the same run, and its text is a
    config.
    """
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-m", "jtrain.launch", "--set", WEBHOOK, f"--set={SOURCES}"]
    )
    config = load_config("tiny", (), (WEBHOOK, "data.path=None", SOURCES))
    text = tree.flat(config)
    assert "5ec7e7" not in text
    assert build_run(config).alerts.webhook == WEBHOOK.partition("=")[2], "the run itself has it"
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
    write_run_files(tmp_path, text, mesh, num_processes=1, plan="")
    command = json.loads((tmp_path / "run.json").read_text())["command"]
    assert command[:5] == ["python", "-m", "jtrain.launch", "--set", "alerts.webhook=***"]
    for file in ("run.json", "config.txt"):
        assert "5ec7e7" not in (tmp_path / file).read_text()
        assert "***" in (tmp_path / file).read_text()
        assert stat.S_IMODE((tmp_path / file).stat().st_mode) == 0o600
    for_all = text.replace("data.path: str | None = None", f"data.path: str | None = '{SIGNED}'")
    (tmp_path / "config.txt").write_text(
        for_all + f"# changed at step 3: data.path: '{SIGNED}' there, 1 here\n"
    )
    renewed = for_all.replace("5ec7e7", "0123")
    assert check_same_run(tmp_path, renewed) == []
    assert "5ec7e7" not in with_history(tmp_path, tree.flat(config), step=4, changes=[])
    assert build_run(config_from_text(text)).alerts.webhook == "***"


def test_messages_quote_no_secret() -> None:
    for sets, message in (
        (("data.apikey='5ec7e7'",), r"--set data\.apikey=\*\*\*: data has no field apikey"),
        ((f"data.sources=('{SIGNED}',)",), r"X-Amz-Signature=\*\*\*"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load_config("tiny", (), sets)
        assert "5ec7e7" not in str(caught.value)
    assert redact_command(["a", "--workdir=https://u:5ec7e7@h/x", "b=c"]) == [
        "a",
        "--workdir=https://***@h/x",
        "b=c",
    ]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_have_what_the_umask_allows_and_no_more(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "open", "text")
        (tmp_path / "secret.tmp").write_text("left by a killed run")
        write_whole(tmp_path / "secret", "text", mode=0o600)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("open", "secret")]
    assert modes == [0o666 & ~umask, 0o600]


def test_what_ends_a_command_and_what_the_data_says_quote_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> int:
        raise FileError(f"{SIGNED} cannot be read")

    assert run(fails) == 2
    with Metrics(tmp_path, MetricsSpec(tensorboard=False), num_steps=3, start_step=0) as metrics:
        metrics.note(2, f"read {SIGNED} again")
    said = capsys.readouterr()
    for text in (said.out, said.err, (tmp_path / "data.log").read_text()):
        assert "X-Amz-Signature=***" in text
        assert "5ec7e7" not in text
