"""Eight emulated devices, strict shapes and types, and no silent skip.

Everything here must happen before jax or jtrain is imported, so it runs at import of this file.
"""

import dataclasses
import faulthandler
import functools
import gc
import importlib.util
import inspect
import os
import signal
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

KNOWN_SKIPS: dict[str, str] = {
    "this machine has a GPU": "what happens without an accelerator is tested where there is none",
    "its library, 0.7 GB, is not installed": "the extra [aot] is without cuDNN; all other implementations compile",
}
"""Part of a skip's reason -> why it is fine that a machine skips it. Under CI=true any other skip fails the
run."""

assert "jax" not in sys.modules, "the emulated devices must be set up before jax is imported"
os.environ["JAX_PLATFORMS"] = "cpu"
# One LLVM module for each program: by default XLA cuts it into 32, each with passes and symbols of its own, which
# takes 7 % more seconds of all cores.
_FLAGS = ("--xla_force_host_platform_device_count=8", "--xla_cpu_parallel_codegen_split_count=1")
os.environ["XLA_FLAGS"] = " ".join(_FLAGS)
# Compiling for TPUs without one (the extra [aot]): ask no metadata server, and let several processes hold
# libtpu.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
# Tests compile much and compute little: LLVM's optimisations are half of the seconds of a step's compilation.
# The processes that tests start read the variable as well.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Without the Python frames in each operation's location, which no test reads, tracing and compiling take a
# tenth less.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Only this process has jemalloc (see pytest_xdist_setupnodes): what it starts has the malloc that users have.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("LD_PRELOAD", None)
# The processes that tests start import this tree from any folder, also where another one is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# Images of containers often set it. Each process that tests start would compile the sources of jtrain, for
# 0.3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Almost all objects of an import or a trace stay alive: collecting them rarely, and all of them only after a
# file (see pytest_runtest_teardown), frees as much.
gc.set_threshold(20_000, 50, 1_000_000)

import beartype  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
from hypothesis.internal import constants_ast  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

_with_shapes = jaxtyping.jaxtyped


def _has_shapes(annotation: Any) -> bool:
    """True if jaxtyping has something to check: an array's shape, also behind `type Name = ...` or in a
    generic.
    """
    if isinstance(annotation, typing.TypeAliasType):
        return _has_shapes(annotation.__value__)
    if typing.get_origin(annotation) is typing.Literal:
        return False  # its arguments are strings, but not annotations
    return (
        (isinstance(annotation, str) and "[" in annotation)  # else the name of a class that comes later
        or "jaxtyping." in repr(annotation)
        or any(_has_shapes(part) for part in typing.get_args(annotation))
    )


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    """Returns the type that a string stands for; Any where its name is imported for type checkers alone."""
    try:
        whole = eval(annotation, names) if isinstance(annotation, str) else annotation
        # A string may stand inside of a type, as in list["Point"], where beartype would look for it in vain.
        has_unknown = any(_resolve(part, names) is Any for part in _strings_in(whole))
    except NameError:
        return Any
    return Any if has_unknown else whole


def _strings_in(annotation: Any) -> list[str]:
    """Names of types that are strings within a type; those of a Literal are values."""
    if typing.get_origin(annotation) is typing.Literal:
        return []
    # The arguments of a Callable are a list within it.
    args = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    parts = [part.__forward_arg__ if isinstance(part, typing.ForwardRef) else part for part in args]
    return [*filter(lambda part: isinstance(part, str), parts), *(s for p in parts for s in _strings_in(p))]


