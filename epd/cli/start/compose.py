"""The processes of a plan: one per instance and one for its gateway, or all in one."""

from __future__ import annotations

from epd.cli.start.plan import Plan
from epd.config import GatewayConfig, InstanceConfig
from epd.runtime.child import ChildSpec
from epd.runtime.claim import claim_path, own_life


def specs_of(plan: Plan) -> list[ChildSpec]:
    """One process per instance, and one for the gateway if the plan has one."""
    specs = [_spec(plan, instance, None) for instance in plan.instances]
    if plan.gateway is not None:
        specs.insert(0, _spec(plan, None, plan.gateway))
    return specs


def spec_in_one(plan: Plan) -> ChildSpec:
    """All of the plan in one process: a gateway, an instance, or both."""
    return _spec(plan, plan.instances[0] if plan.instances else None, plan.gateway)


def _spec(plan: Plan, instance: InstanceConfig | None, gateway: GatewayConfig | None) -> ChildSpec:
    owner = instance or gateway
    assert owner is not None
    name, log = owner.instance_id, plan.log
    claim = str(claim_path(plan.run_dir, name))
    return ChildSpec(name, instance, gateway, log.level, log.as_json, claim, own_life())
