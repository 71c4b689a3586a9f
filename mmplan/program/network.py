"""Nodes' network interfaces, shared by all transfers that use them at the same time.

Transfers are fluid flows with max-min fair rates; flows of equal priority on TCP or InfiniBand come
close to such rates. All rates grow together until an interface is full. Flows on a full interface
keep their rate, and the other rates grow on, up to 1: no flow is faster than alone. Rates change
only when a transfer begins or ends, so a queue of these two events is exact. Transfers that share
no interface, directly or through other transfers, do not affect each other.

An interface is one direction of one node: ``2 * node`` sends, ``2 * node + 1`` receives, full
duplex. Its capacity is 1, and a transfer's size is the seconds that it takes alone.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# (interface, part of its capacity at rate 1), each interface once.
Loads = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A transfer's use of interfaces.

    Attributes:
        seconds: of the transfer without other transfers.
        loads: its interfaces, and its part of the capacity of each.
    """

    seconds: float
    loads: Loads


def outgoing(node: int) -> int:
    """The interface with which a node sends."""
    return 2 * node


def incoming(node: int) -> int:
    """The interface with which a node receives."""
    return 2 * node + 1


def exchange(nodes: Iterable[int], load: float = 1.0) -> Loads:
    """Loads of a collective: every node sends and receives as much as every other."""
    both = (side for node in sorted(nodes) for side in (outgoing(node), incoming(node)))
    return tuple((interface, load) for interface in both)


@dataclass(slots=True)
class _Bundle:
    """Transfers that begin together, use the same interfaces and have the same size."""

    loads: Loads
    keys: list[int]
    left: float
    since: float
    rate: float = 0.0
    version: int = 0


class Network:
    """The interfaces of a cluster over time.

    A transfer must not begin before the last time that :meth:`advance` has returned.
    """

    def __init__(self) -> None:
        self._begins: list[tuple[float, Loads, float, int]] = []
        self._ends: list[tuple[float, int, int]] = []
        self._bundles: dict[int, _Bundle] = {}
        self._users: defaultdict[int, set[int]] = defaultdict(set)
        self._ticket = 0

    def add(self, begins_s: float, traffic: Traffic, key: int) -> None:
        """Add a transfer; :meth:`advance` returns its ``key`` when it is over."""
        heapq.heappush(self._begins, (begins_s, traffic.loads, traffic.seconds, key))

    def advance(self) -> tuple[float, list[int]] | None:
        """The next time at which transfers end, and their keys; None when none is left."""
        done: list[int] = []
        now = 0.0
        while not done:
            now = min(self._next_end(), self._begins[0][0] if self._begins else math.inf)
            if now == math.inf:
                return None
            changed = self._finish(now, done)
            changed |= self._begin(now)
            self._share(now, changed)
        return now, done

    def _next_end(self) -> float:
        while self._ends:
            end, ticket, version = self._ends[0]
            bundle = self._bundles.get(ticket)
            if bundle is not None and bundle.version == version:
                return end
            heapq.heappop(self._ends)
        return math.inf

    def _finish(self, now: float, done: list[int]) -> set[int]:
        """Remove the transfers that are over, and return their interfaces."""
        changed: set[int] = set()
        while self._next_end() <= now:
            _, ticket, _ = heapq.heappop(self._ends)
            bundle = self._bundles.pop(ticket)
            for interface, _ in bundle.loads:
                self._users[interface].discard(ticket)
                changed.add(interface)
            done += bundle.keys
        return changed

    def _begin(self, now: float) -> set[int]:
        """Add the transfers that begin, and return their interfaces."""
        changed: set[int] = set()
        bundles: dict[tuple[Loads, float], list[int]] = {}
        while self._begins and self._begins[0][0] <= now:
            _, loads, seconds, key = heapq.heappop(self._begins)
            bundles.setdefault((loads, seconds), []).append(key)
        for (loads, seconds), keys in bundles.items():
            self._ticket += 1
            several = tuple((interface, load * len(keys)) for interface, load in loads)
            self._bundles[self._ticket] = _Bundle(several, keys, seconds, now)
            for interface, _ in loads:
                self._users[interface].add(self._ticket)
                changed.add(interface)
        return changed

    def _share(self, now: float, changed: set[int]) -> None:
        """New rates for all transfers that depend on the changed interfaces."""
        tickets = self._connected(changed)
        bundles = [self._bundles[ticket] for ticket in tickets]
        for ticket, bundle, rate in zip(tickets, bundles, fair_rates(bundles), strict=True):
            if rate == bundle.rate:
                continue
            bundle.left = max(0.0, bundle.left - bundle.rate * (now - bundle.since))
            bundle.since, bundle.rate = now, rate
            bundle.version += 1
            heapq.heappush(self._ends, (now + bundle.left / rate, ticket, bundle.version))

    def _connected(self, interfaces: set[int]) -> list[int]:
        """Transfers on the interfaces, and all connected to them by shared interfaces; in order."""
        found: set[int] = set()
        seen, todo = set(interfaces), list(interfaces)
        while todo:
            for ticket in self._users[todo.pop()]:
                if ticket not in found:
                    found.add(ticket)
                    for interface, _ in self._bundles[ticket].loads:
                        if interface not in seen:
                            seen.add(interface)
                            todo.append(interface)
        return sorted(found)


def fair_rates(bundles: Sequence[_Bundle]) -> list[float]:
    """Max-min fair rates up to 1: a rate can grow only if a rate that is no larger shrinks."""
    if len(bundles) == 1:
        return [1.0 / max(1.0, *(load for _, load in bundles[0].loads))]
    rates = [0.0] * len(bundles)
    free: dict[int, float] = {}
    asked: dict[int, float] = {}
    users: dict[int, list[int]] = {}
    for index, bundle in enumerate(bundles):
        for interface, load in bundle.loads:
            free[interface] = 1.0
            asked[interface] = asked.get(interface, 0.0) + load
            users.setdefault(interface, []).append(index)
    growing = {interface: len(found) for interface, found in users.items()}
    rate = 0.0
    while growing:
        full = min(growing, key=lambda interface: free[interface] / asked[interface])
        # Rates of later interfaces are never lower, except by rounding.
        rate = max(rate, min(free[full] / asked[full], 1.0))
        for index in users[full]:
            if rates[index]:
                continue
            rates[index] = rate
            for interface, load in bundles[index].loads:
                free[interface] -= load * rate
                asked[interface] -= load
                growing[interface] -= 1
                if not growing[interface]:
                    del growing[interface]
    return rates
