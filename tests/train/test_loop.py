import contextlib
import dataclasses
import inspect
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from tiny_runs import SHORT, STEPS, make_config, metrics_of, read_records, rollout_spec, trained

from podium import cli
from podium.observe.alarms import SamplerGapError
from podium.observe.metrics import find_metric
from podium.observe.run_dir import read_config
from podium.rollout.engine import RolloutEngine
from podium.rollout.scheduler import Scheduler
from podium.sampling.sampler import Sampler
from podium.train.loop import train
from podium.train.setup import load_weights, make_model
from podium.train.trainer import DivergedError

pytestmark = pytest.mark.usefixtures("one_device")


def test_a_run_leaves_its_records(undisturbed):
    assert read_config(undisturbed).steps == STEPS
    assert yaml.safe_load((undisturbed / "config.yaml").read_text())["group_size"] == 4
    assert [record["step"] for record in read_records(undisturbed / "metrics.jsonl")] == [0, 1, 2, 2, 3, 4, 4]
    lengths = read_records(undisturbed / "lengths.jsonl")
    assert [record["step"] for record in lengths] == [1, 2, 3, 4]
    assert {(len(each["prompt_lengths"]), len(each["completion_lengths"])) for each in lengths} == {(4, 16)}
    samples = read_records(undisturbed / "samples.jsonl")
    assert {(each["step"], each["split"]) for each in samples} == {
        *((step, "train") for step in (1, 2, 3, 4)),
        *((step, "eval") for step in (0, 2, 4)),
    }
    assert {len(each["completions"]) for each in samples if each["split"] == "train"} == {4}
    assert sum(each["split"] == "train" for each in samples) == 8  # every second group of four


def test_a_run_ends_with_a_summary(undisturbed):
    summary = json.loads((undisturbed / "summary.json").read_text())
    evaluated = {each["step"]: each["eval/accuracy"] for each in metrics_of(undisturbed) if "eval/accuracy" in each}
    assert (summary["steps"], summary["name"]) == (STEPS, "run")
    assert summary["wall_s"] > 0
    assert summary["cpu_s"] > 0
    assert summary["eval"]["initial"] == {"step": 0, "accuracy": evaluated[0]}
    assert summary["eval"]["final"] == {"step": STEPS, "accuracy": evaluated[STEPS]}
    assert {"python", "jax", "optax"} <= set(summary["versions"])
    assert "commit" in summary


def test_every_metric_of_a_run_is_documented(undisturbed):
    names = {name for record in read_records(undisturbed / "metrics.jsonl") for name in record} - {"step"}
    assert sorted(name for name in names if find_metric(name) is None) == []
    assert {"time/wall_s", "rollout/decode_steps", "policy/logprob_gap/max", "eval/arithmetic/pass_at_k"} <= names


def test_metrics_of_a_step_are_about_the_same_step(undisturbed):
    lengths = read_records(undisturbed / "lengths.jsonl")
    for record, length in zip(trained(undisturbed), lengths, strict=True):
        completions = length["completion_lengths"]
        assert record["rollout/completion_tokens"] == record["tokens/completion"] == sum(completions)
        assert record["rollout/prompt_tokens"] == sum(length["prompt_lengths"])
        assert record["train-seq_len/completion/mean"] == pytest.approx(np.mean(completions))
        assert record["time/train/step_s"] >= record["time/train/rollout_s"] + record["time/train/update_s"]
        assert record["policy/logprob_gap/max"] < 1e-4


def test_what_is_timed_in_a_run_takes_no_longer_than_the_run(undisturbed):
    wall_s = json.loads((undisturbed / "summary.json").read_text())["wall_s"]
    timed = [
        (name, value)
        for record in read_records(undisturbed / "metrics.jsonl")
        for name, value in record.items()
        if (metric := find_metric(name)) is not None and metric.unit == "s" and "cpu" not in name
    ]
    assert {"time/train/score_s", "time/train/checkpoint_s", "time/eval/step_s"} <= {name for name, _ in timed}
    assert [(name, value) for name, value in timed if not 0 <= value <= wall_s] == []


def test_programs_are_compiled_in_the_first_step_only(undisturbed):
    assert [record["rollout/compilations"] for record in trained(undisturbed)][1:] == [0] * (STEPS - 1)


