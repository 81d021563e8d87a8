"""Templates of strangers: whatever they try, they are refused soon and within bounds."""

from __future__ import annotations

import resource
import threading
import time

import pytest

from moe_runtime.engine import template_sandbox
from moe_runtime.engine.text import ChatTemplate
from moe_runtime.errors import InvalidRequestError

CHATS = [[{"role": "user", "content": "Hello <b>you</b> & co"}]]
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{% for d in [0] recursive %}{% if loop.depth < 40 %}{{ loop([0]) }}{{ loop([0]) }}{% endif %}{% endfor %}",
    "{% for x in range(10 ** 9) %}{% endfor %}",
    "{% set r = range(99999) %}{% for i in r %}{% set _ = r | sum %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{% set x = 10 ** 10 ** 10 %}",
    "{{ lipsum(10 ** 9) }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a' | indent(width=10 ** 10) }}",
    "{{ [1] | batch(10 ** 10, 0) | list }}",
    "{{ '%100000000d' % 1 }}",
    "{{ '%*d' % (99999, 1) }}",
    "{{ '%100000000d' | format(1) }}",
    "{{ '{:100000000}'.format(1) }}",
    "{{ '{0:{1}}'.format(1, 99999) }}",
    "{{ '{x:100000000}'.format_map({'x': 1}) }}",
    "{% for i in range(99999) %}{% set x = messages | length %}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_without_end_is_refused(source, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_TEMPLATE_STEPS", 20_000)
    monkeypatch.setattr(template_sandbox, "MAX_TEMPLATE_CPU_S", 0.3)
    monkeypatch.setattr(template_sandbox, "MAX_TEMPLATE_CHARS", 100_000)
    template = ChatTemplate(source)
    with pytest.raises(InvalidRequestError, match="cannot be rendered by the chat template"):
        template.render(CHATS[0], {})


@pytest.mark.parametrize("source", [source for source in ENDLESS if "format" in source or "%1" in source])
def test_a_wide_format_is_refused_before_it_is_made(source):
    with pytest.raises(InvalidRequestError, match="it formats with a width"):
        ChatTemplate(source).render(CHATS[0], {})


def test_threads_do_not_share_a_budget(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_TEMPLATE_STEPS", 3000)
    template = ChatTemplate("{% for i in range(2000) %}{% endfor %}done")
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(template.render(CHATS[0], {}))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["done"] * 4


GROW = "{% set n = namespace(s='a' * 1000) %}{% for i in range(8) %}{% set n.s = n.s ~ n.s %}{% endfor %}"  # 256 kB
NEST = (
    "{% set n = namespace(s=['aaaaaaaaaa']) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
)
HUGE = [
    NEST + "{{ n.s }}",
    NEST + "{{ n.s ~ '' }}",
    NEST + "{{ n.s | string }}",
    NEST + "{{ n.s | tojson }}",
    NEST + "{{ n.s | pprint }}",
    NEST + "{{ n.s | join }}",
    NEST + "{{ '%s' % n.s }}",
    NEST + "{{ '%s' | format(n.s) }}",
    NEST + "{{ '{}'.format(n.s) }}",
    NEST + "{{ raise_exception(n.s) }}",
    NEST.replace("[n.s, n.s]", "{'a': n.s, 'b': n.s}") + "{{ n.s }}",
    GROW + "{{ n.s.join(range(99999) | map('string')) }}",
    GROW + "{{ n.s.join(['a'] * 99999) }}",
    GROW + "{{ range(99999) | join(n.s) }}",
    GROW + "{{ n.s.replace('a', n.s) }}",
    GROW + "{{ n.s.replace('', n.s) }}",
    GROW + "{{ n.s | replace('a', n.s) }}",
    GROW + "{{ ('\\n' * 99999) | indent(n.s) }}",
    GROW + "{{ ('\\n' * 9999999) | indent(9999) }}",
    GROW + "{{ n.s | wordwrap(1, wrapstring=n.s) }}",
    GROW + "{{ ('%s' * 9999) % ([n.s] * 9999) }}",
    GROW + "{{ ('%(a)s' * 9999) % {'a': n.s} }}",
    GROW + "{{ ('{0}' * 9999).format(n.s) }}",
    GROW + "{{ ('{a}' * 9999).format(a=n.s) }}",
    GROW + "{{ ('{a}' * 9999).format_map({'a': n.s}) }}",
    GROW + "{{ ('%s' * 9999) | format(n.s) }}",
    GROW + "{{ 'a'.translate({97: n.s}) }}",
    GROW + "{{ (n.s | safe).join(['a'] * 99999) }}",
    GROW + "{{ (('a' * 9999) | safe).replace('a', n.s) }}",
    GROW + "{{ (('{a}' * 9999) | safe).format(a=n.s) }}",
    GROW + "{{ (('\\t' * 999999) | safe).expandtabs(999999) }}",
    GROW + "{{ (('%s' * 9999) | safe) % ([n.s] * 9999) }}",
    "{{ (':' * 2000000).format() ~ (':' * 2000000).format() }}",
    GROW + "{{ [n.s] * 999 }}",
    GROW
    + "{% set l = namespace(l=[]) %}{% for i in range(9999) %}{% set l.l = l.l + [n.s ~ i] %}{% endfor %}",
    "{{ ('\\t' * 999999).expandtabs(999999) }}",
    "{{ ('\\t' * 999999).expandtabs(tabsize=999999) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ messages | tojson(indent='x' * 10 ** 7) }}",
    "{{ messages | tojson(separators=('x' * 10 ** 7, 'y')) }}",
    "{{ ('x ' * 1000000).split() | length }}",
    "{{ ([0] * 99999999) | sort }}",
    "{% set n = namespace(i=10) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "{{ strftime_now('%c' * 9999999) }}",
    "{{ 'a' * 2000000 }}" * 2000,
    "{{ ('a' * 2000000).upper() | length }}" * 2000,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% for i in range(2) %}" * 400 + "{% endfor %}" * 400,
]


