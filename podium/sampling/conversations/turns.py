"""The next turn of a conversation: its prompt, its seed, its settings, and the limits that allow it."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from podium.config.schema import RolloutConfig
from podium.models.text.chat_format import Message
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Completion, Request, SamplingParams, StopReason
from podium.rollout.sequence import check_sampling, check_tokens
from podium.sampling.conversations.dialogue import Dialogue, with_calls
from podium.sampling.conversations.episode import Opening
from podium.sampling.conversations.live import Live
from podium.sampling.feed import EncodedPrompt, prompt_messages, request_seed
from podium.tasks.conversation import Asking, Reply


class AskingError(ValueError):
    """A program's request cannot be answered by the model; the message says why."""


class Following(NamedTuple):
    """What the engine reads between an answer and the next turn."""

    tokens: list[int]
    """Tokens to append after the answer."""
    whole: tuple[int, ...] | None
    """The whole prompt of the next turn, if it is rendered again instead of appended; otherwise None."""


class Turns:
    """Makes the engine's requests for the turns of conversations about some prompts."""

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: Sequence[EncodedPrompt],
        dialogues: Sequence[Dialogue | None],
        rollout: RolloutConfig,
        sampling: SamplingParams,
        completions: int,
    ) -> None:
        """Does not prepare anything yet.

        Args:
            engine: decodes the turns; its vocabulary and stop tokens limit what a program may request.
            prompts: what the conversations are about; `Live.index` is an index into them.
            dialogues: the chat format of each task's conversations; None if the task's prompts are answered once.
            rollout: limits of conversations.
            sampling: settings of every turn, before limits.
            completions: number of conversations, or single answers, per prompt.
        """
        self.prompts, self.completions, self.limits = list(prompts), completions, rollout.limits
        self._engine, self._dialogues = engine, dialogues
        self._rollout, self._sampling = rollout, sampling

    def dialogue(self, index: int) -> Dialogue | None:
        """The chat format of the conversations about a prompt; None if the prompt is answered once."""
        return self._dialogues[self.prompts[index].prompt.task]

    def dialogue_of(self, live: Live) -> Dialogue:
        """The chat format of a conversation, with the tools that its program offers. Raises ValueError if the model's
        template cannot write it.
        """
        dialogue = self.dialogue(live.index)
        assert dialogue is not None, "single answers have no environment"
        asking = live.episode.asking
        return dialogue if asking is None else dialogue.offering(asking.tools, asking.options)

    def begun(self, live: Live) -> str:
        """The beginning of the next answer that the conversation's program prescribes; empty if none."""
        asking = live.episode.asking
        if asking is None or asking.must_call is None:
            return ""
        return self.dialogue_of(live).begun(asking.must_call or None)

    def begun_tokens(self, live: Live) -> tuple[int, ...]:
        """The tokens of `begun`."""
        return tuple(self.dialogue_of(live).tokenizer.chat_format.encode(self.begun(live)))

    def set_prompt(self, live: Live, first: str | Asking | None) -> None:
        """Set a conversation's prompt: its messages and tokens, to which the environment adds `first`.

        Raises:
            AskingError: a program's request cannot be answered.
            ValueError: the prompt is too long, or empty.
        """
        prompt = self.prompts[live.index]
        if isinstance(first, Asking):
            live.tokens = self._whole_prompt(live, first)
        else:
            dialogue = self.dialogue_of(live)
            messages = with_calls(dialogue.tokenizer.chat_format, prompt_messages(prompt.prompt, first))
            live.episode = dataclasses.replace(live.episode, first=first, opening=Opening(tuple(messages)))
            live.tokens = prompt.tokens if first is None else dialogue.prompt(messages)
        limit, given = self._rollout.prompt_tokens, live.episode.opening.messages
        if len(live.tokens) > limit or not (given or live.episode.asking):
            what = f"has {len(live.tokens)} tokens, and rollout.max_prompt_tokens is {limit}; raise it"
            what = what if given else "is empty: reset() must return the first message, or rows must contain a prompt"
            raise ValueError(f"prompt {prompt.prompt.prompt.id} with its environment's first message {what}")

    def following(self, live: Live, reply: Reply) -> Following:
        """Add the messages of a reply to its conversation; returns the tokens that the next turn reads.

        Raises ValueError if the chat template refuses the messages, or if a program's request cannot be answered.
        """
        asking = reply.asking
        if asking is not None and asking.fresh:
            again = self._whole_prompt(live, asking)
            live.episode = live.episode.saying(self.fitting(self.dialogue_of(live), _given(asking)))
            opening = Opening(asking.messages, since=len(live.episode.transcript.messages))
            live.episode = dataclasses.replace(live.episode, opening=opening)
            return Following([], again)
        if asking is not None:
            live.episode = dataclasses.replace(live.episode, asking=asking)
            self._check(live, asking.tokens)
        dialogue, ended = self.dialogue_of(live), int(live.episode.transcript.spans[-1].tokens[-1])
        given = reply.messages if asking is None else asking.messages
        if asking is not None and asking.tokens:
            text = dialogue.tokenizer.decode(list(asking.tokens))
            live.episode = live.episode.saying([{"role": "user", "content": text}])
            return Following(list(asking.tokens), None)
        messages = self.fitting(dialogue, given)
        history = live.episode.history[:-1]
        live.episode = live.episode.saying(messages)
        drawn_end = ended if ended in dialogue.tokenizer.eos_tokens else None
        tokens = [*dialogue.reply(messages, history=history, drawn_end=drawn_end), *self.begun_tokens(live)]
        return Following(tokens, self._rendered(live, dialogue, messages))

    def _whole_prompt(self, live: Live, asking: Asking) -> tuple[int, ...]:
        """The tokens of a program's whole prompt. Raises AskingError if the model cannot answer it."""
        live.episode = dataclasses.replace(live.episode, asking=asking, opening=Opening(asking.messages))
        try:
            tokens = asking.tokens or (*self.dialogue_of(live).prompt(asking.messages), *self.begun_tokens(live))
        except ValueError as error:
            raise AskingError(str(error)) from error
        self._check(live, tokens)
        return tokens

    def _check(self, live: Live, tokens: tuple[int, ...]) -> None:
        """Raise AskingError if the engine would reject a program's tokens or stop tokens."""
        engine, vocab = self._engine, self._engine.device.model.vocab
        try:
            if tokens:
                check_tokens(tokens, vocab, len(tokens), "")
            sampling = dataclasses.replace(self.sampling_of(live, 0), max_new_tokens=1)
            check_sampling(sampling, engine.tokenizer, longest=engine.config.longest, vocab=vocab)
        except ValueError as error:
            raise AskingError(f"a program's request cannot be answered: {error}") from error

    def _rendered(self, live: Live, dialogue: Dialogue, new: Sequence[Message]) -> tuple[int, ...] | None:
        """The conversation as rendered by the chat template, if it continues from that rendering (at messages of the
        user); otherwise None.
        """
        segments = self._rollout.thinking == "segment"
        if not segments or not any(message.get("role") == "user" for message in new):
            return None
        return dialogue.prompt(live.episode.history)

    def fitting(self, dialogue: Dialogue, messages: Sequence[Message]) -> list[Message]:
        """Shorten messages to at most `rollout.limits.max_reply_tokens` tokens each by cutting out the middle."""
        return [dialogue.fitting(message, self.limits.max_reply_tokens) for message in messages]

    def single_request(self, index: int, begun: Mapping[int, Completion]) -> Request:
        """The engine's request for a prompt that is answered once, with the tokens sampled so far."""
        prompt = self.prompts[index]
        return Request(
            prompt=prompt.tokens,
            sampling=self._sampling,
            seed=prompt.seed,
            completions=self.completions,
            begun=begun,
        )

    def request(
        self,
        live: Live,
        prompt: tuple[int, ...],
        ledgers: Mapping[int, tuple[int, ...]],
        begun: Mapping[int, Completion],
    ) -> Request:
        """The engine's request for the next turn of a conversation, and of others with the same tokens so far."""
        return Request(
            prompt=prompt,
            sampling=self.sampling_of(live, len(ledgers.get(live.sample, prompt))),
            seed=self.seed(live),
            completions=self.completions,
            keep=True,
            begun=begun,
            ledgers=ledgers,
        )

    def seed(self, live: Live) -> int:
        """The sampling seed of a conversation's next turn."""
        seed, turn = self.prompts[live.index].seed, len(live.episode.turn_rewards)
        return request_seed(seed, "turn", turn) if turn else seed

    def sampling_of(self, live: Live, tokens: int) -> SamplingParams:
        """The sampling settings of the next turn of a conversation that has `tokens` tokens."""
        asking = live.episode.asking
        wanted = () if asking is None else asking.stop_tokens
        own = () if self._engine.tokenizer is None else self._engine.tokenizer.eos_tokens
        more = tuple(each for each in wanted if each not in (*own, *self._sampling.stop_tokens))
        return dataclasses.replace(
            self._sampling,
            max_new_tokens=self._most(live, tokens),
            stop_tokens=(*self._sampling.stop_tokens, *more),
        )

    def _most(self, live: Live, tokens: int) -> int:
        """Largest number of tokens that a turn may sample in a conversation that has `tokens` tokens."""
        most, asking = min(self._sampling.max_new_tokens, self._rollout.longest - tokens), live.episode.asking
        if asking is not None and asking.max_tokens is not None:
            most = min(most, asking.max_tokens)
        drawn = self.limits.max_drawn_tokens
        return most if drawn is None else min(most, drawn - live.episode.transcript.num_drawn)

    def why_none(self, live: Live, tokens: int) -> StopReason | None:
        """Why a conversation that has `tokens` tokens gets no further turn; None if it gets one."""
        limits = self.limits
        if len(live.episode.turn_rewards) >= limits.max_turns:
            return "turns"
        if limits.episode_timeout_s is not None and time.monotonic() - live.began > limits.episode_timeout_s:
            return "timeout"
        if limits.max_drawn_tokens is not None and live.episode.transcript.num_drawn >= limits.max_drawn_tokens:
            return "drawn"
        return "length" if self._most(live, tokens) < 1 else None

    def why_cut(self, live: Live) -> StopReason:
        """The limit that cut a turn."""
        most = self.limits.max_drawn_tokens
        return "drawn" if most is not None and live.episode.transcript.num_drawn >= most else "length"


def _given(asking: Asking) -> list[Message]:
    """The messages of a program's whole prompt that the model did not write."""
    return [message for message in asking.messages if message.get("role") != "assistant"]
