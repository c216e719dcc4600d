"""How many tokens per second clients of `podium serve` get, over those of the engine's `generate`, in one run.

    python -m benches.serve          (CPU; SmolLM2-135M, 12 minutes on a quiet machine; --tiny for a trial)

The same prompts, settings and seed: all at once by `generate`, then by as many clients as there are prompts, over
loopback, without streams and with them, in float32 and in bfloat16. Rounds alternate; the ratio is of the medians. In
float32 each answer must have the same number of tokens as by `generate`; in bfloat16 a token may depend on how many
sequences are decoded together. The bar is 0.9 of `generate`, without streams.

Prints one JSON line and writes benches/results/serve-PLATFORM.json; exit status 1 where the bar is missed.
"""

import concurrent.futures
import contextlib
import functools
import http.client
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from benches.recipes import write_tiny_model
from benches.record import arguments, record
from podium.api.answers import open_model
from podium.observe.access import LOOPBACK
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, SamplingParams
from podium.run.answering import Asked
from podium.serve.app import Server, make_app
from podium.serve.clients import Clients
from podium.serve.command import STEPS_SHOWN, model_of
from podium.serve.prepare_requests import Model

BAR = 0.9
PROMPTS, ROUNDS, TOKENS, SLOTS = 64, 3, 128, 16
CONTEXT = 256


@contextlib.contextmanager
def served(model: Model, engine: RolloutEngine) -> Iterator[int]:
    """Serve in threads of this process; yields the port."""
    import uvicorn

    clients = Clients(engine, max_queue=PROMPTS)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        app = make_app(Server(model, clients), token=None, hosts=LOOPBACK)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()
    clients.close()


def ask(port: int, prompt: tuple[int, ...], tokens: int, seed: int, *, stream: bool) -> int:
    """Number of tokens of an answer over HTTP."""
    body: dict[str, object] = {"prompt": list(prompt), "max_tokens": tokens, "seed": seed, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    text = connection.getresponse().read().decode()
    connection.close()
    document = json.loads(text.split("\n\n")[-3].removeprefix("data: ") if stream else text)
    return document["usage"]["completion_tokens"]


def measure(model: str | Path, dtype: str, *, prompts: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Tokens per second of each way, the medians of `rounds`, and their ratios to those of `generate`."""
    settings = {"rollout.refill_steps": STEPS_SHOWN, "rollout.dtype": dtype}
    open_it = functools.partial(open_model, asked=Asked(), slots=SLOTS, context=CONTEXT, new_tokens=CONTEXT)
    with open_it(model, settings=settings) as opened:
        engine = opened.rollouts.engine
        engine.warm_up()
        known = model_of(opened, "bench", max_queue=PROMPTS)
        texts = [f"What is {1 + n % 19} + {1 + n % 7} ?" for n in range(prompts)]
        encoded = [known.tokenizer.encode_prompt(text) for text in texts]
        sampling = SamplingParams(max_new_tokens=tokens)
        requests = [Request(prompt=prompt, sampling=sampling, seed=n) for n, prompt in enumerate(encoded)]

        def by_engine() -> list[int]:
            return [len(each.tokens) for (each,) in engine.generate(requests)[0]]

        def by_clients(port: int, *, stream: bool) -> list[int]:
            with concurrent.futures.ThreadPoolExecutor(prompts) as pool:
                jobs = [pool.submit(ask, port, each, tokens, n, stream=stream) for n, each in enumerate(encoded)]
                return [job.result() for job in jobs]

        rates: dict[str, list[float]] = {}
        lengths: dict[str, list[int]] = {}
        with served(known, engine) as port:  # its thread sleeps while the engine is called from here
            ways: dict[str, Callable[[], list[int]]] = {
                "generate": by_engine,
                "server": lambda: by_clients(port, stream=False),
                "streams": lambda: by_clients(port, stream=True),
            }
            for turn in range(rounds + 1):  # the first does not count
                for name, way in ways.items():
                    begun = time.perf_counter()
                    lengths[name] = way()
                    seconds = time.perf_counter() - begun
                    rates.setdefault(name, []).extend([sum(lengths[name]) / seconds] if turn else [])
    medians = {name: statistics.median(each) for name, each in rates.items()}
    return {
        "tokens_per_s": medians,
        "ratio": {name: medians[name] / medians["generate"] for name in ("server", "streams")},
        "equal_lengths": lengths["generate"] == lengths["server"] == lengths["streams"],
    }


def main() -> None:
    """Prints and writes the figures; exit status 1 where the bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--tiny", action="store_true", help="a random model, few answers, no bar: a trial of this script"
    )
    args = parser.parse_args()
    if args.tiny:
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_model(Path(folder) / "tiny", longest=CONTEXT)
            print(json.dumps(measure(Path(folder) / "tiny", "float32", prompts=16, rounds=1, tokens=32)))
        return
    result = {
        dtype: measure("demo", dtype, prompts=PROMPTS, rounds=ROUNDS, tokens=TOKENS)
        for dtype in ("float32", "bfloat16")
    }
    print(json.dumps(result))
    record(f"serve-{jax.default_backend()}", {"bar": BAR, **result}, args.results)
    fast = all(each["ratio"]["server"] >= BAR for each in result.values())
    sys.exit(not (fast and result["float32"]["equal_lengths"]))


if __name__ == "__main__":
    main()
