"""`podium serve`: serves a run's weights, or any model, to other programs."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from podium.api.answers import Opened, max_positions, open_model
from podium.config.errors import UsageError
from podium.files import as_path
from podium.observe.access import Address, check_installed
from podium.observe.listening import run, take_port
from podium.observe.run_dir import run_of
from podium.run.answering import Asked
from podium.sampling.conversations.dialogue import ToolFormat
from podium.serve.app import GRACE_S, Server, make_app
from podium.serve.clients import Clients
from podium.serve.prepare_requests import Model

CONTEXT_TOKENS = 4096
"""Longest sequence in tokens, if the model allows it and the user does not set one."""
STEPS_SHOWN = 4
"""Decode steps between pieces of a stream."""


def serve(
    model: str,
    address: Address,
    *,
    name: str | None,
    context: int | None,
    slots: int,
    max_queue: int,
    settings: Sequence[str],
) -> None:
    """Serve until Ctrl-C.

    Raises:
        ValueError: the model or a setting is unusable, the extra is missing, the port is in use, or the address is
            public and no token is given.
    """
    check_installed("podium serve")
    secret = address.secret()
    hosts = address.hosts(secret, "client")
    longest = longest_sequence(model, context)
    sockets = take_port(address.host, address.port)
    with open_model(
        model,
        *settings,
        asked=Asked(),
        slots=slots,
        context=longest,
        new_tokens=longest,
        settings={"rollout.refill_steps": STEPS_SHOWN},
    ) as opened:
        rollouts = opened.rollouts
        known = model_of(opened, name or model_id(model), max_queue=max_queue, aliases=(model,))
        rollouts.engine.warm_up()
        clients = Clients(rollouts.engine, max_queue=max_queue)
        server = Server(known, clients)

        def ready() -> None:
            who = "this machine" if address.local else "clients on other machines, with the token"
            where = f"http://{address.host}:{address.port}/v1"
            sizes = f"{known.longest} tokens, {rollouts.engine.config.slots} slots"
            print(f"{known.name} at {where}: {sizes}; open to {who}   (Ctrl-C ends)", flush=True)

        async def ending(insists: Callable[[], bool]) -> None:
            if in_flight := clients.counters.in_flight:
                print(
                    f"{in_flight} answers may take up to {GRACE_S:g} s to finish (Ctrl-C: stop at once)",
                    file=sys.stderr,
                )
            await server.end(insists)

        try:
            run(make_app(server, token=secret, hosts=hosts), sockets, ready=ready, ending=ending)
        finally:
            clients.close()


def model_id(model: str) -> str:
    """The name of a model for clients: for a run its folder's name, with the step if one is given; for files their
    name.

    Other names, such as hub ids, are unchanged.
    """
    run = run_of(model)
    if run is not None:
        name = as_path(run.run).name or Path(run.run).resolve().name
        return name if run.step is None else f"{name}@{run.step}"
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def model_of(opened: Opened, name: str, *, max_queue: int, aliases: tuple[str, ...] = ()) -> Model:
    """Describe an engine's model for the server; `aliases` are further names of the model."""
    tokenizer, engine = opened.rollouts.feed.tokenizer, opened.rollouts.engine
    try:
        tools = ToolFormat("requests with tools are refused", tokenizer)
    except ValueError as error:
        print(error, file=sys.stderr)
        tools = None
    return Model(
        name=name,
        aliases=aliases,
        tokenizer=tokenizer,
        answering=opened.answering,
        tools=tools,
        vocab=engine.device.model.vocab,
        longest=engine.config.longest,
        most=engine.config.slots + max_queue,
    )


def longest_sequence(model: str, context: int | None) -> int:
    """The longest sequence in tokens that a server of this model accepts: the user's `--context`, or the default.

    Raises UsageError if the model has fewer positions.
    """
    positions = max_positions(model)
    if context is not None and context > positions:
        raise UsageError(
            f"--context {context} is more than the {positions} positions of {model}; give {positions} or less"
        )
    return context or min(positions, CONTEXT_TOKENS)
