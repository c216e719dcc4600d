"""The `podium` command. Each command reads its settings and calls the function that does the work.

Nothing slow is imported before the settings are checked: `--help`, `podium config` and errors in a config do not need
jax. Exit status: 0 done; 1 failed, or the answer is no (`plan`: it does not fit, `certify`: a check is red); 2 invalid
settings or options, or a model, run or machine that does not exist; 3 the compiler of `plan` failed; 75 a worker of a
job is missing, 78 workers disagree; 130 stopped by Ctrl-C, 143 by SIGTERM. A training run that is stopped saves a
checkpoint first and can be continued.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from podium import __version__
from podium.compat.foreign_keys import foreign_key
from podium.config.hints import offer
from podium.doctor.benchmarks.cli import bench_app
from podium.malloc import keep_freed_memory
from podium.plain import message_of
from podium.plan.cli import plan
from podium.pods.cli import pod_app
from podium.terminal import guard_errors, harmless

if TYPE_CHECKING:
    from podium.settings import Settings as Loaded

app = typer.Typer(
    help="Reinforcement learning of language models in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show settings, print their schema, translate old ones.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
app.add_typer(pod_app, name="pod")
sandbox_app = typer.Typer(help="Run code that a model wrote, without trusting it.", no_args_is_help=True)
app.add_typer(sandbox_app, name="sandbox")

ConfigFiles = Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="YAML files; later ones override.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, as in rollout.max_new_tokens=64. Repeatable."),
]


def main() -> None:
    """Run the command line; errors that a user can cause are printed without a traceback."""
    guard_errors()
    keep_freed_memory()
    offer(foreign_key)
    try:
        app(prog_name="podium")
    except (ValueError, OSError) as error:
        from podium.config.errors import ConfigError, raised_here
        from podium.job.job_records import exit_status

        if isinstance(error, OSError | ConfigError) or raised_here(error):
            _fail(error, status=exit_status(error))
        raise


def _fail(error: Exception | str, *, status: int) -> NoReturn:
    said = message_of(error) if isinstance(error, Exception) else error
    print(harmless(f"error: {said}"), file=sys.stderr)
    sys.exit(status)


@app.callback(invoke_without_command=True)
def _podium(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from podium.observe.summary import commit, versions

        found = versions()
        print(f"podium {__version__} (commit {commit() or 'not known'}), jax {found['jax']}, Python {found['python']}")
        raise typer.Exit


@app.command()
def train(
    config: ConfigFiles,
    settings: Settings = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="RUN@STEP", help="Start from another run's checkpoint.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Train even if the plan says that the run is far too large."),
    ] = False,
    profile: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Trace these steps, and tabulate what took longest.")
    ] = None,
) -> None:
    """Train a model. If the run's folder exists and its settings agree, the run is continued."""
    from podium.settings import load_settings

    _train(lambda: load_settings(config, settings or []), source=source, plain=plain, force=force, profile=profile)


def _train(
    load: "Callable[[], Loaded]",
    *,
    source: str | None = None,
    plain: bool,
    force: bool | None = None,
    profile: str | None = None,
) -> NoReturn:
    """Train a run with the settings that `load` reads; `force` None: skip the check of the run's plan."""
    from podium.job.job_context import join_job

    with join_job(os.environ) as job:  # on several hosts, this tells the others at once that this one has started
        loaded = load()
        fork = None
        if source is not None:
            from podium.observe.run_dir import parse_fork

            try:
                fork = parse_fork(source)
            except ValueError as error:
                _fail(error, status=2)
        job.agree(loaded.config.document())
        from podium.plan.report.deviation import RunCheck
        from podium.train.loop import train as run
        from podium.train.profile import parse_window

        status = run(
            loaded.config,
            recipe=loaded.recipe,
            fork=fork,
            plain=plain,
            job=job,
            check=None if force is None else RunCheck(force=force),
            profile=None if profile is None else parse_window(profile),
        )
    raise typer.Exit(status)


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="NAME", help="Folder to make.")]) -> None:
    """Write a project to start from: a config, questions, a reward of your own, and a README."""
    from podium.project import write_project

    for path in write_project(folder):
        print(path)
    print(f"next: cd {folder} && podium train config.yaml")


