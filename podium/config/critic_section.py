"""The settings of a critic: a model that learns to estimate future rewards, for recipe ppo."""

from podium.config.section import NotNegative, Positive, PositiveFloat, Section


class CriticConfig(Section):
    """The critic of recipe ppo: its initial weights, and how it is trained (docs/algorithms.md)."""

    model: str | None = None
    """The model that the critic starts from, named like `model`: a language model, which gets a new head, or a model
    with a head of one label. Its tokenizer must equal the policy's, token by token. Unset: the policy's `model`.
    """
    learning_rate: PositiveFloat = 1e-5
    """The critic's peak learning rate; all other settings are those of `train.optimizer`."""
    warmup_steps: NotNegative = 0
    """Steps at the start of the run in which only the critic is trained, not the policy."""
    updates: Positive = 1  # verl: critic.ppo_epochs
    """How often the critic is trained on each of a step's minibatches."""
    clip: PositiveFloat | None = 0.5  # verl: critic.cliprange_value
    """How far an estimate may move in a step before its gradient is cut off, in units of the reward; null:
    unlimited."""
