"""Sampling: cached decoding equals the model, and the text depends only on checkpoint, prompt and seed."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.checkpoint import Checkpoints, CheckpointSpec
from jtrain.cli.generate import main
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.data import ByteTokenizer
from jtrain.layout.dims import Batch
from jtrain.model import kv_cache_decode
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.kv_cache_decode import (
    DECODE_CHUNK,
    PROMPT_CHUNK,
    TokenSampler,
    empty_cache,
    extend,
    generate_ids,
)
from jtrain.model.param import map_params
from jtrain.model.rope import Llama3Scaling, QueryTemperature, RopeSpec
from jtrain.model.transformer import Transformer
from jtrain.telemetry.recompiles import count_programs
from jtrain.train.sampling import load, stream
from tests.weights import draw_weights

SIZES: dict[str, Any] = dict(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=64, vocab_size=256
)
MODEL = Transformer(**SIZES)  # one for most tests: programs are compiled per model
GREEDY = TokenSampler(temperature=0.0)


@functools.cache
def sharp_params(model: Transformer, *, seed: int = 0) -> dict[str, Any]:
    """Random weights three times as large as usual, so that each token depends on all tokens before it."""
    return jax.tree.map(lambda x: 3 * x, draw_weights(model.param_infos(), seed=seed, noise=0.0))


def prompt_of(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(1, 256, length).astype(np.int32)


def full_logits(model: Transformer, params: dict[str, Any], ids: Sequence[int]) -> np.ndarray:
    """Logits [T, V] by the forward pass of training."""
    token_BL = jnp.asarray(ids, jnp.int32)[None]
    position_BL = jnp.arange(len(ids), dtype=jnp.int32)[None]
    batch = Batch(token_BL, token_BL, position_BL, jnp.ones_like(token_BL))
    return np.asarray(jax.jit(lambda p: model.logits(p, batch))(params))[0]


def answer(model: Transformer, params: dict[str, Any], prompt: np.ndarray, **options: Any) -> list[int]:
    """Ids that follow a prompt, joined."""
    options = {"sampler": GREEDY, "seed": 0} | options
    return [i for ids in generate_ids(model, params, prompt, **options) for i in ids]


MODELS = {
    "llama": {"rope": RopeSpec(500.0, Llama3Scaling(4.0, original_seq_len=32))},
    "qwen3, tied": {"qk_norm": True, "tie_embeddings": True},
}


@pytest.mark.parametrize(
    ("kind", "num_prompt"),
    [
        ("llama", 2 * PROMPT_CHUNK + 3),
        pytest.param("qwen3, tied", 1, marks=pytest.mark.slow),
        *(pytest.param("llama", number, marks=pytest.mark.slow) for number in (1, PROMPT_CHUNK)),
        *(
            pytest.param("qwen3, tied", n, marks=pytest.mark.slow)
            for n in (PROMPT_CHUNK, 2 * PROMPT_CHUNK + 3)
        ),
    ],
)
def test_greedy_decoding_with_a_cache_is_the_argmax_of_the_full_forward(kind: str, num_prompt: int) -> None:
    """Greedy decoding equals the model token by token, over several chunks of prompt and answer."""
    model = Transformer(**SIZES, **MODELS[kind])
    params, prompt = sharp_params(model), prompt_of(num_prompt)
    got = answer(model, params, prompt, max_tokens=40)
    assert len(got) == 40
    assert len(set(got)) > 5, "a constant answer would prove little"
    logits = full_logits(model, params, [*prompt.tolist(), *got])
    assert got == logits.argmax(-1)[num_prompt - 1 : -1].tolist()


CHUNKED = BlockSpec(AttentionSpec(chunk_size=5, temperature=QueryTemperature(0.5, 4, offset=1)))
WITH_SETTINGS = Transformer(
    **SIZES,
    pattern=(BlockSpec(AttentionSpec(window=6, soft_cap=3.0, sink=True, value_head_dim=8)), CHUNKED),
    logit_soft_cap=5.0,
)
"""Attention in which all that a cache must know of differs from the usual."""


@pytest.mark.parametrize(
    "model", (pytest.param(MODEL, marks=pytest.mark.slow), WITH_SETTINGS), ids=("llama", "settings")
)
def test_cached_logits_are_those_of_the_full_forward(model: Transformer) -> None:
    """Logits agree within float32 rounding for prompts cut into chunks of any size, with padding."""
    params, ids = sharp_params(model), prompt_of(23)
    want = full_logits(model, params, ids.tolist())
    cache, done = empty_cache(model, batch=1, max_len=32, dtype="float32"), 0
    extend_once = jax.jit(extend, static_argnums=0)
    for count in (5, 1, 8, 2, 7):
        token_BL = np.full((1, 8), 77, np.int32)
        token_BL[0, :count] = ids[done : done + count]
        logits_BV, cache = extend_once(model, params, jnp.asarray(token_BL), jnp.int32(count), cache)
        done += count
        np.testing.assert_allclose(logits_BV[0], want[done - 1], rtol=1e-4, atol=1e-4)
    assert int(cache.length) == done == 23
    assert np.ptp(want) > 1


def test_what_is_drawn_depends_on_the_seed_and_not_on_the_number_of_tokens() -> None:
    """The same seed gives the same text, also as the prefix of a longer text; another seed gives another
    text.
    """
    model = MODEL
    params = sharp_params(model)

    def drawn(seed: int, max_tokens: int) -> list[int]:
        return answer(
            model, params, prompt_of(4), max_tokens=max_tokens, sampler=TokenSampler(1.0), seed=seed
        )

    assert drawn(0, 50) == drawn(0, 50)
    assert drawn(0, 50)[:9] == drawn(0, 9)
    assert drawn(0, 50) != drawn(1, 50)


def test_nothing_compiles_twice() -> None:
    """Prompts of other lengths with the same number of chunks, and other seeds, run the same two programs."""

    def num_programs() -> tuple[int, int]:
        return count_programs(kv_cache_decode.read_prompt), count_programs(kv_cache_decode.write_tokens)

    model = Transformer(**SIZES)
    params, before = sharp_params(model), num_programs()
    answer(model, params, prompt_of(3), max_tokens=20)
    first = num_programs()
    assert first == (before[0] + 1, before[1] + 1)
    answer(model, params, prompt_of(PROMPT_CHUNK - 4), max_tokens=33, seed=5)
    assert num_programs() == first


def test_the_end_is_where_the_document_ends() -> None:
    """The end id is not part of the text, and nothing follows it."""
    model = MODEL
    params, prompt = sharp_params(model), prompt_of(5)
    ids = answer(model, params, prompt, max_tokens=64)
    index = DECODE_CHUNK + 3
    end = ids[index]
    cut = answer(model, params, prompt, max_tokens=64, end_ids=(end,))
    assert cut == ids[: ids.index(end) + 1]
    assert len(cut) <= index + 1


# --- drawing one token ------------------------------------------------------------------------------------------

LOGITS = jnp.log(jnp.asarray([[0.05, 0.5, 0.15, 0.3]]))


def frequencies(sampler: TokenSampler, draws: int = 4000) -> np.ndarray:
    """Frequency of each of the four tokens."""
    keys = jax.random.split(jax.random.key(0), draws)
    ids = jax.jit(jax.vmap(lambda key: sampler.draw(LOGITS, key)[0]))(keys)
    return np.bincount(np.asarray(ids), minlength=4) / draws


@pytest.mark.parametrize(
    ("sampler", "want"),
    [
        (TokenSampler(1.0), [0.05, 0.5, 0.15, 0.3]),
        (TokenSampler(0.5), [0.0025, 0.25, 0.0225, 0.09]),
        (TokenSampler(0.0), [0, 1, 0, 0]),
        (TokenSampler(1.0, top_k=2), [0, 0.5, 0, 0.3]),
        (TokenSampler(1.0, top_k=100), [0.05, 0.5, 0.15, 0.3]),
        (TokenSampler(1.0, top_p=0.45), [0, 1, 0, 0]),
        (TokenSampler(1.0, top_p=0.6), [0, 0.5, 0, 0.3]),
        (TokenSampler(1.0, top_p=1.0), [0.05, 0.5, 0.15, 0.3]),
        (TokenSampler(1.0, vocab_size=3), [0.05, 0.5, 0.15, 0]),
    ],
    ids=str,
)
def test_tokens_are_drawn_with_the_probabilities_asked_for(sampler: TokenSampler, want: list[float]) -> None:
    """Frequencies agree within four standard deviations of 4000 draws; excluded tokens are never drawn."""
    p = np.asarray(want) / sum(want)
    got = frequencies(sampler)
    np.testing.assert_allclose(got, p, atol=4 * (0.25 / 4000) ** 0.5)
    assert not np.any(got[p == 0])


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": 4, "top_p": 0.5}, "exclude each other"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(values: dict[str, Any], match: str) -> None:
    """The message has the field and the number."""
    with pytest.raises(ValueError, match=match):
        TokenSampler(**values)


# --- text -------------------------------------------------------------------------------------------------------


def sample(*model_and_prompt: Any, **options: Any) -> str:
    """Returns the whole text of `stream`."""
    return "".join(stream(*model_and_prompt, **options))


def test_the_stream_is_the_text_in_pieces() -> None:
    """Joined pieces are the text of all ids; pieces hold whole characters, a broken one is U+FFFD at the very
    end.
    """
    params, tokenizer = sharp_params(MODEL), ByteTokenizer()
    pieces = list(stream(MODEL, params, tokenizer, "x", context=256, max_tokens=100, temperature=2.0))
    begun = [tokenizer.begin_id, *tokenizer.encode("x")]
    chunks = generate_ids(
        *(MODEL, params, np.asarray(begun, np.int32)),
        max_tokens=100,
        sampler=TokenSampler(2.0, vocab_size=tokenizer.vocab_size),
        seed=0,
        end_ids=(tokenizer.end_id,),
    )
    assert "x" + "".join(pieces) == tokenizer.decode(
        [*begun[1:], *(one for chunk in chunks for one in chunk if one != tokenizer.end_id)]
    )
    assert len(pieces) > 2
    assert len("".join(pieces)) > 20


class TwoByteTokenizer(ByteTokenizer):
    """Byte tokenizer in which every second byte is half a character."""

    end_id = 255

    def decode(self, ids: Any, *, specials: bool = False) -> str:
        halves = [id_ % 2 for id_ in ids]
        return "".join("é" if i + 1 < len(halves) else "\ufffd" for i in range(0, len(halves), 2))


def test_half_a_character_waits_for_its_other_half() -> None:
    """No piece but the last ends in U+FFFD, although chunks end inside characters."""
    model = MODEL
    pieces = list(
        stream(model, sharp_params(model), TwoByteTokenizer(), "x", context=256, max_tokens=3 * DECODE_CHUNK)
    )
    assert len(pieces) > 1
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    text = "".join(pieces)
    assert set(text.rstrip("\ufffd")) == {"é"}


@pytest.mark.smoke
def test_a_prompt_begins_a_document() -> None:
    """The begin id comes first, as in training; an empty prompt is the begin id alone."""
    model = MODEL
    params, tokenizer = sharp_params(model), ByteTokenizer()
    begun = np.asarray([tokenizer.begin_id], np.int32)
    ids = answer(model, params, begun, max_tokens=9)
    text = sample(model, params, tokenizer, "", context=64, max_tokens=9, temperature=0.0)
    assert 0 not in ids, "choose weights that do not end the document at once"
    assert text == tokenizer.decode(ids)


class NoBegin(ByteTokenizer):
    begin_id = None


def test_prompts_that_cannot_be_are_refused() -> None:
    """Prompts longer than the context, empty prompts without a begin id, and answers without room are
    refused.
    """
    model = MODEL
    params = sharp_params(model)
    with pytest.raises(ValueError, match=r"the prompt has 65 tokens, and the context is data\.seq_len=64"):
        sample(model, params, ByteTokenizer(), "x" * 64, context=64)
    with pytest.raises(
        ValueError, match="the prompt is empty, and this tokenizer has no id that begins a document"
    ):
        sample(model, params, NoBegin(), "", context=64)
    with pytest.raises(
        ValueError, match=r"--max-tokens 60 must be from 1 to 59: .*, and the prompt has 5 tokens"
    ):
        sample(model, params, ByteTokenizer(), "def ", context=64, max_tokens=60)
    with pytest.raises(ValueError, match="the prompt has no token"):
        next(generate_ids(model, params, np.empty(0, np.int32), max_tokens=1, sampler=GREEDY, seed=0))
    full = sample(model, params, NoBegin(), "x" * 60, context=64)
    assert len(full.encode("utf-8", "surrogateescape")) <= 3 * 4, (
        "without --max-tokens the answer takes what is left"
    )


# --- the verb ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workdir whose checkpoints 1 and 2 hold random weights."""
    folder = tmp_path_factory.mktemp("run")
    sets = [f"model.{key}={value}" for key, value in SIZES.items()] + ["model.tie_embeddings=False"]
    run_config = load_config("tiny", sets=sets)
    model = build_run(run_config).model
    with Checkpoints(folder, CheckpointSpec()) as checkpoints:
        for step in (1, 2):
            state = {"params": sharp_params(model, seed=step), "other": jnp.zeros(3)}
            checkpoints.save(step, state, {}, tree.flat(run_config))
    return folder


