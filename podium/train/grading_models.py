"""Reward models: frozen decoders that score completed conversations on the devices.

A conversation is formatted by the reward model's own chat template; its score is that of its last token.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from podium.hosts.distributed import on_host
from podium.models.adapters import base_of
from podium.models.files.source import ModelSource, padding_token
from podium.models.files.source import resolve as find_source
from podium.models.linear import kept
from podium.models.text.chat_format import Message, ToolSchema
from podium.models.text.tokenizer import Tokenizer, load_tokenizer
from podium.run.divisible import check_conversations
from podium.run.run_spec import ConversationSpec, Role, RolloutSpec, UpdateSpec
from podium.sampling.conversations.dialogue import ToolFormat
from podium.sampling.feed import Feed, prompt_messages
from podium.sampling.groups import Group
from podium.sharding import Params
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.mixture import TaskPrompt
from podium.tasks.rewards import raised, with_score
from podium.tasks.task import Reward
from podium.train.batches.batch import Batch, make_batch, take
from podium.train.batches.samples import single_answer
from podium.train.scorers import make_role_program, role_settings
from podium.train.setup import Model, load_role_weights
from podium.train.step import CompiledScore, TrainSettings, shard_batch

EPSILON = 1e-6
"""Added to the standard deviation by which scores are divided."""
PROBE = "qzANSWERzq"
TRIED: tuple[Message, ...] = ({"role": "assistant", "content": PROBE},)
TRIED_CALL: tuple[Message, ...] = (
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": PROBE, "arguments": {"x": "12"}}}],
    },
    {"role": "tool", "name": PROBE, "tool_call_id": "call00000", "content": PROBE},
    *TRIED,
)
"""Messages with which chat templates are tested; each contains PROBE at least once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a reward model reads: the messages of prompt and answer, and the tools that could be called."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradingModel:
    """A reward model with its weights."""

    role: Role
    spec: ConversationSpec
    """How the model grades; the same as in `role`."""
    source: ModelSource
    tokenizer: Tokenizer
    pad_token: int | None
    """The token that transformers treats as padding, which gets no score; None if absent."""
    tool_format: ToolFormat | None
    """How the chat template presents tools; None if no task that the model grades has tools."""
    weights: str
    """Fingerprint of the model's weights, which are not part of the run's checkpoints."""
    params: Params
    settings: TrainSettings
    """The trainer's settings, with the reward model's decoder."""
    program: CompiledScore

    def written(self, conversation: Conversation) -> str:
        """Format a conversation with the model's chat template. Raises TemplateError if the template rejects it."""
        messages = conversation.messages
        if self.tool_format is not None:
            messages = self.tool_format.with_tools(messages, conversation.tools)
        return self.tokenizer.chat_format.render(messages, tools=conversation.tools, answer=False)

    def tokens(self, conversation: Conversation) -> list[int]:
        """The tokens of a conversation up to the one with its score. Raises TemplateError as `written` does."""
        tokens = self.tokenizer.chat_format.encode(self.written(conversation))
        while len(tokens) > 1 and tokens[-1] == self.pad_token:
            tokens.pop()
        return tokens

    def check(self, feed: Feed, prompts: Sequence[TaskPrompt]) -> None:
        """Check, with one prompt of each task, that the chat template can format the task's conversations.

        Raises ValueError if the text lacks the answer, a tool call or a tool's reply.
        """
        for prompt in prompts:
            if self.spec.part not in feed.tasks.levels[prompt.task].rewards:
                continue
            held = feed.conversing[prompt.task]
            tools = () if held is None else tuple(held.tools)
            said = TRIED_CALL if tools else TRIED
            before = prompt_messages(prompt) or [{"role": "user", "content": PROBE}]
            where = f"{self.role.title} ({self.role.model}): its chat template"
            try:
                text = self.written(Conversation(messages=(*before, *said), tools=tools))
            except ValueError as error:
                raise ValueError(f"{where} rejects prompt {prompt.prompt.id} with an answer: {error}") from error
            if text.count(PROBE) < len(said):
                raise ValueError(
                    f"{where} leaves out {'calls of tools and their replies' if tools else 'answers'}; give the model "
                    "another chat_template, or take a model that was trained on such conversations"
                )

    def scores(self, conversations: Sequence[Conversation]) -> list[float | None]:
        """The score of each conversation; None for one that is longer than `row_tokens`."""
        written = [self.tokens(each) for each in conversations]
        fitting = [index for index, tokens in enumerate(written) if len(tokens) <= self.spec.row_tokens]
        found = self._scores([written[index] for index in fitting])
        scores: list[float | None] = [None] * len(written)
        for index, score in zip(fitting, found, strict=True):
            scores[index] = score
        return scores

    def scored(self, groups: Sequence[Group], feed: Feed) -> tuple[list[Group], int]:
        """Returns the groups with scores added to their rewards, and the number of answers that are too long to score.

        Groups of tasks whose rewards do not name the model, and conversations that failed, are not scored.
        """
        name, tasks = self.spec.part, feed.tasks.levels
        places = [
            (n, g)
            for n, group in enumerate(groups)
            if name in tasks[group.prompt.task].rewards
            for g, reward in enumerate(group.rewards)
            if reward.parts
        ]
        found = self.scores([_conversation(groups[n], g, feed) for n, g in places])
        rewards = [list(group.rewards) for group in groups]
        for (n, g), score in zip(places, found, strict=True):
            if score is not None:
                rewards[n][g] = with_score(rewards[n][g], tasks[groups[n].prompt.task], name, score)
        made = [dataclasses.replace(group, rewards=own) for group, own in zip(groups, rewards, strict=True)]
        return made, sum(score is None for score in found)

    def standardised(self, groups: Sequence[Group]) -> list[Group]:
        """With `standardise: batch`, replace each score in the total rewards by its standardised value; otherwise
        change nothing.

        A standardised score is (score - mean) / standard deviation, both taken over all groups. The parts of rewards
        keep the scores themselves.
        """
        name = self.spec.part
        if self.spec.standardise == "none":
            return list(groups)
        found = [reward.parts[name] for group in groups for reward in group.rewards if name in reward.weights]
        mean, deviation = (float(np.mean(found)), float(np.std(found)) + EPSILON) if found else (0.0, 1.0)

        def moved(reward: Reward) -> Reward:
            if name not in reward.weights:
                return reward
            score = reward.parts[name]
            return raised(reward, reward.weights[name] * ((score - mean) / deviation - score))

        return [dataclasses.replace(group, rewards=[moved(each) for each in group.rewards]) for group in groups]

    def _scores(self, written: Sequence[Sequence[int]]) -> list[float]:
        """Pack sequences into rows and return the score of each sequence's last token."""
        if not written:
            return []
        samples = [
            single_answer(
                group=index,
                prompt=(tokens[0],),
                tokens=np.array([*tokens[1:], 0], np.int32),  # targets; the last one is never read
                sampled_logprobs=np.zeros(len(tokens), np.float32),
            )
            for index, tokens in enumerate(written)
        ]
        rules = self.settings.computing
        sizes = self.spec.batch(shards=rules.num_shards("batch"))
        batch, spans = make_batch(samples, dataclasses.replace(sizes, max_rows=len(samples)))
        calls = [
            self.program(self.params, shard_batch(_one(batch, index), rules))
            for index in range(int(batch.num_micro_batches))
        ]
        values = np.concatenate([on_host(each) for each in calls])  # [K, B, T]
        return [float(own[-1]) for own in take(values, spans)]


