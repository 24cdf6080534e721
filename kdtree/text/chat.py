"""A conversation as the prompt that a model was trained on: its chat template, then its tokens."""

import json
from itertools import islice
from pathlib import Path

from kdtree.checks import flag
from kdtree.errors import CheckpointError, ConfigError
from kdtree.files import has_file
from kdtree.text.files import named_tokens, read_config
from kdtree.text.sandbox import Sandbox
from kdtree.text.tokenizer import Tokenizer

PRIVATE = range(0xF0000, 0x10FFFE)  # Unicode's planes for private use

Message = dict[str, object]


class ChatTemplate:
    """The chat templates of a model directory, one or several by name, and its tokenizer.

    What is guaranteed of the tokens: with the control tokens' names in their places they spell
    the text that jinja2 makes of the template and the values, exactly; and a control token stands
    only where the template wrote it itself, at least its first character that is no letter or
    digit (of "<|im_end|>" the "<"). What a message, a tool or another value spells is encoded as
    the words it is, though it be "<|im_end|>", or two halves of it in two values.

    To know who wrote what, the template is rendered twice: with the values as they are, and with
    those characters of theirs replaced by private ones of Unicode, one by one. Where the second
    text with the characters put back is not the first, the template has changed or examined them
    in a way that cannot be followed, and the messages are refused.
    """

    def __init__(
        self, path: Path, templates: dict[str, str], variables: dict, tokenizer: Tokenizer
    ):
        """path: of the file, for errors; variables: the template's, besides the conversation"""
        self._path, self._templates, self._variables = path, templates, variables
        self._tokenizer, self._sandbox = tokenizer, Sandbox()

    def encode(
        self,
        messages: list[Message],
        tools: list[dict] | None = None,
        variables: dict | None = None,
        add_generation_prompt: bool = True,
    ) -> tuple[str, list[int]]:
        """The conversation as text, and its tokens; no beginning-of-sequence token is added to it.

        messages: in order, each {"role": text, "content": text, ...}; tools: JSON schemas
        variables: others of the template's; add_generation_prompt: begin the assistant's turn
        Raises ConfigError where the template is broken, hostile or takes too much; ValueError where
        it refuses the messages or fails on them; TypeError on messages that are of no such kind.
        """
        if not isinstance(variables, dict | None):
            raise TypeError(f"chat_template_kwargs is {variables!r}, wants a dictionary")
        own = {"documents": None} | (variables or {})
        taken = sorted({"messages", "tools", "add_generation_prompt"} & own.keys())
        if taken:
            raise ValueError(f"chat_template_kwargs holds {taken}, which chat sets itself")
        own |= {"messages": messages, "tools": tools}
        spelled = _spell(own)
        signs = sorted(sign for sign in self._tokenizer.control.signs if sign in spelled)
        unused = (c for c in map(chr, PRIVATE) if c not in spelled)
        marks = dict(zip(islice(unused, len(signs)), signs, strict=True))
        marked = _translate(own, str.maketrans(dict(zip(signs, marks, strict=True))))
        begin = flag("add_generation_prompt", add_generation_prompt)
        common = self._variables | {"add_generation_prompt": begin}
        text, marked = self._sandbox.render(
            str(self._path), self._choose(tools), [common | own, common | marked], marks
        )
        if marked.translate(str.maketrans(marks)) != text:
            raise ValueError(
                f"the chat template {self._path} changes or looks for one of {' '.join(signs)} in "
                "the messages, so that special tokens spelled there cannot be told from its own"
            )
        return text, self._tokenizer.encode_marked(marked, marks)

    def _choose(self, tools: list[dict] | None) -> str:
        """As transformers does: "tool_use" for tools, where there is one, else "default"."""
        names = ["tool_use"] * bool(tools) + ["default"]
        chosen = [self._templates[name] for name in names if name in self._templates]
        if not chosen:
            raise ConfigError(
                f"{self._path} names the chat templates {sorted(self._templates)}, wants one "
                "called 'default'"
            )
        return chosen[0]


def load_chat_template(directory: str | Path, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The model directory's chat templates, None where it has none or no tokenizer.

    Raises as read_chat_templates.
    """
    found = None if tokenizer is None else read_chat_templates(directory)
    return ChatTemplate(*found, tokenizer) if found else None


def read_chat_templates(directory: str | Path) -> tuple[Path, dict[str, str], dict] | None:
    """chat_template.jinja, else "chat_template" of tokenizer_config.json; None of neither.

    returns the file, the templates by name, and the variables that tokenizer_config.json gives them
    Raises CheckpointError on a file that cannot be read, ConfigError on an entry of another kind.
    """
    config = read_config(Path(directory))
    path = Path(directory) / "chat_template.jinja"
    if has_file(path, CheckpointError):
        try:
            given = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    else:
        path, given = Path(directory) / "tokenizer_config.json", config.get("chat_template")
    if given is None:
        return None
    try:
        named = [{"name": "default", "template": given}] if isinstance(given, str) else given
        templates = {entry["name"]: entry["template"] for entry in named}
        if not all(isinstance(text, str) for pair in templates.items() for text in pair):
            raise TypeError
    except (TypeError, KeyError):
        raise ConfigError(
            f"{path} has chat_template {str(given)[:80]}, wants a string or a list of "
            '{"name": string, "template": string}'
        ) from None
    return path, templates, named_tokens(config)


def _spell(values: dict) -> str:
    """All of the values as JSON, after a check that they are that."""
    messages, tools = values["messages"], values["tools"]
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages is {messages!r}, wants a list of at least one message")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(f"messages holds {message!r}, wants {{'role': text, 'content': text}}")
    listed = isinstance(tools, list | tuple) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not listed:
        raise TypeError(f"tools is {tools!r}, wants a list of JSON schemas")
    try:
        return json.dumps(_translate(values, {}), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"messages, tools or chat_template_kwargs are not JSON: {error}") from None


def _translate(value: object, table: dict[int, str]) -> object:
    """The value with the characters of all its strings, keys included, replaced."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, list | tuple):
        return [_translate(item, table) for item in value]
    if isinstance(value, dict):
        return {_translate(key, table): _translate(item, table) for key, item in value.items()}
    return value
