"""The checks of a certificate, causes before consequences: what each compares, and the tolerance (its bar).

A check that fails (is red) because of another is not reported as a cause (`Check.after`): a wrong mask makes loss and
gradient wrong too. Differences are relative differences of norms in float32; where two numbers must be equal, the bar
is 0.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import jax
import numpy as np

from podium.accelerators import kernels_of
from podium.certify.batches import OF_BATCH, batch_checks
from podium.certify.check_result import Check, largest
from podium.certify.compared import training_checks
from podium.certify.formulas import CLAIMS, formula_checks
from podium.certify.long_sequences import long_checks
from podium.certify.rollout_devices import DEVICES, device_mesh, rollout_device_checks
from podium.certify.router_balance import balance_check
from podium.certify.small_run import of_rewards_alone, with_smooth_loss
from podium.certify.subject import ROW_TOKENS, Subject, make_group, one_device
from podium.certify.tiny import tiny_clone
from podium.certify.updates import (
    PACKED,
    PLAIN,
    UNPACKED,
    Form,
    Updates,
    gradient_difference,
    loss_difference,
    relative,
    usable_form,
)
from podium.config.attention_blocks import KERNELS
from podium.config.lora import TARGETS
from podium.config.mesh import mesh_sizes
from podium.config.schema import Attention, Remat
from podium.models.params import TRAIN_AXES, indivisible, param_specs, trained_specs
from podium.run.roles import find_decoder
from podium.sharding import ShardingRules, make_mesh
from podium.train.step import make_score, shard_batch

MESHES = (("dp:2,fsdp:2,tp:2", "dp:2,fsdp:4", "dp:2,tp:2", "dp:2"), ("fsdp:8", "fsdp:4", "fsdp:2,tp:2", "fsdp:2"))
SPLIT_ROWS = (("fsdp:2,sp:4", "sp:4", "fsdp:2,sp:2", "sp:2"),)
"""Meshes in order of preference: from each tuple, the first with enough devices that divides the model is used."""
OTHER_TEMPERATURE = 0.7
CHUNK_TOKENS = 7 * 16  # 7 positions of 16 rows: they do not divide a row
AS_CONFIGURED = "as configured"
"""The form with the config's own settings: its check comes last, since a bug in any other form may show in it too."""
BESIDE_UNPACKED = ("packing", "shared prompts")
FORMAT_BAR = 0.25
"""Tolerance of gradients in bfloat16. Its rounding changes those of clones by up to 0.1 (a recurrent one's taps); a sum
over two devices that is averaged, or lacks one of them, is off by half."""
LONG_ROW = 160  # tokens: more than two blocks of attention


def model_checks(updates: Updates) -> Iterator[Check]:
    """Check the log-probabilities of trainer and sampler, and which matrices have adapters."""
    subject = updates.subject
    sequences, temperature = subject.sequences, subject.config.rollout.temperature
    tokens, starts = sequences.tokens, sequences.starts
    adapters = () if subject.user.lora is None else ("adapters",)
    if adapters:
        yield Check(
            name="adapters",
            claim="exactly the adapters of the matrices in lora.targets are trained, scaled by alpha / rank",
            difference=adapter_errors(subject),
            bar=0,
        )
    causes = ("every token once", "prompts untrained", "positions", *adapters)
    own = (*causes, "log-probabilities")
    divided = f"the logits divided by {OTHER_TEMPERATURE:g}, or by the run's temperature"
    for name, at, after, where in (
        ("log-probabilities", (1.0,), causes, "each sequence computed alone, in float64"),
        ("temperature", (OTHER_TEMPERATURE, None), own, divided),
    ):
        naive = {each: list(subject.naive_scores(tokens, starts, subject.weights, each).logprobs) for each in at}
        yield Check(
            name=name,
            claim=f"the trainer's log-probabilities are those of a softmax of {where}",
            difference=largest(_score_error(updates, each, wanted) for each, wanted in naive.items()),
            after=after,
        )
    sampled = [each.full_logprobs for group in subject.sampled for each in group]
    yield Check(
        name="sampler",
        claim="the sampler's log-probabilities are the trainer's",
        difference=_score_error(updates, None, sampled),
        after=("sampling", "log-probabilities", *(() if temperature == 1.0 else ("temperature",))),
    )


