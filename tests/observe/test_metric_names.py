import re
from pathlib import Path

import numpy as np
import pytest

from podium.observe.metric_table import MEAN_MAX, METRICS, SPREAD, Metric
from podium.observe.metrics import find_metric, named
from tools.metrics_page import find_sources, metrics_page

ALL = [metric for metrics in METRICS.values() for metric in metrics]
ROOT = Path(__file__).parents[2]


def test_the_page_in_docs_is_made_from_the_list():
    again = "python -m tools.metrics_page > docs/metrics.md"
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_page(), f"run {again}"


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_every_listed_metric_is_written_somewhere(metric):
    assert find_sources(metric), f"nothing measures {metric.name!r}; give it a reader, or take it off the list"


def test_no_name_is_listed_twice():
    names = [name for metric in ALL for name in metric.names]
    assert len(names) == len(set(names))


def test_every_definition_is_a_sentence_for_a_table():
    for metric in ALL:
        assert metric.definition.endswith("."), metric.name
        assert "\n" not in metric.definition, metric.name


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("train-reward/total/std", "train-reward/total"),
        ("train-reward/func/correct/mean", "train-reward/func/<part>/mean"),
        ("eval/accuracy", "eval/accuracy"),
        ("eval/gsm8k/accuracy", "eval/<task>/accuracy"),
        ("eval/reasoning-gym:chess/accuracy_interval/low", "eval/<task>/accuracy_interval"),
    ],
)
def test_a_written_name_is_found_in_the_list(name, entry):
    metric = find_metric(name)
    assert metric is not None
    assert metric.name == entry


@pytest.mark.parametrize(
    "name", ["train-reward/total", "train-reward/total/median", "eval/a/b/accuracy", "time/train/Xs", "step"]
)
def test_a_name_that_is_not_listed_is_not_found(name):
    assert find_metric(name) is None


def test_names_of_metrics_stand_in_observe_alone():
    """What trains and what rolls out measure; `podium.observe` names."""
    sections = {name.partition("/")[0] for metric in ALL for name in metric.names}
    written = re.compile(f"[\"'](?:{'|'.join(map(re.escape, sections))})/[a-z]")
    files = [path for part in ("train", "rollout", "algorithms") for path in (ROOT / "podium" / part).glob("*.py")]
    assert [path.name for path in files if written.search(path.read_text())] == []


def test_values_get_their_complete_names():
    array = np.array([1, 2, 3], np.float32)
    spread, longest = Metric("r", "", "", parts=SPREAD), Metric("n", "", "", parts=MEAN_MAX)
    expected = {"r/mean": 2.0, "r/std": np.sqrt(2 / 3), "r/min": 1.0, "r/max": 3.0}
    assert named([(spread, array)]) == pytest.approx(expected)
    assert named([(longest, np.array([3, 5]))]) == {"n/mean": 4.0, "n/max": 5.0}
    assert named([(Metric("f/<part>/mean", "", ""), {"correct": 0.5})]) == {"f/correct/mean": 0.5}
    assert named([(Metric("i", "", "", parts=("low", "high")), (0.1, 0.2))]) == {"i/low": 0.1, "i/high": 0.2}
    assert named([(Metric("a", "", ""), None), (Metric("b", "", ""), 0)]) == {"b": 0}
