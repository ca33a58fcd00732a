"""A batch split over two processes has the gradient of one process, also for a mixture of experts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.learner.test_learner import largest_difference
from two_ranks import CASES, SHARES, results, results_of_experts


@pytest.mark.fault
def test_two_ranks_compute_the_same_step_as_one(tmp_path):
    script = Path(__file__).parents[2] / "two_ranks.py"
    files = [tmp_path / str(rank) for rank in range(2)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), str(file)],
            stderr=subprocess.PIPE,
            env=environment,
        )
        for rank, file in enumerate(files)
    ]
    expected, of_experts = results(slice(0, 9)), results_of_experts(slice(0, 9))
    for process in processes:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error.decode()
    for file in files:
        both = torch.load(file)
        for share in SHARES:
            found = both[share]
            for case in CASES:
                assert largest_difference(found[case][0], expected[case][0]) < 1e-10, (share, case)
                assert found[case][1:] == pytest.approx(expected[case][1:], abs=1e-10)
            assert largest_difference(found["weights"], expected["weights"]) < 1e-10
            assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-9)
            assert found["nothing"] == {}
            experts = found["experts"]
            for what, most in (("gradient", 1e-10), ("weights", 1e-10), ("replayed", 1e-6)):
                # what is replayed is weighed by a softmax in float32, as in transformers' routers
                assert largest_difference(experts[what], of_experts[what]) < most, (share, what)
            assert experts["numbers"] == pytest.approx(of_experts["numbers"], abs=1e-10)