def test_a_checkpoint_is_read_in_the_compute_dtype(workdir: Path) -> None:
    """`load` reads matrices in bfloat16 and scales as stored, from the newest step by default."""
    trained = load(workdir)
    assert (trained.step, trained.context) == (2, 256)
    params, infos = sharp_params(trained.model, seed=2), trained.model.param_infos()
    want = map_params(lambda info, x: jnp.asarray(x, "bfloat16" if info.is_matrix else None), infos, params)
    for got, leaf in zip(jax.tree.leaves(trained.params), jax.tree.leaves(want), strict=True):
        assert got.dtype == leaf.dtype
        np.testing.assert_array_equal(got, leaf)
    assert trained.params["final_norm"]["scale_D"].dtype == jnp.float32
    assert trained.params["embed_VD"].dtype == jnp.bfloat16
    assert load(workdir, 1).step == 1


def test_the_verb_prints_the_prompt_and_what_follows(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb prints the text of `stream`, and another text for another checkpoint."""
    arguments = [
        "--workdir",
        str(workdir),
        "--prompt",
        "def ",
        "--max-tokens",
        "30",
        "--top-k",
        "40",
        "--seed",
        "3",
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    trained = load(workdir)
    text = sample(
        trained.model, trained.params, trained.tokenizer, "def ", context=256, max_tokens=30, top_k=40, seed=3
    )
    assert said == f"def {text}\n"
    assert main([*arguments, "--step", "1"]) == 0
    assert capsys.readouterr().out != said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x" * 300], "the prompt has 301 tokens, and the context is data.seq_len=256"),
        (["--chat", "x", "--prompt", "y"], "--prompt not allowed with argument --chat"),
        (["--max-tokens", "0"], "--max-tokens 0 must be from 1 to"),
        (["--top-k", "4", "--top-p", "0.5"], "--top-p not allowed with argument --top-k"),
        (["--temperature", "-1"], "temperature=-1.0 must be at least 0"),
        (["--step", "7"], "No complete checkpoint of step 7"),
        (["--workdir", "/nowhere/at/all"], "--workdir /nowhere/at/all: there is no such folder. Train one"),
    ],
    ids=str,
)
def test_mistakes_exit_2_with_a_message(
    workdir: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """User errors print no traceback."""
    assert main(["--workdir", str(workdir), *arguments]) == 2
    assert message in capsys.readouterr().err
