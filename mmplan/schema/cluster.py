"""cluster.yaml: devices and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from mmplan.errors import InvalidInputError
from mmplan.schema.base import Count, Document, Positive, Record, Size, Str, load_document


class Device(Record):
    """One accelerator, or one process on a cpu cluster.

    Attributes:
        name: as its maker calls it; ``cpu...`` is taken for a CPU where ``type`` is absent.
        memory_bytes: that a plan may fill; CUDA's own memory and NCCL's are none of it.
        compute_slowdown: of computes while a collective of their device is carried; absent: by the
            kind of device.
        type: absent: by the name.
    """

    name: Str
    memory_bytes: Positive
    peak_flops: Positive = Field(description="FLOP per second")
    communicator_bytes: Size = Field(default=0, description="device memory of one communicator")
    communicator_start_s: Size = Field(default=0, description="seconds to start one communicator")
    compute_slowdown: float | None = Field(
        default=None, ge=1, description="times that computes take beside a collective"
    )
    type: Literal["cuda", "cpu"] | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether devices are processes, of which a machine may start any number."""
        return self.type == "cpu" or (self.type is None and self.name.lower().startswith("cpu"))


class Link(Record):
    """A transfer of b bytes takes ``latency_s + b / bandwidth_bytes_per_s``."""

    latency_s: Size
    bandwidth_bytes_per_s: Positive


class CollectiveLinks(Record):
    """Links as collectives see them, where they were measured apart from point to point.

    Attributes:
        all_reduce: sums of gradients.
        all_gather: features of a batch-sync.
    """

    all_reduce: Link | None = None
    all_gather: Link | None = None


class Links(Record):
    """Point-to-point links; ``inter_node`` bandwidth is a whole node's.

    Attributes:
        intra_node: between two devices of one node.
        inter_node: between two nodes; absent: as inside one.
        adapter_bytes_per_s: between nodes, most that one device sends or receives by its network
            adapter; absent: as much as its node.
        intra_node_collectives: measured apart; absent: as point to point.
        inter_node_collectives: likewise.
    """

    intra_node: Link
    inter_node: Link | None = None
    adapter_bytes_per_s: Positive | None = None
    intra_node_collectives: CollectiveLinks | None = None
    inter_node_collectives: CollectiveLinks | None = None


class Cluster(Document):
    """Nodes of equal devices; rank r sits on node ``r // devices_per_node``.

    Attributes:
        name: what plans and tables call it.
        nodes: how many.
        devices_per_node: how many; on a CPU cluster of one node any number may be asked for.
        tensor_parallel_nodes: on how many nodes a tensor-parallel group may be, all of their
            devices in it; 1: groups stay inside nodes.
    """

    kind: ClassVar[str] = "cluster"

    name: Str
    nodes: Count
    devices_per_node: Count
    device: Device
    links: Links
    tensor_parallel_nodes: Count = 1

    @property
    def num_devices(self) -> int:
        """Devices of the whole cluster."""
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        """The node on which a rank sits."""
        return rank // self.devices_per_node

    def spans_nodes(self, tp: int) -> bool:
        """Whether tensor-parallel groups of so many ranks may be on several whole nodes."""
        nodes, rest = divmod(tp, self.devices_per_node)
        return not rest and 1 < nodes <= self.tensor_parallel_nodes

    def keeps_together(self, group: Sequence[int]) -> bool:
        """Whether a tensor-parallel group of consecutive ranks has a place where it may be."""
        first = group[0]
        if self.node_of(first) == self.node_of(group[-1]):
            return True
        return first % self.devices_per_node == 0 and self.spans_nodes(len(group))

    def link_between(self, first: int, second: int) -> Link:
        """The point-to-point link between two ranks."""
        if self.node_of(first) == self.node_of(second) or self.links.inter_node is None:
            return self.links.intra_node
        return self.links.inter_node

    def take(self, num_devices: int | None) -> Cluster:
        """The cluster of the first ``num_devices`` devices (``--devices N``).

        On a cpu cluster of one node every process is a device, so any number is allowed
        there. The last node may be used in part: ``nodes`` is rounded up and the caller keeps
        ``num_devices``.

        Raises:
            InvalidInputError: more devices than the cluster has, or fewer than one.
        """
        if num_devices is None:
            return self
        if num_devices < 1:
            raise InvalidInputError(
                f"--devices {num_devices}: at least one device is needed", hint="give 1 or more"
            )
        if self.device.is_cpu and self.nodes == 1:
            return self.model_copy(update={"nodes": 1, "devices_per_node": num_devices})
        if num_devices > self.num_devices:
            raise InvalidInputError(
                f"--devices {num_devices}: cluster {self.name} has {self.num_devices}",
                hint="ask for fewer devices, or name a larger --cluster",
            )
        if num_devices <= self.devices_per_node:
            return self.model_copy(update={"nodes": 1, "devices_per_node": num_devices})
        return self.model_copy(update={"nodes": -(-num_devices // self.devices_per_node)})


def shipped_clusters() -> dict[str, Path]:
    """Name to file of the clusters that come with the program."""
    import profiles

    folder = Path(profiles.__file__).parent / "clusters"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A cluster by path, by the name of one that ships with the program, or ``NAME-N``.

    ``NAME-N`` is N nodes like those of the shipped cluster NAME (``a800-162``), and for
    a cpu cluster N processes.

    Raises:
        InvalidInputError: neither a file nor a shipped name, or a faulty file.
    """
    path, name, shipped = Path(name_or_path), str(name_or_path), shipped_clusters()
    if path.is_file():
        return load_document(Cluster, path)
    if name in shipped:
        return load_document(Cluster, shipped[name])
    family, _, nodes = name.rpartition("-")
    if family in shipped and nodes.isdecimal() and int(nodes) > 0:
        cluster = load_document(Cluster, shipped[family])
        grown = "devices_per_node" if cluster.device.is_cpu else "nodes"
        return cluster.model_copy(update={"name": name, grown: int(nodes)})
    raise InvalidInputError(
        f"cluster {name}: no such file, and no cluster of that name is shipped",
        hint=f"shipped clusters: {', '.join(shipped)}; NAME-N is N nodes of one",
    )
