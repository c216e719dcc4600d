"""The task `sqlite`: questions about a small generated database, which the model may query."""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from podium.tasks.conversation import Reply, Turn
from podium.tasks.conversations.tools import answer_calls
from podium.tasks.games.database import Database
from podium.tasks.math_answers.final_answer import answer_text, final_answer, final_number
from podium.tasks.task import Count, Prompt, TaskSource

_NAMES = """
Ada Amir Anna Ben Bo Carla Chen Clara Dan Dora Ella Emil Eva Femi Finn Freya Gita Greta Hana Hugo Ida Igor Ines Ivan Jan
Joon Juno Kai Kofi Lara Lena Leo Lina Luis Mara Mei Milo Mina Nadia Nils Nina Noor Olga Omar Otto Paula Pia Rafael Ravi
Rosa Rui Sana Sara Sven Tara Theo Tom Uma Vera Yara Yuki Zoe
"""
NAMES = _NAMES.split()
CITIES = ("Oslo", "Lima", "Cairo", "Kyoto", "Porto", "Quito", "Turin", "Dakar")
PRODUCTS = {
    "lamp": "home", "chair": "home", "mirror": "home", "kettle": "kitchen", "pan": "kitchen", "knife": "kitchen",
    "ball": "sport", "racket": "sport", "helmet": "sport", "puzzle": "toys", "robot": "toys", "kite": "toys",
}  # fmt: skip


class Customer(NamedTuple):
    """A row of `customers`."""

    id: int
    name: str
    city: str


class Product(NamedTuple):
    """A row of `products`."""

    id: int
    name: str
    category: str
    price: int


class Order(NamedTuple):
    """A row of `orders`."""

    id: int
    customer_id: int
    product_id: int
    quantity: int


class Shop(NamedTuple):
    """The rows of a database."""

    customers: tuple[Customer, ...] = ()
    products: tuple[Product, ...] = ()
    orders: tuple[Order, ...] = ()

    def database(self) -> Database:
        """The rows as a database."""
        return Database(
            {
                "customers": (Customer, self.customers),
                "products": (Product, self.products),
                "orders": (Order, self.orders),
            }
        )


class Asked(NamedTuple):
    """A question and its answer."""

    text: str
    answer: int | Sequence[str]
    """A number, or names in any order."""


class SqliteTask:
    """Questions about a shop's database of some 150 rows, with a tool `query` that reads it.

    Each question has its own database; training and evaluation use different ones. The reward is 1 if the last answer
    is right: a number, or names in any order, and 0 otherwise. A query can only read, and is ended if it takes too
    long; the model sees at most 20 rows and 1,000 characters of its result.
    """

    system_prompt: str | None = (
        "Answer questions about the database of a shop, in SQLite, by querying it. Its tables are"
        " customers(id, name, city), products(id, name, category, price) and orders(id, customer_id, product_id,"
        " quantity). When you know the answer, write it alone: a number, or names separated by commas."
    )
    tools = (Shop().database().query,)

    def __init__(self, source: TaskSource, *, size: Count = 2000, eval_size: Count = 100) -> None:
        source.refuse("sqlite")
        self.size, self.eval_size = size, eval_size

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One question per database."""
        count = self.eval_size if split == "eval" else self.size
        return [_prompt(f"sqlite/{split}/{number}") for number in range(count)]

    def open(self, prompt: Prompt, seed: int) -> "Questioning":
        """Start a conversation with the prompt's database; the seed is not used."""
        return Questioning(shop_of(prompt.id).database(), prompt.answer)

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the answer is the number, or has exactly the expected names."""
        return is_answer(completion, prompt.answer)


class Questioning:
    """A conversation with a database."""

    def __init__(self, database: Database, answer: str) -> None:
        self._database = database
        self._answer = answer
        self._last = ""

    def reply(self, turn: Turn) -> Reply:
        """Run the queries in an answer; an answer without a query ends the conversation."""
        self._last = turn.text
        reply = answer_calls({"query": self._database.query}, turn, lambda value: value)
        return reply or Reply(done=True)

    def grade(self) -> float:
        """1 if the last answer is right."""
        return is_answer(self._last, self._answer)

    def close(self) -> None:
        """Free the database."""
        self._database.close()


def is_answer(completion: str, answer: str) -> float:
    """1 if a completion's final answer is the reference's number, or has exactly its names, in any order."""
    if answer.isdigit():
        number = final_number(completion)
        return float(number is not None and number.value == int(answer))
    text = answer_text(completion).strip()
    said = final_answer(text)
    said = text.rpartition("\n")[2] if said is None else said
    return float(_names(said) == _names(answer))


def _names(text: str) -> Counter[str]:
    parts = (part.strip(" .'\"*`").casefold() for part in re.split(r",|;|\band\b", text))
    return Counter(part for part in parts if part)


def shop_of(prompt_id: str) -> Shop:
    """The rows of a prompt's database."""
    generator = random.Random(prompt_id)
    number = generator.randint(24, 40)
    cities = generator.sample(CITIES, 4)
    names = generator.sample(NAMES, number)
    customers = [Customer(place, name, generator.choice(cities)) for place, name in enumerate(names, 1)]
    wares = generator.sample(sorted(PRODUCTS), 10)
    products = [Product(place, ware, PRODUCTS[ware], generator.randint(2, 90)) for place, ware in enumerate(wares, 1)]
    sold, buying = (
        generator.sample(products, 9),
        generator.sample(customers, number - 4),
    )  # some products are never ordered, and some customers order nothing
    orders = [
        Order(place, generator.choice(buying).id, generator.choice(sold).id, generator.randint(1, 9))
        for place in range(1, generator.randint(80, 120))
    ]
    return Shop(tuple(customers), tuple(products), tuple(orders))


