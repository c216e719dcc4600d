"""Renders chat templates, the Jinja programs that come with models, within a budget. No jax, no transformers.

A template is untrusted code. Jinja's sandbox denies it files and Python; this module also makes sure that it ends:
steps (rounds of loops, calls, operators), CPU seconds and the size of values are limited. Templates get the same
functions and filters as in transformers, so the rendered text is the same (a test compares). Anything that would differ
between processes is an error, and the date can be fixed, so that a run's prompts are the same on all hosts and after
resuming.
"""

import contextvars
import datetime
import functools
import json
import math
import re
import string
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized, ValuesView
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from podium.models.architecture import ModelError

MAX_SOURCE = 200_000  # characters of a template; the longest in use have some 30,000
MAX_STEPS = 200_000
MAX_SECONDS = 3.0  # of this thread's processor time, for one conversation
MAX_VALUE = 1_000_000  # characters of a value, in addition to ten times those of the messages
ELEMENT = 10  # size of an element of a list, or of a key, in characters
MAX_BITS = 4_096  # of an integer
MAX_FILL = 1_000  # of a width, indentation, batch size or number of digits, or length of a separator
TEXT_METHODS = (
    "capitalize casefold count endswith find format format_map index isalnum isalpha isascii isdecimal isdigit islower"
    " isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex"
    " rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
)
# Allowed methods. Their results are not larger than their inputs, or are checked beforehand.
METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(TEXT_METHODS.split()),
    dict: frozenset(("get", "items", "keys", "values", "copy", "fromkeys")),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
}
FILLING = frozenset(("batch", "center", "filesizeformat", "indent", "join", "round", "slice", "tojson", "truncate"))
"""Filters whose arguments determine how much text or how many elements are added."""
LEFT_OUT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters for web pages and debugging; they take superlinear time, and no chat template needs them."""
UNREPEATABLE = ("random",)
"""Filters whose results differ each time."""
_PRINTF_FILL = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")
WITHOUT_TEXT = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    type,
    Cycler,
    Joiner,
)
"""Types of values that are printed as a memory address, which differs in each process."""
T = TypeVar("T")


class TemplateError(ModelError):
    """A chat template cannot be rendered, or exceeds its budget."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        name: str = "chat_template",
        date: datetime.date | None = None,
    ):
        """Compile a template; it sees the special tokens by name, such as `bos_token`. Errors begin with `name`.

        `date` is what its function `strftime_now` shows, at midnight; None: the current date and time.

        Raises TemplateError if the source is not a valid template.
        """
        self.name = name
        self._special_tokens = dict(special_tokens)
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"{name}: has {len(source):,} characters; at most {MAX_SOURCE:,} are allowed")
        self._template, variables = self._guarded(lambda: _compile(source, date))
        self.variables: frozenset[str] = variables
        """The variables that it reads."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        answer: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Render a conversation. Thread-safe.

        Keys of a message whose value is None are left out, as in transformers.

        Args:
            messages: the conversation.
            tools: JSON schemas of the functions that the model may call.
            answer: whether to append the start of the assistant's answer.
            options: further variables for the template, such as `enable_thinking`.

        Raises:
            TemplateError: the template rejects the conversation, fails, or exceeds its budget.
        """
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        given = {"messages": plain, "tools": list(tools) or None, "documents": None, **(options or {})}

        def run() -> str:
            _running.set(_Budget(MAX_VALUE + 10 * _weight(given)))
            return self._template.render({**self._special_tokens, **given}, add_generation_prompt=answer)

        return contextvars.copy_context().run(self._guarded, run)

    def _guarded(self, run: Callable[[], T]) -> T:
        """Run a template's code. It is untrusted, so any exception becomes a TemplateError."""
        try:
            return run()
        except _OverBudget as error:
            raise TemplateError(f"{self.name}: cannot be rendered: it {error}") from error
        except Exception as error:  # MemoryError is among them: Python's own compiler raises it for deep nesting
            reason = f"{type(error).__name__}: {error}"[:300]
            raise TemplateError(f"{self.name}: cannot be rendered ({reason})") from error


class _OverBudget(Exception):
    """Ends a rendering that exceeds its budget."""


