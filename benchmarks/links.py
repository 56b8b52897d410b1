"""Links that are really slow: a network namespace for each process, and what plain sockets get between them.

`links` joins the namespaces for as long as a block lasts. tbf limits the bandwidth of each node's way out, in its own
namespace. The latency, one way, so that a ping takes twice as long, comes after it, as on a wire: from netem where the
kernel has it, else from the switch in user space of `switch.py`.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from switch import LARGEST, address

NODES = 4
PREFIX = f"vg{os.getpid()}n"  # two may run at once
NAMES = [f"{PREFIX}{node}" for node in range(NODES)]
HUB = f"{PREFIX}hub"
CONGESTION = "reno"  # every namespace may have it; nothing is lost here, so that its window only grows
PACKET_S = 0.0005  # that a packet takes on a link to the switch, about
BURST_S = 0.002  # of the bandwidth that may leave at once after a pause
PORT = 29600
PINGS = 11
TIMEOUT_S = 60.0
PROBE_S = 1.0  # of data at the bandwidth that was asked for


def reason_not_to() -> str:
    """The reason that there can be no namespaces here; "" if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    tried = subprocess.run(["ip", "netns", "add", f"{PREFIX}try"], capture_output=True, text=True)
    if tried.returncode:
        return tried.stderr.strip()
    subprocess.run(["ip", "netns", "del", f"{PREFIX}try"], check=False)
    return ""


def do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def inside(node: int) -> str:
    return f"ip netns exec {NAMES[node]}"


@contextmanager
def namespaces() -> Iterator[None]:
    """A namespace for each node."""
    try:
        for node, name in enumerate(NAMES):
            do(f"ip netns add {name}")
            do(f"ip -n {name} link set lo up")
            # As on hosts for training: connections stay fast when they have been idle, and hold what is under way.
            settings = ["tcp_slow_start_after_idle=0", "tcp_no_metrics_save=1", "tcp_early_retrans=0"]
            settings.append(f"tcp_congestion_control={CONGESTION}")
            for setting in settings:
                do(f"{inside(node)} sysctl -qw net.ipv4.{setting}")
            for buffer in ("tcp_wmem", "tcp_rmem"):
                setting = f"net.ipv4.{buffer}=4096 4194304 67108864"
                subprocess.run([*inside(node).split(), "sysctl", "-qw", setting], check=False)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def has_netem() -> bool:
    """Whether the kernel can delay what is sent."""
    try:
        do(f"ip -n {NAMES[0]} link add try0 type veth peer name try1")
        do(f"{inside(0)} tc qdisc add dev try0 root netem delay 1ms")
    except RuntimeError:
        return False
    finally:
        subprocess.run(f"ip -n {NAMES[0]} link del try0".split(), check=False, capture_output=True)
    return True


@contextmanager
def links(by: str, mbit: float, latency_ms: float) -> Iterator[None]:
    """Join the namespaces, by a bridge, with "netem" if there is a latency, or by the "switch"."""
    with switched(mbit, latency_ms) if by == "switch" else bridged(latency_ms):
        for node, name in enumerate(NAMES):
            burst = max(2 * largest(by, mbit), round(mbit * 1e6 / 8 * BURST_S))  # bytes that may leave at once
            do(f"{inside(node)} tc qdisc add dev eth0 root tbf rate {mbit}mbit burst {burst} latency 2000ms")
            # Nothing is lost, but acknowledgements queue behind data: TCP must not take that for a loss.
            options = f"proto kernel scope link src {address(node)} rto_min 5s"
            do(f"ip -n {name} route replace {address(0).rpartition('.')[0]}.0/24 dev eth0 {options}")
        yield


def largest(by: str, mbit: float) -> int:
    """Bytes of a packet as tbf sees it; a veth's is cut up only later.

    The switch takes the fewer the faster the link is: it handles so many in a second.
    """
    return min(LARGEST, max(1500, round(mbit * 1e6 / 8 * PACKET_S))) if by == "switch" else 65536