def test_numbers_that_are_not_finite_stop_the_run_and_leave_the_batch(tiny_model, tmp_path):
    optimizer = {"name": "sgd", "learning_rate": 1e30, "clip_norm": 0.0}
    config = make_config(
        tiny_model,
        tmp_path,
        steps=30,
        eval={"at_start": False},
        train={"optimizer": optimizer},
        algorithm={"updates_per_batch": 2},  # the second one meets what the first has made
    )
    with pytest.raises(DivergedError, match=r"update \d+ diverged: loss .* its batch is in"):
        train(config, plain=True)
    assert len(list((tmp_path / "run").glob("diverged-update-*.npz"))) == 1


def test_a_run_stops_where_sampler_and_trainer_are_too_far_apart(tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path, rollout={"dtype": "bfloat16", "max_logprob_gap": 1e-9})
    with pytest.raises(SamplerGapError, match=r"of step 1 is .* nat, above rollout\.max_logprob_gap 1e-09"):
        train(config, plain=True)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["policy/logprob_gap/mean"] > 1e-9


def test_a_group_is_graded_while_others_are_still_decoded(tiny_model, tmp_path, monkeypatch):
    """Four groups of four pass through four slots one after the other."""
    config, events, retire = make_config(tiny_model, tmp_path, rollout={"slots": 4}), [], Scheduler.retire
    model = make_model(config)
    monkeypatch.setattr(Scheduler, "retire", lambda self, slot: (events.append("ended"), retire(self, slot)))
    with contextlib.closing(
        Sampler(rollout_spec(config, model), model.decoder, model.tokenizer, model.mesh)
    ) as rollouts:
        submit = rollouts.grader.submit
        monkeypatch.setattr(rollouts.grader, "submit", lambda items: (events.append("graded"), submit(items))[1])
        rollouts.load(load_weights(model, None))
        groups, _ = rollouts.answer(rollouts.feed.next(4))
    graded = [index for index, event in enumerate(events) if event == "graded"]
    assert len(graded) == 4
    assert events[graded[0] :].count("ended") == 12
    assert [len(group.rewards) for group in groups] == [4] * 4


def test_groups_of_equal_rewards_are_replaced_by_others_up_to_a_bound(run_of):
    """A random model earns nothing in most groups: every round of refills is needed, and not enough."""
    run = run_of(steps=2, algorithm={"recipe": "dapo", "mask_truncated": False, "max_refills": 2})
    for record, lengths in zip(trained(run), read_records(run / "lengths.jsonl"), strict=True):
        drawn = len(lengths["prompt_lengths"])
        assert record["rollout/refill_rounds"] == 2
        assert 4 < drawn <= 12
        assert record["group/dropped"] == round(drawn * record["group/equal_rewards_fraction"])
        assert record["group/dropped"] > 4
        assert record["rollout/prompt_tokens"] == sum(lengths["prompt_lengths"])


