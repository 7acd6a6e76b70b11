"""A client process: runs a script with `link`, a client of the job's controller, and `emit(n)` at hand."""

import json
import os
import signal
import sys
import time

from sdcrun.core.types import Config
from sdcrun.wire.link import Link
from sdcrun.wire.runtime import runtime_address

if __name__ == "__main__":
    # As scripts do whose output may go into a pipe that ends early: no connection of ours may end them.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    config = Config.from_json(json.loads(os.environ["SDCRUN_CONFIG"]))
    link = Link(config, sys.argv[2], runtime_address(sys.argv[1]))
    names = {
        "link": link,
        "emit": lambda n: link.emit("limit", {"text": str(n), "check": None}, 0),
        "time": time,
        "os": os,
        "sys": sys,
    }
    exec(sys.argv[3], names)
