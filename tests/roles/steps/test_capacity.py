"""What an instance has just enough memory for is served, also when it goes on elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epd_lab.sim.engine.golden import BLOCK_SIZE, Image
from epd_lab.sim.workload import Ask
from tests.roles.simulated import DEFAULTS, TEXT, simulated

ANSWER = 40


@pytest.mark.parametrize("images", [(), (Image("one"),)], ids=["text", "image"])
@pytest.mark.parametrize("topology", ["1e2p1d", "1e1p2d", "2epd"])
def test_what_fits_just_so_fits_when_it_goes_on(topology: str, images: tuple[Image, ...]) -> None:
    """What was said of it so far is a part of its prompt then, not of what it may still say."""
    token_ids, _ = Ask(0, 0.0, TEXT, tuple((1, image) for image in images)).placed()
    num_blocks = -(-(len(token_ids) + ANSWER) // BLOCK_SIZE)
    max_tokens = num_blocks * BLOCK_SIZE - len(token_ids)
    with simulated(topology, replace(DEFAULTS, num_blocks=num_blocks)) as cluster:
        record = cluster.ask(*images, max_tokens=max_tokens, stops_at_eos=False)
        while len(record.tokens) < ANSWER // 2:
            cluster.pass_time(0.001)
        (machine,) = cluster.gateway.role.open_ones()
        name = machine.placement.decode.instance_id
        cluster.world.kill(name)
        cluster.cluster.restart_later(name, 0.1)
        cluster.pass_time(3.0)
    assert record.error is None
    assert len(record.tokens) == max_tokens
    assert machine.attempt == 2
