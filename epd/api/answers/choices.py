"""The choices of an answer, from what was asked: how each finds its text, calls and reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from epd.api.answers.choice import Choice
from epd.api.answers.echo import Echo
from epd.api.asked.asked import Asked
from epd.api.asked.calls.registry import REASONING, THINK
from epd.api.asked.reasoning import Place, ReasoningParser
from epd.api.prompts.prepare import Preparer, Prompt
from epd.frontend import GenerationStream


def make_choices(
    streams: Sequence[GenerationStream],
    asked: Asked,
    prompts: Sequence[Prompt],
    model: Preparer,
    *,
    tells_reasoning: bool,
) -> list[Choice]:
    """One for each stream, prompt after prompt; `tells_reasoning`: apart from the text."""
    # What a grammar shapes begins with its first token.
    marks = REASONING.get(model.reasoning_parser, THINK)
    parses_reasoning = tells_reasoning and asked.grammar_source is None
    choices = []
    for i, stream in enumerate(streams):
        which = i // asked.n
        prompt = prompts[which]
        place = prompt.reasoning if parses_reasoning else Place.BEHIND
        shows_marks = asked.shows_marks or place is not Place.BEHIND
        choice = Choice(
            i,
            stream,
            model.detokenizer(skip_special_tokens=not shows_marks),
            asked.stops,
            asked.all_stop_token_ids(model),
            asked.min_tokens,
            asked.include_stop_str_in_output,
            tool_use=asked.tool_use,
            reasoning=None if place is Place.BEHIND else ReasoningParser(place, marks),
            prompt_index=which,
            hides_reasoning=not asked.include_reasoning,
            prompt_token_ids=prompt.token_ids,
        )
        if asked.tells_prompt:
            is_whole = asked.truncate_prompt_tokens is None
            text = _told(asked.prompts[which] if is_whole else prompt.token_ids, model)
            choice.echo = Echo(text, prompt.token_ids[0], asked.no_tokens)
        choices.append(choice)
    return choices


def _told(prompt: str | Sequence[int], model: Preparer) -> str:
    """A prompt as it is echoed: as it was sent, or as its tokens read."""
    if isinstance(prompt, str):
        return prompt
    shown = model.detokenizer(skip_special_tokens=False)
    return shown.push(prompt) + shown.finish()
