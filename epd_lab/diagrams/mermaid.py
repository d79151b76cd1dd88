"""A table as a mermaid state diagram, drawn by `transitions` from the very machine that runs."""

from __future__ import annotations

from transitions.extensions import GraphMachine
from transitions.extensions import diagrams_mermaid as engine

from epd.fsm.kernel import Table
from epd_lab.diagrams.edges import arrows

# Own colours on own background: legible on light and dark pages.
STYLES = {
    "default": {"fill": "#f8fafc", "color": "#1f2933", "stroke": "#0072b2"},
    "terminal": {"fill": "#e4e7eb", "color": "#1f2933", "stroke": "#446070", "stroke-width": "3px"},
    "held": {"fill": "#fdf3e4", "color": "#1f2933", "stroke": "#b45309", "stroke-width": "3px"},
}


class _DrawnMachine(GraphMachine):  # type: ignore[misc]
    machine_attributes = {"direction": "TB"}  # noqa: RUF012 - the library's way to configure it
    style_attributes = {"node": STYLES}  # noqa: RUF012


def mermaid(table: Table) -> str:
    """The text of a `stateDiagram-v2`, without title and fences."""
    machine = _DrawnMachine(
        model=None,
        states=list(table.states),
        initial=table.initial,
        auto_transitions=False,
        show_conditions=True,
        graph_engine="mermaid",
    )
    for arrow in arrows(table):
        conditions = [condition.func for condition in arrow.conditions]
        machine.add_transition(arrow.before[0].event.__name__, arrow.source, arrow.dest, conditions)
    graph = engine.Graph(machine)
    for state in table.states:
        if state in table.terminal:
            graph.set_node_style(state.name, "terminal")
        elif state in table.held:
            graph.set_node_style(state.name, "held")
    lines = str(graph.get_graph().source).splitlines()
    body = lines[lines.index("stateDiagram-v2") :]
    ends = [f"  {state.name} --> [*]" for state in table.states if state in table.terminal]
    return "\n".join([line.rstrip() for line in body if line.strip()] + ends) + "\n"
