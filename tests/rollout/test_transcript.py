import numpy as np
import pytest

from podium.rollout.transcript import Transcript


def drawn(*tokens: int, version: int = 0, before: Transcript | None = None) -> Transcript:
    """`before`, or a prompt of two tokens, with some drawn tokens behind it."""
    logprobs = -np.arange(1.0, len(tokens) + 1)
    return (before or Transcript().add_prompt((8, 9))).add_drawn(
        np.array(tokens),
        sampled_logprobs=logprobs,
        full_logprobs=2 * logprobs,
        versions=np.full(len(tokens), version),
        finish_reason="stop",
        text=f"<{len(tokens)}>",
    )


def test_a_transcript_is_all_tokens_in_order_and_says_which_were_drawn():
    first = drawn(1, 2)
    whole = drawn(5, version=1, before=first.add_environment((3, 4)))
    assert whole.tokens.tolist() == [8, 9, 1, 2, 3, 4, 5]
    assert whole.mask.tolist() == [False, False, True, True, False, False, True]
    assert [(span.source, span.turn) for span in whole.spans] == [
        ("prompt", 0), ("drawn", 0), ("environment", 1), ("drawn", 1),
    ]  # fmt: skip
    assert (whole.num_tokens, whole.num_drawn, whole.num_turns, whole.text) == (7, 3, 2, "<2><1>")
    assert whole.versions.tolist() == [0, 0, 1] and whole.sampled_logprobs.tolist() == [-1, -2, -1]
    assert first.tokens.tolist() == [8, 9, 1, 2]  # a longer transcript leaves it as it was


def test_what_is_out_of_order_is_refused():
    with pytest.raises(ValueError, match="a prompt must come first, but this transcript already has 4 tokens"):
        drawn(1, 2).add_prompt((3,))
    with pytest.raises(ValueError, match="must follow drawn tokens, and this transcript has none"):
        Transcript().add_prompt((1,)).add_environment((2,))
    with pytest.raises(ValueError, match="add_prompt first"):
        drawn(1, before=Transcript())
    with pytest.raises(ValueError, match=r"have \[1, 2, 1, 1\] entries; give equally many"):
        Transcript().add_prompt((1,)).add_drawn(
            np.ones(1), sampled_logprobs=np.ones(2), full_logprobs=np.ones(1), versions=np.ones(1), finish_reason=None
        )