@app.command()
def sft(
    config: ConfigFiles,
    settings: Settings = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view.")] = False,
) -> None:
    """Fine-tune on the data's answers, as a warm start for `podium train CONFIG --from runs/NAME-sft`."""
    from podium.config.load import Override
    from podium.settings import load_settings, named_after

    as_sft = [
        Override("algorithm", {"recipe": "sft"}, "podium sft"),
        Override("group_size", 1, "podium sft"),
    ]
    _train(lambda: named_after(load_settings(config, [*as_sft, *(settings or [])]), config, "sft"), plain=plain)


@app.command()
def dpo(
    config: ConfigFiles,
    settings: Settings = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view.")] = False,
) -> None:
    """Learn from preferences: pairs by DPO, IPO or the hinge, labelled answers by KTO, as `algorithm.loss` says."""
    from podium.settings import load_settings, named_after, preference_overrides

    given = settings or []
    _train(
        lambda: named_after(load_settings(config, [*preference_overrides(config, given), *given]), config, "dpo"),
        plain=plain,
    )


app.command()(plan)


@app.command()
def certify(
    config: ConfigFiles,
    settings: Settings = None,
    full: Annotated[
        bool, typer.Option("--full", help="Check the model's real weights instead of a tiny clone of it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check on the config's own model that updates are correct, whatever the batching, sharding and kernels.

    Exit status: 0 every check is green, 1 one is not, 2 wrong settings or usage.
    """
    from podium.settings import load_settings

    loaded = load_settings(config, settings or [])
    from podium.certify.command import certify

    raise typer.Exit(certify(loaded.config, full=full, as_json=as_json))


@app.command()
def doctor(
    runs_dir: Annotated[str, typer.Option(metavar="FOLDER", help="Where runs are written, as in a config.")] = "runs",
    full: Annotated[bool, typer.Option("--full", help="Measure with larger sizes; takes longer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine: versions, devices, the speeds that plans assume, and a small model.

    Exit status: 0 no problems; 1 problems, each printed with a remedy.
    """
    from podium.doctor.command import doctor as examine
    from podium.files import as_path

    raise typer.Exit(examine(as_path(runs_dir), full=full, as_json=as_json))


@app.command()
def calibrate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs on one kind of machine.")],
    fast: Annotated[
        bool, typer.Option("--fast", help="Plan the runs by closed-form estimates, without compiling.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure from finished runs how fast this machine is, for `podium plan`.

    Writes ~/.config/podium/chips/KIND.json, which plans for this kind of machine use from then on.
    """
    from podium.doctor.calibrate_command import calibrate as learn

    raise typer.Exit(learn(runs, fast=fast, as_json=as_json))


@app.command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run, RUN@STEP, or a model as in a config.")],
    task: Annotated[
        str | None, typer.Option(help="Task to evaluate; `podium tasks` lists them. Default: all of the run's.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of its questions; default: the task's eval_split.")] = None,
    path: Annotated[str | None, typer.Option(help="Local file or folder with the questions.")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Use only the first questions; default: all.")] = None,
    samples: Annotated[int | None, typer.Option(min=0, help="Sampled answers per question.")] = None,
    greedy: Annotated[bool | None, typer.Option(help="Answer each question once, greedily.")] = None,
    show: Annotated[int, typer.Option(min=0, metavar="N", help="Print the first N answers of each task.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="New file for all answers, a line each.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    settings: Settings = None,
) -> None:
    """Evaluate a run's weights, or any model, on held-out questions."""
    from podium.files import as_path
    from podium.observe.out_files import check_new
    from podium.observe.run_dir import run_of
    from podium.settings import check_read_by_evaluations, evaluation_overrides, load_settings

    check_read_by_evaluations(each.partition("=")[0].strip() for each in settings or [])
    if out is not None:
        check_new(out, "--out")
    run = run_of(target)
    files = [as_path(run.run) / "config.yaml"] if run else []
    if run is None and task is None:
        _fail(
            f"{target} is a model, not a run, so it has no tasks of its own; name one with --task (podium tasks)",
            status=2,
        )
    given = {"eval_split": split, "eval_path": path}
    options = {"eval.samples": samples, "eval.greedy": greedy, "eval.questions": questions}
    chosen = evaluation_overrides(target, files, task=task, given=given, options=options)
    loaded = load_settings(files, [*chosen, *(settings or [])])
    from podium.train.evaluate import evaluate_command

    raise typer.Exit(evaluate_command(loaded.config, run=run, as_json=as_json, show=show, out=out))


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, such as runs/demo.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write the Hugging Face model to.")],
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint; default: the newest.")] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Number format of a model.")] = "bfloat16",
    merge: Annotated[bool, typer.Option("--merge", help="Add a LoRA adapter to the model's weights.")] = False,
    push: Annotated[
        str | None, typer.Option(metavar="USER/NAME", help="Upload it to the Hugging Face hub too; needs HF_TOKEN.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: only you see it.")] = False,
) -> None:
    """Export a run's weights as a Hugging Face model with config, tokenizer and card; a LoRA run as a PEFT adapter."""
    from podium.observe.run_dir import run_of

    if run_of(run) is None:
        _fail(f"{run} has no config.yaml, so it is not a run's folder; give one, such as runs/demo", status=2)
    if private and push is None:
        _fail("--private applies to the upload of --push; give --push USER/NAME", status=2)
    from podium.train.export import export_run

    raise typer.Exit(export_run(run, folder, step=step, dtype=dtype, merge=merge, push=push, private=private))


@app.command("filter")
def filter_prompts(config: ConfigFiles, settings: Settings = None) -> None:
    """Measure how often the model solves each training prompt, for `data.filter`."""
    from podium.settings import load_settings

    loaded = load_settings(config, settings or [])
    from podium.train.filtering import filter_command

    raise typer.Exit(filter_command(loaded.config))


@app.command()
def chat(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run, RUN@STEP, or a model as in a config.")],
    system: Annotated[str | None, typer.Option(help="System message; empty: none; default: the run's.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature; 0: greedy; default: the run's, or 1.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer in tokens; default: the run's, or 512.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: makes words less likely to be repeated; default: the run's, or 1.")
    ] = None,
) -> None:
    """Talk to a run's weights, or to any model."""
    from rich.console import Console

    from podium.api.chat import chat as talk
    from podium.api.chat import typed
    from podium.run.answering import Asked

    console = Console(highlight=False)
    asked = Asked(
        system_prompt=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        repetition_penalty=repetition_penalty,
    )
    status = talk(target, asked=asked, seed=seed, console=console, lines=typed(console))
    raise typer.Exit(status)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several are compared.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")] = Path("report.html"),
) -> None:
    """Write an HTML page about one run, or several: whether it learned, why not, and where the time went."""
    from podium.observe.report.report_page import write_report

    write_report(runs, out)
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB); open it in a browser; it loads nothing from the network")


