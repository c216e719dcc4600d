import itertools
import json
import random
import re
import sys
import time

import pytest
from made_run import CONFIG, make_run, sample

from podium.observe.metrics import find_metric
from podium.observe.report.charts import CURVES, PHASES, WORK
from podium.observe.report.report_page import make_page, report_object, write_report
from podium.observe.report.sample_pages import HEAT_ROWS, SAMPLE_BYTES

HOSTILE = (
    "</script><script>document.title='pwned'</script>",
    "<img src=x onerror=alert(1)>",
    "<!-- ]]> &lt; \u202e right to left \x1b[31mred\x1b[0m \u2028",
    "x" * 1_000_000,
    "\ud800 lone",
)


def data_of(page: str):
    """The JSON object of a page, and the page without it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1]), page.replace(found[1], "")


def test_a_page_holds_the_run_s_true_numbers(tmp_path):
    run = make_run(tmp_path / "run", samples=[sample(1), sample(40, rewards=(1.0, 1.0))])
    (content,) = data_of(make_page(report_object([run]), "plotly"))[0]["runs"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name, series in content["metrics"].items():
        written = [(line["step"], line[name]) for line in lines if name in line]
        assert series["steps"] == [step for step, _ in written]
        assert series["values"] == pytest.approx([value for _, value in written], rel=1e-5)
    assert content["headline"]["tasks"][0]["last"] == [40, 0.9]
    assert content["headline"]["steps"] == 40
    assert content["headline"]["wall_s"] == 400.0
    assert content["headline"]["generated_tokens"] == 40 * 640
    assert content["headline"]["padding"] == 0.1
    assert ["prompts_per_step", "8", "32"] in content["settings"]
    assert not any(key == "seed" for key, *_ in content["settings"])  # is the default
    assert content["problems"] == []


def test_texts_are_data_and_never_markup(tmp_path):
    samples = [sample(step, text=text, prompt=text[:50]) for step, text in enumerate(HOSTILE)]
    run = make_run(tmp_path / "run", samples=samples, config={"name": HOSTILE[0]})
    content, rest = data_of(make_page(report_object([run]), "plotly"))
    assert "pwned" not in rest and "onerror=alert" not in rest
    shown = [each["text"] for record in content["runs"][0]["samples"] for each in record["completions"]]
    assert HOSTILE[0] in shown and HOSTILE[1] in shown
    assert max(map(len, shown)) < 5_000
    assert "default-src 'none'" in rest  # nothing is loaded, whatever a text says


def test_a_conversation_is_shown_turn_by_turn(tmp_path):
    talk = [{"role": "assistant", "content": "a" * 9_000}, {"role": "tool", "name": "search", "content": HOSTILE[0]}]
    record = sample(1)
    record["completions"][0] |= {"messages": talk * 100, "turn_rewards": [0.5] * 100}
    content, rest = data_of(make_page(report_object([make_run(tmp_path / "run", samples=[record])]), "plotly"))
    first, second = content["runs"][0]["samples"][0]["completions"]
    assert [each["role"] for each in first["messages"]] == ["assistant", "tool"] * 32 and "messages" not in second
    assert len(first["messages"][0]["content"]) < 5_000 and first["messages"][1]["content"] == HOSTILE[0]
    assert first["turn_rewards"][0] == 0.5 and "pwned" not in rest


def test_the_page_s_script_makes_no_markup_of_strings(tmp_path):
    page = make_page(report_object([make_run(tmp_path / "run")]), "")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page)
    assert not re.search(r"(src|href)=\"?https?:", page)


def test_every_metric_that_is_drawn_exists():
    names = [name for chart in (*CURVES, PHASES, *WORK) for name in chart.metrics]
    for name in names:
        assert find_metric(name.replace("*", "some")) or find_metric(name.replace("func/*", "func/some/mean")), name


def test_what_is_damaged_is_said_and_the_rest_is_shown(tmp_path):
    run = make_run(tmp_path / "run", samples=[sample(1), sample(2)])
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[7] = lines[7][: len(lines[7]) // 2] + "\n"
    (run / "metrics.jsonl").write_text("".join(lines) + lines[3] + '{"step": 41, "tr')
    (run / "samples.jsonl").write_text((run / "samples.jsonl").read_text()[:-30] + '\n["no", "sample"]\n{"step": 3}\n')
    (run / "summary.json").unlink()
    (run / "config.yaml").write_text("a: [")
    (content,) = report_object([run])["runs"]
    text = "\n".join(content["problems"])
    assert "metrics.jsonl: 2 lines are damaged (line 8, 44)" in text
    assert "step numbers decrease 1 times" in text
    assert re.search(r"metrics.jsonl: step \d+ is missing", text)
    assert "samples.jsonl: 2 lines are damaged" in text and "samples.jsonl: 1 lines are not samples" in text
    assert "summary.json is missing" in text and "config.yaml is damaged" in text
    assert content["name"] == "run" and len(content["metrics"]["rollout/entropy"]["steps"]) == 39


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run's folder; give one, such as runs/demo"):
        report_object([tmp_path])


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ValueError, match=r"pip install 'podium-rl\[report\]'"):
        write_report([make_run(tmp_path / "run")], tmp_path / "report.html")


def test_the_same_prompt_is_shown_at_each_of_its_steps_where_there_is_no_room_for_all(tmp_path):
    filler = "word " * 700
    samples = [sample(step, prompt=str(step), text=filler) for step in range(1000)]
    samples += [sample(step, prompt="often", text=filler) for step in range(0, 1000, 50)]
    (content,) = report_object([make_run(tmp_path / "run", samples=samples)])["runs"]
    often = [each["step"] for each in content["samples"] if each["prompt"] == "often"]
    assert often == list(range(0, 1000, 50))
    steps = sorted({each["step"] for each in content["samples"]})
    assert content["recorded_samples"] == 1020 and len(steps) < 1000
    assert steps[0] == 0 and max(b - a for a, b in itertools.pairwise(steps)) < 60
    assert len(json.dumps(content["samples"])) < 1.2 * SAMPLE_BYTES


def test_prompts_that_come_back_are_rows_of_the_heat_map(tmp_path):
    samples = [sample(step, prompt=str(p), rewards=(float(p < 2), 0.0)) for step in range(1, 11) for p in range(4)]
    (content,) = report_object([make_run(tmp_path / "run", samples=samples)])["runs"]
    heat = content["heat"]
    assert heat["by_prompt"] and len(heat["rows"]) == 4 <= HEAT_ROWS
    row = dict(zip(heat["rows"], heat["values"], strict=True))
    assert row["sums: 0"][1:] == [0.5] * 10 and row["sums: 3"][1:] == [0.0] * 10


def test_prompts_that_are_seen_once_are_put_together_by_task(tmp_path):
    samples = [sample(step, prompt=str(step)) for step in range(1, 201)]
    (content,) = report_object([make_run(tmp_path / "run", samples=samples)])["runs"]
    assert content["heat"]["rows"] == ["sums"] and not content["heat"]["by_prompt"]
    assert len(content["heat"]["steps"]) <= 50 and content["heat"]["steps"][-1] == 200


def test_seeds_are_put_together_and_a_difference_is_judged(tmp_path):
    def one(name, seed, rate, last):
        config = {**CONFIG, "name": name, "seed": seed, "train": {"optimizer": {"learning_rate": rate}}}
        return make_run(tmp_path / name, config=config, accuracies={0: 0.1, 40: last})

    runs = [one(f"a{seed}", seed, 1e-5, 0.9 + seed / 100) for seed in range(3)]
    runs += [one(f"b{seed}", seed, 1e-6, 0.5 + seed / 100) for seed in range(3)]
    found = report_object(runs)["comparison"]
    assert found["groups"] == [[0, 1, 2], [3, 4, 5]] and found["metric"] == "eval/accuracy"
    assert found["differences"]["train.optimizer.learning_rate"] == [1e-5] * 3 + [1e-6] * 3
    best, other = found["ranking"]
    assert best["runs"] == [0, 1, 2] and best["score"] == pytest.approx(0.91)
    assert best["interval"][0] < 0.91 < best["interval"][1]
    assert best["against_next"].startswith("real") and other["against_next"] is None


def test_settings_of_a_task_are_named_one_by_one(tmp_path):
    def one(name, weight):
        task = {"name": "jsonl", "weight": 1.0, "rewards": {"correct": 1.0, "short": weight}}
        return make_run(tmp_path / name, config={"name": name, "tasks": [task]})

    content = report_object([one("a", 0.1), one("b", 0.2)])
    assert content["comparison"]["differences"] == {"tasks.0.rewards.short": [0.1, 0.2]}
    settings = {key: (value, default) for key, value, default in content["runs"][0]["settings"]}
    assert settings["tasks.0.name"] == ('"jsonl"', "(none)") and settings["tasks.0.rewards.short"][0] == "0.1"
    assert "tasks.0.weight" not in settings  # is the default


def test_equal_runs_are_not_called_different(tmp_path):
    draw = random.Random(1)
    runs = []
    for kind, rate in (("a", 1e-5), ("b", 1e-6)):
        for seed in range(3):
            config = {**CONFIG, "name": f"{kind}{seed}", "seed": seed, "train": {"optimizer": {"learning_rate": rate}}}
            runs.append(
                make_run(tmp_path / f"{kind}{seed}", config=config, accuracies={0: 0.1, 40: draw.uniform(0.6, 0.7)})
            )
    assert report_object(runs)["comparison"]["ranking"][0]["against_next"].startswith("not shown")


def test_a_long_run_makes_a_small_page_in_seconds(tmp_path):
    text = "some answer with a number 12 " * 10
    samples = [
        sample(step, prompt=str(step * 4 + n), rewards=(1.0, 0.0) * 4, text=text)
        for step in range(1, 501)
        for n in range(4)
    ]
    run = make_run(tmp_path / "run", steps=2000, samples=samples, accuracies={0: 0.1, 2000: 0.9})
    start = time.process_time()
    page = make_page(report_object([run]), "")
    assert time.process_time() - start < 15
    assert len(page) < 6_000_000


def test_the_mean_over_the_tasks_is_shown_where_it_says_more_than_a_task(tmp_path):
    def accuracy_lines(run):
        content = report_object([run])
        lines = next(chart for chart in content["curves"] if chart["title"] == "Held-out accuracy")["lines"]
        return [task["task"] for task in content["runs"][0]["headline"]["tasks"]], [line["label"] for line in lines]

    one = make_run(tmp_path / "one", config={"eval": {"samples": 4}})
    with (one / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "eval/sums/avg_at_k": 0.5, "eval/sums/pass_at_k": 0.75}\n')
    assert accuracy_lines(one) == (["sums"], ["sums accuracy", "sums avg@4", "sums pass@4"])
    two = make_run(tmp_path / "two")
    with (two / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "eval/accuracy": 0.7, "eval/products/accuracy": 0.5}\n')
    assert accuracy_lines(two) == (["sums", "products"], ["accuracy", "sums accuracy", "products accuracy"])
    mean = make_run(tmp_path / "mean", accuracies={})
    with (mean / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "eval/accuracy": 0.7}\n')
    assert accuracy_lines(mean) == ([""], ["accuracy"])
