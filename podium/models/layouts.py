"""Rollout layouts: how weights and sequences are placed on a machine, and the minimum time of a decode step. No jax.

A group of k devices holds one copy of the weights and splits its sequences during attention: k is 1 in `replicated`,
all devices of a host in `tensor`, in between in `hybrid`. With few sequences, large groups are faster, because reading
the weights dominates; with many, small groups, because reductions over a group dominate. `auto` chooses accordingly.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from podium.accelerators import Accelerator
from podium.chips import chip_constants
from podium.config.attention_blocks import kv_layout
from podium.config.optimizer import OPTIMIZER_COPIES
from podium.config.schema import RolloutConfig
from podium.config.sizes import ring_pages
from podium.models.architecture import DecoderConfig
from podium.models.blocks.kind import Work
from podium.models.flops import pair_flops
from podium.models.params import rollout_dtype, rollout_specs

AUTO = "auto"
COLLECTIVE_S = 3e-6  # latency of a collective of any size: the middle of published figures, 1 to 8 us
BF16, F32 = 2, 4
ROOM = 0.9  # usable share of a device's memory for weights and cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout of ROLLOUT_LAYOUTS, with its group size."""

    name: str
    group: int = 1
    """Devices that share one copy of the weights; 1 for layouts that use the training mesh."""
    over_hosts: bool = False
    """Whether a group is larger than a host; then all hosts decode the same requests together, in lockstep."""
    why: str = ""
    """The reason for the choice of `auto`, with its numbers; empty if the config named the layout."""

    def mesh(self, training: Mapping[str, int], kv_heads: int) -> dict[str, int]:
        """The mesh for the layout's axis table: groups of devices, or the training mesh with sp merged into fsdp.

        Within a group, tp splits heads as far as possible, and fsdp splits sequences over the rest.
        """
        if self.group == 1:
            return {**training, "fsdp": training["fsdp"] * training["sp"], "sp": 1}
        heads = math.gcd(self.group, kv_heads)
        groups = math.prod(training.values()) // self.group
        return dict(zip(training, (groups, self.group // heads, 1, heads), strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Per-device figures of the devices that decode together (those of a host, or all)."""

    platform: str  # jax's name: gpu or tpu
    chips: int
    flops: float  # bfloat16 operations per second
    hbm_bandwidth: float  # bytes per second
    link_bandwidth: float  # bytes per second of one link in one direction
    dimensions: int  # of the interconnect's torus; 0: a switch
    links: int  # per device
    hbm_bytes: int
    chip_devices: int = 1

    def links_in(self, group: int) -> int:
        """Links into the corner of a compact group: 2 chips span one axis, 4 span two, 8 up to three.

        The devices of one chip have a faster connection than a link; it is counted as one link.
        """
        chips = max(2, group // self.chip_devices)
        return min(self.dimensions, int(math.log2(chips))) if self.dimensions else self.links


@functools.cache
def machine_of(accelerator: Accelerator, chips: int, *, networked: bool = False) -> Machine | None:
    """The `Machine` of `chips` devices of an accelerator, connected by its own links or, if `networked`, by the
    network.

    None if Podium has no constants for this kind of device.
    """
    constants = chip_constants(accelerator.generation)
    if constants is None:
        return None
    network = constants.get("network_bandwidth") if networked else None
    return Machine(
        platform=accelerator.platform,
        chips=chips,
        flops=constants["flops_bf16"],
        hbm_bandwidth=constants["hbm_bandwidth"],
        link_bandwidth=network or constants["link_bandwidth"],
        dimensions=sum(size > 1 for size in accelerator.torus),
        links=1 if network else int(constants["links"]),
        hbm_bytes=accelerator.hbm_bytes,
        chip_devices=accelerator.chip_devices,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeFloor:
    """The minimum time of a decode step in groups of k devices, at full bandwidth and without kernel overhead."""

    decoder: DecoderConfig
    machine: Machine
    group: int

    @property
    def params(self) -> int:
        """Number of all parameters."""
        return self.decoder.stored + (0 if self.decoder.tied else self.decoder.vocab * self.decoder.width)

    @property
    def rounded_bytes(self) -> int:
        """Bytes saved if the rollout stores the layers' matrices in int8."""
        if self.decoder.rollout_weights == "dtype":
            return 0
        specs = rollout_specs(self.decoder, 1).items()
        return (BF16 - 1) * sum(
            math.prod(spec.shape) for name, spec in specs if rollout_dtype(name, self.decoder, "") == "int8"
        )

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that a decode step moves for a sequence of `tokens` tokens: visible keys and values, and states
        twice.
        """
        return self.decoder.cached(self.machine.platform, tokens) * BF16 + 2 * self.state_bytes

    def step_s(self, rows: int, tokens: int) -> float:
        """Seconds for one token in each of a host's `rows` sequences of `tokens` tokens.

        A collective waits for the product before it, so its time is added.
        """
        d, m = self.decoder, self.machine
        read = (d.stored * BF16 - self.rounded_bytes) / self.group + rows * self.sequence_bytes(tokens) / m.chips
        flops = rows * (2 * d.multiplied(math.ceil(rows / self.groups)) + pair_flops(d, tokens))
        return max(read / m.hbm_bandwidth, flops / m.chips / m.flops) + self.ici_s(math.ceil(rows / self.groups))

    @property
    def shards(self) -> int:
        """Number of parts into which a host's sequences are split during attention."""
        return self.machine.chips // math.gcd(self.group, self.decoder.kv_heads)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states."""

        def of_layer(work: Work) -> int:
            return sum(math.prod(each.shape) * (F32 if each.dtype == "float32" else BF16) for each in work.states)

        return self.decoder.total(of_layer)

    def bytes_held(self, rows: int, rollout: RolloutConfig) -> float:
        """Bytes of weights and cache on one device, for `rows` sequences per host, each of the longest length."""

        def of_layer(work: Work) -> int:
            ring = ring_pages(work.window, rollout)
            tokens = rollout.longest if ring is None else ring * rollout.page_tokens
            return tokens * work.kv_heads * kv_layout(work.head_dim, self.machine.platform).numbers

        cached = rows * (self.decoder.total(of_layer) * BF16 + self.state_bytes)
        return (self.params * BF16 - self.rounded_bytes) / self.group + cached / self.machine.chips

    @property
    def groups(self) -> int:
        """Number of groups on a host."""
        return self.machine.chips // self.group

    def ici_s(self, rows: int) -> float:
        """Seconds of a group's collectives for `rows` tokens: two reductions per layer, and two exchanges if heads do
        not divide.

        The embedding's reduction and the sampler's exchange are added.
        """
        if self.group == 1:
            return 0.0
        spare = self.group // math.gcd(self.group, self.decoder.kv_heads)
        count = self.decoder.layers * (2 if spare == 1 else 4) + 2
        links = self.machine.links_in(self.group) * self.machine.link_bandwidth
        return group_bytes(self.decoder, self.group, rows, BF16) / links + count * COLLECTIVE_S


def group_bytes(decoder: DecoderConfig, group: int, rows: int, itemsize: int) -> float:
    """Bytes that a device sends as `rows` tokens pass through its group: reductions, and exchanges of heads."""
    summed = 2 * (1 - 1 / group) * rows * decoder.width * itemsize  # an all-reduce
    spare = group // math.gcd(group, decoder.kv_heads)
    heads = 2 * (decoder.heads + decoder.kv_heads) * decoder.head_dim
    swapped = (1 - 1 / spare) * rows * heads * itemsize / group
    return decoder.layers * (2 * summed + swapped) + summed


def choose_layout(
    rollout: RolloutConfig,
    decoder: DecoderConfig,
    accelerator: Accelerator | None,
    *,
    devices: int,
    hosts: int,
    optimizer: str = "adamw",
) -> Layout:
    """Choose the rollout's layout.

    Each host decodes its share of the sequences independently, unless groups are larger than a host:
    `rollout.group_chips` can set such a size, and `auto` chooses one if no single host has enough memory.

    Args:
        rollout: the engine's settings.
        decoder: the model's architecture.
        accelerator: the machine, or one of its hosts; None if it is not in the table, such as a CPU.
        devices: number of devices on all hosts.
        hosts: number of processes.
        optimizer: name of the optimizer, whose state is in memory beside the rollout.

    Raises:
        ValueError: a group does not divide a host's devices, or the model.
    """
    chips = devices // hosts
    named = _named(rollout, decoder, devices=devices, chips=chips)
    if named is not None:
        return named
    # bytes per weight: itself and the optimizer's state; with LoRA the frozen weight alone, as the rest is small
    stored = BF16 if decoder.lora else F32 * (1 + OPTIMIZER_COPIES.get(optimizer, 2))
    machine = machine_of(accelerator, chips) if accelerator else None
    sizes = [size for size in range(1, chips + 1) if not _problem(size, decoder, chips)]
    if rollout.layout == "hybrid":
        sizes = [size for size in sizes if 1 < size < chips]
    if not sizes or (machine is None and rollout.layout == "hybrid"):
        raise ValueError(
            f"rollout.layout is hybrid and no group size can be chosen on this machine ({chips} devices per host);"
            " set rollout.group_chips, or the layout to auto"
        )
    if accelerator is None or machine is None:
        return Layout(name="replicated", group=1, why="replicated: the speed of these devices is unknown")
    best, fits = _fastest(rollout, decoder, machine, sizes, stored=stored, hosts=hosts, host_chips=chips)
    if not fits and hosts > 1:
        apart = accelerator.slices == hosts  # each host is a slice, so that groups of several exchange by the network
        reach = devices if apart else accelerator.devices_per_slice
        together = machine_of(accelerator, reach, networked=apart)
        wide = [size for size in range(2 * chips, reach + 1, chips) if not _problem(size, decoder, devices)]
        if together is not None and wide:
            wider, fits = _fastest(rollout, decoder, together, wide, stored=stored, hosts=1, host_chips=chips)
            if fits:
                return _over_hosts(wider.group, wider.why.partition(": ")[2])
    return best


def _named(rollout: RolloutConfig, decoder: DecoderConfig, *, devices: int, chips: int) -> Layout | None:
    """The layout named by the settings, with its group size; None if the choice is left to `auto`.

    `chips` is the number of devices per host. Raises ValueError if groups do not divide them, or the model.
    """
    if rollout.layout == "tensor":
        return _checked(Layout(name="tensor", group=chips), decoder, chips)
    if rollout.layout == "hybrid" and rollout.group_chips is not None:
        if rollout.group_chips > chips and devices > chips:
            return _checked(_over_hosts(rollout.group_chips), decoder, devices, of=chips)
        return _checked(Layout(name="hybrid", group=rollout.group_chips), decoder, chips)
    if rollout.layout in ("legacy", "maxtext") and decoder.routed:
        raise ValueError(
            f"rollout.layout is {rollout.layout}, which splits weights as training does; this is not supported for the"
            f" experts of a {decoder.model_type}; set rollout.layout to auto"
        )
    if rollout.layout not in (AUTO, "hybrid"):
        return Layout(name=rollout.layout)
    return None


def _over_hosts(group: int, why: str = "as rollout.group_chips says") -> Layout:
    text = f"hybrid: groups of {group} devices are larger than a host, so that all hosts decode together"
    return Layout(name="hybrid", group=group, over_hosts=True, why=f"{text}; {why}")


def _fastest(
    rollout: RolloutConfig,
    decoder: DecoderConfig,
    machine: Machine,
    sizes: Sequence[int],
    *,
    stored: int,
    hosts: int,
    host_chips: int,
) -> tuple[Layout, bool]:
    """The group size with the fastest decode step among those that fit, with all slots at half their longest length.

    Also returns whether any fits. `stored` is the trainer's bytes per parameter. Groups are within one of `hosts` hosts
    of `host_chips` devices; if groups are larger than a host, `hosts` is 1.
    """
    rows, length = rollout.slots // hosts, rollout.longest
    floors = [DecodeFloor(decoder=decoder, machine=machine, group=size) for size in sizes]
    floors = [each for each in floors if not (rows % each.shards or (rollout.prefill_rows // hosts) % each.shards)]
    fitting = [
        each
        for each in floors
        if each.bytes_held(rows, rollout) + stored * each.params // (machine.chips * hosts) <= ROOM * machine.hbm_bytes
    ]
    # if nothing fits or divides, a later check gives a better message for the smallest candidate
    candidates = fitting or floors[-1:] or [DecodeFloor(decoder=decoder, machine=machine, group=sizes[-1])]
    seconds = {each.group: each.step_s(rows, length // 2) for each in candidates}
    best = min(seconds, key=lambda group: seconds[group])
    times = ", ".join(f"{_name(group, host_chips)} {1e3 * s:.2f}" for group, s in seconds.items())
    small = [_name(each.group, host_chips) for each in floors if each.group not in seconds]
    without = f"; no memory for {', '.join(small)}" if small else ""
    why = f"{_name(best, host_chips)}: least ms per decode step of {rows} sequences at {length // 2} tokens: {times}"
    return Layout(name=_name(best, host_chips).partition("-")[0], group=best, why=why + without), bool(fitting)


def _name(group: int, host_chips: int) -> str:
    return {1: "replicated", host_chips: "tensor"}.get(group, f"hybrid-{group}")


def _checked(layout: Layout, decoder: DecoderConfig, chips: int, of: int = 1) -> Layout:
    """Return the layout; check that its groups are multiples of `of` devices and divide `chips` and the model."""
    if problem := _problem(layout.group, decoder, chips) or (
        "a group would contain parts of hosts" if layout.group % of else ""
    ):
        sizes = (size for size in range(1, chips + 1) if size % of == 0 or of % size == 0)
        works = ", ".join(str(size) for size in sizes if not _problem(size, decoder, chips))
        raise ValueError(
            f"rollout.layout is {layout.name} in groups of {layout.group}: {problem}; groups can be {works}"
            " (rollout.layout: hybrid, rollout.group_chips)"
        )
    return layout


def _problem(group: int, decoder: DecoderConfig, chips: int) -> str:
    """Why a model cannot be split over `group` of the `chips` devices that decode together; empty if it can."""
    spare = group // math.gcd(group, decoder.kv_heads)
    if chips % group:
        return f"they do not divide the {chips} devices that decode together"
    for count in decoder.sizes("experts"):
        if count % group:
            return f"{count} experts do not divide over them"
    for count in decoder.sizes("delta_heads"):
        if count % group:
            return f"{count} heads of the delta nets do not divide over them"
    for width in decoder.sizes("mlp"):
        if width % group:
            return f"an MLP width of {width} does not divide over them"
    if decoder.head_dim % spare:
        return f"heads of {decoder.head_dim} numbers do not divide over the {spare} devices of a key/value head"
    return ""
