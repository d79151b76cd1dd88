"""Mutants that no test can catch, because nothing that anybody may rely on is different: why not.

The names hold the function and the text, so they outlive changes elsewhere.
"""

from __future__ import annotations

UNREAD = "why it failed is noted with the failure; before, nobody asks if another try is of use"
REASONS: dict[str, dict[str, str]] = {
    "epd/fsm/embedding.py": {"Embedding.__init__: True in ('', '', True) -> False": UNREAD},
    "epd/fsm/encoding.py": {"Encoding.__init__: True in ('', '', True) -> False": UNREAD},
    "epd/fsm/kernel.py": {
        "Table._define: transitions.Machine(model=None, states=list(self.states),"
        " initial=self.initial, auto_transitions=False, send_event=True) ->"
        " transitions.Machine(states=list(self.states), initial=self.initial,"
        " auto_transitions=False, send_event=True)": "it is read from, and drives nobody: a model"
        " of its own changes nothing that is read",
    },
    "epd/fsm/request.py": {"Request.__init__: True in ('', '', True) -> False": UNREAD},
    "epd/fsm/transfer.py": {"Transfer.__init__: True in ('', '', True) -> False": UNREAD},
    "epd/roles/step_loop.py": {
        "StepLoop._launch: entry.decoding or request.decode_here -> entry.decoding": (
            "whoever decodes here has no transfer of its KV: that a layer is ready is told nobody"
        ),
    },
}
EQUIVALENT = {
    f"{path}:{name}": why for path, names in REASONS.items() for name, why in names.items()
}
