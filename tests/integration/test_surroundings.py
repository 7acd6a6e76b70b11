"""What goes on in a script beside its guarded module."""

import pytest
from harness import LOOPS, launch

pytestmark = pytest.mark.slow


def test_a_thread_that_trains_before_the_module_is_wrapped_leaves_the_run_guarded(tmp_path):
    outcome = launch(tmp_path, LOOPS / "surroundings.py", "side_thread_trains",
                     sdcrun=("--sdc-audit-every", "1", "--sdc-weights-every", "1"))  # fmt: skip
    assert outcome.exit_code == 0, outcome.tail()
    report = outcome.report
    assert report["guarded_ranks"] == 3 and report["unguarded"] == [] and report["findings"] == []
    assert report["checks"]["replay"]["run"] > 0 and report["checks"]["replay"]["off_reason"] is None
    assert any("parameters that no guarded module has" in text for text in report["limits"])
