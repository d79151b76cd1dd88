"""Typed answers, whole and streamed, and an image, as pydantic-ai asks for them in each API.

    python with_pydantic_ai.py BASE_URL MODEL IMAGE_URL

Nothing but the package and the standard library is imported.  Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    city: Literal["Bern", "Oslo"]
    days: Literal[1, 2]


async def talk(base_url: str, name: str, image: str) -> dict[str, Any]:
    png = BinaryContent(base64.b64decode(image.partition(",")[2]), media_type="image/png")
    openai = OpenAIProvider(base_url=f"{base_url}/v1", api_key="none")
    anthropic = AnthropicProvider(base_url=base_url, api_key="none")
    models: dict[str, Any] = {
        "chat": OpenAIChatModel(name, provider=openai),
        "responses": OpenAIResponsesModel(name, provider=openai),
        "messages": AnthropicModel(name, provider=anthropic),
    }
    typed, seen = [], []
    for api, model in models.items():
        for output in [ToolOutput(Weather)] + [NativeOutput(Weather)] * (api != "messages"):
            settings: Any = {"max_tokens": 300, "temperature": 1.5}
            agent: Agent[None, Any] = Agent(model, output_type=output, model_settings=settings)
            typed.append((await agent.run("Is it cold?")).output.model_dump())
            async with agent.run_stream("Is it cold?") as stream:
                typed.append((await stream.get_output()).model_dump())
        reader = Agent(model, model_settings={"max_tokens": 60, "temperature": 0})
        asked = ["What is the total?", png]
        seen.append((await reader.run(asked)).output)
        async with reader.run_stream(asked) as text:
            seen.append(await text.get_output())
    return {"typed": typed, "seen": seen}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(talk(*sys.argv[1:]))))