@app.command()
def watch(
    runs_dir: Annotated[Path, typer.Argument(metavar="[RUNS_DIR]", help="Folder of runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Secret for the first visit: /?token=...", envvar="WATCH_TOKEN")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token, to keep it out of `ps`.")] = None,
) -> None:
    """Serve the report of runs, live, to a browser; from another machine: `ssh -L 7860:localhost:7860 MACHINE`."""
    from podium.observe.access import Address
    from podium.observe.watch import serve

    serve(runs_dir, Address(host, port, token, token_file))


@app.command()
def serve(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run, RUN@STEP, or a model as in a config.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Secret that clients send: Authorization: Bearer ...", envvar="SERVE_TOKEN")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token, to keep it out of `ps`.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model for clients; default: the run's, or RUN_OR_MODEL.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Longest prompt plus answer in tokens; default: the model's, up to 4096."),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Answers drawn at the same time.")] = 16,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; further ones are refused with status 429.")
    ] = 256,
    settings: Settings = None,
) -> None:
    """Serve a run's weights, or any model, over HTTP: OpenAI's routes, and a route with token ids in and out."""
    from podium.observe.access import Address
    from podium.serve.command import serve as run

    address = Address(host, port, token, token_file)
    run(target, address, name=name, context=context, slots=slots, max_queue=max_queue, settings=settings or [])


