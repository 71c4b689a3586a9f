"""A vocabulary cut over tensor-parallel groups: embedding, logits and cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.comm.strict import StrictWorld
from mmlaunch.measure.timing import HeldTensors
from mmlaunch.model.tensor_parallel import GroupSums, block_plan, shard_block, sums_of
from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError
from mmplan.profiling.flow import TaskFlow
from mmplan.proof.tp_states import tp_states
from mmplan.ragged import Ragged
from mmplan.schema.workload import Workload, resolve_tasks
from mmplan.zoo import decoder
from mmplan.zoo.losses import TokenCrossEntropy, token_cross_entropy
from tests.matrix_models import Words
from tests.mixed_tp_cases import MIXED, random_case
from tests.programs import trained_as
from tests.row_texts import MODELS, VOCAB, TextCase
from tests.verification import HERE, TOLERANCE, verify_in_process
from tests.zoo_tp import Meeting, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "case",
    [
        TextCase(tp=4),
        pytest.param(TextCase(tp=2, pp=2, dp=2, split=True), marks=pytest.mark.slow),
        pytest.param(TextCase(model="qwen3", ragged=True), marks=pytest.mark.slow),
        pytest.param(TextCase(recompute="full"), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_rank_has_all_logits(
    case: TextCase, rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows cut too: tests/test_row_cuts.py has more cases."""
    sizes: list[int] = []
    sound = TokenCrossEntropy.of_shard

    def of_shard(self: Any, tokens: Any, gather: Any, logits: Any, *inputs: Any) -> Tensor:
        sizes.append((logits.values if isinstance(logits, Ragged) else logits).shape[-1])
        return sound(self, tokens, gather, logits, *inputs)

    monkeypatch.setattr(TokenCrossEntropy, "of_shard", of_shard)
    world = StrictWorld(case.plan().devices)
    verdict = verify_in_process(case.plan(), case.workload(rows=rows), world=world)
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]
    assert set(sizes) == {VOCAB // case.tp, -(-VOCAB // case.tp)}
    assert len(sizes) == case.k * case.tp * case.dp


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        pytest.param("3 ranks: tp 2 and tp 1", 1, marks=pytest.mark.slow),
        ("2 ranks: tp 2 and dp 2", 0),
        pytest.param("4 ranks: tp 4, tp 2 and dp 3", 1, marks=pytest.mark.slow),
    ],
)
def test_runs_of_mixed_degrees_equal_one_process(name: str, zero: int) -> None:
    case = replace(MIXED[name], factories={**MIXED[name].factories, "v": "words"})
    verdict = verify_in_process(case.plan(), case.workload(zero=zero))
    assert not verdict.differences, verdict.differences[:5]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_runs_of_any_slices_equal_one_process(seed: int) -> None:
    case = random_case(seed, crowded=bool(seed % 2))
    case = replace(case, factories={**case.factories, "v": "words"})
    verdict = verify_in_process(case.plan(), case.workload(zero=seed % 2))
    assert not verdict.differences, verdict.differences[:5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [6, 0])
def test_the_sharded_loss_is_the_whole_one(dtype: torch.dtype, rows: int) -> None:
    """Of 7 tokens 3 ranks have 2, 2 and 3; the last two are masked, as padding of a table is."""
    torch.manual_seed(0)
    whole = torch.randn(rows, 7, dtype=dtype)
    whole[:, 5:] = -math.inf
    labels = torch.tensor([0, 4, -100, 2, 3, 1])[:rows]
    loss, factor = token_cross_entropy(shift=False), torch.tensor(0.3, dtype=torch.float64)
    wide = whole.double() if dtype == torch.float64 else whole.float()
    wide = wide.requires_grad_()
    expected = loss(wide[None], labels[None])
    (expected * factor).backward()

    def rank(index: int, meeting: Meeting) -> tuple[Tensor, Tensor]:
        first, end = 7 * index // 3, 7 * (index + 1) // 3
        own = whole[:, first:end].detach().clone().requires_grad_()

        def gather(one: Tensor) -> Tensor:
            return torch.stack(meeting.all_gather(index, one))

        value = loss.of_shard((first, end, 7), gather, own[None], labels[None])
        (value * factor).backward()
        assert own.grad is not None
        return value.detach(), own.grad

    found = run_ranks(3, rank)
    rtol = 1e-12 if dtype == torch.float64 else 1e-2
    for value, _ in found:
        torch.testing.assert_close(value, expected.detach(), rtol=min(rtol, 1e-6), atol=1e-12)
    assert wide.grad is not None
    gradient = torch.cat([grad for _, grad in found], dim=1)
    torch.testing.assert_close(gradient, wide.grad.to(dtype), rtol=rtol, atol=rtol / 10)


