"""A rank's blocks, built without the rest of the module, against an ordinary build."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mmlaunch.checkpoint.boxes import shard_boxes
from mmlaunch.checkpoint.exported_weights import write_weights
from mmlaunch.checkpoint.tensorfile import TensorSpec
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.whole_modules import build_owner, trainable_blocks
from mmplan.errors import InvalidInputError
from mmplan.program.compile import compile_plan
from mmplan.program.model import Program
from mmplan.schema.workload import Workload
from tests.programs import loss, make_plan, unit
from tests.selection import some

HERE = Path(__file__).parent
MIB = 2**20
HF = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLIP = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
# factory, its args, number of blocks
FACTORIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "usual": ("tests.deferred_models:usual", {"blocks": 4}, 4),
    "llama": ("mmplan.zoo.hf:causal_lm", {"config": {"model_type": "llama", **HF}}, 4),
    "tied": (
        "mmplan.zoo.hf:causal_lm",
        {"config": {"model_type": "qwen2", **HF, "tie_word_embeddings": True}},
        4,
    ),
    "qwen3": (
        "mmplan.zoo.hf:causal_lm",
        {"config": {"model_type": "qwen3", **HF, "head_dim": 8}},
        4,
    ),
    "siglip": (
        "mmplan.zoo.hf:siglip_vision",
        {"config": {"vision_config": CLIP}, "pooled": True},
        4,
    ),
    "clip": ("mmplan.zoo.hf:clip_vision", {"config": {"vision_config": CLIP}}, 4),
    "towers": ("mmplan.zoo.towers:vision", {"blocks": 4, "width": 16}, 4),
    "ours": (
        "mmplan.zoo.decoder:llama",
        {"blocks": 4, "width": 24, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": 64},
        4,
    ),
}


class NoSum:
    """A tensor-parallel group that nobody asks for a sum."""

    def all_reduce(self, tensor: Tensor) -> None:
        raise AssertionError("no block runs here")


def workload_of(
    factory: str, args: dict[str, Any], *, init: str | None = None, precision: str = "fp32"
) -> Workload:
    return Workload.model_validate(
        {
            "name": "deferred",
            "batch": 4,
            "modules": {"m": {"factory": factory, "args": args, "inputs": ["x"], "init": init}},
            "losses": {
                "regression": {
                    "factory": "tests.matrix_models:Regression",
                    "inputs": ["m", "x"],
                }
            },
            "data": {"factory": "tests.matrix_models:Samples", "args": {"length": 8}},
            "train": {"seed": 5, "precision": precision},
        }
    )


def program_of(*, blocks: int, pp: int, tp: int, tied: bool = False) -> Program:
    plan = make_plan(
        unit("m", "x", pp=pp, tp=tp, blocks=blocks), losses=[loss("regression", "m", "x")], batch=4
    )
    program = compile_plan(plan)
    return replace(program, ties={"m": ((0, blocks - 1),)}) if tied else program


def local_model(workload: Workload, program: Program, rank: int) -> LocalModel:
    return LocalModel(
        workload=workload,
        folder=HERE,
        program=program,
        rank=rank,
        device=torch.device("cpu"),
        comm=lambda ranks: NoSum(),
    )


def differences(model: LocalModel, whole: nn.Sequential, program: Program, rank: int) -> list[str]:
    """Names of tensors, of every kind, that are not the whole module's (or its slices)."""
    found: list[str] = []
    for (_, index), block in model.blocks.items():
        theirs = dict(whole[index].named_modules())
        for prefix, module in block.named_modules():
            for kind in ("_parameters", "_buffers", "__dict__"):
                got, want = getattr(module, kind), getattr(theirs[prefix], kind)
                for key, tensor in want.items():
                    if not isinstance(tensor, Tensor):
                        continue
                    name = ".".join(filter(None, ("m", str(index), prefix, key)))
                    cut = cut_like(tensor, model, name, program, rank)
                    same = not got[key].is_meta and got[key].dtype == cut.dtype
                    same = same and isinstance(got[key], nn.Parameter) == (kind == "_parameters")
                    if not (same and torch.equal(got[key], cut)):
                        found.append(name)
    return found


def cut_like(tensor: Tensor, model: LocalModel, name: str, program: Program, rank: int) -> Tensor:
    layout = model.layouts.get(model.canonical.get(name, name))
    if layout is None:
        return tensor
    stage = next(iter(program.stages_of(rank)))
    _, t = stage.place(rank)
    boxes = shard_boxes(layout.full_shape, layout.style, t, stage.tp, layout.parts)
    return torch.cat([tensor.detach()[box.slices] for box in boxes])


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", some(FACTORIES, 0, 1, 2, 4))
def test_every_rank_has_the_values_of_an_ordinary_build(name: str, precision: str) -> None:
    factory, args, blocks = FACTORIES[name]
    workload = workload_of(factory, args, precision=precision)
    state = torch.get_rng_state()
    for tp in (1, 2):
        program = program_of(blocks=blocks, pp=2, tp=tp, tied=name == "tied")
        whole = build_owner(workload, "m", HERE, trainable_blocks(program))
        for rank in range(2 * tp):
            model = local_model(workload, program, rank)
            assert model.notes == []
            assert differences(model, whole, program, rank) == []
            tied = [tie.name for tie in model.ties]
            assert tied == (["m.0.before.model.embed_tokens.weight"] if name == "tied" else [])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("seeds", "seeds a generator between two draws"),
        ("looks", "looks at random numbers"),
        ("undefined", "undefined"),
        ("hides", "keeps tensors that no module has as an attribute"),
    ],
)
def test_what_cannot_be_deferred_is_built_whole_and_says_why(name: str, reason: str) -> None:
    workload = workload_of(f"tests.deferred_models:{name}", {})
    program = program_of(blocks=3, pp=3, tp=1)
    whole = build_owner(workload, "m", HERE, trainable_blocks(program))
    for rank in range(3):
        model = local_model(workload, program, rank)
        assert differences(model, whole, program, rank) == []
        if name in ("hides", "undefined") and rank > 0:
            assert model.notes == []  # the block in question is not this rank's
            continue
        (note,) = model.notes
        assert "modules.m: " in note
        assert reason in note
        assert "240 B" in note


