import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import DECODER, tiny

from podium.accelerators import GIB, Accelerator
from podium.algorithms.advantages import RETURNS, VALUES
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig, frozen_decoder, scoring_decoder, with_lora
from podium.models.params import TRAIN_AXES, param_specs
from podium.plan.closed_form.resident_memory import frozen_bytes, residents
from podium.plan.compiled.phases import PhaseProgram, device_bytes, phase_programs
from podium.plan.request.phase_sizes import Planned, RunSizes
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.programs import EnginePrograms
from podium.rollout.request import Request, SamplingParams
from podium.run.run_spec import ConversationSpec, Role, RunSpec
from podium.sampling.sampler import rollout_rules
from podium.sharding import ShardingRules, init_params, make_mesh
from podium.train.batches.batch import make_batch
from podium.train.batches.run_shapes import RunShapes
from podium.train.batches.samples import single_answer
from podium.train.scorers import LoadedRole, with_scores
from podium.train.setup import make_run_optimizer, run_spec
from podium.train.state import init_state
from podium.train.step import TrainSettings, shard_batch
from podium.train.trainer import Trainer
from tests.plan.estimated import tiny_config

CPU = Accelerator(name="cpu", generation="cpu", devices=8, hosts=1, hbm_bytes=GIB)
MINIBATCHES: dict[str, Any] = {
    "rollout": {"max_prompt_tokens": 40},
    "algorithm": {"old_logprobs": "trainer", "minibatches": 2},
}
config_of = functools.partial(tiny_config, MINIBATCHES)
FACTORIES = {
    "podium.rollout.programs": ("make_sync", "make_extend", "make_copy", "make_decode"),
    "podium.train.step": ("make_score", "make_train_step"),
}


def planned(config: Config) -> dict[str, PhaseProgram]:
    mesh = make_mesh(config.mesh)
    return phase_programs(run_spec(config, DECODER, mesh), mesh)


class Letters:
    eos_tokens = (299,)
    special_tokens: Any = {}  # noqa: RUF012  # nothing writes it

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def make_engine(config: Config) -> RolloutEngine:
    mesh = make_mesh(config.mesh)
    spec = run_spec(config, DECODER, mesh).rollout
    rules = rollout_rules(spec.layout, DECODER, mesh)
    return RolloutEngine(Device(config.rollout, DECODER, rules, dtype=jnp.dtype(spec.dtype)), Letters())


def make_trainer(config: Config, reference: Any) -> Trainer:
    mesh = make_mesh(config.mesh)
    spec = run_spec(config, DECODER, mesh)
    return Trainer(
        spec.recipe,
        TrainSettings(DECODER, mesh, spec.update),
        make_run_optimizer(spec.optimizer, DECODER),
        shapes=RunShapes(spec.batch),
        schedule=spec.optimizer,
        folder=Path(),
        roles=[] if reference is None else [LoadedRole(role=spec.roles["reference"], params=reference)],
    )


@pytest.mark.parametrize(("module", "factory"), [(module, name) for module in FACTORIES for name in FACTORIES[module]])
def test_trainer_and_planner_break_together_where_a_factory_does(module, factory, monkeypatch):
    config = config_of()
    make_engine(config), make_trainer(config, {}), planned(config)  # all is well before

    def broken(*_: Any, **__: Any):
        raise NotImplementedError(factory)

    monkeypatch.setattr(f"{module}.{factory}", broken)
    with pytest.raises(NotImplementedError, match=factory):
        planned(config)
    with pytest.raises(NotImplementedError, match=factory):
        make_engine(config) if "rollout" in module else make_trainer(config, {})


class Recorded:
    """A program that keeps what it is given, as shapes, dtypes and shardings."""

    def __init__(self, calls: dict[str, tuple], name: str, program: Any) -> None:
        self.calls, self.name, self.program = calls, name, program

    def __call__(self, *arguments: Any) -> Any:
        name = self.name
        if name == "extend":
            name = f"prefill:{arguments[2].tokens.shape[1]}"
        if name == "decode":
            name = f"decode:{len(arguments[2].tokens)}"
        self.calls[name] = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments
        )
        return self.program(*arguments)

    def _cache_size(self) -> int:
        return self.program._cache_size()


