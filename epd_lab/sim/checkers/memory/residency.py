"""The gateway's idea of who holds which rows: once all is quiet, it is the truth.

While things happen it may be stale, which must not be noticed by anything but the number of
encodes.  Afterwards no batch may be missing, repeated or of an earlier life.
"""

from __future__ import annotations

from epd_lab.sim.checkers.base import Checker


class Residency(Checker):
    name = "residency"

    def at_end(self) -> None:
        living = self.context.cluster.living()
        gateway = next((node.gateway for node in living if node.gateway is not None), None)
        for node in living:
            encode = node.instance.encode if node.instance is not None else None
            if encode is None or gateway is None:
                continue
            held = encode.events.log.held
            told = gateway.directory.index.held(node.actor.address.instance_id)
            if held != told:
                self.violate(
                    f"the gateway believes {len(told - held)} hashes at {node.process.name} that "
                    f"are not there, and does not know of {len(held - told)}"
                )
