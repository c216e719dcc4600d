"""Hints about keys of TRL and of the seed system; entry points register them with `podium.config.hints.offer`."""


def foreign_key(key: str, file: str) -> str | None:
    """Podium's spelling of another system's key, for an error about an unknown key; None if the key is not known."""
    from podium.compat.seed_keys import hint  # reads its tables only if there is an error

    return hint(key, file)
