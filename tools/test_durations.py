"""Records in tests/durations.json how many CPU seconds each test takes, from which `make test` knows the slow ones.

    python -m tools.test_durations              # every test but the long ones
    python -m tools.test_durations tests/plan   # those of a folder or file; other entries stay

Wants a quiet machine: a busy one makes CPU seconds longer too.
"""

import sys

import pytest

ARGUMENTS = ("-n", "2", "--dist", "worksteal", "-q", "-m", "not long", "--record-durations")


def main() -> int:
    """Run the tests and write the file; returns pytest's exit status."""
    return int(pytest.main([*ARGUMENTS, *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
