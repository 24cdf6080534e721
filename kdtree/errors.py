"""The four errors that the library raises beside ValueError and TypeError."""


class ConfigError(Exception):
    """A configuration names a key, value or architecture that is not supported."""


class CheckpointError(Exception):
    """A checkpoint's tensors are missing, unused, truncated, duplicate or mis-shaped."""


class CapacityError(Exception):
    """More was asked than there is room for: tokens, nodes or memory."""


class NumericsError(Exception):
    """A logit on the committed path is not finite.

    step: round of the generation, from 0
    position: absolute position of the token that could not be drawn
    """

    def __init__(self, step: int, position: int):
        super().__init__(step, position)  # what pickle makes it from
        self.step = step
        self.position = position

    def __str__(self) -> str:
        return f"non-finite logits at step {self.step}, position {self.position}"
