"""Nodes' network interfaces, shared by all transfers that use them at the same time.

Transfers are fluid: each flows at a rate, and rates are shared out max-min fair, as flows of
equal rights on TCP or InfiniBand come close to. All rates grow together; where an interface
is full those on it stay as they are and the others grow on. Rates change only when a
transfer begins or ends, so that a queue of these two events is exact, and transfers that
share no interface, not even by way of others, do not touch each other.

An interface is one direction of one node: ``2 * node`` sends, ``2 * node + 1`` receives, full
duplex. Its capacity is 1, and a transfer's size is the seconds that it takes alone.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# (interface, part of its capacity that is taken at rate 1), each interface once.
Loads = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a transfer asks of the interfaces.

    Attributes:
        seconds: for which it has them, alone.
        loads: on which, and how much of each.
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
    """Transfers that began together, on the same interfaces and of the same size."""

    loads: Loads
    keys: list[int]
    left: float
    since: float
    rate: float = 0.0
    version: int = 0


class Network:
    """The interfaces of a cluster over time.

    Whoever adds transfers must not add one that begins before what :meth:`advance` last told.
    """

    def __init__(self) -> None:
        self._begins: list[tuple[float, Loads, float, int]] = []
        self._ends: list[tuple[float, int, int]] = []
        self._bundles: dict[int, _Bundle] = {}
        self._users: defaultdict[int, set[int]] = defaultdict(set)
        self._ticket = 0

    def add(self, begins_s: float, traffic: Traffic, key: int) -> None:
        """A transfer that begins then; ``key`` names it when it is over."""
        heapq.heappush(self._begins, (begins_s, traffic.loads, traffic.seconds, key))

    def advance(self) -> tuple[float, list[int]] | None:
        """The next time at which transfers are over, and which; None when none is left."""
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
        """Take away what is over; the interfaces that it used."""
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
        """Add what begins; the interfaces that it uses."""
        changed: set[int] = set()
        alike: dict[tuple[Loads, float], list[int]] = {}
        while self._begins and self._begins[0][0] <= now:
            _, loads, seconds, key = heapq.heappop(self._begins)
            alike.setdefault((loads, seconds), []).append(key)
        for (loads, seconds), keys in alike.items():
            self._ticket += 1
            several = tuple((interface, load * len(keys)) for interface, load in loads)
            self._bundles[self._ticket] = _Bundle(several, keys, seconds, now)
            for interface, _ in loads:
                self._users[interface].add(self._ticket)
                changed.add(interface)
        return changed

    def _share(self, now: float, changed: set[int]) -> None:
        """Share out anew what depends on the interfaces that changed."""
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
        """What flows through the interfaces, or shares others with what does; in order."""
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
    """Max-min fair rates: no rate can grow without making one shrink that is not larger."""
    if len(bundles) == 1:
        return [1.0 / max(load for _, load in bundles[0].loads)]
    rates = [0.0] * len(bundles)
    room: dict[int, float] = {}
    asked: dict[int, float] = {}
    users: dict[int, list[int]] = {}
    for index, bundle in enumerate(bundles):
        for interface, load in bundle.loads:
            room[interface] = 1.0
            asked[interface] = asked.get(interface, 0.0) + load
            users.setdefault(interface, []).append(index)
    growing = {interface: len(found) for interface, found in users.items()}
    rate = 0.0
    while growing:
        full = min(growing, key=lambda interface: room[interface] / asked[interface])
        # Never below an earlier one but for rounding.
        rate = max(rate, room[full] / asked[full])
        for index in users[full]:
            if rates[index]:
                continue
            rates[index] = rate
            for interface, load in bundles[index].loads:
                room[interface] -= load * rate
                asked[interface] -= load
                growing[interface] -= 1
                if not growing[interface]:
                    del growing[interface]
    return rates
