"""The task sqlite: answers against SQL written for the test, and queries that must not do what they try."""

import json
import sqlite3
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.config.schema import TaskConfig
from podium.tasks.conversation import ToolCall, Turn
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.games.database import MAX_CHARACTERS, Database
from podium.tasks.games.sqlite_task import Customer, Order, Product, Shop, is_answer, shop_of
from podium.tasks.registry import make_task
from podium.tasks.try_task import play

SHOP = Shop(
    customers=(Customer(1, "Ada", "Oslo"), Customer(2, "Ben", "Lima"), Customer(3, "Cy", "Oslo")),
    products=(Product(1, "lamp", "home", 7), Product(2, "ball", "sport", 3)),
    orders=(Order(1, 1, 1, 2), Order(2, 1, 2, 5), Order(3, 2, 1, 4)),
)
SUMS = {
    "How many customers live in {}?": "SELECT count(*) FROM customers WHERE city = ?",
    "What is the total quantity of the product {} in all orders?": (
        "SELECT coalesce(sum(quantity), 0) FROM orders JOIN products ON products.id = product_id WHERE name = ?"
    ),
    "How much money came in for products of the category {} (price times quantity)?": (
        "SELECT coalesce(sum(quantity * price), 0) FROM orders JOIN products ON products.id = product_id"
        " WHERE category = ?"
    ),
    "How many orders are from customers in {}?": (
        "SELECT count(*) FROM orders JOIN customers ON customers.id = customer_id WHERE city = ?"
    ),
    "Which customers ordered the product {}?": (
        "SELECT DISTINCT customers.name FROM customers, orders, products WHERE customers.id = customer_id"
        " AND products.id = product_id AND products.name = ? ORDER BY 1"
    ),
    "Which customers have no orders?": (
        "SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders) ORDER BY name"
    ),
    "Which customer ordered the largest total quantity?": (
        "SELECT name FROM customers JOIN orders ON customers.id = customer_id GROUP BY name"
        " ORDER BY sum(quantity) DESC LIMIT 1"
    ),
}
"""Each question, and a query for it."""


def loaded(shop: Shop) -> sqlite3.Connection:
    """The shop in a database of the test's own."""
    connection = sqlite3.connect(":memory:")
    for name, columns in (
        ("customers", "id, name, city"),
        ("products", "id, name, category, price"),
        ("orders", "id, customer_id, product_id, quantity"),
    ):
        connection.execute(f"CREATE TABLE {name} ({columns})")
        places = ", ".join("?" * len(columns.split(",")))
        connection.executemany(f"INSERT INTO {name} VALUES ({places})", getattr(shop, name))
    return connection


def test_the_answer_of_each_question_is_what_sql_says():
    seen = set()
    for prompt in make_task(TaskConfig(name="sqlite", options={"size": 150})).prompts("train"):
        asked, sql, value = next(
            (asked, sql, prompt.question[len(before) : len(prompt.question) - len(after)])
            for asked, sql in SUMS.items()
            for before, _, after in [asked.partition("{}")]
            if prompt.question.startswith(before) and prompt.question.endswith(after)
        )
        connection = loaded(shop_of(prompt.id))
        rows = connection.execute(sql, (value,) * sql.count("?")).fetchall()
        connection.close()
        assert ", ".join(str(row[0]) for row in rows) == prompt.answer, prompt
        assert is_answer(prompt.answer, prompt.answer) == 1.0
        seen.add(asked)
    assert seen == SUMS.keys()


def test_each_question_has_a_database_of_its_own():
    task = make_task(TaskConfig(name="sqlite", options={"size": 60, "eval_size": 20}))
    shops = [shop_of(prompt.id) for split in ("train", "eval") for prompt in task.prompts(split)]
    assert len(set(shops)) == 80 and all(100 < sum(map(len, shop)) < 200 for shop in shops)


@pytest.mark.parametrize(
    ("sql", "reply"),
    [
        ("SELECT count(*) FROM customers", "count(*)\n3"),
        (
            "SELECT name, sum(quantity) AS n FROM customers c JOIN orders o ON o.customer_id = c.id"
            " GROUP BY name ORDER BY n DESC;",
            "name | n\nAda | 7\nBen | 4",
        ),
        ("select upper(name), price / 2.0 from products", "upper(name) | price / 2.0\nLAMP | 3.5\nBALL | 1.5"),
        ("SELECT name FROM customers WHERE city = 'Quito'", "name\n[no rows]"),
        ("SELECT max(price) FROM products WHERE id > 9", "max(price)\nNULL"),
        (
            "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
            "x\n" + "\n".join(map(str, range(1, 21))) + "\n[cut: there are more than 20 rows]",
        ),
    ],
)
def test_a_query_is_answered_with_its_rows(sql, reply):
    assert SHOP.database().query(sql) == reply


