"""The constraints of an engine's open sequences, and the sequences that cannot match theirs. Pure."""

from penstock.schemas.errors import Code
from penstock.workers.engines.constraints.compiler import ConstraintCompiler
from penstock.workers.engines.constraints.token_mask import Matcher
from penstock.workers.engines.engine_protocol import Failure, RequestError, SequenceRequest, StepResult

NO_CONSTRAINTS = "this worker's engine applies no constraints (structured output)"

NO_TEXT_MATCHES = "no text matches the constraint: a part of it, such as a $ref to itself, never ends"
TOO_COMPLEX = "the constraint is too complex: use fewer optional properties or alternatives, or shorter lengths"


def matcher_of(request: SequenceRequest, grammars: ConstraintCompiler | None) -> Matcher:
    """The state of a sequence's constraint, after the tokens of earlier attempts.

    Raises:
        RequestError: the constraint cannot be compiled, or those tokens do not match it.
    """
    assert request.constraint is not None
    if grammars is None:
        raise RequestError(Code.unsupported, NO_CONSTRAINTS)
    found = grammars.matcher(request.constraint, len(request.prompt), request.stop)
    found.follow([*request.prompt, *request.generated])
    if found.error:
        raise RequestError(Code.engine_error, f"the tokens so far do not match the constraint: {found.error}")
    return found


class RunningConstraints:
    """
    Attributes:
        matchers: by the key of their sequence.
    """

    def __init__(self) -> None:
        self.matchers: dict[object, Matcher] = {}

    def add(self, key: object, matcher: Matcher) -> None:
        self.matchers[key] = matcher

    def remove(self, key: object) -> None:
        self.matchers.pop(key, None)

    def ended(self, result: StepResult) -> list[Failure]:
        """Forget the sequences that a step has ended; returns those that cannot match their constraint any more."""
        for output in result.outputs:
            if output.finish:
                self.remove(output.key)
        for failure in result.failures:
            self.remove(failure.key)
        unmatched = [(key, matcher) for key, matcher in self.matchers.items() if matcher.error]
        for key, _ in unmatched:
            self.remove(key)
        return [_failure(key, matcher) for key, matcher in unmatched]


def _failure(key: object, matcher: Matcher) -> Failure:
    reason = clients_error(matcher)
    if reason:
        return Failure(key, Code.invalid_request, reason)
    return Failure(key, Code.engine_error, f"the constraint cannot be applied: {matcher.error}")


def clients_error(matcher: Matcher) -> str:
    """Why a constraint cannot be followed, if that is the constraint's own fault; "": it is not."""
    if matcher.no_text:
        return NO_TEXT_MATCHES
    return f"{TOO_COMPLEX} ({matcher.error})" if matcher.too_complex else ""
