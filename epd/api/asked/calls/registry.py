"""Which forms of calls and of reasoning there are.  A form is imported when it is first needed."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from epd.api.asked.calls.form import Form

_HERE = "epd.api.asked.calls."
# By vLLM's names for --tool-call-parser: what a template holds that writes calls in it, and its
# place.  The first counts: the last one's marks stand in other forms, too.
FORMS = {
    "gemma4": ("<|tool_call>", f"{_HERE}gemma:GEMMA4"),
    "functiongemma": ("<start_function_call>", f"{_HERE}gemma:FUNCTION_GEMMA"),
    "kimi_k2": ("<|tool_call_begin|>", f"{_HERE}kimi:FORM"),
    "mistral": ("[TOOL_CALLS]", f"{_HERE}mistral:FORM"),
    "glm45": ("<arg_key>", f"{_HERE}glm:FORM"),
    "qwen3_coder": ("<function=", f"{_HERE}qwen3_coder:FORM"),
    "hermes": ("<tool_call>", f"{_HERE}hermes:FORM"),
}


class Reasoning(NamedTuple):
    """The marks around it, and those around the answer behind it, which are no text."""

    open: str
    close: str
    answer: tuple[str, str] | None = None


THINK = Reasoning("<think>", "</think>")
REASONING = {  # by vLLM's names for --reasoning-parser, SGLang's `kimi`, and `glm41v`
    "gemma4": Reasoning("<|channel>thought", "<channel|>"),
    "glm41v": THINK._replace(answer=("<answer>", "</answer>")),
    "glm45": THINK,
    "kimi": Reasoning("◁think▷", "◁/think▷"),
    "kimi_k2": THINK,
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "qwen3": THINK,
}


def form_of(template: str) -> str:
    """The name of the form in which a chat template writes calls; empty: in none of these."""
    return next((name for name, (written, _) in FORMS.items() if written in template), "")


def form_named(name: str) -> Form:
    form: Form = pkgutil.resolve_name(FORMS[name][1])
    return form