def _one(batch: Batch[np.ndarray], index: int) -> Batch[np.ndarray]:
    """Select one micro-batch, as a batch."""
    return jax.tree.map(lambda x: x[index : index + 1] if x.ndim >= 3 else x, batch)


def load_grading_models(spec: RolloutSpec, update: UpdateSpec, mesh: Mesh) -> tuple[GradingModel, ...]:
    """Load the reward models that tasks use, sharded like the trainer's weights.

    Raises ValueError, naming the model, if one is unusable.
    """
    check_conversations(spec, mesh.shape)
    found = []
    for role in spec.grading_models:
        own = role.conversations
        assert own is not None, "the model grades conversations"
        where, source = role.title, find_source(role.model, waits=True)
        tokenizer = load_tokenizer(source, own.chat_template, template_date=own.template_date, template=False)
        if not tokenizer.has_template:
            raise ValueError(
                f"{where}: the tokenizer of {role.model} has no chat template; write down the template that the model "
                "was trained with, and set reward_models' chat_template: path.jinja"
            )
        tokenizer.check_vocab(role.decoder.vocab)
        asked = [task for task in spec.prompts.tasks if own.part in task.rewards]
        with_tools = any(held is not None and held.tools for held in map(conversing, asked))
        model = Model(source=source, decoder=role.decoder, tokenizer=tokenizer, mesh=mesh)
        params = load_role_weights(model)
        settings = role_settings(role, TrainSettings(role.decoder, mesh, update))
        found.append(
            GradingModel(
                role=role,
                spec=own,
                source=source,
                tokenizer=tokenizer,
                pad_token=padding_token(source),
                tool_format=ToolFormat(where, tokenizer) if with_tools else None,
                weights=base_of(params) or "",
                params=kept(params, model.rules),
                settings=settings,
                program=make_role_program(role, settings),
            )
        )
    return tuple(found)


def _conversation(group: Group, index: int, feed: Feed) -> Conversation:
    """The part of a group's transcript that a reward model reads."""
    transcript = group.transcripts[index]
    first = group.firsts[index] if group.firsts else None
    held = feed.conversing[group.prompt.task]
    said = transcript.messages or ({"role": "assistant", "content": transcript.drawn[-1].text},)
    return Conversation(
        messages=(*prompt_messages(group.prompt, first), *said), tools=() if held is None else tuple(held.tools)
    )