@pytest.fixture(scope="module")
def run():
    """One step of a real engine and a real trainer: what their programs were called with, and what they hold."""
    config, calls = config_of(), {}
    rules = ShardingRules(make_mesh(config.mesh), TRAIN_AXES)
    engine = make_engine(config)
    made = engine.device.programs._asdict()
    programs = {name: Recorded(calls, name, program) for name, program in made.items()}
    engine.device.programs = EnginePrograms(**programs)
    params = init_params(0, param_specs(DECODER), rules)
    trainer = make_trainer(config, init_params(0, param_specs(DECODER), rules))
    optimizer = make_run_optimizer(run_spec(config, DECODER, rules.mesh).optimizer, DECODER)
    state = init_state(params, optimizer)
    engine.load(params)
    sampling = SamplingParams(max_new_tokens=8)
    prompts = [tuple(range(1, 1 + length)) for length in (3, 35)]
    requests = [Request(prompt=prompt, sampling=sampling, seed=0, completions=4) for prompt in prompts]
    engine.generate(requests)
    engine.warm_up()
    blank = np.zeros(4, np.int32), np.zeros(4, np.float32)
    samples = [single_answer(group=n, prompt=(1, 2), tokens=blank[0], sampled_logprobs=blank[1]) for n in range(2)]
    batch = shard_batch(make_batch(samples, trainer.sizes)[0], trainer.settings.computing)
    score = Recorded(calls, "score", trainer.score)
    step = Recorded(calls, "update", trainer.train_step)
    sizes = {"optimizer": held((state.step, state.opt_state)), "rollout_weights": held(engine.device.params)}
    scorers = [dataclasses.replace(scorer, program=score) for scorer in trainer.scorers]
    batch = with_scores(batch, scorers, state.params)
    step(state, batch)
    return SimpleNamespace(config=config, calls=calls, sizes=sizes, engine=engine, trainer=trainer)


