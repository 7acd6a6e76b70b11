"""The full matrix: each training loop alone on three and four ranks, clean and with each fault. Minutes, not seconds.

    pytest tests/integration/matrix.py
"""

import ast
import functools

import pytest
from harness import LOOPS, differences, launch
from test_idioms import assert_failed_alike, assert_untouched, with_faults

pytestmark = pytest.mark.timeout(2000)
FILES = ("optimizers", "perturbed", "ddp_options", "ddp_modules", "compiled", "strange", "surroundings", "workers")
EVERY_STEP = ("--sdc-weights-every", "1", "--sdc-audit-every", "1")
FAULTS = {
    "nan": ("gradient:rank=1,step=3,kind=nan", "nonfinite"),
    "inf": ("gradient:rank=0,step=1,kind=inf", "nonfinite"),
    "weight": ("weight:rank=1,step=3,kind=bitflip,bit=14", "weights"),
    "gradient": ("gradient:rank=2,step=3,kind=bitflip,bit=14", "replay"),
}
# Loops in which a fault at these steps is legally not met: fewer steps, other groups, or no rank-wide lockstep.
NOT_FAULTED = {
    "small_group", "two_groups", "join_initial_world", "join_effective_world", "join_context", "grad_scaler",
    "grad_scaler_overflow", "grad_scaler_one_rank_overflows", "hook_custom", "clip_gradients", "lbfgs",
    "sparse_gradients",
}  # fmt: skip
RANK_STATE = {  # loops in which something that belongs to one rank is part of the state that is compared
    "batchnorm_buffers_broadcast", "batchnorm_buffers_local", "evaluate_everywhere", "weights_loaded_part_way",
    "odd_parameters", "ignored_parameters", "deep_copied", "saved_to_memory", "compiled_in_place",
    "compiled_outside_eager", "deterministic_algorithms",
}  # fmt: skip
# A vote waits for as many steps of the optimizer as the window before had; this loop has had two, once.
ONE_VOTE_LATER = {("step_without_backward", "weight")}
CLAMPED = {("user_hooks", "inf")}  # a hook of the script's makes a finite number of it: only a replay can tell
IN_JOIN = {"join_initial_world", "join_effective_world"}  # all of it: nothing can be checked, and the report says so
UNAUDITED = {"ignored_parameters"}  # loops that the audit refuses, with its reason


def loops_of(file):
    """Names in the list LOOPS of a file, read without importing it."""
    tree = ast.parse((LOOPS / f"{file}.py").read_text())
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "LOOPS"]
    return [element.id for element in values[0].elts]


LOOPS_OF = {loop: file for file in FILES for loop in loops_of(file)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    @functools.cache
    def run(file, ranks, backend="aot_eager"):
        folder = tmp_path_factory.mktemp("plain")
        return launch(folder, LOOPS / f"{file}.py", ranks=ranks, env={"COMPILE_BACKEND": backend}, timeout=900)

    return run


@pytest.mark.parametrize("file", FILES)
def test_the_loops_are_deterministic_by_themselves(file, plain, tmp_path):
    again = launch(tmp_path, LOOPS / f"{file}.py")
    assert again.exit_code == 0 and differences(plain(file, 3), again) == []


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("loop", LOOPS_OF)
def test_clean(loop, ranks, plain, tmp_path):
    guarded = launch(tmp_path, LOOPS / f"{LOOPS_OF[loop]}.py", loop, ranks=ranks, sdcrun=EVERY_STEP)
    wanted = plain(LOOPS_OF[loop], ranks)
    assert guarded.exit_code == 0 and guarded.leftovers == [], guarded.tail()
    assert {rank: guarded.lines[loop, rank] for rank in range(ranks)} == {
        rank: wanted.lines[loop, rank] for rank in range(ranks)
    }
    assert [f["text"] for f in guarded.findings if f["verdict"] != "amp-overflow"] == []
    assert guarded.report["unguarded"] == []
    assert (guarded.report["steps"]["committed"] == 0) == (loop in IN_JOIN)
    assert any("inside join()" in limit for limit in guarded.report["limits"]) == ("join" in loop)


@pytest.mark.parametrize("ranks", [3, 4])
def test_compiled_by_inductor(ranks, plain, tmp_path):
    backend = {"COMPILE_BACKEND": "inductor"}
    guarded = launch(tmp_path, LOOPS / "compiled.py", ranks=ranks, sdcrun=EVERY_STEP, env=backend, timeout=900)
    assert_untouched(plain("compiled", ranks, "inductor"), guarded)
    assert guarded.findings == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("loop", [loop for loop in LOOPS_OF if loop not in NOT_FAULTED])
def test_fault(loop, fault, plain, tmp_path):
    text, check = FAULTS[fault]
    rank, step = int(text.split("rank=")[1][0]), int(text.split("step=")[1][0])
    outcome = launch(tmp_path, LOOPS / f"{LOOPS_OF[loop]}.py", loop, sdcrun=[*EVERY_STEP, *with_faults(text)])
    (injected,) = outcome.report["injected"]
    if not injected["fired"]:
        assert outcome.exit_code == 88, outcome.tail()
        pytest.skip("the loop has no such step")
    assert outcome.exit_code == 0 and outcome.leftovers == [], outcome.tail()
    if loop in UNAUDITED and check == "replay":
        assert "went off" in injected["by_design_unseen"] and outcome.findings == []
        return
    accused = [f for f in outcome.findings if f["rank"] is not None]
    seen = step + ((loop, fault) in ONE_VOTE_LATER)
    assert {(f["step"], f["rank"]) for f in accused} == {(seen, rank)}, outcome.tail()
    wanted = "replay" if (loop, fault) in CLAMPED else check
    assert wanted in {f["check"] for f in accused} and injected["named_right"]
    lines = [outcome.lines[loop, r] for r in range(3)]
    assert len({len(line["losses"]) for line in lines}) == 1 or loop in RANK_STATE or "rank_0" in loop
    if check == "weights" and seen == step:
        assert lines == [plain(LOOPS_OF[loop], 3).lines[loop, r] for r in range(3)]
    elif loop not in RANK_STATE:
        assert len({line["weights"] for line in lines}) == 1


@pytest.mark.parametrize(
    "ending",
    ["raises", "sys_exit", "os_exit", "killed", "aborts", "interrupted", "everyone_exits_0", "everyone_exits_7",
     "everyone_os_exits_0", "end"],
)  # fmt: skip
def test_endings(ending, tmp_path):
    plain = launch(tmp_path / "plain", LOOPS / "exits.py", ending)
    guarded = launch(tmp_path / "guarded", LOOPS / "exits.py", ending, sdcrun=EVERY_STEP)
    assert_failed_alike(plain, guarded)
