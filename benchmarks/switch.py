"""A switch in user space that delays what it forwards: latency between namespaces where the kernel has no netem.

It owns a TUN device in each network namespace, and hands every packet to its receiver a latency after it was sent. It
has no queues, so that it limits no bandwidth: tbf on the devices does, where TCP sees its own queue, as on a host.

    python benchmarks/switch.py --latency-ms 20 --mtu 9000 vgnet0 vgnet1 vgnet2 vgnet3

gives the namespaces vgnet0 to vgnet3 a device eth0 each, prints "ready", and ends with its standard input.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
STDIN = 0
DEVICE = "/dev/net/tun"
LARGEST = 65535
AT_ONCE = 64  # packets read from one device before the others have their turn


def in_real_time() -> None:
    """Run before what else runs on the machine, where that is allowed."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def device(namespace: str, node: int, num_bytes: int) -> int:
    """A TUN device eth0 in a namespace, as a file."""
    file, name = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK), f"{namespace}t"
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    inside = f"ip -n {namespace}"
    for command in (
        f"ip link set {name} netns {namespace}",
        f"{inside} link set {name} name eth0 mtu {num_bytes} txqueuelen 10000",
        f"{inside} addr add {address(node)}/24 dev eth0",
        f"{inside} link set eth0 up",
    ):
        subprocess.run(command.split(), check=True)
    return file


def serve(files: list[int], latency_s: float) -> None:
    """Forward packets until standard input ends."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # (arrival, receiver's file, packet), first in, first out
    while True:
        timeout = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None
        for file in select.select([*files, STDIN], [], [], timeout)[0]:
            if file == STDIN:
                return
            arrival = time.perf_counter() + latency_s
            waiting.extend((arrival, receiver, packet) for receiver, packet in packets(file, files))
        now = time.perf_counter()
        while waiting and waiting[0][0] <= now:
            _, receiver, packet = waiting.popleft()
            os.write(receiver, packet)


def packets(file: int, files: list[int]) -> Iterator[tuple[int, bytes]]:
    """The packets that a device has sent, a few at a time, and the device of each one's receiver."""
    for _ in range(AT_ONCE):
        try:
            packet = os.read(file, LARGEST)
        except BlockingIOError:
            return
        node = packet[19] - 1  # by the last byte of the IPv4 destination; the other packets are IPv6's greetings
        if packet[0] >> 4 == 4 and 0 <= node < len(files):
            yield files[node], packet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, required=True, help="one way")
    parser.add_argument("--mtu", type=int, default=9000, help="of the devices, bytes (default 9000)")
    parser.add_argument("namespaces", nargs="+")
    args = parser.parse_args()
    files = [device(namespace, node, args.mtu) for node, namespace in enumerate(args.namespaces)]
    in_real_time()  # a late packet is a longer latency
    print("ready", flush=True)
    serve(files, args.latency_ms / 1e3)


if __name__ == "__main__":
    main()
