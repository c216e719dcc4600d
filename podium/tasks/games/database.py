"""A small read-only database in memory, for queries that a model wrote. SQLite asks for permission for each action of a
statement; only reading and functions that depend only on their arguments are allowed: no other file, no extension, no
clock, no random numbers. A query that runs long is
interrupted after a number of SQLite's instructions, not of seconds, so that its answer does not depend on how busy the
machine is.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_type_hints

MAX_ROWS = 20
"""Maximum rows of a reply."""
MAX_CHARACTERS = 1000
"""Maximum characters of a reply."""
MAX_ERROR = 200
"""Maximum characters shown of SQLite's errors."""
MAX_INSTRUCTIONS = 1_000_000
"""Maximum instructions of SQLite's virtual machine in a query; about 50 ms."""
CHECK_EVERY = 1000
MAX_VALUE_BYTES = 4000
"""Maximum bytes of a text, and of a row."""
MAX_QUERY_CHARACTERS = 2000
MAX_COLUMNS = 50
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_COLUMN: MAX_COLUMNS,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
_NAMES = """
abs avg ceil ceiling char coalesce count cume_dist dense_rank first_value floor glob group_concat hex ifnull iif
instr lag last_value lead length like lower ltrim max min mod nth_value ntile nullif percent_rank pow power quote
rank replace round row_number rtrim sign sqrt string_agg substr substring sum total trim typeof unicode upper
"""
FUNCTIONS = frozenset(_NAMES.split())
"""Functions whose results depend only on their arguments, and are no larger than MAX_VALUE_BYTES."""
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
TYPES = {int: "INTEGER", str: "TEXT"}


class Database:
    """Read-only tables in memory."""

    def __init__(self, tables: Mapping[str, tuple[type[NamedTuple], Sequence[NamedTuple]]]) -> None:
        """Each table has the fields of a named tuple, of type int or str, as its columns."""
        # queries may come from different threads, one at a time
        self._connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        for name, (kind, rows) in tables.items():
            columns = get_type_hints(kind)
            declared = ", ".join(f"{column} {TYPES[hint]}" for column, hint in columns.items())
            self._connection.execute(f"CREATE TABLE {name} ({declared})")
            self._connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns))})", rows)
        for limit, value in LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.execute("PRAGMA query_only = 1")
        self._connection.set_authorizer(_authorised)
        self._checks = 0
        self._connection.set_progress_handler(self._too_long, CHECK_EVERY)

    def query(self, sql: str) -> str:
        """Run a query on the database, which can only be read.

        Args:
            sql: one SELECT statement in SQLite's dialect.
        """
        if len(sql) > MAX_QUERY_CHARACTERS:
            raise ValueError(f"the query has {len(sql)} characters; the maximum is {MAX_QUERY_CHARACTERS}")
        self._checks = 0
        cursor = self._connection.cursor()
        try:
            cursor.execute(sql)
            if cursor.description is None:
                raise ValueError("this is not a query; write one SELECT statement")
            names = [str(column[0]) for column in cursor.description]
            rows = cursor.fetchmany(MAX_ROWS + 1)
        except sqlite3.Error as error:
            late = self._checks >= MAX_INSTRUCTIONS // CHECK_EVERY
            raise ValueError("the query takes too long; read fewer rows" if late else str(error)[:MAX_ERROR]) from error
        finally:
            cursor.close()
        lines = [" | ".join(map(_shown, row)) for row in rows[:MAX_ROWS]]
        text = "\n".join((" | ".join(names), *lines))
        if len(text) > MAX_CHARACTERS:
            return f"{text[:MAX_CHARACTERS]}\n[cut: this is longer than {MAX_CHARACTERS} characters]"
        if len(rows) > MAX_ROWS:
            return f"{text}\n[cut: there are more than {MAX_ROWS} rows]"
        return text if rows else f"{text}\n[no rows]"

    def close(self) -> None:
        """Free the database."""
        self._connection.close()

    def _too_long(self) -> bool:
        """Called after every CHECK_EVERY instructions; returning true ends the query."""
        self._checks += 1
        return self._checks >= MAX_INSTRUCTIONS // CHECK_EVERY


def _authorised(action: int, first: str | None, second: str | None, database: str | None, inside: str | None) -> int:
    """SQLite's authorizer callback: whether a statement may perform an action; for functions, `second` is the name."""
    allowed = action in READING or (action == sqlite3.SQLITE_FUNCTION and str(second).lower() in FUNCTIONS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _shown(value: object) -> str:
    if value is None:
        return "NULL"
    return f"{value:.10g}" if isinstance(value, float) else str(value)
