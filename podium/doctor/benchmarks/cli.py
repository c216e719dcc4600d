"""The commands of `podium bench` and their options. jax is imported only after the options have been checked."""

from pathlib import Path
from typing import Annotated, Literal

import typer

bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)

ConfigFiles = Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="YAML files; later ones override.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, as in rollout.max_new_tokens=64. Repeatable."),
]


@bench_app.command()
def gather(
    mode: Annotated[Literal["sharded", "gather"], typer.Option(help="Shard over fsdp, or gather on every device.")],
    mesh_shape: Annotated[str, typer.Option(help="Mesh, written as in a config.")] = "auto",
    dtype: Annotated[Literal["bf16", "f16", "f32"], typer.Option(help="Number format.")] = "bf16",
    target_bytes_gib: Annotated[float, typer.Option(min=0.0, help="Size of the whole array in GiB.")] = 5.6,
    cols: Annotated[int, typer.Option(min=1, help="Elements per row.")] = 4096,
    require_process_count: Annotated[int, typer.Option(min=0, help="Fail unless there are this many processes.")] = 0,
) -> None:
    """Allocate one large array on the mesh and print the memory of each device as JSON."""
    from podium.train.optimizer.gather_memory import bench

    raise typer.Exit(
        bench(
            mode=mode,
            mesh_shape=mesh_shape,
            dtype=dtype,
            target_bytes_gib=target_bytes_gib,
            cols=cols,
            require=require_process_count,
        )
    )


@bench_app.command()
def rollout(
    model: Annotated[str, typer.Option(help="Model whose shape the random weights have, as in a config.")] = "demo",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 64,
    lengths: Annotated[str, typer.Option(metavar="gsm8k|fixed:N|RUN", help="Lengths of the completions.")] = "gsm8k",
    layout: Annotated[str, typer.Option(help="Layout, as rollout.layout.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the longest completion.")] = 1024,
    slots: Annotated[int | None, typer.Option(min=1, help="Sequences decoded at once; unset: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure decoding on this machine: tokens per second, and time per step compared with the hardware's minimum."""
    from podium.doctor.benchmarks.rollout import bench

    raise typer.Exit(
        bench(
            model=model,
            batch=batch,
            lengths=lengths,
            layout=layout,
            max_new_tokens=max_new_tokens,
            slots=slots,
            as_json=as_json,
        )
    )


@bench_app.command()
def update(
    config: ConfigFiles,
    settings: Settings = None,
    lengths: Annotated[
        str, typer.Option(metavar="gsm8k|fixed:N|RUN", help="Lengths of prompts and completions, as for podium plan.")
    ] = "gsm8k",
    repeats: Annotated[int, typer.Option(min=1, help="Steps to time; the fastest counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time a config's update on random weights and completions: seconds, tokens, and the share of the peak (MFU)."""
    from podium.settings import load_settings

    loaded = load_settings(config, settings or [])
    from podium.doctor.benchmarks.update import bench

    raise typer.Exit(bench(loaded.config, lengths=lengths, repeats=repeats, as_json=as_json))


Impl = Annotated[
    Literal["jax", "ref", "kernel"],
    typer.Option(help="kernel: this device's Pallas kernel; jax: the same by XLA; ref: jax's own, in float32."),
]
Mode = Annotated[
    Literal["off_policy", "on_policy"],
    typer.Option(help="off_policy: ratio to given old log-probabilities; on_policy: ratio to the current ones."),
]
Rows = Annotated[int, typer.Option(min=1, help="Rows.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of a row.")]
Vocabulary = Annotated[int, typer.Option(min=2, help="Size of the vocabulary.")]
Dtype = Annotated[Literal["bf16", "f16", "f32"], typer.Option(help="Number format of the logits.")]
Sums = Annotated[
    Literal["bf16", "f32"],
    typer.Option("--compute_dtype", "--compute-dtype", help="Number format of sums; only f32 is supported."),
]
Seed = Annotated[int, typer.Option(help="Seed of the random logits.")]
Calls = Annotated[int, typer.Option(min=1, help="Number of timed calls.")]
Warmup = Annotated[
    int, typer.Option(min=0, help="Number of untimed calls between the first, which compiles, and the timed ones.")
]
Noise = Annotated[
    float,
    typer.Option(
        "--old_logp_noise_scale",
        "--old-logp-noise-scale",
        help="Standard deviation in nats of old log-probabilities around the new ones.",
    ),
]
ClipLow = Annotated[float, typer.Option("--epsilon_low", "--epsilon-low", help="Lower clip.")]
ClipHigh = Annotated[float, typer.Option("--epsilon_high", "--epsilon-high", help="Upper clip.")]
Temperature = Annotated[float, typer.Option(help="Temperature of the softmax.")]
VocabTile = Annotated[
    int | None,
    typer.Option("--block_size", "--block-size", min=1, help="Vocabulary per tile; unset: the kernel's default."),
]
TokenTile = Annotated[
    int | None,
    typer.Option("--time_block", "--time-block", min=1, help="Tokens per tile; unset: the kernel's default."),
]
WandbProject = Annotated[str, typer.Option("--wandb_project", "--wandb-project", help="W&B project of the run.")]
WandbMode = Annotated[
    Literal["disabled", "online", "offline"],
    typer.Option("--wandb_mode", "--wandb-mode", help="Whether to send figures to W&B too."),
]
WandbName = Annotated[str | None, typer.Option("--wandb_name", "--wandb-name", help="Name of the run on W&B.")]


@bench_app.command()
def loss(
    impl: Impl = "kernel",
    mode: Mode = "off_policy",
    batch: Rows = 1,
    time: Tokens = 2048,
    vocab: Vocabulary = 151643,
    dtype: Dtype = "bf16",
    compute_dtype: Sums = "f32",
    seed: Seed = 0,
    iters: Calls = 10,
    warmup: Warmup = 1,
    noise: Noise = 0.3,
    epsilon_low: ClipLow = 0.2,
    epsilon_high: ClipHigh = 0.2,
    temperature: Temperature = 1.0,
    block_size: VocabTile = None,
    time_block: TokenTile = None,
    wandb_project: WandbProject = "podium",
    wandb_mode: WandbMode = "disabled",
    wandb_name: WandbName = None,
) -> None:
    """Time GRPO's loss on random logits, forward and backward, and print times and memory as JSON."""
    if compute_dtype == "bf16":
        raise ValueError(
            "--compute_dtype bf16: sums over a vocabulary in bfloat16 are off by up to 0.06 nat, a third of a clip of"
            " 0.2; Podium's are float32, which costs no memory traffic. Leave it out, or give f32"
        )
    from podium.doctor.benchmarks.loss import LossBench, bench

    options = LossBench(
        impl=impl,
        on_policy=mode == "on_policy",
        shape=(batch, time, vocab),
        dtype=dtype,
        seed=seed,
        iters=iters,
        warmup=warmup,
        noise=noise,
        clip=(epsilon_low, epsilon_high),
        temperature=temperature,
        tile=(time_block, block_size),
    )
    raise typer.Exit(bench(options, project=wandb_project, mode=wandb_mode, name=wandb_name))
