"""Text that a run samples at its end."""

import dataclasses
from pathlib import Path

import pytest

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.telemetry.run_progress import ContinuedText
from jtrain.train import sampling
from jtrain.train.sampling import SAMPLE_TOKENS, load, sample_at_end, stream
from tests.cli.test_generate import SIZES, sharp_params


def test_a_run_ends_with_the_text_that_the_verb_would_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first of eval.prompts, or as a new document; left out where it would be dear or has no room."""
    config = load_config("tiny", sets=[f"model.{key}={value}" for key, value in SIZES.items()])
    run = build_run(config)
    asked = dataclasses.replace(run, eval=dataclasses.replace(run.eval, prompts=("def ", "class ")))
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(1, {"params": sharp_params(run.model)}, {}, tree.flat(config))
        checkpoints.wait()
        trained = load(tmp_path, 1)
        for ended, prompt in ((run, ""), (asked, "def ")):
            found = sample_at_end(checkpoints, ended, 1)
            assert isinstance(found, ContinuedText)
            text = "".join(
                stream(
                    *(trained.model, trained.params, trained.tokenizer, prompt),
                    context=256,
                    max_tokens=SAMPLE_TOKENS,
                )
            )
            assert found[:2] == (prompt, text)
            assert len(text) > 10
            assert found.seconds > 0
        too_long = dataclasses.replace(run, eval=dataclasses.replace(run.eval, prompts=("x" * 300,)))
        assert sample_at_end(checkpoints, too_long, 1) is None, "no room for an answer"
        monkeypatch.setattr(sampling, "SAMPLED_PARAMS", 20_000)
        assert sample_at_end(checkpoints, run, 1) is None, "28,704 parameters, so many are dear here"
    monkeypatch.undo()
    broken = object.__new__(Checkpoints)
    assert str(sample_at_end(broken, run, 1)).startswith("no text by the model: AttributeError: ")


@pytest.mark.slow
def test_the_answer_of_a_chat_begins_a_line(tmp_path: Path) -> None:
    """It is another message than the prompt, which is rendered by the template of the run's data."""
    chat = load_config("tiny_sft", sets=["model.num_layers=1", "model.d_model=32", "eval.prompts=('Who?',)"])
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        params = sharp_params(build_run(chat).model)
        checkpoints.save(1, {"params": params}, {}, tree.flat(chat))
        checkpoints.wait()
        found = sample_at_end(checkpoints, build_run(chat), 1)
    assert isinstance(found, ContinuedText), found
    assert found.prompt == "Who?\n"
