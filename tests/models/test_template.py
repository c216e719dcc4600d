import datetime
import threading

import pytest

from podium.models.text.template import MAX_STEPS, ChatTemplate, TemplateError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 2 + 2? "}]
# As models in use write them: namespaces, slices, macros, filters, methods, whitespace control.
USUAL = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{%- if tools is not none %}{{- 'tools' }}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' ~ date_string ~ system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}""",
    "qwen": """{%- set ns = namespace(multi=true, last=messages|length - 1, seen=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and message.role == "user" and message.content is string %}
        {%- set ns.multi = false %}{%- set ns.last = index %}{%- set ns.seen = ns.seen + [index] %}
    {%- endif %}
{%- endfor %}
{%- macro show(message, upper=false) -%}
    {{ message.role.upper() if upper else message.role }}: {{ message.content.strip('\n').split('</think>')[-1] }}
{%- endmacro %}
{%- for message in messages %}{{ show(message, upper=loop.first) }}{{ "\n" if not loop.last }}{% endfor %}
{{ messages|tojson(indent=2) }} {{ ns.last }} {{ ns.seen|join(', ') }}
{% generation %}{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|length }}
{%- endgeneration %} {{ '%s and %03d' % ('a', 7) }} {{ '{:>5}'.format(3) }} {{ 'aXb'.replace('X', '--') }}
{{ '-'.join(['a', 'b']) }}
{%- for key, value in messages[0]|items %}{{ key }}={{ value }};{% if loop.index > 1 %}{% break %}{% endif %}
{%- endfor %}""",
}
ENDLESS = {
    "three loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "repetition": "{{ 'x' * 10000000000 }}",
    "repetition of a list": "{{ [1] * 10000000000 }}",
    "power": "{{ 10 ** 10000000000 }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60 + "{{ x }}",
    "lists of lists": "{% set x = [] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "much output": "{% set x = 'x' * 900000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "much output of a block": "{% set x = 'x' * 900000 %}{% set y %}{% for i in range(9999) %}{{ x }}{% endfor %}"
    "{% endset %}",
    "width": "{{ '%999999999d' % 1 }}",
    "width by *": "{{ '%*d' % (999999999, 1) }}",
    "width of format": "{{ '{:999999999}'.format(1) }}",
    "nested width of format": "{{ '{:{}}'.format(1, 999999999) }}",
    "center": "{{ 'x'|center(999999999) }}",
    "method with a width": "{{ 'x'.ljust(999999999) }}",
    "bytes": "{{ (1).to_bytes(9999999999, 'big') }}",
    "batch": "{{ [1]|batch(999999999, 'x')|list }}",
    "join": "{% set x = 'x' * 900000 %}{{ (range(99999)|list)|join(x) }}",
    "method join": "{% set x = 'x' * 900000 %}{{ x.join(['1'] * 99999) }}",
    "replace": "{% set x = 'x' * 900000 %}{{ x.replace('x', x) }}",
    "replace by a filter": "{% set x = 'x' * 900000 %}{{ x|replace('x', x) }}",
    "joined generator": "{% set x = 'x' * 900000 %}{{ range(99999)|map('replace', '1', x)|join }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursion in two": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "include": "{% include 'other' %}",
    "import": "{% import '/etc/passwd' as x %}",
    "extends": "{% extends 'other' %}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep loops": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "type error": "{{ 1 + 'x' }}",
    "no such key": "{{ messages[7].content }}",
    "private attribute": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "cycle": "{% set n = namespace() %}{% set n.x = [n] %}{{ n.x|tojson }}",
    "long": "{{ 1 }}" * 100_000,
}


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_template_gives_the_text_that_transformers_gives(name: str):
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=USUAL[name], add_generation_prompt=True, **tokens)
    assert ChatTemplate(USUAL[name], tokens).render(MESSAGES) == expected


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_or_fails_is_one_error_within_seconds(name: str):
    with pytest.raises(TemplateError, match=r"^mine\.jinja: (cannot be rendered|has [\d,]+ characters)"):
        ChatTemplate(ENDLESS[name], {}, name="mine.jinja").render(MESSAGES)


def test_threads_have_budgets_of_their_own():
    rounds = MAX_STEPS // 4
    template = ChatTemplate(f"{{% for a in range({rounds}) %}}{{% endfor %}}done", {})
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(template.render(MESSAGES))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["done"] * 8


def test_a_thread_ends_a_recursion_too():
    errors: list[str] = []

    def render() -> None:
        try:
            ChatTemplate(ENDLESS["recursion"], {}).render(MESSAGES)
        except TemplateError as error:
            errors.append(str(error))

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "RecursionError" in errors[0]


def test_a_long_conversation_is_within_the_budget():
    text = "word " * 100_000
    messages = [{"role": "user", "content": text}] * 200
    assert len(ChatTemplate(USUAL["chatml"], {}).render(messages)) > 200 * len(text)


def test_what_a_template_says_of_a_conversation_is_in_the_error():
    with pytest.raises(TemplateError, match="no system message, please"):
        ChatTemplate("{{ raise_exception('no system message, please') }}", {}).render(MESSAGES)


def test_the_date_can_be_fixed():
    """Llama 3.2 and SmolLM3 show it; what a template shows of the time is midnight then."""
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", {}, date=datetime.date(2024, 7, 26))
    assert template.render(MESSAGES) == "26 Jul 2024 00:00"
    before = datetime.date.today()
    shown = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render(MESSAGES)
    assert before.isoformat() <= shown <= datetime.date.today().isoformat()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages | random }}", "the filter random renders a different prompt each time"),
        (
            "{{ messages[0].content.strip }}",
            r"it prints strip itself, whose text differs in each process; call it: str",
        ),
        ("{{ 'a' ~ strftime_now }}", "it prints partial itself"),
        ("{{ range }}", "it prints safe_range itself"),
        ("{{ joiner(',') }}", "it prints joiner itself"),
    ],
)
def test_what_would_differ_from_process_to_process_is_refused(source, reason):
    with pytest.raises(TemplateError, match=reason):
        ChatTemplate(source, {}).render(MESSAGES)