def _checked(*, typechecker: Any) -> Callable[[Any], Any]:
    """Decorator of the import hook: beartype alone for functions without shapes, and once for each array
    elsewhere.

    jaxtyping's own decorator binds the signature, and checks the arguments a second time beside the result:
    5x slower. Its names of sizes that are expressions of arguments ("{n}") would need that, and are refused.
    beartype writes the checks of a function when it is first called: a worker imports thousands that none of
    its tests call.
    """
    conf = beartype.BeartypeConf(violation_type=TypeError)

    def decorate(thing: Any) -> Any:
        if isinstance(thing, type):
            generated = vars(thing).get("__init__") if dataclasses.is_dataclass(thing) else None
            if generated is not None and not hasattr(generated, "__wrapped__"):
                # jaxtyping's would check the fields twice, for 0.1 ms an object: a plan makes 100,000 of them.
                setattr(thing, "__init__", decorate(generated))  # noqa: B010 -- a type checker refuses the plain form
            return thing
        annotations = list(getattr(thing, "__annotations__", {}).values())
        has_shapes = any(map(_has_shapes, annotations))
        plain = not (inspect.isgeneratorfunction(thing) or inspect.iscoroutinefunction(thing))
        if has_shapes and not plain:
            return _with_shapes(thing, typechecker=typechecker)
        if not plain:
            return beartype.beartype(conf=conf)(thing)
        assert not has_shapes or "{" not in repr(annotations), (
            f"{thing.__qualname__}: sizes that are expressions"
        )

        @functools.cache
        def checked() -> Any:
            named = thing.__annotations__.items()
            thing.__annotations__ = {name: _resolve(what, thing.__globals__) for name, what in named}
            return beartype.beartype(conf=conf)(thing)

        @functools.wraps(thing)
        def alone(*args: Any, **kwargs: Any) -> Any:
            return checked()(*args, **kwargs)

        @functools.wraps(thing)
        def within_one_scope(*args: Any, **kwargs: Any) -> Any:
            with _with_shapes("context"):  # a name is the same size in all arguments and the result
                return checked()(*args, **kwargs)

        return within_one_scope if has_shapes else alone

    return decorate


jaxtyping.jaxtyped = _checked
jaxtyping.install_import_hook(("jtrain", "jtrain_kernels"), "beartype.beartype")
jax.config.update("jax_numpy_rank_promotion", "raise")
# No timed assertions: under load any test takes long. The same examples in every run: nothing fails by luck.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fixed")
# Hypothesis would also draw constants of those modules of the project that this process happens to have
# imported.
assert hasattr(providers, "_get_local_constants"), "look for what has taken its place"
providers._get_local_constants = constants_ast.Constants

_unknown_skips: list[str] = []

SLOW = 6
"""Times the limit of a quick test (`faulthandler_timeout` in pyproject.toml) that a slow test may take."""
_terminal = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def more_time_for_slow_tests(request: pytest.FixtureRequest) -> None:
    """Replaces the time limit that pytest has set; pytest removes either after the test."""
    limit_s = float(request.config.getini("faulthandler_timeout"))
    if limit_s and request.node.get_closest_marker("slow"):
        faulthandler.dump_traceback_later(SLOW * limit_s, exit=True, file=request.config.stash[_terminal])


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs between runs for the processes that tests start
    (`platform.compile_collectives_anew`).

    The two variables after the cache's are what `platform.start_jax` chooses where none names a cache. Quick
    tests have XLA try no kernels of matmuls for GPUs, which is a third of a compilation; slow ones compile as
    a user does.
    """
    if "not slow" in str(config.getoption("markexpr")).split(" and "):
        os.environ["XLA_FLAGS"] += " --xla_gpu_autotune_level=0"
    config.stash[_terminal] = os.dup(2)  # during tests their output is captured
    assert config.cache is not None
    # Peaks that tests measure, with few optimisations and beside other tests, are none of the user's.
    os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("user"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.cache.mkdir("jax"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"] = "1"
    jax.config.update("jax_enable_compilation_cache", False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Starts the workers with the jemalloc that comes with Ray.

    A fifth of a compilation's seconds is malloc. With jemalloc tracing and compiling take a tenth less.
    """
    ray = importlib.util.find_spec("ray")
    jemalloc = Path(ray.origin).with_name("core") / "libjemalloc.so" if ray and ray.origin else None
    if jemalloc and jemalloc.exists():
        os.environ["LD_PRELOAD"] = str(jemalloc)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each worker its share of the tests in one piece, and what one has left to another that has
    finished.

    By default xdist hands out a few tests at a time towards the end. Neighbours then run in different
    workers, and each computes what they share: a module's fixtures, and results in `functools.cache`.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


