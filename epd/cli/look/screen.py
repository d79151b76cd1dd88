"""The full screen of `epd top`, by prompt_toolkit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prompt_toolkit.application import Application
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import FormattedTextControl, Layout, Window
from prompt_toolkit.styles import Style

from epd.cli.ask.client import Client
from epd.cli.look.top import TopView, watch

STYLE = Style.from_dict({"dim": "ansibrightblack", "red": "ansired bold"})


async def show(client: Client, title: str, every_s: float) -> None:
    """Until `q` or Ctrl-C."""
    view, asked = TopView(title), asyncio.Event()

    def text() -> StyleAndTextTuples:
        height = application.output.get_size().rows
        return [
            (f"class:{style}" if style in {"dim", "red"} else style, f"{line}\n")
            for style, line in view.lines(height)
        ]

    application: Application[None] = Application(
        layout=Layout(Window(FormattedTextControl(text), wrap_lines=False)),
        key_bindings=_keys(view, asked.set),
        style=STYLE,
        full_screen=True,
    )
    watching = asyncio.create_task(watch(client, view, every_s, asked, application.invalidate))
    try:
        await application.run_async(handle_sigint=False)
    finally:
        watching.cancel()


def _keys(view: TopView, ask: Callable[[], None]) -> KeyBindings:
    """What each key does; a look from elsewhere is asked for at once."""
    keys = KeyBindings()

    @keys.add("q")
    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        event.app.exit()

    @keys.add("up")
    @keys.add("k")
    def _(event: KeyPressEvent) -> None:
        view.move(-1)

    @keys.add("down")
    @keys.add("j")
    def _(event: KeyPressEvent) -> None:
        view.move(1)

    @keys.add("enter")
    @keys.add("right")
    def _(event: KeyPressEvent) -> None:
        view.enter()
        ask()

    @keys.add("escape", eager=True)
    @keys.add("left")
    def _(event: KeyPressEvent) -> None:
        view.back()
        ask()

    @keys.add(" ")
    def _(event: KeyPressEvent) -> None:
        view.paused = not view.paused

    return keys
