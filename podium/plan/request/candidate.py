"""What a plan is asked for: a machine, and changes to the settings of a run. No jax."""

import dataclasses

from podium.accelerators import Accelerator
from podium.config.document import dump_value
from podium.config.load import Override

Value = int | float | str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A new value for one setting."""

    key: str
    value: Value
    old: Value = None  # the run's current value; None: unset, or unknown
    written: bool = False  # whether `value` is the text that the user wrote, as after --set

    def __str__(self) -> str:
        """The change in the form of `--set`, such as `train.remat=layer` or `train.offload_optimizer=true`."""
        return f"{self.key}={self.value if isinstance(self.value, str) else dump_value(self.value)}"

    @property
    def override(self) -> str | Override:
        """The change as the config loader takes it."""
        return str(self) if self.written else Override(self.key, self.value, f"podium plan, {self}")


Changes = tuple[Change, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One candidate of a search: the run on a machine, with changes to its settings."""

    machine: Accelerator
    changes: Changes = ()

    def but(self, *changes: Change) -> "Case":
        """A copy of the case with its changes replaced by these."""
        return Case(self.machine, changes)
