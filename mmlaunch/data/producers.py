"""Steps prepared on other machines: one call of a Ray actor for what a rank needs of a step.

A call is a function of (seed, step, positions, fields) alone, so a lost batch is asked for again,
and it runs the reader of the rank's own loading processes: the samples are the same bit for bit.
All ranks of a run share an actor for each core of a producer. (Ray's tasks would have processes of
their own for each rank and task, which on few cores end and import everything anew all the time.)
Who asks is a loading process of the rank, not the rank: Ray ends its drivers with the cluster.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import random
import signal
import socket
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mmlaunch.data.loader import Field, LoadFailure, Reader, StepLoader, TakenAhead, step_batch
from mmlaunch.data.ray_node import PRODUCER, take_settings
from mmlaunch.process import fork_server
from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError, UnfitEnvironmentError
from mmplan.ragged import Ragged
from mmplan.schema.factories import build_dataset
from mmplan.schema.workload import DataSpec
from mmplan.wording import counted

# Steps asked for ahead, for each core that falls to a rank: one in work, one ready.
_AHEAD = 2
# How long a process asks before it looks who is there, and pauses between two tries.
_LOOK_S = 1.0
# How often a step is asked for again whose process died under it.
_RETRIES = 3

# Bytes, name of the type, shape.
PackedTensor = tuple[NDArray[np.uint8], str, tuple[int, ...]]


class NoProducersError(UnfitEnvironmentError):
    """No machine has prepared a step in the time that a run waits for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Producers:
    """A cluster that prepares data, as one rank sees it.

    Attributes:
        address: HOST:PORT of its head.
        folder: of this machine's own node.
        run: a name that its ranks share, and no other run that is on.
        wait_s: longest wait of a step while no producer is there.
        ranks: that load data.
        tell: gets lines for the user.
        should_stop: whether a step should wait no longer.
    """

    address: str
    folder: Path
    wait_s: float
    run: str = "run"
    ranks: int = 1
    tell: Callable[[str], None] = lambda _: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """How a producer makes the dataset: arguments of ``build_dataset``.

    Attributes:
        folder: absolute.
        field: the place in the workload file, for errors.
    """

    data: DataSpec
    folder: Path
    seed: int
    field: str

    def open(self) -> Any:
        """The dataset.

        Raises:
            InvalidInputError: as :func:`build_dataset`.
        """
        return build_dataset(self.data, self.folder, seed=self.seed, field=self.field)


# A pickled source, the samples of a step, and a pickled reader.
Recipe = tuple[bytes, int, bytes]
# A core of a producer: the node's id, and a number.
Core = tuple[str, int]


class RemoteLoader(StepLoader):
    """Steps of data that producers prepare; see :class:`StepLoader` for the other arguments.

    Args:
        source: of the dataset, for producers.
        producers: who they are.

    Raises:
        NoProducersError: none was there for too long.
    """

    def __init__(
        self, dataset: Any, *, source: DataSource, producers: Producers, **arguments: Any
    ) -> None:
        self._source, self._producers = source, producers
        # Cores of producers as last heard; None before that, 0 once they are gone.
        self._cores: int | None = None
        self._told = False
        super().__init__(dataset, **arguments)

    def close(self) -> None:
        """End the process that asks."""
        # Where it waits it finds nobody who hears it.
        self._status.close()
        super().close()

    def _open(self) -> Iterator[Any]:
        fork_server.start()
        self._status, status = Pipe(duplex=False)
        asker = _Asker(
            address=self._producers.address,
            folder=self._producers.folder,
            run=self._producers.run,
            ranks=self._producers.ranks,
            recipe=recipe_of(self._source, self._batch, self._reader),
            status=status,
            settings={name: os.environ[name] for name in os.environ if name.startswith("RAY_")},
        )
        steps = ([step] for step in count(self._step))
        # Not forked: threads of Ray and of the rank do not live through that.
        more = {"timeout": _LOOK_S, "multiprocessing_context": "forkserver"}
        batches = TakenAhead(iter(self._loader(asker, steps, 1, **more)))
        status.close()
        return batches

    def _next_batch(self, batches: Iterator[Any]) -> Any:
        # Since nobody is there: a process that still starts has not looked yet.
        absent_s: float | None = None
        while True:
            try:
                got = next(batches)
            except RuntimeError as exc:
                if "DataLoader" not in str(exc):
                    raise
                self._hear()
                if "timed out" not in str(exc):
                    # With the cluster's head its drivers end.
                    self._cores = 0
                    time.sleep(_LOOK_S)
                    self._status.close()
                    batches = self._batches = self._open()
                if self._cores == 0:
                    absent_s = absent_s or time.monotonic()
                    self._wait_on(time.monotonic() - absent_s)
                else:
                    absent_s = None
                continue
            self._hear()
            if self._told:
                self._told = False
                self._producers.tell(f"producers at {self._producers.address} go on")
            return got

    def _wait_on(self, waited_s: float) -> None:
        where = self._producers
        if waited_s > where.wait_s or where.should_stop():
            raise NoProducersError(
                f"no producer at {where.address} for {waited_s:.0f} s",
                hint="start one: mmlaunch data --address",
            )
        if not self._told:
            self._told = True
            step = f"step {self._step} waits {where.wait_s:g} s for one"
            where.tell(f"no producer at {where.address}: {step}")

    def _hear(self) -> None:
        try:
            while self._status.poll():
                heard = self._status.recv()
                if isinstance(heard, str):
                    self._producers.tell(heard)
                else:
                    self._cores = heard
        except (EOFError, OSError):
            return


