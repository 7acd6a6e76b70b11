"""A controller whose decisions the events spell out: `{"do": [[kind, data], ...]}` in their data are its actions."""

import sys

from sdcrun.core.types import Action
from sdcrun.runner.controller import main


class Obedient:
    """Stands in for `sdcrun.core.decide`; trips over an event that says so."""

    def initial(self, config):
        return []

    def apply(self, state, event):
        if event.data.get("trip"):
            raise KeyError("tripped")
        return state + [event.seq], [Action(kind, data) for kind, data in event.data.get("do", ())]

    def tick(self, state, now):
        return state, []


if __name__ == "__main__":
    sys.exit(main(Obedient()))
