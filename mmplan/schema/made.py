"""What a workload says of a thing that the user's code makes: its factory and its arguments."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mmplan.schema.base import Record, Str

Factory = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", description='"package.module:callable"'),
]
Args = Annotated[dict[Str, Any], Field(description="keyword arguments")]


class DataSpec(Record):
    """Where samples come from: the factory makes a map-style dataset of dicts of tensors."""

    factory: Factory
    args: Args = Field(default_factory=dict)


class CallbackSpec(Record):
    """An object that hears of a run: see :class:`mmlaunch.run.callbacks.Callback`."""

    factory: Factory
    args: Args = Field(default_factory=dict)
