"""Errors that specdec raises. Each says what came, what was expected and what to do."""


class SpecdecError(Exception):
    """Base class of all errors raised by this library."""


class UnsupportedError(SpecdecError, ValueError):
    """A request, model or combination that speculation cannot serve exactly; the message names it."""


class ShapeError(SpecdecError, ValueError):
    """A tensor whose shape or content does not fit its place, or what is no tensor in the place of one."""


class LawError(SpecdecError, AssertionError):
    """A part that breaks a law of its seam; raised by the checkers of `specdec.testing`."""
