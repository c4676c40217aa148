"""Every change that this project makes to SGLang's code at run time: how it is installed and how it is verified.

A correction replaces one named thing in one module and says what is wrong there. It is installed in the process that
runs the scheduler and then looked up again through every name that SGLang calls it by, because a plugin that failed to
load, or a `from x import y` that ran too early, would otherwise leave upstream's code in place without a word.

The list itself is in `kimi_draft.installed`; this module holds the mechanism and imports neither torch nor SGLang.
"""

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

SGLANG_VERSION = "0.5.23"
_MARK = "kimi_correction"
_PATH = re.compile(r"(?P<module>[\w.]+):(?P<owner>[\w.]*?)\.?(?P<name>\w+)(\[(?P<key>\w+)\])?$")


class CorrectionError(RuntimeError):
    """A correction could not be installed or did not take effect; the message says which, and what is in its place."""


@dataclass(frozen=True)
class Correction:
    """One replacement.

    where: "module:Class.name", "module:name" or "module:table[key]". make: upstream's object -> ours, which must be a
    function or a class. why: upstream's file:line in SGLang 0.5.23 and what is wrong or missing there. also: further
    names, in the same notation, under which callers hold the same object.
    """

    name: str
    where: str
    why: str
    make: Callable[[Any], Any]
    also: tuple[str, ...] = ()

    def install(self) -> None:
        """Idempotent. Raises CorrectionError when the place does not exist."""
        upstream = _get(self, self.where)
        if self.name in getattr(upstream, _MARK, ()):
            return
        ours = self.make(upstream)
        # functools.wraps hands the marks of what it wraps on, so a wrapper of a correction still counts as one.
        setattr(ours, _MARK, (*getattr(ours, _MARK, ()), self.name))
        ours.kimi_upstream = upstream
        for place in (self.where, *self.also):
            _set(self, place, ours)

    def verify(self) -> None:
        """Raises CorrectionError unless every name leads to the correction."""
        for place in (self.where, *self.also):
            found = _get(self, place)
            if self.name not in getattr(found, _MARK, ()):
                raise CorrectionError(
                    f"correction '{self.name}' did not take effect: {place} is {found!r} ({self.why})"
                )


def check_version() -> None:
    """Raises CorrectionError unless the installed SGLang is the one that the corrections were written against."""
    from importlib.metadata import version

    found = version("sglang")
    if found != SGLANG_VERSION:
        raise CorrectionError(f"SGLang {found} is installed; kimi_draft corrects SGLang {SGLANG_VERSION} and no other.")


def install_and_verify(corrections: Iterable[Correction]) -> None:
    """Install all, then look at all of them again: a later one may have undone an earlier one."""
    todo = list(corrections)
    for correction in todo:
        correction.install()
    for correction in todo:
        correction.verify()


def _owner(correction: Correction, place: str) -> tuple[Any, str, str | None]:
    match = _PATH.fullmatch(place)
    if match is None:
        raise CorrectionError(f"correction '{correction.name}': {place!r} is not module:name")
    try:
        owner: Any = importlib.import_module(match["module"])
        for part in filter(None, match["owner"].split(".")):
            owner = getattr(owner, part)
    except (ImportError, AttributeError) as error:
        raise CorrectionError(f"correction '{correction.name}': {place} is not there: {error}") from error
    return owner, match["name"], match["key"]


def _get(correction: Correction, place: str) -> Any:
    owner, name, key = _owner(correction, place)
    if not hasattr(owner, name):
        raise CorrectionError(f"correction '{correction.name}': {place} is not there")
    found = getattr(owner, name)
    return found if key is None else found.get(key)


def _set(correction: Correction, place: str, value: Any) -> None:
    owner, name, key = _owner(correction, place)
    if key is None:
        setattr(owner, name, value)
    else:
        getattr(owner, name)[key] = value