def test_eight_devices_train_as_one_does(tiny_model, tmp_path, undisturbed):
    never = {"at_start": False, "at_end": False}
    settings = {"mesh": "fsdp:2,sp:2,tp:2", "train": {"row_tokens": 20}, "eval": never, **SHORT}
    config = make_config(tiny_model, tmp_path, steps=1, **settings)
    assert train(config, plain=True) == 0
    found, expected = trained(tmp_path / "run")[0], trained(undisturbed)[0]
    assert found["train-reward/total/mean"] == expected["train-reward/total/mean"]
    for name in ("optimizer/gradient_norm", "policy/entropy", "train-other/loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6)


def questions_in(folder: Path, lengths: list[int]) -> dict[str, Any]:
    """A task of questions of so many words each."""
    rows = [{"question": " ".join(["What"] * length), "answer": "1"} for length in lengths]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text(json.dumps({"question": "What is 1", "answer": "1"}) + "\n")
    return {"tasks": [{"name": "jsonl", "path": str(folder)}]}


def test_prompts_that_are_too_long_are_skipped_and_counted(run_of, tmp_path):
    """One of two prompts fits: a step of four skips three or four, more than an epoch holds."""
    run = run_of(**questions_in(tmp_path, [3, 20]), steps=2)
    records = trained(run)
    assert [record["train-seq_len/prompt/max"] for record in records] == [3, 3]
    assert sum(record["rollout/dropped_prompts"] for record in records) in (7, 8)


def test_no_prompt_that_fits_is_an_error(tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path, **questions_in(tmp_path, [17, 20, 30]))
    with pytest.raises(
        ValueError, match=r"none of the 3 training prompts of jsonl fits: .*17 to 30 tokens; set it to 32"
    ):
        train(config, plain=True)


def test_a_prompt_that_is_too_long_is_an_error_where_the_config_says_so(tiny_model, tmp_path):
    task = questions_in(tmp_path, [20, 20])
    config = make_config(tiny_model, tmp_path, **task, rollout={"long_prompts": "error"})
    with pytest.raises(ValueError, match=r"none of the 2 training prompts of jsonl fits: .* 20 tokens"):
        train(config, plain=True)


def test_slots_that_do_not_divide_are_an_error_and_leave_no_grader_behind(tiny_model, tmp_path):
    settings = {"mesh": "1,8,1", "rollout": {"slots": 12}, "grading": {"workers": 1}}
    before = children()
    with pytest.raises(ValueError, match=r"rollout\.slots is 12 and is split over 8 devices"):
        train(make_config(tiny_model, tmp_path, **settings), plain=True)
    assert children() <= before


def test_a_mesh_that_splits_no_row_evenly_is_an_error_before_anything_is_loaded(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"rows of 19 tokens cannot be split evenly by sp:2; set train.row_tokens to"):
        train(make_config(tiny_model, tmp_path, mesh="fsdp:4,sp:2"), plain=True)


def children() -> set[str]:
    """Process ids of this process's children; none where the system does not say."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return set(path.read_text().split()) if path.exists() else set()


def test_the_schedule_follows_the_run_where_steps_have_nothing_to_train_on(tiny_model, tmp_path, monkeypatch):
    """Steps 2 and 4 of 5 earn equal rewards: no update, and the last step's rate is the schedule's last."""
    answer, steps = Sampler.answer, iter([1, 0, 1, 0, 1])

    def some_without_difference(self, prompts, settings=None):
        groups, stats = answer(self, prompts, settings)
        if settings is None:
            earned = [1.0, 0.0, 0.0, 0.0] if next(steps) else [0.0] * 4
            groups = [
                dataclasses.replace(
                    group,
                    rewards=[dataclasses.replace(each, total=x) for each, x in zip(group.rewards, earned, strict=True)],
                )
                for group in groups
            ]
        return groups, stats

    monkeypatch.setattr(Sampler, "answer", some_without_difference)
    settings: dict[str, Any] = {
        "steps": 5,
        "algorithm": {"zero_variance": "drop"},
        "eval": {"at_start": False, "at_end": False},
        "train": {"optimizer": {"learning_rate": 1e-3, "schedule": "linear"}},
    }
    train(make_config(tiny_model, tmp_path, **settings), plain=True)
    lines = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [line["optimizer/updates"] for line in lines] == [1, 0, 1, 0, 1]
    rates = [line["optimizer/learning_rate"] for line in lines]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0], abs=1e-9)
    moved = [line.get("optimizer/update_norm") for line in lines]
    assert moved[2] is not None and moved[2] > 0
    assert moved[-1] == 0.0  # the rate that the optimizer itself used
    assert all("rollout/entropy" in line for line in lines)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps_without_update"] == 2


def test_between_the_command_and_the_compiled_decode_there_are_eight_calls(tiny_model, tmp_path, monkeypatch):
    """Podium's own functions on the stack below `podium.cli.train`, itself included, each time a decode is called."""
    depths: list[list[str]] = []
    init = RolloutEngine.__init__

    def with_watched_decode(self, *arguments, **options):
        init(self, *arguments, **options)
        decode = self.device.programs.decode

        def watched(*call):
            frames = [
                frame.frame.f_code.co_qualname
                for frame in inspect.stack(context=0)[1:]
                if str(frame.frame.f_globals.get("__name__", "")).startswith("podium.")
            ]
            depths.append(frames[: frames.index("train", frames.index("train") + 1) + 1])
            return decode(*call)

        watched._cache_size = decode._cache_size  # pyright: ignore[reportFunctionMemberAccess]
        self.device.programs = self.device.programs._replace(decode=watched)

    monkeypatch.setattr(RolloutEngine, "__init__", with_watched_decode)
    config = make_config(tiny_model, tmp_path, steps=1, eval={"at_start": False, "at_end": False})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with pytest.raises(typer.Exit):
        cli.train([file], plain=True)
    assert depths
    assert {tuple(frames) for frames in depths} == {
        (
            "Device.decode",
            "RolloutEngine.step",
            "RolloutEngine.generate",
            "Sampler.answer",
            "Sampler.next",
            "run_steps",
            "train",
            "_train",
            "train",
        )
    }