@contextmanager
def bridged(latency_ms: float) -> Iterator[None]:
    """A bridge in a namespace of its own, and a latency on its way to each node."""
    try:
        do(f"ip netns add {HUB}")
        do(f"ip -n {HUB} link add br0 type bridge")
        do(f"ip -n {HUB} link set br0 up")
        for node, name in enumerate(NAMES):
            do(f"ip link add {PREFIX}e{node} type veth peer name {PREFIX}p{node}")
            do(f"ip link set {PREFIX}e{node} netns {name} name eth0")
            do(f"ip link set {PREFIX}p{node} netns {HUB}")
            do(f"ip -n {HUB} link set {PREFIX}p{node} master br0 up")
            do(f"ip -n {name} addr add {address(node)}/24 dev eth0")
            do(f"ip -n {name} link set eth0 up")
            if latency_ms:
                netem = f"root netem delay {latency_ms}ms limit 100000"
                do(f"ip netns exec {HUB} tc qdisc add dev {PREFIX}p{node} {netem}")
        yield
    finally:
        subprocess.run(["ip", "netns", "del", HUB], check=False, capture_output=True)  # takes the links with it


@contextmanager
def switched(mbit: float, latency_ms: float) -> Iterator[None]:
    """The switch in user space."""
    command = [sys.executable, str(Path(__file__).with_name("switch.py"))]
    command += ["--latency-ms", f"{latency_ms:g}", "--mtu", str(largest("switch", mbit)), *NAMES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError("the switch does not start")
            yield
        finally:
            process.kill()


# ------------------------------------------------------------------------------------------------ plain sockets


def probe(rank: int, mbit: float) -> tuple[float, float]:
    """(round trip in seconds, bit/s) of plain TCP sockets, from each node to the one before it, all at once."""
    with socket.create_server((address(rank), PORT)) as server:
        server.settimeout(TIMEOUT_S)
        to, into = _connected(address((rank - 1) % NODES)), server.accept()[0]
    with to, into:
        into.settimeout(TIMEOUT_S)
        for end in (to, into):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echo = threading.Thread(target=_echo, args=(into,))
        echo.start()
        round_trip = statistics.median(_ping(to) for _ in range(PINGS))
        echo.join()
        seconds = 0.0
        for _ in range(2):  # the first finds the connection's speed
            num_bytes = round(mbit * 1e6 / 8 * PROBE_S)
            sending = threading.Thread(target=_send, args=(to, num_bytes))
            sending.start()
            seconds = _until(into, num_bytes)
            sending.join()
        return round_trip, 8 * num_bytes / (seconds - round_trip / 2)


def _connected(host: str) -> socket.socket:
    """A connection, as soon as somebody listens there."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((host, PORT), timeout=TIMEOUT_S)
        time.sleep(0.1)
    raise TimeoutError(f"nobody listens at {host}")


def _ping(connection: socket.socket) -> float:
    start = time.perf_counter()
    connection.sendall(b"p")
    _received(connection, 1)
    return time.perf_counter() - start


def _echo(connection: socket.socket) -> None:
    for _ in range(PINGS):
        connection.sendall(_received(connection, 1))


def _send(connection: socket.socket, num_bytes: int) -> None:
    """Send so many bytes, of which the first say when that was."""
    rest = bytes(num_bytes - 8)
    connection.sendall(struct.pack("d", time.monotonic()))
    connection.sendall(rest)


def _until(connection: socket.socket, num_bytes: int) -> float:
    """Seconds from when so many bytes were sent until they are here."""
    found = b""
    while len(found) < 8:
        found += _received(connection, 8 - len(found))
    left, into = num_bytes - 8, memoryview(bytearray(1 << 20))
    while left > 0:
        num_read = connection.recv_into(into[:left])
        if not num_read:
            raise ConnectionError("the other end is gone")
        left -= num_read
    return time.monotonic() - struct.unpack("d", found)[0]


def _received(connection: socket.socket, at_most: int) -> bytes:
    found = connection.recv(min(at_most, 1 << 20))
    if not found:
        raise ConnectionError("the other end is gone")
    return found
