"""IR text to a module: the inverse of `edgecc.ir.printer`.

One uniform statement syntax for every op; the grammar is in `docs/ir.md`. Errors carry line, column
and a caret; the parser goes on at the next statement, so one run shows several.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from edgecc.errors import InputError, InternalError
from edgecc.ir.attributes import AttributeSyntaxError, Literal, Scalar, build_attributes
from edgecc.ir.builder import Builder
from edgecc.ir.core import Graph, Input, Location, Module, Node, Output, Value
from edgecc.ir.encodings import Encoding, parse_encoding
from edgecc.ir.lexer import Kind, Token
from edgecc.ir.ops import get_op
from edgecc.ir.printer import FORMAT_VERSION, name_hint
from edgecc.ir.token_stream import FollowUpError, IrSyntaxError, TokenStream, spelled, whole_number
from edgecc.ir.types import Dim, DType, SymbolRange, TensorType, sym
from edgecc.ir.weights import (
    Alias,
    Derived,
    Inline,
    Param,
    Source,
    Stored,
    StoredPart,
    Unbound,
    Weight,
)
from edgecc.roles import Role

MAX_TEXT = 256 << 20


def parse_module(text: str, *, file: str = "<text>") -> Module:
    """Parse IR text.

    Args:
        text: What `print_module` writes; comments start with `//`.
        file: Name for messages.

    Returns:
        The module. Its weight table has no readers yet: attach checkpoints to read stored weights.

    Raises:
        InputError: The text is not IR; every error found is listed with line, column and caret.
    """
    if len(text) > MAX_TEXT:
        raise InputError("ir/too-long", f"IR text of {len(text)} characters", where=file)
    return _Parser(text.removeprefix("\ufeff"), file).module()


def read_module(path: Path) -> Module:
    """Parse a file of IR text.

    Raises:
        InputError: The file is missing, not text, or not IR.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise unreadable(error, str(path)) from error
    return parse_module(text, file=str(path))


def unreadable(reason: Exception | str, where: str) -> InputError:
    """The error to raise where there is no text, or none in UTF-8."""
    said = getattr(reason, "strerror", None) or reason
    return InputError("ir/unreadable", f"cannot read IR text: {said}", where=where)


