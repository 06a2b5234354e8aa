"""A cursor over the tokens of IR text that collects errors and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import TypeVar

from edgecc.errors import Diagnostic, EdgeccError, InputError
from edgecc.ir.lexer import Kind, Token, tokenize

T = TypeVar("T")

MAX_ERRORS = 20

MAX_DIGITS = 100
"""Digits of a whole number: far beyond any size, and read in no time."""


class IrSyntaxError(Exception):
    """One error at a token; becomes a diagnostic with line, column and caret."""

    def __init__(self, message: str, token: Token, help: str = "") -> None:
        super().__init__(message)
        self.token = token
        self.help = help


class FollowUpError(Exception):
    """A statement uses what a broken one would have defined: not worth a message of its own."""


class TokenStream:
    """Tokens, a position, and the errors so far.

    Args:
        text: IR text.
        file: Name for messages.
        statements: Words that begin a statement at the top: where parsing goes on after an error.
    """

    def __init__(self, text: str, file: str, statements: Collection[str]) -> None:
        self.lines = text.split("\n")
        self.file = file
        self.statements = statements
        self.tokens = list(tokenize(text))
        self.at = 0
        self.errors: list[Diagnostic] = []

    @property
    def token(self) -> Token:
        """The next token."""
        return self.tokens[self.at]

    def take(self, kind: Kind) -> Token:
        """Consume a token of a kind."""
        token = self.token
        if token.kind is not kind:
            raise self.expected(kind.value)
        self.at += 1
        return token

    def expected(self, what: str) -> IrSyntaxError:
        """An error at the next token."""
        found = repr(self.token.text) if self.token.text else self.token.kind.value
        return IrSyntaxError(f"expected {what}, found {found}", self.token)

    def punctuation(self, text: str) -> Token:
        """Consume this punctuation."""
        if not self.is_next(text):
            raise self.expected(f"'{text}'")
        self.at += 1
        return self.tokens[self.at - 1]

    def is_next(self, text: str) -> bool:
        """Whether the next token is this word or punctuation."""
        return self.token.text == text and self.token.kind in (Kind.PUNCTUATION, Kind.NAME)

    def accept(self, text: str) -> bool:
        """Consume this word or punctuation if it is next."""
        if self.is_next(text):
            self.at += 1
            return True
        return False

    def word(self, *words: str) -> str:
        """Consume a name, one of `words` if some are given."""
        token = self.token
        if token.kind is not Kind.NAME or (words and token.text not in words):
            raise self.expected(" or ".join(f"'{w}'" for w in words) or Kind.NAME.value)
        self.at += 1
        return token.text

    def string(self) -> str:
        """Consume a string."""
        token = self.take(Kind.STRING)
        return _unquoted(token, token.text)

    def integer(self) -> int:
        """Consume an integer with an optional sign."""
        sign = -1 if self.accept("-") else 1
        token = self.take(Kind.NUMBER)
        return sign * whole_number(token)

    def symbol(self) -> str:
        """Consume a symbol; returns it without `@` and quotes."""
        return spelled(self.take(Kind.SYMBOL))

    def name(self) -> str:
        """Consume a name or a string in place of one."""
        return self.string() if self.token.kind is Kind.STRING else self.word()

    def items(self, end: str, item: Callable[[], T]) -> list[T]:
        """`item, item, ...` up to and with the closing punctuation."""
        found: list[T] = []
        while not self.accept(end):
            if found:
                self.punctuation(",")
            found.append(item())
        return found

    def record(self, error: Exception, token: Token) -> None:
        """Add an error as a diagnostic with an excerpt and a caret."""
        if isinstance(error, IrSyntaxError):
            token, help, id = error.token, error.help, "ir/syntax"
        else:
            help, id = "", "ir/invalid"
        message = str(error)
        if isinstance(error, EdgeccError):
            first = error.diagnostics[0]
            message, help, id = first.message, first.help, first.id
        line = self.lines[token.line - 1] if token.line <= len(self.lines) else ""
        shown, caret = _excerpt(line, token.column)
        self.errors.append(
            Diagnostic(
                id,
                message,
                where=f"{self.file}:{token.line}:{token.column}",
                notes=(shown, caret),
                help=help,
            )
        )

    def guarded(self, statement: Callable[[], None], *, top: bool = False) -> None:
        """Parse one statement; on an error record it and go on at the next one.

        Within a graph that is the next line; at the top the next line that begins a statement.
        """
        first, start = self.at, self.token
        try:
            statement()
        except (IrSyntaxError, FollowUpError, EdgeccError, ValueError, RecursionError) as error:
            if isinstance(error, RecursionError):
                self.record(IrSyntaxError("this is nested too deeply", start), start)
            elif not isinstance(error, FollowUpError):
                self.record(error, start)
            if len(self.errors) >= MAX_ERRORS:
                raise InputError(*self.errors) from None
            # A whole statement that makes no sense ends before the next token, not behind it.
            line = max(self.tokens[max(first, self.at - 1)].line, start.line)
            while self.token.kind is not Kind.END and not (
                self.token.text in self.statements and self.token.column == 1
                if top
                else self.token.line > line
            ):
                self.at += 1


def spelled(token: Token) -> str:
    """The name of a value or symbol, without its sign and quotes."""
    text = token.text[1:]
    return _unquoted(token, text) if text.startswith('"') else text


def whole_number(token: Token) -> int:
    """The value of a number without fraction and exponent.

    Raises:
        IrSyntaxError: It has some, or more digits than any number of the IR.
    """
    if not token.text.isdecimal():
        raise IrSyntaxError("expected an integer", token)
    if len(token.text) > MAX_DIGITS:
        raise IrSyntaxError(f"a number of {len(token.text)} digits", token)
    return int(token.text)


def _unquoted(token: Token, text: str) -> str:
    try:
        return str(json.loads(text))
    except json.JSONDecodeError as error:
        place = token.column + len(token.text) - len(text) + error.pos
        raise IrSyntaxError(
            f"bad string: {error.msg.lower()}", token._replace(column=place)
        ) from error


def _excerpt(line: str, column: int, width: int = 96) -> tuple[str, str]:
    """The part of a line around a column, and a caret below the column."""
    start = max(0, column - 1 - width // 2)
    return line[start : start + width], " " * (column - 1 - start) + "^"