class _Budget:
    """Steps, time and value size that a rendering may use."""

    def __init__(self, most: int):
        self.most = most
        self.steps = 0
        self.ends = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise _OverBudget(f"takes more than {MAX_STEPS:,} steps (rounds of loops, calls, operators)")
        if time.thread_time() > self.ends:
            raise _OverBudget(f"takes more than {MAX_SECONDS:g} s")

    def check(self, size: int) -> None:
        """Raise _OverBudget if a value of this size, in characters, is larger than allowed."""
        if size > self.most:
            raise _OverBudget(f"makes a text or a list of more than {self.most:,} characters")


_running: contextvars.ContextVar[_Budget] = contextvars.ContextVar("budget of the template that is being rendered")


def _compile(source: str, date: datetime.date | None) -> tuple[jinja2.Template, frozenset[str]]:
    """Compile a template, and find the variables that it reads."""
    environment = _Environment(date)
    tree = environment.parse(source)
    variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
    return environment.from_string(_Limiter().visit(tree)), variables


class _Limiter(NodeTransformer):
    """Rewrites a template so that loop rounds, macros and comparisons count as steps, and values are size-checked."""

    def _counted(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.FilterBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("count_step", []), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_FilterBlock = _counted

    def _limited(self, node: nodes.List | nodes.Tuple | nodes.Dict | nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":  # the names that a loop or `set` assigns
            return node
        return _call("limited", [node])

    visit_List = visit_Tuple = visit_Dict = visit_Compare = _limited

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("limited", [node]) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenated", node.nodes)


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    """Make a call of an `_Environment` method, in a form that no template source can express."""
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


class _Generation(Extension):
    """Supports transformers' `{% generation %}`, which marks assistant text, by rendering its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 (as Extension has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A template's `namespace()`. Its repr hides its contents, which may refer back to it."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox in which operators, filters and calls count as steps and return values of limited size."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, date: datetime.date | None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,
            cache_size=0,
            finalize=_printable,
        )
        known = {name: each for name, each in self.filters.items() if name not in LEFT_OUT} | {"tojson": _to_json}
        self.filters = {name: self._limited_filter(name, each) for name, each in known.items()}
        self.filters |= {name: functools.partial(_refuse, name) for name in UNREPEATABLE}
        del self.globals["lipsum"]
        now = functools.partial(_now, date)
        self.globals |= {"raise_exception": _raise, "strftime_now": now, "namespace": _Namespace}

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Whether a template may read an attribute; of built-in types, only the methods in METHODS."""
        known = next((methods for kind, methods in METHODS.items() if isinstance(obj, kind)), None)
        if known is None and isinstance(obj, int | float | bytes | set | frozenset):
            known = frozenset()
        return (known is None or attr in known) and super().is_safe_attribute(obj, attr, value)

    def count_step(self) -> None:
        """Count one round of a loop, or one call of a macro. Raises _OverBudget past the limit."""
        _running.get().step()

    def limited(self, value: Any) -> Any:
        """Return the value, an iterator as a list. Raises _OverBudget if it is too large."""
        budget = _running.get()
        budget.step()
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise _OverBudget(f"makes a number of more than {MAX_BITS:,} bits")
        if not isinstance(value, Iterator) or isinstance(value, LoopContext):
            budget.check(_weight(value, budget.most))
            return value
        found, size = [], 0
        for each in value:
            found.append(each)
            size += _weight(each, budget.most)
            budget.check(size)
        return found

    def concatenated(self, *parts: object) -> str:
        """Evaluate `a ~ b`, the concatenation of values as text."""
        return self.limited(self.concat(str(_printable(part)) for part in parts))

    def concat(self, parts: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # "".join
        """Join the output of a template, a macro or a block."""
        budget = _running.get()
        found = []
        size = 0
        for part in parts:
            size += len(part)
            budget.check(size)
            found.append(part)
        return "".join(found)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator, after checking the size of its result."""
        _check_operands(operator, left, right, _running.get())
        return self.limited(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # its parameters have other names
        """Make a call from a template, counted as a step and with a result of limited size."""
        method = getattr(obj, "__wrapped__", obj)  # of str.format, which the sandbox wraps
        owner = getattr(method, "__self__", None)
        if owner is self:
            return obj(*args)
        _running.get().step()
        if isinstance(owner, str):
            _check_text_method(owner, method.__name__, args, _running.get())
        return self.limited(super().call(context, obj, *args, **kwargs))

    def _limited_filter(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        skipped = hasattr(own, "jinja_pass_arg")  # then the first argument is Jinja's own

        @functools.wraps(own)
        def limited(*args: Any, **kwargs: Any) -> Any:
            budget = _running.get()
            budget.step()
            value, *further = args[skipped:]
            _check_filter(name, value, [*further, *kwargs.values()], budget)
            return self.limited(own(*args, **kwargs))

        return limited


def _weight(value: object, most: float = math.inf) -> int:
    """Size of a value with its contents, in characters; each element adds ELEMENT. Stops counting beyond `most`."""
    total = 0
    waiting: list[object] = [value]
    while waiting and total <= most:
        each = waiting.pop()
        total += ELEMENT + (len(each) if isinstance(each, str) else 0)
        if isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | Set | ValuesView):
            waiting += each
    return total


def _check_operands(operator: str, left: object, right: object, budget: _Budget) -> None:
    """Raise _OverBudget if an operator would take too long, or produce too large a value."""
    if operator == "%" and isinstance(left, str) and _PRINTF_FILL.search(left):
        raise _OverBudget(f"formats with a width beyond {MAX_FILL:,}")
    if operator == "**" and _bits_of_power(left, right) > MAX_BITS:
        raise _OverBudget(f"makes a number of more than {MAX_BITS:,} bits")
    if operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                budget.check(_weight(many, budget.most) * times)


def _bits_of_power(base: object, exponent: object) -> int:
    return abs(exponent) * base.bit_length() if isinstance(base, int) and isinstance(exponent, int) else 0


def _check_text_method(text: str, name: str, args: Sequence[object], budget: _Budget) -> None:
    """Raise _OverBudget if a string method would produce too large a string."""
    if name == "replace" and len(args) >= 2:
        _check_replace(text, args[0], args[1], budget)
    if name == "join" and args:
        budget.check(_weight(args[0], budget.most) + len(text) * (len(args[0]) if isinstance(args[0], Sized) else 1))
    if name in ("format", "format_map"):
        for _, _, width, _ in string.Formatter().parse(text):
            if width and ("{" in width or re.search(r"\d{4,}", width)):
                raise _OverBudget(f"formats with a width beyond {MAX_FILL:,}")


def _check_replace(text: str, old: object, new: object, budget: _Budget) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.check(len(text) + text.count(old) * len(new))


def _check_filter(name: str, value: object, further: Sequence[object], budget: _Budget) -> None:
    """Raise _OverBudget if a filter would take too long, or produce too large a value."""
    if name in FILLING and any(_size(each) > MAX_FILL for each in further):
        raise _OverBudget(f"calls {name} with a number or a text beyond {MAX_FILL:,}")
    if name == "sum" and any(isinstance(each, Sized) and not isinstance(each, str) for each in further):
        raise _OverBudget("sums up lists with the filter sum; use a loop")
    if name == "format":
        _check_operands("%", value, None, budget)
    if name == "replace" and len(further) >= 2:
        _check_replace(str(value), further[0], further[1], budget)


def _size(value: object) -> float:
    return abs(value) if isinstance(value, int | float) else len(value) if isinstance(value, str) else 0


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as in transformers; Jinja's own escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    """The function `raise_exception`, with which a template rejects a conversation, as in transformers."""
    raise jinja2.TemplateError(message)


def _now(date: datetime.date | None, format: str) -> str:
    """The function `strftime_now`, as in transformers: the current time in a given format, or midnight of `date`."""
    now = datetime.datetime.now() if date is None else datetime.datetime.combine(date, datetime.time())
    return now.strftime(format)


def _refuse(name: str, *arguments: object) -> NoReturn:
    """Reject a filter whose result would differ each time."""
    raise jinja2.TemplateError(f"the filter {name} renders a different prompt each time; remove it")


def _printable(value: object) -> object:
    """Return a value that is about to be printed. Raises TemplateError for values of WITHOUT_TEXT."""
    if isinstance(value, WITHOUT_TEXT):
        name = str(getattr(value, "__name__", type(value).__name__)).lower()
        raise jinja2.TemplateError(f"it prints {name} itself, whose text differs in each process; call it: {name}()")
    return value
