"""Between text and tokens: tokenizers, chat templates, text as its tokens arrive, stop strings.

What the tokens mean to a model (end of sequence, say) is not known here. Everything that decodes
works token by token, so that a text can end anywhere inside a run of tokens that a round accepts.
"""

from kdtree.text.chat import ChatTemplate, Message, load_chat_template, read_chat_templates
from kdtree.text.load import TOKENIZERS, load_tokenizer, tokenizer_file
from kdtree.text.stream import Detokenizer, StopStrings
from kdtree.text.tokenizer import Tokenizer

__all__ = [
    "TOKENIZERS",
    "ChatTemplate",
    "Detokenizer",
    "Message",
    "StopStrings",
    "Tokenizer",
    "load_chat_template",
    "load_tokenizer",
    "read_chat_templates",
    "tokenizer_file",
]
