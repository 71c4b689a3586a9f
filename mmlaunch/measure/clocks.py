"""Seconds on a device: by a processor's clock, or by CUDA's events.

An instruction of a run begins when the last one is over, and on CUDA the host is ahead of it:
nothing waits between a forward and its backward. Events in the stream's order are read when all
repeats are over. Kernels are launched one by one, as in a run, and not replayed as a graph: a part
shorter than its launches takes as long in a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

# Seconds of a part of a step, known when the step is over.
Reading = Callable[[], float]

# More than the caches of a core.
_OTHER_BYTES = 64 << 20
# Boost clocks last for about a second under load; chosen by hand within the 2 to 5 s after which
# clocks are steady.
WARM_S = 3.0
# Between two timings a device is idle for less than a second: the time to build a module.
AGAIN_S = 0.2
# A product of some milliseconds on today's devices.
_WARM_SIZE = 8192


class Clock(Protocol):
    """What timing asks of a device.

    Attributes:
        kind: in words, for the profile.
        is_cold: whether modules are timed with cold caches too.
    """

    kind: str
    is_cold: bool

    def mark(self) -> Any:
        """This moment in the device's work."""
        ...

    def since(self, mark: Any) -> Reading:
        """The seconds from the mark to this moment in the device's work."""
        ...

    def now(self) -> float:
        """Seconds of a clock, when everything queued on the device is done."""
        ...

    def cool(self) -> None:
        """Fill the caches with something else, as the computes of a step do.

        What is short (a loss, a small message) takes two to four times as long in a step as
        in a loop of its own.
        """
        ...

    def warm(self) -> None:
        """Bring the device to the speed that it has in a long run."""
        ...


@cache
def _other() -> Tensor:
    """What a process fills its caches with."""
    return torch.zeros(_OTHER_BYTES // 4)


class CpuClock:
    """See :class:`Clock`.

    Args:
        is_alone: whether the process has a core for itself. Then processor time is what computing
            takes when nothing else runs, which also holds on a busy machine.
    """

    is_cold = False

    def __init__(self, *, is_alone: bool = False) -> None:
        self.kind = "processor time" if is_alone else "wall time"
        self._read = time.thread_time if is_alone else time.perf_counter

    def mark(self) -> float:
        """See :class:`Clock`."""
        return self._read()

    def since(self, mark: float) -> Reading:
        """See :class:`Clock`."""
        seconds = self._read() - mark
        return lambda: seconds

    def now(self) -> float:
        """See :class:`Clock`."""
        return time.perf_counter()

    def cool(self) -> None:
        """See :class:`Clock`."""
        _other().add_(1.0)

    def warm(self) -> None:
        """A core's speed follows its load within microseconds."""


class CudaClock:
    """See :class:`Clock`.

    Args:
        device: of this process.
        cuda: ``torch.cuda``, or what has its functions.

    Attributes:
        sm_clock: of the multiprocessors under load, in words.
    """

    kind = "CUDA events"
    is_cold = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self.sm_clock = "not recorded"
        self._other: Tensor | None = None
        self._is_warm = False

    def mark(self) -> Any:
        """See :class:`Clock`."""
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def since(self, mark: Any) -> Reading:
        """See :class:`Clock`."""
        end = self.mark()

        def seconds() -> float:
            end.synchronize()
            return 1e-3 * mark.elapsed_time(end)

        return seconds

    def now(self) -> float:
        """See :class:`Clock`."""
        self._cuda.synchronize()
        return time.perf_counter()

    def cool(self) -> None:
        """See :class:`Clock`; twice the L2 cache, for a cache may keep a part of what it had."""
        if self._other is None:
            cache_bytes = self._cuda.get_device_properties(self._device).L2_cache_size
            self._other = torch.zeros(2 * cache_bytes // 4, device=self._device)
        self._other.add_(1.0)

    def warm(self) -> None:
        """See :class:`Clock`; for seconds the first time, then for as long as it was idle."""
        half = torch.ones(_WARM_SIZE, _WARM_SIZE, dtype=torch.bfloat16, device=self._device)
        started = self.now()
        while self.now() - started < (AGAIN_S if self._is_warm else WARM_S):
            for _ in range(4):
                torch.mm(half, half)
            self.sm_clock = self._sm_clock()
        self._is_warm = True

    def _sm_clock(self) -> str:
        try:
            return f"{self._cuda.clock_rate(self._device)} MHz under load"
        except (ModuleNotFoundError, RuntimeError) as error:
            # NVML's Python package is optional, and a container may hide NVML.
            return f"not recorded: {str(error).splitlines()[0]}"


def clock_of(device: torch.device, *, is_alone: bool = False) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock(is_alone=is_alone)
