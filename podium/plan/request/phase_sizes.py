"""The sizes that a plan's phases are computed from: mesh, rows, buckets, and bytes shared by phases. No jax.

B rows are those of one device. Weights and logical axes come from `podium.models.params`; a device's part of them
follows from the axis table of the training or rollout layout.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from podium.accelerators import Accelerator
from podium.algorithms.recipes import Recipe
from podium.config.attention_blocks import cache_block_pages, kv_layout, window_blocks
from podium.config.head import fast_memory, head_chunks, head_tile
from podium.config.imports import is_path
from podium.config.mesh import MeshSizes
from podium.config.optimizer import OptimizerConfig
from podium.config.schema import Config, RolloutConfig
from podium.config.section import Section
from podium.config.sizes import cache_pages, prompt_buckets, ring_pages, ring_piece, touched_pages
from podium.models import params
from podium.models.architecture import DecoderConfig
from podium.models.blocks.kind import StateSpec, Work
from podium.models.blocks.spec import ParamSpec, ParamSpecs, is_matrix
from podium.models.layouts import Layout, group_bytes
from podium.models.params import param_specs, trained_specs
from podium.plan.request.candidate import Change, Value
from podium.plan.request.planned_rows import ShapeShare
from podium.plan.request.workload import SequenceLengths, draw_lengths
from podium.rollout.cache_layout import Kept, kept_places, kv_pages, num_cells
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.run.roles import find_decoder
from podium.run.run_spec import Role, RunSpec, UpdateSpec

F32 = 4
ENDS = ("embed", "head")
"""Weights outside the layers with a vocabulary dimension."""
ITEMSIZES = {"float32": F32, "bfloat16": 2, "int8": 1, "uint8": 1}
"""Bytes of a number in each format."""
AnySection = TypeVar("AnySection", bound=Section)
Parts = Mapping[str, int]  # logical axis -> number of parts it is split into


class OwnRows(NamedTuple):
    """The rows of a model that reads longer prompts than the policy."""

    micro_batches: float
    """Number of micro-batches of these rows per micro-batch of the policy."""
    attended: float
    """Like `ShapeShare.attended`, for these rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes:
    """The sizes of a run on a machine, from which its phases are estimated."""

    spec: RunSpec
    """The resolved run; its machine is in the table of accelerators."""
    attended: float = 1.0
    """Like `ShapeShare.attended`, for micro-batches of the run's shape."""
    shapes: tuple[ShapeShare, ...] = ()
    """The shapes of a step's micro-batches; empty: the config's own alone."""
    own_rows: Mapping[str, OwnRows] = dataclasses.field(default_factory=dict)
    """The rows of models that read their own prompts, by the role's name."""

    @property
    def decoder(self) -> DecoderConfig:
        """The model's architecture."""
        return self.spec.decoder

    def of(self, role: Role) -> "RunSizes":
        """The sizes of the same run with another of its models in place of the policy, and the batches that it scores.

        A head of one number per token is computed in chunks, and is compared with no other.
        """
        spec, rows = self.spec, self.own_rows.get(role.name)
        attended = self.attended if role.conversations is None else 1.0
        own = dataclasses.replace(
            spec,
            decoder=role.decoder,
            batch=dataclasses.replace(spec.batch_of(role), devices=spec.batch.devices),
            optimizer=spec.optimizer if role.learning is None else role.learning.optimizer,
            scoring_models=(),
            rollout=dataclasses.replace(spec.rollout, grading_models=()),
        )
        if role.decoder.scores != "none":
            own = dataclasses.replace(
                own,
                update=dataclasses.replace(spec.update, head="chunked"),
                recipe=dataclasses.replace(spec.recipe, teaching=None, kl="none"),
            )
        return dataclasses.replace(self, spec=own, attended=attended if rows is None else rows.attended)

    def in_shape(self, share: ShapeShare) -> "RunSizes":
        """The sizes of the same run with micro-batches of this shape alone."""
        return dataclasses.replace(self, spec=self.spec.in_shape(share.shape), attended=share.attended)

    @property
    def rollout(self) -> RolloutConfig:
        """The rollout settings, with sizes summed over all hosts."""
        return self.spec.rollout.settings

    @property
    def update(self) -> UpdateSpec:
        """How batches are scored and trained on."""
        return self.spec.update

    @property
    def optimizer(self) -> OptimizerConfig:
        """The optimizer's settings."""
        return self.spec.optimizer.settings

    @property
    def platform(self) -> str:
        """The jax platform: cpu, gpu or tpu."""
        return self.spec.machine.platform

    @property
    def accelerator(self) -> Accelerator:
        """The machine's entry in the table of accelerators."""
        assert self.spec.machine.accelerator is not None, "planned for a machine of the table"
        return self.spec.machine.accelerator

    @property
    def mesh(self) -> MeshSizes:
        """Sizes of the training mesh's axes."""
        return self.spec.mesh

    @property
    def activation(self) -> int:
        """Bytes per element of an activation in the update."""
        return ITEMSIZES[self.update.dtype]

    @property
    def rollout_activation(self) -> int:
        """Bytes per element of an activation in the rollout."""
        return ITEMSIZES[self.spec.rollout.dtype]

    @property
    def rows(self) -> int:
        """B: rows of a micro-batch on one device."""
        return self.spec.batch.rows // self.spec.batch.devices

    @property
    def row_tokens(self) -> int:
        """T: tokens per row."""
        return self.spec.batch.row_tokens

    @property
    def buckets(self) -> tuple[int, ...]:
        """Lengths of prefill chunks in tokens."""
        return tuple(prompt_buckets(self.rollout))

    @property
    def layout(self) -> Layout:
        """How the rollout's weights and sequences are laid out on the devices."""
        return self.spec.rollout.layout

    def draw_lengths(self, source: str) -> SequenceLengths:
        """Draw the prompt and completion lengths of a step; `source` as for `workload.draw_lengths`.

        Demonstrations that are mixed in are assumed to be as long as completions.
        """
        spec = self.spec
        drawn = draw_lengths(
            source, self.rollout, prompts=spec.prompts_per_step, completions=spec.rollout.training.completions
        )
        if (own := spec.rollout.demonstrations) is not None:
            found = draw_lengths(source, self.rollout, prompts=own.per_step, completions=1, seed=1)
            demonstrations = np.stack([found.prompts, found.drawn[:, 0]], axis=1)
            drawn = dataclasses.replace(drawn, demonstrations=demonstrations)
        if "baselines" not in spec.recipe.reads:
            return drawn
        return dataclasses.replace(drawn, completions=drawn.completions[:, :-1], greedy=drawn.completions[:, -1])

    @property
    def sp(self) -> int:
        """Number of parts into which sequence parallelism splits each row."""
        return self.mesh["sp"]

    @property
    def tp(self) -> int:
        """Number of parts into which tensor parallelism splits each matrix product."""
        return self.mesh["tp"]

    @property
    def batch_shards(self) -> int:
        """Number of devices that the rows of a micro-batch are split over."""
        return self.train_parts["batch"]

    @property
    def rollout_shards(self) -> int:
        """Number of devices that the rollout's sequences are split over."""
        return self.rollout_parts["batch"]

    @property
    def cache_tokens(self) -> int:
        """Tokens that the pages of one device hold."""
        rollout = self.rollout
        return cache_pages(rollout, self.rollout_shards) // self.rollout_shards * rollout.page_tokens

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one device."""
        return self.rows * self.row_tokens // self.sp

    @property
    def shards(self) -> int:
        """Number of devices that weights are split over between products and gathered from for each."""
        return self.mesh["fsdp"] * self.sp

    @property
    def block(self) -> int:
        """Tokens of the cache that attention reads per block."""
        page_tokens = self.rollout.page_tokens
        return page_tokens * cache_block_pages(page_tokens, self.platform)

    def in_blocks(self, tokens: float) -> int:
        """`tokens` rounded up to the whole blocks that attention reads."""
        return -(-int(tokens) // self.block) * self.block

    @functools.cached_property
    def train_parts(self) -> Parts:
        """Number of parts into which the training layout splits each logical axis."""
        return self._parts(params.TRAIN_AXES)

    @functools.cached_property
    def rollout_parts(self) -> Parts:
        """Number of parts into which the rollout's layout splits each logical axis."""
        mesh = self.layout.mesh(self.mesh, self.decoder.kv_heads)
        return params.axis_parts(params.ROLLOUT_LAYOUTS[self.layout.name], mesh)

    @property
    def rollout_heads(self) -> int:
        """Number of parts into which the rollout's attention splits its heads."""
        return self.rollout_parts.get("cache_heads", 1)

    @functools.cached_property
    def rollout_weight_bytes(self) -> int:
        """Bytes of the rollout's weights on one device."""
        return rollout_bytes(self, params.rollout_specs(self.decoder, 1))

    @functools.cached_property
    def layer_bytes(self) -> int:
        """Bytes of the layers' weights that a pass of the rollout reads on one device, once they are gathered."""
        specs = params.rollout_specs(self.decoder, 1)
        return self._gathered_bytes({name: spec for name, spec in specs.items() if name not in ENDS})

    @functools.cached_property
    def head_bytes(self) -> int:
        """Bytes of the head's weights that a pass of the rollout reads on one device, once they are gathered."""
        specs, head = params.rollout_specs(self.decoder, 1), "embed" if self.decoder.tied else "head"
        return self._gathered_bytes({head: specs[head]})

    def _gathered_bytes(self, specs: ParamSpecs) -> int:
        gathered, _ = self._rollout_exchange
        return gathered * rollout_bytes(self, specs)

    def _kv_bytes(self, tokens: Callable[[Kept], int]) -> int:
        """Bytes of keys and values on one device; `tokens` gives the number of tokens kept in a layer."""
        numbers = sum(
            each.layers * each.kv_heads * kv_layout(each.head_dim, self.platform).numbers * tokens(each)
            for each in kept_places(self.decoder, self.rollout)
        )
        return numbers * self.rollout_activation // self.rollout_heads

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of `tokens` tokens on one device."""
        return self._kv_bytes(lambda kept: tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys and values of one page on one device."""
        return self._kv_bytes(lambda kept: self.rollout.page_tokens if kept.ring is None else 0)

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states, over all layers that have one, on one device."""

        def count(state: StateSpec) -> int:
            number = ITEMSIZES[state.dtype] if state.dtype else self.rollout_activation
            return local_count(state, self.rollout_parts) * number

        return self.decoder.total(lambda work: sum(map(count, work.states)))

    @functools.cached_property
    def cache_bytes(self) -> int:
        """Bytes of the cache on one device: pages, a hidden state per page, and cells of recurrent states."""
        decoder, rollout, shards = self.decoder, self.rollout, self.rollout_shards
        pages = self._kv_bytes(lambda kept: kv_pages(kept, decoder, rollout, shards) // shards * rollout.page_tokens)
        hidden = self.cache_tokens // rollout.page_tokens * decoder.width * self.rollout_activation
        return pages + hidden + num_cells(decoder, rollout) // shards * self.state_bytes

    def read_bytes(self, sequences: int, tokens: int) -> int:
        """Bytes that a decode step reads of keys and values, and moves of states, for `sequences` of `tokens` each."""
        kv = self._kv_bytes(lambda kept: sequences * self._reach(kept.window, tokens))
        return kv + 2 * sequences * self.state_bytes

    def cached_pairs(self, tokens: int, new: int = 1) -> int:
        """Multiply-adds of one query with `tokens` cached keys, over all layers, including padding of stored rows.

        `new` is the number of a sequence's queries in the call.
        """

        def count(work: Work) -> int:
            width = kv_layout(work.head_dim, self.platform).width
            pair = work.pair * width // work.head_dim if work.head_dim else work.pair
            return pair * self._reach(work.window, tokens, new)

        return self.decoder.total(count)

    def _reach(self, window: int | None, tokens: int, new: int = 1) -> int:
        """How many of a sequence's `tokens` a layer's attention reads for `new` queries; rings process one piece at a
        time.
        """
        if window is None:
            return tokens
        page_tokens = self.rollout.page_tokens
        piece = ring_piece(window, page_tokens) if ring_pages(window, self.rollout) else new
        reach = touched_pages(window - 1 + min(new, piece), page_tokens)
        blocks = window_blocks(reach, cache_block_pages(page_tokens, self.platform))
        return min(tokens, blocks.pages * blocks.most * page_tokens)

    @functools.cached_property
    def own_count(self) -> int:
        """Number of trained parameters that a device stores."""
        return sum(local_count(spec, self.train_parts) for spec in trained_specs(self.decoder).values())

    @functools.cached_property
    def gathered_counts(self) -> tuple[int, int]:
        """Numbers of parameters of all layers, and of embedding and head, on one device once they are gathered."""
        parts = self._parts(params.GATHERED_AXES)
        ends = ends_count(self.decoder, parts)
        return sum(local_count(spec, parts) for spec in param_specs(self.decoder).values()) - ends, ends

    @property
    def gathered_in_rollout(self) -> int:
        """Bytes of the largest weights that the rollout gathers at once (a layer or the head); 0 if it gathers none."""
        gathered, summed = self._rollout_exchange
        decoder = self.decoder
        largest = decoder.width * max(
            decoder.vocab, *(place.block.work(decoder.width).outputs for place in decoder.places)
        )
        return self.rollout_activation * largest // summed if gathered > 1 else 0

    def rollout_ici(self, tokens: int) -> int:
        """Bytes that a device sends in one pass of the rollout: gathered weights, and sums over a split width.

        `tokens` is the number of tokens whose attention the device computes.
        """
        if (group := self.layout.group) > 1:
            rows = tokens * group // self.rollout_heads
            return int(group_bytes(self.decoder, group, rows, self.rollout_activation))
        gathered, summed = self._rollout_exchange
        outputs = self.rollout_activation * (self.decoder.total(lambda work: work.outputs) + self.decoder.vocab)
        weights = self.decoder.width * outputs // summed
        return weights * (gathered - 1) // gathered + 2 * tokens * outputs * (summed - 1) // summed

    @functools.cached_property
    def _rollout_exchange(self) -> tuple[int, int]:
        """The number of parts from which the rollout gathers weights, and the number of parts over which it sums
        products.

        Weights are gathered over mesh axes that also split sequences; over other axes, products are summed.
        """
        axes = params.ROLLOUT_LAYOUTS[self.layout.name]
        names = {axis for spec in param_specs(self.decoder).values() for axis in spec.axes if axis}
        sequences = set(params.mesh_axis_names(axes.get("rows", axes["batch"])))
        weights = {name for axis in names for name in params.mesh_axis_names(axes.get(axis))}
        width = set(params.mesh_axis_names(axes.get("width")))
        return self._devices(weights & sequences), self._devices(width - sequences)

    def _parts(self, axes: Mapping[str, params.MeshAxes]) -> Parts:
        return params.axis_parts(axes, self.mesh)

    def _devices(self, mesh_axes: Iterable[str]) -> int:
        return math.prod(self.mesh[name] for name in mesh_axes)


def reduced_number(run: RunSizes) -> int:
    """Bytes per element of gradients when devices reduce them."""
    return F32 if run.update.reduce_dtype == "float32" else run.activation


def fused_chunks(run: RunSizes) -> tuple[int, int]:
    """Number of chunks into which a fused head cuts a device's tokens, and the tokens per chunk, padding included."""
    number, decoder = head_number(run), run.decoder
    tile, _ = head_tile(run.tokens, decoder.vocab, decoder.width, number, fast_memory(run.accelerator.generation))
    return head_chunks(run.tokens, run.update.head_chunk_tokens * F32 // number, tile)


def fused_padding(run: RunSizes) -> int:
    """Operations of one head product that a fused head spends on padding; 0 without a fused head."""
    if run.update.head != "fused":
        return 0
    return 2 * (math.prod(fused_chunks(run)) - run.tokens) * run.decoder.vocab * run.decoder.width


def head_number(run: RunSizes) -> int:
    """Bytes per element of the head's operands in the update."""
    return F32 if run.update.head_dtype == "float32" else run.activation


def optimizer_bytes(run: RunSizes) -> int:
    """Bytes of one device's optimizer state, in device or host memory."""
    return _moment_number(run) * optimizer_count(run.decoder, run.optimizer.name, run.train_parts)


def offloaded_bytes(run: RunSizes) -> int:
    """Bytes of the optimizer state in host memory between updates: the arrays of a parameter's shape."""
    return sum(_offloaded(run).values())


def fetched_bytes(run: RunSizes) -> int:
    """Bytes of offloaded state on a device at once in an update: one parameter's, or all for a user's own optimizer."""
    fetched = _offloaded(run).values()
    return sum(fetched) if is_path(run.optimizer.name) else max(fetched, default=0)


def _offloaded(run: RunSizes) -> dict[str, int]:
    """Offloaded bytes of the optimizer state by parameter."""
    name, found = run.optimizer.name, {}
    if not run.spec.optimizer.offload or run.platform == "cpu":  # a CPU has only one memory
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


class Planned(NamedTuple):
    """A run on a machine, which searches can change: its settings, and the sizes that follow from them."""

    config: Config
    sizes: RunSizes

    @classmethod
    def of(
        cls,
        config: Config,
        accelerator: Accelerator,
        decoder: DecoderConfig | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> "Planned":
        """The run of a config; decoder and recipe default to those that the config names.

        Raises ValueError if settings conflict with each other, the model or the machine.
        """
        spec = resolve(config, decoder or find_decoder(config), Machine.planned(accelerator), recipe=recipe)
        return cls(config, RunSizes(spec=spec))

    def value(self, key: str) -> Value:
        """The value of a setting, named by its dotted path."""
        if key == "train.rows_per_device":
            return self.sizes.rows
        return functools.reduce(getattr, key.split("."), self.config)  # pyright: ignore[reportReturnType]

    def changed(self, changes: Iterable[Change]) -> "Planned":
        """The run with changed settings, without a check of the config's rules. Raises ValueError as `of` does."""
        return Planned.of(self.changed_settings(changes), self.sizes.accelerator)

    def changed_settings(self, changes: Iterable[Change]) -> Config:
        """The run's settings with changes, without a check of the config's rules."""
        config = self.config
        for change in changes:
            config = _assigned(config, change.key.split("."), change.value)
        return config


def _assigned(section: AnySection, keys: Sequence[str], value: object) -> AnySection:
    """A copy of a section in which the value at a path of keys is changed."""
    name, *rest = keys
    inner = _assigned(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})


def sizes_on(spec: RunSpec, accelerator: Accelerator) -> RunSizes:
    """The sizes of a resolved run on its machine, which has this entry in the table of accelerators."""
    return RunSizes(spec=dataclasses.replace(spec, machine=Machine.planned(accelerator)))


def rollout_bytes(run: RunSizes, specs: ParamSpecs) -> int:
    """Bytes of these weights on one device in the rollout's formats and layout."""
    return sum(rollout_number(run, name) * local_count(spec, run.rollout_parts) for name, spec in specs.items())


def rollout_number(run: RunSizes, name: str) -> int:
    """Bytes of a number of this weight in the rollout."""
    return ITEMSIZES[params.rollout_dtype(name, run.decoder, run.spec.rollout.dtype)]


def cast_bytes(run: RunSizes) -> int:
    """Bytes of the trained weights in the rollout's formats, as a device stores them in training."""
    return sum(
        rollout_number(run, name) * local_count(spec, run.train_parts)
        for name, spec in trained_specs(run.decoder).items()
    )


def local_count(spec: ParamSpec | StateSpec, parts: Parts) -> int:
    """Number of elements of a parameter, or a state, on one device; `parts` says how each logical axis is split."""
    return math.prod(-(-dim // parts.get(axis or "", 1)) for dim, axis in zip(spec.shape, spec.axes, strict=True))


def ends_count(decoder: DecoderConfig, parts: Parts) -> int:
    """Number of elements of embedding and (untied) head on one device."""
    specs = param_specs(decoder)
    return sum(local_count(specs[name], parts) for name in ENDS if name in specs)


def network_bytes(run: RunSizes, phase: str, sent: int) -> int:
    """How many of a device's `sent` bytes leave its slice (a GPU machine), averaged over the slice's devices.

    Slices are the outermost part of the mesh. If only dp spans slices, only gradient reductions cross the network.
    A ring over several slices is shared evenly by the devices of each slice.
    """
    slices = run.spec.machine.slices
    if slices == 1:
        return 0
    if run.shards * run.tp > run.accelerator.devices_per_slice:
        return sent // run.accelerator.devices_per_slice
    return 2 * run.own_count * F32 * (slices - 1) // slices if phase in run.spec.updates else 0


def optimizer_count(decoder: DecoderConfig, name: str, parts: Parts) -> int:
    """Number of elements of an optimizer's state on one device, without step counters."""
    return sum(_moment_count(name, spec, local_count(spec, parts)) for spec in trained_specs(decoder).values())


def _moment_count(name: str, spec: ParamSpec, local: int) -> int:
    """Number of elements of an optimizer's state for a parameter with `local` elements on the device."""
    if name == "adamw" or is_path(name):  # a user's own optimizer is assumed to have as much state as adamw
        return 2 * local
    if name in ("lion", "sgd"):
        return local
    if name == "muon":  # one moment for matrices that it makes orthogonal, Adam's two for others
        return local if is_matrix(spec) and "vocab" not in spec.axes else 2 * local
    if not _is_factored(spec):
        return local + 2
    *rest, second, first = sorted(spec.shape)
    return math.prod(rest) * (first + second) + 1


def _is_factored(spec: ParamSpec) -> bool:
    """Whether Adafactor factors the moments: the two largest dimensions are at least 128."""
    return len(spec.shape) > 1 and sorted(spec.shape)[-2] >= 128
