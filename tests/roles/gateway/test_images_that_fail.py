"""What a client reads when one of its images cannot be used."""

from __future__ import annotations

import pytest

from epd_lab.sim.client import Clients
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.workload import Ask
from tests.roles.simulated import simulated


@pytest.mark.parametrize(("flaw", "named"), [("broken", True), ("unencodable", False)])
def test_a_bad_image_is_named_and_a_fault_of_ours_is_not_its_own(flaw: str, named: bool) -> None:
    with simulated("1e1p1d") as cluster:
        images = ((1, Image("good")), (3, Image("bad", flaw=flaw)))
        ask = Ask(1, cluster.world.loop.now_s, (11, 12, 13, 14), images, 3, 1)
        record = Clients(cluster.cluster, ()).add(ask)
        cluster.pass_time(5.0)
        assert record.error is not None
        assert record.error.message.startswith("image 2: ") == named, record.error.message