@config_app.command("show")
def config_show(config: ConfigFiles, settings: Settings = None) -> None:
    """Print all settings, and where each non-default one was set."""
    from podium.config.show import to_yaml
    from podium.settings import load_settings

    loaded = load_settings(config, settings or [])
    print(to_yaml(loaded.config.document(), loaded.provenance), end="")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of config files, for editors."""
    from podium.config.show import file_schema
    from podium.settings import IMPORTABLE, NAMES

    print(json.dumps(file_schema(NAMES, IMPORTABLE), indent=2))


@config_app.command("migrate")
def config_migrate(
    old: Annotated[Path, typer.Argument(metavar="OLD.yaml", help="A config of the predecessor system.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File to write; default: stdout.")] = None,
) -> None:
    """Translate a config of Podium's predecessor, a TPU trainer, and list settings that changed or have no
    equivalent.
    """
    from podium.compat.migrate import migrate
    from podium.files import write_atomically
    from podium.observe.out_files import check_new

    if out is not None:
        check_new(out, "-o")
    migration = migrate(old, os.environ)
    if out is None:
        print(migration.text, end="")
    else:
        write_atomically(out, migration.text)
    for title, lines in (("changed", migration.changed), ("no counterpart", migration.lost)):
        if lines:
            print(f"{title}:", *lines, sep="\n  ", file=sys.stderr)


@app.command()
def tasks(
    name: Annotated[str | None, typer.Argument(help="Task to describe; or `try`.")] = None,
    played: Annotated[str | None, typer.Argument(help="After `try`: task or environment to talk to.")] = None,
    seed: Annotated[int, typer.Option(help="With `try`: seed of the environment.")] = 0,
    number: Annotated[int, typer.Option(min=0, help="With `try`: index of the prompt.")] = 0,
    say: Annotated[
        list[str] | None, typer.Option(help="With `try`: an answer; repeatable. Default: type answers in.")
    ] = None,
) -> None:
    """List the built-in tasks, or describe one and its options; `try TASK` talks to tools and environments."""
    from podium.tasks.registry import FAMILIES, TASKS
    from podium.tasks.task_list import family_doc, task_doc, task_page

    if name == "try":
        _try_task(played, seed, number, say)
        return
    if name is None:
        lines = {each: task_doc(each) for each in TASKS} | {f"{each}:NAME": family_doc(each) for each in FAMILIES}
        width = max(map(len, lines))
        for each, doc in lines.items():
            print(f"{each:{width}}  {doc.partition(chr(10))[0]}")
        return
    try:
        print(task_page(name))
    except ValueError as error:
        _fail(error, status=2)


@sandbox_app.command("check")
def sandbox_check() -> None:
    """Run attacks against the sandbox on this machine. Exit status: 0 if it withstands all; 1 if not, with the
    reason.
    """
    from podium.sandbox.check import check_machine
    from podium.sandbox.runs import SandboxError

    try:
        print(check_machine())
    except SandboxError as error:
        _fail(error, status=1)


@sandbox_app.command("run")
def sandbox_run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Python file.")],
    wall_s: Annotated[float, typer.Option(min=0.0, max=86_400.0, help="Time limit in seconds.")] = 10.0,
    memory_mib: Annotated[int, typer.Option(min=1, help="Memory limit in MiB.")] = 512,
) -> None:
    """Run a Python file in the sandbox; it reads the command's stdin.

    Exit status: the program's own, 128 plus the signal's number if a signal ends it, 1 if it raises or exceeds a limit,
    2 if it cannot be read. On a terminal, control characters that it writes are shown, not obeyed.
    """
    from podium.sandbox.runs import Limits, Sandbox, SandboxError

    try:
        code = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        _fail(f"{file} cannot be read: {error}", status=2)
    stdin = "" if sys.stdin.isatty() else sys.stdin.read()
    cpu_s = wall_s * (os.cpu_count() or 1)
    limits = Limits(wall_s=wall_s, cpu_s=cpu_s, life_cpu_s=math.ceil(cpu_s) + 1, memory_mib=memory_mib)
    with Sandbox(limits) as sandbox:
        try:
            result = sandbox.run(code, stdin, program=True)
        except SandboxError as error:
            _fail(error, status=1)
    print(harmless(result.output) if sys.stdout.isatty() else result.output, end="", flush=True)
    if result.why not in (None, "ended"):
        bound = {
            "time": f"{wall_s:g} s (--wall-s)",
            "memory": f"{memory_mib} MiB (--memory-mib)",
            "processes": f"{limits.processes} processes and threads",
            "output": f"{limits.output_bytes:,} bytes of output",
        }[result.why]
        _fail(f"{file} was stopped: it took more than {bound}", status=1)
    raise typer.Exit(result.exit_status)


def _try_task(target: str | None, seed: int, number: int, say: list[str] | None) -> None:
    """Talk to a task's environment, with given answers or from the keyboard."""
    from podium.tasks.try_task import play

    def lines() -> Iterator[str]:
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                yield input("> " if sys.stdin.isatty() else "")

    try:
        if target is None:
            raise ValueError("name a task or an environment: podium tasks try calculator")
        play(target, say or lines(), lambda line: print(harmless(line)), seed=seed, number=number)
    except ValueError as error:
        _fail(error, status=2)


if __name__ == "__main__":
    main()