# ---- the process that asks ----


@dataclass
class _Asker(Dataset[Any]):
    """Gives a step's batch as producers made it, and asks for those to come."""

    address: str
    folder: Path
    run: str
    ranks: int
    recipe: Recipe
    status: Connection
    # This process has its variables from a fork server, which may be older than the rank's.
    settings: Mapping[str, str]

    def __getitems__(self, steps: list[int]) -> Any:
        return self._cluster().batch(*steps)

    def _cluster(self) -> _Cluster:
        found: _Cluster | None = getattr(self, "_found", None)
        if found is None:
            found = self._found = _Cluster(self)
        return found


class _Cluster:
    """The Ray cluster, with this process as its driver."""

    def __init__(self, asker: _Asker) -> None:
        self._asker = asker
        self._ray = self._connected()
        self._names: dict[str, str] = {}
        self._cores: list[Core] = []
        self._looked_s = 0.0
        # By reference: a call's own arguments would be sent with every step.
        self._recipe = [self._ray.put(asker.recipe)]
        self._actors: dict[Core, Any] = {}
        self._asked: dict[int, tuple[Core, Any]] = {}
        self._deaths = Counter[int]()

    def batch(self, step: int) -> Any:
        """A step's indices and fields, or the failure of its preparation."""
        ray = self._ray
        while True:
            self._look()
            if not (self._cores or step in self._asked):
                time.sleep(_LOOK_S)
                continue
            self._ask(step)
            core, asked = self._asked[step]
            try:
                got = ray.get(asked, timeout=_LOOK_S)
            except ray.exceptions.GetTimeoutError:
                if core not in self._cores:
                    # Begun on a machine that was about to go: Ray waits for it to come back.
                    self._lost(step)
                continue
            except ray.exceptions.RayTaskError as exc:
                last = str(exc).strip().splitlines()[-1]
                return LoadFailure(error=RunFailedError(f"step {step}: a producer failed: {last}"))
            except ray.exceptions.RayError:
                # Lost with a process or a machine: the same call gives the same batch.
                self._lost(step)
                time.sleep(_LOOK_S)
                self._look()
                self._deaths[step] += core in self._cores
                if self._deaths[step] > _RETRIES:
                    return LoadFailure(error=_died(step))
                continue
            del self._asked[step]
            return got if isinstance(got, LoadFailure) else _unpacked(got)

    def _ask(self, step: int) -> None:
        ahead = max(_AHEAD, math.ceil(_AHEAD * len(self._cores) / self._asker.ranks))
        for later in range(step, step + ahead):
            if later not in self._asked and self._cores:
                load = Counter(core for core, _ in self._asked.values())
                core = min(self._cores, key=load.__getitem__)
                call = self._actor(core).prepare.remote(self._recipe, later)
                self._asked[later] = core, call

    def _lost(self, step: int) -> None:
        core, _ = self._asked.pop(step)
        self._actors.pop(core, None)

    def _actor(self, core: Core) -> Any:
        """The run's process on a core: another rank's, if that was first."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if core not in self._actors:
            node, number = core
            actor = self._ray.remote(_Preparer).options(
                name=f"{node}-{number}",
                get_if_exists=True,
                # The cores are shared with other runs, by the system.
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            self._actors[core] = actor.remote()
        return self._actors[core]

    def _look(self) -> None:
        """See which producers are there, and tell the rank."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        nodes = [n for n in self._ray.nodes() if n["Alive"] and n["Resources"].get(PRODUCER)]
        names = {n["NodeID"]: f"{n['NodeManagerHostname']} ({n['NodeID'][:6]})" for n in nodes}
        cores = [(n["NodeID"], i) for n in nodes for i in range(int(n["Resources"][PRODUCER]))]
        # Each rank begins with another one.
        random.shuffle(cores)
        for node in self._names.keys() - names.keys():
            left = counted(len(names), "producer")
            self._send(
                f"producer {self._names[node]} is gone, {left} left; its steps are made again"
            )
        if self._looked_s:
            for node in names.keys() - self._names.keys():
                self._send(f"producer {names[node]} has come")
        self._names, self._cores, self._looked_s = names, cores, time.monotonic()
        self._send(len(cores))

    def _send(self, what: int | str) -> None:
        try:
            self._asker.status.send(what)
        except OSError:
            # The rank has stopped loading, and nobody waits for this process.
            os._exit(0)

    def _connected(self) -> Any:
        """Ray, as a driver on this machine's node, once that is in the cluster."""
        os.environ.update(self._asker.settings)
        take_settings("the data's cluster")
        # What Ray says when it ends this process belongs to its own logs.
        log = os.open(self._asker.folder / "asked.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2)
        import ray
        import ray.exceptions

        while True:
            try:
                ray.init(
                    address=self._asker.address,
                    namespace=self._asker.run,
                    log_to_driver=False,
                    configure_logging=False,
                    _temp_dir=str(self._asker.folder),
                )
            except (RuntimeError, OSError, ray.exceptions.RayError):
                traceback.print_exc()
                self._send(0)
                ray.shutdown()
                time.sleep(_LOOK_S)
                continue
            # Ray takes the signal; the rank may still have a step to finish.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return ray


def _died(step: int) -> RunFailedError:
    return RunFailedError(
        f"step {step}: a producer's process died over it {counted(_RETRIES + 1, 'time')}",
        hint="it may have run out of memory; load on the rank's own machine to see more",
    )


# ---- a producer ----


def recipe_of(source: DataSource, batch: int, reader: Reader) -> Recipe:
    """A rank's reader without its dataset, of which each producer makes its own."""
    file = io.BytesIO()
    pickler = _WithoutDataset(file)
    pickler.dataset = reader.dataset
    pickler.dump(reader)
    return pickle.dumps(source), batch, file.getvalue()


class _WithoutDataset(pickle.Pickler):
    dataset: Any

    def persistent_id(self, obj: Any) -> str | None:
        return "dataset" if obj is self.dataset else None


class _WithDataset(pickle.Unpickler):
    dataset: Any

    def persistent_load(self, pid: Any) -> Any:
        return self.dataset


class _Preparer:
    """A process on a core of a producer."""

    def prepare(self, recipe: list[Any], step: int) -> Any:
        """One step's batch for one rank."""
        try:
            batch, reader = _reader(recipe[0])
            got = reader.__getitems__([step_batch(reader.dataset, batch, reader.seed, step)])
        except MMPlanError as exc:
            return LoadFailure(error=type(exc)(exc.message, hint=exc.hint))
        if isinstance(got, LoadFailure):
            return got
        indices, fields, *more = got
        return indices, {name: pack(value) for name, value in fields.items()}, *more


@cache
def _reader(reference: Any) -> tuple[int, Reader]:
    import ray

    # As in torch's own loading processes, whose samples these equal.
    torch.set_num_threads(1)
    source, batch, content = cast(Recipe, ray.get(reference))
    unpickler = _WithDataset(io.BytesIO(content))
    unpickler.dataset = _dataset(source)
    return batch, unpickler.load()


@cache
def _dataset(pickled: bytes) -> Any:
    """Opened once for all ranks."""
    source = cast(DataSource, pickle.loads(pickled))
    if not source.folder.is_dir():
        raise InvalidInputError(
            f"producer {socket.gethostname()} cannot read the workload's folder {source.folder}",
            hint="producers need that folder and the data at the same paths as ranks",
        )
    return source.open()


def _unpacked(got: Any) -> Any:
    indices, fields, *more = got
    return indices, {name: unpack(packed) for name, packed in fields.items()}, *more


def pack(value: Field) -> tuple[PackedTensor, ...]:
    """A field as bytes that need no pickling; NumPy lacks some of torch's types."""
    parts = value if isinstance(value, Ragged) else (value,)
    return tuple(_packed(part) for part in parts)


def unpack(packed: tuple[PackedTensor, ...]) -> Field:
    """The field again, on the same memory."""
    parts = [_tensor(*part) for part in packed]
    return Ragged(*parts) if len(parts) == 2 else parts[0]


def _packed(tensor: Tensor) -> PackedTensor:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _tensor(content: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Tensor:
    if not content.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    with warnings.catch_warnings():
        # Of the object store's memory, which nobody may write to: it is copied to the rank.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        flat = torch.from_numpy(content)
    return flat.view(getattr(torch, dtype)).reshape(shape)
