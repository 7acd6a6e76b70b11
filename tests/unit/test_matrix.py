"""The matrix of a campaign: what a file's entries become, and what is wrong with a wrong one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdcrun import campaignfile
from sdcrun.core import faultspec, matrix
from sdcrun.core.matrix import MatrixError
from sdcrun.errors import UsageError

CONFIGS = Path(__file__).parents[2] / "configs"


def keys(*entries, **top):
    return [cell.key for cell in matrix.read({"faults": list(entries), **top}).cells]


def test_lists_are_multiplied_in_the_order_in_which_they_are_written():
    assert keys({"site": ["gradient", "weight"], "bit": [3, 30], "rank": 1}) == [
        "gradient:rank=1,bit=3 once", "gradient:rank=1,bit=30 once",
        "weight:rank=1,bit=3 once", "weight:rank=1,bit=30 once",
    ]  # fmt: skip


def test_ranges_all_bits_and_kinds_without_a_bit():
    assert len(keys({"site": "gradient", "bit": "all"})) == 32
    assert keys({"site": "gradient", "bit": "30-31"}) == ["gradient:bit=30 once", "gradient:bit=31 once"]
    assert keys({"site": "gradient", "kind": ["bitflip", "nan"], "bit": [1, 2]}) == [
        "gradient:kind=bitflip,bit=1 once", "gradient:kind=bitflip,bit=2 once", "gradient:kind=nan once",
    ]  # fmt: skip


def test_equal_cells_of_two_entries_are_one():
    assert len(keys({"site": "gradient", "bit": [1, 2]}, {"site": "gradient", "bit": [2, 3]})) == 3


@pytest.mark.parametrize(("persistence", "times"), [
    ("once", "step=20"), ("always", "step=20-23"), ("p=0.5", "step=20-23,p=0.5"), ("every=2", "step=20-23,every=2"),
])  # fmt: skip
def test_a_cell_fires_within_its_slot_alone(persistence, times):
    cell = matrix.read({"faults": [{"site": "gradient", "rank": 1, "persistence": persistence}]}).cells[0]
    assert cell.spec(20, 4) == f"gradient:rank=1,{times}"
    spec = faultspec.parse(cell.spec(20, 4))
    assert not any(faultspec.fires(spec, step, 1, 0) for step in (*range(20), *range(24, 60)))


@given(warmup=st.integers(4, 100), horizon=st.integers(1, 50), slot=st.integers(0, 1000))
def test_slots_follow_each_other_without_a_gap(warmup, horizon, slot):
    plan = matrix.read({"faults": [{"site": "gradient"}], "warmup": warmup, "horizon": horizon})
    assert plan.first(0) == warmup and plan.last(slot) + 1 == plan.first(slot + 1)
    assert plan.last(slot) - plan.first(slot) + 1 == horizon


@pytest.mark.parametrize(("content", "part"), [
    ([], "must hold"),
    ({"faults": []}, "at least one entry"),
    ({"faults": [{"bit": 3}]}, "entry 1: must be a mapping with a site"),
    ({"faults": [{"site": "gradiant"}]}, "did you mean 'gradient'"),
    ({"faults": [{"site": "gradient"}, {"site": "gradient", "bits": 3}]}, "entry 2: unknown key 'bits' (did you mean"),
    ({"faults": [{"site": "gradient", "step": 3}]}, "unknown key 'step'"),
    ({"faults": [{"site": "gradient", "bit": []}]}, "bit: an empty list"),
    ({"faults": [{"site": "gradient", "bit": {"a": 1}}]}, "bit: must be a value or a list"),
    ({"faults": [{"site": "gradient", "bit": "9-3"}]}, "from the lower to the higher"),
    ({"faults": [{"site": "gradient", "bit": 99}]}, "bits are 0 to 63"),
    ({"faults": [{"site": "gradient", "persistence": "sometimes"}]}, "not once, always"),
    ({"faults": [{"site": "gradient", "persistence": "p=7"}]}, "a chance is above 0"),
    ({"faults": [{"site": "gradient"}], "warmup": 1}, "warmup: must be a whole number from 4"),
    ({"faults": [{"site": "gradient"}], "horizn": 3}, "did you mean 'horizon'"),
])  # fmt: skip
def test_what_is_wrong_is_named(content, part):
    with pytest.raises(MatrixError, match=".*") as error:
        matrix.read(content)
    assert part in str(error.value)


def test_files_of_the_repository_are_matrices_and_a_broken_one_says_where(tmp_path):
    small, full = (campaignfile.read(str(CONFIGS / name)) for name in ("campaign.yaml", "campaign-full.yaml"))
    assert 30 < len(small.cells) < 60 < len(full.cells)
    for site in ("activation", "saved", "gradient", "reduced", "allreduce", "weight", "optimizer"):
        bits = {cell.get("bit") for cell in full.cells if cell.site == site}
        assert {str(bit) for bit in range(32)} <= bits, site
    broken = tmp_path / "broken.yaml"
    broken.write_text("faults:\n  - {site: gradient\n")
    with pytest.raises(UsageError, match=r"broken.yaml:\d+: not valid YAML"):
        campaignfile.read(str(broken))
    with pytest.raises(UsageError, match="cannot be read"):
        campaignfile.read(str(tmp_path / "none.yaml"))
