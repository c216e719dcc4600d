"""The checks of a certificate, from causes to consequences: what each compares, and how far apart the two may be.

A check that is red because of another is not counted as a cause (`Check.after`): a wrong mask makes loss and gradient
wrong too. Differences are relative, of norms, in float32; where two numbers must be the same, the bar is 0.
"""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from podium.certify.batches import batch_checks
from podium.certify.formulas import formula_checks, scheduled_rate
from podium.certify.result import Check
from podium.certify.subject import COMPLETIONS, ROW_TOKENS, Subject, make_group, one_device
from podium.certify.updates import PACKED, PLAIN, UNPACKED, Form, Updates, distance, relative
from podium.config.attention import KERNELS
from podium.config.mesh import mesh_sizes
from podium.config.schema import Attention, CheckpointConfig, Remat
from podium.models.params import TRAIN_AXES, indivisible, param_specs, trained_specs
from podium.sharding import ShardingRules, abstract_params, make_mesh
from podium.train.checkpoint import Checkpointer
from podium.train.setup import make_run_optimizer, make_train_settings, run_spec
from podium.train.state import TrainState, abstract_state, init_state
from podium.train.step import make_score, shard_batch
from podium.train.trainer import Trainer

BATCHES = ("mask", "every token once", "prompts untrained", "denominators")
FORMULAS = ("clip", "kl")
MESHES = (("dp:2,fsdp:2,tp:2", "dp:2,fsdp:4", "dp:2,tp:2", "dp:2"), ("fsdp:8", "fsdp:4", "fsdp:2,tp:2", "fsdp:2"))
SPLIT_ROWS = (("fsdp:2,sp:4", "sp:4", "fsdp:2,sp:2", "sp:2"),)
"""Of each of these, the first that has the devices and divides the model."""
OTHER_TEMPERATURE = 0.7
CHUNK_TOKENS = 7 * 16  # 7 positions of 16 rows: they do not divide a row
BESIDE_UNPACKED = ("packing", "shared prompts")
LONG_ROW = 160  # tokens: more than two blocks of attention
WARMUP, STEPS = 2, 3  # of the learning rate, and the steps in which it is looked at


def model_checks(updates: Updates) -> Iterator[Check]:
    """Log-probabilities of trainer and sampler."""
    subject = updates.subject
    temperature, used = subject.config.rollout.temperature, subject.sequences.valid
    for name, at, after in (("log-probabilities", 1.0, ()), ("temperature", OTHER_TEMPERATURE, ("log-probabilities",))):
        naive = subject.naive_scores(subject.sequences, temperature=at).logprobs
        where = "every sequence alone, in float64" if at == 1.0 else f"logits over {at:g}"
        yield Check(
            name=name,
            claim=f"the trainer's log-probabilities are those of a softmax of {where}",
            difference=_score_error(updates, at, [x[own] for x, own in zip(naive, used, strict=True)]),
            after=after,
        )
    sampled = [each.full_logprobs for group in subject.sampled for each in group]
    kept = [x[: int(np.sum(own))] for x, own in zip(sampled, used, strict=True)]
    yield Check(
        name="sampler",
        claim="the sampler's log-probabilities are the trainer's",
        difference=_score_error(updates, temperature, kept),
        after=("log-probabilities",) if temperature == 1.0 else ("log-probabilities", "temperature"),
    )