def scoring_checks(updates: Updates) -> Iterator[Check]:
    """Check the scores that the algorithm reads: by other models, and by the policy before a step."""
    expected, valid = updates.subject.sequences.scores, updates.subject.sequences.valid
    found = updates.scores(usable_form(UNPACKED, updates.recipe))
    pairs = [(found[name][valid], expected[name][valid]) for name in updates.subject.rules.read_scores if name in found]
    if pairs:
        yield Check(
            name="scoring models",
            claim="each model's scores of tokens, and the policy's before the step, are those of its own weights",
            difference=largest(np.abs(own - naive).max() / np.abs(naive).max() for own, naive in pairs),
            after=(*OF_BATCH, "log-probabilities", "temperature"),
        )


def _score_error(updates: Updates, temperature: float | None, expected: list[np.ndarray]) -> float:
    """The trainer's largest log-probability error, divided by the largest expected log-probability, as absolute values.

    `temperature` replaces the one that the run resolves to, unless it is None. `expected` has one array per completion.
    """
    subject = updates.subject
    settings, _ = updates.programs(UNPACKED)
    if temperature is not None:
        settings = settings._replace(update=dataclasses.replace(settings.update, temperature=temperature))
    batch = shard_batch(updates.batch(UNPACKED), settings.computing)
    rows = np.concatenate(np.asarray(make_score(settings)(subject.params(one_device()), batch)))  # a completion in each
    starts = [len(group.tokens) - 1 for group in subject.groups for _ in group.transcripts]
    drawn = [np.flatnonzero(own) for own in subject.sequences.valid]
    kept = [(start, at, wanted) for start, at, wanted in zip(starts, drawn, expected, strict=True) if len(at)]
    pairs = [(row[start + at], wanted[at]) for row, (start, at, wanted) in zip(rows, kept, strict=False)]
    found, wanted = (np.concatenate(each) for each in zip(*pairs, strict=True))
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def adapter_errors(subject: Subject) -> float:
    """Number of parameters that are trained and should not be, or the reverse, plus 1 if the scale is wrong."""
    config, clone = subject.user.lora, tiny_clone(find_decoder(subject.user))
    assert config is not None
    if (lora := clone.lora) is None:
        return 1.0
    wanted = {name for target in config.targets for name in TARGETS[target]}
    places = [(place.prefix, place.block.specs(clone.width, std=0.0, out_std=0.0)) for place in clone.places]
    expected = {f"{prefix}{name}.lora_{half}" for prefix, own in places for name in wanted & set(own) for half in "ab"}
    other_scale = abs(lora.scale - config.alpha / config.rank) > 1e-6 * lora.scale
    return len(expected ^ trained_specs(clone).keys()) + float(other_scale)


def update_checks(updates: Updates) -> Iterator[Check]:
    """Compare two updates on one batch with the naive objective; check that equal rewards change no weight."""
    subject, (first, second) = updates.subject, updates.unpacked
    naive, again = updates.naive(subject.weights), updates.naive(first.weights)
    own = () if subject.config.rollout.temperature == 1.0 else ("temperature",)
    causes = (*OF_BATCH, *CLAIMS, "entropy", "log-probabilities", "scoring models", *own)
    yield Check(
        name="loss",
        claim="the loss equals the recipe's formula, computed in float64",
        difference=loss_difference(first.loss, naive.loss, naive.sizes),
        after=causes,
    )
    difference = gradient_difference(first.gradient, naive.gradient, naive.sizes)
    yield Check(
        name="gradient",
        claim="the gradient of every parameter equals that of the formula, computed in float64",
        difference=difference,
        bar=updates.bar(difference),
        after=(*causes, "loss"),
    )
    loss = loss_difference(second.loss, again.loss, again.sizes)
    difference = largest((loss, gradient_difference(second.gradient, again.gradient, again.sizes)))
    yield Check(
        name="repeated batch",
        claim="a second update on the same batch equals the formula, with ratios that are no longer 1",
        difference=difference,
        bar=updates.bar(difference, first.weights),
        after=(*causes, "loss", "gradient"),
    )
    if subject.user.algorithm.router_loss_coef and subject.decoder.choices:
        yield balance_check(updates)
    recipe = subject.recipe
    if recipe.learns_values:
        for name, model in subject.models.items():
            if model.role.learning is not None:
                yield _value_check(updates, name, model.role.learning.clip, causes)
        return  # even if rewards are equal, they differ from the values that were expected
    if recipe.demonstrations:
        return  # their advantage is 1, whatever their reward
    if (alone := of_rewards_alone(recipe)) != recipe:
        updates = Updates(subject, alone)
    equal = [
        make_group(
            n,
            group.transcripts,
            [0.5] * len(group.transcripts),
            [(0.5, *[0.0] * (each.num_turns - 1)) for each in group.transcripts],
            greedy=0.5,
        )
        for n, group in enumerate(subject.groups)
    ]
    (still,) = updates.run(UNPACKED, groups=equal)
    yield Check(
        name="zero advantage",
        claim="completions of equal reward change no weight",
        difference=float(sum(np.count_nonzero(still.weights[name] != x) for name, x in subject.weights.items())),
        bar=0,
    )