def held(tree: Any) -> int:
    """Bytes of real arrays on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def test_what_a_run_gives_its_programs_is_what_the_planner_lowers_them_with(run):
    programs = planned(run.config)
    assert set(run.calls) == set(programs) - {"init"}
    for name, arguments in run.calls.items():
        leaves, expected = jax.tree.leaves(arguments), jax.tree.leaves(programs[name].arguments)
        assert [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in expected], name
        for given, wanted in zip(leaves, expected, strict=True):
            assert given.sharding.is_equivalent_to(wanted.sharding, given.ndim), (name, given, wanted)


def test_residents_are_what_is_held_beside_a_programs_own_arguments(run):
    programs = planned(run.config)
    parameters = held(run.trainer.scorers[-1].params)
    whole = {"parameters": parameters, "optimizer": run.sizes["optimizer"], "reference_weights": parameters}
    weights = run.sizes["rollout_weights"]
    batch = device_bytes(run.calls["update"][1])
    assert programs["init"].residents == {}
    assert programs["sync"].residents == {name: whole[name] for name in ("optimizer", "reference_weights")}
    for name in ("prefill:32", "prefill:40", "decode:16", "decode:8"):
        assert programs[name].residents == whole
    assert programs["copy"].residents == whole | {"rollout_weights": weights}
    anchor = {"reference_weights": parameters}
    assert programs["update"].residents == anchor | {"batch": batch}  # of the other of two minibatches
    scored = 2 * batch - device_bytes(programs["score"].arguments[1])
    assert programs["score"].residents == anchor | {"optimizer": whole["optimizer"], "batch": scored}


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor"])
def test_the_closed_form_says_the_same_of_what_stays(optimizer):
    config = config_of(train={"optimizer": {"name": optimizer}})
    programs, run = planned(config), Planned.of(config, CPU, DECODER).sizes
    estimated = residents(run, "sync")
    update = programs["update"]
    assert device_bytes(update.arguments[0].params) == estimated["parameters"]
    counts = 200  # bytes of counters
    assert 0 <= device_bytes(update.arguments[0].opt_state) - estimated["optimizer"] < counts
    assert "rollout_weights" not in update.residents
    assert update.residents["reference_weights"] == estimated["reference_weights"]


def test_a_recipe_that_scores_nothing_has_no_such_phase():
    config = config_of(algorithm={"kl": "none", "kl_coef": 0.0, "old_logprobs": "sampler", "minibatches": 1})
    programs = planned(config)
    rollout = ["prefill:32", "prefill:40", "copy", "decode:16", "decode:8"]
    assert list(programs) == ["init", "sync", *rollout, "update"]
    assert "reference_weights" not in programs["update"].residents
    assert "batch" not in programs["update"].residents


def with_teacher(spec: RunSpec, decoder: DecoderConfig) -> RunSpec:
    """The run with another architecture of its teacher."""
    return with_role(spec, dataclasses.replace(spec.roles["teacher"], decoder=decoder))


def with_role(spec: RunSpec, changed: Role) -> RunSpec:
    """The run with another role of this name, or with one more."""
    others = (role for role in spec.scoring_models if role.name != changed.name)
    return dataclasses.replace(spec, scoring_models=(*others, changed))


def test_a_teacher_is_a_program_of_its_own_and_its_weights_stay_beside_all_others():
    config = config_of(teacher={"model": "Qwen/Qwen3-0.6B"})
    mesh = make_mesh(config.mesh)
    spec = with_teacher(run_spec(config, DECODER, mesh), frozen_decoder(tiny(layers=3), "bfloat16"))
    programs = phase_programs(spec, mesh)
    assert list(programs)[-3:] == ["score", "teacher", "update"]
    weights, batch = programs["teacher"].arguments
    size = device_bytes(weights)
    assert size == frozen_bytes(RunSizes(spec=spec).of(spec.roles["teacher"]))
    assert {name for name, each in programs.items() if each.residents.get("teacher_weights") == size} == set(
        programs
    ) - {"init", "teacher"}
    assert programs["teacher"].residents["parameters"] == device_bytes(programs["update"].arguments[0].params)
    assert programs["teacher"].lower().out_info.shape == batch.tokens.shape


def test_a_teachers_hidden_states_are_part_of_the_batch_and_its_head_an_argument_of_the_update():
    config = config_of(teacher={"model": "Qwen/Qwen3-0.6B", "loss": "full"})
    mesh = make_mesh(config.mesh)
    spec = with_teacher(run_spec(config, DECODER, mesh), frozen_decoder(tiny(width=16), "bfloat16"))
    programs = phase_programs(spec, mesh)
    made = programs["teacher"].lower().out_info
    _, batch, frozen = programs["update"].arguments
    kept = batch.scores["teacher_hidden"]
    assert (made.shape, made.dtype) == (kept.shape, kept.dtype) == ((*batch.tokens.shape, 16), jnp.float32)
    head = frozen["taught_head"]
    assert head.shape == (DECODER.vocab, 16)
    held = programs["sync"].residents["teacher_weights"] - programs["update"].residents["teacher_weights"]
    assert held == device_bytes(head)
    programs["update"].lower()


@pytest.mark.parametrize("loss", ["sampled", "full"])
def test_a_teacher_that_is_the_base_of_the_adapters_takes_no_memory(loss):
    name = "Qwen/Qwen3-0.6B"
    config = config_of(model=name, lora={"rank": 2}, teacher={"model": name, "loss": loss})
    mesh, adapted = make_mesh(config.mesh), with_lora(DECODER, config.lora)
    spec = with_teacher(run_spec(config, adapted, mesh), frozen_decoder(DECODER, "bfloat16"))
    assert spec.roles["teacher"].weights == "policy_base"
    copied = with_role(spec, dataclasses.replace(spec.roles["teacher"], weights="frozen"))
    shared, apart = phase_programs(spec, mesh), phase_programs(copied, mesh)

    def total(each):
        return device_bytes(each.arguments) + sum(each.residents.values())

    sizes = [RunSizes(spec=each) for each in (spec, copied)]
    weights = frozen_bytes(sizes[0])
    assert {name: total(apart[name]) - total(shared[name]) for name in shared} == dict.fromkeys(shared, weights) | {
        "init": 0
    }
    assert sum(residents(sizes[1], "sync").values()) - sum(residents(sizes[0], "sync").values()) == weights
    assert {x.shape for x in shared["teacher"].arguments[0].values()} == {
        x.shape for x in apart["teacher"].arguments[0].values()
    }
    shared["update"].lower()


def test_a_teacher_with_prompts_of_its_own_is_planned_with_its_own_batch_beside_the_policy_s():
    own = {"prompt": "privileged", "template": "{question} {answer}", "max_prompt_tokens": 56}
    config = config_of(teacher={"model": "Qwen/Qwen3-0.6B", **own})
    mesh = make_mesh(config.mesh)
    spec = with_teacher(run_spec(config, DECODER, mesh), frozen_decoder(tiny(layers=3), "bfloat16"))
    programs = phase_programs(spec, mesh)
    _, batch = programs["teacher"].arguments
    _, scored, _ = programs["update"].arguments
    longer = 56 - config.rollout.max_prompt_tokens
    assert batch.tokens.shape == (*scored.tokens.shape[:2], scored.tokens.shape[2] + longer)
    assert programs["teacher"].residents["batch"] == 2 * device_bytes(scored), "of both minibatches"
    assert programs["teacher"].lower().out_info.shape == batch.tokens.shape


def test_a_critic_is_two_programs_and_its_state_stays_beside_all_others():
    config = config_of(algorithm={"recipe": "ppo"})
    mesh = make_mesh(config.mesh)
    spec = run_spec(config, DECODER, mesh)
    programs = phase_programs(spec, mesh)
    assert list(programs)[-3:] == ["values", "critic", "update"]
    (params, batch), (state, scored) = programs["values"].arguments, programs["critic"].arguments[:2]
    assert set(params) == set(state.params) == set(param_specs(scoring_decoder(DECODER)))
    held = {
        "critic_weights": device_bytes(state.params),
        "critic_optimizer": device_bytes((state.step, state.opt_state)),
    }
    assert {name for name, each in programs.items() if held.items() <= each.residents.items()} == set(programs) - {
        "init",
        "values",
        "critic",
    }
    assert programs["values"].residents["critic_optimizer"] == held["critic_optimizer"]
    assert "critic_weights" not in programs["critic"].residents
    for name in ("values", "critic"):
        assert programs[name].residents["parameters"] == device_bytes(programs["update"].arguments[0].params)
    assert programs["values"].lower().out_info.shape == batch.tokens.shape
    assert {VALUES, RETURNS} <= set(scored.scores)
    after, metrics = programs["critic"].lower().out_info
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
    assert {"loss", "clipped", "gradient_norm", "broken_row"} <= set(metrics)


def texts(config: Config) -> dict[str, tuple[str, dict[str, int]]]:
    """The text of every program, and what a device holds beside it."""
    return {name: (each.lower().as_text(), dict(each.residents)) for name, each in planned(config).items()}


@pytest.fixture(scope="module")
def lowered():
    return texts(config_of())


@pytest.mark.long
def test_rows_change_the_update_and_the_score_alone(lowered):
    many = texts(config_of(train={"rows_per_device": 2}))
    assert {name for name in many if lowered[name] != many[name]} == {"update", "score"}


def test_pages_change_the_rollouts_programs_alone(lowered):
    many = texts(config_of(rollout={"cache_tokens": 8 * 64 * 9}))
    assert {name for name in many if lowered[name][0] != many[name][0]} == {
        "prefill:32", "prefill:40", "copy", "decode:16", "decode:8",
    }  # fmt: skip


def test_what_does_not_divide_is_the_engines_own_error():
    with pytest.raises(ValueError, match=r"rollout\.slots is 12 and is split over 8 devices"):
        planned(config_of(rollout={"slots": 12}))


def test_bytes_are_those_of_one_device():
    rules = ShardingRules(make_mesh("auto"), TRAIN_AXES)
    whole = jax.ShapeDtypeStruct((16, 3), jnp.bfloat16, sharding=rules.sharding())
    split = jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=rules.sharding("batch", None))
    assert device_bytes({"whole": whole, "split": split}) == 16 * 3 * 2 + 2 * 3 * 4


def test_a_reward_model_is_a_program_beside_the_rollouts_arrays_and_its_weights_stay_beside_all_others():
    config = config_of()
    mesh = make_mesh(config.mesh)
    spec = run_spec(config, DECODER, mesh)
    graded = ConversationSpec(
        part="helpful",
        chat_template=None,
        template_date=None,
        row_tokens=64,
        rows_per_device=1,
        standardise="none",
    )
    judge = Role(
        name="reward:helpful",
        model="none",
        decoder=frozen_decoder(scoring_decoder(tiny(layers=3)), "bfloat16"),
        weights="frozen",
        scores=None,
        phase="reward:helpful",
        conversations=graded,
    )
    other = dataclasses.replace(
        judge,
        name="reward:harmless",
        phase="reward:harmless",
        decoder=frozen_decoder(scoring_decoder(DECODER), "int8"),
        conversations=dataclasses.replace(graded, part="harmless"),
    )
    spec = dataclasses.replace(spec, rollout=dataclasses.replace(spec.rollout, grading_models=(judge, other)))
    programs, sizes = phase_programs(spec, mesh), RunSizes(spec=spec)
    _, batch = programs["reward:helpful"].arguments
    assert batch.tokens.shape == (1, spec.batch.devices, 64)
    assert programs["reward:helpful"].lower().out_info.shape == batch.tokens.shape
    held = {name: device_bytes(programs[f"reward:{name}"].arguments[0]) for name in ("helpful", "harmless")}
    assert held == {name: frozen_bytes(sizes.of(spec.roles[f"reward:{name}"])) for name in held}
    assert residents(sizes, "sync")["reward_weights"] == sum(held.values())
    beside = {name: each.residents.get("reward_weights") for name, each in programs.items() if name != "init"}
    assert beside == dict.fromkeys(beside, sum(held.values())) | {
        "reward:helpful": held["harmless"],
        "reward:harmless": held["helpful"],
    }
    cache = programs["copy"].arguments[0]
    rollout = {"kv_cache": device_bytes(cache), "rollout_weights": programs["copy"].residents["rollout_weights"]}
    assert rollout.items() <= programs["reward:helpful"].residents.items()
    assert programs["reward:helpful"].residents["parameters"] == programs["decode:16"].residents["parameters"]
