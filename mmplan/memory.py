"""Bytes that a parameter costs a device.

Weight, gradient and optimizer state of one parameter. Adam keeps two numbers a
parameter:

- fp32: 4 + 4 + 8, as the file formats state it;
- fp64: twice that;
- bf16: the fp32 weight that the optimizer updates and its bf16 copy 4 + 2, an fp32
  gradient 4, Adam 8.

ZeRO-1 spreads the state over the data-parallel ranks. A frozen parameter costs its
weight only.
"""

from __future__ import annotations

# Numbers of state a parameter, where they are not Adam's two; SGD is charged a momentum.
_STATE_NUMBERS = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "ASGD": 1}
_ADAM_NUMBERS = 2

_NUMBER_BYTES = {"fp32": 4, "fp64": 8, "bf16": 4}
_COPY_BYTES = {"fp32": 0, "fp64": 0, "bf16": 2}


def gradient_bytes(precision: str) -> int:
    """Bytes of one parameter's gradient, also what its reduction moves."""
    return _NUMBER_BYTES[precision]


def parameter_bytes(
    precision: str, optimizer: str, *, trainable: bool, state_shards: int = 1
) -> float:
    """Bytes of one parameter on a device, its state divided by ``state_shards``."""
    number = _NUMBER_BYTES[precision]
    weight = number + _COPY_BYTES[precision]
    if not trainable:
        return weight
    state = number * _STATE_NUMBERS.get(optimizer, _ADAM_NUMBERS)
    return weight + gradient_bytes(precision) + state / state_shards
