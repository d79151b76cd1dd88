"""A graph whose model calls a tool that runs, and what langchain's OpenAI client makes of answers.

    python with_langgraph.py BASE_URL MODEL IMAGE_URL

Nothing but the packages and the standard library is imported.  Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Bern", "Oslo"]
    days: Literal[1, 2]


@tool
def weather(city: Literal["Bern", "Oslo"], days: Literal[1, 2]) -> str:
    """How the weather will be."""
    return json.dumps({"city": city, "days": days})


def run(client: Any) -> list[Any]:
    """What the tool was called with, in an answer that was streamed and went back to the model."""
    calling = client.bind_tools([weather], tool_choice="required")
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [calling.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([weather]))
    graph.add_node("answer", lambda state: {"messages": [client.invoke(state["messages"])]})
    for edge in ((START, "model"), ("model", "tools"), ("tools", "answer"), ("answer", END)):
        graph.add_edge(*edge)
    said = graph.compile().invoke({"messages": [("user", "Is it cold?")]})["messages"]
    assert said[-1].type == "ai" and said[-1].usage_metadata["total_tokens"] > 0
    whole = None
    for chunk in calling.stream("Is it cold?"):
        whole = chunk if whole is None else whole + chunk
    called = [json.loads(one.content) for one in said if one.type == "tool"]
    return called + [call["args"] for call in whole.tool_calls]


def talk(base_url: str, model: str, image: str) -> dict[str, Any]:
    typed, seen = [], []
    parts = [
        {"type": "text", "text": "What is the total?"},
        {"type": "image_url", "image_url": {"url": image}},
    ]
    asked = [{"role": "user", "content": parts}]
    for uses_responses in (False, True):
        settings: Any = {
            "base_url": f"{base_url}/v1",
            "api_key": "none",
            "model": model,
            "use_responses_api": uses_responses,
        }
        client = ChatOpenAI(**settings, temperature=1.5, max_tokens=300)
        for method in ("json_schema", "function_calling"):
            told = client.with_structured_output(Weather, method=method).invoke("Is it cold?")
            typed.append(told.model_dump())
        typed += run(client)
        reader = ChatOpenAI(**settings, temperature=0, max_tokens=60)
        seen.append(reader.invoke(asked).text)
        seen.append("".join(chunk.text for chunk in reader.stream(asked)))
    return {"typed": typed, "seen": seen}


if __name__ == "__main__":
    print(json.dumps(talk(*sys.argv[1:])))
