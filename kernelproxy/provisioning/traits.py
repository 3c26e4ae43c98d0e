"""Traits for the options of `kernelproxy.common.options`."""

from __future__ import annotations

from typing import Any

from traitlets import Bool, Float, Int, TraitType, Unicode

from kernelproxy.common.options import Kind, Option

#: A size or a path is not read here, but by the daemon, whose errors reach its caller.
_TYPES: dict[Kind, type[TraitType[Any, Any]]] = {
    Kind.SECONDS: Float,
    Kind.COUNT: Int,
    Kind.SWITCH: Bool,
    Kind.BYTES: Unicode,
    Kind.PATH: Unicode,
    Kind.TEXT: Unicode,
}


def trait(option: Option, *, given: bool = False) -> Any:
    """Return a configurable trait for an option; its default is read from the variable.

    Parameters
    ----------
    option : Option
    given : bool
        The trait is None where the option is not set: what applies then is decided elsewhere.
    """
    if _TYPES[option.kind] is Unicode:
        unset: Any = option.default if isinstance(option.default, str) else ""
    else:
        unset = None if given else option.default
    base = _TYPES[option.kind]
    made = type(base.__name__, (_FromEnvironment, base), {"option": option, "unset": unset})
    return made(allow_none=unset is None, help=_help(option)).tag(config=True)


class _FromEnvironment(TraitType[Any, Any]):
    """Trait whose default is the value of a variable at the time when it is first read."""

    option: Option
    unset: Any

    def default(self, obj: Any = None) -> Any:
        if obj is None or not self.option.has_variable:
            return self.unset
        if isinstance(self, Unicode):
            return self.option.text() or self.unset
        return self.option.read_or(self.unset, obj.log)

    def default_value_repr(self) -> str:
        return repr(self.unset)


def _help(option: Option) -> str:
    usual = option.default_text
    if option.has_variable:
        usual = f"{option.variable}, else {usual}"
    return f"{option.help} Default: {usual}."
