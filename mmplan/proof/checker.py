"""The independent checker: workload, plan and certificate in, faults out; docs/proof.md explains.

It imports nothing of the project. It derives from the workload what is to be trained, and from the
plan where everything runs, and compares the certificate with both for equality.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import inf, lcm
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

_Parsed = dict[str, Any]
# By replica and micro-batch: samples from its start, replica and micro-batch at the other end.
_Links = list[list[list[tuple[int, ...]]]]
# What a plan says of its files, its solver and its time does not change what it trains.
_NOT_EXECUTED = ("workload", "profile", "solver", "predicted")
# Operations that return at once.
_RETURNS = ("SEND_F", "SEND_B", "RECV_F", "RECV_B", "SYNC_START", "REDUCE_START")


def check_certificate(
    workload: _Parsed, plan: _Parsed, certificate: _Parsed, profile: _Parsed | None = None
) -> list[str]:
    """The first faults for which a certificate does not prove that a plan trains a workload.

    All are parsed files. Without a profile the plan is believed how many blocks modules have.
    """
    try:
        checker = _Checker(workload, plan, certificate, profile)
        phases = (checker.documents, checker.stages_fit, checker.losses_fit, checker.sums_fit)
        for phase in (*phases, checker.ranks_are_alike, checker.rows_fit, checker.orders_fit):
            found = list(dict.fromkeys(phase()))
            if found:
                return found
    except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return [f"it is not of the form of a certificate: {type(error).__name__}: {error}"]
    return []


def specification(workload: _Parsed, tasks: Iterable[str]) -> _Parsed:
    """What a workload trains in some of its tasks, with all defaults filled in."""
    kinds, fields = ("modules", "losses"), ("factory", "args", "share")
    written = workload.get("tasks") or {"default": {kind: list(workload[kind]) for kind in kinds}}
    found: _Parsed = {"tasks": {name: _task(workload, written[name]) for name in tasks}}
    for kind in kinds:
        own, names = workload[kind], {n for task in found["tasks"].values() for n in task[kind]}
        found[kind] = {n: {f: own[n][f] for f in fields if own[n].get(f)} for n in sorted(names)}
    return found


def _task(workload: _Parsed, task: _Parsed) -> _Parsed:
    modules, batch = workload["modules"], task.get("batch") or workload["batch"]
    inputs, frozen = task.get("inputs") or {}, task.get("frozen") or {}
    found: _Parsed = {"batch": batch, "modules": {}, "losses": {}}
    for name in task["modules"]:
        own = modules[name]
        terms = [_term(text, modules) for text in inputs.get(name, own["inputs"])]
        ranges = frozen.get(name, own.get("frozen", False))
        found["modules"][name] = {"inputs": terms, "frozen": ranges}
    for name in task["losses"]:
        own = workload["losses"][name]
        terms = [_term(text, modules) for text in inputs.get(name, own["inputs"])]
        exact = str(Fraction(own.get("weight", 1)) * Fraction(task.get("weight", 1)))
        size = (own.get("sync_batch") or batch) if own.get("cross_sample") else None
        found["losses"][name] = {"inputs": terms, "weight": exact, "sync_batch": size}
    return found


def _term(text: str | None, modules: _Parsed) -> str | None:
    """The name of a value: a module's output, an element of it, or a data field."""
    if text is None or text in modules:
        return text
    head, _, tail = text.rpartition(".")
    return text if head in modules and tail.isdigit() else f"field:{text}"


def document_sha256(document: _Parsed) -> str:
    """SHA-256 of what a plan says of the execution; 1 and 1.0 are the same."""
    executed = {name: value for name, value in document.items() if name not in _NOT_EXECUTED}
    return _sha256(json.loads(json.dumps(executed), parse_int=float))