LONG = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
GROWN = "WITH RECURSIVE t(s) AS (SELECT 'ab' UNION ALL SELECT s || s FROM t)"


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("ATTACH 'other.db' AS other", "not authorized"),
        ("VACUUM INTO 'stolen.db'", "denied|not authorized"),
        ("PRAGMA writable_schema = 1", "not authorized"),
        ("PRAGMA query_only = 0", "not authorized"),
        ("SELECT load_extension('x')", "not authorized to use function: load_extension"),
        ("SELECT randomblob(1000000000)", "not authorized"),
        ("SELECT random()", "not authorized"),
        ("SELECT datetime('now')", "not authorized"),
        ("SELECT current_timestamp", "not authorized"),
        ("INSERT INTO orders VALUES (9, 9, 9, 9)", "not authorized"),
        ("DELETE FROM orders", "not authorized"),
        ("CREATE TEMP TABLE mine (x)", "not authorized"),
        ("DROP TABLE orders", "not authorized"),
        ("BEGIN", "not authorized"),
        (f"{LONG} SELECT count(*) FROM n", "takes too long"),
        ("SELECT count(*) FROM customers a, customers b" + ", customers" * 14, "takes too long"),
        (f"{GROWN} SELECT max(s) FROM t", "too big"),
        ("SELECT 1; DELETE FROM orders", "one statement at a time"),
        ("SELECT wages FROM customers", "no such column: wages"),
        ("SELEC 1", "syntax error"),
        ("", "not a query"),
        ("-- nothing", "not a query"),
        (f"SELECT {'x' * 3000}", "3007 characters"),
        ("SELECT '\ud800'", "surrogates"),
        ("SELECT cast(x'ff' AS TEXT)", "UTF-8"),
    ],
)
def test_a_query_that_must_not_be_is_an_error_and_changes_nothing(sql, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    database = SHOP.database()
    with pytest.raises(ValueError, match=message) as error:
        database.query(sql)
    assert len(str(error.value)) < 300
    assert database.query("SELECT count(*), sum(quantity) FROM orders") == "count(*) | sum(quantity)\n3 | 11"
    assert list(tmp_path.iterdir()) == []


def test_a_long_result_is_cut():
    database = SHOP.database()
    reply = database.query("SELECT" + ", ".join(f" '{'x' * 40}' AS c{n}" for n in range(20)) + " FROM orders")
    assert len(reply) < MAX_CHARACTERS + 60 and "[cut: this is longer than 1000 characters]" in reply


@given(sql=st.one_of(st.text(max_size=60), st.text("select*from(),;'\"orders1 -/\n", max_size=60)))
def test_whatever_is_queried_is_a_reply_or_an_error_for_the_model(sql):
    try:
        assert len(HELD.query(sql)) < MAX_CHARACTERS + 60
    except ValueError as error:
        assert str(error)
    assert HELD.query("SELECT count(*) FROM orders") == "count(*)\n3"


HELD: Database = SHOP.database()


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("There are 12.", "12", 1.0),
        ("12 or 13", "12", 0.0),
        ("The answer is Ben, Ada and Cy.", "Ada, Ben, Cy", 1.0),
        ("I counted.\n**Ada**", "Ada", 1.0),
        ("ada, BEN", "Ada, Ben", 1.0),
        ("Ada", "Ada, Ben", 0.0),
        ("Ada, Ben, Cy", "Ada, Ben", 0.0),
        ("Ada, Ada, Ben", "Ada, Ben", 0.0),
        ("", "Ada", 0.0),
        ("<think>Ada</think>", "Ada", 0.0),
    ],
)
def test_an_answer_is_a_number_or_names_in_any_order(said, answer, right):
    assert is_answer(said, answer) == right


def test_a_conversation_queries_from_any_thread_and_pays_for_the_last_answer():
    held, prompt = conversing(TaskConfig(name="sqlite")), make_task(TaskConfig(name="sqlite")).prompts("eval")[0]
    assert held is not None and held.rewards
    assert [str(tool["function"]["name"]) for tool in held.tools] == ["query"]
    running = held.open(prompt, 0, lambda value: value)
    replies = []
    call = ToolCall(name="query", arguments={"sql": "SELECT count(*) FROM products"})
    asking = threading.Thread(target=lambda: replies.append(running.reply(Turn(text="", number=0, calls=(call,)))))
    asking.start()
    asking.join()
    assert replies[0].messages[0]["content"] == "count(*)\n10" and not replies[0].done
    assert running.reply(Turn(text="I do not know.", number=1)).done and running.grade() == 0.0
    assert running.reply(Turn(text=prompt.answer, number=1)).done and running.grade() == 1.0
    running.close()


def test_the_task_is_played_without_a_model():
    lines: list[str] = []
    prompt = make_task(TaskConfig(name="sqlite")).prompts("train")[2]
    sql = json.dumps({"sql": "SELECT name FROM products ORDER BY price LIMIT 1"})
    bad = json.dumps({"sql": "DROP TABLE orders"})
    assert play("sqlite", [f"query {sql}", f"query {bad}", prompt.answer], lines.append, number=2) == 1.0
    assert any(line.startswith("[query] name\n") for line in lines)
    assert "[query] Error: not authorized" in lines
