"""Offers hints about keys of TRL and the seed system to errors about unknown keys; entry points call it."""

from podium.config.hints import offer


def offer_hints() -> None:
    """Have errors about an unknown key say how Podium spells it, if another system has such a key."""
    offer(_foreign_key)


def _foreign_key(key: str, file: str) -> str | None:
    from podium.compat.seed_keys import hint  # reads its tables only if there is an error

    return hint(key, file)