def _value_check(updates: Updates, name: str, clip: float | None, causes: tuple[str, ...]) -> Check:
    """Compare an update of the model in this role, in packed rows of several micro-batches, with the naive one."""
    found, naive = updates.value_update(name, Form(rows=2), clip=clip)
    errors = (relative(found.gradient[name], value) for name, value in naive.gradient.items())
    difference = largest((abs(found.loss - naive.loss) / naive.loss, *errors))
    return Check(
        name="value update",
        claim=f"the {name}'s loss and gradient equal those of the clipped squared error, computed in float64",
        difference=difference,
        bar=updates.bar(difference),
        after=causes,
    )


def form_checks(updates: Updates) -> Iterator[Check]:
    """Compare forms of an update (packing, meshes, kernels, ...) that must give the same result."""
    sizes, before = updates.naive(updates.subject.weights).sizes, list[str]()
    for name, how, after, form in _forms(updates.subject):
        (other, *_) = updates.unpacked if name in BESIDE_UNPACKED or form.packing == "none" else (updates.packed,)
        found = updates.packed if form == PACKED else updates.run(form)[0]
        loss = loss_difference(found.loss, other.loss, sizes)
        difference = largest((loss, gradient_difference(found.gradient, other.gradient, sizes)))
        yield Check(
            name=name,
            claim=f"loss and gradient are the same {how}",
            difference=difference,
            bar=updates.bar(difference),
            after=(*OF_BATCH, "log-probabilities", *(before if name == AS_CONFIGURED else after)),
        )
        before.append(name)


def format_checks(updates: Updates) -> Iterator[Check]:
    """Compare an update in the config's own number formats, on one device and on several, with the naive objective.

    All other checks compute in float32, and devices add gradients by other programs in other formats. `train.dtype:
    auto` counts as bfloat16, which it is on accelerators.
    """
    if not _rounds(updates.subject):
        return
    own = Updates(with_smooth_loss(updates.subject))
    naive, before = own.naive(own.subject.weights), list[str]()
    train = {**PLAIN, "attention": "auto", "dtype": "bfloat16", "replay_routing": True}
    several = [each for choices in (MESHES[:1], SPLIT_ROWS) for each in meshes_of(own.subject, choices)]
    for mesh in (None, *several):
        (found,) = own.run(Form(packing="none", devices=mesh, train=train))
        devices = None if mesh is None else f"devices {_split(mesh)}"
        own_name = "gradient in bfloat16" if mesh is None else f"{devices} in bfloat16"
        before += [own_name] if devices is None else [devices, own_name]
        reduced = f", reduced in {own.subject.config.train.reduce_dtype},"
        where = "on one device" if mesh is None else f"on {mesh.size} devices{reduced}"
        yield Check(
            name=own_name,
            claim=f"gradients in bfloat16 {where} are nearly those of REINFORCE's formula",
            difference=gradient_difference(found.gradient, naive.gradient, naive.sizes),
            bar=FORMAT_BAR,
            after=(*OF_BATCH, "log-probabilities", "gradient", *before[:-1]),
        )


def _rounds(subject: Subject) -> bool:
    """Whether the user's update computes in bfloat16, and few enough layers round for `FORMAT_BAR`."""
    return subject.user.train.dtype != "float32" and not subject.full