@pytest.mark.parametrize("source", HUGE, ids=range(len(HUGE)))
def test_a_template_that_would_fill_the_memory_is_refused_before_it_does(source, monkeypatch):
    """At an eighth of the bounds that are in force: little time, and less than 256 MiB more memory."""
    for name in ("MAX_TEMPLATE_CHARS", "MAX_TEMPLATE_ITEMS", "MAX_TEMPLATE_STEPS"):
        monkeypatch.setattr(template_sandbox, name, getattr(template_sandbox, name) // 8)
    monkeypatch.setattr(template_sandbox, "MAX_TEMPLATE_CPU_S", 1.0)
    template = ChatTemplate(source)
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    begun_s = time.thread_time()
    with pytest.raises(InvalidRequestError, match="cannot be rendered by the chat template"):
        template.render(CHATS[0], {})
    assert time.thread_time() - begun_s < template_sandbox.MAX_TEMPLATE_CPU_S + 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes < 2**28


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ('' | attr('\\x5f\\x5fclass\\x5f\\x5f')).__base__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{a.__class__}'.format_map({'a': ''}) }}",
        "{{ ['{0.__class__}'] | map('format', '') | join }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ loop.__class__ }}",
        "{{ messages.__class__ }}",
        "{{ messages[0].__class__ }}",
        "{{ (messages | __counted)._items.append(1) }}",
        "{{ (messages | map('length')).gi_frame.f_globals }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='x') }}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{% from 'x' import y %}",
    ],
)
def test_internals_are_out_of_reach(source):
    """Refused, or undefined and so empty; nothing of Python's comes out."""
    chat = [dict(message) for message in CHATS[0]]
    try:
        text = ChatTemplate(source).render(chat, {})
    except InvalidRequestError:
        text = ""
    assert text in ("", "{a.__class__}") or "class" not in text
    assert not {"<", "module", "built-in"} & set(text.split("'"))
    assert chat == CHATS[0]


def test_long_conversations_are_within_the_bounds():
    """The control: what templates do to megabytes of text is allowed."""
    source = (
        "{% set n = namespace(text='') %}{% for m in messages %}"
        "{% set n.text = m.content.replace('a', 'bb').split('</think>')[-1].strip('\\n') | trim | replace('b', 'c') %}"
        "<{{ m.role }}>{{ n.text }}{{ m | tojson }}{{ '%s: %s' % (m.role, n.text) }}{{ m.role ~ n.text ~ loop.index }}"
        "{{ [m.role, n.text] | join(', ') }}{{ n.text | indent(4) }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "a word or two\n" * 700}] * 100  # 1 MB
    assert len(ChatTemplate(source).render(chat, {})) > 5 * 10**6