def test_a_token_beyond_the_vocabulary_is_met_by_the_loss_and_the_embedding() -> None:
    loss, logits = token_cross_entropy(shift=False), torch.zeros(1, 1, 3)
    for label, tokens in ((7, (4, 7, 7)), (-1, (0, 3, 7))):
        with pytest.raises((IndexError, RuntimeError)):
            loss.of_shard(tokens, lambda one: one[None], logits, torch.tensor([[label]]))
    for index, token in ((1, 7), (0, -1)):
        block = Words()
        shard_block(block, index=index, count=2, comm=Alone(index))
        with pytest.raises(IndexError):
            block.table(torch.tensor([token]))


class Alone:
    """A rank whose group does nothing."""

    def __init__(self, index: int, count: int = 2) -> None:
        self.index, self.count = index, count

    def all_reduce(self, tensor: Tensor) -> None:
        pass

    def gather(self, mine: Tensor) -> list[Tensor]:
        return [torch.zeros_like(mine)] * self.count

    def sum_own(self, parts: Tensor) -> Tensor:
        return torch.zeros_like(parts[self.index])


def _ids(length: int = 6) -> Tensor:
    return torch.zeros(2, length, dtype=torch.int64)


def _llama(**args: Any) -> nn.Sequential:
    return decoder.llama(1, 16, heads=4, vocab=VOCAB, ffn=24, **args)


def test_logits_stay_cut_where_the_block_ends_with_them() -> None:
    for rows in (False, True):
        for hidden in (False, True):
            (block,) = _llama(hidden=hidden)
            found = tp_states(block, (_ids(),), 4, where="llm.0", rows=rows, logits=True)
            assert found.logits
            assert (found.rows is not None) == rows
    assert found.rows is not None
    assert found.rows.summed == ("embed.token",)
    assert "head" in found.rows.whole, "its norm gives all rows to others"
    x = torch.zeros(2, 8, requires_grad=True)
    assert not tp_states(Words(), (x,), 2, where="v.0", logits=True).logits
    with pytest.raises(InvalidInputError, match="looks up tokens that are cut"):
        tp_states(CutIds(), (x,), 2, where="v.0")


class CutIds(Words):
    """Looks up what it counts on its own channels."""

    tp_plan = {"table": "vocab", "head": "colwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        assert inputs[0] is not None
        return self.table((self.head(inputs[0]) > 0).long())


def test_what_cannot_be_cut_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"table has 7 tokens for the 8 ranks"):
        shard_block(Words(), index=0, count=8, comm=Alone(0))
    block = Words()
    block.table.max_norm = 1.0
    with pytest.raises(InvalidInputError, match=r"'table', a Embedding"):
        shard_block(block, index=0, count=2, comm=Alone(0))


def test_the_vocabulary_of_transformers_is_cut_tied_or_not() -> None:
    from mmplan.zoo.hf import causal_lm

    config: dict[str, Any] = MODELS["qwen3"]["args"]["config"]
    for tied in (False, True):
        blocks = causal_lm({**config, "tie_word_embeddings": tied})
        rules = [
            name
            for block in (blocks[0], blocks[-1])
            for name, rule in block_plan(block).items()
            if rule == "vocab"
        ]
        assert rules == ["before.model.embed_tokens", "after.lm_head"]


