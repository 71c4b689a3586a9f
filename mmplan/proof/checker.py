"""The independent checker: workload, plan and certificate in, faults out.

It imports nothing of the project: no schema, no compiler, no other check. It derives from the
workload what is to be trained, from the plan where everything runs, and compares for equality:

- stages have the plan's blocks, ranks and samples and the workload's inputs; losses have its
  weights; the units of a module run its blocks once each;
- all holders of a trained part of a block are in one sum, to which each group brings it once;
- every rank's place in the plan, with all that it exchanges there, is its representative's;
- the representative's row runs every forward and backward of its place once. A forward receives
  all samples of all inputs, a backward the gradients of all uses of its output;
- each event has a level, the same on all ranks that take part, and all that it needs has lower
  ones: no rank waits for ever. The messages between two ranks, and the operations of a
  communicator, come in one order on all of their ranks.

docs/proof.md has the format of a certificate, and what is assumed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from math import lcm
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

Json = dict[str, Any]
# By replica and micro-batch: samples from its start, replica and micro-batch at the other end.
_Links = list[list[list[tuple[int, int, int, int]]]]
# What a plan says of its files, its solver and its time does not change what it trains.
_NOT_EXECUTED = ("workload", "profile", "solver", "predicted")
# The operation on the same stage and micro-batch, or sync batch, that comes before another.
_NEEDED = {"B": "F", "I": "F", "W": "I", "SYNC_WAIT": "SYNC_START"}


def check_certificate(
    workload: Json, plan: Json, certificate: Json, profile: Json | None = None
) -> list[str]:
    """Everything in which a certificate does not prove that a plan trains a workload.

    Args:
        workload: the parsed file, like the others.
        plan: of some of its tasks.
        certificate: of the plan.
        profile: says how many blocks modules have; without it the plan is believed there.

    Returns:
        The faults that are found first, each one line; none where the certificate holds.
    """
    try:
        checker = _Checker(workload, plan, certificate, profile)
        phases = (checker.documents, checker.stages_fit, checker.losses_fit, checker.sums_are_whole)
        for phase in (*phases, checker.ranks_are_alike, checker.rows_fit, checker.nothing_waits):
            found = list(dict.fromkeys(phase()))
            if found:
                return found
    except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        return [f"it is not of the form of a certificate: {type(error).__name__}: {error}"]
    return []


def specification(workload: Json, tasks: Iterable[str]) -> Json:
    """What a workload trains in some of its tasks, with all defaults filled in."""
    parts = {kind: workload[kind] for kind in ("modules", "losses")}
    written = workload.get("tasks") or {"default": {kind: list(own) for kind, own in parts.items()}}
    chosen = {name: _task(workload, written[name]) for name in tasks}
    found: Json = {"tasks": chosen}
    for kind, own in parts.items():
        names = sorted({name for task in chosen.values() for name in task[kind]})
        fields = ("factory", "args", "share")
        found[kind] = {n: {f: own[n].get(f) for f in fields if own[n].get(f)} for n in names}
    return found


def _task(workload: Json, task: Json) -> Json:
    batch, inputs = task.get("batch") or workload["batch"], task.get("inputs") or {}
    frozen, weight = task.get("frozen") or {}, Fraction(task.get("weight", 1))
    found: Json = {"batch": batch, "modules": {}, "losses": {}}
    for name in task["modules"]:
        own = workload["modules"][name]
        terms = [_term(text, workload["modules"]) for text in inputs.get(name, own["inputs"])]
        is_frozen = frozen.get(name, own.get("frozen", False))
        found["modules"][name] = {"inputs": terms, "frozen": is_frozen}
    for name in task["losses"]:
        own = workload["losses"][name]
        terms = [_term(text, workload["modules"]) for text in inputs.get(name, own["inputs"])]
        sync_batch = (own.get("sync_batch") or batch) if own.get("cross_sample") else None
        exact = str(weight * Fraction(own.get("weight", 1)))
        found["losses"][name] = {"inputs": terms, "weight": exact, "sync_batch": sync_batch}
    return found


def _term(text: str | None, modules: Json) -> str | None:
    """The name of a value: a module's output, an element of it, or a data field."""
    if text is None or text in modules:
        return text
    head, _, tail = text.rpartition(".")
    return text if head in modules and tail.isdigit() else f"field:{text}"


