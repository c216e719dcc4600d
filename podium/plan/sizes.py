"""The numbers of a run that its phases follow from: mesh, rows, buckets, and bytes that several phases share. No jax.

B rows are a device's own. Weights and axes are those of `podium.models.params`; what a device has of them follows from
the table of axes that the trainer or the rollout's layout uses.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping

from podium.accelerators import Accelerator
from podium.config.attention import cache_block_pages, kv_layout
from podium.config.head import fast_memory, head_chunks, head_tile
from podium.config.imports import is_path
from podium.config.mesh import MeshSizes
from podium.config.optimizer import OptimizerConfig
from podium.config.schema import Config, RolloutConfig
from podium.config.sizes import cache_pages, prompt_buckets
from podium.models import params
from podium.models.architecture import DecoderConfig
from podium.models.blocks.kind import StateSpec, Work
from podium.models.blocks.spec import ParamSpec, ParamSpecs, is_matrix
from podium.models.layouts import Layout, group_bytes
from podium.models.params import (
    param_specs,
    trained_specs,
)
from podium.plan.workload import SequenceLengths, draw_lengths
from podium.rollout.kept import Kept, kept_places, kv_pages, num_cells
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.run.spec import RunSpec, UpdateSpec

F32 = 4
ITEMSIZES = {"float32": F32, "bfloat16": 2}
Parts = Mapping[str, int]  # into how many parts each logical axis is split


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes:
    """What a device stores and computes in a run: the numbers that the estimates of its phases are made of."""

    spec: RunSpec
    """The run, resolved for a machine in the table of accelerators."""
    attended: float = 1.0
    """Share of the blocks up to the diagonal that attention's kernels multiply in an update."""

    @property
    def decoder(self) -> DecoderConfig:
        """The model's numbers."""
        return self.spec.decoder

    @property
    def rollout(self) -> RolloutConfig:
        """The engine's sizes over all hosts."""
        return self.spec.rollout.settings

    @property
    def update(self) -> UpdateSpec:
        """How batches are scored and updated on."""
        return self.spec.update

    @property
    def optimizer(self) -> OptimizerConfig:
        """The optimizer's settings."""
        return self.spec.optimizer.settings

    @property
    def platform(self) -> str:
        """Name of the platform in jax: cpu, gpu or tpu."""
        return self.spec.machine.platform

    @property
    def accelerator(self) -> Accelerator:
        """The machine's entry in the table."""
        assert self.spec.machine.accelerator is not None, "planned for a machine of the table"
        return self.spec.machine.accelerator

    @property
    def mesh(self) -> MeshSizes:
        """Sizes of the mesh axes in training."""
        return self.spec.mesh

    @property
    def activation(self) -> int:
        """Bytes of a number in the update."""
        return ITEMSIZES[self.update.dtype]

    @property
    def rollout_activation(self) -> int:
        """Bytes of a number in the rollout."""
        return ITEMSIZES[self.spec.rollout.dtype]

    @property
    def rows(self) -> int:
        """B, the rows of a micro-batch on one device."""
        return self.spec.batch.rows // self.spec.batch.devices

    @property
    def row_tokens(self) -> int:
        """T, the tokens of a row."""
        return self.spec.batch.row_tokens

    @property
    def buckets(self) -> tuple[int, ...]:
        """Lengths of prefill chunks, in tokens."""
        return tuple(prompt_buckets(self.rollout.max_prompt_tokens))

    @property
    def layout(self) -> Layout:
        """How the rollout's weights and sequences lie on the devices."""
        return self.spec.rollout.layout

    def draw_lengths(self, source: str) -> SequenceLengths:
        """Draw the lengths of a step's prompts and completions; `source` is that of `workload.draw_lengths`."""
        spec = self.spec
        return draw_lengths(source, self.rollout, prompts=spec.prompts_per_step, completions=spec.rollout.completions)

    @property
    def sp(self) -> int:
        """Parts of each row."""
        return self.mesh["sp"]

    @property
    def tp(self) -> int:
        """Parts of each matrix while it computes."""
        return self.mesh["tp"]

    @property
    def dp(self) -> int:
        """Copies of the weights."""
        return self.mesh["dp"]

    @property
    def batch_shards(self) -> int:
        """Devices that share the rows of a micro-batch."""
        return self.train_parts["batch"]

    @property
    def micro_batch_rows(self) -> int:
        """B of a micro-batch, over all devices."""
        return self.rows * self.batch_shards

    @property
    def rollout_shards(self) -> int:
        """Devices that the sequences of the rollout are split over."""
        return self.rollout_parts["batch"]

    @property
    def cache_tokens(self) -> int:
        """Tokens that a device's pages hold."""
        rollout = self.rollout
        return cache_pages(rollout, self.rollout_shards) // self.rollout_shards * rollout.page_tokens

    @property
    def tokens(self) -> int:
        """Of a micro-batch, that a device has: its part of each row."""
        return self.rows * self.row_tokens // self.sp

    @property
    def shards(self) -> int:
        """Devices that weights are split over and gathered from while they compute."""
        return self.mesh["fsdp"] * self.sp

    @property
    def block(self) -> int:
        """Tokens of the cache that attention reads at once."""
        page_tokens = self.rollout.page_tokens
        return page_tokens * cache_block_pages(page_tokens, self.platform)

    def in_blocks(self, tokens: float) -> int:
        """Tokens that attention reads of a sequence of so many in the cache: whole blocks."""
        return -(-int(tokens) // self.block) * self.block

    @functools.cached_property
    def train_parts(self) -> Parts:
        """Into how many parts the training layout splits each logical axis."""
        return self._parts(params.TRAIN_AXES)

    @functools.cached_property
    def rollout_parts(self) -> Parts:
        """Into how many parts the rollout's layout splits each logical axis."""
        mesh = self.layout.mesh(self.mesh, self.decoder.kv_heads)
        return params.axis_parts(params.ROLLOUT_LAYOUTS[self.layout.name], mesh)

    @property
    def rollout_heads(self) -> int:
        """Into how many parts the rollout's attention splits its heads."""
        return self.rollout_parts.get("cache_heads", 1)

    @property
    def rollout_weight_bytes(self) -> int:
        """Bytes of the weights that the rollout reads."""
        return rollout_bytes(self, params.rollout_specs(self.decoder, 1))

    def _kv_bytes(self, tokens: Callable[[Kept], int]) -> int:
        """Keys and values of a number of tokens in each layer, as far as a device has their heads."""
        numbers = sum(
            each.layers * each.kv_heads * kv_layout(each.head_dim, self.platform).numbers * tokens(each)
            for each in kept_places(self.decoder, self.rollout)
        )
        return numbers * self.rollout_activation // self.rollout_heads

    def kv_bytes(self, tokens: int) -> int:
        """Keys and values of a number of tokens."""
        return self._kv_bytes(lambda kept: tokens)

    @property
    def page_bytes(self) -> int:
        """Keys and values of a page of a sequence."""
        return self._kv_bytes(lambda kept: self.rollout.page_tokens if kept.ring is None else 0)

    @property
    def state_bytes(self) -> int:
        """States of a sequence in all layers that have one."""
        parts = self.rollout_parts

        def count(state: StateSpec) -> int:
            pairs = zip(state.shape, state.axes, strict=True)
            numbers = math.prod(size if axis is None else -(-size // parts.get(axis, 1)) for size, axis in pairs)
            return numbers * (ITEMSIZES[state.dtype] if state.dtype else self.rollout_activation)

        return self.decoder.total(lambda work: sum(map(count, work.states)))

    @property
    def cache_bytes(self) -> int:
        """The cache of a device: pages, each with a hidden state, and cells."""
        decoder, rollout, shards = self.decoder, self.rollout, self.rollout_shards
        pages = self._kv_bytes(lambda kept: kv_pages(kept, decoder, rollout, shards) // shards * rollout.page_tokens)
        hidden = self.cache_tokens // rollout.page_tokens * decoder.width * self.rollout_activation
        return pages + hidden + num_cells(decoder, rollout) // shards * self.state_bytes

    def read_bytes(self, sequences: int, tokens: int) -> int:
        """What a decode step moves of sequences of `tokens` in whole blocks: keys, values, and states both ways."""
        kv = self._kv_bytes(lambda kept: sequences * self._reach(kept.window, tokens))
        return kv + 2 * sequences * self.state_bytes

    def cached_pairs(self, tokens: int) -> int:
        """Multiply-adds of a query for `tokens` cached keys, over all layers; padding of stored rows counts too."""

        def count(work: Work) -> int:
            width = kv_layout(work.head_dim, self.platform).width
            pair = work.pair * width // work.head_dim if work.head_dim else work.pair
            return pair * self._reach(work.window, tokens)

        return self.decoder.total(count)

    def _reach(self, window: int | None, tokens: int) -> int:
        """How many of a sequence's `tokens` attention reads in a layer: a window, wherever it begins in a block."""
        return tokens if window is None else min(tokens, self.in_blocks(window) + self.block)

    @property
    def own_count(self) -> int:
        """Trained parameters that a device stores."""
        return sum(local_count(spec, self.train_parts) for spec in trained_specs(self.decoder).values())

    @property
    def gathered_counts(self) -> tuple[int, int]:
        """Parameters of all layers, and of embedding and head, as they are while they compute."""
        parts = self._parts(params.GATHERED_AXES)
        ends = ends_count(self.decoder, parts)
        return sum(self._counts(parts)) - ends, ends

    @property
    def gathered_in_rollout(self) -> int:
        """Bytes of the largest weights that the rollout gathers, where it does: a layer's, or the head."""
        gathered, summed = self._rollout_exchange
        decoder = self.decoder
        largest = decoder.width * max(
            decoder.vocab, *(place.block.work(decoder.width).outputs for place in decoder.places)
        )
        return self.rollout_activation * largest // summed if gathered > 1 else 0

    def rollout_ici(self, tokens: int) -> int:
        """Bytes that a device sends in one pass of the rollout: gathered weights, and sums over a split width.

        `tokens` are those whose attention it computes.
        """
        if (group := self.layout.group) > 1:
            rows = tokens * group // self.rollout_heads
            return int(group_bytes(self.decoder, group, rows, self.rollout_activation))
        gathered, summed = self._rollout_exchange
        outputs = self.rollout_activation * (self.decoder.total(lambda work: work.outputs) + self.decoder.vocab)
        weights = self.decoder.width * outputs // summed
        return weights * (gathered - 1) // gathered + 2 * tokens * outputs * (summed - 1) // summed

    @property
    def _rollout_exchange(self) -> tuple[int, int]:
        """Into how many parts weights are split that the rollout gathers, and widths whose products it sums instead.

        A mesh axis that splits sequences too makes a device gather weights; without it, products are summed over it.
        """
        axes = params.ROLLOUT_LAYOUTS[self.layout.name]
        names = {axis for spec in param_specs(self.decoder).values() for axis in spec.axes if axis}
        sequences = set(params.mesh_axis_names(axes.get("rows", axes["batch"])))
        weights = {name for axis in names for name in params.mesh_axis_names(axes.get(axis))}
        width = set(params.mesh_axis_names(axes.get("width")))
        return self._devices(weights & sequences), self._devices(width - sequences)

    def _counts(self, parts: Parts) -> list[int]:
        return [local_count(spec, parts) for spec in param_specs(self.decoder).values()]

    def _parts(self, axes: Mapping[str, params.MeshAxes]) -> Parts:
        return params.axis_parts(axes, self.mesh)

    def _devices(self, mesh_axes: Iterable[str]) -> int:
        return math.prod(self.mesh[name] for name in mesh_axes)


def reduced_number(run: RunSizes) -> int:
    """Bytes of a number of the gradient as devices exchange it."""
    return F32 if run.update.reduce_dtype == "float32" else run.activation


def fused_chunks(run: RunSizes) -> tuple[int, int]:
    """Into how many chunks a fused head cuts a device's tokens, and the tokens of each, padding among them."""
    number, decoder = head_number(run), run.decoder
    tile, _ = head_tile(run.tokens, decoder.vocab, decoder.width, number, fast_memory(run.accelerator.generation))
    return head_chunks(run.tokens, run.update.head_chunk_tokens * F32 // number, tile)


def fused_padding(run: RunSizes) -> int:
    """Operations of one product of the head with the padding of a fused one; 0 with another."""
    if run.update.head != "fused":
        return 0
    return 2 * (math.prod(fused_chunks(run)) - run.tokens) * run.decoder.vocab * run.decoder.width


def head_number(run: RunSizes) -> int:
    """Bytes of a number of the head's operands in the update."""
    return F32 if run.update.head_dtype == "float32" else run.activation


def optimizer_bytes(run: RunSizes) -> int:
    """Bytes of the optimizer's state of a device, wherever it is."""
    return _moment_number(run) * optimizer_count(run.decoder, run.optimizer.name, run.train_parts)


def offloaded_bytes(run: RunSizes) -> int:
    """Bytes of it that are in the host's memory between updates: what has a parameter's shape."""
    return sum(_offloaded(run).values())


def fetched_bytes(run: RunSizes) -> int:
    """Bytes of those that an update has on a device at once: one parameter's, of a rule of the user's own all."""
    fetched = _offloaded(run).values()
    return sum(fetched) if is_path(run.optimizer.name) else max(fetched, default=0)


def _offloaded(run: RunSizes) -> dict[str, int]:
    """The same by parameter."""
    name, found = run.optimizer.name, {}
    if not run.spec.optimizer.offload or run.platform == "cpu":  # which has one memory
        return found
    for key, spec in trained_specs(run.decoder).items():
        local = local_count(spec, run.train_parts)
        if name != "adafactor":
            found[key] = _moment_number(run) * _moment_count(name, spec, local)
        elif not _is_factored(spec):
            found[key] = _moment_number(run) * local
    return found


def _moment_number(run: RunSizes) -> int:
    return F32 if run.optimizer.moments == "float32" else F32 // 2


def make_sizes(config: Config, decoder: DecoderConfig, accelerator: Accelerator) -> RunSizes:
    """The numbers of a run on a machine. Raises ValueError where the mesh does not fit it."""
    return RunSizes(spec=resolve(config, decoder, Machine.planned(accelerator)))


def rollout_bytes(run: RunSizes, specs: ParamSpecs) -> int:
    """Bytes of a device that these weights take as the rollout has them."""
    sizes = {"int8": 1, "float32": F32}
    return sum(
        sizes.get(params.rollout_dtype(name, run.decoder, ""), run.rollout_activation)
        * local_count(spec, run.rollout_parts)
        for name, spec in specs.items()
    )


def local_count(spec: ParamSpec, parts: Parts) -> int:
    """Elements of a parameter on one device, where each logical axis is split into its number of parts."""
    return math.prod(-(-dim // parts.get(axis or "", 1)) for dim, axis in zip(spec.shape, spec.axes, strict=True))


def ends_count(decoder: DecoderConfig, parts: Parts) -> int:
    """Elements of the embedding, and of the head where it is another, on one device."""
    specs = param_specs(decoder)
    return sum(local_count(specs[name], parts) for name in ("embed", "head") if name in specs)


def network_bytes(run: RunSizes, phase: str, sent: int) -> int:
    """What of a device's `sent` bytes leaves its machine, on average over the machine's devices.

    Machines are the outermost part of the mesh: as long as dp alone joins them, gradients alone are summed over the
    network. Of a ring over several machines, each device of a machine carries a share.
    """
    if run.spec.machine.slices == 1:
        return 0
    if run.shards * run.tp > run.accelerator.devices_per_host:
        return sent // run.accelerator.devices_per_host
    slices = run.spec.machine.slices
    return 2 * run.own_count * F32 * (slices - 1) // slices if phase == "update" else 0


def optimizer_count(decoder: DecoderConfig, name: str, parts: Parts) -> int:
    """Numbers of an optimizer's state on one device, but for its counters."""
    return sum(_moment_count(name, spec, local_count(spec, parts)) for spec in trained_specs(decoder).values())


def _moment_count(name: str, spec: ParamSpec, local: int) -> int:
    """Numbers of an optimizer's state for a parameter of which a device has `local` elements."""
    if name == "adamw" or is_path(name):  # what one of the user's own keeps is taken to be as much
        return 2 * local
    if name in ("lion", "sgd"):
        return local
    if name == "muon":  # one moment of what it orthogonalises (`podium.train.optimizer`), Adam's two of the rest
        return local if is_matrix(spec) and "vocab" not in spec.axes else 2 * local
    if not _is_factored(spec):
        return local + 2
    *rest, second, first = sorted(spec.shape)
    return math.prod(rest) * (first + second) + 1


def _is_factored(spec: ParamSpec) -> bool:
    """Whether Adafactor keeps rows and columns, on every device: if the two largest dimensions have 128."""
    return len(spec.shape) > 1 and sorted(spec.shape)[-2] >= 128
