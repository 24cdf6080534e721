"""What a chat template can take, and what happens to one that wants more."""

import gc
import os
import signal
import threading
import time

import pytest
from chat_templates import ENDLESS, GREEDY, HOSTILE
from says import says

from kdtree.errors import ConfigError
from kdtree.text import sandbox

VALUES = [{"messages": [{"role": "user", "content": "hi"}]}]


@pytest.fixture
def box(monkeypatch):
    """It gives a template half a gigabyte; after anything it still works."""
    monkeypatch.setattr(sandbox, "MEMORY", 1 << 29)
    made = sandbox.Sandbox()
    yield made
    assert made.render("x", "a{{ b }}", [{"b": 1}, {"b": 2}], {}) == ["a1", "a2"]


@pytest.mark.parametrize("template", ENDLESS)
def test_endless(box, monkeypatch, template):
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    began = time.monotonic()
    with says(ConfigError, "the chat template some.jinja takes more than 0.5 s"):
        box.render("some.jinja", template, VALUES, {})
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("template", GREEDY)
def test_greedy(box, template):
    with says(ConfigError, "the chat template some.jinja takes more than", "512 MB"):
        box.render("some.jinja", template, VALUES, {})


@pytest.mark.parametrize("template", HOSTILE)
def test_hostile(box, template):
    with says(ConfigError, "the chat template some.jinja does what the sandbox forbids"):
        box.render("some.jinja", template, VALUES, {})


@pytest.mark.parametrize(
    "template, error, message",
    [
        ("a\n{% if %}", ConfigError, "has a mistake in line 2"),
        ("{{ 'a' | nonsense }}", ConfigError, "has a mistake in line 1: No filter named"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ConfigError, "calls itself"),
        ("{% for i in range(10 ** 6) %}{% endfor %}", ConfigError, "asks for too much: Range"),
        ("{{ 'a' * (2 ** 24 + 1) }}", ConfigError, "writes more than 16777216 characters"),
        ("{{ raise_exception('why') }}", ValueError, "refuses the messages: why"),
        ("{{ messages[9].content }}", ValueError, "fails on the messages: UndefinedError"),
        ("{{ messages + 1 }}", ValueError, "fails on the messages: TypeError"),
        ("{% include '/etc/passwd' %}", ValueError, "fails on the messages"),
    ],
)
def test_faults(box, template, error, message):
    with says(error, "the chat template some.jinja", message):
        box.render("some.jinja", template, VALUES, {})


def test_a_process_that_was_killed(box):
    box.render("x", "a", VALUES, {})
    os.kill(box._process.pid, signal.SIGKILL)
    with says(ConfigError, "ended its process", -signal.SIGKILL):
        box.render("x", "a", VALUES, {})


def test_an_interruption_leaves_no_reply_behind(box, monkeypatch):
    box.render("x", "a", VALUES, {})
    first = box._process

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(first.stdout, "readline", interrupted)
    with pytest.raises(KeyboardInterrupt):
        box.render("x", "late", VALUES, {})
    assert first.returncode is not None


def test_the_process_ends_with_its_owner():
    box = sandbox.Sandbox()
    box.render("x", "a", VALUES, {})
    process = box._process
    del box
    gc.collect()
    assert process.returncode is not None


def test_several_threads(box):
    """Each gets its own text."""
    got = {}

    def ask(name):
        for _ in range(20):
            got.setdefault(name, set()).add(*box.render("x", "{{ n }}", [{"n": name}], {}))

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {name: {name} for name in "abcd"}


def test_all_texts_of_a_request_are_of_one_moment(box):
    slow = "{{ strftime_now('%f') }}{% for i in range(50000) %}{% endfor %}{{ strftime_now('%f') }}"
    first, second = box.render("x", slow, VALUES * 2, {})
    assert first == second and first[:6] == first[6:]
