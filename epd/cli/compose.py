"""`epd run --role`: one instance or gateway, in the foreground."""

from __future__ import annotations

import sys
from pathlib import Path

from epd.cli.boundary import guarded
from epd.cli.plan import Plan
from epd.cli.preflight import check_host
from epd.cli.rundir import remove_if_empty
from epd.runtime.child import ChildSpec, run
from epd.runtime.lives import live_again
from epd.runtime.worker import EXIT_DEVICE_LOST, EXIT_EXPELLED


def specs_of(plan: Plan) -> list[ChildSpec]:
    """One process per instance, and one for the gateway if the plan has one."""
    log = plan.log
    specs = [
        ChildSpec(instance.instance_id, instance, None, log.level, log.as_json)
        for instance in plan.instances
    ]
    if plan.gateway is not None:
        gateway = plan.gateway
        specs.insert(0, ChildSpec(gateway.instance_id, None, gateway, log.level, log.as_json))
    return specs


def spec_in_one(plan: Plan) -> ChildSpec:
    """All of the plan in one process: a gateway, an instance, or both."""
    instance = plan.instances[0] if plan.instances else None
    owner = instance or plan.gateway
    assert owner is not None
    return ChildSpec(owner.instance_id, instance, plan.gateway, plan.log.level, plan.log.as_json)


def serve(plan: Plan) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit status."""
    spec = spec_in_one(plan)

    def show(state: str, detail: str) -> None:
        print(f"{spec.name}: {state} {detail}".rstrip(), file=sys.stderr, flush=True)

    try:
        check_host(plan.instances, in_one=spec.gateway is not None)
        if spec.gateway is None:  # a new life needs a new process
            status = live_again(
                lambda: guarded(lambda: run(spec, show, lifeline=True)), EXIT_EXPELLED
            )
        else:
            status = run(spec, show, lifeline=False)
    finally:
        remove_if_empty(Path(plan.run_dir))
    if status == EXIT_DEVICE_LOST:
        print(
            f"{spec.name}: only a new process gets its device back; start it again",
            file=sys.stderr,
        )
    return status
