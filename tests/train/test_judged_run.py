"""Runs whose answers a judge on a server grades."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_server import Server, chat_server
from tiny_runs import assert_same_run, config_of, read_records, trained

from podium.observe.run_dir import read_config
from podium.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")
KEY = "sk-verysecretkey0123456789"


def by_length(body: dict[str, Any]) -> str:
    """A grade that depends on the answer alone."""
    answer = json.loads(body["messages"][1]["content"])["conversation"][-1]["content"]
    return "I cannot say" if not answer else f"SCORE: {len(answer) % 7}"


def settings(server: Server) -> dict[str, Any]:
    judge = {"name": "quality", "url": server.url, "model": "j", "rubric": "Long is good.", "key_env": "JUDGE_KEY"}
    return {
        "grading": {"workers": 0, "judges": [judge]},
        "tasks": [{"name": "arithmetic", "rewards": {"quality": 2.0}}],
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every_steps": 2},
        "metrics": {"samples_every": 1},
    }


def test_a_judged_run_resumes_bit_for_bit_asks_nothing_twice_and_keeps_no_key(run_of, monkeypatch):
    """The second run is one whose third step was answered and lost: its replies are in the folder."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with chat_server() as server:
        server.answer = by_length
        changes = settings(server)
        whole = run_of(**changes, steps=4)
        records, asked = trained(whole), len(server.bodies)
        assert sum(record["judge/requests"] for record in records) == asked
        assert all(record["judge/requests"] + record["judge/cached"] == 16 for record in records)
        samples = [each for record in read_records(whole / "samples.jsonl") for each in record["completions"]]
        found = [each for each in samples if "quality" in each["parts"]]
        assert len(found) == len(samples) - sum(record["judge/ungraded"] for record in records) > 32
        for each in found:
            assert each["reward"] == pytest.approx(2 * (len(each["text"]) % 7) / 10)
        stopped = run_of(**changes, steps=2)
        assert train(config_of(stopped, steps=4), plain=True) == 0
        assert_same_run(stopped, whole)
        assert len(server.bodies) == 2 * asked
        lost = run_of(**changes, steps=2)
        replies = "judged-0.jsonl"
        (lost / replies).write_bytes((whole / replies).read_bytes())
        before = len(server.bodies)
        (judge,) = changes["grading"]["judges"]
        elsewhere = {"workers": 0, "judges": [{**judge, "url": "http://127.0.0.1:9/v1", "retries": 0}]}
        assert train(config_of(lost, steps=4, grading=elsewhere), plain=True) == 0
        assert len(server.bodies) == before, "the replies to steps 3 and 4 were there, wherever the judge is now"
        assert [record["train-reward/total/mean"] for record in trained(lost)] == [
            record["train-reward/total/mean"] for record in records
        ]
    for path in (each for each in Path(whole).rglob("*") if each.is_file()):
        assert KEY.encode() not in path.read_bytes(), path
    assert read_config(whole).grading.judges[0].key_env == "JUDGE_KEY"