BIG: dict[str, Any] = {"blocks": 1, "width": 32, "heads": 4, "vocab": 20_500, "ffn": 64}


def _big() -> Workload:
    job = TextCase(length=64).workload(rows=False, precision="fp32")
    spec = job.model_dump(exclude_none=True, mode="json")
    spec["modules"]["llm"]["args"] = BIG
    return Workload.model_validate(spec)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_holds_what_is_counted(tp: int) -> None:
    """Block and loss, from forward to backward, on the CPU and on the meta device."""
    job = _big()
    flow = TaskFlow(job, HERE, resolve_tasks(job)["default"])
    ((block,), shards) = flow.count_module("llm", tp=tp, samples=4), flow.count_shards("next", 4)
    assert shards is not None
    (whole,) = decoder.llama(**BIG)
    index = tp - 1
    shard_block(whole, index=index, count=tp, comm=Alone(index, tp))
    sums = sums_of(whole)
    assert isinstance(sums, GroupSums)
    sums.keeps_logits = True
    ids = torch.randint(0, 20_500, (4, 64))
    first = 20_500 * index // tp
    with HeldTensors([*whole.parameters(), ids]) as held:
        logits = whole(ids)
        token_cross_entropy().of_shard(
            (first, 20_500, 20_500), lambda one: torch.stack([one] * tp), logits, ids
        )
    assert logits.shape[-1] == 20_500 - first
    counted = block.saved_bytes + shards.saved_bytes / tp
    assert counted == pytest.approx(held.num_bytes, rel=0.05)
    # The cut parameters are what the plan says of a rank.
    numbers = sum(p.numel() for p in whole.parameters())
    cut = [p.numel() for n, p in whole.named_parameters() if "norm" not in n]
    assert numbers - sum(cut) == 3 * 32
    assert sum(cut) == pytest.approx((2 * 20_500 * 32 + 4 * 32 * 32 + 3 * 32 * 64) / tp, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [False, True])
def test_a_checkpoint_goes_on_at_another_degree(tmp_path: Path, rows: bool) -> None:
    """Shards of other degrees have other ends."""
    args = {"lr": 0.01, "eps": 1e-4}
    job = TextCase().workload(rows=rows, clip_grad_norm=0.1, zero=1, optimizer_args=args)

    def run(case: TextCase, body: Callable[[Session], Any]) -> Any:
        plan = trained_as(case.plan(), job)

        def entry(transport: Any) -> Any:
            return body(Session(plan=plan, workload=job, folder=HERE, transport=transport))

        return InProcessWorld(case.plan().devices).run(entry)[0]

    def begin(session: Session) -> tuple[Path, float]:
        session.step()
        return session.save(tmp_path), session.step().loss

    path, expected = run(TextCase(tp=2, dp=2), begin)

    def go_on(session: Session) -> float:
        session.load(path)
        return session.step().loss

    for case in (TextCase(tp=4), TextCase(tp=1, pp=2)):
        assert run(case, go_on) == pytest.approx(expected, rel=1e-12)


def test_metrics_take_whole_logits() -> None:
    """In an evaluation; a loss beside them is still what one process computes."""
    metric = {"factory": "mmplan.zoo.metrics:token_accuracy", "inputs": ["llm", "labels"]}
    data = {"factory": "tests.row_texts:texts", "args": {"length": 7, "ragged": False}}
    found: list[dict[str, float]] = []
    for tp in (1, 2):
        case = TextCase(tp=tp)
        job = case.workload(eval={"data": data, "every": 1, "metrics": {"right": metric}})
        plan = trained_as(case.plan(), job)

        def evaluate(transport: Any, plan: Any = plan, job: Workload = job) -> dict[str, float]:
            session = Session(plan=plan, workload=job, folder=HERE, transport=transport)
            session.step()
            return session.run_evaluation()

        found += InProcessWorld(tp).run(evaluate)
    for values in found[1:]:
        assert values == pytest.approx(found[0], rel=1e-12)
