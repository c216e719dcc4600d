"""Adds hints about keys of TRL and of the seed system to errors about unknown keys. Called by entry points."""

from podium.config.hints import offer


def offer_hints() -> None:
    """Register hints: an error about an unknown key then names Podium's spelling of a key of another system."""
    offer(_foreign_key)


def _foreign_key(key: str, file: str) -> str | None:
    from podium.compat.seed_keys import hint  # reads its tables only if there is an error

    return hint(key, file)
