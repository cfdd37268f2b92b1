"""Options in messages: rooms that serve Python and the command line name them as Python does."""

import re

from spillway.spec.options import TrainOptions

_NAMES = tuple(TrainOptions.__dataclass_fields__)
_VALUE = r"""=(?P<quote>['"]?)(?P<value>[\w.+-]*\w)(?P=quote)"""
# With a value any of them; by itself one that is not also a word. Not what is a part of a path or of a longer name.
_OPTION = re.compile(
    rf"(?<![\w./='-])(?:(?P<given>{'|'.join(_NAMES)}){_VALUE}|(?P<bare>{'|'.join(filter(lambda n: '_' in n, _NAMES))}))"
    rf"(?![\w/=(])"
)


def as_flags(message: str) -> str:
    """The message with flags of the command line in the place of keyword arguments."""
    return _OPTION.sub(_flag, message)


def _flag(found: re.Match[str]) -> str:
    flag = "--" + (found["given"] or found["bare"]).replace("_", "-")
    value = found["value"]
    return flag if value in (None, "True") else f"{flag} {value}"
