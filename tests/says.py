"""What an error's message must hold."""

import re

import pytest


def says(kind, *parts):
    """Raises this error, with these parts in its message, in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, map(str, parts))))
