"""Saving by the time, whichever comes first with the steps."""

from podium.train.checkpoints.saving import SaveTimer


def test_a_save_is_due_so_long_after_the_last():
    now = [0.0]
    timer = SaveTimer(600.0, clock=lambda: now[0])
    now[0] = 599.0
    assert not timer.due()
    now[0] = 600.0
    assert timer.due()
    timer.restart()
    assert not timer.due()
    assert not SaveTimer(0.0, clock=lambda: now[0] * 1e9).due()
