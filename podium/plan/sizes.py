"""The numbers of a run that its phases follow from: mesh, rows, buckets, and bytes that several phases share.

B rows are a device's own. Layouts of the rollout: `replicated` has whole weights and a share of the sequences on each
device; `legacy` has the training layout's weights and splits sequences over all devices; `maxtext` has those weights
and splits sequences over dp alone.
"""

import dataclasses
from collections.abc import Mapping

from podium.accelerators import Accelerator, auto_dtype, cpu_flags
from podium.algorithms.recipes import Recipe, make_recipe
from podium.config.mesh import mesh_shape
from podium.config.schema import Config, Dtype
from podium.config.sizes import batch_sequences, prompt_buckets, row_tokens, rows_per_device
from podium.models.architecture import DecoderConfig
from podium.plan.weights import local_count, weights

F32 = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes:
    """The numbers of a run that the phases follow from."""

    decoder: DecoderConfig
    config: Config
    recipe: Recipe
    layout: str
    platform: str
    dp: int
    fsdp: int
    tp: int
    activation: int
    """Bytes of a number in the update."""
    rollout_activation: int
    """Bytes of a number in the rollout."""
    rows: int
    """B, of a micro-batch on a device."""
    row_tokens: int
    """T."""
    max_micro_batches: int
    """K."""
    buckets: tuple[int, ...]

    @property
    def devices(self) -> int:
        """All of the mesh."""
        return self.dp * self.fsdp * self.tp

    @property
    def rollout_shards(self) -> int:
        """Devices that the sequences of the rollout are split over."""
        return self.dp if self.layout == "maxtext" else self.devices

    @property
    def cache_length(self) -> int:
        """C, positions of a slot."""
        return self.config.rollout.max_prompt_tokens + self.config.rollout.max_new_tokens

    @property
    def train_shards(self) -> dict[str, int]:
        """Into how many parts the training layout splits each logical axis."""
        return {"vocab": self.tp, "width": self.fsdp, "heads": self.tp, "kv_heads": self.tp, "mlp": self.tp}

    @property
    def rollout_weight_shards(self) -> dict[str, int]:
        """The same of the rollout's layout."""
        return {} if self.layout == "replicated" else self.train_shards


def make_sizes(config: Config, decoder: DecoderConfig, accelerator: Accelerator) -> RunSizes:
    """The numbers of a run on a machine. Raises ValueError where the mesh does not fit it."""
    dp, fsdp, tp = mesh_shape(config.mesh, devices=accelerator.devices, hosts=accelerator.hosts)
    recipe = make_recipe(config.algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step)
    rows = rows_per_device(config)
    return RunSizes(
        decoder=decoder,
        config=config,
        recipe=recipe,
        layout=config.rollout.layout,
        platform="cpu" if accelerator.generation == "cpu" else "tpu" if accelerator.compiles else "gpu",
        dp=dp,
        fsdp=fsdp,
        tp=tp,
        activation=_itemsize(config.train.dtype, accelerator),
        rollout_activation=_itemsize(config.rollout.dtype, accelerator),
        rows=rows,
        row_tokens=row_tokens(config),
        max_micro_batches=-(-batch_sequences(config) // (rows * dp * fsdp)),
        buckets=tuple(prompt_buckets(config.rollout.max_prompt_tokens)),
    )


def rollout_weight_bytes(run: RunSizes) -> int:
    """Bytes of the rollout's copy of the weights."""
    counts = (local_count(weight, run.rollout_weight_shards) for weight in weights(run.decoder).values())
    return run.rollout_activation * sum(counts)


def kv_bytes(run: RunSizes, tokens: int) -> int:
    """Keys and values of so many tokens."""
    decoder = run.decoder
    return 2 * decoder.layers * decoder.kv_heads * decoder.head_dim * tokens * run.rollout_activation


def layer_matmul(decoder: DecoderConfig) -> int:
    """Elements of a layer's matrices."""
    attention = 2 * decoder.width * (decoder.heads + decoder.kv_heads) * decoder.head_dim
    return attention + 3 * decoder.width * decoder.mlp_width


def own_count(run: RunSizes) -> int:
    """Parameters that a device stores in training."""
    return sum(local_count(weight, run.train_shards) for weight in weights(run.decoder).values())


def own_layers(run: RunSizes) -> int:
    """The same without embedding and head."""
    return own_count(run) - _ends(run, run.train_shards)


def working_weights(run: RunSizes) -> int:
    """A device's parameters in the format of the products, cast once per batch; nothing where they are float32."""
    return run.activation * own_count(run) if run.activation < F32 else 0


def gathered_counts(run: RunSizes) -> tuple[int, int]:
    """Parameters of all layers, and of embedding and head, as they are while they compute: split by tp alone."""
    shards = {**run.train_shards, "width": 1}
    ends = _ends(run, shards)
    return sum(local_count(weight, shards) for weight in weights(run.decoder).values()) - ends, ends


def _ends(run: RunSizes, shards: Mapping[str, int]) -> int:
    """Elements of the embedding, and of the head where it is not the same."""
    return sum(local_count(each, shards) for name, each in weights(run.decoder).items() if name in ("embed", "head"))


def _itemsize(dtype: Dtype, accelerator: Accelerator) -> int:
    """Bytes of a number in the format that a config's `dtype` means on a machine."""
    known = auto_dtype(accelerator.generation, cpu_flags()) if dtype == "auto" else dtype
    return {"float32": 4, "bfloat16": 2}[known]
