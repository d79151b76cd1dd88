"""Tenants share nothing: KV that a request finds was computed for a request of its own scope, at
prefill and at decode.  What another tenant has asked would otherwise show in the time to the first
token (F53)."""

from __future__ import annotations

from collections import defaultdict

from epd.fsm import incoming, request
from epd.fsm.kernel import Event, Machine, State
from epd.keys import is_kv
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess


class Scopes(Checker):
    name = "scopes"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._opened: defaultdict[tuple[str, str], list[request.Request]] = defaultdict(list)
        opened = (request.TextOnly, request.EmbeddingsRequired, request.KvOffered)
        found = (request.Scheduled, incoming.SlotsLeased)
        context.world.watch(self._watch, *opened, *found)
        self._scopes = {record.ask.tenant for record in context.clients.records}

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if len(self._scopes) < 2:
            return
        if isinstance(machine, request.Request):
            if isinstance(event, request.Scheduled):
                self._look(process, machine, event.num_cached)
            else:
                self._opened[process.name, self._scope_of(machine)].append(machine)
        elif isinstance(event, incoming.SlotsLeased) and is_kv(machine.key):
            self._leased(process, machine)

    def _leased(self, process: SimProcess, machine: Machine) -> None:
        """Decode asks for KV only of tokens that it does not hold."""
        node = self.context.cluster.nodes[process.name]
        if (
            node.instance is None
            or node.language is None
            or not isinstance(machine, incoming.Incoming)
        ):
            return
        layout = node.language.kv_layout
        owner = node.instance.requests.get(machine.owner) if node.instance.requests else None
        if owner is not None:
            last = max(machine.held_places, default=machine.num_held - 1)
            num_units = -(-(last + 1) // len(layout.rows.starts))
            self._look(process, owner, num_units * layout.block_size)

    def _scope_of(self, machine: request.Request) -> str:
        """As the client said it, whatever became of it on the way."""
        records = self.context.clients.records
        return next(r.ask.tenant for r in records if r.request_id == machine.request_id)

    def _look(self, process: SimProcess, machine: request.Request, num_found: int) -> None:
        if num_found <= 0:
            return
        scope = self._scope_of(machine)
        wanted = machine.tokens(0, num_found)
        known = self._opened[process.name, scope]
        if not any(other.tokens(0, num_found) == wanted for other in known if other is not machine):
            self.violate(
                f"{process.name} found {num_found} tokens for {machine.key} of tenant {scope!r}, "
                "which no request of that tenant has computed there (F53)"
            )
