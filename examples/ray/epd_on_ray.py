"""One cluster of epd over nodes of a Ray cluster: an actor on each keeps one supervised command.

    python epd_on_ray.py --gpus 2 --key /shared/key.json -- --model DIR --device cuda:0,cuda:1

Needs Ray here and on the nodes, `epd` in their PATH, and a key that all of them read (`epd run
--new-key`).  An actor that Ray starts anew starts its command anew; what ends below a command, the
command starts anew.  Ctrl-C or SIGTERM drains all of them.  The API is at the first node's --port.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

DRAIN_S = 60.0  # longer than --drain-timeout


@ray.remote(max_restarts=-1, max_concurrency=2, num_cpus=0)
class Node:
    """One host's command; `head`: the address of the first node, empty there."""

    def __init__(self, number: int, head: str, args: argparse.Namespace) -> None:
        own = ray.util.get_node_ip_address()
        words = ["epd", "run", "--cluster-key", args.key, "--run-dir", f"/tmp/epd-ray-{number}"]
        if head:
            words += ["--topology", args.further, "--join", f"tcp://{head}:{args.join_port}"]
            words += ["--listen", f"tcp://{own}:*", "--id-prefix", f"node{number}"]
        else:
            words += ["--topology", args.first, "--listen", f"tcp://{own}:{args.join_port}"]
            words += ["--host", "0.0.0.0", "--port", str(args.port)]
        self._command = subprocess.Popen([*words, *args.flags])
        self._address = own

    def address(self) -> str:
        return self._address

    def wait(self) -> int:
        return self._command.wait()

    def stop(self) -> int:
        self._command.send_signal(signal.SIGTERM)
        return self._command.wait(DRAIN_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="of each node")
    parser.add_argument("--first", default="1e1pd", help="topology of the first node")
    parser.add_argument("--further", default="1e1pd", help="and of each further one")
    parser.add_argument("--key", required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--join-port", type=int, default=7000)
    parser.add_argument("flags", nargs="*", help="of epd run, behind --")
    args = parser.parse_args()
    ray.init(address="auto")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own would end us at once
    bundle = {"CPU": 1.0, "GPU": float(args.gpus)} if args.gpus else {"CPU": 1.0}
    group = placement_group([bundle] * args.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def place(number: int, head: str) -> ray.actor.ActorHandle:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        made = Node.options(scheduling_strategy=where, num_gpus=args.gpus)
        return made.remote(number, head, args)

    nodes = [place(0, "")]
    head = ray.get(nodes[0].address.remote())
    nodes += [place(number, head) for number in range(1, args.nodes)]
    print(f"http://{head}:{args.port}/v1", flush=True)
    try:
        # A command ends by itself only if it is wrong; an actor that is gone comes back.
        waits = {node.wait.remote(): node for node in nodes}
        while True:
            (ended,), _ = ray.wait([*waits])
            try:
                return int(ray.get(ended))
            except ray.exceptions.RayActorError as error:
                print(f"{type(error).__name__}: Ray starts it anew", file=sys.stderr, flush=True)
                time.sleep(1)
                node = waits.pop(ended)
                waits[node.wait.remote()] = node
    except KeyboardInterrupt:
        return max(ray.get([node.stop.remote() for node in nodes]))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