def test_a_factory_that_fails_is_the_users_error() -> None:
    workload = workload_of("mmplan.zoo.towers:vision", {"blocks": 4, "width": "wide"})
    with pytest.raises(InvalidInputError, match=r"modules\.m\.factory"):
        local_model(workload, program_of(blocks=4, pp=2, tp=1), 0)


def saved(kind: str, folder: Path, module: nn.Module, names: dict[str, str]) -> str:
    """Weights under the original model's names: one file, or a folder of several."""
    state = {names.get(k, k): v.clone().contiguous() for k, v in module.state_dict().items()}
    if kind == "file":
        save_file(state, folder / "weights.safetensors")
        return str(folder / "weights.safetensors")
    specs = [TensorSpec(name=k, dtype=v.dtype, shape=tuple(v.shape)) for k, v in state.items()]
    files = write_weights(
        folder / "model.safetensors", specs, state.__getitem__, max_file_bytes=20_000
    )
    assert len(files) > 3
    return str(folder)


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("name", ["tied", "qwen3", "siglip"])
def test_initial_weights_come_in_slices(name: str, kind: str, tmp_path: Path) -> None:
    factory, args, blocks = FACTORIES[name]
    program = program_of(blocks=blocks, pp=2, tp=2, tied=name == "tied")
    trains = trainable_blocks(program)
    other: Any = build_owner(workload_of(factory, args, precision="fp64"), "m", HERE, trains)
    with torch.no_grad():
        for index, parameter in enumerate(other.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 97 - index)
    path = saved(kind, tmp_path, other, other.source_names)
    workload = workload_of(factory, args, init=path)
    whole = build_owner(workload, "m", HERE, trains)
    first = next(whole.parameters())
    assert torch.equal(first, next(other.parameters()).float())
    for rank in range(4):
        model = local_model(workload, program, rank)
        assert model.notes == []
        assert differences(model, whole, program, rank) == []


def test_wrong_initial_weights_are_refused_on_every_rank(tmp_path: Path) -> None:
    factory, args, blocks = FACTORIES["towers"]
    program = program_of(blocks=blocks, pp=2, tp=1)
    module = build_owner(workload_of(factory, args), "m", HERE, trainable_blocks(program))
    state = {k: v.clone() for k, v in module.state_dict().items()}
    last = [k for k in state if k.startswith("3.")][-1]
    state[last] = torch.zeros(3, 3, 3)
    save_file(state, tmp_path / "w.safetensors")
    workload = workload_of(factory, args, init=str(tmp_path / "w.safetensors"))
    for rank in range(2):
        with pytest.raises(InvalidInputError, match=r"modules\.m\.init: .* has shape \[3, 3, 3\]"):
            local_model(workload, program, rank)


PEAKS = """
import gc, json, sys
from pathlib import Path
from tests import test_deferred as t
from mmlaunch.model.whole_modules import build_owner, trainable_blocks

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

def build(pp, tp=1, init=None, whole=False, blocks=8, width=2048):
    args = {"blocks": blocks, "width": width}
    workload = t.workload_of("tests.deferred_models:big", args, init=init)
    program = t.program_of(blocks=blocks, pp=pp, tp=tp)
    if whole:
        return build_owner(workload, "m", t.HERE, trainable_blocks(program))
    model = t.local_model(workload, program, 1)
    assert model.notes == []
    return model

build(2, blocks=2, width=8)  # what building imports is not what it holds
peaks = []
for job in json.loads(sys.argv[1]):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is now
    before = status("VmRSS")
    kept = build(**job)
    peaks.append(status("VmHWM") - before)
    del kept
print(json.dumps(peaks))
"""


def added_peaks_bytes(*jobs: dict[str, Any]) -> list[int]:
    """Growth of a process's largest resident size while it builds 8 blocks of 16 MiB, by job."""
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, json.dumps(jobs)],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the peak")
def test_a_rank_never_holds_the_blocks_of_others(tmp_path: Path) -> None:
    """128 MiB as a whole; a rank keeps one block, or a half of each of four."""
    state = {f"{k}.up.weight": torch.zeros(2048, 2048) for k in range(8)}
    state |= {f"{k}.up.bias": torch.zeros(2048) for k in range(8)}
    init = saved("file", tmp_path, Stored(state), {})
    whole, block, halves, stored_block, stored_halves = added_peaks_bytes(
        {"pp": 8, "whole": True},
        {"pp": 8},
        {"pp": 2, "tp": 2},
        {"pp": 8, "init": init},
        {"pp": 2, "tp": 2, "init": init},
    )
    assert whole > 120 * MIB
    assert block < 50 * MIB  # and one tensor that is drawn
    assert halves < 85 * MIB  # and a whole tensor or two
    # Pages of the file that were read count as the process's until the system needs them.
    assert stored_block < 50 * MIB
    assert stored_halves < 85 * MIB


class Stored(nn.Module):
    """Something with a state."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self._state = state

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._state