def _prompt(prompt_id: str) -> Prompt:
    shop, generator = shop_of(prompt_id), random.Random(f"{prompt_id} question")
    while True:
        asked = generator.choice(QUESTIONS)(shop, generator)
        if asked is not None:
            answer = str(asked.answer) if isinstance(asked.answer, int) else ", ".join(sorted(asked.answer))
            return Prompt(id=prompt_id, question=asked.text, answer=answer)


def _lives(shop: Shop, generator: random.Random) -> Asked:
    city = generator.choice(shop.customers).city
    return Asked(f"How many customers live in {city}?", sum(each.city == city for each in shop.customers))


def _sold(shop: Shop, generator: random.Random) -> Asked:
    product = generator.choice(shop.products)
    quantity = sum(order.quantity for order in shop.orders if order.product_id == product.id)
    return Asked(f"What is the total quantity of the product {product.name} in all orders?", quantity)


def _earned(shop: Shop, generator: random.Random) -> Asked:
    category = generator.choice(shop.products).category
    prices = {product.id: product.price for product in shop.products if product.category == category}
    total = sum(order.quantity * prices.get(order.product_id, 0) for order in shop.orders)
    return Asked(f"How much money came in for products of the category {category} (price times quantity)?", total)


def _ordered_from(shop: Shop, generator: random.Random) -> Asked:
    city = generator.choice(shop.customers).city
    there = {customer.id for customer in shop.customers if customer.city == city}
    return Asked(
        f"How many orders are from customers in {city}?", sum(order.customer_id in there for order in shop.orders)
    )


def _bought(shop: Shop, generator: random.Random) -> Asked | None:
    product = generator.choice(shop.products)
    buyers = {order.customer_id for order in shop.orders if order.product_id == product.id}
    names = [customer.name for customer in shop.customers if customer.id in buyers]
    return Asked(f"Which customers ordered the product {product.name}?", names) if 0 < len(names) <= 8 else None


def _never(shop: Shop, generator: random.Random) -> Asked:
    ordered = {order.customer_id for order in shop.orders}
    names = [customer.name for customer in shop.customers if customer.id not in ordered]
    return Asked("Which customers have no orders?", names)


def _most(shop: Shop, generator: random.Random) -> Asked | None:
    quantities: Counter[int] = Counter()
    for order in shop.orders:
        quantities[order.customer_id] += order.quantity
    (best, most), (_, second) = quantities.most_common(2)
    name = next(customer.name for customer in shop.customers if customer.id == best)
    return Asked("Which customer ordered the largest total quantity?", [name]) if most > second else None


QUESTIONS: tuple[Callable[[Shop, random.Random], Asked | None], ...] = (
    _lives, _sold, _earned, _ordered_from, _bought, _never, _most,
)  # fmt: skip
"""Each function makes a question about a shop, or returns None if the answer is ambiguous or too long."""
