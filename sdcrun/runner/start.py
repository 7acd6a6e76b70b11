"""First code of each child of the supervisor: die with it, then become torchrun's agent or the controller.

Run as a file (`python start.py ROLE ARGUMENTS`), so that nothing of sdcrun is imported into torchrun's agent. The
supervisor's wishes come in the variable SDCRUN_START, which is removed before anything else runs:
{parent: pid, pet: {PET_*: value}, report: descriptor, linger: [descriptor to read, to write]}; descriptors may be -1.
"""

import ctypes
import json
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
LINGER_SECONDS = 10.0


def die_with_parent(parent):
    """Have the kernel send SIGTERM when the supervisor ends, however it ends; end now if it already has."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


def agent(pet, report, linger):
    """torchrun's own main. `pet` are defaults for its parser only: the script does not see them."""
    os.environ["SDCRUN_AGENT"] = str(os.getpid())
    sys.argv[0] = "torchrun"
    import torch.distributed.run as launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parse_args = launcher.parse_args

    def parse_with_defaults(args):
        before = {name: os.environ.pop(name) for name in pet if name in os.environ}
        os.environ.update(pet)
        try:
            return parse_args(args)
        finally:
            for name in pet:
                del os.environ[name]
            os.environ.update(before)

    launcher.parse_args = parse_with_defaults
    handlers = watch_rendezvous(report)
    try:
        code = launcher.main()
        # What is in `handlers` lives on, with it the store that this agent may serve.
        if handlers and linger[0] >= 0:
            wait_for_others(*linger)
        return code
    except ChildFailedError as error:
        tell_failures(error, report)
        raise
    except SignalException as error:
        # What torchrun makes of a signal is thirty lines of traceback a node, under which all else is lost.
        print(f"torchrun: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not handlers:
            # Before any rank: what stands in the last line of a long traceback comes first.
            print(f"[sdcrun] torchrun cannot start: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise


def watch_rendezvous(report):
    """Have torchrun's rendezvous tell its round to the ranks; returns the list that will hold its handler.

    Ranks need a number that all of them share and that no earlier attempt had: torchrun's restart count is each agent's
    own, and stays the same when nodes join. A backend that has no rounds leaves the variable unset. An empty line on
    `report` tells the supervisor that this agent has come so far: its ranks may be gone before anybody has seen them.
    """
    import torch.distributed.elastic.rendezvous.registry as registry

    make, made = registry.get_rendezvous_handler, []

    def make_and_watch(parameters):
        handler = make(parameters)
        made.append(handler)
        next_rendezvous = handler.next_rendezvous

        def watched():
            information = next_rendezvous()
            if "SDCRUN_RUN" in os.environ:
                state = getattr(getattr(handler, "_state_holder", None), "state", None)
                os.environ["SDCRUN_ROUND"] = str(getattr(state, "round", ""))
            tell(report, b"")
            return information

        handler.next_rendezvous = watched
        return handler

    registry.get_rendezvous_handler = make_and_watch
    return made


def wait_for_others(read, write):
    """Of several agents on one host one serves the store in which they meet: it ends after the others are done with it.

    All agents hold both ends of one pipe; it is at its end when each has closed the end to write, or died.
    """
    os.close(write)
    select.select([read], [], [], LINGER_SECONDS)


def tell_failures(error, report):
    """One JSON line for the supervisor: which ranks failed, in the order in which they did."""
    failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    rows = [
        {"rank": rank, "local_rank": f.local_rank, "pid": f.pid, "exit": f.exitcode, "at": f.timestamp}
        for rank, f in failures[:64]
    ]
    tell(report, json.dumps(rows).encode())


def tell(report, line):
    """One line for the supervisor, if it is there to read it: what it says is on stderr, too, by torchrun."""
    try:
        if report >= 0:
            os.write(report, line + b"\n")
    except OSError:
        pass


def controller():
    """The controller of this node, from the same installation as this file."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.append(root)
    sys.argv[0] = "sdcrun-controller"
    import runpy

    runpy.run_module("sdcrun.runner.controller", run_name="__main__")


def main():
    """Dispatch on the role in argv[1]."""
    wishes = json.loads(os.environ.pop("SDCRUN_START"))
    die_with_parent(wishes["parent"])
    # The folder of this file holds sdcrun's modules, not the user's; torchrun's console script has none of ours either.
    del sys.path[0]
    role = sys.argv.pop(1)
    return agent(wishes["pet"], wishes["report"], wishes["linger"]) if role == "torchrun" else controller()


if __name__ == "__main__":
    sys.exit(main())
