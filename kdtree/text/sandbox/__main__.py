"""Renders chat templates for kdtree.text.sandbox: a JSON object a line in, one a line out.

In:  {"template": source, "marks": {mark: character}, "values": [variables, ...]}
Out: {"texts": [of each variables]}, or {"fault": "template" or "messages", "says": what is wrong}

Run as a program: it imports nothing of kdtree, and what a template can take of the machine is
limited for this process. The time limit is the system's, since no other ends a single long
operation: it kills the process.
"""

import functools
import json
import resource
import signal
import sys
from datetime import datetime

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer


class Refusal(TemplateError):
    """What a template raises by raise_exception."""


class Environment(ImmutableSandboxedEnvironment):
    """Jinja2 as chat templates expect it, blind to marks.

    A mark stands for another character, so that one can tell whether the template or a message
    wrote it. The template must go the same way as without: comparisons see the characters, and a
    method of a marked string, such as split, gets its arguments marked.
    """

    def __init__(self):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        self.now, self.marks, self.marked = datetime.now(), {}, {}
        self.filters["tojson"] = _to_json
        self.filters["without_marks"] = self.without_marks
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda format: self.now.strftime(format)

    def begin(self, marks: dict[str, str]) -> None:
        """A request: its marks, and the one moment that all of its texts are rendered at."""
        self.now = datetime.now()
        self.marks = str.maketrans(marks)
        self.marked = str.maketrans({character: mark for mark, character in marks.items()})

    def without_marks(self, value):
        if isinstance(value, str):
            return value.translate(self.marks)
        if isinstance(value, list | tuple):
            return [self.without_marks(item) for item in value]
        if isinstance(value, dict):
            return {self.without_marks(key): value[key] for key in value}
        return value

    def with_marks(self, value):
        if isinstance(value, str):
            return value.translate(self.marked)
        return tuple(map(self.with_marks, value)) if isinstance(value, tuple) else value

    def call(self, context, function, /, *args, **kwargs):
        text = getattr(function, "__self__", None)
        if isinstance(text, str) and text.translate(self.marks) != text:
            args = [self.with_marks(value) for value in args]
        return super().call(context, function, *args, **kwargs)


class Generation(Extension):
    """{% generation %}: marks the assistant's words for training; here it is what is in it."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Comparisons(NodeTransformer):
    """Makes both sides of every comparison lose their marks."""

    def visit_Compare(self, node):
        self.generic_visit(node)
        for side in (node, *node.ops):
            side.expr = nodes.Filter(
                side.expr, "without_marks", [], [], None, None, lineno=node.lineno
            )
        return node


def _refuse(message):
    raise Refusal(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """As transformers' templates expect it: no HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.lru_cache(maxsize=8)
def _compile(environment: Environment, source: str) -> Template:
    return environment.from_string(Comparisons().visit(environment.parse(source)))


def _answer(environment: Environment, request: dict, memory: int, characters: int) -> dict:
    try:
        environment.begin(request["marks"])
        template = _compile(environment, request["template"])
        texts = [template.render(values) for values in request["values"]]
        if max(map(len, texts)) > characters:
            return _fault("template", f"writes more than {characters} characters")
        return {"texts": texts}
    except Refusal as error:
        return _fault("messages", f"refuses the messages: {error}")
    except TemplateSyntaxError as error:
        return _fault("template", f"has a mistake in line {error.lineno}: {error.message}")
    except SecurityError as error:
        return _fault("template", f"does what the sandbox forbids: {error}")
    except RecursionError:
        return _fault("template", "calls itself without end")
    except MemoryError:
        return _fault("template", f"takes more than {memory >> 20} MB")
    except OverflowError as error:
        return _fault("template", f"asks for too much: {error}")
    except Exception as error:
        return _fault("messages", f"fails on the messages: {type(error).__name__}: {error}")


def _fault(fault: str, says: str) -> dict:
    return {"fault": fault, "says": says}


def main(seconds: float, memory: int, characters: int) -> None:
    """Limits of a request: processor time, memory of the process in bytes, length of a text."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    environment = Environment()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = json.dumps(_answer(environment, json.loads(line), memory, characters))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
