"""JSON inside of a body's strings is taken as it is, or a 400; nothing breaks further in (F73)."""

from __future__ import annotations

import pytest

from epd.api.asked.grammar import checked_grammar
from epd.api.asked.structured import Constraint
from epd.api.expendable.grammar_child import job_text
from epd.api.http.errors import ApiError
from epd.api.prompts.chat import ChatRenderer
from epd.tiny import CHECKPOINT
from tests.answers import GRAMMARS
from tests.api.openai.test_validation import chat
from tests.hostile.forked import outcomes
from tests.hostile.inner_json import schema_text, text

RENDERER = ChatRenderer(CHECKPOINT)


def call(seed: int) -> str:
    """An earlier call, up to the ids of its prompt."""
    function = {"name": "f", "arguments": text(seed)}
    said = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    try:
        asked = chat(messages=[{"role": "user", "content": "x"}, said])
        assert asked.messages is not None
        RENDERER.encode(RENDERER.render(asked.messages), add_special_tokens=False)
    except ApiError as error:
        assert error.status == 400 and error.message.encode(), error
        return "refused"
    return "taken"


def constraint(seed: int) -> str:
    """Of an answer, up to the grammar."""
    name = ("guided_json", "json_schema")[seed % 2]
    try:
        asked = chat(**{name: schema_text(seed)})
        assert isinstance(asked.constraint, Constraint) and job_text(asked.constraint)
        grammar = checked_grammar(asked.constraint, GRAMMARS.fault)
        GRAMMARS.proof(grammar)
    except ApiError as error:
        assert error.status == 400 and error.message.encode(), error
        return "refused"
    return "taken"


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.long)])
@pytest.mark.timeout(600)
def test_json_inside_json_is_taken_or_refused(count: int) -> None:
    for read in (call, constraint):
        found = outcomes(read, range(count), share=50)
        assert found["taken"] > count / 10 and found["refused"] > count / 10, found
        assert found.keys() == {"taken", "refused"}, found
