"""How the shim gets into a process, and stays out of those that hold no rank."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sdcrun

SITE = Path(sdcrun.__file__).parent / "shim" / "site"
RANK = {"SDCRUN_RUN": "job", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x",
        "SDCRUN_CONFIG": "{}", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}  # fmt: skip

REPORT = """
import json, sys
state = {"torch": "torch" in sys.modules, "finder": any(type(f).__name__ == "_AfterTorch" for f in sys.meta_path),
         "path": sys.path, "site": getattr(sys.modules.get("sitecustomize"), "__file__", None)}
"""


def python(code, *, env=None, paths=(), flags=(), **kwargs):
    """Runs `code` with our site first on PYTHONPATH; returns the JSON of its last line of stdout, and stderr."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SDCRUN_", "TORCHELASTIC"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(SITE), *map(str, paths)]), **(env or {})}
    done = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True,
        timeout=300, **kwargs,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(
    ("env", "armed"),
    [
        ({}, False),
        ({"SDCRUN_RUN": "job"}, False),
        (RANK, True),
        ({**RANK, "SDCRUN_DISABLE": "1"}, False),
        ({**RANK, "SDCRUN_OWNER": "1"}, False),
    ],
    ids=["no run", "the agent", "a rank", "disabled", "child of a rank"],
)
def test_armed_only_where_a_rank_may_be(env, armed):
    state, errors = python(REPORT + "print(json.dumps(state))", env=env)
    assert state["finder"] is armed
    assert state["torch"] is False
    assert str(SITE) not in state["path"]
    assert errors == ""


def test_chains_to_the_hidden_sitecustomize(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.theirs = 'seen'\n")
    state, _ = python(
        REPORT + "state['theirs'] = theirs; print(json.dumps(state))", env=RANK, paths=[tmp_path]
    )
    assert state["theirs"] == "seen" and state["finder"]
    assert state["site"] == str(tmp_path / "sitecustomize.py")


def test_hidden_sitecustomize_may_import_torch_or_raise(tmp_path):
    body = "from torch.nn.parallel import DistributedDataParallel as D; import torch\n"
    body += "import builtins; builtins.name = D._ddp_init_helper.__code__.co_filename\nraise ValueError('theirs')\n"
    (tmp_path / "sitecustomize.py").write_text(body)
    state, errors = python(REPORT + "state['name'] = name; print(json.dumps(state))", env=RANK, paths=[tmp_path])
    assert state["name"].endswith("patches/ddp.py")
    assert "ValueError: theirs" in errors and not state["finder"]


def test_patches_keep_signatures_identities_and_the_loader():
    code = """
    import inspect, json, torch
    from torch.nn.parallel import DistributedDataParallel as D
    from torch.optim.optimizer import Optimizer
    import torch.distributed.optim
    print(json.dumps({
        "ddp": "device_ids" in inspect.signature(D.__init__).parameters,
        "forward": str(inspect.signature(D.forward)),
        "adamw": "fused" in inspect.signature(torch.optim.AdamW).parameters,
        "backward": list(inspect.signature(torch.autograd.backward).parameters)[:3],
        "patched": D._ddp_init_helper.__code__.co_filename,
        "loader": "exec_module" in vars(torch.__spec__.loader),
        "numpy": "numpy" in __import__("sys").modules,
    }))
    """
    state, errors = python(code, env=RANK)
    assert state["ddp"] and state["adamw"]
    assert state["forward"] == "(self, *inputs, **kwargs)"
    assert state["backward"] == ["tensors", "grad_tensors", "retain_graph"]
    assert state["patched"].endswith("patches/ddp.py")
    assert not state["loader"]
    assert errors == ""


def test_random_numbers_and_default_state_are_untouched_by_the_patches():
    code = """
    import hashlib, json, random, torch
    torch.manual_seed(3); random.seed(3)
    m = torch.nn.Linear(4, 4); o = torch.optim.AdamW(m.parameters())
    for _ in range(3):
        o.zero_grad(); m(torch.randn(2, 4)).sum().backward(); o.step()
    state = [hashlib.sha256(repr(p.tolist()).encode()).hexdigest() for p in m.parameters()]
    print(json.dumps([state, torch.rand(3).tolist(), random.random(), torch.get_num_threads(),
                      torch.is_grad_enabled(), list(torch.optim.AdamW.__dict__)]))
    """
    with_shim, _ = python(code, env=RANK)
    without, _ = python(code, env={"OMP_NUM_THREADS": "1"})
    assert with_shim == without


def test_children_of_a_claimed_rank_are_inert():
    code = """
    import json, multiprocessing, os, subprocess, sys, torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as D
    if __name__ == "__main__":
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        D(torch.nn.Linear(2, 2))
        look = "import sys, json; print(any(type(f).__name__ == '_AfterTorch' for f in sys.meta_path))"
        child = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout.strip()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            from sdcrun.shim import runtime
            os.write(writer, str(runtime.CURRENT.active).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        print(json.dumps([os.environ["SDCRUN_OWNER"] == str(os.getpid()), child, os.read(reader, 10).decode()]))
    """
    state, _ = python(code, env=RANK)
    assert state == [True, "False", "False"]


def test_a_broken_shim_leaves_the_script_alone():
    state, errors = python("import torch; print(1)", env={**RANK, "SDCRUN_CONFIG": "{not json"})
    assert state == 1
    assert errors.count("[sdcrun] this rank is not guarded") == 1