class _Parser(TokenStream):
    def __init__(self, text: str, file: str) -> None:
        super().__init__(text, file, _STATEMENTS)
        self.result = Module("")
        self.digests: dict[str, str] = {}
        self.broken: set[str] = set()

    # --- module -------------------------------------------------------------------------------

    def module(self) -> Module:
        self.guarded(self.header, top=True)
        while self.token.kind is not Kind.END:
            if self.token.text in _STATEMENTS:
                parse: Callable[[], None] = getattr(self, _STATEMENTS[self.token.text])
                self.at += 1
                self.guarded(parse, top=True)
            else:
                self.guarded(self.unknown, top=True)
        if self.errors:
            raise InputError(*self.errors)
        self.state_digests()
        return self.result

    def state_digests(self) -> None:
        """Hashes count for a weight together with everything it is made from: needs all of them.

        Raises:
            InputError: A weight is made from one that is not there.
        """
        table = self.result.weights
        for symbol, digest in self.digests.items():
            try:
                table.state_digest(symbol, digest)
            except InternalError as error:
                raise InputError(
                    "ir/unknown-weight",
                    f"weight @{symbol} has a hash, but {error.diagnostics[0].message}",
                    where=self.file,
                ) from error

    def unknown(self) -> None:
        raise self.expected(" or ".join(_STATEMENTS))

    def header(self) -> None:
        self.word("edgecc.module")
        version = self.take(Kind.NAME)
        if version.text != f"v{FORMAT_VERSION}":
            raise IrSyntaxError(
                f"format {version.text}, this edgecc reads v{FORMAT_VERSION}", version
            )
        self.result.name = self.string()

    def symbol_range(self) -> None:
        token = self.token
        name = self.word()
        if name in self.result.symbols:
            raise IrSyntaxError(f"symbol {name} has a range already", token)
        self.punctuation(":")
        low = self.integer()
        self.punctuation("..")
        self.result.symbols[name] = SymbolRange(low, self.integer())

    def metadata(self) -> None:
        token = self.token
        key = self.name()
        if key in self.result.metadata:
            raise IrSyntaxError(f"metadata {key} is given twice", token)
        equals = self.punctuation("=")
        line = self.lines[equals.line - 1][equals.column :]
        try:
            self.result.metadata[key] = json.loads(line)
        except ValueError as error:
            raise IrSyntaxError(f"not JSON: {error}", equals) from error
        while self.token.kind is not Kind.END and self.token.line == equals.line:
            self.at += 1

    def checkpoint(self) -> None:
        token = self.token
        role = self.string()
        if role in self.result.checkpoints:
            raise IrSyntaxError(f"checkpoint {role!r} is given twice", token)
        self.punctuation("=")
        self.result.checkpoints[role] = self.string()

    def decision(self) -> None:
        self.result.decisions.append(self.string())

    # --- weights ------------------------------------------------------------------------------

    def weight(self) -> None:
        symbol = self.symbol()
        self.punctuation(":")
        encoding = self.encoding()
        self.punctuation("[")
        shape = tuple(self.items("]", self.integer))
        self.punctuation("=")
        weight = Weight(shape, encoding, self.source())
        if symbol in self.result.weights:
            raise InputError("ir/duplicate-weight", f"weight @{symbol} is defined twice")
        self.result.weights.add(symbol, weight)
        token = self.token
        if self.accept("hash"):
            if isinstance(weight.source, Alias):
                raise IrSyntaxError("an alias has no hash: it is that of its target", token)
            self.digests[symbol] = self.string()

    def encoding(self) -> Encoding:
        start = self.token
        text = self.word()
        if self.accept("<"):
            text += "<"
            while not self.accept(">"):
                if self.token.kind is Kind.END:
                    raise self.expected("'>'")
                text += self.token.text + (" " if self.token.text == "," else "")
                self.at += 1
            text += ">"
        try:
            return parse_encoding(text)
        except ValueError as error:
            raise IrSyntaxError(str(error), start) from error

    def source(self) -> Source:
        kind = self.word("stored", "derived", "alias", "unbound", "inline")
        parse: Callable[[], Source] = getattr(self, f"_{kind}")
        return parse()

    def _stored(self) -> Source:
        checkpoint = self.string()
        self.punctuation("{")

        def part() -> StoredPart:
            component = self.word()
            self.punctuation(":")
            file, _, key = self.string().partition("#")
            return StoredPart(component, file, key)

        return Stored(checkpoint, tuple(self.items("}", part)))

    def _derived(self) -> Source:
        recipe = self.word()
        self.punctuation("(")
        inputs: list[str] = []
        params: dict[str, Param] = {}

        def argument() -> None:
            if self.token.kind is Kind.SYMBOL:
                inputs.append(self.symbol())
                return
            token = self.token
            name = self.word()
            if name in params:
                raise IrSyntaxError(f"parameter {name} is given twice", token)
            self.punctuation("=")
            token = self.token
            value = self.literal()
            if isinstance(value, tuple):
                raise IrSyntaxError("a parameter cannot be a list", token)
            params[name] = value

        self.items(")", argument)
        return Derived(recipe, tuple(inputs), tuple(sorted(params.items())))

    def _alias(self) -> Source:
        return Alias(self.symbol())

    def _unbound(self) -> Source:
        role = self.string()
        places = self.items("]", self.string) if self.accept("[") else []
        return Unbound(role, tuple(places))

    def _inline(self) -> Source:
        self.punctuation("{")

        def part() -> tuple[str, bytes]:
            name = self.word()
            self.punctuation(":")
            token = self.take(Kind.HEX)
            if len(token.text) % 2:
                raise IrSyntaxError("half a byte at the end", token)
            return name, bytes.fromhex(token.text[2:])

        return Inline(tuple(self.items("}", part)))

    # --- graphs -------------------------------------------------------------------------------

    def graph(self) -> None:
        name = self.symbol()
        if name in self.result.graphs:
            raise InputError("ir/duplicate-graph", f"graph @{name} is defined twice")
        builder = Builder(self.result, name)
        values: dict[str, Value] = {}
        self.broken = set()
        self.punctuation("(")
        self.items(")", lambda: self.graph_input(builder.graph, values))
        self.punctuation("{")
        while not self.is_next("return") and self.token.kind is not Kind.END:
            self.guarded(lambda: self.statement(builder, values))
        self.word("return")
        self.items("}", lambda: self.graph_output(builder.graph, values))

    def graph_input(self, graph: Graph, values: dict[str, Value]) -> None:
        token = self.take(Kind.VALUE)
        self.punctuation(":")
        type = self.type()
        value = Value(type, spelled(token), None, len(graph.inputs))
        self.define(values, value, token)
        graph.inputs.append(Input(value, self.role()))

    def graph_output(self, graph: Graph, values: dict[str, Value]) -> None:
        name = self.name()
        self.punctuation("=")
        value = self.operand(values)
        role = self.role()
        alias = spelled(self.take(Kind.VALUE)) if self.accept("alias") else None
        graph.outputs.append(Output(value, name, role, alias))

    def statement(self, builder: Builder, values: dict[str, Value]) -> None:
        results = [self.take(Kind.VALUE)]
        while self.accept(","):
            results.append(self.take(Kind.VALUE))
        try:
            self.operation(builder, values, results)
        except Exception:
            self.broken.update(spelled(r) for r in results)
            raise

    def operation(self, builder: Builder, values: dict[str, Value], results: list[Token]) -> None:
        self.punctuation("=")
        op_token = self.token
        op = get_op(self.word())
        self.punctuation("(")
        operands: list[Value] = []
        weights: list[str] = []

        def argument() -> None:
            if self.token.kind is Kind.SYMBOL:
                weights.append(self.symbol())
            else:
                operands.append(self.operand(values))

        self.items(")", argument)
        literals = self.attributes() if self.is_next("{") else {}
        try:
            attrs = build_attributes(op.attributes, literals)
        except AttributeSyntaxError as error:
            raise IrSyntaxError(f"{op.name}: {error}", op_token, error.help) from error
        self.punctuation(":")
        types = [self.type()]
        while self.accept(","):
            types.append(self.type())
        if len(types) != len(results):
            raise IrSyntaxError(f"{len(results)} results, {len(types)} types", op_token)
        location = Location()
        if self.accept("loc"):
            self.punctuation("(")
            location = Location.parse(self.string())
            self.punctuation(")")
        names = [name_hint(spelled(r)) for r in results]
        node = Node(op, operands, weights, attrs, types, names, location)
        builder.graph.nodes.append(node)
        for token, value in zip(results, node.results, strict=True):
            self.define(values, value, token)

    def define(self, values: dict[str, Value], value: Value, token: Token) -> None:
        if spelled(token) in values:
            raise IrSyntaxError(f"{token.text} is defined twice", token)
        values[spelled(token)] = value

    def operand(self, values: dict[str, Value]) -> Value:
        token = self.take(Kind.VALUE)
        found = values.get(spelled(token))
        if found is None and spelled(token) in self.broken:
            raise FollowUpError
        if found is None:
            raise IrSyntaxError(f"{token.text} is not defined before its use", token)
        return found

    def role(self) -> Role:
        token = self.take(Kind.NAME)
        try:
            return Role(token.text)
        except ValueError:
            known = ", ".join(r.value for r in Role)
            raise IrSyntaxError(f"unknown role {token.text}", token, f"valid: {known}") from None

    def type(self) -> TensorType:
        token = self.take(Kind.NAME)
        try:
            dtype = DType(token.text)
        except ValueError:
            known = ", ".join(d.value for d in DType)
            raise IrSyntaxError(f"unknown type {token.text}", token, f"valid: {known}") from None
        self.punctuation("[")
        return TensorType(dtype, tuple(self.items("]", self.dim)))

    def dim(self) -> Dim:
        total: Dim = 0
        sign = -1 if self.accept("-") else 1
        while True:
            total = total + self.term() * sign
            if self.accept("+"):
                sign = 1
            elif self.accept("-"):
                sign = -1
            else:
                return total

    def term(self) -> Dim:
        if self.token.kind is Kind.NAME:
            return sym(self.word())
        number = self.integer()
        return sym(self.word()) * number if self.accept("*") else number

    def attributes(self) -> dict[str, Literal]:
        self.punctuation("{")
        found: dict[str, Literal] = {}

        def entry() -> None:
            token = self.token
            name = self.word()
            self.punctuation("=")
            if name in found:
                raise IrSyntaxError(f"attribute {name} is given twice", token)
            found[name] = self.literal()

        self.items("}", entry)
        return found

    def literal(self) -> Literal:
        if self.accept("["):
            return tuple(self.items("]", self.scalar))
        return self.scalar()

    def scalar(self) -> Scalar:
        token = self.token
        if token.kind is Kind.STRING:
            return self.string()
        if token.kind is Kind.NAME and token.text in _WORDS:
            self.at += 1
            return _WORDS[token.text]
        sign = -1 if self.accept("-") else 1
        if self.accept("inf"):
            return sign * float("inf")
        number = self.take(Kind.NUMBER)
        return sign * (whole_number(number) if number.text.isdecimal() else float(number.text))


_STATEMENTS: Mapping[str, str] = {
    "symbol": "symbol_range",
    "metadata": "metadata",
    "checkpoint": "checkpoint",
    "decision": "decision",
    "weight": "weight",
    "graph": "graph",
}
"""What begins a statement at the top, and the method that parses the rest of it."""

_WORDS: Mapping[str, bool | float] = {
    "true": True,
    "false": False,
    "inf": float("inf"),
    "nan": float("nan"),
}
