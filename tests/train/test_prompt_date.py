"""A chat template that shows the date shows that of the run's beginning, on the next day and in evaluations too."""

import datetime
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import SHORT, assert_same_run, make_config, metrics_of

from podium.api.run_handle import load_run
from podium.config.errors import ConfigError
from podium.config.schema import Config
from podium.files import RunFileError
from podium.observe.run_dir import read_config
from podium.rollout.engine import RolloutEngine
from podium.settings import load_settings
from podium.train.loop import train
from podium.train.setup import make_model

pytestmark = pytest.mark.usefixtures("one_device")
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}{{ strftime_now('%d') | int }}"


@pytest.fixture
def on_day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the day of January 2031 that it is."""

    def set_day(day: int) -> None:
        class Date(datetime.date):
            @classmethod
            def today(cls) -> datetime.date:
                return datetime.date(2031, 1, day)

        class Moment(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
                return datetime.datetime(2031, 1, day, 12)

        clock = types.SimpleNamespace(date=Date, datetime=Moment, time=datetime.time)
        for module in ("podium.observe.run_dir", "podium.models.text.template"):
            monkeypatch.setattr(f"{module}.datetime", clock)

    return set_day


@pytest.fixture
def dated(tiny_model: Path, tmp_path: Path) -> Callable[..., Config]:
    """Configs of runs whose template shows the day."""
    (tmp_path / "dated.jinja").write_text(TEMPLATE)

    def config(**changes: object) -> Config:
        quiet = {"eval": {"at_start": False, "at_end": False, "questions": 2}, "steps": 2}
        settings = {**SHORT, **quiet, "chat_template": str(tmp_path / "dated.jinja"), **changes}
        return make_config(tiny_model, tmp_path, **settings)

    return config


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The prompts that engines have been given."""
    seen: list[tuple[int, ...]] = []
    generate = RolloutEngine.generate

    def watched(self, requests, *arguments):
        seen.extend(request.prompt for request in requests)
        return generate(self, requests, *arguments)

    monkeypatch.setattr(RolloutEngine, "generate", watched)
    return seen


def test_a_run_that_goes_on_past_midnight_is_the_run_that_it_was(dated, on_day, tmp_path, prompts):
    on_day(1)
    assert train(dated(name="whole"), plain=True) == 0
    first = make_model(read_config(tmp_path / "whole")).tokenizer.encode_chat("What is 3", None)
    train(dated(name="cut", steps=1), plain=True)
    on_day(2)
    assert train(dated(name="cut"), plain=True) == 0
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert read_config(tmp_path / "cut").chat_template_date == "2031-01-01"
    assert train(dated(name="later", steps=1), plain=True) == 0
    assert metrics_of(tmp_path / "later")[0] != metrics_of(tmp_path / "whole")[0], "the template does not show the day"
    prompts.clear()
    run = load_run(tmp_path / "whole")
    run.generate(["What is 3"], max_new_tokens=2)
    assert prompts == [tuple(first)]
    prompts.clear()
    run.evaluate()
    assert len({prompt[-1] for prompt in prompts}) == 1 and prompts[0][-1] == first[-1]


def test_the_date_of_a_run_is_kept_unless_it_has_not_begun(dated, on_day, tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise RuntimeError("before the first step")

    on_day(1)
    with monkeypatch.context() as patch:
        patch.setattr("podium.sampling.sampler.Sampler.answer", fail)
        with pytest.raises(RuntimeError):
            train(dated(), plain=True)
    on_day(2)
    assert train(dated(steps=1), plain=True) == 0
    assert read_config(tmp_path / "run").chat_template_date == "2031-01-02"
    with pytest.raises(RunFileError, match="chat_template_date: '2031-01-02' there, '2031-01-03' now"):
        train(dated(chat_template_date="2031-01-03"), plain=True)


def test_a_date_is_set_as_a_date(tmp_path):
    (tmp_path / "a.yaml").write_text("model: demo\ntasks: [{name: arithmetic}]\nchat_template_date: 2024-07-26\n")
    assert load_settings([tmp_path / "a.yaml"], [], {}).config.chat_template_date == "2024-07-26"
    with pytest.raises(ConfigError, match="chat_template_date: 'yesterday' is not a date; write it as 2026-01-31"):
        load_settings([tmp_path / "a.yaml"], ["chat_template_date=yesterday"], {})