def _forms(subject: Subject) -> Iterator[tuple[str, str, tuple[str, ...], Form]]:
    """Yield each form to check: the check's name, the end of its claim, further checks it depends on, and the form."""
    yield "packing", "in rows of several sequences", (), Form(packing="sequences")
    yield "shared prompts", "with one copy of each prompt", ("packing",), PACKED
    packed = ("packing", "shared prompts")
    if subject.decoder.choices:
        replaying = Form(train={**PLAIN, "replay_routing": True})
        yield "replayed experts", "when tokens go to the experts that the sampler chose for them", packed, replaying
    for mesh in meshes_of(subject, MESHES):
        yield f"devices {_split(mesh)}", f"on {mesh.size} devices", (), Form(packing="none", devices=mesh)
    for mesh in meshes_of(subject, SPLIT_ROWS):
        form = Form(
            rows=4, devices=mesh, train={**PLAIN, "attention": "auto"}
        )  # few, or balance lets none share prompts
        yield f"devices {_split(mesh)}", f"on {mesh.size} devices that split the tokens of rows", packed, form
    yield "micro-batches", "in several micro-batches", (*packed, "gradient"), Form(rows=2)
    for choice in usable_attention():
        if choice != PLAIN["attention"]:
            form = Form(rows=2, row_tokens=LONG_ROW, train={**PLAIN, "attention": choice})
            yield f"attention {choice}", f"with train.attention {choice}, in rows of several blocks", packed, form
    for choice in get_args(Remat):
        if choice != "none":
            yield f"remat {choice}", f"with train.remat {choice}", packed, Form(train={**PLAIN, "remat": choice})
    chunks, groups = {**PLAIN, "head_chunk_tokens": CHUNK_TOKENS}, {**PLAIN, "layer_chunk_tokens": ROW_TOKENS}
    apart = Form(packing="none", train=chunks)  # every row has tokens, the last one too
    yield "head chunks", "with the head in chunks, the last one shorter", (), apart
    if jax.devices()[0].platform == "tpu" and subject.rules.compared is None:
        yield "head fused", "with the head as a kernel", packed, Form(train={**chunks, "head": "fused"})
    yield "layer chunks", "with layers that compute some rows at a time", (), dataclasses.replace(apart, train=groups)
    yield AS_CONFIGURED, "with the config's own settings of train", packed, Form(train={})


def usable_attention() -> list[Attention]:
    """The values of `train.attention` that work on this machine, except `auto`."""
    known = kernels_of(jax.devices()[0]) in KERNELS
    return [choice for choice in get_args(Attention) if choice != "auto" and (known or choice != "kernel")]


def _split(mesh: jax.sharding.Mesh) -> str:
    return ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items() if size > 1)


def meshes_of(subject: Subject, choices: Sequence[Sequence[str]]) -> list[jax.sharding.Mesh]:
    """The first usable mesh of each choice; unusable choices are left out.

    A mesh is usable if there are enough devices and it divides the model. Devices are the machine's, or simulated CPU
    devices if it has only one.
    """
    devices = jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu")
    specs = param_specs(subject.decoder)

    def usable(text: str) -> bool:
        size = math.prod(mesh_sizes(text).values())
        if size > len(devices):
            return False
        rules = ShardingRules(make_mesh(text, devices[:size]), TRAIN_AXES)
        parts = rules.num_shards("tokens") * rules.num_shards("heads")
        heads = {subject.decoder.heads} | subject.decoder.sizes("delta_heads")
        return not any(indivisible(specs, rules.num_shards)) and not any(each % parts for each in heads)

    found = (next(filter(usable, texts), None) for texts in choices)
    return [make_mesh(text, devices[: math.prod(mesh_sizes(text).values())]) for text in found if text]


def skipped(subject: Subject) -> Iterator[str]:
    """Yield a line for each check that this machine cannot make, with the reason."""
    if not meshes_of(subject, MESHES):
        yield "devices: there is one device, and no mesh of simulated CPU devices divides the model"
    if subject.full and subject.user.train.dtype != "float32":
        yield "devices in bfloat16: the rounding of many layers hides bugs; certify without --full"
    if device_mesh(subject) is None:
        yield f"rollout devices: there are fewer than {DEVICES} devices, or they do not divide the model"
    if "kernel" not in usable_attention():
        yield f"attention kernel: needs {' or '.join(KERNELS)}, and this machine has {jax.devices()[0].platform}"
    if parts := [each.loss for each in subject.user.algorithm.loss_parts if each.loss is not None]:
        yield f"parts of the loss: {', '.join(parts)} have no naive form; the recipe is checked without them"
    if subject.rules.compared is not None:
        yield "head fused: it computes no logits, and this loss compares whole distributions"
    elif jax.devices()[0].platform != "tpu":
        yield f"head fused: needs tpu, and this machine has {jax.devices()[0].platform}"


Stage = Callable[[Updates], Iterator[Check]]
STAGES: tuple[Stage, ...] = (
    batch_checks,
    formula_checks,
    model_checks,
    scoring_checks,
    update_checks,
    form_checks,
    format_checks,
    long_checks,
    rollout_device_checks,
    training_checks,
)
"""All checks of a certificate, causes before their consequences."""
