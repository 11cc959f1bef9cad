"""`jtrain check` of thirty runs without a bug: nothing fails, whatever the model and the layout."""

import shutil
from pathlib import Path

import pytest

from jtrain.data.sources.sample import write_sample
from tests.check.example_runs import check, words_of, write_chats
from tests.planting import ROOT

TEXT = ("data.path=stdlib", "data.tokenizer=bytes")
CHATS = ("data.sources.chats.path=stdlib_chats", "data.tokenizer=bytes_chat")
PAIRS = ("data.sources.pairs.path=stdlib_pairs", "data.tokenizer=bytes_chat")
DRAWN = 7
BUDGET_S = 90
RUNS: dict[str, tuple[str, ...]] = {
    "gemma3_12b": words_of("gemma3_12b", *TEXT, "mesh.data=2"),
    "glm45_air": words_of("glm45_air", *TEXT),
    "llama1b": words_of("llama1b", *TEXT, "mesh.context=2"),
    "llama70b": words_of("llama70b", *TEXT, "mesh.tensor=8"),
    "llama8b": words_of("llama8b", *TEXT),
    "minimax_m2": words_of("minimax_m2", *TEXT),
    "mistral_7b": words_of("mistral_7b", *TEXT, "mesh.replica=2", "mesh.tensor=2"),
    "olmo3_7b": words_of("olmo3_7b", *TEXT, "mesh.stage=2", "layout.microbatches=8"),
    "qwen25_7b": words_of("qwen25_7b", *TEXT, "mesh.tensor=2", "layout.tensor_overlap=True"),
    "qwen3_30b_a3b": words_of("qwen3_30b_a3b", *TEXT),
    "qwen3_8b": words_of("qwen3_8b", *TEXT, "mesh.context=4", "mesh.tensor=2"),
    "mixture": words_of("mixture"),
    "tiny": words_of("tiny", "mesh.data=4", "mesh.context=2", "layout.zero_stage=2"),
    "tiny_moe": words_of("tiny_moe", "mesh.expert=4", "layout.zero_stage=3"),
    "chats": words_of("chats", "mesh.data=2", "layout.zero_stage=1"),
    "chats, stages": words_of("chats", "mesh.stage=2", "layout.microbatches=4", "pipeline.schedule=zb-h1"),
    "chats, accumulated": words_of("chats", "layout.microbatches=4", "precision.param_dtype=bfloat16"),
    "chats, a mean per sample": words_of("chats", "objective.mean=per_sample", "mesh.context=2"),
    "tiny_sft": words_of("tiny_sft"),
    "sft_llama1b": words_of("sft_llama1b", *CHATS),
    "tiny_dpo": words_of("tiny_dpo"),
    "dpo_qwen3_8b": words_of("dpo_qwen3_8b", *PAIRS),
    "pairs, a layout of three axes": words_of(
        "tiny_dpo",
        "mesh.data=2",
        "mesh.context=2",
        "mesh.tensor=2",
        "layout.zero_stage=3",
        "objective.form=ipo",
    ),
    "pairs, stages": words_of(
        "tiny_dpo",
        "mesh.stage=2",
        "layout.microbatches=4",
        "objective.form=sigmoid_norm",
        "objective.margin=0.1",
    ),
    "pairs without a reference": words_of(
        "tiny_dpo",
        "adapter=None",
        "objective.reference=none",
        "objective.form=simpo",
        "layout.microbatches=2",
    ),
    "lora_llama8b": words_of("lora_llama8b", *TEXT),
    "lora_qwen3_30b_a3b": words_of("lora_qwen3_30b_a3b", *TEXT),
    "qlora_llama70b": words_of("qlora_llama70b", *TEXT),
    "blocks": words_of("blocks", 'adapter.base_dtype="int8"', "mesh.tensor=2", "mesh.context=2"),
    "lora": words_of("lora", "mesh.data=2"),
    "convolutions": words_of("convolutions", "mesh.context=2", "mesh.tensor=2"),
    "muon": words_of("muon", "mesh.data=2", "mesh.tensor=2", "layout.zero_stage=1"),
    "8-bit moments": words_of("text", "optimizer.moment_dtype=int8", "layout.offload.optimizer=0.5"),
}
"""Words by name: the shipped configs with layouts, then examples with options of all kinds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the configs, the data that they name, and this code."""
    folder = tmp_path_factory.mktemp("sound")
    for name in ("jtrain", "kernels", "tests"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", folder / "configs")
    write_chats(folder)
    write_sample(folder / "runs" / "sources")
    for seed in range(DRAWN):
        text = (
            f"from tests.check.drawn_runs import drawn\n\n\ndef drawn_{seed}():\n    return drawn({seed})\n"
        )
        (folder / "configs" / f"drawn_{seed}.py").write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNS, *(f"drawn_{seed}" for seed in range(DRAWN))])
def test_nothing_fails_without_a_bug(name: str, folder: Path) -> None:
    """Every line holds or says why it does not apply, and most of them hold."""
    code, lines, output = check(folder, *RUNS.get(name, (f"--config={name}",)), "--without-compiler")
    assert [line for line in lines if line["verdict"] == "FAILS"] == [], output
    assert code == 0, output
    assert sum(line["verdict"] == "holds" for line in lines) >= 5, output
    assert "next: jtrain launch" in output
