"""What the command line says of errors and interruptions.

The library names its parameters (``batch_size``), the command line its options (``--batch-size``): messages of
:class:`stoker.base.errors.StokerError` are put into the words of the command that was called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from stoker.base.errors import DataError, SchemaError, StokerError

__all__ = ["interruption", "message_of", "with_options"]


def with_options(message: str, options: Mapping[str, str], settings: Iterable[str] = ()) -> str:
    """The message with options in place of parameter names.

    Args:
        message: what the library says.
        options: parameter name -> option, of the command that was called.
        settings: names to replace besides those with an underscore, which are no words of English.
    """
    names = [name for name in options if "_" in name or name in set(settings)]
    if not names:
        return message
    # Not inside a path, a quotation or an option; not the noun in "3 epochs". A switch of the library is name=True.
    pattern = rf"(?<![\w./\\'\"-])(?<!\d )({'|'.join(map(re.escape, names))})(?:=True)?(?![\w/\\'\"(-]|\.\w)"
    return re.sub(pattern, lambda found: options[found[1]], message)


def message_of(error: StokerError, options: Mapping[str, str]) -> str:
    """An error in the words of the command line. Files have columns and keys of their own, so only the parameters
    that an error about a file carries are replaced there."""
    if isinstance(error, DataError | SchemaError):
        options = {name: option for name, option in options.items() if name in error.settings}
    return with_options(str(error), options, error.settings)


def interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C behind an error, however often wrapped: packages turn it into errors of theirs while imported."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        if isinstance(found, KeyboardInterrupt):
            return found
        seen.add(id(found))
        waiting += [found.__cause__, found.__context__]
    return None
