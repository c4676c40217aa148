"""A correction that does not take effect is an error, never a log line."""

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kimi_draft import corrections
from kimi_draft.corrections import Correction, CorrectionError, check_version, install_and_verify


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a class, a table and a function that a second module imported by name."""
    first, second = ModuleType("corrected_one"), ModuleType("corrected_two")

    def function() -> str:
        return "upstream"

    first.function = second.function = function  # type: ignore[attr-defined]
    first.Class = type("Class", (), {"method": lambda self: "upstream"})  # type: ignore[attr-defined]
    first.TABLE = {"key": function}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "corrected_one", first)
    monkeypatch.setitem(sys.modules, "corrected_two", second)
    return SimpleNamespace(first=first, second=second)


def louder(upstream: Any) -> Any:
    return lambda *args: upstream(*args) + "!"


@pytest.mark.parametrize("where", ["corrected_one:function", "corrected_one:Class.method", "corrected_one:TABLE[key]"])
def test_replaces_once(module: Any, where: str) -> None:
    todo = [Correction("louder", where, "why", louder)]
    install_and_verify(todo)
    install_and_verify(todo)
    call = {
        "corrected_one:function": lambda: module.first.function(),
        "corrected_one:Class.method": lambda: module.first.Class().method(),
        "corrected_one:TABLE[key]": lambda: module.first.TABLE["key"](),
    }[where]
    assert call() == "upstream!"


def test_names_imported_elsewhere_are_replaced_too(module: Any) -> None:
    install_and_verify([Correction("louder", "corrected_one:function", "", louder, ("corrected_two:function",))])
    assert module.second.function() == "upstream!"


def test_undone_is_noticed(module: Any) -> None:
    correction = Correction(
        "louder", "corrected_one:function", "one.py:1: too quiet", louder, ("corrected_two:function",)
    )
    correction.install()
    module.second.function = lambda: "upstream again"
    with pytest.raises(CorrectionError, match=r"'louder' did not take effect: corrected_two:function.*one.py:1"):
        correction.verify()


def test_undone_by_a_later_correction(module: Any) -> None:
    todo = [
        Correction("louder", "corrected_one:function", "", louder),
        Correction("other", "corrected_one:function", "", lambda upstream: lambda: "other"),
    ]
    with pytest.raises(CorrectionError, match="'louder' did not take effect"):
        install_and_verify(todo)


def test_a_wrapper_of_a_correction_keeps_it(module: Any) -> None:
    def watch(upstream: Any) -> Any:
        return functools.wraps(upstream)(lambda *args: f"[{upstream(*args)}]")

    todo = [
        Correction("louder", "corrected_one:function", "", louder),
        Correction("watch", "corrected_one:function", "", watch),
    ]
    install_and_verify(todo)
    install_and_verify(todo)
    assert module.first.function() == "[upstream!]"


@pytest.mark.parametrize("where", ["corrected_one:gone", "corrected_one:Gone.method", "no_such_module:function"])
def test_a_place_that_is_gone(module: Any, where: str) -> None:
    with pytest.raises(CorrectionError, match=f"'louder'.*{where}.*is not there"):
        install_and_verify([Correction("louder", where, "", louder)])


def test_only_the_pinned_version(monkeypatch: pytest.MonkeyPatch) -> None:
    check_version()
    monkeypatch.setattr(corrections, "SGLANG_VERSION", "0.5.22")
    with pytest.raises(CorrectionError, match=r"SGLang 0.5.23 is installed; kimi_draft corrects SGLang 0.5.22"):
        check_version()
