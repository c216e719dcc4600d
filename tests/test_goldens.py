"""What a user can see is as recorded in tests/golden/behaviour; a change that is meant records it anew, for review."""

import pytest
from golden.record_behaviour import CODE, differences, measured, recorded, rounding

AGAIN = "if the change is meant: python tests/golden/record_behaviour.py"


@pytest.mark.parametrize("name", ["settings", "commands"])
def test_settings_and_commands_are_as_recorded(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # calibrations of this machine are no part of a golden
    found = list(differences(recorded(name), measured(name)))
    assert not found, "\n".join([f"{name}: {len(found)} differences; {AGAIN} {name}", *found[:20]])


@pytest.mark.long
def test_a_run_is_as_recorded_to_the_last_bit_on_the_same_kind_of_cpu():
    if recorded("training")["rounding"] != rounding():
        pytest.skip("recorded on another CPU or version of jax, which may round differently")
    found = list(differences(recorded("training"), measured("training")))
    assert not found, "\n".join([f"training: {len(found)} differences; {AGAIN} training", *found[:20]])


@pytest.mark.long
def test_compiled_plans_are_as_recorded():
    found = list(differences(recorded("plans"), measured("plans"), within=CODE))
    assert not found, "\n".join([f"plans: {len(found)} differences; {AGAIN} plans", *found[:20]])


def test_a_difference_is_named_with_both_values():
    old = {"a": {"b": [1, 2.0]}, "c": 1}
    assert list(differences(old, {"a": {"b": [1, 2.5]}, "d": 1})) == [
        "/a/b/1: 2.0 -> 2.5",
        "/c: 1 -> 'nothing'",
        "/d: 'nothing' -> 1",
    ]