def _score_error(updates: Updates, temperature: float, expected: list[np.ndarray]) -> float:
    """Largest difference of the trainer's log-probabilities, over the largest log-probability."""
    subject = updates.subject
    settings = updates.programs(UNPACKED)[0]._replace(temperature=temperature)
    batch = shard_batch(updates.batch(UNPACKED), settings.computing)
    rows = np.concatenate(np.asarray(make_score(settings)(subject.params(one_device()), batch)))  # a completion in each
    starts = [len(group.tokens) - 1 for group in subject.groups for _ in group.transcripts]
    kept = [(start, wanted) for start, wanted in zip(starts, expected, strict=True) if len(wanted)]
    pairs = [(row[start : start + len(wanted)], wanted) for row, (start, wanted) in zip(rows, kept, strict=False)]
    found, wanted = (np.concatenate(each) for each in zip(*pairs, strict=True))
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def update_checks(updates: Updates) -> Iterator[Check]:
    """One update, and another on the same batch, against the naive objective; and one that has nothing to learn."""
    subject, (first, second) = updates.subject, updates.unpacked
    naive, again = updates.naive(subject.weights), updates.naive(first.weights)
    own = () if subject.config.rollout.temperature == 1.0 else ("temperature",)
    causes = (*BATCHES, *FORMULAS, "log-probabilities", *own)
    yield Check(
        name="loss",
        claim="the loss is that of the recipe's formula, in float64",
        difference=abs(first.loss - naive.loss) / naive.loss_size,
        after=causes,
    )
    yield Check(
        name="gradient",
        claim="the gradient of every parameter is that of the formula, in float64",
        difference=distance(first.gradient, naive.gradient),
        after=(*causes, "loss"),
    )
    yield Check(
        name="repeated batch",
        claim="a second update on the same batch is that of the formula, at the ratios that are there by then",
        difference=max(abs(second.loss - again.loss) / again.loss_size, distance(second.gradient, again.gradient)),
        after=(*causes, "loss", "gradient"),
    )
    recipe = subject.recipe
    if recipe.demonstrations:
        return  # their advantage is 1, whatever they earn
    if recipe.kl != "none" or recipe.entropy_bonus:
        updates = Updates(subject, dataclasses.replace(recipe, kl="none", kl_coef=0.0, entropy_bonus=0.0))
    equal = [make_group(n, each.transcripts, [0.5] * COMPLETIONS) for n, each in enumerate(subject.groups)]
    (still,) = updates.run(UNPACKED, groups=equal)
    yield Check(
        name="zero advantage",
        claim="completions of equal reward move no weight",
        difference=float(sum(np.count_nonzero(still.weights[name] != x) for name, x in subject.weights.items())),
        bar=0,
    )


def form_checks(updates: Updates) -> Iterator[Check]:
    """Compare forms of an update that must give the same result."""
    size = updates.naive(updates.subject.weights).loss_size
    for name, how, after, form in _forms(updates.subject):
        (other, *_) = updates.unpacked if name in BESIDE_UNPACKED or form.packing == "none" else (updates.packed,)
        found = updates.packed if form == PACKED else updates.run(form)[0]
        yield Check(
            name=name,
            claim=f"loss and gradient are the same {how}",
            difference=max(abs(found.loss - other.loss) / size, distance(found.gradient, other.gradient)),
            after=(*BATCHES, "log-probabilities", *after),
        )


def _forms(subject: Subject) -> Iterator[tuple[str, str, tuple[str, ...], Form]]:
    """Name, claim and further causes of each check of a form, and the form."""
    yield "packing", "in rows of several sequences", (), Form(packing="sequences")
    yield "shared prompts", "with one copy of each prompt", ("packing",), PACKED
    packed = ("packing", "shared prompts")
    for mesh in meshes_of(subject, MESHES):
        yield f"devices {_split(mesh)}", f"on {mesh.size} devices", (), Form(packing="none", devices=mesh)
    for mesh in meshes_of(subject, SPLIT_ROWS):
        form = Form(devices=mesh, train={**PLAIN, "attention": "auto"})
        yield f"devices {_split(mesh)}", f"on {mesh.size} devices that split the tokens of rows", packed, form
    yield "micro-batches", "in several micro-batches", (*packed, "gradient"), Form(rows=2)
    for choice in usable_attention():
        if choice != "reference":
            form = Form(rows=2, row_tokens=LONG_ROW, train={**PLAIN, "attention": choice})
            yield f"attention {choice}", f"with train.attention {choice}, in rows of several blocks", packed, form
    for choice in get_args(Remat):
        if choice != "none":
            yield f"remat {choice}", f"with train.remat {choice}", packed, Form(train={**PLAIN, "remat": choice})
    chunks, groups = {**PLAIN, "head_chunk_tokens": CHUNK_TOKENS}, {**PLAIN, "layer_chunk_tokens": ROW_TOKENS}
    yield "head chunks", "with the head in chunks, the last one shorter", packed, Form(train=chunks)
    if jax.devices()[0].platform == "tpu":
        yield "head fused", "with the head as a kernel", packed, Form(train={**chunks, "head": "fused"})
    yield "layer chunks", "with layers that compute some rows at a time", packed, Form(train=groups)
    yield "as configured", "with the config's own settings of train", packed, Form(train={})


def usable_attention() -> list[Attention]:
    """The values of `train.attention` that this machine has, but for the choice among them."""
    known = jax.devices()[0].platform in KERNELS
    return [choice for choice in get_args(Attention) if choice != "auto" and (known or choice != "kernel")]


def _split(mesh: jax.sharding.Mesh) -> str:
    return ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items() if size > 1)