def document_sha256(document: Json) -> str:
    """SHA-256 of what a plan says of the execution; 1 and 1.0 are the same."""
    executed = {name: value for name, value in document.items() if name not in _NOT_EXECUTED}
    return _sha256(json.loads(json.dumps(executed), parse_int=float))


def _sha256(value: object) -> str:
    text = value if isinstance(value, str) else _canonical(value)
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _unequal(where: str, ours: Any, theirs: Any) -> Iterator[str]:
    """The first difference of the certificate from what it should have."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted({*ours, *theirs}):
            yield from _unequal(f"{where}.{name}", ours.get(name), theirs.get(name))
    elif ours != theirs:
        yield f"{where}: is {_canonical(ours):.200} and should be {_canonical(theirs):.200}"


def _numbered(sizes: Sequence[Sequence[int]], batch: int) -> list[list[list[int]]]:
    """Samples of each replica's micro-batches: in a round all first ones, then all second ones."""
    if min(map(min, sizes)) < 1 or batch % sum(map(sum, sizes)):
        raise ValueError(f"rounds of {sum(map(sum, sizes))} samples do not tile {batch}")
    found: list[list[list[int]]] = [[] for _ in sizes]
    position = 0
    while position < batch:
        for k in range(max(map(len, sizes))):
            for d, row in ((d, row) for d, row in enumerate(sizes) if k < len(row)):
                found[d].append([position, position + row[k]])
                position += row[k]
    return found


class _Row:
    """A canonical row, read once for all the ranks that have it.

    Attributes:
        at: (operation, index) to micro-batch or sync batch to position; ``I`` stands for ``B`` too.
        blocking: (operation, index, number) of computes, waits and collectives, in order.
        messages: (operation, stage, edge) to micro-batch to its spans.
        order: (operation, stage, edge, micro-batch, first sample, number of blocking operations
            before it) of every message.
        issued: (operation, index, token) of collectives, as they are issued.
    """

    def __init__(self, text: str) -> None:
        self.at: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        self.messages: dict[tuple[str, int, int], dict[int, list[tuple[int, int]]]] = {}
        self.blocking: list[tuple[str, int, int]] = []
        self.order: list[tuple[str, int, int, int, int, int]] = []
        self.issued: list[tuple[str, int, str]] = []
        *tokens, last = text.split(" ")
        for position, token in enumerate(tokens):
            op, _, rest = token.partition(":")
            index, number, *more = map(int, rest.split("."))
            kind, needed = "B" if op == "I" else op, _NEEDED.get(op)
            if more:
                edge, start, stop = more
                # Receives stand before their compute, sends after it.
                if (op[:5] == "SEND_") != (number in self.at[op[5:], index]):
                    raise ValueError(f"{token} is on the wrong side of its compute")
                spans = self.messages.setdefault((op, index, edge), {})
                spans[number] = sorted([*spans.get(number, []), (start, stop)])
                self.order.append((op, index, edge, number, start, len(self.blocking)))
            elif number in self.at[kind, index] or (needed and number not in self.at[needed, index]):
                raise ValueError(f"{token} stands twice, or before what it needs")
            else:
                self.at[op, index][number] = self.at[kind, index][number] = position
                if op in ("COUNT", "REDUCE", "SYNC_START"):
                    self.issued.append((op, index, token))
                if op != "SYNC_START":
                    self.blocking.append((kind, index, number))
        if last != "STEP":
            raise ValueError("a row does not end with STEP")