LONGEST = {"step", "train", "test_launch.py"}
"""Folders and files below tests/ whose tests take longest. They run first: at the end both workers have short
ones."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option by which a piece of tests/slow_pieces.txt takes a part of a long file."""
    parser.addoption("--share", metavar="K/N", help="every Nth of the chosen tests, from the Kth on")


SLOW_TESTS = pytest.StashKey[list[str]]()
"""Node ids of all slow tests that were collected, also where `-m "not slow"` leaves them out."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Sorts the longest tests to the front, where all others stay in their order, and takes `--share` of them."""
    config.stash[SLOW_TESTS] = [item.nodeid for item in items if item.get_closest_marker("slow")]
    yield
    items.sort(key=lambda item: LONGEST.isdisjoint(item.path.parts))
    if share := config.getoption("--share"):
        number, count = map(int, share.split("/"))
        others = [item for index, item in enumerate(items) if index % count != number - 1]
        config.hook.pytest_deselected(items=others)
        items[:] = items[number - 1 :: count]


def pytest_report_header() -> str:
    """Says what the hosts of tests of several hosts are: a machine may forbid network namespaces."""
    from tests.launch.hosts import kind  # lazy: it starts a process

    return f"several hosts: {kind()}"


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(known in reason for known in KNOWN_SKIPS):
            _unknown_skips.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes each skip that is not on the list; under xdist the controller sees every worker's reports."""
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """The same for a module skipped as a whole."""
    _note_skip(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a CI run that skipped what nobody agreed to skip: a skipped proof is no proof."""
    if _unknown_skips and os.environ.get("CI") == "true":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which skips are not on the list."""
    if _unknown_skips:
        terminalreporter.section("skips that are not on KNOWN_SKIPS in tests/conftest.py")
        for line in _unknown_skips:
            terminalreporter.line(line)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collects garbage after each file of tests, and hides what is left from the collector.

    Programs and their jaxprs stay in JAX's caches for the whole run. Walking through them again and again was
    a tenth of the seconds of tests that compile steps, so there are no full collections in between (the
    threshold above).
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def signals_as_on_a_terminal() -> None:
    """Has the processes that tests start begin with the default handlers, also where `nohup` or a script
    starts tests.

    A program inherits signals that are ignored, but not handlers; this process still does nothing at SIGHUP
    and SIGINT.
    """
    for number in (signal.SIGHUP, signal.SIGINT):
        handler = signal.getsignal(number)
        # Before each test, even where Python knows of no change: libtpu ignores SIGHUP from its first topology on.
        signal.signal(number, (lambda _number, _frame: None) if handler is signal.SIG_IGN else handler)


@pytest.fixture(autouse=True)
def optimised_for_other_machines(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Compiles with every optimisation where a test reads what the compiler of a TPU or a GPU makes of a
    program.
    """
    if request.node.get_closest_marker("aot") is None:
        yield
        return
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def emulated_devices() -> list[jax.Device]:
    """The eight CPU devices."""
    devices = jax.devices()
    assert len(devices) == 8, devices
    return devices


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    from tests.wheels import build  # lazy: few tests need it

    return build(tmp_path_factory.mktemp("wheel"), ROOT, "wheel")


@pytest.fixture(scope="session")
def page() -> Iterator[Any]:
    """The one page of a headless browser, for all reports."""
    from tests.profile.report import browser  # lazy: few tests need it

    with browser.page() as blank:
        yield blank


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE in the style of Llama 3: a begin token by template, an end token by name."""
    # Lazy: few tests need it.
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the end of text"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
