"""Checks that a constraint on the output can be compiled, before its request is accepted."""

from collections.abc import Iterator
from typing import Any

from penstock.gateway.apis.chat.constraint import STRUCTURAL_TAG, Wanted
from penstock.gateway.grammars.calls import Tool
from penstock.gateway.grammars.writer import CannotExpress, GrammarWriter, LargeGrammar
from penstock.infra.bounded import ByteCache
from penstock.infra.constraints import constraint_grammar
from penstock.infra.constraints.trials import ConstraintTrials, Trial, TrialsBusy, digest_of
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Constraint

REMEMBERED_BYTES = 1 << 20  # about 4,000 verdicts
MOST_TRIALS = 256  # of parts of a request's schemas, to find those that cannot be compiled
MOST_PARTS = 16  # of a tool's schema that are ignored one by one; with more the whole schema is

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")
_DEFINITIONS = ("$defs", "definitions")

Path = tuple[str | int, ...]


class ConstraintCheck:
    """Tries each constraint once, and remembers what is the constraint's own. ``close`` it.

    Without llguidance here, the workers check: their refusal has the same code.
    """

    def __init__(self, trials: ConstraintTrials | None = None) -> None:
        self._trials = (trials or ConstraintTrials()) if constraint_grammar.available() else None
        self._reasons: ByteCache[bytes, str] = ByteCache(REMEMBERED_BYTES, _size)  # by digest; "": it can be compiled

    async def check(self, wanted: Wanted, tenant: str, field: str) -> dict[str, Any]:
        """
        Args:
            field: of the body that asks for it, as its client wrote it.

        Returns: schemas by name of tools that are not strict, without the parts that cannot be compiled: the request is
            to be prepared again with these. Empty: it can be compiled as it is.

        Raises:
            ServingError: invalid_request: it cannot be compiled; names the field, the tool and the keyword. overloaded:
                too many wait.
        """
        for tool in wanted.tools:
            if tool.given is not None and (own := await self.reason(tool.given, tenant)):
                raise _refusal(f"tool {tool.name!r}, format.definition: {own}", "tools")
        reason = await self.reason(wanted.constraint, tenant)
        if not reason:
            return {}
        asked = wanted.asked[1] if wanted.asked is not None else None
        separate = wanted.tools and asked is not None and asked.kind != STRUCTURAL_TAG
        if separate and asked is not None and (own := await self.reason(asked, tenant)):
            raise _refusal(own, field)
        loosened: dict[str, Any] = {}
        search = _Search(self, tenant)
        for tool in wanted.tools:
            if why := await search.reason(tool, tool.parameters):
                path = await search.fault(tool, tool.parameters)
                if tool.strict:
                    where = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path)
                    raise _refusal(f"tool {tool.name!r}, parameters{where}: {why}", "tools")
                loosened[tool.name] = await search.loosened(tool, path)
        if not loosened:
            raise _refusal(reason, field)
        return loosened

    async def reason(self, constraint: Constraint, tenant: str) -> str:
        """Why it cannot be compiled; "": it can.

        Raises:
            ServingError: overloaded.
        """
        if self._trials is None:
            return ""
        digest = digest_of(constraint)
        reason = self._reasons.get(digest)
        if reason is None:
            trial = await self._try(self._trials, constraint, tenant)
            reason = trial.reason
            if trial.lasting:
                self._reasons.put(digest, reason)
        return reason

    async def close(self) -> None:
        if self._trials is not None:
            await self._trials.close()

    async def _try(self, trials: ConstraintTrials, constraint: Constraint, tenant: str) -> Trial:
        try:
            return await trials.of(constraint, tenant)
        except TrialsBusy as busy:
            raise ServingError(Code.overloaded, f"{busy}; try again later", retry_after=busy.retry_after) from None


class _Search:
    """For the parts of tools' schemas that cannot be compiled."""

    def __init__(self, check: ConstraintCheck, tenant: str) -> None:
        self._check = check
        self._tenant = tenant
        self._left = MOST_TRIALS

    async def reason(self, tool: Tool, schema: Any) -> str:
        """Why a schema cannot be compiled as that tool's; "": it can, or too much was tried already."""
        if self._left <= 0:
            return ""
        self._left -= 1
        writer = GrammarWriter(lambda mark: None)
        try:
            text = writer.text(writer.json(schema, lenient=not tool.strict))
        except (CannotExpress, LargeGrammar) as error:
            return str(error)
        return await self._check.reason(Constraint(constraint_grammar.LARK, text), self._tenant)

    async def fault(self, tool: Tool, schema: Any) -> Path:
        """The way to the smallest part that cannot be compiled, from a schema that cannot."""
        path: Path = ()
        shared = {key: schema[key] for key in _DEFINITIONS if isinstance(schema, dict) and key in schema}
        while True:
            for step, part in _parts(schema):
                defined = shared if isinstance(part, dict) and step[0] not in _DEFINITIONS else {}
                if await self.reason(tool, part | defined if defined else part):
                    path, schema = (*path, *step), part
                    break
            else:
                return path

    async def loosened(self, tool: Tool, path: Path) -> Any:
        """A tool's schema without the parts that cannot be compiled, the first of which is at ``path``."""
        schema: Any = tool.parameters
        for _ in range(MOST_PARTS):
            if not path:
                break
            part = _at(schema, path)
            kind = {"type": part["type"]} if isinstance(part, dict) and "type" in part else {}
            schema = _replaced(schema, path, {} if await self.reason(tool, kind) else kind)
            if not await self.reason(tool, schema):
                return schema
            path = await self.fault(tool, schema)
        return {"type": "object"}


def _parts(schema: Any) -> Iterator[tuple[Path, Any]]:
    if not isinstance(schema, dict):
        return
    for key in _MAPS:
        if isinstance(parts := schema.get(key), dict):
            yield from (((key, name), part) for name, part in parts.items())
    for key in _LISTS:
        if isinstance(parts := schema.get(key), list):
            yield from (((key, number), part) for number, part in enumerate(parts))
    for key in _SINGLE:
        if isinstance(schema.get(key), dict):
            yield (key,), schema[key]


def _at(schema: Any, path: Path) -> Any:
    for step in path:
        schema = schema[step]
    return schema


def _replaced(schema: Any, path: Path, part: Any) -> Any:
    if not path:
        return part
    step, rest = path[0], path[1:]
    if isinstance(schema, list):
        return [_replaced(each, rest, part) if at == step else each for at, each in enumerate(schema)]
    return {**schema, step: _replaced(schema[step], rest, part)}


def _refusal(reason: str, field: str) -> ServingError:
    return ServingError(Code.invalid_request, f"the constraint cannot be compiled: {reason}", param=field)


def _size(digest: bytes, reason: str) -> int:
    return len(digest) + 4 * len(reason)