def meshes_of(subject: Subject, choices: Sequence[Sequence[str]]) -> list[jax.sharding.Mesh]:
    """Meshes of this machine's devices that divide the model: of its accelerators, or where there is one, of CPUs."""
    devices = jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu")
    specs = param_specs(subject.decoder)

    def usable(text: str) -> bool:
        size = math.prod(mesh_sizes(text).values())
        if size > len(devices):
            return False
        rules = ShardingRules(make_mesh(text, devices[:size]), TRAIN_AXES)
        heads = rules.num_shards("tokens") * rules.num_shards("heads")
        return not any(indivisible(specs, rules.num_shards)) and subject.decoder.heads % heads == 0

    found = (next(filter(usable, texts), None) for texts in choices)
    return [make_mesh(text, devices[: math.prod(mesh_sizes(text).values())]) for text in found if text]


def skipped(subject: Subject) -> Iterator[str]:
    """What this machine cannot check."""
    if not meshes_of(subject, MESHES):
        yield "devices: there is one device, and no mesh of CPUs divides the model"
    if "kernel" not in usable_attention():
        yield f"attention kernel: it is for {' and '.join(KERNELS)}, and this machine has {jax.devices()[0].platform}"
    if jax.devices()[0].platform != "tpu":
        yield f"head fused: it is for tpu, and this machine has {jax.devices()[0].platform}"


def run_checks(updates: Updates) -> Iterator[Check]:
    """The trainer with the config's optimizer: which learning rate an update has, and what a checkpoint brings back."""
    subject = updates.subject
    train = subject.config.train
    schedule: Any = {"optimizer": train.optimizer.model_copy(update={"warmup_steps": WARMUP})}
    algorithm = subject.config.algorithm.model_copy(update={"updates_per_batch": 1})
    changes: Any = {"train": train.model_copy(update=schedule), "algorithm": algorithm, "steps": 2 * STEPS}
    config = subject.config.model_copy(update=changes)
    recipe = dataclasses.replace(subject.recipe, updates_per_batch=1, zero_variance="keep")
    mesh = one_device()
    spec = run_spec(config, subject.decoder, mesh)
    optimizer = make_run_optimizer(spec.optimizer, subject.decoder)
    reference = None if subject.reference is None else subject.params(mesh, subject.reference)
    with tempfile.TemporaryDirectory(prefix="podium-certify-") as folder:
        trainer = Trainer(
            recipe,
            make_train_settings(spec.update, subject.decoder, mesh),
            optimizer,
            sizes=spec.batch,
            schedule=spec.optimizer,
            reference=reference,
            folder=Path(folder),
            frozen=subject.frozen(mesh),
        )
        batches, _ = trainer.prepare(subject.trained(mesh), subject.groups)
        norms, rates = [], [scheduled_rate(config.train.optimizer, 2 * STEPS, step) for step in range(STEPS)]
        for step in range(STEPS):
            _, stats = trainer.update(init_state(subject.trained(mesh), optimizer), batches, step)
            norms.append(stats.update_norm)
        yield Check(
            name="learning rate",
            claim="the update of each step has that step's learning rate",
            difference=relative(np.array(norms) / norms[WARMUP - 1], np.array(rates) / rates[WARMUP - 1]),
            after=("schedule",),
        )
        state, _ = trainer.update(init_state(subject.trained(mesh), optimizer), batches, 0)
        with contextlib.closing(Checkpointer(Path(folder) / "checkpoints", CheckpointConfig())) as checkpointer:
            checkpointer.save(1, state, {}, score=None, wait=True)
            straight, _ = trainer.update(state, batches, 1)
            specs, rules = trained_specs(subject.decoder), ShardingRules(mesh, TRAIN_AXES)
            abstract = abstract_state(abstract_params(specs, jnp.float32, rules), optimizer)
            resumed, _ = trainer.update(checkpointer.restore(1, abstract)[0], batches, 1)
        yield Check(
            name="resume",
            claim="a run resumed from a checkpoint equals the uninterrupted run, bit for bit",
            difference=float(_unequal(straight, resumed)),
            bar=0,
        )


def _unequal(left: TrainState, right: TrainState) -> int:
    """Numbers that differ between two states."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return sum(int(np.count_nonzero(np.asarray(a) != np.asarray(b))) for a, b in pairs)


Stage = Callable[[Updates], Iterator[Check]]
STAGES: tuple[Stage, ...] = (batch_checks, formula_checks, model_checks, update_checks, form_checks, run_checks)
"""All checks of a certificate, causes before their consequences."""