def _sha256(value: object) -> str:
    """Of a text, or of the JSON of something else, without spaces and with sorted keys."""
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _unequal(where: str, ours: Any, theirs: Any) -> Iterator[str]:
    """Where the certificate has something else than it should have."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted({*ours, *theirs}):
            yield from _unequal(f"{where}.{name}", ours.get(name), theirs.get(name))
    elif ours != theirs:
        yield f"{where}: is {json.dumps(ours):.200} and should be {json.dumps(theirs):.200}"


class _Checker:
    """The checks; each may rely on those before it."""

    def __init__(
        self, workload: _Parsed, plan: _Parsed, certificate: _Parsed, profile: _Parsed | None
    ) -> None:
        self.plan, self.certificate, self.profile = plan, certificate, profile
        self.spec = specification(workload, plan["tasks"])
        self.graph: _Parsed = certificate["graph"]
        self.stages, self.losses = self.graph["stages"], self.graph["losses"]
        self.samples, self.sums = self.graph["microbatches"], self.graph["sums"]
        self.ends = [(e["producer"], e["consumer"], e["term"]) for e in self.graph["edges"]]
        self.units: _Parsed = {unit["name"]: unit for unit in plan["units"]}
        self.images, self.classes = certificate["images"], certificate["classes"]
        self.of_rank, self.rows = certificate["ranks"], list[_CertifiedRow]()
        # (task, term) of an output to the stage that makes it.
        self.makers: dict[tuple[str, str], int] = {}
        # By rank: (stage, replica, tp index) of its stages, and the part of each sum that it is in.
        self.places: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.parts: defaultdict[int, dict[int, _Parsed]] = defaultdict(dict)
        self.links: dict[tuple[str, str], tuple[_Links, _Links]] = {}
        # By class: (operation, stage, edge) of its messages, its sums and its losses.
        self.duties: dict[int, tuple[Any, ...]] = {}

    def documents(self) -> Iterator[str]:
        """The certificate is of this format, of this plan and of this workload."""
        ours, graph_sha256 = self.certificate, _sha256(self.graph)
        yield from _unequal("version", ours["version"], 1)
        yield from _unequal("plan_sha256", ours["plan_sha256"], document_sha256(self.plan))
        yield from _unequal("specification", ours["specification"], self.spec)
        for n, row in enumerate(ours["rows"]):
            hashed = _sha256(f"{graph_sha256}\n{row['instructions']}")
            yield from _unequal(f"rows.{n}.sha256", row["sha256"], hashed)

    def stages_fit(self) -> Iterator[str]:
        """Stages have the plan's blocks, ranks and samples, and run each block once."""
        for name, unit in self.units.items():
            ranks = [r for replica in unit["ranks"] for group in replica for r in group]
            if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.plan["devices"])):
                yield f"unit {name}: a rank stands in it twice, or is none of the plan's"
            samples = _numbered(unit["microbatches"], self.spec["tasks"][unit["task"]]["batch"])
            yield from _unequal(f"microbatches.{name}", self.samples[name], samples)
        cuts: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0])
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
            cuts[task, module] += first, end
            is_last = end == self._blocks(task, module)
            self.makers[task, module if is_last else f"{module}[0,{end})"] = i
            for d, group in enumerate(stage["ranks"]):
                for t, rank in enumerate(group):
                    self.places[rank].append((i, d, t))
        for task in self.spec["tasks"]:
            for module in self.spec["tasks"][task]["modules"]:
                own, count = cuts[task, module], self._blocks(task, module)
                known = self.profile["modules"][module]["blocks"] if self.profile else count
                if own[::2] != [*own[1::2], known] or count != known:
                    yield f"task {task}: {module} does not run its {known} blocks once each"

    def _blocks(self, task: str, module: str) -> int:
        return self.plan["tasks"][task]["modules"][module]["blocks"]

    def _made(self, task: str, terms: Sequence[str | None]) -> Iterator[tuple[int, str]]:
        """The stages that make terms, data fields left out."""
        for term in (x for x in terms if x is not None and not x.startswith("field:")):
            whole = term if (task, term) in self.makers else term.rpartition(".")[0]
            yield self.makers[task, whole], term

    def losses_fit(self) -> Iterator[str]:
        """Losses are the workload's, and values and gradients go where they are needed."""
        tasks, stages = self.spec["tasks"], self.stages
        named = sorted([loss["task"], loss["name"]] for loss in self.losses)
        known = sorted([name, loss] for name, task in tasks.items() for loss in task["losses"])
        yield from _unequal("losses", named, known)
        takes = enumerate((stage["task"], stage["inputs"]) for stage in stages)
        wanted = {(p, i, term) for i, taken in takes for p, term in self._made(*taken)}
        hosts, reaches = [False] * len(stages), [False] * len(stages)
        for x, loss in enumerate(self.losses):
            spec = tasks[loss["task"]]["losses"][loss["name"]]
            size, made = spec["sync_batch"], list(self._made(loss["task"], spec["inputs"]))
            # A per-sample loss is computed on the last stage that it takes something from.
            on = sorted({p for p, _ in made})[0 if size else -1 :]
            ranks = sorted({rank for i in on for group in stages[i]["ranks"] for rank in group})
            weight = float(Fraction(spec["weight"]))
            expected = spec | {"weight": weight, "stages": on, "ranks": ranks}
            yield from _unequal(f"losses.{x}", {name: loss[name] for name in expected}, expected)
            if tasks[loss["task"]]["batch"] % (size or 1):
                yield f"losses.{x}: its sync batches do not tile the batch"
            wanted |= {(p, on[0], term) for p, term in made if not size and p != on[0]}
            for i in on:
                reaches[i], hosts[i] = True, hosts[i] or not size
        yield from _unequal("edges", sorted(self.ends), sorted(wanted))
        makes = [bool(stage["trained"]) for stage in stages]
        for p, c, _ in sorted(self.ends, key=lambda end: end[1]):
            makes[c] |= makes[p]
        for p, c, _ in sorted(self.ends, key=lambda end: -end[0]):
            reaches[p] |= reaches[c]
        gradients = [makes[p] and reaches[c] and p < c for p, c, _ in self.ends]
        yield from _unequal("edges", [e["gradient"] for e in self.graph["edges"]], gradients)
        self.backward = [hosts[i] or (makes[i] and reaches[i]) for i in range(len(stages))]

    def sums_fit(self) -> Iterator[str]:
        """Each trained part of a block is summed over all of its holders, once for each group."""
        for k, part in ((k, part) for k, own in enumerate(self.sums) for part in own["parts"]):
            for rank in part["ranks"]:
                self.parts[rank][k] = part
        for name in {loss["name"] for loss in self.losses}:
            on = sorted({r for loss in self.losses if loss["name"] == name for r in loss["ranks"]})
            own = [p["ranks"] for s in self.sums if s.get("loss") == name for p in s["parts"]]
            yield from _unequal(f"sums of {name}", own, [on] if len(on) > 1 else [])
        common = self.plan.get("training", {}).get("zero", 0)
        for i, stage in enumerate(self.stages):
            cut = any("rounds" in own and self._adding(k, [i]) for k, own in enumerate(self.sums))
            zero = self.units[stage["unit"]].get("zero", common)
            gathers = cut and zero == 3
            yield from _unequal(f"stages.{i}.gathers", stage.get("gathers", False), gathers)
        planned = [m for task in self.plan["tasks"].values() for m in task["modules"].items()]
        ties = {(x.get("share") or n, *tie) for n, x in planned for tie in x.get("ties") or ()}
        for owner in {stage["owner"] for stage in self.stages}:
            stages = [stage for stage in self.stages if stage["owner"] == owner]
            own = [total for total in self.sums if total.get("owner") == owner]
            ends = {x for item in (*stages, *own) for x in item["blocks"]}
            ends |= {x for stage in stages for b in stage["trained"] for x in (b, b + 1)}
            for a, b in pairwise(sorted(ends)):
                held = [x for x in stages if x["blocks"][0] <= a and b <= x["blocks"][1]]
                over = [x for x in own if x["blocks"][0] <= a and b <= x["blocks"][1]]
                groups = list(dict.fromkeys(g for stage in held for g in self._holders(stage)))
                if any(a in stage["trained"] for stage in held):
                    yield from (f"{owner}[{a},{b}): {fault}" for fault in _unsummed(groups, over))
            trained = {b for stage in stages for b in stage["trained"]}
            for tie in (t for name, *t in ties if name == owner and trained.issuperset(t)):
                held = [x for x in stages if not {*tie}.isdisjoint(range(*x["blocks"]))]
                groups = list({g for stage in held for g in self._holders(stage)})
                over = [x for x in self.sums if (x.get("tie"), x.get("blocks")) == (owner, tie)]
                yield from (f"{owner}, {tie}: {x}" for x in _unsummed(groups, over))

    def _holders(self, stage: _Parsed) -> Iterator[tuple[int, ...]]:
        """The groups of ranks of which each has all gradients of its samples."""
        ways = [*map(tuple, stage["ranks"])]
        shares_items = self.units[stage["unit"]].get("items")
        return iter([(rank,) for group in ways for rank in group] if shares_items else ways)

    def ranks_are_alike(self) -> Iterator[str]:
        """Every rank's place, and what it exchanges there, is its representative's."""
        for pair in {(self.stages[p]["unit"], self.stages[c]["unit"]) for p, c, _ in self.ends}:
            self.links[pair] = _linked(*(self.samples[name] for name in pair))
        for name, unit in self.units.items():
            for d, image in enumerate(self.images[name]):
                if self._exchange(name, d) != self._exchange(name, image):
                    yield f"unit {name}: replica {d} does not do what replica {image} does"
                for group, like in zip(unit["ranks"][d], unit["ranks"][image], strict=True):
                    for t, rank in enumerate(group):
                        if self._representative(rank) not in (like[t], like[0]):
                            yield f"rank {rank}: its representative has another place in {name}"
        ports: list[list[tuple[str, int, float]]] = [[] for _ in self.stages]
        for e, (p, c, _) in enumerate(self.ends):
            # Ranks of a group share what it sends: those beyond the other group's size send none.
            sizes = [len(self.stages[i]["ranks"][0]) for i in (p, c)]
            has_gradient = self.graph["edges"][e]["gradient"]
            ports[p] += [("SEND_F", e, sizes[1]), ("RECV_B", e, inf)][: 1 + has_gradient]
            ports[c] += [("RECV_F", e, inf), ("SEND_B", e, sizes[0])][: 1 + has_gradient]
        members = [set(loss["ranks"]) for loss in self.losses]
        for rank in range(self.plan["devices"]):
            places, n = sorted(self.places.get(rank, [])), self.of_rank[rank]
            if n is None or not places:
                yield from [f"rank {rank}: idles or has no class"] if n != (places or None) else []
                continue
            like = sorted(self.places[self.classes[n]["representative"]])
            own = [(i, self.images[self.stages[i]["unit"]][d]) for i, d, _ in places]
            # A rank may stand for the others of its group if that is the only group of each.
            groups = {tuple(self.stages[i]["ranks"][d]) for i, d, _ in places}
            is_same = [t for *_, t in places] == [t for *_, t in like] or len(groups) == 1
            messages = [(op, i, e) for i, _, t in places for op, e, tp in ports[i] if t < tp]
            losses = [x for x, on in enumerate(members) if rank in on]
            duties = messages, sorted(self.parts[rank]), losses
            if own != [(i, d) for i, d, _ in like] or not is_same:
                yield f"rank {rank}: its representative runs something else"
            elif self.duties.setdefault(n, duties) != duties:
                yield f"rank {rank}: exchanges or sums something else than others of its class"

    def _exchange(self, name: str, d: int) -> list[Any]:
        """Sizes and sync batches of a replica, and what it gives and takes, peers by image."""
        spans, image = self.samples[name][d], self.images
        found = [image[name][d], *(b - a for a, b in spans)]
        for loss in self.losses:
            size, on = loss["sync_batch"], {self.stages[i]["unit"] for i in loss["stages"]}
            found += [(a // size, (b - 1) // size) for a, b in spans if size and name in on]
        for (producer, consumer), (gives, takes) in self.links.items():
            for own, other, links in ((producer, consumer, gives), (consumer, producer, takes)):
                for row in links[d] if own == name else []:
                    found.append([(a, b, image[other][d2], m) for a, b, d2, m in row])
        return found

    def rows_fit(self) -> Iterator[str]:
        """The row of each class does all that belongs to its place once, in a possible order."""
        for n, own in enumerate(self.classes):
            row = _CertifiedRow(self.certificate["rows"][own["row"]]["instructions"], own["levels"])
            self.rows.append(row)
            at, (messages, sums, losses) = row.at, self.duties[n]
            place = {i: d for i, d, _ in self.places[own["representative"]]}
            needed = {
                (op, i, e, m): [span[:2] for span in links]
                for op, i, e in messages
                for m, links in enumerate(self._links(op, e)[place[i]])
            }
            if {key: sorted(spans) for key, spans in row.spans.items()} != needed:
                yield f"classes.{n}: its messages do not bring what its micro-batches need"
            # Pairs of events in their order: all of them must be there, and nothing else.
            pairs = [(("I", i, m), ("W", i, m)) for op, i, m in at if op in "IW"]
            for x, loss in ((x, self.losses[x]) for x in losses):
                size, batch = loss["sync_batch"] or inf, self.spec["tasks"][loss["task"]]["batch"]
                starts = [g for op, y, g in at if (op, y) == ("SYNC_START", x)]
                if starts != sorted(starts):
                    yield f"classes.{n}: its sync batches do not start in ascending order"
                syncs = range(int(batch // size))
                pairs += [(("SYNC_START", x, g), ("SYNC_WAIT", x, g)) for g in syncs]
            for i, d in place.items():
                for m, (a, b) in enumerate(self.samples[self.stages[i]["unit"]][d]):
                    forward, last = ("F", i, m), ("B" if self.backward[i] else "F", i, m)
                    pairs.append((forward, last))
                    for x in (x for x in losses if i in self.losses[x]["stages"]):
                        size = self.losses[x]["sync_batch"]
                        pairs += [] if size else [(("COUNT", x, 0), forward)]
                        syncs = range(a // size, -(-b // size)) if size else range(0)
                        pairs += [(forward, ("SYNC_START", x, g)) for g in syncs]
                        if self.backward[i]:
                            pairs += [(("SYNC_WAIT", x, g), last) for g in syncs]
            for k in (k for k in sums if "rounds" in self.sums[k]):
                pairs += self._rounds(at, k, place)
            for k in (k for k in sums if "rounds" not in self.sums[k]):
                ops = ("F", "B", "W", "SYNC_WAIT") if "loss" in self.sums[k] else ("F", "B", "W")
                last = max((event for event in at if event[0] in ops), key=lambda event: at[event])
                pairs.append((last, ("REDUCE", k, 0)))
                if k in row.starts:
                    pairs.append((("REDUCE_START", k, 0), last))
                    if not self._starts_in_time(row, k, place):
                        yield f"classes.{n}: sum {k} starts outside of its blocks' last backward"
            if set(at) != {event for pair in pairs for event in pair}:
                yield f"classes.{n}: its row does not have every instruction once, and no others"
            elif any(at[one] >= at[other] for one, other in pairs if one != other):
                yield f"classes.{n}: its row does something before what must come first"

    def _rounds(self, at: Mapping[Any, float], k: int, place: Mapping[int, int]) -> list[Any]:
        """Pairs of a sum made in each backward of its stages; none where it is made elsewhere."""
        own, adds = self.sums[k], sorted(self._adding(k, place))
        counts = [len(self.samples[self.stages[i]["unit"]][place[i]]) for i in adds]
        # Rounds are numbered stage by stage, and have the order of the backwards.
        backwards = [("B", i, m) for i, n in zip(adds, counts, strict=True) for m in range(n)]
        turns = [
            [("REDUCE_START", k, number), backward, ("REDUCE", k, number)]
            for number, backward in enumerate(backwards)
        ]
        turns.sort(key=lambda turn: at.get(turn[1], inf))
        others = [event for event in at if event[0] != "REDUCE_START"]
        late = any(at.get(x, inf) < at[e] < at.get(b, 0) for x, b, _ in turns for e in others)
        fits = sum(counts) == own["rounds"] and own["parameters"] == "all" and not late
        return [*pairwise(event for turn in turns for event in turn)] if fits else []

    def _starts_in_time(self, row: _CertifiedRow, k: int, place: Iterable[int]) -> bool:
        """Whether the next compute after a start is the last that adds to the sum's gradients."""
        own, events = self.sums[k], [event for event in row.at if event[0] != "REDUCE_START"]
        at, adds = row.at["REDUCE_START", k, 0], self._adding(k, place)
        after = next((event for event in events if row.at[event] > at), events[-1])
        last = [event for event in events if event[0] in ("B", "W") and event[1] in adds][-1:]
        return own["parameters"] == "all" and last == [after]

    def _adding(self, k: int, place: Iterable[int]) -> list[int]:
        """The stages of a place that add to a sum's gradients."""
        own, stages = self.sums[k], self.stages
        a, b = own["blocks"]
        return [
            i
            for i in place
            if stages[i]["owner"] == own.get("owner")
            and max(a, stages[i]["blocks"][0]) < min(b, stages[i]["blocks"][1])
        ]

    def _links(self, op: str, e: int) -> _Links:
        """The links of an edge by its producer's micro-batches, or by its consumer's."""
        p, c, _ = self.ends[e]
        both = self.links[self.stages[p]["unit"], self.stages[c]["unit"]]
        return both[op in ("RECV_F", "SEND_B")]

    def orders_fit(self) -> Iterator[str]:
        """Levels rise along messages; those of a stream have one order on both of two ranks.

        A stream has all messages from the ranks of one stage to those of another.
        """
        level: dict[tuple[Any, ...], float] = {}
        needs: list[tuple[tuple[Any, ...], float]] = []
        routes: defaultdict[tuple[Any, ...], tuple[list[Any], list[Any]]]
        routes = defaultdict(lambda: ([], []))
        members = [frozenset(r for group in stage["ranks"] for r in group) for stage in self.stages]
        for n, (own, row) in enumerate(zip(self.classes, self.rows, strict=True)):
            rank = own["representative"]
            place = {i: (d, t) for i, d, t in self.places[rank]}
            for (op, i, m), when in row.at.items():
                event = (op, i, place[i][0], m) if op in "FB" else (op, i, m)
                # Sums are compared below: the parts of one are collectives of their own.
                # Replicas that gather parameters meet in every compute.
                met = (op, i, m) if op in "FB" and self.stages[i].get("gathers") else event
                is_met = op in ("F", "B", "SYNC_WAIT", "COUNT")
                if is_met and {level.setdefault(x, when) for x in (event, met)} != {when}:
                    yield f"classes.{n}: {event} is on another level than on other ranks"
            for op, i, e, m, start, when in row.messages:
                if (when < row.at[op[5], i, m]) != (op[0] == "R"):
                    yield f"classes.{n}: a message stands on the wrong side of {op[5]} {m}"
                d, t = place[i]
                d2, m2 = next(link[2:] for link in self._links(op, e)[d][m] if link[0] == start)
                other = self.ends[e][op in ("SEND_F", "RECV_B")]
                group, tp = self.stages[other]["ranks"][d2], len(self.stages[i]["ranks"][d])
                needs += [((op[5], other, d2, m2), when)] if op[0] == "S" else []
                sample = op[5], e, self.samples[self.stages[i]["unit"]][d][m][0] + start
                stream = (members[i], members[other])[:: 1 if op[0] == "S" else -1]
                for peer in group[t::tp] if op[0] == "S" else [group[t % len(group)]]:
                    if self.of_rank[rank] == n and self._representative(peer) == peer:
                        route = (rank, peer) if op[0] == "S" else (peer, rank)
                        routes[*route, *stream][op[0] == "R"].append(sample)
        for part in (part for own in self.sums for part in own["parts"]):
            where = {
                (r, k) for r in part["ranks"] for k in self.parts[r] if self.parts[r][k] is part
            }
            for m in range(max(self.sums[k].get("rounds", 1) for _, k in where)):
                if len({self.rows[self.of_rank[r]].at["REDUCE", k, m] for r, k in where}) > 1:
                    yield f"sums: the ranks {part['ranks']} reach one on several levels"
        # Starts on one communicator have one order, and are on all of its ranks.
        queues: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
        for rank, own in ((r, self.parts[r]) for r, n in enumerate(self.of_rank) if n is not None):
            starts = self.rows[self.of_rank[rank]].starts
            for on in {tuple(own[k]["ranks"]) for k in starts}:
                queues[on, tuple(k for k in starts if tuple(own[k]["ranks"]) == on)] += 1
        for (on, _), count in queues.items():
            if count != len(on):
                yield f"sums: the ranks {[*on]} do not start the same ones in the same order"
        late = [event for event, when in needs if level[event] <= when]
        yield from (f"{event} comes before what it needs" for event in late)
        # What a rank sends to itself is found by its tag, in any order.
        for (sender, receiver, *_), (sent, received) in routes.items():
            if sent != received and (sender != receiver or Counter(sent) != Counter(received)):
                yield f"ranks {sender}, {receiver}: messages are received in another order"

    def _representative(self, rank: int) -> int:
        return self.classes[self.of_rank[rank]]["representative"]


class _CertifiedRow:
    """A canonical row and its levels; what returns at once is half a level after what precedes.

    Attributes:
        at: event to level, in the row's order; ``I`` is there as ``B`` too.
        spans: (operation, stage, edge, micro-batch) to its spans.
        messages: (operation, stage, edge, micro-batch, first sample, level) of each, in order.
        starts: the sums that start before they are waited for, in order.
    """

    def __init__(self, text: str, levels: str) -> None:
        self.at: dict[tuple[str, int, int], float] = {}
        self.spans: dict[tuple[str, int, int, int], list[tuple[int, ...]]] = defaultdict(list)
        self.messages: list[tuple[str, int, int, int, int, float]] = []
        *tokens, last = text.split(" ")
        now, left = -1.0, map(int, levels.split(" "))
        for token in tokens:
            op, _, rest = token.partition(":")
            index, number, *more = map(int, rest.split("."))
            before, now = now, now // 1 + 0.5 if op in _RETURNS else next(left)
            if more:
                edge, *span = more
                self.spans[op, index, edge, number].append(tuple(span))
                self.messages.append((op, index, edge, number, span[0], now))
            elif (op, index, number) in self.at or (op not in _RETURNS and now <= before):
                raise ValueError(f"{token} stands twice, or is on no higher level than before")
            else:
                self.at[op, index, number] = self.at["B" if op == "I" else op, index, number] = now
        self.starts = [k for op, k, _ in self.at if op == "REDUCE_START"]
        if last != "STEP" or next(left, None) is not None:
            raise ValueError("a row does not end with STEP, or has too many levels")


def _numbered(sizes: Sequence[Sequence[int]], batch: int) -> list[list[list[int]]]:
    """Samples of each replica's micro-batches: in a round all first ones, then all second ones."""
    if min(map(min, sizes)) < 1 or batch % sum(map(sum, sizes)):
        raise ValueError(f"rounds of {sum(map(sum, sizes))} samples do not tile {batch}")
    found: list[list[list[int]]] = [[] for _ in sizes]
    position, longest = 0, max(map(len, sizes))
    while position < batch:
        for k, (d, row) in ((k, own) for k in range(longest) for own in enumerate(sizes)):
            for size in row[k : k + 1]:
                found[d].append([position, position + size])
                position += size
    return found


def _linked(producer: Any, consumer: Any) -> tuple[_Links, _Links]:
    """What each micro-batch of a unit gives to those of another, and what these take."""
    gives, takes = ([[[] for _ in row] for row in unit] for unit in (producer, consumer))
    first, second = (
        {a: (d, m, a) for d, row in enumerate(unit) for m, (a, _) in enumerate(row)}
        for unit in (producer, consumer)
    )
    one, other, cuts = first[0], second[0], sorted({*first, *second})
    for low, high in pairwise([*cuts, max(b for row in producer for _, b in row)]):
        one, other = first.get(low, one), second.get(low, other)
        gives[one[0]][one[1]].append((low - one[2], high - one[2], *other[:2]))
        takes[other[0]][other[1]].append((low - other[2], high - other[2], *one[:2]))
    return gives, takes


def _unsummed(groups: Any, over: Sequence[_Parsed]) -> Iterator[str]:
    """What is not summed, or not once, of what some groups hold."""
    held: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for t, rank, n in ((t, rank, len(group)) for group in groups for t, rank in enumerate(group)):
        held[rank].add((t, n))
    whole = [p for s in over if s["parameters"] != "cut" for p in s["parts"]]
    cut = [p for s in over if s["parameters"] != "whole" for p in s["parts"]]
    # What tensor parallelism leaves whole: one rank of each group brings its gradient.
    is_once = Counter(rank for part in whole for rank in part["ranks"]) == Counter(list(held))
    is_crowded = any(len(own) > 1 for own in held.values())
    bring = {len({*part["contributors"]} & {*group}) for part in whole for group in groups}
    if (not is_once and (whole or len(groups) > 1)) or (bring - {1} and not is_crowded):
        yield "each group does not bring the gradient of replicated parameters once"
    for part in (*cut, *(whole if is_crowded else [])):
        if part["contributors"] != part["ranks"]:
            yield f"not all of the ranks {part['ranks']} bring their gradients"
    # What it cuts: all holders of a shard are in one sum. A rank with two shards holds all.
    tp = lcm(*map(len, groups), *(part["tp"] for part in cut))
    ends = {x * (tp // part["tp"]) for part in cut for x in part["shards"]} - {tp}
    ends |= {x * (tp // len(group)) for group in groups for x in range(len(group))}
    for a in sorted(ends):
        holders = sorted(
            rank
            for rank, own in held.items()
            if len(own) > 1 or any(t * tp <= a * n < (t + 1) * tp for t, n in own)
        )
        spans = [([x * tp for x in part["shards"]], part) for part in cut]
        sums = [sorted(part["ranks"]) for (x, y), part in spans if x <= a * part["tp"] < y]
        if sums != ([holders] if sums or len(holders) > 1 else []):
            yield f"shard {a} of {tp} on ranks {holders} is not in one sum of all of them"


def _read(path: str) -> _Parsed:
    text = Path(path).read_text(encoding="utf-8")
    is_json = path.endswith(".json") or text.lstrip().startswith("{")
    return json.loads(text) if is_json else YAML(typ="safe", pure=True).load(text)


if __name__ == "__main__":
    # WORKLOAD PLAN CERTIFICATE [--profile PROFILE]: faults on stderr, and exit code 1 for them.
    files = [path for path in sys.argv[1:] if path != "--profile"]
    sys.exit("\n".join(check_certificate(*map(_read, files))) or 0)