class _Checker:
    """The checks; each may rely on those before it."""

    def __init__(self, workload: Json, plan: Json, certificate: Json, profile: Json | None) -> None:
        self.plan, self.certificate, self.profile = plan, certificate, profile
        self.spec = specification(workload, plan["tasks"])
        self.graph = graph = certificate["graph"]
        self.stages, self.edges, self.losses = graph["stages"], graph["edges"], graph["losses"]
        self.samples, self.classes = graph["microbatches"], certificate["classes"]
        self.units: Json = {unit["name"]: unit for unit in plan["units"]}
        self.rows = [_Row(row["instructions"]) for row in certificate["rows"]]
        self.images = certificate["images"]
        # (task, term) of an output to the stage that makes it.
        self.makers: dict[tuple[str, str], int] = {}
        # By rank: (stage, replica, tp index) of its stages, and the part of each sum that it is in.
        self.places: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.parts: defaultdict[int, Json] = defaultdict(dict)
        self.links: dict[tuple[str, str], tuple[_Links, _Links]] = {}
        # (operation, stage, replica, micro-batch), or of collectives (operation, index, number).
        self.level: dict[tuple[Any, ...], int] = {}

    def documents(self) -> Iterator[str]:
        """The certificate is of this format, of this plan and of this workload."""
        ours, plan = self.certificate, document_sha256(self.plan)
        yield from _unequal("version", ours["version"], 1)
        yield from _unequal("plan_sha256", ours["plan_sha256"], plan)
        yield from _unequal("specification", ours["specification"], self.spec)
        graph = _sha256(_canonical(self.graph))
        for n, row in enumerate(ours["rows"]):
            hashed = _sha256(f"{graph}\n{row['instructions']}")
            yield from _unequal(f"rows.{n}.sha256", row["sha256"], hashed)

    def stages_fit(self) -> Iterator[str]:
        """Stages have the plan's blocks, ranks and samples, and units run all blocks once."""
        for name, unit in self.units.items():
            ranks = [r for replica in unit["ranks"] for group in replica for r in group]
            if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.plan["devices"])):
                yield f"unit {name}: a rank stands in it twice, or is none of the plan's"
            samples = _numbered(unit["microbatches"], self.spec["tasks"][unit["task"]]["batch"])
            yield from _unequal(f"samples of {name}", self.samples[name], samples)
        ends: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0])
        for i, stage in sorted(enumerate(self.stages), key=lambda item: item[1]["blocks"]):
            unit, chunk = self.units[stage["unit"]], stage["chunk"]
            task, module, (first, end) = unit["task"], unit["module"], unit["blocks"][chunk]
            spec = self.spec["tasks"][task]["modules"][module]
            frozen = [[first, end]] if spec["frozen"] is True else spec["frozen"] or []
            expected = {
                "task": task,
                "module": module,
                "owner": self.spec["modules"][module].get("share", module),
                "blocks": [first, end],
                "trained": [b for b in range(first, end) if not any(x <= b < y for x, y in frozen)],
                "ranks": [replica[chunk % len(replica)] for replica in unit["ranks"]],
                "inputs": [f"{module}[0,{first})"] if first else spec["inputs"],
            }
            yield from _unequal(f"stages.{i}", {name: stage[name] for name in expected}, expected)
            ends[task, module] += first, end
            is_last = end == self.plan["tasks"][task]["modules"][module]["blocks"]
            self.makers[task, module if is_last else f"{module}[0,{end})"] = i
            for d, group in enumerate(stage["ranks"]):
                for t, rank in enumerate(group):
                    self.places[rank].append((i, d, t))
        for task, module in ((t, m) for t, own in self.spec["tasks"].items() for m in own["modules"]):
            own, count = ends[task, module], self.plan["tasks"][task]["modules"][module]["blocks"]
            known = self.profile["modules"][module]["blocks"] if self.profile else count
            if own[::2] != own[1::2] + [known] or count != known:
                yield f"task {task}: the stages of {module} do not run its {known} blocks once each"

    def _makers_of(self, task: str, terms: Sequence[str | None]) -> Iterator[tuple[int, str]]:
        """The stages that make terms, data fields left out."""
        for term in terms:
            if term is not None and not term.startswith("field:"):
                whole = term if (task, term) in self.makers else term.rpartition(".")[0]
                yield self.makers[task, whole], term

    def losses_fit(self) -> Iterator[str]:
        """Losses are the workload's, and values and gradients go where they are needed."""
        wanted = {(p, i, term) for i, s in enumerate(self.stages) for p, term in self._makers_of(s["task"], s["inputs"])}
        reaches = [False] * len(self.stages)
        hosts = [False] * len(self.stages)
        known = sorted((t, name) for t, task in self.spec["tasks"].items() for name in task["losses"])
        yield from _unequal("losses", sorted((x["task"], x["name"]) for x in self.losses), known)
        for x, loss in enumerate(self.losses):
            spec = self.spec["tasks"][loss["task"]]["losses"][loss["name"]]
            made = list(self._makers_of(loss["task"], spec["inputs"]))
            # Per-sample losses are computed on the last stage that they take something from.
            on = sorted({p for p, _ in made})[0 if spec["sync_batch"] else -1 :]
            ranks = {r for i in on for group in self.stages[i]["ranks"] for r in group}
            expected = spec | {"weight": float(Fraction(spec["weight"])), "stages": on, "ranks": sorted(ranks)}
            yield from _unequal(f"losses.{x}", {name: loss[name] for name in expected}, expected)
            if self.spec["tasks"][loss["task"]]["batch"] % (spec["sync_batch"] or 1):
                yield f"losses.{x}: its sync batches do not tile the batch"
            wanted |= {(p, on[-1], term) for p, term in made if spec["sync_batch"] is None and p not in on}
            for i in on:
                reaches[i], hosts[i] = True, hosts[i] or spec["sync_batch"] is None
        edges = [(e["producer"], e["consumer"], e["term"]) for e in self.edges]
        yield from _unequal("edges", sorted(edges), sorted(wanted))
        makes = [bool(stage["trained"]) for stage in self.stages]
        for p, c, _ in sorted(edges, key=lambda edge: edge[1]):
            makes[c] |= makes[p]
        for p, c, _ in sorted(edges, key=lambda edge: -edge[0]):
            reaches[p] |= reaches[c]
        gradients = [makes[p] and reaches[c] and p < c for p, c, _ in edges]
        yield from _unequal("gradients", [edge["gradient"] for edge in self.edges], gradients)
        self.backward = [(m and r) or h for m, r, h in zip(makes, reaches, hosts, strict=True)]

    def sums_are_whole(self) -> Iterator[str]:
        """Each trained part of a block is summed over all of its holders, once for each group."""
        sums = self.graph["sums"]
        for k, rank, part in ((k, r, p) for k, s in enumerate(sums) for p in s["parts"] for r in p["ranks"]):
            if k in self.parts[rank]:
                yield f"sums.{k}: rank {rank} is in it twice"
            self.parts[rank][k] = part
        for name in {loss["name"] for loss in self.losses}:
            ranks = sorted({r for loss in self.losses if loss["name"] == name for r in loss["ranks"]})
            own = [part["ranks"] for s in sums if s.get("loss") == name for part in s["parts"]]
            yield from _unequal(f"sums of {name}", own, [ranks] if len(ranks) > 1 else [])
        for owner in {stage["owner"] for stage in self.stages}:
            stages = [s for s in self.stages if s["owner"] == owner]
            own = [s for s in sums if s.get("owner") == owner]
            ends = {x for item in (*stages, *own) for x in item["blocks"]}
            ends |= {x for s in stages for b in s["trained"] for x in (b, b + 1)}
            for a, b in pairwise(sorted(ends)):
                holders = [s for s in stages if s["blocks"][0] <= a and b <= s["blocks"][1]]
                over = [s for s in own if s["blocks"][0] <= a and b <= s["blocks"][1]]
                groups = list(dict.fromkeys(tuple(g) for s in holders for g in s["ranks"]))
                if any(a in s["trained"] for s in holders):
                    yield from (f"{owner}[{a},{b}): {fault}" for fault in _unsummed(groups, over))

    def ranks_are_alike(self) -> Iterator[str]:
        """Every rank's place, and what it exchanges there, is its representative's."""
        for edge in self.edges:
            pair = tuple(self.stages[edge[end]]["unit"] for end in ("producer", "consumer"))
            if pair not in self.links:
                self.links[pair] = _links(*(self.samples[name] for name in pair))
        for name, unit in self.units.items():
            for d, image in enumerate(self.images[name]):
                for group, group0 in zip(unit["ranks"][d], unit["ranks"][image], strict=True):
                    for rank, rank0 in zip(group, group0, strict=True):
                        if self._stands_for(rank) not in (rank0, group0[0]):
                            yield f"rank {rank}: its representative has another place in unit {name}"
                if self._exchange(name, d) != self._exchange(name, image) or self.images[name][image] != image:
                    yield f"unit {name}: replica {d} does not do what its image {image} does"
        for rank in range(self.plan["devices"]):
            own = {(i, self.images[self.stages[i]["unit"]][d]) for i, d, _ in self.places.get(rank, ())}
            if self.certificate["ranks"][rank] is None:
                image = set()
            else:
                image = {(i, d) for i, d, _ in self.places[self._stands_for(rank)]}
            if own != image:
                yield f"rank {rank}: its representative runs other stages"

    def _stands_for(self, rank: int) -> int:
        return self.classes[self.certificate["ranks"][rank]]["representative"]

    def _exchange(self, name: str, d: int) -> list[Any]:
        """Sizes and sync batches of a replica, and what it gives and takes, peers by their images."""
        spans = self.samples[name][d]
        found: list[Any] = [b - a for a, b in spans]
        for size in (x["sync_batch"] for x in self.losses if any(self.stages[i]["unit"] == name for i in x["stages"])):
            found += [(a // size, (b - 1) // size) for a, b in spans if size]
        for (producer, consumer), (gives, takes) in self.links.items():
            for links, other, is_own in ((gives, consumer, name == producer), (takes, producer, name == consumer)):
                found += [(a, b, self.images[other][d2], m) for row in links[d] for a, b, d2, m in row] if is_own else []
        return found

    def rows_fit(self) -> Iterator[str]:
        """The row of a place runs all that belongs there once, and exchanges what it needs."""
        members = [set(loss["ranks"]) for loss in self.losses]
        known: set[tuple[Any, ...]] = set()
        for rank, places in self.places.items():
            n = self.certificate["ranks"][rank]
            row, wanted = self.rows[self.classes[n]["row"]], {}
            own = {i: (self.images[self.stages[i]["unit"]][d], t) for i, d, t in places}
            for e, edge in enumerate(self.edges):
                ends = edge["producer"], edge["consumer"]
                links = self.links[tuple(self.stages[i]["unit"] for i in ends)]
                for i, other, rows, ops in zip(ends, ends[::-1], links, (("SEND_F", "RECV_B"), ("RECV_F", "SEND_B"))):
                    for op in ops[: 1 + edge["gradient"]] if i in own else ():
                        d, t = own[i]
                        if op[0] == "R" or t < len(self.stages[other]["ranks"][0]):
                            wanted[op, i, e] = rows[d]
            sums, losses = self.parts[rank], [x for x, on in enumerate(members) if rank in on]
            key = n, *wanted, *sums, *losses
            if key in known:
                continue
            known.add(key)
            where = f"row of rank {rank}"
            at, messages = row.at, {k: {m: [(a, b) for a, b, _, _ in row] for m, row in enumerate(rows)} for k, rows in wanted.items()}
            if row.messages != messages:
                yield f"{where}: its messages do not bring and take the samples of its micro-batches"
            expected = {("REDUCE", k, 0) for k in sums}
            for i, (d, _) in own.items():
                expected |= {(op, i, m) for op in "FB"[: 1 + self.backward[i]] for m in range(len(self.samples[self.stages[i]["unit"]][d]))}
                if at["I", i].keys() != at["W", i].keys():
                    yield f"{where}: stage {i} has an I without its W"
            for x in losses:
                loss = self.losses[x]
                size = loss["sync_batch"]
                syncs = range(self.spec["tasks"][loss["task"]]["batch"] // size) if size else ()
                expected |= {(op, x, g) for op in ("SYNC_START", "SYNC_WAIT") for g in syncs}
                expected |= set() if size else {("COUNT", x, 0)}
                for i in (i for i in loss["stages"] if i in own):
                    forwards, backwards = at["F", i], at["B", i]
                    if not size and at["COUNT", x][0] > min(forwards.values()):
                        yield f"{where}: loss {x} is counted too late"
                    for m, (a, b) in enumerate(self.samples[self.stages[i]["unit"]][own[i][0]]):
                        for g in range(a // size, -(-b // size)) if size else ():
                            if forwards[m] > at["SYNC_START", x][g] or backwards.get(m, sys.maxsize) < at["SYNC_WAIT", x][g]:
                                yield f"{where}: sync batch {g} of loss {x} is not between F and B of {m}"
            found = {(op, i, m) for (op, i), own in at.items() for m in own if op not in ("I", "W")}
            if found != expected:
                yield f"{where}: it has {sorted(found - expected)[:3]} and lacks {sorted(expected - found)[:3]}"
            last = max(position for (op, _), own in at.items() if op in "FBW" for position in own.values())
            if any(at["REDUCE", k][0] < last for k in sums):
                yield f"{where}: it sums gradients before it has all"

    def nothing_waits(self) -> Iterator[str]:
        """Levels rise along rows and messages; messages and collectives have one order."""
        routes: defaultdict[tuple[int, int, str], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
        needs: list[tuple[tuple[Any, ...], int]] = []
        for n, own in enumerate(self.classes):
            rank, row = own["representative"], self.rows[own["row"]]
            levels = [int(level) for level in own["levels"].split(" ")]
            place = {i: (d, t) for i, d, t in self.places[rank]}
            for (op, i, m), level in zip(row.blocking, levels, strict=True):
                event = (op, i, place[i][0], m) if op in "FBW" else (op, i, m)
                if op != "W" and self.level.setdefault(event, level) != level:
                    yield f"classes.{n}: {event} is on another level than on other ranks"
            if any(a >= b for a, b in pairwise(levels)):
                yield f"classes.{n}: its levels do not rise"
            for op, i, e, m, start, before in row.order if self.certificate["ranks"][rank] == n else ():
                ends = self.edges[e]["producer"], self.edges[e]["consumer"]
                links = self.links[tuple(self.stages[x]["unit"] for x in ends)][i == ends[1]]
                other, (d, t) = ends[i == ends[0]], place[i]
                d2, m2 = next(link[2:] for link in links[d][m] if link[0] == start)
                group = self.stages[other]["ranks"][d2]
                first = self.samples[self.stages[i]["unit"]][d][m][0] + start
                if op[0] == "S":
                    needs.append(((op[5], other, d2, m2), levels[before - 1]))
                    for peer in group[t :: len(self.stages[i]["ranks"][d])]:
                        routes[rank, peer, op[5]][0].append((e, first))
                else:
                    routes[group[t % len(group)], rank, op[5]][1].append((e, first))
        yield from (f"{event} comes before what it needs" for event, level in needs if self.level[event] <= level)
        for (source, target, _), (sent, received) in routes.items():
            if sent != received and self._stands_for(source) == source and self._stands_for(target) == target:
                yield f"ranks {source} > {target}: messages are sent in another order than received"
        orders: dict[tuple[int, ...], list[str]] = {}
        for rank in self.places:
            row = self.rows[self.classes[self.certificate["ranks"][rank]]["row"]]
            issued: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
            for op, x, token in row.issued:
                ranks = (self.parts[rank][x] if op == "REDUCE" else self.losses[x])["ranks"]
                if len(ranks) > 1:
                    issued[x + 1 if op == "SYNC_START" else 0, *ranks].append(token)
            for communicator, own in issued.items():
                if orders.setdefault(communicator, own) != own:
                    yield f"rank {rank}: issues its collectives in another order than others"
        listed = self.certificate["communicators"]
        if {(own["channel"], *own["ranks"]): own["operations"] for own in listed} != orders:
            yield "communicators: are not those on which the rows issue collectives"


def _links(producer, consumer) -> tuple[_Links, _Links]:
    """What each micro-batch of a unit gives to those of another, and what these take."""
    gives: _Links = [[[] for _ in row] for row in producer]
    takes: _Links = [[[] for _ in row] for row in consumer]
    held, wanted = (sorted((a, b, d, m) for d, row in enumerate(unit) for m, (a, b) in enumerate(row)) for unit in (producer, consumer))
    starts = [span[0] for span in held]
    for x, y, d2, m2 in wanted:
        for a, b, d, m in held[bisect_right(starts, x) - 1 : bisect_right(starts, y - 1)]:
            low, high = max(a, x), min(b, y)
            gives[d][m].append((low - a, high - a, d2, m2))
            takes[d2][m2].append((low - x, high - x, d, m))
    return gives, takes


def _unsummed(groups: Sequence[tuple[int, ...]], over: Sequence[Json]) -> Iterator[str]:
    """What is not summed, or not once, of a block that some groups hold."""
    held: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for t, rank, n in ((t, rank, len(group)) for group in groups for t, rank in enumerate(group)):
        held[rank].add((t, n))
    whole, cut = ([p for s in over if s["parameters"] != kind for p in s["parts"]] for kind in ("cut", "whole"))
    # What tensor parallelism leaves whole: one rank of each group brings its gradient.
    if (whole or len(groups) > 1) and Counter(r for p in whole for r in p["ranks"]) != Counter(list(held)):
        yield "a rank is in none or in several of the sums of replicated parameters"
    is_crowded = any(len(own) > 1 for own in held.values())
    for bring in (set(part["contributors"]) for part in whole):
        if not is_crowded and any(len(bring & set(group)) != 1 for group in groups):
            yield f"not one rank of each group brings a gradient to the sum from {sorted(bring)}"
    # What it cuts: all holders of a shard are in one sum. A rank with two shards holds all.
    tp = lcm(*map(len, groups), *(p["tp"] for p in cut))
    ends = {x * (tp // p["tp"]) for p in cut for x in p["shards"]}
    ends |= {x * (tp // len(group)) for group in groups for x in range(len(group) + 1)}
    for a, b in pairwise(sorted(ends)):
        holders = {r for r, own in held.items() if len(own) > 1 or any(t * tp <= a * n < (t + 1) * tp for t, n in own)}
        sums = [set(p["ranks"]) for p in cut if p["shards"][0] * tp <= a * p["tp"] < p["shards"][1] * tp]
        if sums != ([holders] if sums or len(holders) > 1 else []):
            yield f"shards [{a},{b}) of {tp}, on {sorted(holders)}, are not in one sum of all of them"


def _read(path: str) -> Json:
    text = Path(path).read_text(encoding="utf-8")
    if path.endswith(".json") or text.lstrip().startswith("{"):
        return json.loads(text)
    return YAML(typ="safe", pure=True).load(text)


def main(arguments: Sequence[str]) -> int:
    """``WORKLOAD PLAN CERTIFICATE [--profile PROFILE]``: faults, one a line; 0, 1, or 2 for usage."""
    if len(arguments) not in (3, 5) or arguments[3:4] not in ([], ["--profile"]):
        print("usage: WORKLOAD PLAN CERTIFICATE [--profile PROFILE]", file=sys.stderr)
        return 2
    faults = check_certificate(*(_read(path) for path in (*arguments[:3], *arguments[4:])))
    print("\n".join(faults) or f"{arguments[2]} proves that {arguments[1]} trains {arguments[0]}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
