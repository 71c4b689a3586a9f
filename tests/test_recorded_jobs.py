"""The simulator against recorded production jobs of others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.recorded import JOBS, RecordedPipeline, recorded_computes


@pytest.mark.parametrize("job", JOBS)
def test_steps_of_recorded_computes_take_as_long_as_recorded(job: str) -> None:
    computes, steps_s = recorded_computes(job)
    pipeline = RecordedPipeline(*computes.shape[2:])
    simulated_s = [pipeline.simulated_s(step) for step in computes[::8]]
    np.testing.assert_allclose(simulated_s, steps_s[::8], rtol=0.01)


def test_equal_computes_take_what_the_formula_of_1f1b_says() -> None:
    replicas, stages, microbatches = 2, 3, 5
    computes = np.empty((2, replicas, stages, microbatches))
    computes[0], computes[1] = 1.0, 2.0
    step_s = RecordedPipeline(replicas, stages, microbatches).simulated_s(computes)
    assert step_s == (microbatches + stages - 1) * 3.0
