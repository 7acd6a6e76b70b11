"""Records of real runs: the report they give is the expected one, and a live controller would have known the same."""

import json
from pathlib import Path

import pytest

from sdcrun.core import decide
from sdcrun.core.types import Config
from sdcrun.report import command, store

FOLDERS = sorted(path.parent for path in (Path(__file__).parent.parent / "replays").glob("*/events.jsonl"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_report_of_a_recorded_run_is_the_expected_one(folder):
    report, _ = command.load(folder)
    assert report == json.loads((folder / "expected.json").read_text())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_controller_restarted_after_any_event_knows_the_same(folder):
    config = Config.from_json(store.read_job(folder)["config"])
    events = list(store.read_events(folder))
    whole, state = command.load(folder)
    for cut in range(0, len(events), max(1, len(events) // 10)):
        live = decide.initial(config)
        for event in events[:cut]:
            decide.fold(live, event)
        for event in events[cut:]:
            live, _ = decide.apply(live, event)
        decide.finish(live)
        assert live.ledger.ordered() == state.ledger.ordered()
        assert live.ledger.strikes(live.device_key) == state.ledger.strikes(state.device_key)


def test_there_are_records():
    wanted = {"clean", "weight-bit", "nan-gradient", "wrong-gradient", "three-faults"}
    assert {folder.name for folder in FOLDERS} >= wanted
